"""Freed blocks that the caching allocator shows as taken, until memory runs out and it gives them back.

Of a host ahead of its device, `plan.time_terms.stalls.held_ahead` has those of tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from shardwise.plan.frozen import held_width
from shardwise.plan.memory_terms.casting import cast_last, cast_whole
from shardwise.plan.memory_terms.states import accumulates_whole
from shardwise.plan.messages.data import held_sums, reduce_type, reduce_width
from shardwise.plan.plan import Plan
from shardwise.plan.ranks.activations import compute_width, is_gathered
from shardwise.plan.ranks.division import Division
from shardwise.plan.ranks.engines import casts_weights, uses_fully_shard
from shardwise.plan.ranks.stages import Stage
from shardwise.plan.stack import Stack
from shardwise.plan.updating import OWN, at_once

SHARED = 10 * 2**20
"""Bytes of a tensor below which PyTorch's allocator cuts it out of segments that others use too, which leaves no hole
(`kMinLargeAlloc`)."""


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


class Inside(NamedTuple):
    """Bytes that a pass makes and frees."""

    most: float
    """At most, at once."""
    loss: float
    """Of that by the loss."""
    block: float
    """The largest tensor of a block."""

    @property
    def widest(self) -> float:
        """The largest tensor: the loss has three of its logits."""
        return max(self.block, self.loss / 3)

    @property
    def apart(self) -> float:
        """In tensors that have segments of their own."""
        return 0.0 if self.widest < SHARED else self.most if self.block >= SHARED else self.loss


def held_freed(
    division: Division, stages: tuple[Stage, ...], peaks: Mapping[str, float], inside: Inside, stack: Stack
) -> float:
    """Bytes of freed blocks: of weights gathered too early, and of what comes and goes in other sizes.

    An update's copies of gradients, tensor by tensor, fit nothing of a pass; flat, they take the place of tensors that
    were as large.
    """
    cached = min(stack.cached * inside.apart, stack.most_cached)
    freed = _gathered_early(division, stages, stack) + cached
    if stack.widens_grads:
        made, plan = at_once(division, stages, stack), division.plan
        flat = stack.flattens_grads and plan.zero > 0 and (plan.zero == 3 or not plan.offload.state)
        parts = (made * 2 / 3, made / 3) if flat else ()  # in fp32, and before that in 16 bits
        fitting = sum(part for part in parts if part <= inside.widest)
        freed += max(0.0, peaks["loss"] + made - fitting - max(peaks.values()))
    return freed


def beside_weights(
    division: Division, stages: tuple[Stage, ...], states: Mapping[str, float], stack: Stack
) -> dict[str, float]:
    """States with what Transformer Engine keeps: weights in fp8, and an empty gradient of each shape in a block."""
    kept = {"weights": states["weights"] + low_copies(division, stages, stack)}
    if not stack.placeholds_grads or division.workload.trained != 1:
        return kept
    most = max((division.dense(block) for stage in stages for block, _ in stage.counts), default=0.0)
    return {**kept, "buckets": states.get("buckets", 0.0) + most * compute_width(division.plan)}


def low_copies(division: Division, stages: tuple[Stage, ...], stack: Stack) -> float:
    """Bytes of the weights of blocks' products in fp8, beside them: see `Stack.caches_low`."""
    if not stack.caches_low or division.workload.compute != "fp8" or division.plan.zero == 3:
        return 0.0
    counts = (each for stage in stages for each in stage.counts)
    return sum((division.dense(block) + division.experts(block)) * n for block, n in counts) * stack.caches_low


def sending(division: Division, stages: tuple[Stage, ...], gradients: float, stack: Stack) -> tuple[float, float]:
    """Bytes of (what is sent, gradients) while a block goes backward, beside the weights of it and those ahead.

    What `fully_shard` sends of the block behind is whole, in a buffer of the type on the wire, which it holds until the
    next block's are to be reduced (`reduce_scatter_states`). Of one flat unit outside of blocks the head's gradient
    waits for the table's. With one micro-batch the blocks behind alone have given their shards of gradients. Of few
    blocks either none is behind, or fewer weights are there, which makes the first of both less.
    """
    if not sends(division, stack):
        return 0.0, gradients
    plan, width = division.plan, compute_width(division.plan)
    head = division.dense(division.profile.head) * (stack.one_root and not division.profile.tied) * width
    sizes = [division.owned_by(block) for stage in stages for block in stage.blocks]
    most = max((division.sent_of(block) for stage in stages for block, _ in stage.counts), default=0.0)
    here = min(len(sizes), 1 + plan.communication.prefetch) if plan.reshards else len(sizes)  # gathered blocks

    def at(place: int) -> tuple[float, float]:
        behind = sizes[place + 1 :]
        share = sum(behind) / division.owned(stages) if plan.batch.micro_batches == 1 else 1.0
        gone = max(0, here - 1 - place) if plan.reshards else 0
        whole = max((division.whole_of(block) for stage in stages for block, _ in stage.counts), default=0.0)
        stays = not plan.reshards and plan.batch.micro_batches > 2  # so that its gradients take no weights' place
        beside = most * reduce_width(plan) * bool(behind) + (stays - gone) * whole * width
        return head + beside, gradients * share

    last = len(sizes) - 1
    places = {last, max(0, min(last - 1, here - 1 if plan.reshards else last - 1))}
    return max(map(at, places), key=sum)


def sends(division: Division, stack: Stack) -> bool:
    """Whether `fully_shard` reduces gradients over shards behind each block."""
    plan = division.plan
    late = plan.axes.pp > 1 or (plan.zero < 2 and plan.batch.micro_batches > 1)
    shares = stack.keeps_shards and is_gathered(plan) and division.shards > 1
    return shares and not late and division.workload.trained == 1


def gathered_width(division: Division, stages: tuple[Stage, ...]) -> float:
    """Bytes of a weight while `fully_shard` has all of them gathered; packed ones that nobody shares are not copied."""
    copies = division.workload.packed is None or division.shards > 1
    return held_width(division, stages, compute_width(division.plan)) * copies


def frees_last(stack: Stack) -> bool:
    """Whether no gradient of a block counts at the loss: what is outside of blocks is gathered there, as one unit."""
    return stack.one_root and stack.keeps_shards


def gives_back(plan: Plan, stack: Stack) -> bool:
    """Whether weights that were gathered whole, and that nobody shares, go while gradients come in the only pass."""
    alone = plan.axes.pp == 1 and plan.zero == 0 and plan.batch.micro_batches == 1
    return alone and stack.name in OWN and uses_fully_shard(plan)


def given_back(division: Division, stages: tuple[Stage, ...], gradients: float, stack: Stack) -> dict[str, float]:
    """Gradients, and what is gathered or sent, at the largest moment of such a backward pass; of another nothing.

    When the last block goes backward, when the first one's gradients are reduced, or those outside of blocks: they are
    there as they are sent, and as they were summed.
    """
    if not gives_back(division.plan, stack):
        return {}
    whole, width, wire = division.whole(stages), compute_width(division.plan), reduce_width(division.plan)
    held, trained = gathered_width(division, stages), division.workload.trained
    most = max((division.sent_of(block) for stage in stages for block, _ in stage.counts), default=0.0)
    outside = outside_blocks(division, stages)
    moments = (
        {"gathered": whole * held + most * width * trained, "gradients": 0.0},
        {"gathered": outside * width + 2 * most * wire * trained, "gradients": gradients * (1 - outside / whole)},
        {"gathered": 2 * outside * wire * trained, "gradients": gradients},
    )
    return max(moments, key=lambda terms: sum(terms.values()))


def outside_blocks(division: Division, stages: tuple[Stage, ...]) -> float:
    """Parameters of some stages that are in no block."""
    inner = sum(division.whole_of(block) for stage in stages for block in stage.blocks)
    return max(0.0, division.whole(stages) - inner)


def least_gathered(division: Division, stages: tuple[Stage, ...], gathered: float, stack: Stack) -> float:
    """Of so many bytes that are gathered at the loss, what is there at any moment at least."""
    if gives_back(division.plan, stack):
        return 0.0
    return min(gathered, cast_last(division, stages)) if casts_weights(division.plan) else gathered


def sent_before(division: Division, stack: Stack) -> float:
    """Bytes of gradients outside of blocks as they were sent, which torch holds into the next micro-batch."""
    if (
        stack.name not in OWN
        or division.plan.batch.micro_batches == 1
        or not (stack.one_root and sends(division, stack))
    ):
        return 0.0
    return _root(division) * reduce_width(division.plan)


def _root(division: Division) -> float:
    """Parameters outside of blocks."""
    return division.embedding + division.dense(division.profile.head) * (not division.profile.tied)


def of_units(
    division: Division, stages: tuple[Stage, ...], kept: Mapping[str, float], gradients: float, stack: Stack
) -> dict[str, Mapping[str, float]]:
    """Moments of a step without a pipeline at which what `fully_shard` gathers and reduces together decides.

    Args:
        division: of the plan.
        stages: of a rank.
        kept: its states, but for gradients, and what a micro-batch keeps.
        gradients: bytes of all of these.
        stack: one that is eager has moments of its own.
    """
    plan = division.plan
    once = plan.axes.pp == 1 and plan.zero < 2 and plan.batch.micro_batches > 1 and uses_fully_shard(plan)
    if once and stack.name in OWN and not plan.offload.state:
        return _reduced_once(division, stages, kept, gradients)
    states = {name: value for name, value in kept.items() if name != "activations"}
    return _of_root(division, stages, states, gradients, stack) if stack.one_root and sends(division, stack) else {}


def _reduced_once(
    division: Division, stages: tuple[Stage, ...], kept: Mapping[str, float], gradients: float
) -> dict[str, Mapping[str, float]]:
    """Of a last micro-batch behind which whole gradients are reduced.

    When the head has its gradient, the last block has gone backward, when its gradients are reduced, or those outside
    of blocks. What autograd gives in another type than the sums have is beside them until its unit has gone backward,
    the head's until all have. What is sent takes the place of a unit's sums; its shards are beside it, and where there
    are none two copies.
    """
    plan, blocks = division.plan, [block for stage in stages for block in stage.blocks]
    whole, width, wire, shards = division.whole(stages), compute_width(plan), reduce_width(plan), division.shards
    most, outside = max(map(division.sent_of, blocks)), outside_blocks(division, stages)
    held, trained = gathered_width(division, stages), division.workload.trained
    most, head = most * trained, division.dense(division.profile.head) * trained
    new = width * (reduce_type(plan) != plan.precision.removesuffix("-pure"))
    more = wire * (1 / shards if shards > 1 else 2)
    vocab = division.profile.vocab / (plan.axes.tp if plan.tensor.loss else 1)
    moments = (
        {"gathered": whole * held + head * width, "logits": vocab * division.tokens * width},
        {
            "gathered": whole * held + head * new + most * max(new, more - width),
            "activations": kept["activations"] * (1 - 1 / len(blocks)),
        },
        {"gathered": outside * trained * more * (shards == 1), "activations": 0.0},
    )
    rest = {**kept, "gradients": gradients}
    return {"backward": max(({**rest, **moment} for moment in moments), key=lambda terms: sum(terms.values()))}


def _of_root(
    division: Division, stages: tuple[Stage, ...], kept: Mapping[str, float], gradients: float, stack: Stack
) -> dict[str, Mapping[str, float]]:
    """Of what is outside of blocks, where it is one unit of `fully_shard`: forward, and backward at its end.

    First it comes with the first block: as sent, and cut up. The head's gradient waits for the table's: both, or of a
    tied table both and their sum, stand beside its weights, the first block's gradients as they are sent, and the
    step's output. Then they are copied into what is sent, and its weights have gone. Where weights stay gathered, all
    are there until the last micro-batch. What was summed over replicas in another type than gradients have is beside
    them.
    """
    plan, first, tied = division.plan, division.whole_of(stages[0].blocks[0]), division.profile.tied
    width, wire, several = compute_width(plan), reduce_width(plan), plan.batch.micro_batches > 1
    root = _root(division)
    made = root + 2 * division.embedding_table * tied
    vocab = division.profile.vocab / (plan.axes.tp if plan.tensor.loss else 1)
    output = {"logits": vocab * division.tokens * width}
    inner = gradients * (1 - root / division.shards / division.owned(stages))
    most = max((root + made) * width + first * wire, root * (width + wire))
    moments = [{"gathered": most, "gradients": gradients if several else inner}]
    if several and not plan.reshards:
        staying = division.whole(stages) * width + root * (width + wire)
        moments.append({"gathered": staying, "gradients": gradients if plan.batch.micro_batches > 2 else inner})
    if not several and held_sums(plan):  # the last tensor of them is there until they are over shards
        sums = division.owned(stages) * held_sums(plan) + division.dense(division.profile.head) * (not tied) * width
        moments.append({"gathered": root * wire + sums, "gradients": gradients})
    behind = max(moments, key=lambda terms: sum(terms.values()))
    found: dict[str, Mapping[str, float]] = {"backward": {**kept, **behind, **output}}
    if plan.reshards or not several:
        ahead = {"gradients": gradients, **output} if several else {}
        found["loss"] = {**kept, "gathered": 2 * (root + first) * width + sent_before(division, stack), **ahead}
    return found


def _gathered_early(division: Division, stages: tuple[Stage, ...], stack: Stack) -> float:
    """All blocks' weights but two blocks', where nothing holds back the host: see `Stack.gathers_ahead`."""
    plan = division.plan
    if not stack.gathers_ahead or plan.zero < 3 or division.shards == 1:
        return 0.0
    most = max((division.dense(block) for stage in stages for block in stage.blocks), default=0.0)
    return max(0.0, division.whole(stages) - 2 * most) * compute_width(plan)


def reduced_last(
    division: Division, stages: tuple[Stage, ...], kept: Mapping[str, float], gradients: float, stack: Stack
) -> dict[str, Mapping[str, float]]:
    """What a pipeline's rank has when a unit is reduced, behind the last micro-batch: weights, and gradients.

    A unit's are copied into what is sent, and its weights have gone. What is in no block is the root's, which is the
    first; of its gradients a block finds this rank's part. `kept`: its states but for gradients; `gradients`: bytes of
    all of these before it.
    """
    plan, trained = division.plan, division.workload.trained
    if plan.axes.pp == 1 or stack.name not in OWN or not uses_fully_shard(plan):
        return {}
    width, copies = reduce_width(plan) * trained, 1 if division.shards > 1 else 2
    head = division.dense(division.profile.head) * any(stage.last for stage in stages)
    root = division.embedding * any(stage.first for stage in stages) + head
    block = max((division.sent_of(block) for stage in stages for block, _ in stage.counts), default=0.0)
    whole, wide = division.whole(stages), gathered_width(division, stages)
    first = {"gathered": (whole - root) * wide, "gradients": gradients + root * width * copies}
    cut = root * width * (1 - 1 / division.shards) * accumulates_whole(plan, stack)
    second = {"gathered": (whole - root - block) * wide, "gradients": gradients - cut + block * width * copies}
    return {"backward": max({**kept, **first}, {**kept, **second}, key=lambda each: sum(each.values()))}
