"""The Pareto front of memory against time over all candidates of a question, not those that a goal's search met.

A second best-first walk, in the order of time: each plan that comes out needs less memory than all before it, and what
cannot need less than the last one, by its bound, is dropped. So nothing beats a plan of the front in both.
"""

from __future__ import annotations

import heapq
import math

from shardwise.plan.searching.bounds import Bounds
from shardwise.plan.searching.choice import ALIKE, Candidate
from shardwise.plan.searching.families import Family, Flow, Leaf
from shardwise.plan.searching.space import Space
from shardwise.plan.searching.walk import Walk

APART = 0.02
"""Neighbours of a front differ by at least this share of their memory, so that it has some hundred points at most."""


def front_of(space: Space, limit: float, apart: float = APART, bounds: Bounds | None = None) -> list[Candidate]:
    """Plans that no other beats in both memory and time, the fastest first.

    Every plan that fits `limit` is beaten by one of them in time, and in memory but for the share `apart`; the last is
    the plan that needs the least memory.

    `bounds`: those of another walk through the space, which has worked them out in part.

    Cost: one to three times that of `find_plan`; beyond `walk.EXACT` devices it leaves out what that leaves out.
    """
    walk = FrontWalk(space, "time", limit, bounds)
    lean = next(iter(Walk(space, "memory", limit, walk.bounds).run(1)), None)
    if lean is None:
        return []
    found = walk.front(apart, lean.needs * (1 - ALIKE))
    front: list[Candidate] = []
    for each in sorted([*found, lean], key=lambda each: (each.time.total, each.needs)):
        if not front or each.needs < front[-1].needs:
            front.append(each)
    return front


class FrontWalk(Walk):
    """A walk whose limit on memory shrinks below each plan that comes out."""

    saves = True

    def front(self, apart: float, least: float) -> list[Candidate]:
        """The front; `least`: what no plan needs less memory than."""
        found: list[Candidate] = []
        self.start()
        while self._heap and self.below >= least:
            _, (_, size), _, _, node = heapq.heappop(self._heap)
            if isinstance(node, Candidate):
                if node.needs <= self.below:
                    found.append(node)
                    self.below = node.needs * (1 - apart) if apart else math.nextafter(node.needs, 0.0)
            elif isinstance(node, Flow) and size > self.below:
                self._follow(node)
            elif size > self.below:
                self.pruned["bound on memory"] += 1
            elif (plan := self._divide(node, ())) and plan.needs <= self.below:
                self._push(plan, plan.time.total, plan.needs, 0)
        return found

    def _push(self, node: Family | Candidate, seconds: float, size: float, world: int) -> None:
        heapq.heappush(self._heap, (seconds, (isinstance(node, Candidate), size), next(self._order), seconds, node))

    def _push_leaf(self, leaf: Leaf, size: float, family: tuple[float, float, float] | None) -> None:
        if size <= self.below:
            super()._push_leaf(leaf, size, family)
