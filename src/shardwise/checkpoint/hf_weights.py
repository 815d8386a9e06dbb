"""Weights of `transformers` models in safetensors files: read straight into shards, and written back.

    files --headers--> keys --names of transformers--> parameters --placements--> the bytes that this rank reads

Everything is checked against the headers first, so that nothing is loaded half. Checkpoints whose names or layout
differ from the module's (per-expert matrices that it stacks) go through the conversions that `transformers` has.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from shardwise.errors import DataError, ModelError
from shardwise.findings import shown
from shardwise.models.hf import build
from shardwise.parallel.declared import declares
from shardwise.parallel.init import local_slice
from shardwise.parallel.placed import Placed

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_SHOWN = 20
DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    "BOOL": torch.bool,
}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor of a file."""

    key: str
    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(kw_only=True)
class Source:
    """What one or more parameters are made of: a tensor as it is, or several through a conversion."""

    target: str
    converter: WeightConverter | None = None
    entries: list[tuple[str, Entry]] = field(default_factory=list)
    """Pattern of the conversion -> tensor, in the order of the files' names."""


def has_weights(directory: str | os.PathLike[str]) -> bool:
    """Whether a local directory holds safetensors files of a model."""
    return any(os.path.isfile(Path(directory) / name) for name in (SINGLE, INDEX))


def load_hf(placed: Placed, path: str | os.PathLike[str]) -> Placed:
    """Read the weights of a local directory into a placed model of `transformers`; before the optimizer is made.

    Args:
        placed: from `apply(hf_factory(config), plan, mesh)`.
        path: a directory with `model.safetensors`, or its shards and their index; or one file.

    Returns:
        `placed`, whose parameters have been filled in place, converted to their type.

    Raises:
        DataError: a file that is missing, cut short or none of safetensors; or keys that are missing, too many or of
            another shape: all listed, and nothing loaded.
        ModelError: the model is none of `transformers`.

    Cost: each rank reads the headers, and of the data the slices of its own shards. Tensors that a conversion makes
    (stacked experts) are read for this rank's experts only.

    >>> placed = load_hf(apply(hf_factory(config), plan, mesh), "checkpoints/llama")  # doctest: +SKIP
    """
    root = placed.parts[0].root
    if not declares(root):
        raise ModelError(
            f"load_hf: found {type(root).__name__}, which is no model of transformers; needed a module of "
            "hf_factory(config); load other modules' weights with a Store, or from an instance given to apply"
        )
    with torch.device("meta"):
        model = cast(PreTrainedModel, build(cast(Any, root.config)))
    entries = read_headers(Path(path))
    sources = _match(model, entries, Path(path))
    aliases = _aliases(model)
    with torch.no_grad():
        for part in placed.parts:
            tensors = {**dict(part.root.named_parameters()), **dict(part.root.named_buffers())}
            for name, tensor in tensors.items():
                source = next((sources[n] for n in aliases.get(name, (name,)) if n in sources), None)
                if source is not None and not tensor.is_meta:
                    _fill(name, tensor, source, model)
    return placed


def read_headers(path: Path) -> dict[str, Entry]:
    """Every tensor of a directory's safetensors files by its key; the data are not read.

    Raises:
        DataError: no such files, a shard that is missing, or a file that is cut short or no safetensors.
    """
    if os.path.isfile(path):  # unlike `Path.is_file` it says no of what cannot be looked at
        return {entry.key: entry for entry in _header(path)}
    if os.path.isfile(path / INDEX):
        weight_map = _index(path / INDEX)
        found = {e.key: e for name in sorted(set(weight_map.values())) for e in _header(path / name)}
        lacking = sorted(set(weight_map) - set(found))
        if lacking:
            raise DataError(
                f"weights {path / INDEX}: lists {len(lacking)} tensors that its files do not hold "
                f"({shown(lacking)}); needed: the files that belong to this index; copy them again"
            )
        return found
    if os.path.isfile(path / SINGLE):
        return {entry.key: entry for entry in _header(path / SINGLE)}
    try:
        there = sorted(os.listdir(path))[:10]
    except (OSError, ValueError) as error:  # a NUL in it
        there = [getattr(error, "strerror", None) or str(error)]
    raise DataError(
        f"weights {path}: found {', '.join(there) or 'nothing'}; needed {SINGLE}, or {INDEX} and its shards; nothing "
        "is downloaded: give a directory that `save_pretrained` or `export_hf` has written"
    )


def _index(file: Path) -> dict[str, str]:
    """Key -> name of the shard, which lies beside the index."""
    try:
        found: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        strange = [name for name in found.values() if not isinstance(name, str) or Path(name).name != name]
        if strange:
            raise ValueError(f"{strange[0]!r:.80} is no name of a file beside it")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"weights {file}: no index of safetensors ({error!r:.200}); copy it again") from None
    return found


def _header(file: Path) -> list[Entry]:
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            whole = os.fstat(opened.fileno()).st_size
            if size > max(whole - 8, 0):
                raise ValueError(f"its header should have {size} bytes, the file has {whole}")
            table = json.loads(opened.read(size))
        end = max((e["data_offsets"][1] for k, e in table.items() if k != "__metadata__"), default=0)
        if whole != 8 + size + end:
            raise ValueError(f"its tensors need {8 + size + end} bytes, the file has {whole}")
        found = [
            Entry(key=key, file=file, shape=tuple(e["shape"]), dtype=DTYPES[e["dtype"]])
            for key, e in table.items()
            if key != "__metadata__"
        ]
        if any(type(n) is not int or n < 0 for entry in found for n in entry.shape):
            raise ValueError("a shape that is none")
        return found
    except FileNotFoundError:
        raise DataError(f"weights {file}: no such file; the index names it; copy it beside the others") from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"weights {file}: not a whole safetensors file ({error}); it was cut short or is of another kind; copy or "
            "download it again, and compare its size with the original's"
        ) from None


def _aliases(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Name of a parameter -> all names of the parameter, ties included."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: tuple(group) for group in names.values() for name in group}


def _match(model: PreTrainedModel, entries: Mapping[str, Entry], path: Path) -> dict[str, Source]:
    """Parameter or buffer -> what it is made of; every problem at once."""
    needed: dict[str, torch.Tensor] = dict(model.state_dict())
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    sources: dict[str, Source] = {}
    for key in sorted(entries, key=_natural):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, needed)
        converter = by_pattern.get(pattern) if pattern is not None and key not in needed else None
        name = key if key in needed else name
        sources.setdefault(name, Source(target=name, converter=converter)).entries.append((pattern or "", entries[key]))
    found: dict[str, Source] = {}
    there: set[str] = set()
    problems: list[str] = []
    for source in sources.values():
        shapes = _shapes(source, model, problems)
        there |= set(shapes)
        for name, shape in shapes.items():
            ignored = model._keys_to_ignore_on_load_unexpected or ()
            if name not in needed:
                if not any(re.search(p, name) for p in ignored):
                    problems.append(f"unexpected: {', '.join(e.key for _, e in source.entries[:3])}")
            elif tuple(needed[name].shape) != shape:
                problems.append(f"shape of {name}: found {list(shape)}, needed {list(needed[name].shape)}")
            else:
                found[name] = source
    aliases = _aliases(model)
    optional = model._keys_to_ignore_on_load_missing or ()
    for name in needed:
        if not any(n in there for n in aliases.get(name, (name,))) and not any(re.search(p, name) for p in optional):
            problems.append(f"missing: {name}")
    if problems:
        lines = [f"  - {problem}" for problem in problems[:MAX_SHOWN]]
        more = len(problems) - len(lines)
        raise DataError(
            "\n".join(
                [
                    f"weights {path} do not fit {type(model).__name__} ({len(problems)} problem(s)); nothing was "
                    "loaded; needed: the weights of this config.json; give the directory that both came from:",
                    *lines,
                    *([f"  ... and {more} more"] if more > 0 else []),
                ]
            )
        )
    return found


def _shapes(source: Source, model: PreTrainedModel, problems: list[str]) -> dict[str, tuple[int, ...]]:
    """Names and shapes that a source gives, from shapes alone."""
    if source.converter is None:
        return {source.target: source.entries[0][1].shape}
    tensors = [(p, e.key, torch.empty(e.shape, dtype=e.dtype, device="meta")) for p, e in source.entries]
    try:
        made = _convert(source, tensors, model)
    except (RuntimeError, ValueError, IndexError, KeyError) as error:
        problems.append(f"{source.target}: cannot be made of its {len(tensors)} tensors ({str(error).splitlines()[0]})")
        return {}
    return {name: tuple(tensor.shape) for name, tensor in made.items()}


def _convert(
    source: Source, tensors: list[tuple[str, str, torch.Tensor]], model: PreTrainedModel
) -> dict[str, torch.Tensor]:
    converter = deepcopy(source.converter)
    assert converter is not None
    for pattern, key, tensor in tensors:
        converter.add_tensor(source.target, key, pattern, cast(Any, tensor))
    made = converter.convert(source.target, model=model, config=model.config)
    return {name: held[0] if isinstance(held, list) else held for name, held in made.items()}


def _fill(name: str, tensor: torch.Tensor, source: Source, model: PreTrainedModel) -> None:
    local = cast(Any, tensor).to_local() if hasattr(tensor, "to_local") else tensor
    ranges = _ranges(tensor, name)
    if any(start == end for start, end in ranges):
        return
    if source.converter is None:
        local.copy_(_read(source.entries[0][1], ranges))
        return
    first = source.converter.operations[0]
    if type(first).__name__ == "MergeModulelist" and getattr(first, "dim", None) == 0:
        tensors, ranges = _of_stack(source, ranges)
    else:
        tensors = [(p, e.key, _read(e, [(0, size) for size in e.shape])) for p, e in source.entries]
    made = _convert(source, tensors, model)
    whole = next(made[n] for n in _aliases(model).get(name, (name,)) if n in made)
    local.copy_(whole[tuple(slice(start, end) for start, end in ranges)])


def _of_stack(
    source: Source, ranges: list[tuple[int, int]]
) -> tuple[list[tuple[str, str, torch.Tensor]], list[tuple[int, int]]]:
    """What this rank's part of a stack is made of, and where it lies in what is made of that.

    Of its own experts all, or the part where the conversion does no more than join them along another dim.
    """
    assert source.converter is not None
    patterns, rest = source.converter.source_patterns, source.converter.operations[1:]
    joined = getattr(rest[0], "dim", 0) if [type(each).__name__ for each in rest] == ["Concatenate"] else 0
    is_cut = not rest or joined > 0
    found, begin = [], 0
    for pattern in sorted({pattern for pattern, _ in source.entries}, key=patterns.index):
        experts = [entry for known, entry in source.entries if known == pattern]
        own = list(ranges[1:]) if is_cut else [(0, size) for size in experts[0].shape]
        if is_cut and joined:
            (start, end), size = own[joined - 1], experts[0].shape[joined - 1]
            own[joined - 1] = (min(max(start - begin, 0), size), min(max(end - begin, 0), size))
            begin += size
        found += [(pattern, entry.key, _read(entry, own)) for entry in experts[slice(*ranges[0])]]
    within = ranges[1:] if not is_cut else [(0, end - start) for start, end in ranges[1:]]
    return found, [(0, ranges[0][1] - ranges[0][0]), *within]


def _ranges(tensor: torch.Tensor, name: str) -> list[tuple[int, int]]:
    """Start and end of this rank's part in each dim: a view of the numbers of that dim, cut as the tensor is."""
    ranges = []
    for dim, size in enumerate(tensor.shape):
        shape = [size if d == dim else 1 for d in range(tensor.dim())]
        numbers = torch.arange(size).view(shape).expand(tuple(tensor.shape))
        own = local_slice(numbers, tensor, name)
        if not own.numel():
            return [(0, 0)] * tensor.dim()
        first = int(own[(0,) * own.dim()])
        ranges.append((first, first + own.shape[dim]))
    return ranges


def _read(entry: Entry, ranges: list[tuple[int, int]]) -> torch.Tensor:
    if any(start == end for start, end in ranges):
        return torch.empty([end - start for start, end in ranges], dtype=entry.dtype)
    try:
        with safe_open(entry.file, framework="pt", device="cpu") as opened:
            if not ranges:
                return cast(torch.Tensor, opened.get_tensor(entry.key))
            part = opened.get_slice(entry.key)
            return cast(torch.Tensor, part[tuple(slice(start, end) for start, end in ranges)])
    except (SafetensorError, OSError) as error:
        raise DataError(
            f"weights {entry.file}: {entry.key} cannot be read ({error}); the file was changed or cut short since its "
            "header was read; copy it again"
        ) from None


def _natural(key: str) -> list[tuple[int, str]]:
    """`experts.10` after `experts.9`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in key.split(".")]
