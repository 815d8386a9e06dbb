"""The one-line spelling of a plan: `pp2 dp2 fsdp4 tp2 / 1f1b mb8 / bf16 / recompute=blocks`.

Works on nested dicts with the field names of `Plan`, so that `plan.py` can import it. Tokens stand in any order;
slashes are separators for the eye. The canonical spelling has the sections axes / schedule and batch / precision /
options, leaves defaults out, and always shows at least one axis (`dp1` for a single process) and the precision.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shardwise.errors import ConfigError, PlanError
from shardwise.findings import nearest

_AXES = {
    "pp": "pp",
    "dp": "dp_replicate",
    "dp_replicate": "dp_replicate",
    "fsdp": "dp_shard",
    "dp_shard": "dp_shard",
    "cp": "cp",
    "tp": "tp",
    "ep": "ep",
}
_SPELLED = {"pp": "pp", "dp_replicate": "dp", "dp_shard": "fsdp", "cp": "cp", "tp": "tp", "ep": "ep"}


def axis_word(name: str) -> str:
    """An axis as a shorthand names it, of its field; any other word as it is.

    >>> axis_word("dp_shard"), axis_word("recompute")
    ('fsdp', 'recompute')
    """
    return _SPELLED.get(name, name)


def axis_field(word: str) -> str:
    """The field of an axis, of what a shorthand calls it; any other word as it is.

    >>> axis_field("fsdp"), axis_field("recompute")
    ('dp_shard', 'recompute')
    """
    return _AXES.get(word, word)


_SCHEDULES = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved": "interleaved",
    "interleaved1f1b": "interleaved",
    "interleaved-1f1b": "interleaved",
    "looped-bfs": "looped-bfs",
    "loopedbfs": "looped-bfs",
    "zero-bubble": "zero-bubble",
    "zerobubble": "zero-bubble",
    "interleavedzerobubble": "zero-bubble",
    "zb": "zero-bubble",
    "zb1p": "zero-bubble",
    "zero-bubble-v": "zero-bubble-v",
    "zbvzerobubble": "zero-bubble-v",
    "zbv": "zero-bubble-v",
    "zb-v": "zero-bubble-v",
    "dualpipe-v": "dualpipe-v",
    "dualpipev": "dualpipe-v",
}

_PRECISIONS = ("fp64", "fp32", "bf16", "fp16", "bf16-pure")

_FLAGS: dict[str, tuple[str, Any]] = {
    "seq": ("tensor.sequence", True),
    "loss-parallel": ("tensor.loss", True),
    "tf32": ("tf32", True),
    "compile": ("compile", True),
    "fp8": ("float8.recipe", "tensorwise"),
    "static-graph": ("communication.static_graph", True),
    "find-unused": ("communication.find_unused", True),
    "no-bucket-view": ("communication.bucket_view", False),
}

_COUNTS = {
    "mb": "batch.micro_batches",
    "gbs": "batch.global_size",
    "vs": "schedule.stages_per_rank",
}

_BOOLS = {"true": True, "false": False}


class _Bad(ValueError):
    """A value that its token cannot have: what is needed."""


def _count(text: str, least: int = 1) -> int:
    if not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise _Bad(f"needed an integer of at least {least}, of at most 18 digits")
    if int(text) < least:
        raise _Bad(f"found {int(text)}, needed at least {least}")
    return int(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise _Bad("needed a number") from None


def _name(text: str) -> str:
    if not re.fullmatch(r"[^\s/,=]+", text):
        raise _Bad("needed a name without ',' or '='")
    return text


def _recompute(text: str) -> dict[str, Any]:
    modes = {"none": "none", "blocks": "blocks", "full": "blocks", "ops": "ops", "selective": "ops"}
    if text in modes:
        return {"recompute.mode": modes[text]}
    if text.startswith("every"):
        return {"recompute.mode": "every", "recompute.every": _count(text.removeprefix("every"), 0)}
    if text.endswith("%"):
        return {"recompute.mode": "ratio", "recompute.ratio": _number(text[:-1]) / 100}
    if re.match(r"[-0-9.]", text):
        return {"recompute.mode": "ratio", "recompute.ratio": _number(text)}
    raise _Bad(f"needed none, blocks, ops, every2 (any number) or 50% (any share); {nearest(text, list(modes))}")


def _offload(text: str) -> dict[str, Any]:
    parts = text.split("+")
    if len(set(parts)) != len(parts) or not set(parts) <= {"state", "activations"}:
        raise _Bad("needed state, activations or state+activations")
    return {f"offload.{part}": True for part in parts}


def _reshard(text: str) -> dict[str, Any]:
    return {"communication.reshard_after_forward": _BOOLS[text] if text in _BOOLS else _count(text, 2)}


def _reduce(text: str) -> dict[str, Any]:
    if text not in ("fp32", "bf16", "fp16"):
        raise _Bad("needed fp32, bf16 or fp16")
    return {"communication.reduce_dtype": text}


def _bucket(text: str) -> dict[str, Any]:
    size = _number(text)
    if not 0 < size < float("inf"):
        raise _Bad("needed a size in MiB above 0")
    return {"communication.bucket_mb": size}


def _context(text: str) -> dict[str, Any]:
    if text not in ("ring", "gather", "ulysses"):
        raise _Bad("needed ring, gather or ulysses")
    return {"context.kind": text}


def _balance(text: str) -> dict[str, Any]:
    if text not in ("zigzag", "contiguous"):
        raise _Bad("needed zigzag or contiguous")
    return {"context.balance": text}


def _float8(text: str) -> dict[str, Any]:
    parts = text.split("+")
    dials = {"gather": "float8.all_gather", "emulate": "float8.emulate"}
    recipes = [part for part in parts if part in ("tensorwise", "rowwise", "rowwise-hp")]
    if len(recipes) > 1 or len(set(parts)) != len(parts) or not set(parts) <= {*recipes, *dials}:
        raise _Bad("needed one of tensorwise, rowwise and rowwise-hp, +gather or +emulate, as fp8=tensorwise+gather")
    return {"float8.recipe": (recipes or ["tensorwise"])[0], **{dials[part]: True for part in parts if part in dials}}


def _rules(text: str) -> dict[str, Any]:
    rules = text.split(",")
    if not all(re.fullmatch(r"[^\s/,=:]+:(fp32|bf16|fp8)", rule) for rule in rules):
        raise _Bad("needed PATTERN:TYPE with fp32, bf16 or fp8, as precision=layers.*.attn_norm:fp32")
    return {"precision_rules": rules}


_VALUES: dict[str, Callable[[str], dict[str, Any]]] = {
    "recompute": _recompute,
    "offload": _offload,
    "reshard": _reshard,
    "reduce": _reduce,
    "bucket": _bucket,
    "prefetch": lambda text: {"communication.prefetch": _count(text)},
    "split": lambda text: {"schedule.boundaries": [_name(name) for name in text.split(",")]},
    "blocks": lambda text: {"blocks": _name(text)},
    "wrap": lambda text: {"wrap_min_params": _count(text, 0)},
    "recipe": lambda text: {"tensor.recipe": _name(text)},
    "context": _context,
    "balance": _balance,
    "fp8": _float8,
    "precision": _rules,
}

_KNOWN = (
    *_AXES, "hsdp2x4", "zero", *_SCHEDULES, *_COUNTS, *_PRECISIONS, *_FLAGS, *(f"{key}=" for key in _VALUES)
)  # fmt: skip


@dataclass
class _Reading:
    """What has been read so far: dotted field -> value, and where each field was set."""

    text: str
    values: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, tuple[str, int]] = field(default_factory=dict)

    def fail(self, token: str, position: int, reason: str) -> PlanError:
        return PlanError(
            f"plan shorthand: {token!r} at character {position + 1}: {reason}\n  {self.text}\n  {' ' * position}^"
        )

    def set(self, token: str, position: int, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if name in self.origin:
                before, at = self.origin[name]
                raise self.fail(token, position, f"{name} is already set by {before!r} at character {at + 1}; keep one")
            self.origin[name] = (token, position)
            self.values[name] = value


def given(text: str) -> dict[str, Any]:
    """`parse` of what stands where a plan does; a folder, or a file that is no plan's, is told as what it is.

    Raises:
        PlanError: as of `parse`.
        ConfigError: no shorthand, and there is such a place.
    """
    try:
        return parse(text)
    except PlanError:
        if not os.path.exists(text):
            raise
    kind = "folder" if os.path.isdir(text) else "file of another kind"
    needed = "a plan file, whose name ends in .toml or .json, or a shorthand"
    raise ConfigError(f"plan {text!r}: it is a {kind}; needed {needed}")


def parse(text: str) -> dict[str, Any]:
    """The nested fields that a shorthand sets; fields it does not name are absent, but for `zero`.

    Raises:
        PlanError: with the token, its position and the nearest known token.

    >>> parse("fsdp4 bf16")
    {'axes': {'dp_shard': 4}, 'precision': 'bf16', 'zero': 3}
    """
    flat = re.sub(r"\s", " ", text)
    reading = _Reading(flat)
    tokens = [(m.group(), m.start()) for m in re.finditer(r"[^\s/]+", flat)]
    if not tokens:
        raise PlanError("plan shorthand: found no token, needed at least one axis; `dp1` is the plan of one process")
    for token, position in tokens:
        try:
            values = _read(token)
        except _Bad as error:
            raise reading.fail(token, position, str(error)) from None
        reading.set(token, position, values)
    reading.values.setdefault("zero", 3 if reading.values.get("axes.dp_shard", 1) > 1 else 0)
    if "float8.recipe" in reading.values:
        reading.values.setdefault("precision", "bf16")
    nested: dict[str, Any] = {}
    for name, value in reading.values.items():
        table, _, key = name.rpartition(".")
        (nested.setdefault(table, {}) if table else nested)[key] = value
    return nested


def _read(token: str) -> dict[str, Any]:
    """The fields that one token sets."""
    if token in _FLAGS:
        return dict([_FLAGS[token]])
    if token in _PRECISIONS:
        return {"precision": token}
    schedule, colon, stages = token.partition(":")
    if schedule in _SCHEDULES:
        extra = {"schedule.stages_per_rank": _count(stages)} if colon else {}
        return {"schedule.kind": _SCHEDULES[schedule], **extra}
    key, equals, value = token.partition("=")
    if equals and key in _VALUES:
        return _VALUES[key](value)
    return _read_number(token)


def _read_number(token: str) -> dict[str, Any]:
    """The fields of a token that is a word followed by a number."""
    word, number = _split(token)
    if word in _AXES:
        return {f"axes.{_AXES[word]}": _count(number)}
    if word in _COUNTS:
        return {_COUNTS[word]: _count(number)}
    if word == "hsdp":
        replicate, _, shard = number.partition("x")
        if not shard:
            raise _Bad("needed hsdpAxB, as hsdp2x4: replicas x shards")
        return {"axes.dp_replicate": _count(replicate), "axes.dp_shard": _count(shard)}
    if word == "zero":
        if number not in ("0", "1", "2", "3"):
            raise _Bad("needed zero0, zero1, zero2 or zero3")
        return {"zero": int(number)}
    hint = nearest(token.lower(), _KNOWN)
    if not hint.startswith("did"):
        hint = nearest(word.lower(), _KNOWN)
    raise _Bad(f"unknown token; {hint}")


def _split(token: str) -> tuple[str, str]:
    matched = re.fullmatch(r"([a-z_]+?)(-?[0-9.].*)?", token)
    return (matched.group(1), matched.group(2) or "") if matched else (token, "")


def spell(plan: dict[str, Any]) -> str:
    """The canonical shorthand of a plan given as nested fields, all of them present."""
    precision = [plan["precision"], *(["tf32"] if plan["tf32"] else []), *_spell_float8(plan["float8"])]
    if plan["precision_rules"]:
        precision.append("precision=" + ",".join(plan["precision_rules"]))
    sections = (_axes(plan), _flow(plan), precision, _options(plan))
    return " / ".join(" ".join(section) for section in sections if section)


def _spell_float8(float8: dict[str, Any]) -> list[str]:
    if float8["recipe"] == "none":
        return []
    dials = ("+gather" if float8["all_gather"] else "") + ("+emulate" if float8["emulate"] else "")
    return [f"fp8={float8['recipe']}{dials}"]


def _axes(plan: dict[str, Any]) -> list[str]:
    degrees = plan["axes"]
    tokens = [f"{_SPELLED[axis]}{degree}" for axis, degree in degrees.items() if degree > 1] or ["dp1"]
    implied = 3 if degrees["dp_shard"] > 1 else 0
    return tokens + ([f"zero{plan['zero']}"] if plan["zero"] != implied else [])


def _flow(plan: dict[str, Any]) -> list[str]:
    schedule, batch = plan["schedule"], plan["batch"]
    tokens = [schedule["kind"]] if plan["axes"]["pp"] > 1 or schedule["kind"] != "1f1b" else []
    if schedule["stages_per_rank"] is not None:
        tokens.append(f"vs{schedule['stages_per_rank']}")
    if batch["micro_batches"] != 1:
        tokens.append(f"mb{batch['micro_batches']}")
    if batch["global_size"] is not None:
        tokens.append(f"gbs{batch['global_size']}")
    if schedule["boundaries"]:
        tokens.append("split=" + ",".join(schedule["boundaries"]))
    return tokens


def _options(plan: dict[str, Any]) -> list[str]:
    dials, tensor, offload = plan["communication"], plan["tensor"], plan["offload"]
    reshard = dials["reshard_after_forward"]
    candidates = (
        (tensor["sequence"], "seq"),
        (tensor["loss"], "loss-parallel"),
        (tensor["recipe"] != "auto", f"recipe={tensor['recipe']}"),
        (plan["context"]["kind"] != "ring", f"context={plan['context']['kind']}"),
        (plan["context"]["balance"] != "zigzag", f"balance={plan['context']['balance']}"),
        (plan["recompute"]["mode"] != "none", f"recompute={_spell_recompute(plan['recompute'])}"),
        (any(offload.values()), "offload=" + "+".join(name for name, on in offload.items() if on)),
        (plan["compile"], "compile"),
        (reshard is not None, f"reshard={str(reshard).lower()}"),
        (dials["reduce_dtype"], f"reduce={dials['reduce_dtype']}"),
        (dials["bucket_mb"] != 25.0, f"bucket={_spell_number(dials['bucket_mb'])}"),
        (dials["prefetch"] != 1, f"prefetch={dials['prefetch']}"),
        (dials["static_graph"], "static-graph"),
        (dials["find_unused"], "find-unused"),
        (not dials["bucket_view"], "no-bucket-view"),
        (plan["blocks"] != "auto", f"blocks={plan['blocks']}"),
        (plan["wrap_min_params"], f"wrap={plan['wrap_min_params']}"),
    )
    return [token for shown, token in candidates if shown]


def _spell_recompute(recompute: dict[str, Any]) -> str:
    if recompute["mode"] == "every":
        return f"every{recompute['every']}"
    if recompute["mode"] == "ratio":
        percent = _spell_number(recompute["ratio"] * 100)
        # a share that does not survive the division is spelled as it is
        return f"{percent}%" if float(percent) / 100 == recompute["ratio"] else repr(recompute["ratio"])
    return str(recompute["mode"])


def _spell_number(value: float) -> str:
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)
