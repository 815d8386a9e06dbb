"""What the weights take that one process casts (`parallel/engines/casts.py`): all of them, and the last. No torch."""

from __future__ import annotations

from shardwise.plan.ranks.activations import compute_width, recomputed_in
from shardwise.plan.ranks.division import Division
from shardwise.plan.ranks.stages import Stage
from shardwise.plan.stack import Stack


def cast_whole(division: Division, stages: tuple[Stage, ...], stack: Stack) -> float:
    """Bytes of cast weights that backward passes need: all but tables, and but recomputed blocks' own.

    Compiled code keeps those of recomputed blocks too, which it casts outside of what it recomputes. Frozen weights
    below adapters are in the compute type.
    """
    if division.workload.trained < 1:
        return 0.0
    width = compute_width(division.plan)
    table = 0.0 if division.profile.tied else division.embedding_table
    if stack.fused:
        return (division.whole(stages) - table) * width
    blocks = [each for stage in stages for each in recomputed_in(stage, division.plan)]
    sizes = [(division.dense(block) + division.filled(block), number, again) for block, number, again in blocks]
    spared = sum(size * again for size, _, again in sizes) - max((s for s, _, again in sizes if again), default=0.0)
    return (division.whole(stages) - table - spared) * width


def cast_last(division: Division, stages: tuple[Stage, ...]) -> float:
    """Bytes of them when all gradients are there: those of one block, and of a tied table the gradient."""
    if division.workload.trained < 1:
        return 0.0
    sizes = (division.dense(block) + division.filled(block) for stage in stages for block in stage.blocks)
    table = division.embedding_table if division.profile.tied else 0.0
    return (max(sizes, default=0.0) + table) * compute_width(division.plan)
