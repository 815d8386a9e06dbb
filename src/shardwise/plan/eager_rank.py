"""`eager_rank`: the moments of a step at which one rank may need most, where kernels are eager. See `plan.eager`."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.model.profile import Block
from shardwise.plan.activations import is_recomputed
from shardwise.plan.division import Division, Stage
from shardwise.plan.eager import Local, deferred_in, kept_ahead, kept_by, kept_op, local_of, outputs_of, working_in
from shardwise.plan.messages_data import is_replicated, uses_fully_shard
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


def frozen_outside(division: Division, stages: tuple[Stage, ...]) -> float:
    """Parameters of some stages without a gradient, outside blocks."""
    profile, first = division.profile, any(stage.first for stage in stages)
    tied = profile.frozen if profile.tied and first else 0  # they count once
    head = profile.head.frozen - min(tied, profile.head.frozen) if any(stage.last for stage in stages) else 0
    return profile.frozen * first + head


def trained_share(division: Division, stages: tuple[Stage, ...]) -> float:
    """Share of the parameters of some stages that get a gradient."""
    frozen = frozen_outside(division, stages)
    frozen += sum(block.frozen * count for stage in stages for block, count in stage.counts)
    if not frozen:
        return 1.0
    whole = sum(block.params * count for stage in stages for block, count in stage.counts)
    outside = division.embedding * any(stage.first for stage in stages)
    if any(stage.last for stage in stages):
        tied = division.profile.tied and any(stage.first for stage in stages)
        outside += division.profile.head.params - (division.embedding_table if tied else 0.0)
    return 1 - frozen / (whole + outside)


class _Rank:
    """Sizes of one rank, and its moments."""

    def __init__(self, division: Division, stages: tuple[Stage, ...], states: Terms) -> None:
        self.division, self.stages, self.plan = division, stages, division.plan
        self.local = local_of(division.plan)
        self.width, self.tokens = self.local.width, division.tokens
        trained, whole = trained_share(division, stages), division.whole(stages)
        self.gradients = states.pop("gradients") * trained
        states["optimizer"] *= trained
        self.engine = uses_fully_shard(self.plan)
        several = self.plan.batch.micro_batches > 1
        if self.plan.axes.pp > 1 and self.engine and several:  # nothing is reduced before the last micro-batch
            self.gradients = whole * trained * (4.0 if self.width < 4 else self.width)
        if is_replicated(self.plan) and several:  # what is summed without a reduction, beside the buckets
            self.gradients *= 2
        self.accumulates = several or is_replicated(self.plan)
        self.states = states
        self.blocks = [(stage.start + i, block) for stage in stages for i, block in enumerate(stage.blocks)]
        sizes = {block: self.params(block) for block in {block for _, block in self.blocks}}
        self.inner = sum(sizes[block] for _, block in self.blocks)
        self.largest = max(sizes.values(), default=0.0)
        self.outside = whole - self.inner
        self.moving = self.outside - frozen_outside(division, stages)
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

    def gathered(self, ahead: int) -> float:
        """Bytes of gathered or cast weights, while so many blocks are."""
        if not self.engine:
            return 0.0
        if not self.plan.reshards:
            return (self.inner + self.outside) * self.width
        return (self.outside + self.largest * min(ahead, len(self.blocks))) * self.width

    def stream(self, block: Block) -> float:
        """Bytes of a block's input."""
        return block.width * self.width * self.tokens / (self.local.tp if self.local.sequence else 1)

    def kept(self, index: int, block: Block) -> float:
        """Bytes that a block keeps of one micro-batch."""
        ahead = kept_ahead(block, self.local) * self.tokens if block.ahead else 0.0
        if not is_recomputed(index, self.plan):
            return ahead + kept_by(block, self.local) * self.tokens
        if self.plan.recompute.mode == "ops":
            return ahead + outputs_of(block, self.local)[0] * self.tokens
        return ahead + self.stream(block)

    def again(self, index: int, block: Block) -> float:
        """Bytes that a recomputed block has beside what it kept."""
        if not is_recomputed(index, self.plan):
            return 0.0
        whole = kept_by(block, self.local) * self.tokens
        if self.plan.recompute.mode == "ops":
            return max(0.0, whole - outputs_of(block, self.local)[1] * self.tokens)
        return whole - self.stream(block)

    def head(self) -> float:
        """Bytes that the last norm and the head keep of one micro-batch, without logits."""
        return kept_by(self.division.profile.head, Local(1, False, 1, self.width, False)) * self.tokens

    def logit(self) -> float:
        """Number of logits of one micro-batch on this rank."""
        return self.tokens * self.division.profile.vocab / (self.plan.axes.tp if self.plan.tensor.loss else 1)

    def logits(self) -> float:
        """At the loss: logits and their logarithm, the gradients of both."""
        wide = max(self.width, 4.0)
        if self.plan.tensor.loss and self.plan.axes.tp > 1:
            return self.logit() * (self.width + 2 * wide)
        return self.logit() * (self.width + 3 * wide)

    def fresh(self, block: Block) -> float:
        """Bytes of the gradients that are there at a block's largest moment: the head's, and of its last weight."""
        head = self.trained(self.division.profile.head) if self.is_last else 0.0
        return (head + self.row(block)) * self.width

    def row(self, block: Block) -> float:
        """Elements of the block's last weight."""
        tp = self.plan.axes.tp
        dense = [op for op in block.matmuls if not op.experts and op.trained]
        rows = [op for op in dense if op.split == "row"]
        return max((op.params / tp for op in rows or dense), default=0.0)

    # ---------------------------------------------------------------- without a pipeline

    def moments(self) -> Mapping[str, Terms]:
        """At the loss, at the last, the last but one and the first block, and at the update."""
        pending = self.gradients if self.accumulates else 0.0
        waits = self.engine and self.plan.zero >= 2 and self.plan.batch.micro_batches > 1
        left = self.moving * 4.0 if waits else 0.0  # the last reduction of the micro-batch before is still held
        kept = [self.kept(index, block) for index, block in self.blocks]
        fixed = {**self.base, "gathered": self.gathered(0), "gradients": pending + left}
        found = {"loss": {**fixed, "activations": sum(kept) + self.head(), "logits": self.logits()}}
        for name, position in (("last block", -1), ("middle blocks", -2), ("first block", 0)):
            place = position % len(self.blocks)
            terms = self.at_block(place, left if position == -1 else 0.0)
            terms["gradients"] += pending
            found[name] = {**self.base, **terms, "activations": sum(kept[: place + 1]) + self.entered(place)}
            if self.local_experts(self.blocks[place][1]):
                found[f"experts of the {name}"] = self.behind_experts(place, found[name])
        found["update"] = {**self.base, "gradients": self.gradients}
        return found

    def at_block(self, place: int, left: float) -> Terms:
        """While the block at this place of the rank's runs backward; those behind it are done."""
        index, block = self.blocks[place]
        done = sum(self.trained(b) for _, b in self.blocks[place + 1 :])
        new = self.row(block) * self.width if self.accumulates else self.fresh(block)
        if self.engine:
            new = self.fresh(block) + left
            if not self.accumulates:
                new += done * 4.0 / (self.division.shards if self.plan.zero else 1)
            new += self.trained(block) * 4.0 * (done > 0)  # the reduction of the block behind is held
        elif not self.accumulates:
            new += done * self.width
        working = working_in(block, self.local) * self.tokens + self.again(index, block)
        ahead = self.gathered(1 + (place > 0))
        return {"gathered": ahead, "gradients": new, "logits": self.logit() * self.width, "working": working}

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
            wait = sum(deferred_in(block, self.local) for block in stage.blocks) * self.tokens
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
        largest: dict[str, Terms] = {"update": {**self.base, "gradients": self.gradients}}
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
        wide = max(self.width, 4.0)
        found: list[tuple[str, Terms]] = []
        working = working_in(block, self.local) * self.tokens + self.again(index, block)
        row = self.row(block) * self.width
        if work == "W":
            return [("weights", {"gathered": self.gathered(1), "gradients": row})]
        if work == "I":  # at the end of the block, when all gradients that wait are there
            working = 3 * self.stream(block) + deferred + self.again(index, block)
            working -= self.logit() * wide * stage.last  # what the loss kept is used up
        if stage.last:
            found.append(("loss", {"gathered": self.gathered(1), "logits": 2 * wide * self.logit()}))
            if work == "B":  # what the head and the loss kept is used up
                working -= self.head() + self.logit() * wide
        found.append(("last block", {"gathered": self.gathered(2), "gradients": row, "working": working}))
        return found
