"""`RankSizes`: what a rank of the pipeline keeps and needs where kernels are eager, part by part. See `kernels.py`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from shardwise.model.course import Course, Held
from shardwise.model.profile import Block
from shardwise.plan.eager.kernels import (
    Local,
    course_ahead,
    course_of,
    head_kept,
    inputs_of,
    kept_ahead,
    kept_by,
    kept_op,
    local_of,
    norms_in,
    outputs_of,
    upcast_norms,
)
from shardwise.plan.messages.data import held_sums, reduce_type, reduce_width
from shardwise.plan.plan import ZERO_BUBBLE
from shardwise.plan.ranks.activations import is_recomputed
from shardwise.plan.ranks.division import Division
from shardwise.plan.ranks.engines import casts_weights, is_replicated, uses_fully_shard
from shardwise.plan.ranks.stages import Stage

Terms = dict[str, float]
AT_END = 6
"""Of the size of a block's input: what is left of it when its weights have their gradients."""


def larger(one: Terms | None, other: Terms) -> Terms:
    """The one with more bytes."""
    return other if one is None or sum(other.values()) > sum(one.values()) else one


class RankSizes:
    """Sizes of one rank, and its moments."""

    def __init__(self, division: Division, stages: tuple[Stage, ...], states: Terms, gloo: bool) -> None:
        self.division, self.stages, self.plan, self.gloo = division, stages, division.plan, gloo
        self.local = local_of(division.plan)
        self.width, self.tokens = self.local.width, division.tokens
        trained, whole = division.trained_share(stages), division.whole(stages)
        del states["gradients"]
        states |= {name: states[name] * trained for name in ("master", "optimizer") if name in states}
        pure = self.plan.precision == "bf16-pure"
        self.engine, self.casts = uses_fully_shard(self.plan), casts_weights(self.plan)
        self.own_width = self.width if pure else max(self.width, 4.0)
        """Bytes of an element of a gradient as its parameter has it."""
        self.reduced_width = float(reduce_width(self.plan))
        """And while it is reduced."""
        self.held_width = float(held_sums(self.plan))
        """And of what was summed over replicas, which torch holds until the backward pass ends, beside what it gave."""
        self.prefetch = max(1, self.plan.communication.prefetch)
        """Blocks whose weights come while another one goes backward."""
        several = self.plan.batch.micro_batches > 1
        self.accumulates = several or is_replicated(self.plan)
        self.adds = several or (self.accumulates and self.plan.communication.bucket_view)
        """Whether a gradient is gone when it is added to those that `gradients` counts."""
        at_once = self.plan.axes.pp == 1 and (not several or self.plan.zero >= 2)
        self.sums_first = self.engine and not at_once
        """Whether gradients are reduced once, behind the last micro-batch."""
        self.adds_up = self.sums_first and reduce_type(self.plan) == self.plan.precision.removesuffix("-pure")
        """Whether autograd adds a gradient to that of the micro-batch before as soon as it is made."""
        self.adds_later = self.sums_first and not self.adds_up and self.plan.schedule.kind in ZERO_BUBBLE
        """Whether what a backward pass to the weights gives waits for the next one to the inputs."""
        self.fills = self.plan.axes.data * self.plan.axes.cp > 1
        """Whether what nobody uses is reduced: as zeros."""
        reduced = division.reduced_share(stages) if self.fills else trained
        counts = (whole * trained, whole * reduced, division.owned(stages) * reduced)
        self.gradients, self.kept_gradients = self.sums(*counts, at_once)
        """Bytes of gradients between micro-batches, and what is left of them when they are reduced."""
        self.masters = division.owned(stages) * trained * 4.0 * pure
        """Bytes of the gradients that masters take."""
        self.blocks = [(stage.start + i, block) for stage in stages for i, block in enumerate(stage.blocks)]
        calls = division.profile.calls if self.plan.axes.pp == 1 else ()
        self.chain = [self.blocks[index] for index in calls] or self.blocks
        """Blocks in the order of their calls: one that is called again comes again."""
        sizes = {block: self.params(block) for block in {block for _, block in self.blocks}}
        self.inner = sum(sizes[block] for _, block in self.blocks)
        self.largest = max(sizes.values(), default=0.0)
        self.outside = whole - sum(division.dense(block) + division.experts(block) for _, block in self.blocks)
        self.is_one_unit = self.largest == self.inner + self.outside
        self.moving = self.outside - division.frozen_outside(stages)
        """Trained parameters outside of blocks."""
        self.summed_outside = self.moving + division.unused_outside(stages) * self.fills
        """Those whose gradients are reduced together."""
        self.is_last = any(stage.last for stage in stages)
        self.base = {**states, "inputs": self.inputs()}

    def sums(self, made: float, whole: float, owned: float, at_once: bool) -> tuple[float, float]:
        """Bytes of gradients between micro-batches and at the end.

        Args:
            made: parameters that autograd gives one.
            whole: those that have one behind a reduction.
            owned: of these in this rank's shard.
            at_once: they are reduced behind each micro-batch, or there is one.
        """
        several, zero = self.plan.batch.micro_batches > 1, self.plan.zero
        if self.sums_first:
            return made * self.reduced_width, (owned if zero else whole) * self.own_width
        if self.engine and zero and (at_once or zero >= 2):
            summed = several and self.plan.axes.dp_replicate > 1  # over the shards; over replicas at the end
            return owned * (self.reduced_width if summed else self.own_width), owned * self.own_width
        if is_replicated(self.plan):  # what is summed without a reduction is beside the buckets
            views = self.plan.communication.bucket_view
            return (1 + several) * whole * self.own_width, (2 - views) * whole * self.own_width
        return whole * self.own_width, whole * self.own_width

    def params(self, block: Block) -> float:
        """Local parameters of a block, before data axes shard them."""
        return self.division.dense(block) + self.division.filled(block)

    def apart(self, block: Block) -> float:
        """Those of `params` in experts that `ep` divides: they are gathered and reduced by themselves."""
        return self.division.filled(block) if self.plan.axes.ep > 1 else 0.0

    def owned(self, block: Block) -> float:
        """Those of `summed` in this rank's shards."""
        shards, apart = (self.division.shards, self.apart(block)) if self.plan.zero else (1, 0.0)
        return (self.summed(block) - apart) / shards + apart / self.division.expert_shards

    def trained(self, block: Block) -> float:
        """Those of `params` that get a gradient."""
        return self.params(block) * (1 - block.frozen / block.params) if block.frozen else self.params(block)

    def summed(self, block: Block) -> float:
        """Those of `params` whose gradients are reduced."""
        unused = block.unused / block.params if block.unused and self.fills else 0.0
        return self.trained(block) + self.params(block) * unused

    def used(self, block: Block) -> float:
        """Those of `params` that forward takes."""
        return self.params(block) * (1 - block.unused / block.params) if block.unused else self.params(block)

    def inputs(self) -> float:
        """What is given and labels of the whole step."""
        return self.tokens * self.plan.batch.micro_batches * inputs_of(self.division)

    def sent_bytes(self, elements: float) -> float:
        """Bytes of what passes between two stages, per micro-batch."""
        return self.tokens * elements * self.width

    def came(self, stage: Stage) -> float:
        """Bytes that it receives of a micro-batch; a stage before it that is here too keeps them itself."""
        at_home = any(stage.start == other.start + len(other.blocks) for other in self.stages)
        return self.sent_bytes(stage.given) * (not at_home)

    def counted(self, stage: Stage) -> float:
        """Bytes of a micro-batch that it is given and its first block is counted to keep."""
        return 0.0 if course_of(stage.blocks[0], self.local) else self.sent_bytes(stage.given)

    def gathered(self, ahead: int, place: int | None = None) -> float:
        """Bytes of gathered or cast weights, while so many blocks are; `place`: those behind it have gone backward."""
        if self.casts:
            return self.cast(place)
        if not self.engine:
            return 0.0
        if not self.plan.reshards or self.is_one_unit:  # the root stays
            several = self.plan.batch.micro_batches > 2 and not self.plan.reshards  # they stay, beside all gradients
            behind = 0.0 if place is None or several else sum(map(self.params, self.behind(place)))
            return (self.inner + self.outside - behind) * self.width
        if place is None:
            whole = self.largest * min(ahead, len(self.blocks))
            return (self.outside + whole + (self.inner - whole) * self.division.part_left) * self.width
        first = max(0, place + 1 - ahead)
        here = [block for _, block in dict.fromkeys(self.chain[first : place + 1])]
        whole = sum(map(self.params, (*here, *self.apart_behind(place))))
        ahead_of_it = sum(map(self.apart, here[:-1]))  # which come by themselves, when the rest has
        return (self.outside + whole - ahead_of_it + self.left_of(self.chain[: max(0, place)])) * self.width

    def given_back(self, place: int) -> float:
        """Bytes of gathered weights when the block at a place has given its own back, and those ahead have come."""
        if self.sums_first and not self.plan.reshards:  # in the last micro-batch, whose blocks give theirs back
            return (self.inner + self.outside - sum(map(self.params, self.behind(place - 1)))) * self.width
        alone = self.apart(self.chain[place - 1][1]) * (place > 0 and self.plan.reshards)
        alone -= self.left_of(self.chain[max(0, place - 1) : place])
        return self.gathered(self.prefetch, place - 1) - alone * self.width

    def left_of(self, chain: Sequence[tuple[int, Block]]) -> float:
        """Elements of the weights of blocks that a forward pass left, until a backward pass has gathered them."""
        return sum(self.params(block) for _, block in dict.fromkeys(chain)) * self.division.part_left

    def apart_behind(self, place: int) -> list[Block]:
        """Blocks behind a place whose gradients wait for the end of the backward pass, and their weights with them."""
        return [block for block in self.behind(place) if block.apart]

    def behind(self, place: int) -> list[Block]:
        """Blocks that have gone backward when the call at a place does: that are not called at it, or before."""
        if self.chain is self.blocks:
            return [block for _, block in self.blocks[place + 1 :]]
        ahead = set(self.chain[: place + 1])
        return [each[1] for each in self.blocks if each not in ahead]

    def begun(self, place: int) -> list[Block]:
        """Blocks of which a call is behind the place, and one is not: autograd keeps what these gave so far."""
        if self.chain is self.blocks:
            return []
        ahead = set(self.chain[: place + 1])
        return [each[1] for each in dict.fromkeys(self.chain[place + 1 :]) if each in ahead]

    def cast(self, place: int | None) -> float:
        """Bytes of weights in the compute type where one process casts them: what backward passes will need.

        A recomputed block casts its own again. `place`: the block at work in the backward pass; None: none is yet.
        """
        if place is None:
            kept = [block for index, block in self.chain if self.keeps_cast(index, block)]
            return (sum(map(self.used, kept)) + self.used(self.division.profile.head)) * self.width
        ahead = [block for index, block in self.chain[: place + 1] if self.keeps_cast(index, block)]
        here = [block for index, block in self.chain[place : place + 1] if is_recomputed(index, self.plan)]
        return sum(map(self.used, (*ahead, *here))) * self.width

    def keeps_cast(self, index: int, block: Block) -> bool:
        """Whether a block's cast weights are kept for its backward pass: it has one, and does not cast them again."""
        return not is_recomputed(index, self.plan) and self.goes_back(block)

    def goes_back(self, block: Block) -> bool:
        """Whether a block has a backward pass: one that is frozen, and fed what has no gradient, has none."""
        course = course_of(block, self.local)
        return bool(course.backward) if course else self.kept_whole(block) > 0

    def stream(self, block: Block) -> float:
        """Bytes of a block's input."""
        return block.width * self.width * self.tokens / (self.local.tp if self.local.sequence else 1)

    def reruns(self, index: int, block: Block) -> bool:
        """Whether a block is recomputed, and was seen when it is not: what is said of it is to be put together."""
        seen = self.plan.recompute.mode == "ops" and course_of(block, self.local)
        return is_recomputed(index, self.plan) and not seen

    def kept(self, index: int, block: Block) -> float:
        """Bytes that a block keeps of one micro-batch, in one call, with what is kept ahead of it."""
        whole = self.kept_whole(block)
        if not whole or not self.reruns(index, block):  # nothing: it is frozen, and has no backward pass
            return self.kept_ahead(block) + whole
        outputs = outputs_of(block, self.local)[0] * self.tokens if self.plan.recompute.mode == "ops" else 0.0
        return self.kept_ahead(block, recomputed=True) + self.left(block) + outputs

    def left(self, block: Block) -> float:
        """Bytes of what a recomputed block hands on, and of what is kept behind it; if it was not seen, its inputs."""
        if course := course_of(block, self.local):
            return course.left.size(self.tokens)
        return self.stream(block) + block.beside * self.width * self.tokens

    def kept_at(self, place: int) -> float:
        """The same of the call at a place of the chain: only the first keeps what runs ahead of it."""
        index, block = self.chain[place]
        if place == 0 or index != self.chain[0][0]:
            return self.kept(index, block)
        recomputed = self.kept_whole(block) > 0 and self.reruns(index, block)
        return self.kept(index, block) - self.kept_ahead(block, recomputed)

    def kept_whole(self, block: Block) -> float:
        """Without recompute."""
        course = course_of(block, self.local)
        return course.kept.size(self.tokens) if course else kept_by(block, self.local) * self.tokens

    def kept_ahead(self, block: Block, recomputed: bool = False) -> float:
        """Of what runs before the first block; where that is recomputed, what it is given too."""
        if not (block.ahead or block.courses_ahead):
            return 0.0
        course = course_ahead(block, self.local)
        if course and recomputed:
            return course.left.size(self.tokens)
        return course.kept.size(self.tokens) if course else kept_ahead(block, self.local) * self.tokens

    def shared(self, recomputed: bool) -> float:
        """Bytes of a micro-batch that each stage makes for its blocks as the first one does, and keeps: masks."""
        first = self.division.profile.blocks[0]
        course = course_ahead(first.through or first, self.local)
        return course.shared[recomputed].size(self.tokens) if course else 0.0

    def again(self, index: int, block: Block) -> float:
        """Bytes that a recomputed block has beside what it kept."""
        if not self.reruns(index, block):
            return 0.0
        whole = self.kept_whole(block)
        if not whole:
            return 0.0
        course = course_of(block, self.local)
        there = course.left.size(self.tokens) if course else self.stream(block)
        if not course and self.width < 4 and upcast_norms(block):  # its first norm keeps the copy in fp32 alone
            there = 0.0
        if self.plan.recompute.mode == "ops":
            return max(0.0, whole - there - outputs_of(block, self.local)[1] * self.tokens)
        return whole - there

    def edges(self, blocks: Sequence[tuple[int, Block]]) -> list[int]:
        """Places of the blocks of a chain that are its ends, or unlike a neighbour, or recomputed where that is not."""
        marks = [(block, is_recomputed(index, self.plan)) for index, block in blocks]
        found = {i for i, (here, there) in enumerate(pairwise(marks)) if here[0] is not there[0] or here[1] != there[1]}
        return sorted({0, len(blocks) - 1} | found | {i + 1 for i in found}) if blocks else []

    def held_in(self, index: int, block: Block, course: Course) -> tuple[Held, ...]:
        """The moments of a block's backward pass, if it has one, and of the forward pass that it runs again."""
        if not course.backward:
            return ()
        if not self.reruns(index, block):
            return course.backward
        return (*course.backward, *course.again)

    def head(self) -> float:
        """Bytes that the last norm and the head keep of one micro-batch, without logits."""
        head = self.division.profile.head
        course = course_of(head, self.local)
        return course.kept.size(self.tokens) if course else head_kept(head, self.width) * self.tokens

    def head_norm(self) -> float:
        """Bytes of a head that was not seen while its norm goes backward, if that computes in fp32."""
        norms = norms_in(self.division.profile.head, Local(1, False, 1, self.width, False))
        return max((self.head() + held.size(self.tokens) for held in norms), default=0.0)

    def logit(self) -> float:
        """Number of logits of one micro-batch on this rank."""
        profile = self.division.profile
        return self.tokens * (profile.outputs or profile.vocab) / (self.plan.axes.tp if self.plan.tensor.loss else 1)

    def logits(self) -> float:
        """At the loss: logits and their logarithm, the gradients of both; or values in fp32, twice in their square's.

        Of what has no labels it is the mean square.
        """
        wide = max(self.width, 4.0)
        if not self.division.profile.labels and self.width < wide:
            return self.logit() * (self.width + 4 * wide)
        if self.plan.tensor.loss and self.plan.axes.tp > 1:
            return self.logit() * (self.width + 2 * wide)
        return self.logit() * (self.width + 3 * wide)

    def row(self, block: Block) -> float:
        """Elements of the block's last weight."""
        tp = self.plan.axes.tp
        dense = [op for op in block.matmuls if not op.experts and op.trained]
        rows = [op for op in dense if op.split == "row"]
        return max((op.params / tp for op in rows or dense), default=0.0)

    def embedding(self) -> float:
        """Trained parameters before the blocks."""
        return max(0.0, self.moving - self.is_last * self.trained(self.division.profile.head))

    def tied(self, all_there: bool) -> float:
        """Elements of gradients of a table that is the head's too, beside those of all parameters.

        Autograd keeps the head's until it has the other (`all_there`), and adds both up in a third.
        """
        division = self.division
        if not division.profile.tied or division.profile.frozen or self.plan.axes.pp > 1:
            return 0.0
        kept_apart = self.adds_up or (self.accumulates and not self.engine and not self.casts)
        return division.embedding_table * (kept_apart + 2 * all_there)

    def copies(self, shards: int) -> int:
        """How often gradients are there while ranks sum them: gloo sums in a copy, and alone a rank makes one."""
        return 1 + (self.gloo or shards == 1)

    def reduction(
        self, gradients: float, unit: float, last: float | None = None, zeros: float = 0.0, shards: int = 0
    ) -> Terms:
        """When so many parameters' are reduced, the last: as they were, over shards, over all; beside other bytes.

        Those that autograd gave are freed.
        `last`: elements of the last tensor of them, which torch holds until they are over shards, where `gradients` are
        those before any is reduced. `zeros`: of what nobody uses, which are not among these.
        """
        shards = (shards or self.division.shards) if self.plan.zero else 1
        given = unit / shards
        narrow = self.own_width < self.reduced_width and not self.sums_first
        if self.held_width and not self.sums_first:
            given = self.kept_gradients / self.own_width
        elif not narrow:  # they are the parameters' gradients themselves, or in the place of the whole
            given = 0.0 if last is None else last * (given < unit) + given - (unit - zeros)
        return {**self.base, "gradients": gradients + (self.copies(shards) * unit + given) * self.reduced_width}

    def local_experts(self, block: Block) -> float:
        """Elements of a block's experts on this rank."""
        return self.division.experts(block)

    def in_experts(self, index: int, block: Block) -> tuple[float, float, float]:
        """Behind the experts of a block: bytes of gradients beside that of its last product, working set, and used up.

        Each expert has its gradients, which are being stacked. Stacked weights are taken apart, expert by expert, so
        that the gradient of one of the three stacks is there twice. What experts kept is used up; the stream is there
        with its gradient and what attention gave.
        """
        inner = [op for op in block.ops if getattr(op, "experts", 0) or getattr(op, "per_choice", 0)]
        used = sum(kept_op(op, self.local) for op in inner) * self.tokens
        stacks = sum(op.name.startswith("experts") for op in block.matmuls) + 1  # gate and up are one product here
        fresh = self.local_experts(block) * (1 + 1 / stacks) - self.row(block)
        working = 3 * self.stream(block) + max(0.0, self.again(index, block) - used)
        return fresh * self.width, working, 0.0 if is_recomputed(index, self.plan) else used
