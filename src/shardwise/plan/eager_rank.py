"""`eager_rank`: the moments of a step at which one rank may need most, where kernels are eager. See `plan.eager`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwise.model.course import Held
from shardwise.model.profile import Block
from shardwise.plan.activations import is_recomputed
from shardwise.plan.division import Division, Stage
from shardwise.plan.eager import (
    Local,
    course_ahead,
    course_of,
    deferred_in,
    kept_ahead,
    kept_by,
    kept_op,
    local_of,
    outputs_of,
    working_in,
)
from shardwise.plan.messages_data import is_replicated, reduce_width, uses_fully_shard
from shardwise.plan.moments import Moment, moments_of

Terms = dict[str, float]


def eager_rank(division: Division, rank: int, stages: tuple[Stage, ...], states: Terms) -> Mapping[str, Terms]:
    """Bytes by term of one rank of the pipeline at each moment that may be its largest.

    `states`: weights, optimizer, and `gradients` as they are between micro-batches. Terms: these, the inputs of the
    step, receive buffers of a pipeline, gathered weights, activations, logits, working set.
    """
    job = _Rank(division, stages, dict(states))
    if division.plan.axes.pp == 1:
        return job.moments()
    plan = division.plan
    shape = (plan.axes.pp, len(stages), plan.batch.micro_batches)
    return job.pipelined(moments_of(plan.schedule.kind, *shape)[rank])


def _larger(one: Terms | None, other: Terms) -> Terms:
    return other if one is None or sum(other.values()) > sum(one.values()) else one


class _Rank:
    """Sizes of one rank, and its moments."""

    def __init__(self, division: Division, stages: tuple[Stage, ...], states: Terms) -> None:
        self.division, self.stages, self.plan = division, stages, division.plan
        self.local = local_of(division.plan)
        self.width, self.tokens = self.local.width, division.tokens
        trained, whole = division.trained_share(stages), division.whole(stages)
        del states["gradients"]
        states["optimizer"] *= trained
        pure = self.plan.precision == "bf16-pure"
        self.engine = uses_fully_shard(self.plan)
        self.own_width = self.width if pure else max(self.width, 4.0)
        """Bytes of an element of a gradient as its parameter has it."""
        self.reduced_width = float(reduce_width(self.plan))
        """And while it is reduced."""
        several = self.plan.batch.micro_batches > 1
        self.accumulates = several or is_replicated(self.plan)
        at_once = self.plan.axes.pp == 1 and (not several or self.plan.zero >= 2)  # else behind the last micro-batch
        if self.engine and several and not at_once:
            self.gradients = whole * trained * self.reduced_width
        elif self.engine and self.plan.zero and (at_once or self.plan.zero >= 2):
            self.gradients = division.owned(stages) * trained * self.own_width
        else:  # what is summed without a reduction is beside the buckets
            self.gradients = whole * trained * self.own_width * (2 if several and is_replicated(self.plan) else 1)
        self.masters = division.owned(stages) * trained * 4.0 * pure
        """Bytes of the gradients that masters take."""
        self.blocks = [(stage.start + i, block) for stage in stages for i, block in enumerate(stage.blocks)]
        sizes = {block: self.params(block) for block in {block for _, block in self.blocks}}
        self.inner = sum(sizes[block] for _, block in self.blocks)
        self.largest = max(sizes.values(), default=0.0)
        self.outside = whole - self.inner
        self.moving = self.outside - division.frozen_outside(stages)
        self.is_last = any(stage.last for stage in stages)
        self.base = {**states, "inputs": self.inputs(), "buffers": self.buffers()}

    # ---------------------------------------------------------------- sizes

    def params(self, block: Block) -> float:
        """Local parameters of a block, before data axes shard them."""
        return self.division.dense(block) + self.division.experts(block)

    def trained(self, block: Block) -> float:
        """Those of `params` that get a gradient."""
        return self.params(block) * (1 - block.frozen / block.params) if block.frozen else self.params(block)

    def inputs(self) -> float:
        """What is given and labels of the whole step; with `cp` the whole sequences too, and positions."""
        cp, both = self.plan.axes.cp, self.division.profile.given + 8.0
        return self.tokens * self.plan.batch.micro_batches * (both * cp + 8.0 if cp > 1 else both)

    @property
    def whole_stream(self) -> float:
        """Bytes of what passes between stages, per micro-batch."""
        return self.tokens * self.division.profile.dim * self.width

    def buffers(self) -> float:
        """A pipeline's receive buffers: one per micro-batch and boundary."""
        if self.plan.axes.pp == 1:
            return 0.0
        here = sum((not stage.first) + (not stage.last) for stage in self.stages)
        return here * self.plan.batch.micro_batches * self.whole_stream

    def gathered(self, ahead: int, place: int | None = None) -> float:
        """Bytes of gathered or cast weights, while so many blocks are; `place`: those behind it have gone backward."""
        if not self.engine:
            return 0.0
        if not self.plan.reshards or self.largest == self.inner + self.outside:  # of one unit, the root stays
            several = self.plan.batch.micro_batches > 1  # they are needed again
            behind = 0.0 if place is None or several else sum(self.params(b) for _, b in self.blocks[place + 1 :])
            return (self.inner + self.outside - behind) * self.width
        if place is None:
            return (self.outside + self.largest * min(ahead, len(self.blocks))) * self.width
        here = self.blocks[max(0, place + 1 - ahead) : place + 1]
        return (self.outside + sum(self.params(block) for _, block in here)) * self.width

    def stream(self, block: Block) -> float:
        """Bytes of a block's input."""
        return block.width * self.width * self.tokens / (self.local.tp if self.local.sequence else 1)

    def kept(self, index: int, block: Block) -> float:
        """Bytes that a block keeps of one micro-batch."""
        ahead = self.kept_ahead(block)
        if not is_recomputed(index, self.plan):
            return ahead + self.kept_whole(block)
        if self.plan.recompute.mode == "ops":
            return ahead + outputs_of(block, self.local)[0] * self.tokens
        return ahead + self.stream(block)

    def kept_whole(self, block: Block) -> float:
        """Without recompute. In a pipeline, whose moments are of operators, by these."""
        course = course_of(block, self.local) if self.plan.axes.pp == 1 else None
        return course.kept.size(self.tokens) if course else kept_by(block, self.local) * self.tokens

    def kept_ahead(self, block: Block) -> float:
        """Of what runs before the first block."""
        if not (block.ahead or block.courses_ahead):
            return 0.0
        course = course_ahead(block, self.local) if self.plan.axes.pp == 1 else None
        return course.kept.size(self.tokens) if course else kept_ahead(block, self.local) * self.tokens

    def again(self, index: int, block: Block) -> float:
        """Bytes that a recomputed block has beside what it kept."""
        if not is_recomputed(index, self.plan):
            return 0.0
        whole = self.kept_whole(block)
        if self.plan.recompute.mode == "ops":
            return max(0.0, whole - outputs_of(block, self.local)[1] * self.tokens)
        return whole - self.stream(block)

    def head(self) -> float:
        """Bytes that the last norm and the head keep of one micro-batch, without logits."""
        head = self.division.profile.head
        course = course_of(head, self.local) if self.plan.axes.pp == 1 else None
        return (
            course.kept.size(self.tokens)
            if course
            else kept_by(head, Local(1, False, 1, self.width, False)) * self.tokens
        )

    def logit(self) -> float:
        """Number of logits of one micro-batch on this rank."""
        profile = self.division.profile
        return self.tokens * (profile.outputs or profile.vocab) / (self.plan.axes.tp if self.plan.tensor.loss else 1)

    def logits(self) -> float:
        """At the loss: logits and their logarithm, the gradients of both."""
        wide = max(self.width, 4.0)
        if self.plan.tensor.loss and self.plan.axes.tp > 1:
            return self.logit() * (self.width + 2 * wide)
        return self.logit() * (self.width + 3 * wide)

    def row(self, block: Block) -> float:
        """Elements of the block's last weight."""
        tp = self.plan.axes.tp
        dense = [op for op in block.matmuls if not op.experts and op.trained]
        rows = [op for op in dense if op.split == "row"]
        return max((op.params / tp for op in rows or dense), default=0.0)

    # ---------------------------------------------------------------- without a pipeline

    def moments(self) -> Mapping[str, Terms]:
        """In the forward pass, at the loss, behind, in and before the blocks, and at the update."""
        pending = self.gradients if self.accumulates else 0.0
        waits = self.engine and self.plan.zero >= 2 and self.plan.batch.micro_batches > 1
        left = self.last_reduced() * self.reduced_width if waits else 0.0  # of the micro-batch before it is still held
        kept = [self.kept(index, block) for index, block in self.blocks]
        fixed = {**self.base, "gathered": self.gathered(0), "gradients": pending + left}
        found = {"loss": {**fixed, "activations": sum(kept) + self.head(), "logits": self.logits()}}
        found |= self.ends(kept, pending, left)
        last = len(self.blocks) - 1
        for place in self.places():
            name = "last block" if place == last else "first block" if place == 0 else "middle blocks"
            terms = self.at_block(place, left if place == last else 0.0)
            terms["gradients"] += pending
            used_up = min(0.0, terms["working"])
            terms["working"] -= used_up
            terms = {**self.base, **terms, "activations": sum(kept[: place + 1]) + self.entered(place) + used_up}
            found[name] = _larger(found.get(name), terms)
            block = self.blocks[place][1]
            if self.local_experts(block) and course_of(block, self.local) is None:
                found[f"experts of the {name}"] = self.behind_experts(place, terms)
        found["update"] = {**self.base, "gradients": self.gradients + self.masters}
        return found

    def last_reduced(self) -> float:
        """Parameters whose gradients are reduced last: those outside, or of a block whose input needs no gradient."""
        if self.division.profile.embedding > self.division.profile.frozen:
            return self.moving
        first = next((block for _, block in self.blocks if self.trained(block)), None)
        return max(self.moving, self.trained(first)) if first else self.moving

    def places(self) -> list[int]:
        """Of the blocks of which one may need most: the ends of the chain, and of each run of equal blocks."""
        blocks = [block for _, block in self.blocks]
        ends = {0, len(blocks) - 1, max(0, len(blocks) - 2)}
        for i in range(len(blocks) - 1):
            if blocks[i] is not blocks[i + 1]:
                ends |= {i, i + 1}
        return sorted(ends)

    def ends(self, kept: Sequence[float], pending: float, left: float) -> Mapping[str, Terms]:
        """Moments outside the backward pass of the blocks, of a module whose step was seen."""
        (index, last), head = self.blocks[-1], self.division.profile.head
        found: dict[str, Terms] = {}
        fixed = {**self.base, "gradients": pending + left}
        if (course := course_of(last, self.local)) and not is_recomputed(index, self.plan):
            most = max((held.size(self.tokens) for held in course.forward), default=0.0)
            found["forward"] = {**fixed, "gathered": self.gathered(2), "activations": sum(kept[:-1]) + most}
        if course := course_of(head, self.local):
            most = max((held.size(self.tokens) for held in course.forward), default=0.0)
            found["head"] = {**fixed, "gathered": self.gathered(0), "activations": sum(kept) + most}
            for held in course.backward:
                terms = {**found["head"], "logits": self.logit() * self.width, "working": held.size(self.tokens)}
                new = held.fresh if self.accumulates and not self.engine else held.gradients
                terms |= {"gradients": pending + left + new * self.width, "activations": sum(kept)}
                found["head"] = _larger(found["head"], terms)
        if course := course_ahead(self.blocks[0][1], self.local):
            for held in course.backward:
                terms = self.gradients_at(-1, 0.0, held) | {"working": held.size(self.tokens)}
                terms["gradients"] += pending
                terms = {**self.base, **terms, "gathered": self.gathered(0)}
                found["before the blocks"] = _larger(found.get("before the blocks"), terms)
        return found

    def at_block(self, place: int, left: float) -> Terms:
        """While the block at this place of the rank's runs backward; those behind it are done."""
        index, block = self.blocks[place]
        again, course, worst = self.again(index, block), course_of(block, self.local), None
        row = self.row(block)
        moments: Sequence[Held] = (Held(working_in(block, self.local), 0.0, row, row),)
        less = 0.0
        if course:
            moments, less = course.backward, self.kept_whole(block)
            if is_recomputed(index, self.plan) and self.plan.recompute.mode != "ops":
                out = block.width * self.width  # the last operation is not run again
                moments = (*moments, *(held._replace(per_token=held.per_token - out) for held in course.forward))
        for held in moments:
            terms = self.gradients_at(place, left, held)
            terms |= {
                "gathered": self.gathered(1 + (place > 0), place),
                "working": held.size(self.tokens) - less + again,
            }
            worst = _larger(worst, terms)
        if worst is None:  # nothing of it is trained
            worst = self.gradients_at(place, left, Held()) | {"gathered": self.gathered(1, place), "working": 0.0}
        reduced = self.reduced(place)
        return _larger(worst, reduced) if reduced else worst

    def reduced(self, place: int) -> Terms:
        """When a block's gradients are summed over replicas: whole in fp32, before and after.

        Where they are sharded their shards are small, and what is cast takes the place of what the block gathered.
        """
        if not self.engine or self.plan.zero or self.accumulates:
            return {}
        index, block = self.blocks[place]
        own = self.trained(block)
        terms = self.gradients_at(place, 0.0, Held(gradients=own))
        behind = self.trained(self.blocks[place + 1][1]) if place + 1 < len(self.blocks) else 0.0
        terms["gradients"] += (2 * own - behind) * self.reduced_width  # that of the block behind is given back
        return terms | {"gathered": self.gathered(1, place), "working": self.stream(block) - self.kept(index, block)}

    def gradients_at(self, place: int, left: float, held: Held) -> Terms:
        """Gradients and logits while the block at a place runs backward, or (-1) what is before all of them."""
        done = sum(self.trained(b) for _, b in self.blocks[place + 1 :])
        head = self.trained(self.division.profile.head) if self.is_last else 0.0
        new = (held.fresh if self.accumulates else head + held.gradients) * self.width
        if self.engine:
            new = (head + held.gradients) * self.width + left
            if not self.accumulates:
                new += done * self.own_width / (self.division.shards if self.plan.zero else 1)
            behind = self.blocks[place + 1][1] if done else None
            new += self.trained(behind) * self.reduced_width if behind else 0.0  # its reduction is held
        elif not self.accumulates:
            new += done * self.width
        return {"gradients": new, "logits": self.logit() * self.width}

    def entered(self, place: int) -> float:
        """Inputs of the recomputed blocks with experts behind a place, which live until the backward pass ends.

        As traced: a block that hands on its auxiliary losses beside the stream is held by its recorded call.
        """
        if self.plan.recompute.mode == "ops":
            return 0.0
        behind = self.blocks[place + 1 :]
        return sum(self.stream(b) for index, b in behind if self.local_experts(b) and is_recomputed(index, self.plan))

    def local_experts(self, block: Block) -> float:
        """Elements of a block's experts on this rank."""
        return self.division.experts(block)

    def behind_experts(self, place: int, at_block: Terms) -> Terms:
        """When all experts of a block have gone backward: each has its gradients, which are being stacked.

        Stacked weights are taken apart, expert by expert, so that the gradient of one of the three stacks is there
        twice. What experts kept is used up; the stream is there with its gradient and what attention gave.
        """
        index, block = self.blocks[place]
        inner = [op for op in block.ops if getattr(op, "experts", 0) or getattr(op, "per_choice", 0)]
        used = sum(kept_op(op, self.local) for op in inner) * self.tokens
        stacks = sum(op.name.startswith("experts") for op in block.matmuls) + 1  # gate and up are one product here
        fresh = self.local_experts(block) * (1 + 1 / stacks) - self.row(block)
        return {
            **at_block,
            "gradients": at_block["gradients"] + fresh * self.width,
            "working": 3 * self.stream(block) + max(0.0, self.again(index, block) - used),
            "activations": at_block["activations"] - (0.0 if is_recomputed(index, self.plan) else used),
        }

    # ---------------------------------------------------------------- with one

    def pipelined(self, moments: tuple[Moment, ...]) -> Mapping[str, Terms]:
        """At each backward action, and at the update."""
        kept, deferred = [], []
        for stage in self.stages:
            own = sum(self.kept(stage.start + i, block) for i, block in enumerate(stage.blocks))
            blocks = enumerate(stage.blocks, stage.start)
            wait = self.tokens * sum(deferred_in(b, self.local) for i, b in blocks if not is_recomputed(i, self.plan))
            if stage.last:
                own += self.head() + self.logit() * max(self.width, 4.0)
                wait += self.logit() * self.width
            # what was received lies in its buffer; what was sent is kept as long as the rest
            kept.append(own + self.whole_stream * ((not stage.last) - (not stage.first)))
            deferred.append(wait)
        worst: dict[tuple[str, int], tuple[float, float, float]] = {}
        for moment in moments:
            alive = sum(count * size for count, size in zip(moment.alive, kept, strict=True))
            alive += sum(count * size for count, size in zip(moment.pending, deferred, strict=True))
            alive += (moment.outputs + moment.gradients) * self.whole_stream
            begun = self.gradients * moment.begun
            key = (moment.work, moment.turn)
            worst[key] = max(worst.get(key, (0.0, 0.0, 0.0)), (alive + begun, alive, begun))
        largest: dict[str, Terms] = {"update": {**self.base, "gradients": self.gradients + self.masters}}
        for (work, turn), (_, alive, begun) in worst.items():
            for name, more in self.in_action(work, turn, deferred[turn]):
                terms = {**self.base, **more, "activations": alive, "gradients": begun + more.get("gradients", 0.0)}
                if name not in largest or sum(terms.values()) > sum(largest[name].values()):
                    largest[name] = terms
        return largest

    def in_action(self, work: str, turn: int, deferred: float) -> list[tuple[str, Terms]]:
        """What a backward action of a stage needs beside what is kept: at the loss, and in its last block."""
        stage = self.stages[turn]
        index, block = stage.start + len(stage.blocks) - 1, stage.blocks[-1]
        wide, row = max(self.width, 4.0), self.row(block) * self.width
        found: list[tuple[str, Terms]] = []
        working = working_in(block, self.local) * self.tokens + self.again(index, block)
        if work == "W":
            return [("weights", {"gathered": self.gathered(1), "gradients": row})]
        if work == "I" and not is_recomputed(index, self.plan):  # at its end, when all gradients that wait are there
            working = 3 * self.stream(block) + deferred + self.again(index, block)
            working -= self.logit() * wide * stage.last  # what the loss kept is used up
        if stage.last:
            found.append(("loss", {"gathered": self.gathered(1), "logits": 2 * wide * self.logit()}))
            if work == "B":  # what the head and the loss kept is used up
                working -= self.head() + self.logit() * wide
        found.append(("last block", {"gathered": self.gathered(2), "gradients": row, "working": working}))
        return found
