"""Freed blocks that the caching allocator shows as taken, until memory runs out and it gives them back.

Of a host ahead of its device, `plan.stalls.held_ahead` has those of tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.plan.activations import compute_width, is_gathered
from shardwise.plan.casting import cast_last, cast_whole
from shardwise.plan.division import Division
from shardwise.plan.engines import casts_weights
from shardwise.plan.messages_data import reduce_width
from shardwise.plan.stack import Stack
from shardwise.plan.stages import Stage
from shardwise.plan.updating import OWN, at_once


def held_apart(
    division: Division, stages: tuple[Stage, ...], peaks: Mapping[str, float], states: Mapping[str, float], stack: Stack
) -> float:
    """Bytes of two streams' memory beyond the peak: that of gradients, and the most that all else needs at once.

    Micro-batches that add up gradients leave as much again on the stream that reduces them (seen on GPUs). One process
    has one stream; of what its cast weights leave there, every other piece is too small for a gradient.
    """
    plan = division.plan
    if casts_weights(plan) and stack.name in OWN and not stack.eager:
        left = cast_whole(division, stages, stack) - cast_last(division, stages)
        return left / 2 if max(peaks, key=lambda phase: peaks[phase]) == "backward" else 0.0
    shards = is_gathered(plan) if stack.name in OWN else plan.zero > 0 and plan.axes.pp == 1
    if not stack.grads_apart or plan.offload.state or not shards:
        return 0.0
    gradients = states["gradients"]
    added = gradients if plan.batch.micro_batches > 1 else 0.0
    others = max(peaks["loss"] - added, peaks["backward"] - gradients)
    return max(0.0, others + gradients - max(peaks.values())) + added


def held_freed(
    division: Division, stages: tuple[Stage, ...], peaks: Mapping[str, float], passing: float, stack: Stack
) -> float:
    """Bytes of freed blocks: of weights gathered too early, and of what comes and goes in other sizes.

    `passing`: the most of that within a pass; an update's copies of gradients, tensor by tensor, fit nothing of a pass.
    """
    cached = min(stack.cached * passing, stack.most_cached)
    freed = _gathered_early(division, stages, stack) + cached
    if stack.widens_grads:
        freed += max(0.0, peaks["loss"] + at_once(division, stages, stack) - max(peaks.values()))
    return freed


def sending(division: Division, stages: tuple[Stage, ...], stack: Stack) -> float:
    """Bytes of gradients that `fully_shard` is reducing while the block ahead of them goes backward.

    They are whole, in a buffer of the type on the wire, which it holds until the next block's are to be reduced
    (`reduce_scatter_states`). Of one flat unit outside of blocks the head's gradient waits for the table's.
    """
    plan = division.plan
    late = plan.axes.pp > 1 or (plan.zero < 2 and plan.batch.micro_batches > 1)
    if not stack.keeps_shards or not is_gathered(plan) or division.shards == 1 or late or division.workload.trained < 1:
        return 0.0
    most = max(
        (division.dense(block) + division.filled(block) for stage in stages for block, _ in stage.counts), default=0.0
    )
    head = division.dense(division.profile.head) * (stack.one_root and not division.profile.tied)
    return most * reduce_width(plan) + head * compute_width(plan)


def _gathered_early(division: Division, stages: tuple[Stage, ...], stack: Stack) -> float:
    """All blocks' weights but two blocks', where nothing holds back the host: see `Stack.gathers_ahead`."""
    plan = division.plan
    if not stack.gathers_ahead or plan.zero < 3 or division.shards == 1:
        return 0.0
    most = max((division.dense(block) for stage in stages for block in stage.blocks), default=0.0)
    return max(0.0, division.whole(stages) - 2 * most) * compute_width(plan)
