"""Families of plans as nodes of a search: the layout of one, and how simple its plans can be. No torch."""

from __future__ import annotations

from typing import NamedTuple

from shardwise.plan.plan import Plan
from shardwise.plan.space import Core, Flow, Pipe, Spread


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
    features = sum(extras) + plan.zero
    return (sum(degree > 1 for degree in degrees), features, *degrees, plan.batch.micro_batches, str(plan))


def least_simplicity(node: Family) -> tuple[int, ...]:
    """What the `simplicity` of no plan of a family is below: as many of its numbers as are known."""
    core = node if isinstance(node, Core) else pipe_of(node).core
    degrees, features = (core.tp > 1) + (core.cp > 1) + (core.ep > 1), core.sequence + core.loss
    features += (core.float8 != "none") + (core.context != "ring")
    if isinstance(node, Core):
        return degrees + (core.world > core.tp * core.cp), features
    pipe, shard = pipe_of(node), 1
    flow = node.flow if isinstance(node, Leaf) else node
    if isinstance(flow, Flow):
        features += (flow.policy > 0) + flow.offload + (pipe.pp > 1 and flow.schedule.kind != "1f1b")
    if isinstance(node, Leaf):
        shard = node.spread.dp_shard
        features += node.spread.zero + node.spread.offloaded
    replicate = pipe.data // shard
    degrees += (pipe.pp > 1) + (shard > 1) + (replicate > 1)
    return degrees, features, core.tp, pipe.pp, core.cp, core.ep, shard, replicate, pipe.micro_batches
