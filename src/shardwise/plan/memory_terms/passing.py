"""What comes and goes within a step: what passes keep, a block computed again, logits, operators at work. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import mul
from typing import NamedTuple

from shardwise.plan.eager.kernels import deferred_in, local_of
from shardwise.plan.eager.moments import Moment, moments_of
from shardwise.plan.memory_terms.holding import gathered_width
from shardwise.plan.messages.data import reduce_type, reduce_width
from shardwise.plan.plan import ZERO_BUBBLE, Plan
from shardwise.plan.ranks.activations import (
    again_in,
    compute_width,
    is_recomputed,
    kept_bytes,
    kept_in,
    saved_bytes,
    working_bytes,
)
from shardwise.plan.ranks.division import Division
from shardwise.plan.ranks.engines import uses_fully_shard
from shardwise.plan.ranks.stages import Stage
from shardwise.plan.rows.pipeline import micro_batches_fit
from shardwise.plan.schedule import actions, in_flight, warmup
from shardwise.plan.stack import Stack
from shardwise.plan.updating import OWN


class Passing(NamedTuple):
    """Bytes on a rank at the moment of a step at which these are most."""

    kept: float
    """By all micro-batches in flight."""
    again: float
    """By one block that is computed again."""
    sent: float
    """Messages of a pipeline: received, or sent and held."""
    fresh: float
    """Gradients that wait to be added up: a part of a backward pass that is for weights alone adds none."""
    divided: float
    """What is beside all these when a backward pass has come to its inputs, whose weights wait: no operator runs."""


def activations_of(division: Division, rank: int, stages: tuple[Stage, ...], stack: Stack) -> Passing:
    """What a rank holds of its micro-batches."""
    plan = division.plan
    how = division.saving(stack)
    recomputes = plan.recompute.mode != "none"
    again = max(again_in(stage, plan, how) for stage in stages) * division.tokens if recomputes else 0.0
    kept = [kept_in(stage, plan, how) for stage in stages]
    shape, none = (plan.axes.pp, len(stages), plan.batch.micro_batches), (0,) * len(stages)
    own, new = stack.name in OWN and plan.axes.pp > 1, [fresh_gradients(division, stage) for stage in stages]
    moments: list[tuple[Sequence[int], Sequence[int], Sequence[int], float]] = [((1,), none, none, 0.0)]
    seen: Sequence[Moment] = ()
    if own and plan.schedule.kind in ZERO_BUBBLE:
        seen = [each for each in moments_of(plan.schedule.kind, *few_rounds(*shape))[rank] if each.work in "BI"]
        moments = [(each.alive, each.pending, _fresh(each, plan), in_flight_at(stages, each)) for each in seen]
    elif plan.axes.pp > 1:
        come = received(stages, plan) if own else 0.0
        moments = [(alive, none, none, come) for alive in peaks_in_flight(plan.schedule.kind, shape)[rank]]

    def at(alive: Sequence[int], pending: Sequence[int], fresh: Sequence[int], come: float) -> tuple[float, ...]:
        waits, sent = in_line(division, stages, alive, pending) if own else (0.0, 0.0)
        inner = (sum(map(mul, alive, kept)) + waits) * division.tokens
        return inner, (sent + come * compute_width(plan)) * division.tokens, sum(map(mul, fresh, new))

    worst, sent, waits = max((at(*moment) for moment in moments), key=sum)
    running, stream = (again + working_of(division, stages, stack)) * recomputes, division.tokens * compute_width(plan)
    inputs = [behind_inputs(division, stage) for stage in stages]
    ends = (
        sum(at(*moment)) + inputs[each.turn] + (running or 3 * stream * stages[each.turn].given)
        for moment, each in zip(moments, seen, strict=False)
        if each.work == "I"
    )
    divided = max(ends, default=0.0) - worst - sent - waits
    if plan.offload.activations:  # of those that move, what the block at work and the one ahead of it keep is here
        blocks = ((block, stage.start + n) for stage in stages for n, block in enumerate(stage.blocks))
        moving = 2 * max((kept_bytes(block, n, plan, how) for block, n in blocks), default=0.0) * division.tokens
        worst = min(worst, max((1 - stack.offloads_blocks) * worst, moving))
    return Passing(worst, again, sent, waits, divided)


def _fresh(moment: Moment, plan: Plan) -> Sequence[int]:
    """Of each stage, whether gradients wait to be added up: of recomputed blocks all are made at once."""
    return [int(count > 0) for count in moment.reached] if plan.recompute.mode == "blocks" else moment.fresh


def in_flight_at(stages: Sequence[Stage], moment: Moment) -> float:
    """Elements per token that a rank received, or has asked for, and has not used."""
    each = zip(stages, moment.coming, moment.returning, strict=True)
    return sum(coming * stage.given + returning * stage.handed for stage, coming, returning in each)


def received(stages: Sequence[Stage], plan: Plan) -> float:
    """The same of a backward pass in one piece: its gradient, and an activation that is ahead of its turn.

    1F1B has the gradient that it sent last there. Where all is forwarded first, none is ahead.
    """
    ahead = plan.schedule.kind not in ("gpipe", "looped-bfs")
    return max(stage.handed for stage in stages) + max(stage.given for stage in stages) * ahead


def behind_inputs(division: Division, stage: Stage) -> float:
    """Bytes at the end of a backward pass to a stage's inputs, beside what was there before and what is at work.

    All gradients that wait for the weights' part. Behind the loss also what the loss and the head keep, which goes with
    that end.
    """
    plan, width, dim = division.plan, compute_width(division.plan), division.profile.dim
    vocab = division.profile.vocab / (plan.axes.tp if plan.tensor.loss else 1)
    loss = (vocab * (max(width, 4.0) + width) + 3 * dim * width) * stage.last
    return (waiting_gradients(division, stage) + loss) * division.tokens


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
    if plan.axes.pp > 1 and stack.name in OWN:  # a stage's output is given up
        per_logit -= width
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
    return tuple(rank.peaks for rank in in_flight(actions(kind, *few_rounds(*shape))))


def few_rounds(ranks: int, turns: int, count: int) -> tuple[int, int, int]:
    """The same with micro-batches of four rounds at most, each as long as the plan's."""
    return ranks, turns, count if count < 5 * ranks else 4 * (count // (count // ranks))


def in_line(
    division: Division, stages: Sequence[Stage], alive: Sequence[int], pending: Sequence[int]
) -> tuple[float, float]:
    """Bytes per token that a rank of a pipeline has beside what its blocks keep: what waits, and what was sent.

    A stage's output stays until its backward pass begins. Behind the loss micro-batches that wait have their logits
    too, and what the head keeps; gradients wait for the weights' part of a backward pass.

    Args:
        division: of the plan.
        stages: of the rank.
        alive: micro-batches that each of them keeps.
        pending: of these, whose inputs have gradients and whose weights have none yet.
    """
    plan, width = division.plan, compute_width(division.plan)
    starts, total, passed = {stage.start for stage in stages}, 0.0, 0.0
    for stage, number, late in zip(stages, alive, pending, strict=True):
        passed += number * (stage.start + len(stage.blocks) not in starts) * stage.handed * width
        if stage.last:
            vocab = division.profile.vocab / (plan.axes.tp if plan.tensor.loss else 1)
            total += max(0, number - late - 1) * vocab * max(width, 4.0) + late * vocab * width
            total += (2 * max(0, number - 1) + late) * division.profile.dim * width
        total += late * waiting_gradients(division, stage)
    return total, passed


def waiting_gradients(division: Division, stage: Stage) -> float:
    """Bytes per token of a stage's gradients between the two parts of a backward pass; recomputed blocks have one."""
    local, blocks = local_of(division.plan), enumerate(stage.blocks, stage.start)
    return sum(deferred_in(block, local) for index, block in blocks if not is_recomputed(index, division.plan))


def fresh_gradients(division: Division, stage: Stage) -> float:
    """Bytes of a stage's gradients of a micro-batch, where they are made in another type than they are added up in."""
    plan = division.plan
    if not uses_fully_shard(plan) or reduce_type(plan) == plan.precision.removesuffix("-pure"):
        return 0.0
    return division.whole([stage]) * division.trained_share([stage]) * compute_width(plan)


def beside_buckets(plan: Plan, gradients: float) -> tuple[float, float, float]:
    """Bytes of gradients at the loss, in the backward pass and at the update, where DDP sums them in its buckets.

    These stay from step to step. What micro-batches before the last one add up lies beside them, and so does every
    gradient that is no view of its bucket.
    """
    several, apart = plan.batch.micro_batches > 1, not plan.communication.bucket_view
    return gradients * (1 + several), gradients * (1 + (several or apart)), gradients * (1 + apart)


def reduced_last(
    division: Division, stages: Sequence[Stage], kept: Mapping[str, float], gradients: float, stack: Stack
) -> dict[str, Mapping[str, float]]:
    """What a pipeline's rank has when its first unit is reduced, behind the last micro-batch: weights, and gradients.

    A unit's are copied into what is sent, and its weights have gone. `kept`: its states but for gradients; `gradients`:
    bytes of all of these before it.
    """
    plan, trained = division.plan, division.workload.trained
    if plan.axes.pp == 1 or stack.name not in OWN or not uses_fully_shard(plan):
        return {}
    sizes = [division.sent_of(block) for stage in stages for block, _ in stage.counts]
    head = division.dense(division.profile.head) * any(stage.last for stage in stages)
    unit = max(*sizes, division.embedding * any(stage.first for stage in stages) + head)
    shards = division.shards
    given = unit * trained * (1 / shards if shards > 1 else 2) * reduce_width(plan)
    whole = (division.whole(stages) - unit) * gathered_width(division, tuple(stages))
    return {"backward": {**kept, "gathered": whole, "gradients": gradients + given}}
