"""The few numbers of a step that every rank must know, summed over the world.

Under plain replication (DDP) each rank ends with the whole gradient, so the norm needs no communication, and all other
numbers are known before the last backward pass: on CPUs they ride in DDP's own bucket, on accelerators (where a small
collective costs less than the kernels that fill a bucket) their all-reduce runs behind the backward, and nobody waits.
Elsewhere it is one all-reduce of seven numbers.
"""

from __future__ import annotations

import math
import warnings
from contextlib import suppress
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shardwise.parallel.engines.carrier import Carrier
from shardwise.parallel.mesh import GRADIENT_AXES, Mesh
from shardwise.parallel.placed import Placed
from shardwise.plan.plan import AXES
from shardwise.train.loss import Loss

_MARK = 2.0
"""More than one, which all sums are in a trace without values."""


class Own(NamedTuple):
    """What this rank knows of a step."""

    losses: list[Loss]
    stop: int
    """Its request to stop; 0 for none."""
    rows: int
    """Rows that count, where the loss is a plain mean; else 0."""
    rates: int
    """What tells the learning rates from others; see `guards/rates.py`."""
    has_unused: bool
    """Some parameter of `fully_shard` has no gradient here."""


class Sums(NamedTuple):
    """The same, summed over the world."""

    loss: float
    weight: float
    stop: float
    unused: float
    """`_MARK` of each rank that has a parameter of `fully_shard` without a gradient."""
    rows: float
    rates: float
    """Not zero where they differ between ranks with the same stages: each rank's is multiplied by its `weight_of`."""
    squares: float
    """Of the gradient, each element counted once."""

    @property
    def has_unused(self) -> bool:
        """Some rank has such a parameter."""
        return self.unused >= _MARK


def weight_of(mesh: Mesh) -> int:
    """Of this rank in a sum that is zero where all ranks with the same stages of a pipeline give the same number."""
    if mesh.world == 1 or dist.get_backend() == "fake":  # which sums nothing
        return 0
    place, count = 0, 1
    for axis in (axis for axis in AXES if axis != "pp"):
        place, count = place * mesh.size(axis) + mesh.index(axis), count * mesh.size(axis)
    return place or -count * (count - 1) // 2


def _tell_unequal_rows(stacklevel: int) -> None:
    """Warn of that."""
    with suppress(Warning):  # `-W error` does not end one rank, for which the others would wait
        warnings.warn(
            "the loss function returns a plain mean, and ranks hold unequal numbers of rows: every row weighs the "
            "same; return (sum, weight) if the mean is over anything else (shardwise.mean_over)",
            stacklevel=stacklevel,
        )


class WorldSums:
    """`start` with the loss, `finish` with the gradient."""

    def __init__(self, placed: Placed, *, after: bool = False) -> None:
        """`after`: gradients are reduced when all of them are there, and so are the numbers."""
        self.mesh = placed.mesh
        run = None if after else placed.parts[0].run
        self.overlaps = isinstance(run, DistributedDataParallel)
        """Every rank has the whole gradient: `start` may come before the last backward pass."""
        inner = run.module if isinstance(run, DistributedDataParallel) else None
        self._carrier = inner if isinstance(inner, Carrier) else None
        self._num_ranks = placed.mesh.num_gradient_ranks
        self._is_loss_rank = placed.mesh.index("tp") == 0
        self._compared, self._is_told = weight_of(placed.mesh), False
        self._load: list[float] | None = None
        self._numbers: torch.Tensor | None = None
        self._work: dist.Work | None = None

    @property
    def is_started(self) -> bool:
        """`start` was called in this step."""
        return self._numbers is not None or self._load is not None

    def start(self, own: Own) -> None:
        """Hand over this rank's numbers; every rank calls it at the same place of the step."""
        if self._carrier is not None:
            self._load = _spread(self._values(own))
            return
        self._numbers = self._tensor(own)
        if self.overlaps:
            # the group of the gradients' own reduction: one order of collectives on all ranks
            group = self.mesh.group(*GRADIENT_AXES)
            self._work = dist.all_reduce(self._numbers, group=group, async_op=True)

    def backward(self, loss: torch.Tensor) -> None:
        """The backward of the last micro-batch's loss, which takes the numbers along where they ride."""
        if self._carrier is None or self._load is None:
            torch.autograd.backward(loss)
        else:
            self._carrier.backward(loss, self._load)

    def finish(self, squares: torch.Tensor) -> Sums:
        """The sums, given this rank's sum of squares of the gradient: fp64, shape ()."""
        sums = self._summed(squares)
        if sums.rows and self._compared and not self._is_told and self.mesh.is_first:
            self._is_told = True
            _tell_unequal_rows(stacklevel=5)
        return sums

    def _summed(self, squares: torch.Tensor) -> Sums:
        if self._carrier is not None:
            self._load = None
            return Sums(*[*_gathered(self._carrier.unload(self._num_ranks)), float(squares)])
        assert self._numbers is not None
        squares = squares.to(self.mesh.device).reshape(1)
        if self._work is not None:
            self._work.wait()
            sums = torch.cat([self._numbers, squares])
        else:
            sums = self.mesh.all_reduce_sum(torch.cat([self._numbers, squares]))
        self._numbers = self._work = None
        return Sums(*sums.tolist())

    def _values(self, own: Own) -> list[float]:
        losses = own.losses if self._is_loss_rank else []
        loss, weight = sum(float(x.sum) for x in losses), sum(float(x.weight) for x in losses)
        return [loss, weight, *self._rest(own)]

    def _rest(self, own: Own) -> list[float]:
        return [own.stop, _MARK * own.has_unused, self._compared * own.rows, self._compared * own.rates]

    def _tensor(self, own: Own) -> torch.Tensor:
        losses, device = own.losses if self._is_loss_rank else [], self.mesh.device
        if device.type == "cpu":  # plain numbers: a dozen small kernels less
            return torch.tensor(self._values(own), dtype=torch.float64)
        zero = torch.zeros((), dtype=torch.float64, device=device)
        loss_ = sum((x.sum.double() for x in losses), zero)
        weight_ = sum((torch.as_tensor(x.weight, device=device).double() for x in losses), zero)
        return torch.cat([torch.stack([loss_, weight_]), zero.new_tensor(self._rest(own))])


_DIGITS = 3
_BASE = 4096


def _spread(values: list[float]) -> list[float]:
    """The numbers as fp32 sums exactly: the loss as it is, of all others three digits to base 4,096 and a fraction.

    >>> _spread([0.5, 4097.25])
    [0.5, 0.0, 1.0, 1.0, 0.25]
    """
    loss, *rest = values
    spread = [loss]
    for value in rest:
        whole = math.floor(value)
        spread += [float(whole // _BASE**2), float(whole // _BASE % _BASE), float(whole % _BASE), value - whole]
    return spread


def _gathered(sums: list[float]) -> list[float]:
    """The inverse of `_spread`, on sums over ranks."""
    values = [sums[0]]
    for i in range(1, len(sums), _DIGITS + 1):
        high, middle, low, fraction = sums[i : i + _DIGITS + 1]
        values.append(round(high) * _BASE**2 + round(middle) * _BASE + round(low) + fraction)
    return values
