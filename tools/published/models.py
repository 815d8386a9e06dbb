"""The model of a row: the public shapes of its name, overridden by what its columns say."""

from __future__ import annotations

import math
import re
import tomllib
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from published.cells import Cells, Skip
from shardwise.errors import ConfigError
from shardwise.model.spec import ModelSpec, preset

_FIELDS = {f.name for f in fields(ModelSpec)}
_NOT_DECODERS = r"(^|-)(vit|t5|ul2|whisper|flux|clip|unet|dlrm|resnet|stable-diffusion|sdxl|dit)\b"
_VOCAB = (
    (r"llama-?3|llama-?4", 128256), (r"qwen", 151936), (r"gemma", 256000), (r"nemotron", 256000),
    (r"deepseek", 102400), (r"opt\b", 50272), (r"mpt|neox|pythia|olmo", 50368), (r"bloom", 250880),
    (r"gpt|megatron|turing|nlg", 51200),
)  # fmt: skip


_USUAL = (
    (0.125e9, 768), (0.35e9, 1024), (0.76e9, 1536), (1.3e9, 2048), (2.7e9, 2560), (4e9, 3072), (7e9, 4096),
    (13e9, 5120), (20e9, 6144), (33e9, 7168), (70e9, 8192), (105e9, 10240), (175e9, 12288), (340e9, 18432),
    (540e9, 20480), (1e12, 25600),
)  # fmt: skip
"""Parameters and width of published dense decoders."""


def model_of(cells: Cells, seq_len: int | None) -> ModelSpec:
    """Sizes of the row's model.

    Raises:
        Skip: no known name and too few columns, or a model that is no decoder.
    """
    name = re.sub(r"[\s_]+", "-", cells["model"].lower())
    if re.search(_NOT_DECODERS, name):
        raise Skip("model: no decoder")
    known = _known(name) or _by_count(cells.number("n_params"))
    sizes = _override(cells, dict(known)) if known else _from_columns(cells, name)
    if sizes.get("kind") == "gpt" and seq_len:
        sizes["max_seq_len"] = seq_len
    try:
        spec = ModelSpec(**{"name": name, **{key: value for key, value in sizes.items() if key in _FIELDS}})
    except (ConfigError, TypeError) as error:
        raise Skip("model: sizes that do not fit") from error
    if "stands_for" in sizes:
        cells.assume(sizes["stands_for"])
    return _tied(cells, spec)


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


def _known(name: str) -> dict[str, Any] | None:
    return next((sizes for pattern, sizes in _entries() if re.search(pattern, name)), None)


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
    return sizes


def _from_columns(cells: Cells, name: str) -> dict[str, Any]:
    """A model that no table has: its columns, and its family's rules for the rest."""
    gpt = re.search(r"gpt|mpt|bloom|opt-|megatron|turing|pythia|bert", name) is not None
    kind = "gpt" if gpt else "llama"
    dim = cells.count("d_model") or _usual_dim(cells, name)
    sizes: dict[str, Any] = {"kind": kind, "dim": dim, "max_seq_len": 4096}
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
    sizes["vocab_size"] = cells.count("vocab") or next((v for p, v in _VOCAB if re.search(p, name)), 32000)
    if not cells.count("vocab"):
        cells.assume(f"vocabulary {sizes['vocab_size']}")
    sizes["num_layers"] = cells.count("n_layers") or _layers(_total(cells, name), cells, sizes)
    sizes["tie_embeddings"] = gpt
    sizes["dropout"] = gpt and cells.year < 2023 and "bloom" not in name
    return sizes


def _ffn_dim(kind: str, ffn: str, dim: int) -> int:
    return 4 * dim if kind == "gpt" or ffn == "plain" else -(-dim * 8 // (3 * 256)) * 256


def _total(cells: Cells, name: str) -> float | None:
    """Parameters: the cell, or the number in the name."""
    named = re.search(r"(?<![\dx.])(\d+(?:\.\d+)?)-?([mbt])\b", name)
    scale = {"m": 1e6, "b": 1e9, "t": 1e12}
    return cells.number("n_params") or (float(named.group(1)) * scale[named.group(2)] if named else None)


def _usual_dim(cells: Cells, name: str) -> int:
    """Width of the dense decoders of such a size.

    Raises:
        Skip: no number of parameters, or experts.
    """
    total = _total(cells, name)
    if not total or re.search(r"moe|switch|\dx\d|-a\d|expert|jamba|arctic", name):
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
    if cells.noted(r"untied"):
        return replace(spec, tie_embeddings=False)
    if cells.noted(r"\btied (embedding|head)"):
        return replace(spec, tie_embeddings=True)
    total = cells.number("n_params")
    if not total or cells.noted(r"proxy|truncated"):
        return spec
    other = replace(spec, tie_embeddings=not spec.tie_embeddings)
    here, there = abs(spec.num_params / total - 1), abs(other.num_params / total - 1)
    if there < min(here / 2, 0.03):  # printed totals are rounded to two digits
        return other
    if abs(spec.num_params / total - 1) > 0.05:
        cells.assume(f"sizes give {spec.num_params / 1e9:.1f} B parameters, the source prints {total / 1e9:.1f} B")
    return spec
