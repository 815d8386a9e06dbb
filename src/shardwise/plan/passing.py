"""What comes and goes within a step: what passes keep, a block computed again, logits, operators at work. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import mul

from shardwise.plan.activations import again_in, compute_width, kept_bytes, kept_in, saved_bytes, working_bytes
from shardwise.plan.division import Division
from shardwise.plan.rows_pipeline import micro_batches_fit
from shardwise.plan.schedule import actions, in_flight, warmup
from shardwise.plan.stack import Stack
from shardwise.plan.stages import Stage


def activations_of(division: Division, rank: int, stages: tuple[Stage, ...], stack: Stack) -> tuple[float, float]:
    """Bytes that all micro-batches in flight on a rank have kept, and of one block that is computed again beside it."""
    plan = division.plan
    how = division.saving(stack)
    recomputes = plan.recompute.mode != "none"
    again = max(again_in(stage, plan, how) for stage in stages) * division.tokens if recomputes else 0.0
    kept = [kept_in(stage, plan, how) for stage in stages]
    moments: Sequence[tuple[int, ...]] = [(1,)]
    if plan.axes.pp > 1:
        moments = peaks_in_flight(plan.schedule.kind, (plan.axes.pp, len(stages), plan.batch.micro_batches))[rank]
    worst: float = max(sum(map(mul, alive, kept)) for alive in moments)
    if plan.offload.activations:  # of those that move, what the block at work and the one ahead of it keep is here
        blocks = ((block, stage.start + n) for stage in stages for n, block in enumerate(stage.blocks))
        moving = 2 * max(kept_bytes(block, n, plan, how) for block, n in blocks)
        worst = min(worst, max((1 - stack.offloads_blocks) * worst, moving))
    return worst * division.tokens, again


def block_bytes(division: Division, stages: tuple[Stage, ...], stack: Stack) -> float:
    """Bytes that the largest block keeps of one micro-batch without recompute."""
    how = division.saving(stack)
    return max((saved_bytes(b, how) for stage in stages for b, _ in stage.counts), default=0.0) * division.tokens


def logits_of(division: Division, stack: Stack) -> float:
    """The spike at the loss: logits, what the loss makes of them, and their gradient, of one micro-batch."""
    plan, width = division.plan, compute_width(division.plan)
    sharded = plan.axes.tp > 1 and plan.tensor.loss
    vocab = division.profile.vocab / (plan.axes.tp if sharded else 1)
    per_logit = stack.logit_bytes if width < 4 else 4 * width  # with its log-softmax, and two gradients
    return division.tokens * stack.logit_share * (vocab * per_logit + 2 * division.profile.dim * width)


def working_of(division: Division, stages: tuple[Stage, ...], stack: Stack) -> float:
    """Gradients of the widest operator, alive for a moment in the backward pass."""
    how = division.saving(stack)
    return max((working_bytes(b, how) for stage in stages for b, _ in stage.counts), default=0.0) * division.tokens


@lru_cache(maxsize=4096)
def peaks_in_flight(kind: str, shape: tuple[int, int, int]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Per rank, the moments that may be the worst: micro-batches in flight for each of its stages.

    `shape`: ranks, stages per rank, micro-batches. More micro-batches than a few rounds change nothing but for the
    schedules that keep all.
    """
    ranks, turns, count = shape
    if kind in ("gpipe", "looped-bfs"):
        return (((count,) * turns,),) * ranks
    if kind == "1f1b":
        return tuple(((min(count, ranks - rank),),) for rank in range(ranks))
    if kind == "interleaved" and not micro_batches_fit(kind, ranks, count):  # torch refuses it; others may not
        whole = (ranks, turns, count - count % ranks)
        most = [warmup(rank, whole, 2) + 1 for rank in range(ranks)]
        return tuple(((-(-alive // turns),) * turns,) for alive in most)
    few = count if count < 5 * ranks else 4 * (count // (count // ranks))  # four rounds, each as long as the plan's
    return tuple(rank.peaks for rank in in_flight(actions(kind, ranks, turns, few)))
