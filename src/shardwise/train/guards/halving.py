"""A step that runs out of memory is done again by all ranks, with micro-batches of half the rows.

Where layers communicate nothing, `Halving`: the ranks meet once, between the last backward and the reduction of the
gradients. Before that a rank that ran out of memory anywhere in forward or backward is not missed by anybody: it says
so there, and all abandon the window together. That is why gradients are not reduced behind the backward then.

Where layers communicate, `SupervisedHalving`: peers wait in a collective for the rank that ran out, and cannot be
called back. Under `--recover` it ends with an error that asks for smaller micro-batches. All ranks are ended, and new
ones take over the newest copy of the state, with one halving more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardwise.errors import OutOfMemoryError, UsageError
from shardwise.launch.environment import recovery_place
from shardwise.launch.variables import variables
from shardwise.parallel.inputs import num_rows, split_rows
from shardwise.parallel.layers.batchnorm import BatchNorm
from shardwise.parallel.memory import is_out_of_memory, what_ran_out
from shardwise.parallel.mesh import GRADIENT_AXES
from shardwise.parallel.placed import Placed
from shardwise.train.state import TrainState

_BATCH_NORMS = (BatchNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_FITS, _FULL, _HOPELESS = 0, 1, 2
LIMIT = 16
"""Halvings of a run before it gives up."""


def cut_rows(
    micro: list[Any], zero: tuple[bool, ...], parts: int, *, equally: bool
) -> tuple[list[Any], tuple[bool, ...]]:
    """The micro-batches of a step, each cut along its rows into `parts` pieces, or as many as it has rows.

    Args:
        micro: the micro-batches.
        zero: which of them are padding; so are their pieces.
        parts: pieces of each.
        equally: exactly so many, as on the other ranks: where there are fewer rows, padding makes up for them.

    Cost: views; where a padding piece runs, the time of one row.
    """
    if parts == 1:
        return micro, zero
    pieces: list[tuple[Any, bool]] = []
    for batch, is_zero in zip(micro, zero, strict=True):
        cut = split_rows(batch, min(parts, num_rows(batch)))
        pieces += [(piece, is_zero) for piece in cut]
        if equally:
            pieces += [(cut[-1], True)] * (parts - len(cut))
    return [piece for piece, _ in pieces], tuple(is_zero for _, is_zero in pieces)


class Halving:
    """Plans whose layers communicate nothing: replicas, or one rank. The two places where ranks agree.

    Args:
        state: what is trained; it holds how often rows were halved.
        limit: halvings of the run before it gives up.

    Cost: gradients are reduced after the backward and not behind it, one by one; an all-reduce of one number per step,
    and one of a byte per parameter.
    """

    def __init__(self, state: TrainState, limit: int = LIMIT) -> None:
        """See the class."""
        self._state, self._placed, self._limit = state, state.placed, limit
        self.largest = 1
        """Rows of the largest micro-batch of the step, as it was cut."""
        self._notes: list[dict[str, Any]] = []

    def run(
        self, prepare: Callable[[], Any], attempt: Callable[[Any], Any], forget: Callable[[], None], step: int
    ) -> Any:
        """What `attempt` returns, of the first attempt that fits on all ranks.

        Args:
            prepare: the window, cut as it is to be now. Ranks may meet in it, and so none may be missed: what it raises
                ends the run.
            attempt: its forward and backward, communicating nothing; called again after a halving.
            forget: drops what an abandoned attempt left: gradients, and changes of buffers.
            step: for messages.

        Raises:
            OutOfMemoryError: on all ranks alike, when one row is too much for one of them, or at the limit.
        """
        state = self._state
        while True:
            result, found = _attempted(attempt, prepare())
            here = _FITS if not found else _FULL if self.largest > 1 and state.halvings < self._limit else _HOPELESS
            worst, who = self._agree(here)
            if worst == _FITS:
                return result
            del result
            forget()
            if self._placed.mesh.device.type != "cpu":
                torch.accelerator.empty_cache()
            if worst == _HOPELESS:
                raise OutOfMemoryError(_hopeless(step, who, state.halvings, self._limit, found))
            state.halvings += 1
            self._notes.append({"event": "out of memory", "step": step, "rank": who, "halvings": state.halvings})

    def take_notes(self) -> tuple[dict[str, Any], ...]:
        """What happened since the last call."""
        notes, self._notes = tuple(self._notes), []
        return notes

    def reduce(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Sum the gradients over the data ranks, in place: no memory is needed.

        One that a rank lacks is zero there; one that all lack stays absent, so that no optimizer steps its parameter.
        """
        if self._placed.mesh.num_gradient_ranks == 1:
            return
        group = self._placed.mesh.group(*GRADIENT_AXES)
        mask = [parameter.grad is not None for parameter in parameters.values()]
        there = torch.tensor(mask, dtype=torch.uint8, device=self._placed.mesh.device)
        dist.all_reduce(there, op=dist.ReduceOp.MAX, group=group)
        works = []
        for parameter, is_there in zip(parameters.values(), there.tolist(), strict=True):
            if not is_there:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            works.append(dist.all_reduce(parameter.grad, group=group, async_op=True))
        for work in works:
            work.wait()

    def _agree(self, state: int) -> tuple[int, int]:
        """The worst state of all ranks, and the last rank that has it."""
        mesh = self._placed.mesh
        worst = torch.tensor([state * mesh.world + mesh.rank], dtype=torch.int64, device=mesh.device)
        return divmod(int(mesh.all_reduce_max(worst)), mesh.world)


class SupervisedHalving:
    """Plans whose layers communicate, under `--recover`: the supervisor starts again with smaller micro-batches.

    Args:
        state: what is trained; it holds how often rows were halved.
        limit: halvings of the run before it gives up.

    Cost: none, until memory runs out; then a recovery without processes that stood by.
    """

    def __init__(self, state: TrainState, limit: int = LIMIT) -> None:
        """See the class."""
        self._state, self._limit = state, limit
        self.largest = 1
        """Rows of the largest micro-batch of the step, as it was cut."""

    def run(
        self, prepare: Callable[[], Any], attempt: Callable[[Any], Any], forget: Callable[[], None], step: int
    ) -> Any:
        """What `attempt` returns.

        Args:
            prepare: the window, cut as it is to be now.
            attempt: its forward and backward.
            forget: not called: this process ends.
            step: for messages.

        Raises:
            OutOfMemoryError: on the rank that ran out: to be halved; or for good, at one row or at the limit.
        """
        try:
            return attempt(prepare())
        except (RuntimeError, MemoryError) as error:
            found = what_ran_out(error)
            if not found:
                raise
            raise self._error(found, step) from error

    def take_notes(self) -> tuple[dict[str, Any], ...]:
        """Nothing: the supervisor tells of it."""
        return ()

    def _error(self, found: str, step: int) -> OutOfMemoryError:
        state, rows = self._state, self.largest
        if rows == 1 or state.halvings >= self._limit:
            return OutOfMemoryError(_hopeless(step, state.mesh.rank, state.halvings, self._limit, found))
        half = -(-rows // 2)
        halvings = state.halvings + 1
        return OutOfMemoryError(
            f"step {step}: out of memory with micro-batches of {rows} rows, of {half} from now on ({found})",
            halving={"step": step, "ran_out": found, "rows_before": rows, "rows": half, "halvings": halvings},
        )


def open_halving(state: TrainState) -> Halving | SupervisedHalving:
    """What `on_oom="halve"` means under a plan.

    Raises:
        UsageError: a model whose result depends on the micro-batch; or layers that communicate, without `--recover`.
    """
    placed = state.placed
    wide = communicating(placed)
    modules = [module for part in placed.parts for module in part.run.modules()]
    if any(isinstance(module, _BATCH_NORMS) for module in modules):
        raise UsageError(
            f"StepOptions: on_oom='halve' with the plan `{placed.plan}`: found batch norm, whose statistics are those "
            "of a micro-batch: half the rows are another result; needed: layers that treat each row alone; leave "
            "on_oom out, or recompute blocks instead"
        )
    if wide and recovery_place(variables()) is None:
        raise UsageError(
            f"StepOptions: on_oom='halve' with the plan `{placed.plan}`: found {wide}, so that the others wait for "
            "a rank that runs out of memory; needed: a supervisor that starts all of them again, or one rank, or "
            "replicas (dpN) with zero 0; start with --recover, or leave on_oom out and recompute blocks instead"
        )
    return SupervisedHalving(state) if wide else Halving(state)


def communicating(placed: Placed) -> str:
    """By what ranks communicate within the forward and backward of a micro-batch; empty: they do not."""
    mesh = placed.mesh
    wide = [axis for axis in ("pp", "cp", "tp") if mesh.size(axis) > 1]
    wide += ["ep"] if mesh.expert_mesh is not None else []
    if wide:
        return f"the axes {', '.join(wide)}, along which layers communicate"
    if any(isinstance(module, FSDPModule) for part in placed.parts for module in part.run.modules()):
        return "parameters that fully_shard gathers within the step (zero 1 to 3, or a mixed precision)"
    return ""


def _attempted(attempt: Callable[[Any], Any], window: Any) -> tuple[Any, str]:
    """The result, or what ran out. On return nothing holds the frames of the failed attempt, and so its activations."""
    try:
        return attempt(window), ""
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return None, what_ran_out(error)


def _hopeless(step: int, rank: int, halvings: int, limit: int, found: str) -> str:
    return (
        f"step {step}: rank {rank} is out of memory with micro-batches of one row, or after {limit} halvings "
        f"({halvings} were made){': ' + found if found else ''}; needed: memory for the forward and backward of one "
        "row; recompute blocks, shard the parameters (zero), or shorten the sequences"
    )
