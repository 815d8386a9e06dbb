"""`rehearse`: a step that leaves no trace, and `rejoin`: how a process becomes part of a run that is under way."""

from __future__ import annotations

from shardwise.launch.environment import recovery_place
from shardwise.launch.variables import variables
from shardwise.train.batches import Batches
from shardwise.train.kept.mirror import Mirror
from shardwise.train.kept.outliving import Place
from shardwise.train.step import TrainStep
from shardwise.train.untraced import settle, untraced


def rejoin(step: TrainStep) -> Mirror | None:
    """Before the first step of `step.state` in this process: take over what the run has reached, and be ready.

    Under `--recover`: wait to be called (a process that stands by does), and take over the newest copy of the state.
    Without it there is nothing to do: the first step settles what it must.

    Returns:
        What keeps copies of the state; None without `--recover`.
    """
    state = step.state
    text = recovery_place(variables())
    if state.is_joined or text is None:
        return state.mirror
    if isinstance(state.batches, Batches):
        state.batches.check_reads_again("--recover")
    place = Place.parse(text)
    mirror = Mirror(place)
    state.halvings = max(state.halvings, place.halvings)
    if place.streams is not None:  # while it stands by there is time; the step's kernels and caches are then warm
        rehearse(step)
        mirror.prepare(state)
        state.is_joined = True  # its buckets have their order
    mirror.join(state)
    state.mirror = mirror
    settle(state, lambda: rehearse(step))
    return mirror


def rehearse(step: TrainStep) -> None:
    """Forward and backward passes on the next samples, without an update or a trace; every rank takes part."""
    state = step.state
    assert state.batches is not None
    position = state.batches.state_dict()
    with untraced(state.placed):
        window = next(state.batches, None)  # type: ignore[call-overload]  # a loader is an iterator
        if window is not None:
            step.measure(window)
    state.batches.load_state_dict(position)
