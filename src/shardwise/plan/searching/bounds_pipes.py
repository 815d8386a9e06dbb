"""Bounds of memory for all plans of a pipe or of a core, before any of their schedules and savings is looked at."""

from __future__ import annotations

import math
from itertools import product
from operator import add
from typing import NamedTuple

from shardwise.plan.plan import Schedule
from shardwise.plan.schedule import after_warmup
from shardwise.plan.searching.bounds import Bounds
from shardwise.plan.searching.bounds_kept import kept_by
from shardwise.plan.searching.bounds_sizes import SpreadsOf
from shardwise.plan.searching.bounds_work import Flight, Floor
from shardwise.plan.searching.families import Core, Flow, Pipe
from shardwise.plan.searching.keys import cut_as
from shardwise.plan.updating import OWN


class Unit(NamedTuple):
    """What micro-batches in flight keep at least, of all schedules that cut the blocks alike: bytes per token."""

    first: float
    """On the first rank of the pipeline, and on the last; logits are not in it."""
    last: float
    heads: tuple[bool, bool]
    """Which of the two has the logits."""


Ground = tuple[tuple[int, ...], list[Floor]]
"""Ranks of which one needs most, often; and the least states of them."""
Flights = tuple[Schedule, tuple[set[Flight], set[Flight]]]
"""One of the schedules that cut the blocks alike; and the micro-batches in flight on each stage that any of them has,
on the first rank and on the last. No numbers: what is saved is offloaded."""


class PipeSizes:
    """Least device memory of pipes and of cores.

    A pipe keeps no less than the leanest of its schedules and policies, beside the states of its leanest spread. What
    is kept grows with the tokens of a micro-batch, so that one table serves all sizes of it.
    """

    def __init__(self, bounds: Bounds, spreads: SpreadsOf) -> None:
        self.bounds, self.spreads = bounds, spreads
        self._flights: dict[tuple[int, int], list[Flights]] = {}
        self._units: dict[tuple[object, ...], list[Unit]] = {}
        self._pipes: dict[tuple[object, ...], float] = {}
        self._fits: dict[tuple[object, ...], bool] = {}
        self._bare: dict[tuple[object, ...], float] = {}
        self._grounds: dict[tuple[object, ...], list[Ground]] = {}

    def fits(self, core: Core, limit: float) -> bool:
        """Whether some pipe of a core may need no more than `limit`; what the core alone needs is looked at first."""
        key = (core.world, limit, *_sizes_of(core))
        if key not in self._fits:
            pipes = reversed(list(self.bounds.space.pipes(core)))  # long pipelines hold few states
            self._fits[key] = self.bounds.core_size(core) <= limit and any(
                self.bare(pipe) <= limit and self.of_pipe(pipe) <= limit for pipe in pipes
            )
        return self._fits[key]

    def bare(self, pipe: Pipe) -> float:
        """Below `of_pipe`, and the same for all sizes of a micro-batch: states alone."""
        key = _grounds_as(pipe)
        if key not in self._bare:
            least = min((max(floor) for _, floors in self._grounds_of(pipe) for floor in floors), default=math.inf)
            self._bare[key] = self.bounds.on_device(least) * (1 - 1e-12)
        return self._bare[key]

    def _grounds_of(self, pipe: Pipe) -> list[Ground]:
        """Of each way to cut the blocks, what no micro-batch changes."""
        key = _grounds_as(pipe)
        if key not in self._grounds:
            self._grounds[key] = grounds = []
            for schedule, _ in self._flights_of(pipe):
                ranks, adds = (
                    self.bounds.telling(pipe, schedule),
                    pipe.pp == 1 or self.bounds.space.stack.name not in OWN,
                )
                filled = tuple((rank, adds) for rank in ranks)  # GPipe may be among the schedules, which adds to none
                grounds.append((ranks, self.bounds.floors_of(Flow(pipe, schedule, 0, False), self.spreads, (), filled)))
        return self._grounds[key]

    def of_pipe(self, pipe: Pipe, policy: int | None = None) -> float:
        """The same of a pipe: on its first or its last rank, whichever needs more; `policy`: under this one alone."""
        key = (pipe.pp, pipe.data, pipe.offloaded, policy, *_sizes_of(pipe.core))
        if key not in self._pipes:
            self._pipes[key] = self._of_pipe(pipe, policy)
        return self._pipes[key]

    def _of_pipe(self, pipe: Pipe, policy: int | None) -> float:
        bounds, core, least = self.bounds, pipe.core, math.inf
        tokens, logits = bounds.tokens(core), bounds.logits(core)
        for (first, last, heads), (ranks, floors) in zip(
            self._units_of(pipe, policy), self._grounds_of(pipe), strict=True
        ):
            kept = {0: first * tokens + logits * heads[0], pipe.pp - 1: last * tokens + logits * heads[1]}
            sizes = [kept.get(rank, 0.0) for rank in ranks] + [0.0] * 2 * len(ranks)
            for floor in floors:
                least = min(least, max(map(add, sizes, floor)))
        return bounds.on_device(least) * (1 - 1e-12)  # rounding: sums are taken in another order than a flow's

    def _units_of(self, pipe: Pipe, policy: int | None) -> list[Unit]:
        """Of each way to cut the blocks into the stages of ranks; `policy` None: of the leanest, or of none at all."""
        core, bounds = pipe.core, self.bounds
        key = (core.tp, core.cp > 1, core.sequence, core.precision, core.float8, pipe.pp, pipe.micro_batches, policy)
        if key not in self._units:
            policies = {0, bounds.leanest(core)} if policy is None else {policy}
            self._units[key], tables = (units := []), bounds.kept(core)
            for schedule, flights in self._flights_of(pipe):
                ends = (cut := bounds.cut(pipe.pp, schedule))[0], cut[-1]
                first, last = (
                    min(kept_by(tables, each, end, flight)[0] for each, flight in product(policies, found))
                    for end, found in zip(ends, flights, strict=True)
                )
                units.append(Unit(first, last, (ends[0][1], ends[1][1])))
        return self._units[key]

    def _flights_of(self, pipe: Pipe) -> list[Flights]:
        """Of each way to cut the blocks into the stages of ranks."""
        key = (pipe.pp, pipe.micro_batches)
        if key not in self._flights:
            found: dict[tuple[int, bool], Flights] = {}
            for schedule, offload in self.bounds.space.flows(pipe):
                shape = (pipe.pp, schedule.stages, pipe.micro_batches)
                _, flights = found.setdefault(cut_as(schedule), (schedule, (set(), set())))
                for rank, each in zip((0, pipe.pp - 1), flights, strict=True):
                    each.add((after_warmup(schedule.kind, shape, rank), offload))
            self._flights[key] = list(found.values())
        return self._flights[key]


def _sizes_of(core: Core) -> tuple[object, ...]:
    """What of a core decides on sizes: not how context is exchanged."""
    return core.tp, core.cp, core.ep, core.samples, core.sequence, core.loss, core.precision, core.float8


def _grounds_as(pipe: Pipe) -> tuple[object, ...]:
    """What of a pipe decides on states."""
    core = pipe.core
    return pipe.pp, pipe.data, pipe.offloaded, pipe.micro_batches > 1, core.tp, core.cp, core.ep, core.precision
