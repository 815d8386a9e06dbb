"""Tokens on their way to experts: the seconds of their exchange between ranks, and of products that choose them."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil

from shardwise.hardware.cluster import Cluster
from shardwise.model.ops import Matmul
from shardwise.model.profile import Block
from shardwise.plan.costs.kernels import matmul_time
from shardwise.plan.costs.links import Group, collective_time
from shardwise.plan.stack import Stack


def exchange_time(
    matmuls: Iterable[Matmul], tokens: float, width: float, ep: int, there: tuple[Cluster, Stack]
) -> float:
    """Exposed seconds of the exchange of a block's tokens: there and back, forward and backward.

    `tokens`: of a micro-batch on one rank; `width`: bytes of a number. Ranks that share an expert each take a part of
    what is sent to it, and gather that from one another (Megatron-Core's dispatcher, expert tensor parallelism).
    """
    cluster, stack = there
    routed = next((op for op in matmuls if op.experts), None)
    if ep == 1 or routed is None:
        return 0.0
    parts, share = stack.expert_parts, stack.network
    size, chosen = tokens * routed.takes * width, routed.chosen / parts
    group = Group(ep // parts, parts)
    inside = group.inside(cluster)
    once = crossing(chosen, group.size / inside) if stack.once_per_node else 1.0
    sent = size / parts * (crossing(chosen, group.size) if stack.once_per_rank and inside == group.size else 1.0)
    one: float = collective_time("all_to_all", sent, group, cluster, share, once)
    one += collective_time("all_gather", size, Group(parts, 1), cluster, share)
    return 4 * one * (1 - stack.overlap_expert)


def mask_time(block: Block, shape: tuple[float, int], tp: int, there: tuple[Cluster, Stack]) -> float:
    """Seconds of a product of a mask with the tokens of each sequence, which has a row for each place at an expert."""
    cluster, stack = there
    chosen = max((op.chosen for op in block.matmuls if op.experts), default=0)
    rows, groups = ceil(stack.capacity * chosen * shape[1] / tp), ceil(shape[0])
    return matmul_time(rows, block.width, shape[1], cluster.device, "bf16", groups) if rows else 0.0


def crossing(choices: float, places: float) -> float:
    """Distinct nodes (or ranks) over choices, where a token chooses evenly: of k choices `n (1 - (1 - 1/n)^k)`."""
    distinct: float = places * (1 - (1 - 1 / places) ** choices)
    return distinct / choices
