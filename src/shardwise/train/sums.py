"""The few numbers of a step that every rank must know, summed over the world in one all-reduce.

Under plain replication (DDP) each rank ends with the whole gradient, so the norm needs no communication, and all other
numbers are known before the last backward pass: their all-reduce runs behind it, and nobody waits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shardwise.parallel.mesh import GRADIENT_AXES
from shardwise.parallel.placed import Placed
from shardwise.train.loss import Loss


class Own(NamedTuple):
    """What this rank knows of a step."""

    losses: list[Loss]
    stop: int
    """Its request to stop; 0 for none."""
    rows: int
    """Rows that count, where the loss is a plain mean; else 0."""
    is_mean: bool
    """The loss function returned a plain mean."""


class Sums(NamedTuple):
    """The same, summed over the world."""

    loss: float
    weight: float
    stop: float
    rows: float
    rows_squared: float
    num_means: float
    """Ranks whose loss function returned a plain mean."""
    squares: float
    """Of the gradient, each element counted once."""


class WorldSums:
    """`start` with the loss, `finish` with the gradient."""

    def __init__(self, placed: Placed) -> None:
        self.mesh = placed.mesh
        self.overlaps = isinstance(placed.parts[0].run, DistributedDataParallel)
        """Every rank has the whole gradient: `start` may come before the last backward pass."""
        self._is_loss_rank = placed.mesh.index("tp") == 0
        self._numbers: torch.Tensor | None = None
        self._work: dist.Work | None = None

    @property
    def is_started(self) -> bool:
        """`start` was called in this step."""
        return self._numbers is not None

    def start(self, own: Own) -> None:
        """Hand over this rank's numbers; every rank calls it at the same place of the step."""
        self._numbers = self._tensor(own)
        if self.overlaps:
            # the group of the gradients' own reduction: one order of collectives on all ranks
            group = self.mesh.group(*GRADIENT_AXES)
            self._work = dist.all_reduce(self._numbers, group=group, async_op=True)

    def finish(self, squares: torch.Tensor) -> Sums:
        """The sums, given this rank's sum of squares of the gradient: fp64, shape ()."""
        assert self._numbers is not None
        squares = squares.to(self.mesh.device).reshape(1)
        if self._work is not None:
            self._work.wait()
            sums = torch.cat([self._numbers, squares])
        else:
            sums = self.mesh.all_reduce_sum(torch.cat([self._numbers, squares]))
        self._numbers = self._work = None
        return Sums(*sums.tolist())

    def _tensor(self, own: Own) -> torch.Tensor:
        losses, device = own.losses if self._is_loss_rank else [], self.mesh.device
        rest = [own.stop, own.rows, own.rows**2, own.is_mean]
        if device.type == "cpu":  # plain numbers: a dozen small kernels less
            loss, weight = sum(float(x.sum) for x in losses), sum(float(x.weight) for x in losses)
            return torch.tensor([loss, weight, *rest], dtype=torch.float64)
        zero = torch.zeros((), dtype=torch.float64, device=device)
        loss_ = sum((x.sum.double() for x in losses), zero)
        weight_ = sum((torch.as_tensor(x.weight, device=device).double() for x in losses), zero)
        return torch.cat([torch.stack([loss_, weight_]), zero.new_tensor(rest)])
