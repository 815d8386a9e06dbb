"""`check_agreement`: before a process's first step, all ranks compare what they must have alike, and name what differs.

Ranks whose options, model or data differ do not fail where they differ: they wait for each other in collectives of
different kinds or sizes, or train on as two models. So each rank writes down what its collectives and its numbers
follow from, and one digest of it is compared. What is written down is exchanged only where digests differ.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.errors import ReplicaError
from shardwise.findings import shown
from shardwise.parallel.history import Operation
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.placed import Placed
from shardwise.parallel.reruns import numbers_in
from shardwise.train.batches import Batches
from shardwise.train.exchange import by_value, digest, gathered, listed
from shardwise.train.followed.drawn import Draws
from shardwise.train.guards.held import HeldParameters
from shardwise.train.guards.replicas import Replicas, checksum, left_empty
from shardwise.train.losses import Losses
from shardwise.train.lr import LrSchedule
from shardwise.train.options import StepOptions
from shardwise.train.state import TrainState

MOST_NAMED = 3
"""Further differences that a message names."""
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Facts:
    """What a rank has, as text by name."""

    place: int
    """Which pipeline stages are here: `of_place` is the same on the ranks that hold the same ones."""
    of_all: dict[str, str]
    of_place: dict[str, str]

    def digests(self) -> tuple[int, int, int]:
        """Numbers that are equal where the facts are."""
        return self.place, digest(self.of_all.items()), digest(self.of_place.items())


def go_on(state: TrainState, options: StepOptions) -> list[dict[str, Any]]:
    """Before the first step of a process: what is to be said of the run as it was; other options are a warning.

    Args:
        state: of the run; without `on_oom="halve"` its micro-batches are whole again.
        options: of its steps.
    """
    now, then = options.of_the_maths(), state.saved_with
    state.stepped_with, state.saved_with = now, None
    changed = [f"{key}: {then[key]!r} -> {now[key]!r}" for key in now if then and key in then and then[key] != now[key]]
    if changed and state.mesh.is_first:
        with suppress(Warning):  # `-W error` does not end a run that can go on
            warnings.warn(f"step {state.step + 1}: changed since it was saved: {'; '.join(changed)}", stacklevel=6)
    if not state.halvings:
        return []
    halves = options.on_oom == "halve"
    event = "micro-batches are halved as before" if halves else "micro-batches are no longer halved"
    facts = {"event": event, "step": state.step + 1, "halvings": state.halvings}
    if not halves:
        state.halvings = 0
    return [facts]


def check_agreement(state: TrainState, options: StepOptions, loss_fn: Any) -> None:
    """Compare all ranks. Every rank calls it, before anything else of its first step.

    Raises:
        ReplicaError: on all ranks: names the first thing that differs, and who has what.

    Cost: an all-gather of three numbers; before step 1 also one pass over the buffers, and over the operations that
    initialised the parameters.
    """
    mesh = state.mesh
    if state.placed.plan.batch.micro_batches > 1:
        state.placed = state.placed.with_(after_step=(*state.placed.after_step, _Counted(state.placed)))
    if mesh.world == 1:
        return
    own = Facts(mesh.index("pp"), dict(_of_all(state, options, loss_fn)), dict(_of_place(state)))
    if everyones := exchanged(own, mesh):
        raise ReplicaError(f"before step {state.step + 1}: {difference(everyones)}; {_ALIKE}")
    if mesh.size("pp") > 1:
        state.placed = state.placed.with_(after_step=(*state.placed.after_step, Draws(mesh)))
    if mesh.num_gradient_ranks > 1:
        after = (*state.placed.after_step, _Writes(state.placed), HeldParameters(mesh, loss_fn))
        # ranks along tp compute some gradients each for itself, which kernels on GPUs may round otherwise
        updates = (_FirstUpdate(state),) if mesh.size("tp") == 1 and not options.check_replicas else ()
        state.placed = state.placed.with_(after_step=(*after, *updates))


def exchanged(own: Facts, mesh: Mesh) -> list[Facts]:
    """What everybody has, where digests differ; nothing where they do not."""
    rows = [tuple(rank[0]) for rank in gathered([own.digests()], mesh)]
    if len({of_all for _, of_all, _ in rows}) == 1 and len(set(rows)) == len({place for place, _, _ in rows}):
        return []
    everyones: list[Any] = [None] * mesh.world
    dist.all_gather_object(everyones, own)
    return everyones


class _Writes:
    """After a process's steps 1, 4, 16, 64, ...: what forward wrote into buffers that checkpoints hold is equal.

    Statistics of a rank's own rows, which nobody sums, would make evaluation and checkpoints depend on the rank. Those
    that begin after a while (a centre, when training is warm) are a warning: the run is worth something by then.
    """

    def __init__(self, placed: Placed) -> None:
        self._placed = placed  # not the state, which would hold itself, and its data loaders, by it
        self._before, self._steps, self._next, self._is_told = _sums_of_buffers(placed), 0, 1, False

    def __call__(self, makes_update: bool) -> None:
        """Compare, now and then. Cost: a pass over these buffers, an all-gather of three numbers."""
        self._steps += 1
        if self._is_told or self._steps != self._next:
            return  # ranks of other stages may have buffers where this one has none
        self._next *= 4
        placed, before = self._placed, self._before
        written = {name: found for name, found in _sums_of_buffers(placed).items() if before.get(name) != found}
        of_place = {f"buffer {name}": f"{found:x}" for name, found in written.items()}
        place = placed.mesh.index("pp") * placed.mesh.size("tp") + placed.mesh.index("tp")
        if not (everyones := exchanged(Facts(place, {}, of_place), placed.mesh)):
            return
        said = f"{difference(everyones)}, as forward wrote it; {_SUMMED}"
        if self._steps == 1:
            raise ReplicaError(f"the first step: {said}")
        self._is_told = True
        if placed.mesh.is_first:
            with suppress(Warning):  # `-W error` does not end a run that can go on
                warnings.warn(f"step {self._steps} of this process: {said}", stacklevel=5)


class _Counted:
    """After a process's first step of several micro-batches: what each of them has written is warned of.

    Buffers (a counter, a moving mean, a queue, a codebook), weights without gradients (a teacher that follows), and,
    after the second one, numbers that modules count up. Statistics of batch norms are known to be those of
    micro-batches.
    """

    def __init__(self, placed: Placed) -> None:
        self._placed, self._before, self._frozen = placed, _sums_of_buffers(placed), _versions(placed)
        self._steps, self._numbers, self._counted = 0, _numbers(placed), set[str]()

    def __call__(self, makes_update: bool) -> None:
        """Look, twice. Cost: a pass over the buffers that checkpoints hold."""
        self._steps += 1
        if self._steps > 2 or not self._placed.mesh.tells:
            return
        placed, numbers, before = self._placed, _numbers(self._placed), self._numbers
        count = placed.plan.batch.micro_batches
        counted = {name for name, value in numbers.items() if before.get(name, value) + count == value}
        if self._steps == 2:
            self._tell("numbers", sorted(counted & self._counted))
            return
        self._numbers, self._counted = numbers, counted
        modules = {name: module for part in placed.parts for name, module in part.root.named_modules()}
        norms = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm
        written = sorted(name for name, found in _sums_of_buffers(placed).items() if self._before.get(name) != found)
        self._tell("buffers", [n for n in written if not isinstance(modules.get(n.rpartition(".")[0]), norms)])
        self._tell("weights", [n for n, version in _versions(placed).items() if self._frozen.get(n) != version])

    def _tell(self, kind: str, found: list[str]) -> None:
        plan = self._placed.plan
        with suppress(Warning):  # `-W error` does not end a run that may be meant so
            if found:
                warnings.warn(
                    f"forward writes the {kind} {shown(found)}, and `{plan}` calls it "
                    f"{plan.batch.micro_batches} times in a step, where one process calls it once: what they count or "
                    "average is another number; needed: one micro-batch, or a script that writes them once per step, "
                    "after it",
                    stacklevel=6,
                )


def _numbers(placed: Placed) -> dict[str, int]:
    """Whole numbers that modules hold beside buffers."""
    modules = {module: name for part in placed.parts for name, module in part.root.named_modules()}
    held = [(place, value) for part in placed.parts for place, value in numbers_in(part.root).items()]
    return {f"{modules[at]}.{key}".lstrip("."): value for (at, key), value in held if type(value) is int}


def _versions(placed: Placed) -> dict[str, int]:
    """Of plain weights that no optimizer steps: how often they were written."""
    weights = placed.named_parameters().items()
    return {name: p._version for name, p in weights if not (p.requires_grad or isinstance(p, DTensor))}


class _FirstUpdate:
    """After a process's first update: what several ranks hold is equal still, though nobody asked for such checks.

    An optimizer that draws, or whose state follows from the rank, makes as many models as there are replicas, and a
    checkpoint takes parts of each.
    """

    def __init__(self, state: TrainState) -> None:
        self._state: weakref.ref[TrainState] | None = weakref.ref(state)  # which holds this

    def __call__(self, makes_update: bool) -> None:
        """Compare, once. Cost: a pass over what several ranks hold, an all-gather of three numbers per layout."""
        if not makes_update or self._state is None:
            return
        state, self._state = self._state(), None
        if state is not None:
            Replicas(state).compare(_UPDATED)


def _sums_of_buffers(placed: Placed) -> dict[str, int]:
    """Checksums of the buffers that checkpoints hold."""
    kept = {name for part in placed.parts for name in part.root.state_dict()}
    live = {name: buffer for name, buffer in placed.named_buffers().items() if name in kept}
    return {name: checksum(buffer) for name, buffer in live.items() if not isinstance(buffer, DTensor)}


def _of_all(state: TrainState, options: StepOptions, loss_fn: Any) -> Iterator[tuple[str, str]]:
    """What is the same on every rank of the job."""
    placed, batches = state.placed, state.batches
    yield "torch's version", torch.__version__
    yield "the plan", str(placed.plan)
    yield "the seed of apply", str(placed.seed)
    yield "the seed of the run", str(state.seed)
    yield "the step", str(state.step)
    yield "halvings of the micro-batches", str(state.halvings)
    for field in fields(options):
        yield f"StepOptions.{field.name}", repr(getattr(options, field.name))
    yield "the losses", repr(loss_fn.factors) if isinstance(loss_fn, Losses) else "one"
    if isinstance(state.schedule, LrSchedule):
        yield "the schedule", repr(state.schedule)
    else:  # any function: what it gives for this step
        yield "the schedule's factor", repr(float(state.schedule(state.step)) if state.schedule is not None else 1.0)
    yield "the moving average", f"decay={state.ema.decay}, warmup={state.ema.warmup}" if state.ema else "none"
    if isinstance(batches, Batches):
        dials, position = batches.options, batches.state_dict()
        yield "the loader's rows per step", repr(position.pop("global_size"))
        yield "the loader's epochs", repr(dials.epochs)
        yield "the loader's drop_last", repr(dials.drop_last)
        yield from ((f"the loader's {key}", repr(value)) for key, value in position.items())


def _of_place(state: TrainState) -> Iterator[tuple[str, str]]:
    """What is the same on the ranks that hold the same stages of the model."""
    placed = state.placed
    for name, parameter in placed.named_parameters().items():
        place = placed.placements.get(name)
        shape, text = (place.global_shape, f", {place.text}") if place else (tuple(parameter.shape), "")
        yield f"parameter {name}", f"{shape} {parameter.dtype}{text}{'' if parameter.requires_grad else ', frozen'}"
    for name, buffer in placed.named_buffers().items():
        yield f"buffer {name}", f"{tuple(buffer.shape)} {buffer.dtype}"
    yield "the optimizer", type(state.optimizer.torch).__name__
    for number, group in enumerate(state.optimizer.param_groups):
        for key, value in sorted(group.items()):
            if key != "params":
                yield f"{key} of the optimizer's group {number}", _plain(value)
    if state.step == 0:
        yield from _initial_values(placed)


def _initial_values(placed: Placed) -> Iterator[tuple[str, str]]:
    """Of shards no two ranks hold the same, so parameters are compared by the operations that gave them their values.

    A module that was built before `apply` has no such record: `apply` has compared its values itself.
    """
    history, views = (placed.blueprint.history, placed.blueprint.views) if placed.blueprint is not None else (None, {})
    if history is not None:
        texts = [digest(_words(operation)) for operation in history.operations]
        for name in placed.named_parameters():
            if name in views:
                steps = [texts[index] for index in history.closure(views[name].storage)]
                yield f"the initial value of {name}", f"{digest([views[name], *steps]):x}"
    empty = left_empty(placed)
    for name, buffer in placed.named_buffers().items():
        if not (name in empty or buffer.is_meta or isinstance(buffer, DTensor)):
            yield f"the value of buffer {name}", f"{checksum(buffer):x}"


def _words(operation: Operation) -> Iterator[Any]:
    """What an operation of a constructor does, without what differs from process to process."""
    yield getattr(operation.call, "__name__", "")
    yield from (repr(operation.args), sorted(operation.kwargs), [operation.kwargs[k] for k in sorted(operation.kwargs)])
    if not operation.args and not operation.kwargs:  # it gives a tensor that was made outside of the recording
        yield checksum(operation.call())


def _plain(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return repr(value.item()) if value.numel() == 1 else f"{tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return ", ".join(map(_plain, value))
    return repr(value) if isinstance(value, _PLAIN) else type(value).__name__


_ALIKE = (
    "needed: the same on every rank; remove what makes it depend on the rank, its host or its environment from the "
    "script"
)
_UPDATED = (
    "after the first update; needed: the same update on every rank; let what the optimizer draws follow from the step "
    "and the parameter (a generator seeded by them), not from the rank, and no forward write into it of a rank's rows"
)
_SUMMED = (
    "needed: what one process with all rows has; sum over ranks what it is made of (mesh.all_reduce_sum), or keep it "
    "out of the state: register_buffer(..., persistent=False)"
)


def difference(everyones: list[Facts]) -> str:
    """Which things differ, and who has what of the first one: the same text on every rank."""
    everybody = range(len(everyones))
    found = list(_differing(everybody, lambda rank: everyones[rank].of_all))
    for place in sorted({facts.place for facts in everyones}):
        ranks = [rank for rank in everybody if everyones[rank].place == place]
        found += _differing(ranks, lambda rank: everyones[rank].of_place)
    name, holders = found[0]
    values = "; ".join(f"{value} on rank {listed(ranks)}" for value, ranks in holders)
    more = [other for other, _ in found[1:]]
    also = f"; also different: {shown(more, MOST_NAMED)}" if more else ""
    return f"{name} must be equal on ranks {listed(sorted(r for _, rs in holders for r in rs))}: found {values}{also}"


def _differing(
    ranks: Iterable[int], facts: Callable[[int], Mapping[str, str]]
) -> Iterator[tuple[str, list[tuple[str, list[int]]]]]:
    """Name -> (value, its ranks), the commonest value first, of what is not the same on some ranks."""
    for name in dict.fromkeys(name for rank in ranks for name in facts(rank)):
        found = by_value({rank: facts(rank).get(name, "nothing") for rank in ranks})
        if len(found) > 1:
            yield name, found
