"""Experts that are not met evenly: the profile as the busiest rank of `ep` sees it.

Routers prefer some experts, and all ranks wait for the one that holds them. Without `ep` each rank has as many tokens
as any other, whatever experts they choose.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from shardwise.model.ops import Matmul, Op, Pointwise
from shardwise.model.profile import Block, Profile
from shardwise.plan.plan import Plan
from shardwise.plan.workload import Workload


def busiest(profile: Profile, plan: Plan, workload: Workload) -> Profile:
    """The profile with `Workload.imbalance` times the rows in what runs where the experts are, and in what is sent.

    Of tokens that a rank sends itself (their places and sums) there are as many as of an even spread. At most all
    tokens come to one rank: `ep` times the mean.

    Source: the load imbalance of arXiv:2101.03961 (Switch Transformers), section 2.2: its capacity factor bounds the
    same ratio.
    """
    factor = factor_of(workload, plan.axes.ep)
    return profile if factor <= 1 else _busiest(profile, factor)


def factor_of(workload: Workload, ep: int) -> float:
    """Tokens of the busiest of `ep` ranks, over the mean."""
    return min(workload.imbalance, float(ep))


@lru_cache(maxsize=256)
def _busiest(profile: Profile, factor: float) -> Profile:
    return replace(profile, blocks=tuple(busiest_block(block, factor) for block in profile.blocks), even=profile)


@lru_cache(maxsize=1024)
def busiest_block(block: Block, factor: float) -> Block:
    """The same of a block, by `factor_of`."""
    if factor <= 1 or not block.expert_params:
        return block
    return replace(block, ops=tuple(_met(op, factor) for op in block.ops))


def _met(op: Op, factor: float) -> Op:
    """An operator on routed tokens, where their experts are."""
    if isinstance(op, Matmul) and op.experts:
        return replace(op, rows=op.rows * factor, saves=op.saves * factor)
    if isinstance(op, Pointwise) and op.per_choice and op.split == "heads":
        scaled = {name: getattr(op, name) * factor for name in ("moved", "saves", "saves_apart", "masks", "widened")}
        return replace(op, **scaled)
    return op
