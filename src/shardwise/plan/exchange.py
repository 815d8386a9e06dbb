"""Tokens on their way to experts on other ranks: the seconds of their exchange, and what sorts them again behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardwise.model.ops import Matmul
from shardwise.plan.links import collective_time, group_of

if TYPE_CHECKING:
    from shardwise.plan.blocktime import Setting

ROUTING = ("permute", "combine")
"""Operators that take tokens to where their experts' products read them, and back."""


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


def routings(matmuls: Sequence[Matmul], setting: Setting) -> int:
    """How often routed tokens are moved to be in the order of experts, and as often back.

    What an all-to-all brings is in the order of the ranks that sent it, so that a rank of several experts sorts it once
    more (Megatron-Core's `sort_chunks_by_idxs`, torchtitan's `_permute`). What sends a token once to a rank, whatever
    it chose there, has not sorted before.
    """
    local = max((op.experts / setting.axes.ep for op in matmuls), default=0.0)
    return 2 if setting.axes.ep > 1 and local > 1 and not setting.stack.once_per_rank else 1
