"""`find_plan`: the best plan for a model on a cluster, out of all legal ones. No torch.

A best-first search over families of plans (`space`), each with a bound that none of its plans beats (`bounds`): the
family with the least bound is divided next, a plan that needs no more dividing is estimated in full, and what comes
out first cannot be beaten by what is left. So it finds what an exhaustive search finds.
Source: the A* argument of Hart, Nilsson and Raphael (1968), with an admissible bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Any, get_args

from shardwise.errors import PlanError, UsageError
from shardwise.findings import nearest
from shardwise.hardware.cluster import Cluster
from shardwise.model.profile import Profile
from shardwise.model.spec import ModelSpec
from shardwise.plan.constraints import refuse_frozen
from shardwise.plan.plan import Plan
from shardwise.plan.searching.bounds import Bounds
from shardwise.plan.searching.choice import ALIKE, Candidate, Goal
from shardwise.plan.searching.families import Flow
from shardwise.plan.searching.front import front_of
from shardwise.plan.searching.space import Space
from shardwise.plan.searching.walk import EXACT, Walk
from shardwise.plan.shorthand import axis_word
from shardwise.plan.stack import Stack, load_stack
from shardwise.plan.workload import Workload

__all__ = [
    "ALIKE", "EXACT", "HEADROOM", "Candidate", "Goal", "Search", "Walk", "every_plan", "find_plan",
    "near_batches",
]  # fmt: skip

HEADROOM = 0.05
"""Share of a device's memory that a plan leaves free, as the estimate has an error."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """What a search found, and what it did."""

    goal: Goal
    space: Space
    ranked: tuple[Candidate, ...]
    """The best plan, then the best of each other layout (pp, cp, tp, ep), best first."""
    met: tuple[Candidate, ...] = field(default=(), repr=False)
    """All that were estimated in full for the goal and fit."""
    limit: float = math.inf
    """Device memory that a plan may need."""
    estimated: int = 0
    """Plans whose memory was estimated."""
    pruned: Mapping[str, int] = field(default_factory=dict)
    """Families and plans that were dropped: id of a constraint, or `memory`, or a bound -> how many."""
    nearest: Candidate | None = None
    """Where nothing fits: the plan that needs the least memory."""
    bounds: Bounds | None = field(default=None, repr=False, compare=False)
    """What the search has worked out, for the front."""

    @property
    def best(self) -> Candidate | None:
        """The best plan; None: nothing fits."""
        return self.ranked[0] if self.ranked else None

    @cached_property
    def front(self) -> tuple[Candidate, ...]:
        """Plans that no other beats in both memory and time, out of all candidates; least memory first.

        A search of its own when it is first asked for (`front.front_of`), of points 2 % apart in memory.
        """
        return tuple(reversed(front_of(self.space, self.limit, bounds=self.bounds))) if self.ranked else ()

    @cached_property
    def seen(self) -> tuple[Candidate, ...]:
        """All that are known and fit: those that were estimated for the goal, and the front."""
        return tuple({str(each.plan): each for each in (*self.met, *self.front)}.values())


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
            estimate has an error), `left_out` (pairs of a word of `space.FEATURES` and why the model cannot have it).

    Raises:
        UsageError: an unknown goal, option or word.
        PlanError: no legal plan at all, with the nearest batch where that is why.
        ModelError: nothing of the model is trained.

    Exact up to `EXACT` devices. Cost: 0.1 to 1 s for 8; 2 to 8 s for 405 billion parameters on 16,384.

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
    headroom = options.pop("headroom", HEADROOM)
    words = {name: options.pop(name, ()) for name in ("allow", "forbid", "left_out")}
    for found in options:
        raise UsageError(f"find_plan: found option {found!r}; needed allow, forbid, left_out, top, stack or headroom")
    _check_options(cluster, workload, stack, top, headroom, words)
    refuse_frozen(profile)
    space = Space(profile, spec, cluster, workload, stack, **{name: tuple(each) for name, each in words.items()})
    aim: Goal = "cost" if goal == "cost" else "memory" if goal == "memory" else "time"
    walk = Walk(space, aim, cluster.device.memory * (1 - headroom))
    ranked = walk.run(top)
    least: Candidate | None = None
    if not ranked:
        frugal = Walk(space, "memory", math.inf, walk.bounds)
        least = next(iter(frugal.run(1)), None)
        if least is None:
            raise PlanError(_no_plan(space, frugal))
    counts: dict[str, Any] = {"estimated": walk.estimated, "pruned": dict(walk.pruned.most_common())}
    return Search(
        goal=aim, space=space, ranked=tuple(ranked), met=tuple(walk.seen), nearest=least, limit=walk.limit,
        bounds=walk.bounds, **counts,
    )  # fmt: skip


def _check_options(
    cluster: object, workload: object, stack: object, top: object, headroom: object, words: Mapping[str, Any]
) -> None:
    for name, value, kind, write in (
        ("cluster", cluster, Cluster, 'load_cluster("h100:8")'),
        ("workload", workload, Workload, "Workload(seq_len=4096, global_batch=64)"),
        ("stack", stack, Stack, 'load_stack("shardwise")'),
    ):
        if not isinstance(value, kind):
            raise UsageError(f"find_plan: {name}: found {value!r}, needed a {kind.__name__}; write {write}")
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise UsageError(f"find_plan: top: found {top!r}, needed a number of layouts of at least 1")
    if isinstance(headroom, bool) or not isinstance(headroom, int | float) or not 0 <= headroom < 1:
        raise UsageError(f"find_plan: headroom: found {headroom!r}, needed a share of at least 0 and below 1")
    for name, found in words.items():
        if isinstance(found, str):
            raise UsageError(f"find_plan: {name}: found the text {found!r}, needed a list of words, as [{found!r}]")


def _no_plan(space: Space, walk: Walk) -> str:
    cluster, batch = space.cluster, space.workload.global_batch
    limits = [(name, n) for name, n in walk.pruned.most_common() if not name.startswith("bound on")]
    why = ", ".join(f"{name} ({number})" for name, number in limits[:4])
    near = near_batches(batch, cluster.world)
    advice = [f"a global batch that every layout divides: {' or '.join(map(str, near))}"] if batch not in near else []
    advice += [f"forbid less than {', '.join(map(axis_word, space.forbid))}"] if space.forbid else []
    without = f", for a model without {', '.join(dict(space.left_out))}" if space.left_out else ""
    why = why or f"{'what is forbidden' if space.forbid else 'the batch'}{without}"
    return (
        f"plan: no legal plan of {space.profile.name} for {cluster.world} devices and a global batch of {batch}; "
        f"refused by: {why}; "
        f"{'; or '.join(advice) or 'give another number of devices'}"
    )


def near_batches(batch: int, world: int) -> list[int]:
    """The nearest global batches that every number of data ranks divides.

    >>> near_batches(13, 8), near_batches(3, 8)
    ([8, 16], [8])
    """
    return sorted({max(1, batch // world) * world, -(-batch // world) * world})


def every_plan(space: Space) -> Iterator[Plan]:
    """All plans of a space that the table of constraints allows, for a search that leaves none out."""
    for core in space.cores(space.cluster.world, {}):
        for pipe in space.pipes(core):
            for (schedule, offload), policy in product(space.flows(pipe), range(len(space.recomputes))):
                flow = Flow(pipe, schedule, policy, offload)
                for spread in space.spreads(pipe):
                    if not space.broken(plan := space.plan(flow, spread)):
                        yield plan
