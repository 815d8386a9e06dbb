"""`Retention`: which checkpoints of a store stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.errors import UsageError


@dataclass(frozen=True)
class Retention:
    """Which complete checkpoints stay: those that any of the three names.

    >>> Retention(last=1, every=100).keeps([(300, None), (250, None), (200, None)])
    [True, False, True]
    """

    last: int = 3
    """The newest saves; at least 1."""
    every: int = 0
    """Steps that are multiples of this stay for ever; 0: none do."""
    best: int = 0
    """So many with the smallest `metric` of `Store.save` stay; of equal ones the older, which was measured."""

    def __post_init__(self) -> None:
        """Refuse what would remove the newest checkpoint."""
        if any(type(number) is not int for number in (self.last, self.every, self.best)):
            raise UsageError(f"{self}: found what is no whole number; needed last (keep), every and best as in keep=3")
        if self.last < 1 or self.every < 0 or self.best < 0:
            raise UsageError(f"{self}: at least the newest checkpoint must stay: last (keep) >= 1, every and best >= 0")

    def keeps(self, saves: Sequence[tuple[int, float | None]]) -> list[bool]:
        """For each (step, metric), newest first, whether it stays."""
        # saves between two evaluations have the metric of the first one: the oldest of them is what it was taken of
        ranked = sorted((metric, -i) for i, (_, metric) in enumerate(saves) if metric is not None and metric == metric)
        best = {-i for _, i in ranked[: self.best]}
        return [
            i < self.last or i in best or (self.every > 0 and step % self.every == 0)
            for i, (step, _) in enumerate(saves)
        ]
