"""Directories of torch.distributed.checkpoint: FSDP's sharded ones, torchtitan's, Lightning's and Accelerate's."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.checkpoint.foreign.beside import METADATA
from shardwise.checkpoint.foreign.opened import OpenFiles
from shardwise.checkpoint.foreign.parts import check_unflattened
from shardwise.checkpoint.foreign.sandbox import Instance, Job, Left, read_values
from shardwise.checkpoint.foreign.state import Foreign, Named, named_state, step_of
from shardwise.checkpoint.foreign.torch_files import MODEL_KEYS, OPTIMIZER_KEYS, STEP_KEYS, has_tensors, of_value
from shardwise.checkpoint.foreign.views import Pieces, Source, View
from shardwise.checkpoint.format import DTYPES, Box, whole
from shardwise.errors import CheckpointError
from shardwise.findings import shown

_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
_GROUPS = "param_groups"
_PARTS = ("state", _GROUPS)
"""Of an optimizer's state_dict."""
_OPTIMIZER = re.compile(r"(opt|optim|optimizers?|optimizer_states?|optim(izer)?_state_dict)(_\d+)?")
_MEGATRON = re.compile(r"(chained_\d+\.)?optimizer\.(state|distributed|param_state)\.")
"""How names of an optimizer's tensors begin in Megatron's `torch_dist`: by the key of the state, then the parameter."""
Path_ = tuple[Any, ...]


@dataclass(frozen=True)
class _Item:
    """An entry of the storage: a tensor's part at an offset, or bytes."""

    job: Job
    offset: tuple[int, ...] | None


@dataclass(frozen=True)
class _Entries:
    """What a directory holds: where each entry was in what was saved; the tensors; plain numbers that may matter."""

    where: Path
    paths: dict[str, Path_]
    sources: dict[str, Source]
    numbers: dict[str, Any]
    pieces: dict[str, Job]
    """What was on top, and is stored as one object."""


def read_dcp(files: OpenFiles, path: Path, in_order: bool) -> Foreign:
    """A directory with `.metadata`: tensors are put together from their parts as they are read.

    Raises:
        CheckpointError: refused by the reader; a part that is missing, too much, of another shape, or elsewhere.
    """
    entries = _entries(files, path, in_order)
    if values := _in_one_piece(files, entries):
        found = of_value(values, str(entries.where), in_order)
        others = [name for name in entries.paths if name not in values]
        found.notes += [f"what a Shardwise run keeps elsewhere or has no use for: {shown(others)}"] if others else []
        return replace(found, kind="dcp", files=len(entries.paths))
    return _sorted(entries.where, entries.paths, entries.sources, entries.numbers, in_order)


def _in_one_piece(files: OpenFiles, entries: _Entries) -> dict[str, Any]:
    """What a planner that does not flatten has stored, each as one object; nothing, where no model is among it."""
    known = (*MODEL_KEYS, *OPTIMIZER_KEYS, *STEP_KEYS)
    wanted = [name for name in entries.pieces if name in known or _is_optimizer(name)]
    if not {*MODEL_KEYS} & {*wanted}:
        return {}
    values = dict(zip(wanted, read_values(files, [entries.pieces[name] for name in wanted]), strict=True))
    return values if any(has_tensors(values.get(key)) for key in MODEL_KEYS) else {}


def read_dcp_state(files: OpenFiles, path: Path, weights: Mapping[str, Source], in_order: bool) -> tuple[Named, str]:
    """A directory with an optimizer's state alone, as Accelerate's `optimizer_0`; or nothing, and the reason.

    Args:
        files: they stay open.
        path: has a `.metadata`.
        weights: of another directory.
        in_order: as `named_state`.

    Raises:
        CheckpointError: as `read_dcp`.
    """
    entries = _entries(files, path, in_order)
    states: dict[str, dict[str, Any]] = {}
    for name, at in entries.paths.items():
        optimizer = _within(at, _is_optimizer)
        if optimizer or at[0] in _PARTS:
            value = entries.sources.get(name, entries.numbers.get(name))
            states.setdefault(_joined(optimizer), {})[_joined(at[len(optimizer) :])] = value
    found, reason = _optimizer(states, weights, in_order)
    return found, reason or ("" if found else "the optimizer's state: there is none by parameter")


def _entries(files: OpenFiles, path: Path, in_order: bool) -> _Entries:
    where = path / METADATA
    metadata = _instance(read_values(files, [Job(where, "pickle")])[0], where, "Metadata")
    kinds = metadata.get("state_dict_metadata")
    if not isinstance(kinds, dict) or not kinds:
        raise _wrong(where, "no table of tensors", "one")
    paths = _paths(where, metadata.get("planner_data"), list(kinds))
    items = _items(path, where, metadata)
    tensors = {n: kind for n, kind in kinds.items() if _is(kind, "TensorStorageMetadata")}
    check_unflattened((_joined(paths[name]) for name in tensors), str(where))
    files.need(path, [item.job.path.name for name in tensors for item in items.get(name, [])], where)
    sources = _tensors(files, where, tensors, items)
    numbers = _numbers(files, {n: p for n, p in paths.items() if n not in tensors}, items, in_order)
    single = {
        n: items[n][0].job for n, p in paths.items() if len(p) == 1 and n not in tensors and len(items.get(n, ())) == 1
    }
    return _Entries(where, paths, sources, numbers, {str(paths[name][0]): job for name, job in single.items()})


def _wrong(where: Path, found: str, needed: str) -> CheckpointError:
    return CheckpointError(f"{where}: found {found}; needed {needed}; copy the checkpoint again, or save it again")


def _is(value: object, name: str) -> bool:
    return isinstance(value, Instance) and value.name.endswith(f".{name}")


def _instance(value: object, where: Path, name: str) -> Instance:
    if not isinstance(value, Instance) or not _is(value, name):
        raise _wrong(where, f"a {getattr(value, 'name', type(value).__name__)}", f"a {name} of DCP")
    return value


def _paths(where: Path, planner: Any, names: Sequence[str]) -> dict[str, Path_]:
    """Where each entry was in the state_dict that was saved, as the planner flattened it, in the order of that.

    The table of tensors has another order: what all ranks have is written by some, and stands there by who wrote it.
    """
    known = planner if isinstance(planner, dict) else {}
    order = {name: number for number, name in enumerate(known)}
    paths: dict[str, Path_] = {}
    first: dict[str, str] = {}
    for name in sorted((n for n in names if isinstance(n, str)), key=lambda name: order.get(name, len(order))):
        parts = known.get(name)
        if not isinstance(parts, list) or not parts or not all(isinstance(part, str | int) for part in parts):
            parts = [name]
        paths[name] = tuple(parts)
    if any(_is_flat(path, _GROUPS) for path in paths.values()):  # an optimizer's, beside the weights: on top, too
        paths = {
            n: ("optim", *str(path[0]).split(".", 1)) if _is_flat(path, *_PARTS) else path for n, path in paths.items()
        }
    paths = {
        n: ("optimizer", *path) if len(path) == 1 and _MEGATRON.match(str(path[0])) else path
        for n, path in paths.items()
    }
    for name in paths:
        other = first.setdefault(_joined(paths[name]), name)
        if other != name:
            raise _wrong(where, f"{other} and {name}, both at {_joined(paths[name])}", "one entry at each place")
    return paths


def _is_flat(path: Path_, *parts: str) -> bool:
    """Whether an entry has one name, as `state.<parameter>.exp_avg` of an optimizer's flattened state_dict."""
    return len(path) == 1 and str(path[0]).startswith(tuple(f"{part}." for part in parts))


def _items(path: Path, where: Path, metadata: Instance) -> dict[str, list[_Item]]:
    stored = metadata.get("storage_data")
    found: dict[str, list[_Item]] = {}
    for index, info in (stored if isinstance(stored, dict) else {}).items():
        index, info = _instance(index, where, "MetadataIndex"), _instance(info, where, "_StorageInfo")
        name, start, count = info.get("relative_path"), info.get("offset"), info.get("length")
        if not isinstance(name, str) or not _FILE.fullmatch(name):
            raise _wrong(where, f"the file name {str(name)[:80]!r}", "one of a file in this directory")
        if type(start) is not int or type(count) is not int or start < 0 or count < 0:
            raise _wrong(where, f"a part of {name} at {str(start)[:40]} of {str(count)[:40]} bytes", "a place in it")
        if info.get("transform_descriptors"):
            raise _wrong(where, f"a part of {name} that is compressed", "plain tensors: save without extensions")
        offset = index.get("offset")
        place = tuple(offset) if isinstance(offset, list) else None
        found.setdefault(str(index.get("fqn")), []).append(_Item(Job(path / name, "torch", start, count), place))
    return found


def _tensors(
    files: OpenFiles, where: Path, tensors: dict[str, Any], items: dict[str, list[_Item]]
) -> dict[str, Source]:
    planned: list[tuple[str, Box, Job]] = []
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    for name, kind in tensors.items():
        shape, dtype = _shape(kind.get("size"), where, name), _dtype(kind.get("properties"), where, name)
        shapes[name] = (shape, dtype)
        places = {item.offset: item for item in items.get(name, [])}
        for chunk in kind.get("chunks") or []:
            box = Box(_shape(chunk.get("offsets"), where, name), _shape(chunk.get("sizes"), where, name))
            item = places.get(box.offsets) or (places.get(None) if len(places) == 1 else None)
            if item is None or len(box.sizes) != len(shape):
                raise _wrong(where, f"no stored part of {name}{box}", "one for every part that it lists")
            if box.num_elements:
                planned.append((name, box, item.job))
    values = read_values(files, [job for _, _, job in planned])
    parts: dict[str, list[tuple[Box, Source]]] = {name: [] for name in tensors}
    for (name, box, job), value in zip(planned, values, strict=True):
        if not isinstance(value, View) or value.shape != box.sizes or value.dtype != shapes[name][1]:
            found = f"{value.shape} {value.dtype}" if isinstance(value, View) else type(value).__name__
            raise _wrong(job.path, f"{found} for {name}{box}", f"{box.sizes} {shapes[name][1]}, as {METADATA} says")
        parts[name].append((box, value))
    for name, pieces in parts.items():
        _check_tiles(where, name, shapes[name][0], [box for box, _ in pieces])
    return {name: _whole(*shapes[name], parts[name]) for name in tensors}


def _whole(shape: tuple[int, ...], dtype: str, parts: list[tuple[Box, Source]]) -> Source:
    return parts[0][1] if len(parts) == 1 and parts[0][0] == whole(shape) else Pieces(shape, dtype, tuple(parts))


def _check_tiles(where: Path, name: str, shape: tuple[int, ...], boxes: list[Box]) -> None:
    """Parts inside the tensor that do not overlap and hold all of its elements make it up."""
    inside = all(a + n <= m for box in boxes for a, n, m in zip(box.offsets, box.sizes, shape, strict=True))
    live: list[Box] = []
    apart = True
    for box in sorted(boxes):
        live = [b for b in live if b.offsets[0] + b.sizes[0] > box.offsets[0]] if shape else live
        apart = apart and not any(box.overlap(other) for other in live)
        live.append(box)
    total = sum(box.num_elements for box in boxes)
    if not inside or not apart or total != whole(shape).num_elements:
        raise _wrong(where, f"parts of {name} of {total} elements that do not make up {shape}", "each element once")


def _shape(value: Any, where: Path, name: str) -> tuple[int, ...]:
    if not isinstance(value, list) or any(type(n) is not int or n < 0 for n in value):
        raise _wrong(where, f"the shape {str(value)[:80]} for {name}", "whole numbers")
    return tuple(value)


def _dtype(properties: Any, where: Path, name: str) -> str:
    state = properties.state if isinstance(properties, Instance) else None
    first = state[0] if isinstance(state, list) and state else state.get("dtype") if isinstance(state, dict) else None
    text = first.name.removeprefix("torch.") if isinstance(first, Left | Instance) else str(first)
    if text not in DTYPES:
        raise _wrong(where, f"the type {text[:80]} for {name}", f"one of {', '.join(DTYPES)}")
    return text


def _numbers(
    files: OpenFiles, paths: dict[str, Path_], items: dict[str, list[_Item]], in_order: bool
) -> dict[str, Any]:
    """Entries of bytes that may say the step, or are plain numbers of an optimizer's state; others are not read.

    Of `param_groups` that an older planner left in one piece: how many there are.
    """
    wanted = [
        name
        for name, path in paths.items()
        if len(items.get(name, [])) == 1
        and (
            path[-1] in STEP_KEYS
            or (path[-1] == _GROUPS and in_order)
            or ("state" in path and (path[0] == "state" or any(_is_optimizer(p) for p in path)))
        )
    ]
    values = read_values(files, [items[name][0].job for name in wanted])
    found: dict[str, Any] = {}
    for name, value in zip(wanted, values, strict=True):
        if paths[name][-1] == _GROUPS:
            found |= {name: len(value)} if isinstance(value, list) else {}
        elif isinstance(value, int | float):
            found[name] = value
    return found


def _is_optimizer(part: object) -> bool:
    return isinstance(part, str) and _OPTIMIZER.fullmatch(part) is not None


def _sorted(
    where: Path, paths: dict[str, Path_], sources: dict[str, Source], numbers: dict[str, Any], in_order: bool
) -> Foreign:
    """Weights, optimizer and the rest, by where they were in what was saved."""
    optimizers = {name: _within(path, _is_optimizer) for name, path in paths.items()}
    tensors = {name: path for name, path in paths.items() if name in sources and not optimizers[name]}
    places = {name: _within(path, MODEL_KEYS.__contains__) for name, path in tensors.items()}
    places = {name: at for name, at in places.items() if at or len(paths[name]) == 1}
    if not places and any(optimizers.values()):
        raise CheckpointError(
            f"{where}: found an optimizer's state alone, needed weights; give the directory above, {where.parents[1]}, "
            "if it holds both"
        )
    if not places:
        tops = list(dict.fromkeys(str(path[0]) for path in tensors.values()))
        if len(tops) > 1:
            raise _wrong(where, f"weights of several models: {shown(tops)}", "those of one, alone or under `model`")
        raise _wrong(where, f"no weights among {shown(list(paths))}", "a state_dict, alone or under `model`")
    model = _model_of(where, places)
    weights: dict[str, Source] = {}
    states: dict[str, dict[str, Any]] = {}
    others, step = [], 0
    for name, path in paths.items():
        at, value = optimizers[name], sources.get(name, numbers.get(name))
        if at:
            states.setdefault(_joined(at), {})[_joined(path[len(at) :])] = value
        elif places.get(name) == model:
            weights[_joined(path[len(model) :])] = sources[name]
        elif (
            path[-1] in STEP_KEYS
            and "state" not in path[:-2]
            and not places.get(name)
            and (said := step_of(value)) is not None
        ):
            step = max(step, said)
        else:
            others.append(name)
    found = Foreign(kind="dcp", weights=weights, step=step, files=len(paths))
    found.optimizer, reason = _optimizer(states, weights, in_order)
    found.notes += [reason] if reason else []
    found.notes += [f"what a Shardwise run keeps elsewhere or has no use for: {shown(others)}"] if others else []
    return found


def _within(path: Path_, kind: Callable[[Any], bool]) -> Path_:
    """The way to the outermost container of a kind that holds an entry; none: nothing."""
    at = next((i for i, part in enumerate(path[:-1]) if kind(part)), -1)
    return path[: at + 1]


def _model_of(where: Path, places: Mapping[str, Path_]) -> Path_:
    """The outermost `model` or the like, which an average's lies below; the top, where there is none.

    Raises:
        CheckpointError: one is as good as another.
    """
    first: dict[Path_, str] = {}
    for name, at in places.items():
        first.setdefault(at, name)
    least = min((len(at) for at in first if at), default=0)
    found = {at: name for at, name in first.items() if len(at) == least}
    if len(found) > 1:
        raise _wrong(where, f"weights of several models: {shown(list(found.values()))}", "those of one")
    return next(iter(found))


def _joined(path: Path_) -> str:
    return ".".join(map(str, path))


def _optimizer(
    states: Mapping[str, dict[str, Any]], weights: Mapping[str, Source], in_order: bool
) -> tuple[Named, str]:
    """`state.<parameter>.<key>` of the one optimizer that has any, and numbers in place of parameters."""
    found = {
        name: {path: value for path, value in entries.items() if path.startswith("state.") and value is not None}
        for name, entries in states.items()
    }
    found = {name: entries for name, entries in found.items() if entries}
    if not found:
        held = [path for entries in states.values() for path in entries]
        return {}, f"the optimizer's state: it has none by parameter, but {shown(held)}" if states else ""
    if len(found) > 1:
        return {}, (
            f"the optimizer's state: there are {len(found)} optimizers ({shown(list(found))}), one can be taken over"
        )
    by_parameter: dict[Any, dict[str, Any]] = {}
    optimizer, entries = next(iter(found.items()))
    told = states[optimizer]
    groups = len({path.split(".")[1] for path in told if path.startswith(f"{_GROUPS}.")})
    if not groups and isinstance(told.get(_GROUPS), int):
        groups = told[_GROUPS]
    for path, value in entries.items():
        name, _, key = path.removeprefix("state.").rpartition(".")
        by_parameter.setdefault(int(name) if name.isdecimal() and name not in weights else name, {})[key] = value
    return named_state({"state": by_parameter, _GROUPS: [{}] * groups}, weights, in_order)
