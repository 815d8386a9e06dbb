"""Which of torch's engines holds the parameters under a plan and sums their gradients, or that none does. No torch."""

from __future__ import annotations

from shardwise.plan.plan import Plan

CAST_TOGETHER = 1 << 18
"""Numbers of a tensor that a device casts before its host has started the next kernel: such are cast together."""


def uses_fully_shard(plan: Plan) -> bool:
    """True where `fully_shard` carries the data axes; else DDP does, or there is one data rank.

    DDP is faster for plain replication, and does not compose with DTensor parameters, pipelines of several
    stages or the mixed-precision policy.
    """
    axes = plan.axes
    composed = axes.data * axes.cp > 1 and max(axes.tp, axes.pp, axes.ep) > 1
    return plan.zero > 0 or composed or (plan.mixed and not casts_weights(plan))


def is_replicated(plan: Plan) -> bool:
    """True where DDP sums the gradients: plain replication in one type, with nothing else."""
    return plan.axes.data * plan.axes.cp > 1 and not uses_fully_shard(plan)


def casts_weights(plan: Plan) -> bool:
    """True where one process computes in another type than its parameters have: it casts them as it uses them."""
    held = plan.zero > 0 or plan.offload.state or plan.float8.all_gather
    return plan.mixed and plan.world == 1 and not held
