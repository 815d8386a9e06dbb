"""`find_plan`: the best plan for a model on a cluster, out of all legal ones. No torch.

A best-first search over families of plans (`space`), each with a bound that none of its plans beats (`bounds`): the
family with the least bound is divided next, a plan that needs no more dividing is estimated in full, and what comes
out first cannot be beaten by what is left. So it finds what an exhaustive search finds.
Source: the A* argument of Hart, Nilsson and Raphael (1968), with an admissible bound.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count, product
from typing import Any, Literal, NamedTuple, get_args

from shardwise.errors import PlanError, UsageError
from shardwise.findings import nearest
from shardwise.hardware.cluster import GIB, Cluster
from shardwise.model.profile import Profile
from shardwise.model.spec import ModelSpec
from shardwise.plan.bounds import Bounds, Kept
from shardwise.plan.memory import Memory, estimate_memory
from shardwise.plan.plan import Plan, Schedule
from shardwise.plan.space import Core, Flow, Pipe, Space, Spread, simplicity, worlds_of
from shardwise.plan.stack import load_stack
from shardwise.plan.timing import StepTime, estimate_time
from shardwise.plan.workload import Workload

Goal = Literal["time", "cost", "memory"]
ALIKE = 0.002
"""Scores that differ by less, relatively, count as equal, and the simpler plan is preferred."""
EXACT = 128
"""Beyond so many devices, of blocks that are cut alike but for how context is exchanged, and for sequence and loss
parallelism, only the fastest is followed."""
HEADROOM = 0.05
"""Share of a device's memory that a plan leaves free, as the estimate has an error."""
ASSUMED_HOST = 256 * GIB
"""Host memory per device where the cluster does not say."""


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

    def score(self, goal: Goal) -> float:
        """What the goal makes least: seconds, device seconds, or bytes."""
        if goal == "memory":
            return self.memory.device
        return self.time.total * (self.plan.world if goal == "cost" else 1)


@dataclass(frozen=True, kw_only=True)
class Search:
    """What a search found, and what it did."""

    goal: Goal
    space: Space
    ranked: tuple[Candidate, ...]
    """The best plan, then the best of each other layout (pp, cp, tp, ep), best first."""
    seen: tuple[Candidate, ...] = field(default=(), repr=False)
    """All that were estimated in full and fit."""
    estimated: int = 0
    """Plans whose memory was estimated."""
    pruned: Mapping[str, int] = field(default_factory=dict)
    """Families and plans that were dropped: id of a constraint, or `memory`, or a bound -> how many."""
    nearest: Candidate | None = None
    """Where nothing fits: the plan that needs the least memory."""

    @property
    def best(self) -> Candidate | None:
        """The best plan; None: nothing fits."""
        return self.ranked[0] if self.ranked else None

    @property
    def front(self) -> tuple[Candidate, ...]:
        """Of all that were estimated, those that no other beats in both memory and time; least memory first."""
        found: list[Candidate] = []
        for each in sorted(self.seen, key=lambda c: (c.time.total, c.memory.device)):
            if not found or each.memory.device < found[-1].memory.device:
                found.append(each)
        return tuple(reversed(found))


def find_plan(
    profile: Profile,
    spec: ModelSpec | None,
    cluster: Cluster,
    workload: Workload,
    *,
    goal: Goal | str = "time",
    **options: Any,
) -> Search:
    """The best plan for a model on a cluster, and the runners-up.

    Args:
        profile: the model as the estimators see it.
        spec: its sizes, which constraints ask for; None: those that need them are not checked.
        cluster: devices and links.
        workload: length, global batch, optimizer.
        goal: `time`: the fastest step on all devices; `cost`: the fewest device seconds, on all or fewer nodes;
            `memory`: the least device memory.
        **options: `allow` and `forbid` (words of `space.OPT_IN` and `space.FEATURES`), `top` (how many layouts, 10),
            `stack` (a `Stack`; default: Shardwise's own), `headroom` (share of the memory that stays free, 0.05, as the
            estimate has an error).

    Raises:
        UsageError: an unknown goal, option or word.
        PlanError: no legal plan at all, with the nearest batch where that is why.

    Exact up to `EXACT` devices. Cost: some 0.3 s for 8; 4 to 7 s for 405 billion parameters on 16,384 (a busy core).

    >>> from shardwise.hardware.cluster import load_cluster
    >>> from shardwise.model.profile import profile_of
    >>> from shardwise.model.spec import preset
    >>> sizes, small = preset("llama-1b"), Workload(seq_len=2048, global_batch=8)
    >>> find_plan(profile_of(sizes), sizes, load_cluster("h100:1"), small).best.plan.world
    1
    """
    if goal not in get_args(Goal):
        raise UsageError(f"goal: found {goal!r}; {nearest(goal, get_args(Goal))}")
    top, stack = options.pop("top", 10), options.pop("stack", None) or load_stack("shardwise")
    headroom = float(options.pop("headroom", HEADROOM))
    words = {name: tuple(options.pop(name, ())) for name in ("allow", "forbid")}
    for found in options:
        raise UsageError(f"find_plan: found option {found!r}; needed allow, forbid, top, stack or headroom")
    space = Space(profile, spec, cluster, workload, stack, **words)
    aim: Goal = "cost" if goal == "cost" else "memory" if goal == "memory" else "time"
    walk = Walk(space, aim, cluster.device.memory * (1 - headroom))
    ranked = walk.run(top)
    least: Candidate | None = None
    if not ranked:
        frugal = Walk(space, "memory", math.inf)
        least = next(iter(frugal.run(1)), None)
        if least is None:
            raise PlanError(_no_plan(space, frugal))
    counts: dict[str, Any] = {"estimated": walk.estimated, "pruned": dict(walk.pruned.most_common())}
    return Search(goal=aim, space=space, ranked=tuple(ranked), seen=tuple(walk.seen), nearest=least, **counts)


def _no_plan(space: Space, walk: Walk) -> str:
    cluster, batch = space.cluster, space.workload.global_batch
    why = ", ".join(f"{name} ({number})" for name, number in walk.pruned.most_common(4)) or "the batch"
    text = f"plan: no legal plan of {space.profile.name} for {cluster.world} devices and a global batch of {batch}"
    near = " or ".join(map(str, near_batches(batch, cluster.world)))
    return f"{text}; refused by: {why}. A global batch that every layout divides: {near}; or forbid less"


def near_batches(batch: int, world: int) -> list[int]:
    """The nearest global batches that every number of data ranks divides.

    >>> near_batches(13, 8), near_batches(3, 8)
    ([8, 16], [8])
    """
    return sorted({max(1, batch // world) * world, -(-batch // world) * world})


class Leaf(NamedTuple):
    """A plan that is not estimated yet."""

    flow: Flow
    spread: Spread


Node = Core | Flow | Leaf | Candidate


class Walk:
    """One best-first search: a heap of families and plans, ordered by the bucket of what they cost at least."""

    def __init__(self, space: Space, goal: Goal, limit: float) -> None:
        self.space, self.goal, self.limit = space, goal, limit
        self.bounds = Bounds(space)
        self.seen: list[Candidate] = []
        self.pruned: Counter[str] = Counter()
        self.estimated = 0
        self._heap: list[tuple[int, bool, tuple[object, ...], int, Node]] = []
        self._order = count()
        self._spreads: dict[Pipe, list[Spread]] = {}
        self._fitted: set[tuple[object, ...]] = set()
        cluster = space.cluster
        self._host = cluster.host_memory / cluster.per_node or ASSUMED_HOST

    def run(self, top: int) -> list[Candidate]:
        """The best candidate of each of the `top` best layouts."""
        ranked: dict[tuple[int, ...], Candidate] = {}
        refused: dict[str, int] = {}
        for world in worlds_of(self.space.cluster, self.goal):
            cores = list(self.space.cores(world, refused))
            if self.limit == math.inf and self.space.has("accumulation"):  # what is nearest keeps one sample at a time
                cores = [core for core in cores if core.samples == 1]
            fit = [core for core in cores if self.bounds.core_size(core) <= self.limit]
            self.pruned["bound on memory"] += len(cores) - len(fit)
            for core in self._undominated(fit) if world > EXACT else fit:
                self._push(core, self.bounds.core_time(core) + self._least_update(core, 1), 0.0, world)
        self.pruned.update(refused)
        while self._heap and len(ranked) < top:
            _, _, _, _, node = heapq.heappop(self._heap)
            if isinstance(node, Candidate):
                ranked.setdefault(node.layout, node)
            elif isinstance(node, Core):
                self._divide_core(node, set(ranked))
            elif _layout(node.pipe if isinstance(node, Flow) else node.flow.pipe) in ranked:
                self.pruned["slower than its layout's best"] += 1
            elif isinstance(node, Flow):
                self._divide_flow(node)
            else:
                self._estimate(node)
        if self._heap:
            self.pruned[f"bound on {'memory' if self.goal == 'memory' else 'time'}"] += len(self._heap)
        return list(ranked.values())

    def _undominated(self, cores: list[Core]) -> Iterator[Core]:
        """Of cores that differ in the exchange of context, or in sequence and loss parallelism, the fastest.

        The first changes no size; the second only makes sizes smaller, so that of equal times the leaner is kept.
        """
        alike: dict[tuple[object, ...], list[Core]] = {}
        for core in cores:
            alike.setdefault((core.tp, core.cp, core.ep, core.samples, core.precision, core.float8), []).append(core)
        for group in alike.values():
            yield min(group, key=lambda core: (_bucket(self.bounds.core_time(core)), not core.sequence, not core.loss))

    def _push(self, node: Node, seconds: float, size: float, world: int) -> None:
        """Put a node where the least that its plans can score belongs."""
        least = size if self.goal == "memory" else seconds * (world if self.goal == "cost" else 1)
        heapq.heappush(self._heap, (_bucket(least), False, (), next(self._order), node))

    def _least_update(self, core: Core, count: int) -> float:
        return 0.0 if self.goal == "memory" else self.bounds.least_update(core, count, self.limit)

    def _divide_core(self, core: Core, done: set[tuple[int, ...]]) -> None:
        for pipe in self.space.pipes(core):
            if _layout(pipe) in done:
                continue
            policies = self._by_cost(core)
            for schedule, offload in self.space.flows(pipe):
                if self._any_fits(pipe, schedule, offload):
                    self._push_flow(pipe, schedule, offload, policies)
                else:
                    self.pruned["bound on memory"] += len(policies)

    def _any_fits(self, pipe: Pipe, schedule: Schedule, offload: bool) -> bool:
        """False where neither the policy that keeps least could fit, nor none, which holds no block in full."""
        lean = self.bounds.leanest(pipe.core)
        flows = (Flow(pipe, schedule, policy, offload) for policy in {0, lean})
        return any(self.bounds.least_size(self.bounds.flow_size(flow)) <= self.limit for flow in flows)

    def _by_cost(self, core: Core) -> tuple[int, ...]:
        """Numbers of the recompute policies, the cheapest first."""
        again = self.bounds.work(core).again
        return tuple(sorted(range(len(again)), key=again.__getitem__))

    def _push_flow(self, pipe: Pipe, schedule: Schedule, offload: bool, policies: tuple[int, ...]) -> None:
        """The first of these policies under which what is kept could fit; the others follow when it is divided."""
        for place, policy in enumerate(policies):
            flow = Flow(pipe, schedule, policy, offload, policies[place + 1 :])
            size = self.bounds.least_size(self.bounds.flow_size(flow))
            if size <= self.limit:
                seconds = self.bounds.flow_time(flow)[0] * self.bounds.stragglers
                self._push(flow, seconds + self._least_update(pipe.core, pipe.micro_batches), size, pipe.core.world)
                if self.goal != "memory":
                    return
            else:
                self.pruned["bound on memory"] += 1

    def _divide_flow(self, flow: Flow) -> None:
        if self.goal != "memory":
            self._push_flow(flow.pipe, flow.schedule, flow.offload, flow.rest)
        kept = self.bounds.flow_size(flow, every_rank=True)
        pipe = flow.pipe
        if self.bounds.least_size(kept) > self.limit:
            self.pruned["bound on memory"] += 1
            return
        if pipe not in self._spreads:
            self._spreads[pipe] = list(self.space.spreads(pipe))
        spreads, family = self._spreads[pipe], self.bounds.flow_time(flow)
        for spread, (size, on_host) in zip(spreads, self.bounds.plan_sizes(flow, spreads, kept), strict=True):
            leaf = Leaf(flow, spread)
            if size <= self.limit:
                self._push(leaf, self.bounds.plan_time(flow, spread, family), size, pipe.core.world)
            else:
                self.pruned["bound on memory"] += 1
            if size > self.limit or self.goal == "memory":
                self._push_offloaded(leaf, kept, on_host)

    def _push_offloaded(self, leaf: Leaf, kept: Kept, on_host: float) -> None:
        """The same plan with its states on the host, where they fit there, unless it cannot fit."""
        flow, spread = leaf
        if not self.space.offloads(spread):
            return
        if on_host > self._host:
            self.pruned["host memory"] += 1
            return
        there = replace(spread, offloaded=True)
        size = self.bounds.plan_size(flow, there, kept)
        if size > self.limit:
            self.pruned["bound on memory"] += 1
        else:
            self._push(Leaf(flow, there), self.bounds.plan_time(flow, there), size, flow.pipe.core.world)

    def _estimate(self, leaf: Leaf) -> None:
        """The full estimate of a plan, unless one of its family fits that saves less: savings only cost time."""
        space, (flow, spread) = self.space, leaf
        family = (flow.pipe.core, flow.pipe.pp, flow.schedule, spread.dp_shard, spread.zero)
        if self.goal != "memory" and family in self._fitted:
            self.pruned["saves what is not needed"] += 1
            return
        plan = space.plan(flow, spread)
        row = space.broken(plan)
        if row:
            self.pruned[row] += 1
            return
        workload = space.workload_of(plan)
        self.estimated += 1
        memory = estimate_memory(space.profile, plan, workload, stack=space.stack, device=space.cluster.device)
        if not memory.fits_in(self.limit):
            self.pruned["memory"] += 1
            if self.goal != "memory" and not spread.offloaded:
                kept, states = self.bounds.flow_size(flow, every_rank=True), self.bounds.states(flow, spread)
                self._push_offloaded(leaf, kept, states[0] + states[1])
            return
        time = estimate_time(space.profile, space.cluster, plan, workload, stack=space.stack)
        found = Candidate(plan=plan, memory=memory, time=time)
        self.seen.append(found)
        if not flow.policy and not flow.offload and not spread.offloaded:
            self._fitted.add(family)
        heapq.heappush(self._heap, (_bucket(found.score(self.goal)), True, simplicity(plan), next(self._order), found))


def _bucket(score: float) -> int:
    """Scores in one bucket count as equal."""
    return math.floor(math.log(max(score, 1e-12)) / ALIKE)


def _layout(pipe: Pipe) -> tuple[int, ...]:
    """`Candidate.layout` of a family."""
    core = pipe.core
    return (pipe.pp, core.cp, core.tp, core.ep, core.world)


def every_plan(space: Space) -> Iterator[Plan]:
    """All plans of a space that the table of constraints allows, for a search that leaves none out."""
    for core in space.cores(space.cluster.world, {}):
        for pipe in space.pipes(core):
            for (schedule, offload), policy in product(space.flows(pipe), range(len(space.recomputes))):
                flow = Flow(pipe, schedule, policy, offload)
                for spread in space.spreads(pipe):
                    both = [spread, replace(spread, offloaded=True)] if space.offloads(spread) else [spread]
                    yield from (plan for each in both if not space.broken(plan := space.plan(flow, each)))
