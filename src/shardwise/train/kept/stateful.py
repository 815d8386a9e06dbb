"""`StatefulObjects`: what a script keeps beside model, optimizer and data, and goes on with: schedulers, meters."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from shardwise.errors import CheckpointError, ModelError, UsageError
from shardwise.parallel.mesh import Mesh
from shardwise.train.values import from_json, like, plain, to_json, without_kinds

MOST_BYTES = 1 << 18
"""Of one object, as JSON: it is copied after every step of a run that recovers."""


class StatefulObjects:
    """Objects of a script with `state_dict` and `load_state_dict`, by name; their state is the same on every rank."""

    def __init__(self) -> None:
        """None, at first."""
        self._objects: dict[str, Any] = {}
        self.made: dict[str, Any] = {}
        """By name, the class of each; of a scheduler of torch also its settings. A later start is compared with it."""

    def add(self, objects: Mapping[str, Any]) -> None:
        """See `TrainState.keep`: what no checkpoint would hold is refused at the start."""
        for name, held in objects.items():
            if name in self._objects:
                raise UsageError(f"keep: {name!r} is kept already, needed another name")
            if isinstance(held, nn.Module | Optimizer):
                raise UsageError(
                    f"keep: {name!r}: found a {type(held).__name__}, whose tensors ranks divide; give models to apply, "
                    "and optimizers to TrainState, several as one (sw.several); an average of the weights is "
                    "TrainState(..., ema=sw.Ema(placed))"
                )
            lacks = [word for word in ("state_dict", "load_state_dict") if not callable(getattr(held, word, None))]
            if lacks:
                raise UsageError(
                    f"keep: {name!r}: a {type(held).__name__} has no {' and no '.join(lacks)}; needed: an object that "
                    "has both, as torch's schedulers have"
                )
            state = _kept(name, held)
            settings = _settings(without_kinds(state)) if isinstance(held, LRScheduler) else {}
            self.made[name] = {**settings, "class": type(held).__name__}
        self._objects |= objects

    def to_json(self) -> dict[str, Any]:
        """By name, what each object's `state_dict` gives.

        Raises:
            ModelError: it holds something else than numbers, texts, lists, dicts, arrays and tensors, or too much.
        """
        return {name: _kept(name, held) for name, held in self._objects.items()}

    def load(self, stored: Mapping[str, Any]) -> None:
        """Give each object that is in both what `to_json` gave for it; those of one side alone are left as they are.

        Raises:
            CheckpointError: an object does not take it.
        """
        for name, held in self._objects.items():
            if name not in stored:
                continue
            try:
                held.load_state_dict(like(held.state_dict(), from_json(stored[name])))
            except Exception as error:  # the object's own
                raise CheckpointError(
                    f"keep: {name!r}: a {type(held).__name__} does not take the state that is stored for it "
                    f"({type(error).__name__}: {error}); keep what was kept when it was saved, or give it another name"
                ) from error

    def factors(self, at: Mapping[str, Sequence[int]] | None = None) -> dict[str, list[tuple[int, list[float]]]]:
        """Of schedulers of functions (`LambdaLR`), which no state holds: what these give at some steps.

        `at`: which steps, by name; None: the first, the one half-way and the last.
        """
        found = {}
        for name, held in self._objects.items():
            functions = held.lr_lambdas if isinstance(held, LambdaLR) else []
            if functions and all(isinstance(each, FunctionType | MethodType | partial) for each in functions):
                last = max(0, held.last_epoch)
                steps = sorted({0, last // 2, last}) if at is None else at.get(name, ())
                found[name] = [(step, [float(each(step)) for each in functions]) for step in steps]
        return found

    def forgets(self, groups: Sequence[Mapping[str, Any]]) -> str:
        """What a checkpoint lacks, and what to do: one of torch's schedulers of these groups; empty: nothing."""
        if any(isinstance(held, LRScheduler) for held in self._objects.values()):
            return ""
        if not any("initial_lr" in group for group in groups):
            return ""
        return (
            "a scheduler of torch sets learning rates, and checkpoints do not hold where it is: a resumed run would "
            "begin its schedule anew; call state.keep(scheduler=scheduler), or give TrainState a schedule="
        )


def _settings(state: Any) -> Any:
    """Of a new scheduler's state, and those within it: without the rates, which follow from `base_lrs`."""
    if isinstance(state, dict):
        return {key: _settings(value) for key, value in state.items() if key != "_last_lr"}
    return list(map(_settings, state)) if isinstance(state, list) else state


def told(what: str, held: Any) -> Any:
    """What an object says of itself, as JSON.

    Raises:
        ModelError: it says what no checkpoint holds; `what` it is that does.
    """
    state = held.state_dict()
    try:
        return to_json(plain(state))
    except TypeError as error:
        raise ModelError(
            f"{what}: a checkpoint cannot hold its state{_where(state)}: {error}; needed: numbers, texts, "
            "lists, dicts, arrays and tensors; leave the rest out of its state_dict"
        ) from None


def own_place(place: Any, by_rank: Sequence[Any] | None, mesh: Mesh) -> Any:
    """This rank's place in the data: batches of a script's own may have another one on each rank.

    Args:
        place: of all ranks, where it is one.
        by_rank: of each rank of those that trained; None: it is one.
        mesh: the ranks that go on.

    Raises:
        CheckpointError: those are other ranks.
    """
    if by_rank is None:
        return place
    if len(by_rank) != mesh.world:
        raise CheckpointError(
            f"batches: found {len(by_rank)} places in the data, one for each rank that trained, and {mesh.world} "
            "ranks; needed as many as there were, for batches of a script's own that say where their rank is "
            "(shardwise.loader goes on under any plan); or begin with the weights alone (weights_only=True)"
        )
    return by_rank[mesh.rank]


def _kept(name: str, held: Any) -> Any:
    found = told(f"keep: {name!r}", held)
    if (size := len(json.dumps(found))) > MOST_BYTES:
        raise ModelError(
            f"keep: {name!r}: its state is {size} bytes as JSON, needed at most {MOST_BYTES}; keep large tensors as "
            "buffers of the model (register_buffer), which are stored in parts"
        )
    return found


def _where(state: Any, path: str = "") -> str:
    """`.a[0]`: the place of the first value that is none for a checkpoint."""
    items: list[tuple[str, Any]] = []
    if isinstance(state, dict):
        items = [(f".{key}", item) for key, item in state.items()]
    elif isinstance(state, list | tuple):
        items = [(f"[{place}]", item) for place, item in enumerate(state)]
    for step, item in items:
        try:
            to_json(plain(item))
        except TypeError:
            return _where(item, path + step)
    return f" at {path}" if path else ""
