"""DeepSpeed's ZeRO directories, stages 1, 2 and 3: fp32 weights and the optimizer's averages, put together by name.

    latest                                               names the tag, as global_step100
    global_step100/mp_rank_00_model_states.pt            stages 1, 2: param_shapes, buffers, frozen parameters, ties
    .../zero_pp_rank_3_mp_rank_00_model_states.pt        stage 3: the same for each rank
    .../[bf16_]zero_pp_rank_3_mp_rank_00_optim_states.pt rank 3's part of the fp32 weights and of the state

Stages 1 and 2 cut each flattened group of parameters into equal parts, one a rank; `param_slice_mappings` says which
elements of a rank's part are whose (files without it, or with one in another order than `param_shapes`: the parameters
follow each other). Stage 3 cuts each parameter into equal parts, the last one padded, and lays a rank's parts one after
the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.checkpoint.foreign.beside import LIGHTNING
from shardwise.checkpoint.foreign.deepspeed_files import MODEL, OPTIM, OTHER, UNIVERSAL, ranked, tagged
from shardwise.checkpoint.foreign.deepspeed_places import flattened, sharded
from shardwise.checkpoint.foreign.deepspeed_ranks import (
    Place,
    Rank,
    Shapes,
    Slices,
    check_devices,
    check_module,
)
from shardwise.checkpoint.foreign.deepspeed_universal import universal_parts
from shardwise.checkpoint.foreign.opened import OpenFiles
from shardwise.checkpoint.foreign.parts import check_is_all
from shardwise.checkpoint.foreign.sandbox import Instance, Job, read_values
from shardwise.checkpoint.foreign.state import Foreign, kind_of, step_count, step_of
from shardwise.checkpoint.foreign.torch_files import of_value
from shardwise.checkpoint.foreign.views import Run, Runs, Source, View, flat
from shardwise.errors import CheckpointError
from shardwise.findings import shown


def read_deepspeed(
    files: OpenFiles, path: Path, unsafe: bool = False, optimizer: bool = True, in_order: bool = False
) -> Foreign:
    """A ZeRO checkpoint of data-parallel ranks; or, of stage 0, the one file that holds everything.

    Raises:
        CheckpointError: refused by the reader; ranks missing; files of several saves; tensor-, pipeline- or
            expert-parallel parts; sizes that do not add up to the parameters.
    """
    folder = tagged(files, path)
    names = files.names(folder)
    other = [name for name in names if OTHER.fullmatch(name)]
    if other:
        raise CheckpointError(
            f"{folder}: found {other[0]}, of pipeline or expert parallelism; needed ZeRO over data-parallel ranks; "
            "convert it with DeepSpeed's own tools first"
        )
    models, optims = ranked(folder, names, MODEL), ranked(folder, names, OPTIM)
    if models and not optims and files.is_directory(folder / UNIVERSAL):
        return _universal(files, folder, models, unsafe, optimizer)
    if len(models) == 1 and not optims:
        value = read_values(files, [Job(models[0])], unsafe=unsafe)[0]
        zero = isinstance(value, dict) and value.get("param_shapes")  # which stage 0 has not
        alone = of_value(value, str(models[0]), in_order, optimizer)
        return alone if zero else replace(alone, kind=_said("deepspeed zero 0", value))
    if not models or not optims:
        raise CheckpointError(
            f"{folder}: found {len(models)} files of model states and {len(optims)} of optimizer states; needed both "
            "of every rank: copy all of them, and give the directory that holds `latest`, or the one that it names"
        )
    values = read_values(files, [Job(p) for p in (*models, *optims)], unsafe=unsafe)
    model, ranks = values[: len(models)], [_rank(v, p) for v, p in zip(values[len(models) :], optims, strict=True)]
    stage3 = isinstance(_inner(values[-1], optims[-1]).get("fp32_flat_groups"), list)
    _check_count(values[len(models) :], optims)
    check_is_all(_dict(model[0]), str(models[0]))
    shapes = _shapes(_field(model[0], "param_shapes", models[0]), models[0])
    if not any(shapes):
        raise CheckpointError(f"{models[0]}: found no parameters in 'param_shapes', needed some; copy the file again")
    _check_one_save(model, models, ranks, optims, optimizer)
    check_devices(optims, [rank.weights for rank in ranks])
    check_devices(models, [_tensors(_dict(m).get("module")) for m in model] if stage3 else [])
    places = (
        sharded(shapes, ranks, folder) if stage3 else flattened(shapes, ranks, folder, optims, _round_robin(model[0]))
    )
    if not stage3:
        check_module(optims, places, [rank.weights for rank in ranks], model[0].get("module"))
    kind = f"deepspeed zero {'3' if stage3 else '1 or 2'}"
    return _whole(kind, folder, dict(zip(models, model, strict=True)), ranks, (shapes, places), stage3)


def _universal(files: OpenFiles, folder: Path, models: list[Path], unsafe: bool, optimizer: bool) -> Foreign:
    """What DeepSpeed made of a ZeRO checkpoint for any number of ranks: a directory for each parameter."""
    model = read_values(files, [Job(p) for p in models], unsafe=unsafe)
    groups = _shapes(_field(model[0], "param_shapes", models[0]), models[0])
    shapes = {name: shape for group in groups for name, shape in group.items()}
    if not shapes:
        raise CheckpointError(f"{models[0]}: found no parameters in 'param_shapes', needed some; copy the file again")
    paths, ranks = universal_parts(files, folder, shapes, unsafe)
    _check_one_save(model, models, ranks, paths, optimizer)
    places = {name: Place(0, [(i, 0, math.prod(shape))]) for i, (name, shape) in enumerate(shapes.items())}
    stage3 = "zero_pp_rank" in models[0].name
    module = {} if stage3 else model[0].get("module")
    for path, rank, (name, place) in zip(paths, ranks, places.items(), strict=True):
        try:  # its maker goes by slices, which are wrong where gradients are round robin
            check_module([path], {name: replace(place, runs=[(0, 0, math.prod(shapes[name]))])}, [rank.weights], module)
        except CheckpointError as error:
            raise CheckpointError(f"{error}, or convert the ZeRO directory that this was made of") from error
    by_path = dict(zip(models, model, strict=True))
    return _whole("deepspeed universal", folder, by_path, ranks, ([shapes], places), stage3)


def _whole(
    kind: str, folder: Path, models: Mapping[Path, Any], ranks: Sequence[Rank],
    laid: tuple[Shapes, Mapping[str, Place]], stage3: bool,
) -> Foreign:  # fmt: skip
    """Weights, state and the rest, from the parts of the ranks."""
    shapes, places = laid
    first = next(iter(models.values()))
    found = Foreign(kind=_said(kind, first), weights={}, files=len(models) + len(ranks))
    for name, place in places.items():
        shape = shapes[place.group][name]
        found.weights[name] = _source(shape, place, [rank.weights for rank in ranks], f"{folder}: {name}")
    _add_state(found, places, shapes, ranks, folder)
    _add_rest(found, list(models.values()), list(models), stage3)
    found.step = step_of(first.get("global_steps")) or 0
    if step_of(first.get("global_steps")) is None:
        found.notes.append("the step, which is 0 here: the files say no global_steps that are a whole number")
    return found


def _said(kind: str, model: Any) -> str:
    """Lightning's strategy writes DeepSpeed's files with more in them; its names have the prefix of its modules."""
    return f"lightning, {kind}" if isinstance(model, dict) and LIGHTNING in model else kind


def _tensors(module: object) -> list[View]:
    return [item for item in _dict(module).values() if isinstance(item, View)]


def _round_robin(model: Any) -> bool:
    return _dict(_dict(_dict(model).get("ds_config")).get("zero_optimization")).get("round_robin_gradients") is True


def _field(value: Any, key: str, path: Path) -> Any:
    found = value.get(key) if isinstance(value, dict) else None
    if found is None:
        raise CheckpointError(
            f"{path}: found no {key!r}, needed it, as DeepSpeed's ZeRO writes it; give --from torch for a plain file"
        )
    return found


def _inner(value: Any, path: Path) -> dict[str, Any]:
    found = _field(value, "optimizer_state_dict", path)
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: found a {type(found).__name__}, needed a dict of ZeRO; copy the file again")
    return found


def _rank(value: Any, path: Path) -> Rank:
    inner = _inner(value, path)
    stage3 = isinstance(inner.get("fp32_flat_groups"), list)
    groups = inner.get("fp32_flat_groups" if stage3 else "single_partition_of_fp32_groups")
    if not isinstance(groups, list):
        raise CheckpointError(f"{path}: found no fp32 weights, needed those of ZeRO 1, 2 or 3; copy the file again")
    weights = [flat(item, f"{path}: fp32 group {i}") for i, item in enumerate(groups)]
    base = inner.get("optimizer_state_dict" if stage3 else "base_optimizer_state")
    entries, param_groups = _entries(base, len(weights))
    state = [
        {str(k): flat(v, f"{path}: {k} of group {i}") for k, v in entry.items() if isinstance(v, View) and v.shape}
        for i, entry in enumerate(entries)
    ]
    fallback = inner.get("base_optimizer_state_step")
    steps = [entry.get("step", group.get("step", fallback)) for entry, group in zip(entries, param_groups, strict=True)]
    paddings = _list(inner.get("param_alignment_paddings"))
    slices, aligned = _slices(inner.get("param_slice_mappings"), path), [any(_list(group)) for group in paddings]
    return Rank(weights=weights, state=state, steps=steps, slices=slices, aligned=aligned)


def _entries(base: Any, count: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """State of each flat group and the dials of its parameter group; empty ones where it has none."""
    if isinstance(base, list):
        return ([*map(_dict, base)] + [{}] * count)[:count], [{}] * count
    state, groups = _dict(_dict(base).get("state")), map(_dict, _list(_dict(base).get("param_groups")))
    dials = [group for group in groups for _ in _list(group.get("params"))]
    return [_dict(state.get(i)) for i in range(count)], (dials + [{}] * count)[:count]


def _dict(value: object) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _slices(value: Any, path: Path) -> Slices | None:
    if not isinstance(value, list) or not any(value):
        return None
    found = []
    for group in value:
        slices = {}
        for name, address in _dict(group).items():
            start, count = (address.get("start"), address.get("numel")) if isinstance(address, Instance) else (0, -1)
            if type(start) is not int or type(count) is not int or min(start, count) < 0:
                raise CheckpointError(f"{path}: {name}: found a slice without a place; copy the file again")
            slices[str(name)] = (start, count)
        found.append(slices)
    return found


def _check_count(values: Sequence[Any], paths: Sequence[Path]) -> None:
    count = _inner(values[0], paths[0]).get("partition_count")
    needed = max((n for n in count if isinstance(n, int)), default=None) if isinstance(count, list) else count
    if isinstance(needed, int) and needed != len(paths):
        raise CheckpointError(
            f"{paths[0].parent}: found optimizer states of {len(paths)} ranks, needed {needed}, as they say; copy the "
            "files of every rank"
        )


def _check_one_save(
    models: Sequence[Any], model_paths: Sequence[Path], ranks: Sequence[Rank], paths: Sequence[Path], optimizer: bool
) -> None:
    """A copy that stopped, or a save over another, leaves files of two saves: they fit, and count other steps.

    The optimizer counts no step that a loss scale skipped, and one too many where DeepSpeed makes its state by a step
    with zeros (ZeRO 3, older bf16). One that began anew over loaded weights counts fewer: then the user leaves it out.
    """
    done = [step_of(m.get("global_steps")) if isinstance(m, dict) else None for m in models]
    _check_equal("global_steps", dict(zip(model_paths, done, strict=True)))
    counts = [[step_of(step) for step in rank.steps] for rank in ranks]
    for group in range(len(counts[0])):
        held = [count[group] if group < len(count) else None for count in counts]
        _check_equal(f"the optimizer's step (group {group})", dict(zip(paths, held, strict=True)))
    steps, skipped = max(filter(None, counts[0]), default=0), step_of(models[0].get("skipped_steps")) or 0
    if optimizer and steps and done[0] is not None and not done[0] - skipped <= steps <= done[0] + 1:
        raise CheckpointError(
            f"{paths[0]}: found step {steps} of the optimizer, and {done[0]} global_steps ({skipped} of them skipped) "
            f"in {model_paths[0].name}; needed files of one save: copy all of them again; or, if the optimizer began "
            "anew there, --no-optimizer"
        )


def _check_equal(what: str, counts: Mapping[Path, int | None]) -> None:
    known = [(path, count) for path, count in counts.items() if count is not None]
    for path, count in known[1:]:
        if count != known[0][1]:
            raise CheckpointError(
                f"{path}: found {what} {count}, and {known[0][1]} in {known[0][0].name}; needed files of one save: "
                "copy all of them again"
            )


def _shapes(value: Any, path: Path) -> Shapes:
    groups = value if isinstance(value, list) else [value]
    found: Shapes = []
    for group in groups:
        shapes = {}
        if not isinstance(group, dict):
            raise CheckpointError(
                f"{path}: found {kind_of(group)}, needed names and shapes of parameters; copy it again"
            )
        for name, shape in group.items():
            if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape):
                raise CheckpointError(f"{path}: {name}: found no shape, needed whole numbers; copy the file again")
            shapes[str(name)] = tuple(shape)
        found.append(shapes)
    return found


def _source(shape: tuple[int, ...], place: Place, parts: Sequence[Sequence[View]], where: str) -> Source:
    """A parameter, or a state of its shape, from the ranks' flat parts."""
    runs, start = [], 0
    for rank, at, count in place.runs:
        view = parts[rank][min(place.group, len(parts[rank]) - 1)]
        if at + count > view.shape[0] or view.dtype != parts[0][min(place.group, len(parts[0]) - 1)].dtype:
            raise CheckpointError(
                f"{where}: elements {at} to {at + count} of rank {rank}'s part of {view.shape[0]}; needed them inside "
                "it, of one type on all ranks: copy the files of one save"
            )
        runs.append(Run(start, view, at, count))
        start += count
    if start != math.prod(shape):
        raise CheckpointError(
            f"{where}: found {start} elements over all ranks, needed {math.prod(shape)} for {shape}; copy the files of "
            "one save"
        )
    first = parts[0][min(place.group, len(parts[0]) - 1)]
    return Runs(shape, first.dtype, tuple(runs))


def _add_state(
    found: Foreign, places: Mapping[str, Place], shapes: Shapes, ranks: Sequence[Rank], folder: Path
) -> None:
    groups = len(ranks[0].weights)
    for name, place in places.items():
        group = min(place.group, groups - 1)
        keys = set(ranks[0].state[group])
        if not keys or not all(len(r.state) == groups and all(set(s) == keys for s in r.state) for r in ranks):
            found.optimizer = {}
            found.notes.append("the optimizer's state: it is not there for every group on every rank")
            return
        where = f"{folder}: {name}"
        states: dict[str, Source] = {
            key: _source(shapes[place.group][name], place, [[s[key] for s in r.state] for r in ranks], where)
            for key in sorted(keys)
        }
        step = ranks[0].steps[group]
        if step_of(step) is not None:
            states["step"] = step if isinstance(step, View) else step_count(step)
        found.optimizer[name] = states
    if len({"step" in states for states in found.optimizer.values()}) > 1:
        found.optimizer = {}
        found.notes.append("the optimizer's state: it counts the steps of some groups only")


def _add_rest(found: Foreign, models: Sequence[Any], paths: Sequence[Path], stage3: bool) -> None:
    """Buffers, frozen parameters and ties; what stage 1 leaves in the module alone."""
    model = models[0]
    module, buffers = _dict(model.get("module")), [*map(str, _list(model.get("buffer_names")))]
    there = {name: module[name] for name in buffers if isinstance(module.get(name), View)}
    found.weights |= there
    lacking = [name for name in buffers if name not in there]
    found.notes += [f"buffers that are listed, and are not there: {shown(lacking)}"] if lacking else []
    for name, shape in _shapes([model.get("frozen_param_shapes") or {}], paths[0])[0].items():
        fragments = [_dict(_dict(m).get("frozen_param_fragments")).get(name) for m in models]
        parts = [part for part in fragments if isinstance(part, View)]
        if len(parts) != len(models):
            raise CheckpointError(f"{paths[0]}: {name}: its frozen parts are not there; copy the files of every rank")
        if not stage3:
            found.weights[name] = parts[0]
            continue
        count = math.prod(shape)
        part = -(-count // len(parts))
        spans = [(rank, 0, min(part, count - rank * part)) for rank in range(len(parts))]
        place = Place(0, [span for span in spans if span[2] > 0])
        views = [[flat(p, f"{paths[0]}: {name}")] for p in parts]
        found.weights[name] = _source(shape, place, views, f"{paths[0]}: {name}")
    trained = {
        view.key: name for name in found.weights if isinstance(view := module.get(name), View) and 0 not in view.shape
    }
    ties = {str(a): str(b) for a, b in _dict(model.get("shared_params")).items()}
    left = {str(n): item for n, item in module.items() if isinstance(item, View) and n not in found.weights}
    if not stage3:  # old files list no ties; there the module has one tensor under two names
        ties |= {n: trained[item.key] for n, item in left.items() if n not in ties and item.key in trained}
    left = {name: item for name, item in left.items() if name not in ties}
    if left and stage3:
        found.notes.append(f"weights that the model names, and of which no rank has a part: {shown(list(left))}")
    elif left:
        found.weights |= left
        found.notes.append(f"weights that were not trained, in the module's own type: {shown(list(left))}")
    found.ties = ties
