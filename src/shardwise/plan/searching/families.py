"""Families of plans as nodes of a search: the layout of one, and how simple its plans can be. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from shardwise.plan.plan import V_SHAPED, Axes, ContextKind, Float8Kind, Plan, PrecisionKind, Schedule, Zero
from shardwise.plan.ranks.activations import compute_width


@dataclass(frozen=True, eq=False, slots=True)
class Core:
    """What decides on the kernels of a rank: how a block is cut, how many samples it sees at once, in which type.

    Equal to itself alone: each is made once, and caches of bounds know it by identity.
    """

    world: int
    tp: int
    cp: int
    ep: int
    samples: int
    """Samples of a micro-batch on a data rank."""
    sequence: bool = False
    loss: bool = False
    context: ContextKind = "ring"
    precision: PrecisionKind = "bf16"
    float8: Float8Kind = "none"

    @property
    def axes(self) -> Axes:
        """Its axes, with the fewest data shards that `ep` can stand on: it divides `dp_shard x cp x tp`."""
        shards = self.ep // math.gcd(self.ep, self.cp * self.tp)
        return Axes(dp_shard=shards, cp=self.cp, tp=self.tp, ep=self.ep)

    @property
    def width(self) -> float:
        """Bytes of a number that it computes with."""
        return _width(self.precision)


@lru_cache(maxsize=16)
def _width(precision: PrecisionKind) -> float:
    return compute_width(Plan(precision=precision))


@dataclass(frozen=True, eq=False, slots=True)
class Pipe:
    """A core with the pipeline, and so with the number of data ranks and of micro-batches; and where states are."""

    core: Core
    pp: int
    data: int
    micro_batches: int
    offloaded: bool = False
    """Whether optimizer states are on the host."""


class Flow(NamedTuple):
    """A pipe with its schedule and what it saves: a policy of `Space.recomputes`, and whether tensors are offloaded."""

    pipe: Pipe
    schedule: Schedule
    policy: int
    offload: bool
    rest: tuple[int, ...] | None = None
    """Policies that cost more, to be looked at next, as is this one with its tensors offloaded; None: nothing is."""


@dataclass(frozen=True, eq=False, slots=True)
class Spread:
    """A pipe with what its data ranks share."""

    pipe: Pipe
    dp_replicate: int
    dp_shard: int
    zero: Zero

    @property
    def axes(self) -> Axes:
        """As axes of a plan."""
        core = self.pipe.core
        return Axes(
            pp=self.pipe.pp, dp_replicate=self.dp_replicate, dp_shard=self.dp_shard, cp=core.cp, tp=core.tp, ep=core.ep
        )


class Leaf(NamedTuple):
    """A plan that is not estimated yet."""

    flow: Flow
    spread: Spread


Family = Core | Pipe | Flow | Leaf
"""All plans that share some choices; the more are made, the fewer plans are left."""


def pipe_of(node: Pipe | Flow | Leaf) -> Pipe:
    """The pipe that a family has."""
    return node if isinstance(node, Pipe) else node.pipe if isinstance(node, Flow) else node.flow.pipe


def layout_of(pipe: Pipe) -> tuple[int, ...]:
    """`Candidate.layout` of a family."""
    core = pipe.core
    return (pipe.pp, core.cp, core.tp, core.ep, core.world)


_BY_ZERO = {0: 0, 2: 1, 1: 2, 3: 3}
"""Among plans that are as good. 2 never holds more than 1, and is as fast with one micro-batch; 3 sends more."""


def simplicity(plan: Plan) -> tuple[object, ...]:
    """Orders plans that are as good: fewer axes first, then fewer other features, smaller `tp`, `pp`, ..."""
    axes = plan.axes
    degrees = (axes.tp, axes.pp, axes.cp, axes.ep, axes.dp_shard, axes.dp_replicate)
    extras = (
        plan.recompute.mode != "none",
        plan.offload.state,
        plan.offload.activations,
        plan.tensor.sequence,
        plan.tensor.loss,
        axes.pp > 1 and plan.schedule.kind != "1f1b",
        plan.float8.recipe != "none",
        plan.context.kind != "ring",
    )
    features = sum(extras) + _BY_ZERO[plan.zero]
    return (sum(degree > 1 for degree in degrees), features, *degrees, plan.batch.micro_batches, str(plan))


def least_simplicity(node: Family) -> tuple[int, ...]:
    """What the `simplicity` of no plan of a family is below: as many of its numbers as are known."""
    core = node if isinstance(node, Core) else pipe_of(node).core
    degrees, features = (core.tp > 1) + (core.cp > 1) + (core.ep > 1), core.sequence + core.loss
    features += (core.float8 != "none") + (core.context != "ring")
    if isinstance(node, Core):
        return degrees + (core.world > core.tp * core.cp), features
    pipe, shard = pipe_of(node), 1
    features += pipe.offloaded
    flow = node.flow if isinstance(node, Leaf) else node
    if isinstance(flow, Flow):
        features += (flow.policy > 0) + flow.offload + (pipe.pp > 1 and flow.schedule.kind != "1f1b")
    if isinstance(node, Leaf):
        shard = node.spread.dp_shard
        features += _BY_ZERO[node.spread.zero]
    replicate = pipe.data // shard
    degrees += (pipe.pp > 1) + (shard > 1) + (replicate > 1)
    return degrees, features, core.tp, pipe.pp, core.cp, core.ep, shard, replicate, pipe.micro_batches


def states_as(flow: Flow, spread: Spread) -> tuple[object, ...]:
    """What decides on the states of a spread."""
    pipe, core = flow.pipe, flow.pipe.core
    shards = spread.dp_shard * core.cp if spread.zero else 1
    kinds = core.tp, core.ep, core.precision, shards, spread.zero
    several = pipe.data > 1, core.cp > 1, spread.dp_replicate > 1, pipe.micro_batches > 1
    return *kinds, *several, pipe.pp, *cut_as(flow.schedule)


def cut_as(schedule: Schedule) -> tuple[int, bool]:
    """What a schedule decides of where stages lie."""
    return schedule.stages, schedule.kind in V_SHAPED


def sent_as(pipe: Pipe) -> tuple[object, ...]:
    """What of a pipe decides on what data axes send."""
    core = pipe.core
    return core.tp, core.cp, core.ep, core.precision, pipe.pp
