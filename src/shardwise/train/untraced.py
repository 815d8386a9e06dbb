"""`untraced`: passes of a model that leave nothing behind; and `settle`, the one that a run makes before it goes on."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from shardwise.parallel.placed import Placed
from shardwise.train.kept.buffers import Buffers
from shardwise.train.state import TrainState


@contextmanager
def untraced(placed: Placed) -> Iterator[None]:
    """Forward passes inside are those of training; afterwards the model and the process are as before.

    Put back are buffers, what modules keep beside them (`get_extra_state`), modes, and the generators that a data set
    or a model may draw from. Parameters are not: nothing inside may step them.

    Cost: a copy of the buffers.
    """
    buffers = Buffers(placed)
    buffers.keep()
    try:
        with placed.in_mode(True), _same_generators(placed.mesh.device):
            yield
    finally:
        buffers.restore()


def settle(state: TrainState, measure: Callable[[], object]) -> None:
    """Before the first step of a state in this process: where a run goes on, make its sums in the order they had.

    DDP orders its buckets after its first backward pass, and sums over more than two ranks depend on that order to the
    last bit. So a state that is not at its first step is measured once, without a trace.

    Args:
        state: about to be trained.
        measure: forward and backward passes that reduce gradients.
    """
    if state.step and not state.is_joined:
        order_buckets(state.placed, measure)
    state.is_joined = True


def order_buckets(placed: Placed, measure: Callable[[], object]) -> None:
    """Make the sums that follow in the order that those of all later passes have; nothing where there is one order.

    Args:
        placed: see `settle`.
        measure: see `settle`.
    """
    if placed.mesh.num_gradient_ranks > 2 and any(isinstance(p.run, DistributedDataParallel) for p in placed.parts):
        with untraced(placed):
            measure()


@contextmanager
def _same_generators(device: torch.device) -> Iterator[None]:
    python, numbers = random.getstate(), np.random.get_state()
    devices: list[Any] = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numbers)
