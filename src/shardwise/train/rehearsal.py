"""`rehearse`: a step that leaves no trace, and `rejoin`: how a process becomes part of a run that is under way."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from shardwise.launch.environment import recovery_place
from shardwise.launch.variables import variables
from shardwise.train.mirror import Mirror
from shardwise.train.outliving import Place
from shardwise.train.step import TrainStep


def rejoin(step: TrainStep) -> Mirror | None:
    """Before the first step of `step.state` in this process: take over what the run has reached, and be ready.

    Under `--recover`: wait to be called (a process that stands by does), and take over the newest copy of the state.
    A run that goes on at a later step than the first one rehearses a step where that decides the last bits: DDP orders
    its buckets after its first backward pass, and sums over more than two ranks depend on that order.

    Returns:
        What keeps copies of the state; None without `--recover`.
    """
    state = step.state
    text = recovery_place(variables())
    if state.is_joined:
        return state.mirror
    if text is None:
        if state.step and _reorders(step):
            rehearse(step)
    else:
        place = Place.parse(text)
        mirror = Mirror(place)
        state.halvings = max(state.halvings, place.halvings)
        if place.streams is not None:  # while it stands by there is time; the step's kernels and caches are then warm
            rehearse(step)
            mirror.prepare(state)
        mirror.join(state)
        if place.streams is None and state.step and _reorders(step):
            rehearse(step)
        state.mirror = mirror
    state.is_joined = True
    return state.mirror


def rehearse(step: TrainStep) -> None:
    """Forward and backward passes on the next samples, without an update; every rank takes part.

    Buffers, random generators and the data position are put back.
    """
    state = step.state
    assert state.batches is not None
    position = state.batches.state_dict()
    buffers = [buffer for part in state.placed.parts for buffer in part.root.buffers()]
    kept = [buffer.detach().clone() for buffer in buffers]
    state.placed.train(True)
    with _same_generators(state.mesh.device):
        window = next(state.batches, None)  # type: ignore[call-overload]  # a loader is an iterator
        if window is not None:
            step.measure(window)
    with torch.no_grad():
        for buffer, before in zip(buffers, kept, strict=True):
            buffer.copy_(before)
    state.batches.load_state_dict(position)


def _reorders(step: TrainStep) -> bool:
    placed = step.state.placed
    return placed.mesh.num_gradient_ranks > 2 and any(isinstance(p.run, DistributedDataParallel) for p in placed.parts)


@contextmanager
def _same_generators(device: torch.device) -> Iterator[None]:
    """Leave the generators that a data set or a model may draw from as they were."""
    python, numbers = random.getstate(), np.random.get_state()
    devices: list[Any] = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numbers)
