"""A plan that fits, with its estimates, and which of several that are as good is chosen. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Literal

from shardwise.plan.memory import Memory
from shardwise.plan.plan import Plan
from shardwise.plan.searching.families import simplicity
from shardwise.plan.timing import StepTime

Goal = Literal["time", "cost", "memory"]
ALIKE = 0.002
"""Plans that score so much more than the best, relatively, are as good as it: the simplest of them is preferred."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A legal plan that fits, with its estimates."""

    plan: Plan
    memory: Memory
    time: StepTime

    @property
    def layout(self) -> tuple[int, ...]:
        """How the model itself is divided; runners-up differ in it."""
        axes = self.plan.axes
        return (axes.pp, axes.cp, axes.tp, axes.ep, self.plan.world)

    def cost(self, price: float) -> float:
        """Currency per step, from currency per device and hour."""
        return self.time.total * self.plan.world * price / 3600

    @property
    def needs(self) -> float:
        """Bytes of the device that it cannot do without: a full one gets back what the allocator holds."""
        return self.memory.device - self.memory.held

    def score(self, goal: Goal) -> float:
        """What the goal makes least: seconds, device seconds, or bytes."""
        if goal == "memory":
            return self.needs
        return self.time.total * (self.plan.world if goal == "cost" else 1)


Entry = tuple[float, tuple[Any, ...], int, float, Any]
"""A family on the heap: what it is ordered by first, how simple its plans can be, a number, their least score, it."""


class Choice:
    """Of the candidates that it was given, the simplest of those that are as good as the best of them."""

    def __init__(self, goal: Goal) -> None:
        self.goal = goal
        self.best: Candidate | None = None
        self.bucket = math.inf
        """Of the most that a candidate may score to be as good as the best one."""
        self._most = self._score = math.inf
        self._simple: tuple[object, ...] = ()
        self._good: list[tuple[tuple[object, ...], float, Candidate]] = []

    def add(self, found: Candidate) -> None:
        """One more candidate."""
        score = found.score(self.goal)
        if score > self._most:
            return
        self._most = min(self._most, score * (1 + ALIKE))
        self.bucket = bucket_of(self._most)
        self._good = [each for each in self._good if each[1] <= self._most]
        self._good.append((simplicity(found.plan), score, found))
        self._simple, self._score, self.best = min(self._good, key=itemgetter(0))

    def may_change(self, entry: Entry) -> bool:
        """Whether a plan of a family can be simpler and as good, or so good that the choice is not."""
        _, plain, _, least, _ = entry
        return not self.best or (least <= self._most and (plain < self._simple or least * (1 + ALIKE) < self._score))


def bucket_of(score: float) -> int:
    """Families whose least scores are in one bucket are looked at together, the simplest first."""
    return math.floor(math.log(max(score, 1e-12)) / ALIKE)
