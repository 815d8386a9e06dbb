"""What changed in a run's settings since its directory was last used, and what of it changes the maths. No torch."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from shardwise.errors import ChangedError, CheckpointError, ConfigError, ShardwiseError, UsageError
from shardwise.findings import nearest
from shardwise.model.spec import spec_from_dict
from shardwise.plan.plan import MATHS, Plan
from shardwise.train.kept.rundir import RunDir
from shardwise.train.lr import make_schedule
from shardwise.train.settings import ScheduleSettings

_MATHS = ("model.", "data.", "optimizer.", "schedule.")
_MATHS_KEYS = [
    f"train.{key}" for key in ("global_batch", "clip_norm", "clip_value", "nonfinite", "spike", "seed", "weights")
]
_NOT_MATHS = ("data.num_workers", "model.name")
_LAYOUT = ("plan.shorthand", "plan.file", "train.micro_batches", "train.nproc", "train.device")
_EACH_TIME = ("train.out", "train.name", "train.resume", "train.port")
"""What a start says of itself."""
_TYPES = ("optimizer.state_dtype", "plan.precision")
"""By which tensors of a checkpoint may be of other types than the run's."""
CONTENT = "data.content"
"""No setting: what lies in the files that the same settings name."""
_SHAPES = ("kind", "num_layers", "dim", "ffn_dim", "vocab_size", "num_experts", "ffn", "norm", "qkv_bias", "qk_norm",
           "tie_embeddings")  # fmt: skip
"""Sizes that change the shapes or names of tensors: no checkpoint loads into others."""
_SAME_STATE = ("adamw", "lamb")
"""Optimizers whose state has the same tensors."""


@dataclass(frozen=True)
class Change:
    """One setting that is not what it was."""

    key: str
    before: Any
    now: Any
    kind: Literal["maths", "layout", "other"]
    """Maths: another result. Layout: the same result elsewhere. Other: how long, what is shown and kept."""
    why: str = ""
    """Of a setting that is not always of that kind."""

    @property
    def is_loadable(self) -> bool:
        """Whether a checkpoint of the run as it was can be loaded at all."""
        if self.key == "optimizer.name":
            return self.before in _SAME_STATE and self.now in _SAME_STATE
        return self.key.removeprefix("model.") not in _SHAPES

    def __str__(self) -> str:
        return f"{self.key}: {self.before!r} -> {self.now!r}{self.why} ({self.kind})"


@dataclass(frozen=True)
class Before:
    """What a run was."""

    config: Mapping[str, Any]
    """As `config.json`."""
    plan: Plan | None
    """None: it is not known, and not compared."""

    @property
    def place(self) -> str | None:
        """What `--checkpoints` was."""
        found = self.config["settings"].get("train", {}).get("checkpoints")
        return str(found) if found is not None else None

    @classmethod
    def of_run(cls, run: RunDir) -> Before | None:
        """By the record of a directory; None where no run has begun there: what was refused at its start is no run.

        Raises:
            CheckpointError: the record cannot be read.
        """
        if run.identity() is None or not run.has_begun:
            return None
        config = json.loads(run.config_json.read_text(encoding="utf-8"))
        try:
            return cls(config, Plan.load(run.plan) if run.plan.exists() else None)
        except ConfigError as error:
            raise CheckpointError(
                f"{error}; the record is damaged, so it cannot be told which plan the run in {run.path} had: put the "
                "file back, or remove it: the plan is then not compared"
            ) from error

    @classmethod
    def of_checkpoint(cls, config: Mapping[str, Any], plan: Mapping[str, Any]) -> Before:
        """By a manifest; one that another program wrote says nothing of the settings."""
        settings = {section: keys for section, keys in config.items() if isinstance(keys, Mapping)}
        sizes = {key: value for key, value in settings.get("model", {}).items() if value is not None}
        spec, planned = None, None
        if "preset" in sizes:
            with suppress(ShardwiseError):  # sizes that this version does not know
                spec = dict(vars(spec_from_dict(sizes, name=str(sizes["preset"]))))
        with suppress(ShardwiseError):
            planned = Plan.from_dict(plan) if plan else None
        return cls({"settings": settings, "spec": spec}, planned)


def find_changes(before: Before | None, config: Mapping[str, Any], plan: Plan) -> list[Change]:
    """Settings that differ from those of the run that is gone on with, the maths first; none in a new one.

    Args:
        before: what it was.
        config: what will be written as `config.json`.
        plan: what will be written as `plan.toml`.

    >>> find_changes(Before.of_run(RunDir(Path("/nowhere"))), {}, Plan())  # doctest: +SKIP
    []
    """
    if before is None:
        return []
    then, now = _flat(before.config), _flat(json.loads(json.dumps(config)))
    lengthened = then.get("train.steps") != now.get("train.steps")
    derived = str(config["origins"].get("schedule.warmup", "")).startswith("derived")
    planned = before.plan.diff(plan) if before.plan is not None else {}
    found = [Change(f"plan.{key}", *pair, "maths") for key, pair in planned.items() if key.startswith(MATHS)]
    for key in sorted(then.keys() & now.keys()):
        if then[key] != now[key] and key not in _EACH_TIME:
            if key == "train.steps" and _moves_rates(then, now, warmup_follows=derived):
                why = f", which the rates of schedule.name = {then['schedule.name']!r} follow"
                found.append(Change(key, then[key], now[key], "maths", why))
                continue
            follows = key == "schedule.warmup" and derived and lengthened  # nobody said it: it goes with the length
            found.append(Change(key, then[key], now[key], "other" if follows else _kind(key)))
    return sorted(found, key=lambda change: (("maths", "layout", "other").index(change.kind), change.key))


def check_allowed(
    run: RunDir, changes: Collection[Change], allow: Collection[str], before: Collection[str] = ()
) -> None:
    """Refuse changes of the maths that nobody allowed.

    Args:
        run: for the message: the directory, or the checkpoint, that tells what was.
        changes: from `find_changes`.
        allow: keys, or `all`.
        before: keys that starts before this one had leave for (`leave_of`): the same command gives it again.

    Raises:
        ChangedError: a change of the maths that is not allowed, or with which nothing can be loaded.
        UsageError: an allowed key that is no change: a slip of the pen.
    """
    keys = [change.key for change in changes]
    known = {*keys, *before, "all", *_TYPES, CONTENT}  # tensors of another type also lie in what --resume names
    unknown = [key for key in allow if key not in known]
    if unknown:
        raise UsageError(
            f"--allow {unknown[0]}: found no such change; what changed: {', '.join(keys) or 'nothing'}; "
            f"{nearest(unknown[0], keys) if keys else 'leave it out'}"
        )
    never = [change for change in changes if not change.is_loadable]
    if never:
        raise ChangedError(
            f"{run.path} holds a run of another model or optimizer: {'; '.join(map(str, never))}; needed: those as "
            "they were, since no checkpoint of it loads into others; give the old values, or choose another --out"
        )
    refused = [change for change in changes if change.kind == "maths" and not {change.key, "all"} & set(allow)]
    if refused:
        flags = " ".join(f"--allow {change.key}" for change in refused)
        raise ChangedError(
            f"{run.path} holds a run whose maths these settings change: {'; '.join(map(str, refused))}; needed: the "
            f"settings as they were, or leave to change them; give the old values, choose another --out, or add {flags}"
        )


def leave_of(run: RunDir, allow: Collection[str]) -> set[str]:
    """Keys of the maths that may be others than in a checkpoint: of this start, and of those before it.

    The start that changed a setting may have ended before it saved: leave that it had holds for those after it.

    Args:
        run: its record says what was changed, with leave.
        allow: keys, or `all`.
    """
    return {*allow, *_changed(run), *changed_now(run)}


def changed_now(run: RunDir) -> set[str]:
    """Keys of the maths that are others since the last start."""
    return _changed(run.starting if run.starting.config_json.is_file() else run)


def _changed(run: RunDir) -> set[str]:
    told = [change for event in run.read_events("changed") for change in event["changes"]]
    return {change.partition(": ")[0] for change in told if change.endswith("(maths)")}


def may_convert(leave: Collection[str]) -> bool:
    """Whether tensors of a checkpoint may be converted to the types of `optimizer.state_dtype` and of the plan."""
    return any(key == "all" or key.startswith(_TYPES) for key in leave)


def check_content(
    before: Mapping[str, Any], now: Mapping[str, Any], allow: Collection[str], *, other_rows: bool
) -> None:
    """Refuse other text under the settings of data that a checkpoint was saved with, unless somebody allowed it.

    Args:
        before: settings that the checkpoint holds, and the fingerprint of its data; older ones have none.
        now: those of this start.
        allow: keys, or `all`.
        other_rows: those of its probe are not what they were.

    Raises:
        ChangedError: the settings are equal, so that nobody said that the data changed.
    """
    if not other_rows and before.get(CONTENT, now[CONTENT]) == now[CONTENT]:
        return
    then, here = ({**settings.get("data", {}), "num_workers": 0} for settings in (before, now))
    if then == here and not {CONTENT, "all"} & set(allow):
        raise ChangedError(
            "the data is not that of the checkpoint: found other text under the same settings "
            f"({', '.join(map(str, here.get('sources', ())))}), needed the same; a file or the tokenizer changed "
            f"since: put the old one back, or add --allow {CONTENT}"
        )


def _moves_rates(then: Mapping[str, Any], now: Mapping[str, Any], *, warmup_follows: bool) -> bool:
    """Whether another length alone gives another learning rate to a step that both runs have."""
    lengths, section = (then["train.steps"], now["train.steps"]), "schedule."
    if None in lengths or "schedule.name" not in then:  # another program's checkpoint says nothing of it
        return False
    was = {key.removeprefix(section): value for key, value in then.items() if key.startswith(section)}
    here = was | ({"warmup": now.get("schedule.warmup")} if warmup_follows else {})
    try:
        before, after = (
            make_schedule(ScheduleSettings.model_validate(settings), length)
            for settings, length in zip((was, here), lengths, strict=True)
        )
    except (ValueError, UsageError):  # settings that this version does not know
        return True
    return before != after and any(before(step) != after(step) for step in reversed(range(min(lengths))))


def _kind(key: str) -> Literal["maths", "layout", "other"]:
    if key not in _NOT_MATHS and (key.startswith(_MATHS) or key in _MATHS_KEYS):
        return "maths"
    return "layout" if key in _LAYOUT else "other"


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted names; the model's by its sizes, however they were said."""
    flat = {f"{section}.{key}": value for section, keys in config["settings"].items() for key, value in keys.items()}
    if config.get("spec") is not None:
        flat = {key: value for key, value in flat.items() if not key.startswith("model.")}
        flat |= {f"model.{key}": value for key, value in config["spec"].items()}
    return flat
