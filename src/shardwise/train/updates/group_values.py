"""`GroupValues`: what an optimizer holds beside parameters and their state, and which of it steps change."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain, repeat, zip_longest
from typing import Any, cast

from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.format import same
from shardwise.errors import CheckpointError, ModelError
from shardwise.train.updates.optim import NamedOptimizer
from shardwise.train.values import from_json, like, plain, to_json

_WHOSE = ("params", "param_names")
"""Of a group: the second where it was made from named parameters. Checkpoints know parameters by names of their own."""
_HOW = (*_WHOSE, "foreach", "fused", "capturable", "differentiable", "initial_lr", "max_lr", "min_lr")
"""Keys that are no state: how a step is made, and what torch's schedulers begin with."""
MOST_BYTES = 1 << 16
"""Of one value, as JSON: more belongs into the state of parameters, which is stored in parts and compared."""


class GroupValues:
    """The values of an optimizer's groups, and of its state under keys that are no parameters.

    Numbers, texts, nothing, small tensors, and lists and dicts of such. Most are settings. But optimizers that need no
    schedule (Prodigy, schedule-free ones) keep their averages there, and a script or one of torch's schedulers may
    change what it gave: those are part of the state of a run.

    Args:
        optimizer: of the run.
        scheduled: the run has a schedule, which sets learning rates anew for each step: they are no state.
    """

    def __init__(self, optimizer: NamedOptimizer, *, scheduled: bool) -> None:
        """They are now as they are at the beginning of a run."""
        self._optimizer, self._scheduled = optimizer, scheduled
        self._first = self._now()

    def _now(self) -> list[dict[str, Any]]:
        return [
            {
                key: held
                for key, value in group.items()
                if self._is_state(key) and (held := _held(key, value)) is not _NO
            }
            for group in self._optimizer.param_groups
        ]

    def _is_state(self, key: str) -> bool:
        return key not in _HOW and not (self._scheduled and key.endswith("lr"))

    def moved(self) -> list[dict[str, Any]]:
        """Of each group, those that are not what they were at first; as JSON.

        Raises:
            ModelError: a tensor or a text that is too large.
        """
        now = self._now()
        first = [*self._first, *[{}] * (len(now) - len(self._first))]  # of groups that were added later
        pairs = zip(first, now, strict=True)
        return [{k: v for k, v in here.items() if k not in before or not same(v, before[k])} for before, here in pairs]

    def apart(self) -> list[dict[str, Any]]:
        """Of each torch optimizer, its state that is of no parameter; as JSON.

        Raises:
            ModelError: no checkpoint can hold it.
        """
        return [
            {key: self._told(key, value) for key, value in state.items() if not isinstance(key, Tensor)}
            for state in self._states
        ]

    def _told(self, key: object, value: object) -> Any:
        held = _held(key, value) if isinstance(key, str) else _NO
        if held is _NO:
            raise ModelError(
                f"{self._optimizer.kind}: state under {key!r}, which is no parameter, is a {type(value).__name__}; a "
                "checkpoint holds numbers, texts and small tensors there, under texts; keep it in a parameter's state"
            )
        return held

    @property
    def _states(self) -> list[dict[Any, Any]]:
        owners = {id(owner): owner for owner in map(self._optimizer.owner, self._optimizer.params)}
        return [cast(dict[Any, Any], owner.state) for owner in owners.values()]  # by parameter, says torch's type

    def settings(self) -> list[dict[str, Any]]:
        """Of each group the others, and how it steps: what a later start is compared with; as JSON."""
        return [
            {
                key: list(value) if isinstance(value, tuple) else value
                for key, value in sorted(group.items())
                if key not in (*_WHOSE, "lr", "initial_lr", *moved) and value is not None and _is_plain(value)
            }
            for group, moved in zip(self._optimizer.param_groups, self.moved(), strict=True)
        ]

    def members(self) -> list[dict[str, Any]]:
        """Of each group its settings with the base learning rate, and the names of what it steps; as JSON."""
        names = {id(parameter): name for name, parameter in self._optimizer.params.items()}
        rates = chain(self._optimizer.base_lrs, repeat(None))  # of groups that were added later nobody knows it
        return [
            {"settings": {**settings, "lr": lr}, "names": [names[id(p)] for p in group["params"] if id(p) in names]}
            for group, settings, lr in zip(self._optimizer.param_groups, self.settings(), rates, strict=False)
        ]

    def load(self, moved: Sequence[Mapping[str, Any]], apart: Sequence[Mapping[str, Any]]) -> None:
        """Continue from what `moved` and `apart` gave.

        Raises:
            CheckpointError: it is of another number of groups.
        """
        groups = self._optimizer.param_groups
        if moved and len(moved) != len(groups):
            keys = sorted({key for values in moved for key in values})
            raise CheckpointError(
                f"the optimizer's groups hold values that steps change ({', '.join(keys)}): found {len(moved)} groups "
                f"in the checkpoint and {len(groups)} in this {self._optimizer.kind}; needed as many; make the same"
            )
        none: dict[Any, Any] = {}
        for group, values, now, first in zip_longest(groups, moved, self.moved(), self._first, fillvalue=none):
            for key in now.keys() - values.keys():  # they had not changed then
                if key in first:
                    group[key] = like(group[key], from_json(first[key]))
                else:
                    del group[key]
            for key, value in values.items():
                if self._is_state(key):
                    group[key] = like(group.get(key), from_json(value))
        for state, values in zip_longest(self._states, apart, fillvalue=none):
            for key in [key for key in state if not isinstance(key, Tensor) and key not in values]:
                del state[key]  # left by a look at what a step makes
            for key, value in values.items():
                state[key] = like(state.get(key), from_json(value))


_NO = object()
"""What is no value for a checkpoint: a function, a module."""


def _held(key: str, value: object) -> Any:
    if isinstance(value, DTensor):
        if not all(place.is_replicate() for place in value.placements):
            raise ModelError(
                f"optimizer: value {key!r} of a group is a sharded tensor {tuple(value.shape)}; keep it in the state "
                "of a parameter, which is stored in parts"
            )
        value = value.to_local()
    try:
        held = value if _is_plain(value) and not isinstance(value, list | tuple) else to_json(plain(value))
    except TypeError:
        return _NO
    if isinstance(value, Tensor | str | dict | list | tuple) and (size := len(json.dumps(held))) > MOST_BYTES:
        raise ModelError(
            f"optimizer: value {key!r} is {size} bytes as JSON, needed at most {MOST_BYTES}; keep it in the state of a "
            "parameter, which is stored in parts"
        )
    return held


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, int | float | str)
