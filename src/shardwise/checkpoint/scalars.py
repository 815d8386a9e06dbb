"""What a save says of a state beside its tensors: what all ranks must say alike, and what each says of itself."""

from __future__ import annotations

import reprlib
from typing import Any

from shardwise.checkpoint.format import same
from shardwise.checkpoint.saveable import Grouping, Saveable
from shardwise.errors import CheckpointError
from shardwise.plan.plan import AXES

DATA, BY_RANK = "data", "data_by_rank"
_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = 60
MEMBERS, FORMS = "members", "optimizer_forms"
OF_STAGE = ("base_lr", "optimizer", FORMS, MEMBERS, "batch_norm")
"""Scalars of which a rank holds what its stages of the model need: groups of the optimizer, rows of batch norms."""
_BY_GROUP = ("groups", "stateful", "stateful_made", "stateful_factors")
"""Scalars in which a value may stand for each group of the optimizer: what steps changed, and torch's schedulers."""


def members_of(state: Saveable) -> dict[str, Any]:
    """The parameters in each group of the optimizer, by name: many, so one rank of each stage says it."""
    if not isinstance(state, Grouping):
        return {}
    is_first = all(state.mesh.index(axis) == 0 for axis in AXES if axis != "pp")
    return {MEMBERS: state.members() if is_first else []}


def agreed(everyones: list[dict[str, Any]], stages: list[int]) -> dict[str, Any]:
    """What a save says of a state: the same on all ranks, and of the optimizer's groups those of all stages.

    Batches of a script's own may be at another place on each rank: those are kept by rank.

    Args:
        everyones: what each rank says.
        stages: its rank along pp.

    Raises:
        CheckpointError: ranks differ; naming the key and both values.

    >>> agreed([{"step": 1, "base_lr": [0.1, 0.2]}, {"step": 1, "base_lr": [0.2]}], [0, 1])
    {'step': 1, 'base_lr': [0.1, 0.2]}
    """
    for rank, theirs in enumerate(everyones):
        same_stage = stages.index(stages[rank])
        for key in {**everyones[0], **theirs}:
            first = same_stage if key in OF_STAGE else 0
            before, here = everyones[first].get(key), theirs.get(key)
            if key == MEMBERS or repr(here) == repr(before) or (key == DATA and _are_own(before, here)):
                continue
            do = "all ranks must save at the same step with the same settings"
            if stages[rank] != stages[first] and key in _BY_GROUP:
                do = (
                    "stages of the pipeline need as many groups in the optimizer: where a stage has no parameter of "
                    'one, give it an empty one, {"params": []}; or set rates by TrainState(schedule=...)'
                )
            raise CheckpointError(
                f"saving step {everyones[0].get('step')}: ranks disagree on {key!r}: {_SHOWN.repr(before)} on rank "
                f"{first}, {_SHOWN.repr(here)} on rank {rank}; {do}"
            )
    places = [theirs.get(DATA) for theirs in everyones]
    by_rank = {} if all(repr(place) == repr(places[0]) for place in places) else {BY_RANK: places}
    return everyones[0] | united(everyones) | by_rank


def _are_own(*places: Any) -> bool:
    """Whether positions in the data are those of batches of a script's own: a loader's is the same on every rank."""
    return all(isinstance(place, dict) and not {"kind", "global_size"} <= place.keys() for place in places)


def united(everyones: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the optimizer's groups what the stages of all ranks have.

    Raises:
        CheckpointError: they have different values where there can be one.
    """
    return {
        key: _union(key, [theirs[key] for theirs in everyones if key in theirs])
        for key in OF_STAGE
        if any(key in theirs for theirs in everyones)
    }


def _union(key: str, values: list[Any]) -> Any:
    """Values of one key on all ranks, as one: of lists, and of names joined by `+`, what any holds, each once."""
    first = values[0]
    if all(same(value, first) for value in values):
        return first
    if all(isinstance(value, dict) for value in values):
        names = dict.fromkeys(name for value in values for name in value)
        return {name: _union(f"{key}.{name}", [value[name] for value in values if name in value]) for name in names}
    if all(isinstance(value, str) for value in values):
        return "+".join(dict.fromkeys(name for value in values for name in value.split("+")))
    if not all(isinstance(value, list) for value in values):
        raise CheckpointError(
            f"saving: stages of the pipeline disagree on {key!r}: found {values[:4]}, needed one value, or a list of "
            "what each holds; give them the same settings"
        )
    found: list[Any] = []
    for item in (item for value in values for item in value):
        if not any(same(item, known) for known in found):
            found.append(item)
    return found
