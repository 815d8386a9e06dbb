"""What comes and goes within a step: what passes keep, a block computed again, logits, operators at work. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from operator import ge, mul, sub
from typing import NamedTuple

from shardwise.plan.eager.kernels import deferred_in, local_of
from shardwise.plan.eager.moments import Moment, moments_of
from shardwise.plan.eager.sizes import AT_END
from shardwise.plan.frozen import whole_again
from shardwise.plan.memory_terms.flights import few_rounds, peaks_in_flight, whole_backwards
from shardwise.plan.memory_terms.holding import Inside
from shardwise.plan.memory_terms.states import passes_once
from shardwise.plan.messages.data import reduce_type
from shardwise.plan.plan import ZERO_BUBBLE, Plan
from shardwise.plan.ranks.activations import (
    Saving,
    again_in,
    compute_width,
    is_recomputed,
    kept_bytes,
    kept_in,
    saved_bytes,
    widest_bytes,
    working_bytes,
)
from shardwise.plan.ranks.division import Division
from shardwise.plan.ranks.engines import uses_fully_shard
from shardwise.plan.ranks.stages import Stage
from shardwise.plan.stack import Stack
from shardwise.plan.updating import OWN


class Passing(NamedTuple):
    """Bytes on a rank at a moment of a step."""

    kept: float
    """By all micro-batches in flight."""
    sent: float = 0.0
    """Messages of a pipeline: received, or sent and held."""
    fresh: float = 0.0
    """Gradients that wait to be added up: a part of a backward pass that is for weights alone adds none."""
    gradients: float = 0.0
    """Those that weights have."""
    again: float = 0.0
    """By one block that is computed again."""
    working: float = 0.0
    """By an operator at work."""
    gathered: float = 0.0
    """Weights that a backward pass has left whole, which the next forward pass of their stage shards again."""
    logits: float = 0.0
    """At the loss."""
    made: float = 0.0
    """Gradients of a pipeline's block that are in no sum yet, or its weights as they were sent."""


class _Point(NamedTuple):
    """A moment of a rank's schedule, with a number for each of its stages."""

    work: str
    turn: int
    """Which of them is at work."""
    alive: Sequence[int]
    pending: Sequence[int]
    fresh: Sequence[bool]
    begun: Sequence[bool]
    """Whose weights have gradients."""
    whole: Sequence[bool]
    """Whose weights a backward pass has left whole."""
    come: tuple[Sequence[int], Sequence[int]] | None = None
    """Activations, and gradients, that it received, or has asked for, and has not used; None: see `received`."""


def passing_of(
    division: Division, rank: int, stages: tuple[Stage, ...], gradients: float, stack: Stack
) -> tuple[Passing, Passing]:
    """What a rank holds of its micro-batches, and of so many bytes of gradients: at most, and beside a block at work.

    Where a backward pass has come to its inputs, whose weights wait, no operator runs. Weights of a pipeline have
    gradients from the first backward pass of their stage on, at whose end the first block is left, and what it kept.
    """
    plan, tokens, own = division.plan, division.tokens, stack.name in OWN and division.plan.axes.pp > 1
    how, recomputes = division.saving(stack), plan.recompute.mode != "none"
    again = max(again_in(stage, plan, how) for stage in stages) * tokens if recomputes else 0.0
    working = working_of(division, stages, stack) + whole_again(division, stages)
    sizes = (kept_in, partial(_kept_at, 0), partial(_kept_at, -1))
    kept, firsts, lasts = ([size(stage, plan, how) * tokens for stage in stages] for size in sizes)
    parts, width = division.parts[rank], compute_width(plan)
    new = [fresh_gradients(division, stage) * (gradients > 0) for stage in stages]
    rest = [max(0.0, part - _first_share(division, stages, turn)) for turn, part in enumerate(parts) if own]
    logits, running = logits_of(division, stack), (again + working) * recomputes
    ends = [behind_inputs(division, s) + (running or 3 * tokens * width * s.given) for s in stages]
    line, left, found, at_work = in_line(division, stages), left_whole(division, stages), [], []
    (product, unit, flat), end = of_block(division, stages) if own else (0.0, 0.0, 0.0), left_at_end(division, stages)
    later = adds_in_another_type(plan)
    for work, turn, alive, pending, fresh, begun, whole, come in _points(plan, rank, stages, own=own):
        here, sent, grads, gathered = sum(map(mul, alive, kept)), 0.0, gradients, 0.0
        if own:
            waits, sent = line(alive, pending)
            here += waits * tokens
            sent = (sent + received(stages, plan, come) * width) * tokens
            grads, gathered = gradients * sum(map(mul, begun, parts)), left(whole, turn)
        here, added = _moved(here, division, stages, stack), sum(map(mul, fresh, new))
        if work == "W":  # and at its end, when what it needed is gone
            less = here - kept[turn] - waiting_gradients(division, stages[turn]) * tokens
            more = added + new[turn] * (not fresh[turn])
            at_work.append(Passing(here, sent, added, grads, gathered=gathered, made=product))
            at_work.append(Passing(max(0.0, less), sent, more, grads, gathered=gathered))
            continue
        made = product if work == "B" or recomputes or flat else 0.0
        if work == "I" and not whole[turn]:  # weights come before what is computed of them
            at_work.append(Passing(here, sent, added, grads, gathered=gathered, made=flat))
        if work == "I" and plan.recompute.mode == "blocks" and not later:  # added up behind the stage's blocks
            every = sum(map(division.whole_of, stages[turn].blocks)) * width * (product > 0)
            made += max(0.0, every - unit)
            at_work.append(Passing(here - kept[turn], sent, added, grads, 0.0, end, gathered, made=every))
        at_work.append(Passing(here, sent, added, grads, again, working, gathered, made=made))
        if later and own and (work == "B" or plan.recompute.mode == "blocks"):  # of a block that used up what it kept
            less = here - lasts[turn]
            at_work.append(Passing(less, sent, added, grads, 0.0, end, gathered, made=unit))
        if stages[turn].last:
            found.append(Passing(here, sent, added, grads, gathered=gathered, logits=logits))
        if work == "I":
            found.append(Passing(here + ends[turn], sent, added, grads, gathered=gathered))
        if work == "B" and own:
            here, grads = max(0.0, here - kept[turn]) + firsts[turn], grads + gradients * rest[turn] * (1 - begun[turn])
            gathered = left([n == turn or each for n, each in enumerate(whole)], turn)
            at_work.append(Passing(here, sent, added, grads, again, working, gathered, made=product))
            at_work.append(Passing(here, sent, added, grads, gathered=gathered, made=flat * (not whole[turn])))
    return max((*at_work, *found), key=sum), max(at_work, key=sum)


def _first_share(division: Division, stages: Sequence[Stage], turn: int) -> float:
    """The share of a rank's weights that is in the first block of a stage, and in what is ahead of it."""
    stage = stages[turn]
    ahead = division.whole_of(stage.blocks[0]) + division.embedding * stage.first
    return ahead / (division.whole(stages) or 1.0)


def left_whole(division: Division, stages: Sequence[Stage]) -> Callable[[Sequence[int], int], float]:
    """Bytes of the weights of blocks in stages that are whole, beyond a block and those ahead of it at a turn.

    Of which stages are, and the turn.
    """
    plan = division.plan
    if not (uses_fully_shard(plan) and plan.reshards):
        return lambda whole, turn: 0.0
    sizes = [[division.whole_of(block) for block in stage.blocks] for stage in stages]
    most = max((size for each in sizes for size in each), default=0.0) * (1 + plan.communication.prefetch)
    there, width = [sum(each) for each in sizes], compute_width(plan)
    counted, ahead = min(most, sum(there)), [min(most, each) for each in there]  # a stage gathers none of another's

    def left(whole: Sequence[int], turn: int) -> float:
        here = sum(map(mul, whole, there), ahead[turn] * (not whole[turn]))
        return max(0.0, here - counted) * width

    return left


def _moved(kept: float, division: Division, stages: Sequence[Stage], stack: Stack) -> float:
    """Those of so many kept bytes on the device: of what moves to the host, what two blocks keep is here."""
    plan = division.plan
    if not plan.offload.activations:
        return kept
    how = division.saving(stack)
    blocks = ((block, stage.start + n) for stage in stages for n, block in enumerate(stage.blocks))
    moving = 2 * max((kept_bytes(block, n, plan, how) for block, n in blocks), default=0.0) * division.tokens
    return min(kept, max((1 - stack.offloads_blocks) * kept, moving))


def _kept_at(place: int, stage: Stage, plan: Plan, how: Saving) -> float:
    """Bytes per token that a stage's first block keeps, or its last one."""
    index = stage.start - place * (len(stage.blocks) - 1)
    return kept_bytes(stage.blocks[place], index, plan, how) if stage.blocks else 0.0


def of_block(division: Division, stages: Sequence[Stage]) -> tuple[float, float, float]:
    """Of a pipeline: bytes of gradients of a block's largest product, and of all of it; and of its weights as sent.

    Autograd adds a gradient to those that are there as soon as it is made; where sums have another type, all of a
    block's wait until it has gone backward. Weights that come are there as they were sent, too, until they are cut up.
    """
    plan, blocks = division.plan, [block for stage in stages for block, _ in stage.counts]
    width, trains = compute_width(plan), division.workload.trained == 1  # frozen weights have none
    product, unit = (
        max(map(size, blocks), default=0.0) * width for size in (division.largest_product, division.whole_of)
    )
    sent = uses_fully_shard(plan) and plan.reshards and division.shards > 1
    return product * trains, unit * trains, unit * sent


def _points(plan: Plan, rank: int, stages: Sequence[Stage], *, own: bool) -> Iterator[_Point]:
    """Moments of a rank that may be the worst."""
    shape, turns = (plan.axes.pp, len(stages), plan.batch.micro_batches), range(len(stages))
    none, every, no = (0,) * len(stages), (1,) * len(stages), (False,) * len(stages)
    ends = [n for n in turns if stages[n].last] or [0]
    if own and plan.schedule.kind in ZERO_BUBBLE:
        firsts = tuple(stage.first for stage in stages)
        yield from _in_parts(plan.schedule.kind, shape, rank, firsts, *_made(plan))
    elif own:
        for turn, alive, begun, whole in whole_backwards(plan.schedule.kind, shape, rank):
            yield _Point("B", turn, alive, none, no, begun, whole)
    else:
        peaks = peaks_in_flight(plan.schedule.kind, shape)[rank] if plan.axes.pp > 1 else (every,)
        yield from (_Point("B", ends[0], alive, none, no, no, no) for alive in peaks)


def _made(plan: Plan) -> tuple[bool, bool]:
    """Whether recomputed blocks make all gradients at once, and whether these are added up in another type."""
    return plan.recompute.mode == "blocks", adds_in_another_type(plan)


@lru_cache(maxsize=4096)
def _in_parts(
    kind: str, shape: tuple[int, int, int], rank: int, firsts: tuple[bool, ...], at_once: bool, later: bool
) -> tuple[_Point, ...]:
    """Moments of a rank whose backward passes are in two parts, but those of which another has all that they have."""
    most: dict[tuple[str, int], list[tuple[tuple[int, ...], _Point]]] = {}
    for each in moments_of(kind, *few_rounds(*shape))[rank]:
        if each.work not in "BIW":
            continue
        made = _fresh(each, firsts, at_once), _begun(each, at_once, later)
        come = each.coming, each.returning
        point = _Point(each.work, each.turn, each.alive, each.pending, *made, each.whole, come)
        before = map(sub, each.alive, each.pending)  # logits of those that wait for less are larger
        size = (*before, *each.pending, *made[0], *made[1], *each.whole, *each.coming, *each.returning)
        others = most.setdefault((each.work, each.turn), [])
        if not any(all(map(ge, other, size)) for other, _ in others):
            others[:] = [one for one in others if not all(map(ge, size, one[0]))] + [(size, point)]
    return tuple(point for found in most.values() for _, point in found)


def _begun(moment: Moment, at_once: bool, later: bool) -> list[bool]:
    """Of each stage, whether weights have gradients in the type in which they are added up; `later`: it is another."""
    made = zip(moment.added if later else moment.begun, moment.reached, strict=True)
    return [added or (at_once and count > later) for added, count in made]


def _fresh(moment: Moment, firsts: Sequence[bool], at_once: bool) -> Sequence[bool]:
    """Of each stage, whether gradients wait to be added up: of recomputed blocks all are made at once.

    The first one's backward passes are in one piece, behind which they are.
    """
    if not at_once:
        return moment.fresh
    return [count > 0 and not first for count, first in zip(moment.reached, firsts, strict=True)]


def received(stages: Sequence[Stage], plan: Plan, come: tuple[Sequence[int], Sequence[int]] | None) -> float:
    """Elements per token that a rank received, or has asked for, and has not used: so many of each stage.

    None, where backward passes are in one piece: a gradient, and an activation that is ahead of its turn. 1F1B has the
    gradient that it sent last there. Where all is forwarded first, none is ahead.
    """
    if come is not None:
        return sum(n * stage.given + m * stage.handed for stage, n, m in zip(stages, *come, strict=True))
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


def made_inside(division: Division, stages: tuple[Stage, ...], most: float, stack: Stack) -> Inside:
    """What a rank's pass makes and frees, so many bytes at most."""
    how, last = division.saving(stack), any(stage.last for stage in stages)
    widest = max((widest_bytes(b, how) for stage in stages for b, _ in stage.counts), default=0.0)
    return Inside(most, logits_of(division, stack) * last, widest * division.tokens)


def in_line(
    division: Division, stages: Sequence[Stage]
) -> Callable[[Sequence[int], Sequence[int]], tuple[float, float]]:
    """Bytes per token that a rank of a pipeline has beside what its blocks keep: what waits, and what was sent.

    Of micro-batches that each of its stages keeps, and of these that are pending: whose inputs have gradients and whose
    weights have none yet.

    A stage's output stays until its backward pass begins. Behind the loss micro-batches that wait have their logits
    too, and what the head keeps; gradients wait for the weights' part of a backward pass.
    """
    plan, width = division.plan, compute_width(division.plan)
    starts, dim = {stage.start for stage in stages}, division.profile.dim
    handed = [(stage.start + len(stage.blocks) not in starts) * stage.handed * width for stage in stages]
    each = [waiting_gradients(division, stage) for stage in stages]
    vocab = division.profile.vocab / (plan.axes.tp if plan.tensor.loss else 1)
    head = next((turn for turn, stage in enumerate(stages) if stage.last), None)

    def line(alive: Sequence[int], pending: Sequence[int]) -> tuple[float, float]:
        behind = behind_loss((alive[head], pending[head]), vocab, dim, width) if head is not None else 0.0
        return behind + sum(map(mul, pending, each)), sum(map(mul, alive, handed))

    return line


def behind_loss(waiting: tuple[int, int], vocab: float, dim: int, width: float) -> float:
    """Bytes per token behind the loss: of micro-batches kept, and of these whose weights wait, but for the one at work.

    Logits, and what the head keeps. `vocab`: logits per token on a rank; `width`: bytes of a number.
    """
    number, late = waiting
    logits = max(0, number - late - 1) * vocab * max(width, 4.0) + late * vocab * width
    return logits + (2 * max(0, number - 1) + late) * dim * width


def waiting_gradients(division: Division, stage: Stage) -> float:
    """Bytes per token of a stage's gradients between the two parts of a backward pass; recomputed blocks have one."""
    local, blocks = local_of(division.plan), enumerate(stage.blocks, stage.start)
    return sum(deferred_in(block, local) for index, block in blocks if not is_recomputed(index, division.plan))


def fresh_gradients(division: Division, stage: Stage) -> float:
    """Bytes of a stage's gradients of a micro-batch, where they are made in another type than they are added up in."""
    plan = division.plan
    if not adds_in_another_type(plan):
        return 0.0
    return division.whole([stage]) * division.trained_share([stage]) * compute_width(plan)


def at_end(division: Division, stages: tuple[Stage, ...], block: float, working: float, stack: Stack) -> float:
    """Bytes of activations while all gradients are there, where a block keeps so many and an operator works on others.

    Of a pipeline's only micro-batch: what is left at the end of a stage's first block, which alone makes the last ones.
    """
    if not passes_once(division.plan, stack):
        return block
    return max(0.0, left_at_end(division, stages) - working)


def left_at_end(division: Division, stages: Sequence[Stage]) -> float:
    """Bytes of activations when all weights of a block have their gradients."""
    plan, widest = division.plan, max((each.width for stage in stages for each, _ in stage.counts), default=0)
    stream = widest * compute_width(plan) * division.tokens / (plan.axes.tp if plan.tensor.sequence else 1)
    return AT_END * stream


def adds_in_another_type(plan: Plan) -> bool:
    """Whether gradients are added up in another type than they are made in."""
    return uses_fully_shard(plan) and reduce_type(plan) != plan.precision.removesuffix("-pure")


def beside_buckets(plan: Plan, gradients: float, ahead: tuple[float, float]) -> tuple[float, float, float]:
    """Bytes of gradients at the loss, in the backward pass and at the update, where DDP sums them in its buckets.

    These stay from step to step. What micro-batches before the last one add up lies beside them, and so does every
    gradient that is no view of its bucket. `ahead`: bytes that weights have at the first two.
    """
    several, apart = plan.batch.micro_batches > 1, gradients * (not plan.communication.bucket_view)
    loss, backward = (gradients + each * several for each in ahead)
    return loss, max(backward, gradients + apart), gradients + apart
