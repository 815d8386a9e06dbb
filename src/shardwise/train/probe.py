"""`Probe`: loss and gradient norm on rows that are kept, the same numbers whenever the state is the same."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from shardwise.errors import UsageError
from shardwise.parallel.randomness import generators
from shardwise.plan.plan import Batch
from shardwise.train.batches import loader
from shardwise.train.state import TrainState
from shardwise.train.step import LossFn, StepOptions, TrainStep
from shardwise.train.untraced import order_buckets, untraced


class Measured(NamedTuple):
    """What a probe found."""

    loss: float
    """Mean over the rows' weight."""
    grad_norm: float
    """L2 norm of the mean gradient."""
    rows: str
    """SHA-256 of the rows, hexadecimal; where the loss draws at random, half of it, and half of that of the plan."""


class Probe:
    """Rows and a loss; given to a `Store`, its numbers are kept with each checkpoint and compared at each load.

    A forward and backward pass as in training, with the randomness of the state's step; parameters, buffers, what
    modules keep beside them, optimizer, data position and random generators are as before.

    Args:
        rows: samples, as the data set gives them; the same ones on every rank. A few.
        loss_fn: as in training. What it draws at random under another plan is something else, so that its numbers are
            compared under the plan of the save only.

    Raises:
        UsageError: no rows.

    Cost: memory and time of a step on these rows without its update, at each save and load; of two at the first one
    under DDP on three ranks or more, whose sums depend on the order that its buckets have from the second pass on.

    >>> store = Store("runs/a", probe=Probe([dataset[i] for i in range(4)], loss_fn))  # doctest: +SKIP
    """

    def __init__(self, rows: Sequence[Any], loss_fn: LossFn) -> None:
        """See the class."""
        self.rows, self.loss_fn = list(rows), loss_fn
        if not self.rows:
            raise UsageError("Probe: found no rows, needed at least one; give some samples of the data set")
        digest = hashlib.sha256()
        _feed(digest, self.rows)
        self._digest = digest.hexdigest()
        self._step: TrainStep | None = None

    def measure(self, state: TrainState) -> Measured:
        """Loss and gradient norm at the state as it is; every rank takes part."""
        placed = state.placed
        batch = Batch(global_size=len(self.rows), micro_batches=placed.plan.batch.micro_batches)
        window = next(loader(self.rows, batch, placed.mesh, shuffle=False))
        if self._step is None or self._step.state is not state:
            self._step = TrainStep(state, self.loss_fn, StepOptions())
            order_buckets(placed, partial(self._step.measure, window))  # at a load none was made yet
        loss, norm, drew = _in_range(self._step, window)
        draws = torch.tensor(float(drew), device=placed.mesh.device)
        rows = self._digest
        if float(placed.mesh.all_reduce_max(draws)):  # by the rank and the micro-batch: other plans draw otherwise
            rows = rows[:32] + hashlib.sha256(f"{rows} {placed.plan}".encode()).hexdigest()[:32]
        return Measured(loss, norm, rows)


def _in_range(step: TrainStep, window: Any) -> tuple[float, float, bool]:
    """Loss and gradient norm, and whether a generator moved; without a trace.

    Of scaled gradients in fp16 one that is too large is no finding: how many rows one sum takes hangs on the plan. A
    step would leave its update out and halve the scale; here it is halved for as long as it takes, as no number is
    another one for that.
    """
    scale = step.state.loss_scale
    kept = scale.scale if scale is not None else 1.0
    try:
        while True:
            with untraced(step.state.placed):
                device = step.state.mesh.device
                before = generators.states(device)
                loss, norm = step.measure(window)
                drew = generators.states(device) != before
            if scale is None or scale.scale <= 1 or math.isfinite(norm) or not math.isfinite(loss):
                return loss, norm, drew
            scale.scale /= 2
    finally:
        if scale is not None:
            scale.scale = kept


def _feed(digest: Any, value: Any) -> None:
    """Take a sample's structure and values into a digest."""
    if isinstance(value, dict):
        for key in value:
            digest.update(repr(key).encode())
            _feed(digest, value[key])
    elif isinstance(value, list | tuple):
        digest.update(f"{type(value).__name__} {len(value)} ".encode())
        for item in value:
            _feed(digest, item)
    elif isinstance(value, torch.Tensor | np.ndarray):
        array = (
            value.detach().cpu() if isinstance(value, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(value))
        )
        digest.update(f"{array.dtype} {tuple(array.shape)} ".encode())
        digest.update(bytes(array.contiguous().reshape(-1).view(torch.uint8).numpy()))
    else:
        digest.update(repr(value).encode())
