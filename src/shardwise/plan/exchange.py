"""Tokens on their way to experts on other ranks: the seconds of their exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardwise.model.ops import Matmul
from shardwise.plan.links import collective_time, group_of

if TYPE_CHECKING:
    from shardwise.plan.blocktime import Setting


def exchange_time(matmuls: Sequence[Matmul], tokens: float, setting: Setting) -> float:
    """Exposed seconds of the exchange of a block's tokens: there and back, forward and backward.

    `tokens`: of a micro-batch on one rank.
    """
    ep, stack = setting.axes.ep, setting.stack
    routed = [op for op in matmuls if op.experts]
    if ep == 1 or not routed:
        return 0.0
    size, chosen = tokens * routed[0].takes * setting.width, routed[0].chosen
    group = group_of(setting.axes, "ep")
    inside = group.inside(setting.cluster)
    once = crossing(chosen, ep / inside) if stack.once_per_node else 1.0
    if stack.once_per_rank and inside == ep:
        size *= crossing(chosen, ep)
    one = collective_time("all_to_all", size, group, setting.cluster, stack.network, once)
    return 4 * one * (1 - stack.overlap_expert)


def crossing(choices: int, places: float) -> float:
    """Distinct nodes (or ranks) over choices, where a token chooses evenly: of k choices `n (1 - (1 - 1/n)^k)`."""
    return places * (1 - (1 - 1 / places) ** choices) / choices
