"""One best-first search over families of plans: what `search.find_plan` and `front.front_of` walk with. No torch."""

from __future__ import annotations

import gc
import heapq
import math
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import count, filterfalse
from typing import get_args

from shardwise.hardware.cluster import Cluster
from shardwise.plan.hosting import host_share, on_host
from shardwise.plan.memory import estimate_memory
from shardwise.plan.plan import ZERO_BUBBLE, Float8, Float8Kind, Plan, Schedule, Zero
from shardwise.plan.repair import divisors
from shardwise.plan.searching.bounds import Bounds
from shardwise.plan.searching.bounds_pipes import PipeSizes
from shardwise.plan.searching.choice import Candidate, Choice, Entry, Goal, bucket_of
from shardwise.plan.searching.cores import Queue, one_recipe, queues_of
from shardwise.plan.searching.families import (
    Core,
    Family,
    Flow,
    Leaf,
    Pipe,
    Spread,
    layout_of,
    least_simplicity,
    pipe_of,
)
from shardwise.plan.searching.space import Space
from shardwise.plan.timing import estimate_time

EXACT = 32
"""Beyond so many devices, of blocks that are cut alike but for how context is exchanged, and for sequence and loss
parallelism, only the fastest is followed; and smaller micro-batches once larger ones have been."""
ANY = -1
"""In place of a policy: a flow that still has the choice of all."""


@contextmanager
def _without_collections() -> Iterator[None]:
    """A search keeps what it makes, and makes no cycles: to look for them takes a seventh of its time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Walk:
    """One best-first search: a heap of families and plans, ordered by the bucket of what they cost at least."""

    saves = False
    """Whether plans that save memory are looked at where their relatives fit without."""

    def __init__(self, space: Space, goal: Goal, limit: float, bounds: Bounds | None = None) -> None:
        self.space, self.goal, self.limit = space, goal, limit
        self.below = math.inf
        """Plans that show more memory are not looked at."""
        self.seen: list[Candidate] = []
        self.pruned: Counter[str] = Counter()
        self.estimated = 0
        self._heap: list[Entry] = []
        self._order = count()
        self._spreads: dict[Pipe, list[Spread]] = {}
        self._fitted: set[tuple[object, ...]] = set()
        self._others: dict[Core, tuple[Float8Kind, ...]] = {}
        self._behind: dict[Core, Queue] = {}
        """Of each core on the heap, those that are looked at when it is divided."""
        cluster = space.cluster
        self._host = host_share(cluster)
        self.bounds = bounds or Bounds(space, host=self._host)
        self.least = PipeSizes(self.bounds, self._spreads_of)

    @_without_collections()
    def run(self, top: int) -> list[Candidate]:
        """The best candidate of each of the `top` best layouts: of those as good as the fastest left, the simplest."""
        ranked: dict[tuple[int, ...], Candidate] = {}
        self.start()
        while len(ranked) < top and (best := self._next(ranked)):
            ranked[best.layout] = best
        if self._heap:
            self.pruned[f"bound on {'memory' if self.goal == 'memory' else 'time'}"] += len(self._heap)
        return list(ranked.values())

    def _next(self, ranked: Collection[tuple[int, ...]]) -> Candidate | None:
        """The simplest of the candidates of other layouts that are as good as the best of them.

        Families that can change nothing of that are put aside, for the layouts that follow.
        """
        choice, aside = Choice(self.goal), list[Entry]()
        for each in self.seen:
            if each.layout not in ranked:
                choice.add(each)
        while True:
            if not self._heap or self._heap[0][0] > choice.bucket:
                again, aside = filter(choice.may_change, aside), list(filterfalse(choice.may_change, aside))
                self._heap += again
                heapq.heapify(self._heap)
                if not self._heap or self._heap[0][0] > choice.bucket:
                    break
            entry = heapq.heappop(self._heap)
            node = entry[-1]
            if not isinstance(node, Core) and layout_of(pipe_of(node)) in ranked:
                self.pruned["slower than its layout's best"] += 1
            elif not isinstance(node, Core) and not choice.may_change(entry):
                aside.append(entry)
            elif found := self._divide(node, ranked):
                choice.add(found)
        self._heap += aside
        heapq.heapify(self._heap)
        return choice.best

    def _divide(self, node: Family, ranked: Collection[tuple[int, ...]]) -> Candidate | None:
        """Put the parts of a family on the heap; of a plan, what it is estimated to be where it may be one."""
        if isinstance(node, Core):
            self._divide_core(node, ranked)
            self._push_next(self._behind.pop(node))
        elif isinstance(node, Pipe):
            self._divide_pipe(node)
        elif isinstance(node, Flow):
            self._divide_flow(node)
        else:
            return self._estimate(node)
        return None

    def start(self) -> None:
        """Put all cores on the heap."""
        refused: dict[str, int] = {}
        for world in worlds_of(self.space.cluster, self.goal):
            cores = list(self.space.cores(world, refused))
            if self.space.has("fp8"):
                self._others.update(found := one_recipe(self.space, cores))
                cores = list(found)
            queues = queues_of(cores) if world > EXACT else (iter([[core]]) for core in cores)
            for queue in queues:
                self._push_next(queue)
        self.pruned.update(refused)

    def _push_next(self, queue: Queue) -> None:
        """Put the next core of a queue that fits on the heap; where times decide on nothing, all of them."""
        for alike in queue:
            if core := self._best_of(alike):
                seconds = 0.0 if self.goal == "memory" else self.bounds.fitting_time(core, self.limit)
                self._push(core, seconds, self.bounds.core_size(core), core.world)
                self._behind[core] = queue
                if self.goal != "memory":
                    return

    def _best_of(self, alike: list[Core]) -> Core | None:
        """Of cores that differ in what changes no size, or makes them smaller, the fastest that fits.

        Of equal times the leanest; for the goal `memory` it alone, exchanging as the first kind does.
        """
        alike = sorted(alike, key=lambda core: (not core.sequence, not core.loss))
        if not self._fits(alike[0]):
            return None
        if len(alike) > 1 and self.goal != "memory":
            alike.sort(key=lambda core: bucket_of(self.bounds.core_time(core)))
        return next(filter(self._fits, alike))

    def _fits(self, core: Core) -> bool:
        fits = self.least.fits(core, self.limit)
        self.pruned["bound on memory"] += not fits
        return fits

    def _push(self, node: Family, seconds: float, size: float, world: int) -> None:
        """Put a node where the least that its plans can score belongs."""
        least = size if self.goal == "memory" else seconds * (world if self.goal == "cost" else 1)
        heapq.heappush(self._heap, (bucket_of(least), least_simplicity(node), next(self._order), least, node))

    def _least_time(self, pipe: Pipe, policy: int) -> float:
        if self.goal == "memory":
            return 0.0
        data = self.bounds.least_data(Flow(pipe, Schedule(), policy, False))
        return self.bounds.pipe_time(pipe, policy, data)

    def _divide_core(self, core: Core, done: Collection[tuple[int, ...]]) -> None:
        for pipe in self.space.pipes(core):
            if layout_of(pipe) in done:
                continue
            policies = self._policies(pipe)
            if policies:
                self._push(pipe, self._least_time(pipe, policies[0]), self.least.of_pipe(pipe), core.world)
            else:
                self.pruned["bound on memory"] += 1

    def _divide_pipe(self, pipe: Pipe) -> None:
        policies = self._policies(pipe)
        for schedule in self.space.schedules(pipe.pp):
            row = self.space.refuses(Flow(pipe, schedule, 0, False))
            if row:
                self.pruned[row] += len(policies)
            elif self.goal == "memory":
                self._push_families(pipe, schedule, policies)
            else:
                self._push_flow(pipe, schedule, policies)

    def _policies(self, pipe: Pipe) -> tuple[int, ...]:
        """Numbers of the policies from the cheapest under which a pipe could fit, by their cost."""
        room = min(self.limit, self.below, sys.float_info.max)  # no host has room for what is infinite
        if self.least.bare(pipe) > room:
            return ()
        policies = self._by_cost(pipe.core)
        sizes = ((place, self.least.of_pipe(pipe, policy)) for place, policy in enumerate(policies))
        return policies[next((place for place, size in sizes if size <= room), len(policies)) :]

    def _least_size(self, pipe: Pipe, schedule: Schedule, offload: bool) -> float:
        """The least of all policies: of the one that keeps least, or of none, which holds no block in full."""
        lean = self.bounds.leanest(pipe.core)
        return min(self._size(Flow(pipe, schedule, policy, offload)) for policy in {0, lean})

    def _size(self, flow: Flow) -> float:
        """Device memory that all plans of a flow need at least."""
        split = flow.schedule.kind in ZERO_BUBBLE
        refused = tuple(zero for zero in get_args(Zero) if self.space.refuses(flow, zero)) if split else ()
        return self.bounds.family_size(flow, self._spreads_of, refused, self.bounds.flow_size(flow))

    def _spreads_of(self, pipe: Pipe) -> list[Spread]:
        if pipe not in self._spreads:
            self._spreads[pipe] = list(self.space.spreads(pipe))
        return self._spreads[pipe]

    def _by_cost(self, core: Core) -> tuple[int, ...]:
        """Numbers of the recompute policies, the cheapest first."""
        if self.goal == "memory":
            return tuple(range(len(self.space.recomputes)))
        again = self.bounds.work(core).again
        return tuple(sorted(range(len(again)), key=again.__getitem__))

    def _push_families(self, pipe: Pipe, schedule: Schedule, policies: tuple[int, ...]) -> None:
        """All policies together: no times decide on which is first."""
        for offload in self.space.offloads_saved:
            needs = self._least_size(pipe, schedule, offload)
            if needs > self.limit or needs == math.inf:
                self.pruned["bound on memory"] += len(policies)
            else:
                self._push(Flow(pipe, schedule, ANY, offload, policies), 0.0, needs, pipe.core.world)

    def _push_flow(self, pipe: Pipe, schedule: Schedule, policies: tuple[int, ...]) -> None:
        """The first of these policies under which what is kept could fit; the others, which cost more, follow it."""
        for place, policy in enumerate(policies):
            flow = Flow(pipe, schedule, policy, False, policies[place + 1 :])
            if self._push_if_fits(flow):
                return
            self._push_saved(flow)

    def _push_saved(self, flow: Flow) -> None:
        """The same flow with what it saves offloaded, which takes no less time."""
        if True in self.space.offloads_saved:
            self._push_if_fits(flow._replace(offload=True, rest=None))

    def _push_if_fits(self, flow: Flow) -> bool:
        """Put a flow where it belongs, unless it is refused or what it keeps cannot fit."""
        row, needs = self.space.refuses(flow), math.inf
        if not row:
            needs = self._size(flow)
            row = "bound on memory" if needs > min(self.limit, self.below) else ""
        if row:
            self.pruned[row] += 1
            return False
        seconds = 0.0 if self.goal == "memory" else self.bounds.least_time(flow)
        self._push(flow, seconds, needs, flow.pipe.core.world)
        return True

    def _follow(self, flow: Flow) -> None:
        """Put what a flow stands for beside its own plans."""
        if flow.rest is None:
            return
        if flow.policy == ANY:
            for policy in flow.rest:
                self._push_if_fits(flow._replace(policy=policy, rest=None))
        else:
            self._push_flow(flow.pipe, flow.schedule, flow.rest)
            self._push_saved(flow)

    def _divide_flow(self, flow: Flow) -> None:
        self._follow(flow)
        if flow.policy == ANY:
            return
        kept = self.bounds.flow_size(flow, every_rank=True)
        pipe = flow.pipe
        if self.bounds.least_size(kept) > self.limit:
            self.pruned["bound on memory"] += 1
            return
        spreads = self._spreads_of(pipe)
        family = self.bounds.flow_time(flow, simulates=True) if self.goal != "memory" else None
        for spread, size in zip(spreads, self.bounds.plan_sizes(flow, spreads, kept), strict=True):
            leaf, row = Leaf(flow, spread), self.space.refuses(flow, spread.zero)
            if row:
                self.pruned[row] += 1
                continue
            if size > self.limit:
                self.pruned["bound on memory"] += 1
            elif pipe.offloaded and self.bounds.hosted(flow, spread) > self._host:
                self.pruned["host memory"] += 1
            else:
                self._push_leaf(leaf, size, family)

    def _push_leaf(self, leaf: Leaf, size: float, family: tuple[float, float, float] | None) -> None:
        flow, spread = leaf
        seconds = 0.0 if self.goal == "memory" else self.bounds.plan_time(flow, spread, family)
        self._push(leaf, seconds, size, flow.pipe.core.world)

    def _estimate(self, leaf: Leaf) -> Candidate | None:
        """The full estimate of a plan, unless one of its family fits that saves less: savings only cost time."""
        space, (flow, spread) = self.space, leaf
        family = (flow.pipe, flow.schedule, spread.dp_shard, spread.zero)
        if self.goal != "memory" and not self.saves and family in self._fitted:
            self.pruned["saves what is not needed"] += 1
            return None
        plan, row = self._legal(leaf)
        if row:
            self.pruned[row] += 1
            return None
        workload = space.workload
        self.estimated += 1
        memory = estimate_memory(
            space.profile, plan, workload, stack=space.stack, device=space.cluster.device, room=self.limit
        )
        if not memory.fits_in(self.limit):
            self.pruned["memory"] += 1
            return None
        if on_host(memory, plan, space.cluster.per_node) > self._host:
            self.pruned["host memory"] += 1
            return None
        if memory.device - memory.held > self.below:
            return None
        time = estimate_time(space.profile, space.cluster, plan, workload, stack=space.stack)
        found = Candidate(plan=plan, memory=memory, time=time)
        self.seen.append(found)
        if not flow.policy and not flow.offload:
            self._fitted.add(family)
        return found

    def _legal(self, leaf: Leaf) -> tuple[Plan, str]:
        """The plan, and the row that refuses it; of recipes of float8 that cost the same, the first that none does."""
        plan = self.space.plan(*leaf)
        row = self.space.broken(plan)
        for recipe in self._others.get(leaf.flow.pipe.core, ()) if row else ():
            other = plan.with_(float8=Float8(recipe=recipe))
            if not self.space.broken(other):
                return other, ""
        return plan, row


def worlds_of(cluster: Cluster, goal: str) -> list[int]:
    """Numbers of devices to plan for: all of them; for the least cost also each smaller part of equal nodes."""
    if goal != "cost":
        return [cluster.world]
    parts = {cluster.per_node * nodes for nodes in divisors(cluster.nodes)} | set(divisors(cluster.per_node))
    return sorted(parts)
