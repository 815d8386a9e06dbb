"""`Halving`: a step that runs out of memory is done again by all ranks, with micro-batches of half the rows.

The ranks meet once, between the last backward and the reduction of the gradients. Before that nothing is communicated,
so a rank that ran out of memory anywhere in forward or backward is not missed by anybody: it says so there, and all
abandon the window together. That is why gradients are not reduced behind the backward here, and why plans whose layers
communicate are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardwise.errors import OutOfMemoryError, UsageError
from shardwise.parallel.batchnorm import BatchNorm
from shardwise.parallel.inputs import num_rows, split_rows
from shardwise.parallel.mesh import GRADIENT_AXES
from shardwise.parallel.placed import Placed

_BATCH_NORMS = (BatchNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_FITS, _FULL, _HOPELESS = 0, 1, 2


class Halving:
    """How often the rows of a step's micro-batches were halved, and the two places where ranks agree.

    Args:
        placed: replicated parameters, or a single rank.
        limit: halvings of the run before it gives up.

    Raises:
        UsageError: a plan whose forward or backward communicates, or a model whose result depends on the micro-batch.

    Cost: gradients are reduced after the backward and not behind it, one by one; an all-reduce of one number per step;
    a copy of the buffers per step.
    """

    def __init__(self, placed: Placed, limit: int = 16) -> None:
        """See the class."""
        _check(placed)
        self._placed, self._limit = placed, limit
        self.halvings = 0
        self._largest = 1
        self._notes: list[dict[str, Any]] = []

    def cut(self, micro: list[Any], zero: tuple[bool, ...]) -> tuple[list[Any], tuple[bool, ...]]:
        """The micro-batches of this step, each cut into `2 ** halvings` or as many as it has rows."""
        pieces: list[tuple[Any, bool]] = []
        for batch, is_zero in zip(micro, zero, strict=True):
            parts = min(2**self.halvings, num_rows(batch))
            cut = split_rows(batch, parts) if parts > 1 and not is_zero else [batch]
            pieces += [(piece, is_zero) for piece in cut]
        self._largest = max(num_rows(piece) for piece, _ in pieces)
        return [piece for piece, _ in pieces], tuple(is_zero for _, is_zero in pieces)

    def run(self, attempt: Callable[[], Any], forget: Callable[[], None], step: int) -> Any:
        """What `attempt` returns, of the first attempt that fits on all ranks.

        Args:
            attempt: forward and backward of the window, communicating nothing; called again after a halving.
            forget: drops the gradients of an abandoned attempt.
            step: for messages.

        Raises:
            OutOfMemoryError: on all ranks alike, when one row is too much for one of them, or at the limit.
        """
        buffers = {name: buffer.clone() for name, buffer in self._placed.named_buffers().items()}
        while True:
            result, found = _attempted(attempt)
            state = _FITS if not found else _FULL if self._largest > 1 and self.halvings < self._limit else _HOPELESS
            worst, who = self._agree(state)
            if worst == _FITS:
                return result
            del result
            forget()
            with torch.no_grad():
                for name, buffer in self._placed.named_buffers().items():
                    buffer.copy_(buffers[name])
            if self._placed.mesh.device.type != "cpu":
                torch.accelerator.empty_cache()
            if worst == _HOPELESS:
                raise OutOfMemoryError(
                    f"step {step}: rank {who} is out of memory with micro-batches of one row, or after "
                    f"{self._limit} halvings ({self.halvings} were made){': ' + found if found else ''}; needed: "
                    "memory for the forward and backward of one row; recompute blocks, shard the parameters (zero), or "
                    "shorten the sequences"
                )
            self.halvings += 1
            self._notes.append({"event": "out of memory", "step": step, "rank": who, "halvings": self.halvings})

    def take_notes(self) -> tuple[dict[str, Any], ...]:
        """What happened since the last call."""
        notes, self._notes = tuple(self._notes), []
        return notes

    def reduce(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Sum the gradients over the data ranks, in place: no memory is needed. One that a rank lacks is zero there."""
        if self._placed.mesh.num_gradient_ranks == 1:
            return
        group = self._placed.mesh.group(*GRADIENT_AXES)
        works = []
        for parameter in parameters.values():
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


def _attempted(attempt: Callable[[], Any]) -> tuple[Any, str]:
    """The result, or what ran out. On return nothing holds the frames of the failed attempt, and so its activations."""
    try:
        return attempt(), ""
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return None, str(error).partition("\n")[0]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: an accelerator's, Python's, or that of torch's CPU allocator.

    >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("shape mismatch"))
    (True, False)
    """
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))


def _check(placed: Placed) -> None:
    mesh = placed.mesh
    wide = [axis for axis in ("pp", "cp", "tp") if mesh.size(axis) > 1]
    wide += ["ep"] if mesh.expert_mesh is not None else []
    modules = [module for part in placed.parts for module in part.run.modules()]
    found = None
    if wide:
        found = f"the axes {', '.join(wide)}, along which layers communicate"
    elif any(isinstance(module, FSDPModule) for module in modules):
        found = "parameters that fully_shard gathers within the step (zero 1 to 3, or a mixed precision)"
    elif any(isinstance(module, _BATCH_NORMS) for module in modules):
        found = "batch norm, whose statistics are those of a micro-batch: half the rows are another result"
    if found is not None:
        raise UsageError(
            f"StepOptions: on_oom='halve' with the plan `{placed.plan}`: found {found}; needed: one rank, or replicas "
            "(dpN) with zero 0; leave on_oom out, or recompute blocks instead"
        )
