"""Bounds of memory for all plans of a pipe or of a core, before any of their schedules and savings is looked at."""

from __future__ import annotations

import math
from typing import NamedTuple

from shardwise.plan.bounds import cut_as
from shardwise.plan.bounds_shared import SharedBounds, SpreadsOf
from shardwise.plan.space import Core, Flow, Pipe


class Unit(NamedTuple):
    """What micro-batches in flight keep at least, of all schedules that cut the blocks alike: bytes per token."""

    like: Flow
    """One of them."""
    first: float
    """On the first rank of the pipeline, and on the last; logits are not in it."""
    last: float
    heads: tuple[bool, bool]
    """Which of the two has the logits."""


class PipeSizes:
    """Least device memory of pipes and of cores.

    A pipe keeps no less than the leanest of its schedules and policies, beside the states of its leanest spread. What
    is kept grows with the tokens of a micro-batch, so that one table serves all sizes of it.
    """

    def __init__(self, bounds: SharedBounds, spreads: SpreadsOf) -> None:
        self.bounds, self.spreads = bounds, spreads
        self._units: dict[tuple[object, ...], list[Unit]] = {}
        self._pipes: dict[tuple[object, ...], float] = {}
        self._fits: dict[tuple[object, ...], bool] = {}

    def fits(self, core: Core, limit: float) -> bool:
        """Whether some pipe of a core may need no more than `limit`; what the core alone needs is looked at first."""
        key = (core.world, limit, *_sizes_of(core))
        if key not in self._fits:
            pipes = reversed(list(self.bounds.space.pipes(core)))  # long pipelines hold few states
            self._fits[key] = self.bounds.core_size(core) <= limit and any(
                self.of_pipe(pipe) <= limit for pipe in pipes
            )
        return self._fits[key]

    def of_pipe(self, pipe: Pipe) -> float:
        """The same of a pipe: on its first or its last rank, whichever needs more."""
        key = (pipe.pp, pipe.data, *_sizes_of(pipe.core))
        if key not in self._pipes:
            self._pipes[key] = self._of_pipe(pipe)
        return self._pipes[key]

    def _of_pipe(self, pipe: Pipe) -> float:
        bounds, core, least = self.bounds, pipe.core, math.inf
        tokens = core.samples * bounds.space.workload.seq_len / core.cp
        logits = bounds.logits(core)
        ranks = (0, pipe.pp - 1) if pipe.pp > 1 else (0,)
        for like, first, last, heads in self._units_of(pipe):
            ahead, behind = first * tokens + logits * heads[0], last * tokens + logits * heads[1]
            for floor in bounds.floors_of(like._replace(pipe=pipe), self.spreads, (), ranks):
                needs = max(ahead + floor.states[0], behind + floor.states[-1])
                least = min(least, needs)
        return bounds.on_device(least) * (1 - 1e-12)  # rounding: sums are taken in another order than a flow's

    def _units_of(self, pipe: Pipe) -> list[Unit]:
        """Of each way to cut the blocks into the stages of ranks."""
        core, space, bounds = pipe.core, self.bounds.space, self.bounds
        key = (core.tp, core.cp > 1, core.sequence, core.precision, core.float8, pipe.pp, pipe.micro_batches)
        if key not in self._units:
            found: dict[tuple[int, bool], Unit] = {}
            tokens = core.samples * space.workload.seq_len / core.cp
            for schedule, offload in space.flows(pipe):
                for policy in {0, bounds.leanest(core)}:
                    flow = Flow(pipe, schedule, policy, offload)
                    kept = bounds.flow_size(flow)
                    first, last = kept[0][1] / tokens, kept[-1][1] / tokens
                    heads = kept[0][2] > 0, kept[-1][2] > 0
                    known = found.get(cut_as(schedule), Unit(flow, first, last, heads))
                    found[cut_as(schedule)] = Unit(known.like, min(known.first, first), min(known.last, last), heads)
            self._units[key] = list(found.values())
        return self._units[key]


def _sizes_of(core: Core) -> tuple[object, ...]:
    """What of a core decides on sizes: not how context is exchanged."""
    return core.tp, core.cp, core.ep, core.samples, core.sequence, core.loss, core.precision, core.float8
