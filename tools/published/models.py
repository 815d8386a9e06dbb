"""The model of a row: the public shapes of its name, overridden by what its columns say."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from published.cells import Cells, Skip
from shardwise.errors import ConfigError
from shardwise.model.spec import ModelSpec, preset

_FIELDS = {f.name for f in fields(ModelSpec)}
_NOT_MODELLED = (
    r"(^|-)(m?t5|flan|ul2|whisper|flux|(open-?|eva-?)?clip|unet|dlrm|resnet|stable-diffusion|sd-?3|sdxl|dit)\b"
    r"|\b(albert|code-?t5|m2m-?100|nllb|alexa-?tm|cog-?video|hunyuan-?video|wan-?2)"
)
_NO_ATTENTION = r"rwkv|mamba|retnet|hyena|recurrent-?gemma|griffin|xlstm"
_VOCAB = (
    (r"llama-?3|llama-?4", 128256), (r"qwen", 151936), (r"gemma", 256000), (r"nemotron", 256000),
    (r"deepseek", 102400), (r"opt\b", 50272), (r"mpt|neox|pythia|olmo", 50368), (r"bloom", 250880),
    (r"bert", 30522), (r"gpt|megatron|turing|nlg", 51200),
)  # fmt: skip


_USUAL = (
    (0.125e9, 768), (0.35e9, 1024), (0.76e9, 1536), (1.3e9, 2048), (2.7e9, 2560), (4e9, 3072), (7e9, 4096),
    (13e9, 5120), (20e9, 6144), (33e9, 7168), (70e9, 8192), (105e9, 10240), (175e9, 12288), (340e9, 18432),
    (540e9, 20480), (1e12, 25600),
)  # fmt: skip
"""Parameters and width of published dense decoders."""


_TAUGHT = {"qwen": "qwen-2.5", "llama": "llama-3"}
"""Of which family models are that DeepSeek-R1 taught."""


_EXPERTS = r"moe|switch|\b\d+x\d+(\.\d+)?b\b|-a\d|experts?\b|jamba|arctic"
"""A model whose feed-forwards are several."""
_ROTARY = r"(?<!no )(?<!without )\b(rotary|rope)\b"
"""Words for heads that are rotated, in models that have a table of positions else."""
_QK_NORM = r"(?<!no )(?<!without )\bqk[ -]?(layer|rms)?[ -]?norm"
"""Words for queries and keys that are normalised."""
_DROPOUT = r"(?<!attention )(?<!softmax )\bdropout[ =:]+(?:of )?(0?\.\d+|0)\b"
"""Words for the share that is dropped of what blocks add to the residual stream."""


def model_of(cells: Cells, seq_len: int | None) -> ModelSpec:
    """Sizes of the row's model.

    Raises:
        Skip: no known name and too few columns, or a model that is no chain of equal blocks.
    """
    name = _spelled(cells["model"])
    name = re.sub(r"deepseek-?r1-(distill-)?(qwen|llama)", lambda found: _TAUGHT[found[2]], name)
    if re.search(_NOT_MODELLED, name):
        raise Skip("model: not a chain of equal blocks")
    known = _known(name, _stated_total(cells, name)) or _by_count(cells.number("n_params"))
    if re.search(_NO_ATTENTION, name) and "stands_for" not in (known or {}):
        raise Skip("model: not a chain of attention blocks")
    sizes = _override(cells, _pictured(name, dict(known))) if known else _from_columns(cells, name)
    sizes = _classifies(cells, _as_large(cells, name, sizes))
    if sizes.get("kind") == "gpt" and seq_len:
        sizes["max_seq_len"] = seq_len
    if sizes.get("kind") == "gpt" and cells.noted(_ROTARY):
        sizes["positions"] = "rotary"
    if cells.noted(_QK_NORM):
        sizes["qk_norm"] = True
    dropped = cells.noted(_DROPOUT)
    if sizes.get("kind") == "gpt" and dropped and not cells.has("lora"):  # which may have one of its own
        sizes["dropout"] = float(dropped.group(1)) > 0
    try:
        spec = ModelSpec(**{"name": name, **{key: value for key, value in sizes.items() if key in _FIELDS}})
    except (ConfigError, TypeError) as error:
        raise Skip("model: sizes that do not fit") from error
    if "stands_for" in sizes:
        cells.assume(sizes["stands_for"])
    return _tied(cells, spec)


_SPELLINGS = (
    (r"^[\w.-]+/(?=[a-z])(?=[\w.-]+$)", ""),  # who published it
    (r"^((?:internlm|stablelm)-?2[\w.-]*-\d)_(?=\d+b\b)", r"\1."),
    (r"[\s_]+", "-"),
    (r"(?<=[a-z]{2})(?=\d+(\.\d+)?[bm]\b)", "-"),  # llama7b
    (r"^(\d+(?:\.\d+)?[bm])-(\D.*)$", r"\2-\1"),  # 7B Llama
    (r"(^|-)(beit(?:-?v2)?|mae|dino-?v[23])-(?=[tsblhg]\b|tiny|small|base|large|huge|giant)", r"\1\2-vit-"),
)
"""Ways to write a name -> the one that is looked for."""


def _spelled(model: str) -> str:
    """A name in lower case, with '-' between its parts; ViT-G, which its case alone tells from ViT-g, in full."""
    name = re.sub(r"\bViT-?G\b", "vit-gigantic", model).lower()
    for pattern, to in _SPELLINGS:
        name = re.sub(pattern, to, name)
    return name


@cache
def _entries() -> tuple[tuple[str, dict[str, Any]], ...]:
    """(pattern, sizes) in order; `like` resolved."""
    named: dict[str, dict[str, Any]] = {}
    found = []
    for entry in tomllib.loads((Path(__file__).parent / "models.toml").read_text(encoding="utf-8"))["model"]:
        base = entry.pop("like", None)
        if base is not None:
            entry = {**(named[base] if base in named else _preset_sizes(base)), **entry}
        pattern = entry.pop("match")
        if "id" in entry:
            named[entry["id"]] = {key: value for key, value in entry.items() if key != "id"}
        found.append((pattern, {key: value for key, value in entry.items() if key != "id"}))
    return tuple(found)


def _preset_sizes(name: str) -> dict[str, Any]:
    spec = preset(name)
    return {key: getattr(spec, key) for key in _FIELDS - {"name", "blocks"}}


def _known(name: str, total: float | None) -> dict[str, Any] | None:
    """The first model of the table whose pattern is in the name, and whose size is the stated one, if one is."""
    has_experts = re.search(r"moe\b|-a\d+(\.\d+)?b\b|\d+x\d+(\.\d+)?b\b", name) is not None
    for pattern, sizes in _entries():
        fits = sizes.get("kind") == "moe" or not has_experts
        if re.search(pattern, name) and fits and _is_about(sizes, total):
            return sizes
    return None


def _pictured(name: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """Sizes of a vision transformer whose name says that of its patches (`patch16`, `B/16`) or of its pictures."""
    if not sizes.get("patch"):
        return sizes
    patch = re.search(r"patch-?(\d+)|[a-z]-?/-?(\d+)\b", name)
    side = int(next(n for n in patch.groups() if n)) if patch else sizes["patch"]
    pixels = next((int(n) for n in re.findall(r"(?<!\d)\d{3}(?!\d)", name) if int(n) % side == 0), 224)
    return sizes | {"patch": side, "max_seq_len": (pixels // side) ** 2 + 1}


_ABOUT = 1.35
"""A printed total is at most so many times another one of the same model: rounded, or without embeddings."""


def _is_about(sizes: Mapping[str, Any], total: float | None) -> bool:
    if not total:
        return True
    spec = ModelSpec(**{key: value for key, value in sizes.items() if key in _FIELDS})
    without = spec.num_params - (1 if spec.tie_embeddings else 2) * spec.vocab_size * spec.dim
    counts = (spec.num_params, spec.active_params, *((without,) if without > 0 and not spec.patch else ()))
    return any(1 / _ABOUT < total / count < _ABOUT for count in counts)


def _stated_total(cells: Cells, name: str) -> float | None:
    """Parameters that tell models of one family apart; None where columns or notes say that it was cut or changed."""
    changed = any(cells.count(column) for column in ("n_layers", "d_model"))
    return None if changed or cells.noted(r"proxy|truncated|layers? only|reduced") else _total(cells, name)


def _by_count(n_params: float | None) -> dict[str, Any] | None:
    """The model whose total is the printed one, to 1 in 10,000."""
    for _, sizes in _entries() if n_params else ():
        spec = ModelSpec(**{key: value for key, value in sizes.items() if key in _FIELDS})
        if n_params and abs(spec.num_params / n_params - 1) < 1e-4:
            return sizes
    return None


def _override(cells: Cells, sizes: dict[str, Any]) -> dict[str, Any]:
    """What the columns say, over the sizes of the name."""
    dim, heads = cells.count("d_model"), cells.count("n_heads")
    if dim and dim != sizes["dim"]:  # another shape under the same family
        for key in ("num_kv_heads", "head_dim"):
            sizes.pop(key, None)
        kind, ffn = sizes.get("kind", "llama"), sizes.get("ffn")
        sizes.update(dim=dim, num_heads=heads or max(dim // 128, 1), ffn_dim=_ffn_dim(kind, ffn or "", dim))
    if heads and heads != sizes["num_heads"]:
        sizes.pop("num_kv_heads", None)
        if sizes.get("head_dim", 0) * sizes["num_heads"] == sizes["dim"]:
            sizes.pop("head_dim")
        sizes["num_heads"] = heads
    layers, source_layers = cells.count("n_layers"), sizes.pop("source_layers", 0)
    if layers:
        sizes["num_layers"] = max(round(layers * sizes["num_layers"] / source_layers), 1) if source_layers else layers
    kv_heads, width, vocab = cells.count("n_kv_heads"), cells.count("d_ff"), cells.count("vocab")
    if kv_heads and not sizes.get("kv_rank"):
        sizes["num_kv_heads"] = kv_heads
    if width and width not in (sizes.get("dense_ffn_dim"), sizes.get("shared_ffn_dim")) and not source_layers:
        sizes["ffn_dim"] = width
    if vocab:
        sizes["vocab_size"] = vocab
    dense = cells.noted(r"(\d+) dense \+ \d+ moe layers")
    if dense and sizes.get("kind") == "moe":
        sizes["num_dense_layers"] = int(dense.group(1))
    routed = cells.noted(r"\b(\d+) experts,? top-?(\d+)")
    if routed and sizes.get("kind") == "moe":
        sizes.update(num_experts=int(routed.group(1)), experts_per_token=int(routed.group(2)))
    return sizes


_FEW = r"(sequence|token|text) classification|\(classification\)|question answering|\bsquad\b|two outputs per token"
"""Words for tasks whose head gives a few numbers, and no logits of a vocabulary."""
OUTPUTS = 2
"""Numbers that it gives."""


def _classifies(cells: Cells, sizes: dict[str, Any]) -> dict[str, Any]:
    """Sizes of a model that reads words and writes none: the table of words is there, the head is not."""
    said = re.search(_FEW, f"{cells['model'].lower()} ; {cells.notes}")
    if not said or sizes.get("causal", True) or sizes.get("patch"):
        return sizes
    cells.assume(f"a head of {OUTPUTS} outputs per token, as the task has no logits")
    table = sizes["vocab_size"] * sizes["dim"]
    return sizes | {"vocab_size": OUTPUTS, "other_params": sizes.get("other_params", 0) + table}


def _as_large(cells: Cells, name: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """With as many layers as make up the printed total, where a row prints a width and no layers.

    Of another width than the model of the name it is another model.
    """
    total = _total(cells, name)
    kept = {key: value for key, value in sizes.items() if key in _FIELDS}
    if not total or cells.count("n_layers") or not cells.count("d_model") or kept.get("kind") == "moe":
        return sizes
    if _is_about(kept, total) or cells.noted(r"proxy|truncated|layers? only|reduced"):
        return sizes
    return sizes | {"num_layers": _layers(total, cells, {"name": name, **kept})}


def _from_columns(cells: Cells, name: str) -> dict[str, Any]:
    """A model that no table has: its columns, and its family's rules for the rest."""
    pictures, words = re.search(r"(^|-)(vit|deit)\b", name), re.search(r"bert\b|(^|-)esm", name)
    gpt = bool(pictures or words) or re.search(r"gpt|mpt|bloom|opt-|megatron|turing|pythia", name) is not None
    kind = "gpt" if gpt else "llama"
    dim = cells.count("d_model") or _usual_dim(cells, name)
    sizes: dict[str, Any] = {"kind": kind, "dim": dim, "max_seq_len": 4096, "causal": not (pictures or words)}
    if pictures:
        sizes |= _pictured(name, {"patch": 16, "vocab_size": 1000})
    sizes["num_heads"] = cells.count("n_heads") or max(dim // 128, 1)
    if dim % sizes["num_heads"]:
        sizes["head_dim"] = 2 * round(dim / sizes["num_heads"] / 2)
    if not cells.count("n_heads"):
        cells.assume("heads of 128")
    kv_heads = cells.count("n_kv_heads") or sizes["num_heads"]
    sizes["num_kv_heads"] = kv_heads if sizes["num_heads"] % kv_heads == 0 else sizes["num_heads"]
    sizes["ffn_dim"] = cells.count("d_ff") or _ffn_dim(kind, "", dim)
    if not cells.count("d_ff"):
        cells.assume(f"feed-forward width {sizes['ffn_dim']} ({'4 d' if gpt else '8/3 d, rounded up to 256'})")
    if not pictures:
        sizes["vocab_size"] = cells.count("vocab") or next((v for p, v in _VOCAB if re.search(p, name)), 32000)
    if not cells.count("vocab"):
        cells.assume(f"vocabulary {sizes['vocab_size']}")
    sizes["num_layers"] = cells.count("n_layers") or _layers(_total(cells, name), cells, sizes)
    if not gpt and sizes["ffn_dim"] == 4 * dim and not cells.noted(_GATED):
        sizes["ffn"] = "plain"
        cells.assume("feed-forwards of two products, as those with a gate are not four times as wide")
    if re.search(_EXPERTS, f"{name} {cells.notes}") or (cells.count("ep") or 1) > 1:
        sizes |= _experts(cells, name, sizes)
    sizes["tie_embeddings"] = gpt and not pictures
    sizes["dropout"] = gpt and cells.year < 2023 and "bloom" not in name
    return sizes


def _experts(cells: Cells, name: str, dense: dict[str, Any]) -> dict[str, Any]:
    """Experts of a model that no table has: those that the notes count, or that make up total and active parameters.

    Raises:
        Skip: neither says how many there are, or how wide.
    """
    text = f"{name} ; {cells.notes}"
    count = re.search(r"(\d+) (?:routed |fine-grained |total )?experts|\b(\d+)x\d+(?:\.\d+)?b\b", text)
    chosen = re.search(r"top[- ]?(\d+)\b|(\d+) (?:active|activated|chosen|experts? per token)", text)
    active = re.search(r"-a(\d+(?:\.\d+)?)b\b|(\d+(?:\.\d+)?) ?b(?:illion)? (?:active|activated)", text)
    total, width = cells.number("n_params") or _total(cells, name), cells.count("d_ff")
    shared = re.search(r"(\d+) shared", text)
    few = replace(ModelSpec(**{"name": name, **dense}), ffn_dim=1)
    plain = dense["kind"] == "gpt"
    others, each = (
        few.num_params,
        (2.0 if plain else 3.0) * few.dim * few.num_layers,
    )  # per unit of a feed-forward's width
    experts = next((int(n) for n in count.groups() if n), 0) if count else 0
    if not experts and total and width:
        experts = round((total - others) / (each * width))
    if not width and experts and total:
        width = round((total - others) / (each * experts))
    per_token = next((int(n) for n in chosen.groups() if n), 0) if chosen else 0
    if not per_token and active and width:
        active_params = float(next(n for n in active.groups() if n)) * 1e9
        per_token = max(round((active_params - others) / (each * width)), 1)
    if not (experts > 1 and width and width > 0 and per_token):
        raise Skip("model: neither a known name nor its sizes")
    cells.assume(f"{experts} experts of width {width}, {per_token} per token")
    found: dict[str, Any] = {
        "kind": "moe",
        "num_experts": experts,
        "ffn_dim": width,
        "ffn": "plain" if plain else "gated",
    }
    found["shared_ffn_dim"] = int(shared.group(1)) * width if shared else 0
    return found | {"experts_per_token": min(per_token, experts)}


def _ffn_dim(kind: str, ffn: str, dim: int) -> int:
    return 4 * dim if kind == "gpt" or ffn == "plain" else -(-dim * 8 // (3 * 256)) * 256


def _total(cells: Cells, name: str) -> float | None:
    """Parameters: the cell, or the number in the name."""
    named = re.search(r"(?<![\dx.])(\d+(?:\.\d+)?)-?([mbt])\b", name)
    scale = {"m": 1e6, "b": 1e9, "t": 1e12}
    return cells.number("n_params") or (float(named.group(1)) * scale[named.group(2)] if named else None)


_GATED = r"(?<!not )\bgated (feed-?forwards?|ffns?|mlps?)\b|(?<!no )(?<!without )\bswiglu\b"
"""Words for feed-forwards of three products, however wide they are."""


def _usual_dim(cells: Cells, name: str) -> int:
    """Width of the dense decoders of such a size.

    Raises:
        Skip: no number of parameters, or experts.
    """
    total = _total(cells, name)
    if not total or re.search(_EXPERTS, name):
        raise Skip("model: neither a known name nor its sizes")
    dim = min(_USUAL, key=lambda usual: abs(math.log(usual[0] / total)))[1]
    cells.assume(f"width {dim}, usual for its number of parameters")
    return dim


def _layers(total: float | None, cells: Cells, sizes: dict[str, Any]) -> int:
    """Layers that make up the total."""
    if not total:
        raise Skip("model: neither a known name nor its sizes")
    one = ModelSpec(**{**sizes, "num_layers": 1})
    layers = max(round((total - one.embedding_params - one.head_params) / one.block_params), 1)
    cells.assume(f"{layers} layers, from the number of parameters")
    return layers


def _tied(cells: Cells, spec: ModelSpec) -> ModelSpec:
    """One table for embedding and head or two: what the notes say, or what the printed total decides."""
    if cells.noted(r"untied") or cells.has(r"lit-?gpt"):  # which has two where checkpoints have one
        return replace(spec, tie_embeddings=False)
    if cells.noted(r"\btied (embedding|head)"):
        return replace(spec, tie_embeddings=True)
    total = cells.number("n_params")
    if cells.noted(r"proxy|truncated"):
        return spec
    if not total:
        _doubt_name(cells, spec)
        return spec
    other = replace(spec, tie_embeddings=not spec.tie_embeddings)
    here, there = abs(spec.num_params / total - 1), abs(other.num_params / total - 1)
    if there < min(here / 2, 0.03):  # printed totals are rounded to two digits
        return other
    if abs(spec.num_params / total - 1) > 0.05:
        cells.assume(f"sizes give {spec.num_params / 1e9:.1f} B parameters, the source prints {total / 1e9:.1f} B")
    return spec


_AWAY = 0.08
"""A size in a name is rounded, by no more than so much of it."""


def _doubt_name(cells: Cells, spec: ModelSpec) -> None:
    """Say that a model has other sizes than its name has parameters, where no column says its own."""
    named = None if any(cells.count(column) for column in ("n_layers", "d_model")) else _total(cells, spec.name)
    if named and not spec.patch and all(abs(n / named - 1) > _AWAY for n in (spec.num_params, spec.active_params)):
        cells.assume(f"sizes of a model of {spec.num_params / 1e9:.1f} B parameters, the name says {named / 1e9:.1f} B")
