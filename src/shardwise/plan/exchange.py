"""Tokens on their way to experts on other ranks: the seconds of their exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardwise.model.ops import Matmul
from shardwise.plan.links import Group, collective_time

if TYPE_CHECKING:
    from shardwise.plan.blocktime import Setting


def exchange_time(matmuls: Sequence[Matmul], tokens: float, setting: Setting) -> float:
    """Exposed seconds of the exchange of a block's tokens: there and back, forward and backward.

    `tokens`: of a micro-batch on one rank. Ranks that share an expert each take a part of what is sent to it, and
    gather that from one another (Megatron-Core's dispatcher, expert tensor parallelism).
    """
    ep, stack = setting.axes.ep, setting.stack
    routed = [op for op in matmuls if op.experts]
    if ep == 1 or not routed:
        return 0.0
    parts, share = stack.expert_parts, stack.network
    size, chosen = tokens * routed[0].takes * setting.width, routed[0].chosen / parts
    group = Group(ep // parts, parts)
    inside = group.inside(setting.cluster)
    once = crossing(chosen, group.size / inside) if stack.once_per_node else 1.0
    sent = size / parts * (crossing(chosen, group.size) if stack.once_per_rank and inside == group.size else 1.0)
    one = collective_time("all_to_all", sent, group, setting.cluster, share, once)
    one += collective_time("all_gather", size, Group(parts, 1), setting.cluster, share)
    return 4 * one * (1 - stack.overlap_expert)


def crossing(choices: float, places: float) -> float:
    """Distinct nodes (or ranks) over choices, where a token chooses evenly: of k choices `n (1 - (1 - 1/n)^k)`."""
    return places * (1 - (1 - 1 / places) ** choices) / choices
