"""`GroupValues`: what an optimizer's groups hold beside parameters, and which of it steps change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.checkpoint.format import same
from shardwise.errors import CheckpointError
from shardwise.train.optim import NamedOptimizer

_HOW = ("params", "foreach", "fused", "capturable", "differentiable")
"""Keys that are no state: how a step is made. Nor are learning rates, and what torch's schedulers keep of them."""


class GroupValues:
    """The plain values of an optimizer's groups: numbers, texts, nothing, and lists of such.

    Most are settings. But optimizers that need no schedule (Prodigy, schedule-free ones) keep their averages there, and
    a script may change what it gave: those are part of the state of a run.
    """

    def __init__(self, optimizer: NamedOptimizer) -> None:
        """They are now as they are at the beginning of a run."""
        self._optimizer = optimizer
        self._first = self._now()

    def _now(self) -> list[dict[str, Any]]:
        groups = self._optimizer.param_groups
        return [
            {k: v for k, v in group.items() if k not in _HOW and not k.endswith("lr") and _is_plain(v)}
            for group in groups
        ]

    def moved(self) -> list[dict[str, Any]]:
        """Of each group, those that are not what they were at first; as JSON."""
        now = self._now()
        first = [*self._first, *[{}] * (len(now) - len(self._first))]  # of groups that were added later
        pairs = zip(first, now, strict=True)
        return [{k: v for k, v in here.items() if k not in before or not same(v, before[k])} for before, here in pairs]

    def settings(self) -> list[dict[str, Any]]:
        """Of each group the others, and how it steps: what a later start is compared with; as JSON."""
        return [
            {
                key: list(value) if isinstance(value, tuple) else value
                for key, value in sorted(group.items())
                if key not in ("params", "lr", *moved) and value is not None and _is_plain(value)
            }
            for group, moved in zip(self._optimizer.param_groups, self.moved(), strict=True)
        ]

    def load(self, moved: Sequence[Mapping[str, Any]]) -> None:
        """Continue from what `moved` gave.

        Raises:
            CheckpointError: it is of another number of groups.
        """
        groups = self._optimizer.param_groups
        if len(moved) != len(groups):
            keys = sorted({key for values in moved for key in values})
            raise CheckpointError(
                f"the optimizer's groups hold values that steps change ({', '.join(keys)}): found {len(moved)} groups "
                f"in the checkpoint and {len(groups)} in this {self._optimizer.kind}; needed as many; make the same"
            )
        for group, values in zip(groups, moved, strict=True):
            for key, value in values.items():
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, int | float | str)
