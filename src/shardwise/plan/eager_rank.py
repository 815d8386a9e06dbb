"""`eager_rank`: the moments of a step at which one rank may need most, where kernels are eager. See `plan.eager`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from shardwise.model.course import Held
from shardwise.model.profile import Block
from shardwise.plan.activations import is_recomputed
from shardwise.plan.division import Division, Stage
from shardwise.plan.eager import course_ahead, course_of, deferred_in, kept_op, working_in
from shardwise.plan.eager_sizes import RankSizes, Terms
from shardwise.plan.moments import Moment, moments_of
from shardwise.plan.plan import ZERO_BUBBLE


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


_AT_END = 6
"""Of the size of a block's input: what is left of it when its weights have their gradients."""


def _larger(one: Terms | None, other: Terms) -> Terms:
    return other if one is None or sum(other.values()) > sum(one.values()) else one


class _Sizes(NamedTuple):
    """Bytes of a stage. `at_once`: of blocks that are recomputed, whose weights have gradients when the inputs have."""

    kept: float
    kept_at_once: float
    """And of the loss behind them."""
    deferred: float
    """Gradients that wait for the weights' part."""
    gradients: float
    gradients_at_once: float
    fresh: float
    """Gradients in the type in which they were made, until the next backward pass to the inputs adds them up."""
    unit: float
    """Parameters of the largest unit whose gradients are reduced together."""


class _Rank(RankSizes):
    """The moments of one rank."""

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
        found |= self.gathering(sum(kept[:-1]), pending + left)
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
        if self.engine:
            gradients = self.kept_gradients
            if self.division.shards > 1:  # what autograd gave last is still in its hands
                gradients += self.embedding() * (self.reduced_width if self.sums_first else self.width)
            found["reduction"] = {**self.reduction(gradients, self.moving), "logits": self.logit() * self.width}
        return found

    def gathering(self, kept: float, gradients: float) -> dict[str, Terms]:
        """When the last block's weights have come in the forward pass: as sent, and cut up; those before as sent."""
        if not self.engine or self.division.shards == 1 or len(self.blocks) < 2:
            return {}
        last, before = (self.params(block) * self.width for _, block in (self.blocks[-1], self.blocks[-2]))
        gathered = self.gathered(0) + last + before
        if not self.plan.reshards:  # they come once, before the first gradients
            return {"gathering": {**self.base, "gathered": gathered, "activations": kept}}
        return {"gathering": {**self.base, "gathered": gathered + last, "activations": kept, "gradients": gradients}}

    def reduction(self, gradients: float, unit: float, last: float = 0.0) -> Terms:
        """When so many parameters' are reduced, the last: as they were, over shards, over all; beside other bytes.

        `last`: elements of the last tensor of them, which torch holds until all are over shards, where `gradients` are
        those before any is reduced.
        """
        given = unit / (self.division.shards if self.plan.zero else 1)
        narrow = self.own_width < self.reduced_width
        if narrow and self.plan.axes.dp_replicate > 1 and given < unit:  # what is summed over replicas stays to the end
            given = self.kept_gradients / self.own_width
        elif given < unit and not narrow:  # they are the parameters' gradients themselves, or in the place of the whole
            given = max(0.0, last + given - unit)
        return {**self.base, "gradients": gradients + (unit + given) * self.reduced_width}

    def last_reduced(self) -> float:
        """Parameters whose gradients are reduced last: those outside, or of a block whose input needs no gradient."""
        if self.division.profile.embedding > self.division.profile.frozen:
            return self.moving
        first = next((block for _, block in self.blocks if self.trained(block)), None)
        return max(self.moving, self.trained(first)) if first else self.moving

    def places(self) -> list[int]:
        """Of the blocks of which one may need most: the ends of the chain, and of each run of equal blocks."""
        blocks = [(block, is_recomputed(index, self.plan)) for index, block in self.blocks]
        ends = {0, len(blocks) - 1, max(0, len(blocks) - 2)}
        for i, (here, there) in enumerate(pairwise(blocks)):
            if here[0] is not there[0] or here[1] != there[1]:
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
        else:
            embedding = self.embedding()
            terms = self.gradients_at(-1, 0.0, Held(gradients=embedding, fresh=embedding))
            terms["gradients"] += pending
            found["before the blocks"] = {**self.base, **terms, "gathered": self.gathered(0, -1)}
        if not course_of(head, self.local):
            terms = {"gradients": pending + left + self.trained(head) * self.width, "logits": self.logit() * self.width}
            found["head"] = {**self.base, **terms, "gathered": self.gathered(2), "activations": sum(kept)}
        return found

    def at_block(self, place: int, left: float) -> Terms:
        """While the block at this place of the rank's runs backward; those behind it are done."""
        index, block = self.blocks[place]
        again, course, worst = self.again(index, block), course_of(block, self.local), None
        row = self.row(block)
        end = _AT_END * self.stream(block) - self.kept_whole(block)
        moments: tuple[Held, ...] = (Held(working_in(block, self.local), 0.0, row, row),)
        if not self.local_experts(block):  # of which see `behind_experts`
            moments = (*moments, Held(0.0, end, self.trained(block), row))
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
            new = (held.fresh if self.adds_up else head + held.gradients) * self.width + left
            if not self.accumulates:
                new += done * self.own_width / (self.division.shards if self.plan.zero else 1)
            given_back = self.sums_first and self.plan.zero  # what was summed, as it is reduced
            behind = self.trained(self.blocks[place + 1][1]) if done and not given_back else 0.0
            new += behind * self.reduced_width  # its reduction is held
        elif not self.accumulates:
            new += done * self.width
        new += self.tied(place < 0) * self.width
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
        """When all experts of a block have gone backward; `at_block`: what is there behind its last product."""
        index, block = self.blocks[place]
        fresh, working, used = self.in_experts(index, block)
        return {
            **at_block,
            "gradients": at_block["gradients"] + fresh,
            "working": working,
            "activations": at_block["activations"] - used,
        }

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

    # ---------------------------------------------------------------- with one

    def pipelined(self, moments: tuple[Moment, ...]) -> Mapping[str, Terms]:
        """At each backward action, and at the update."""
        sizes = [self.kept_in(stage) for stage in self.stages]
        largest: dict[str, Terms] = {"update": {**self.base, "gradients": self.kept_gradients + self.masters}}
        for moment in moments:
            parts = [self.in_stage(moment, turn, size) for turn, size in enumerate(sizes)]
            alive = sum(kept for kept, _ in parts) + (moment.outputs + moment.gradients) * self.whole_stream
            begun = sum(gradients for _, gradients in parts)
            for name, more in self.in_action(moment, sizes[moment.turn].deferred):
                terms = {**self.base, **more, "activations": alive + more.get("activations", 0.0)}
                terms["gradients"] = begun + more.get("gradients", 0.0)
                largest[name] = _larger(largest.get(name), terms)
            if self.engine and moment.ends:
                kept, gradients = parts[moment.turn]
                stage, unit = self.stages[moment.turn], sizes[moment.turn].unit
                terms = self.reduction(begun - gradients, unit, self.last_tensor(stage))
                terms["gradients"] += sizes[moment.turn].gradients + sizes[moment.turn].gradients_at_once
                whole = self.gathered_in(moment, len(stage.blocks)) - unit * self.width  # its weights are given back
                terms |= {"gathered": max(0.0, whole), "activations": alive - kept}
                largest["reduction"] = _larger(largest.get("reduction"), terms)
        return largest

    def in_stage(self, moment: Moment, turn: int, size: _Sizes) -> tuple[float, float]:
        """Bytes that a stage keeps at a moment, and those of its gradients."""
        kept = moment.alive[turn] * size.kept + moment.pending[turn] * size.deferred
        kept += (moment.alive[turn] - moment.pending[turn]) * size.kept_at_once
        there = moment.added[turn] if size.fresh else moment.begun[turn]
        gradients = there * size.gradients + moment.reached[turn] * size.gradients_at_once
        if moment.done[turn]:
            gradients *= self.kept_gradients / self.gradients
        return kept, gradients + moment.fresh[turn] * size.fresh

    def kept_in(self, stage: Stage) -> _Sizes:
        """What a stage keeps of a micro-batch, and the gradients of its weights."""
        kept = deferred = at_once = inside_at_once = 0.0
        for index, block in enumerate(stage.blocks, stage.start):
            if is_recomputed(index, self.plan):
                at_once += self.kept(index, block)
                inside_at_once += self.trained(block)
            else:
                kept += self.kept(index, block)
                deferred += self.tokens * deferred_in(block, self.local)
        if stage.last:
            kept += self.head()
            of_loss = self.logit() * max(self.width, 4.0)
            if is_recomputed(stage.start + len(stage.blocks) - 1, self.plan):
                at_once += of_loss
            else:  # it goes with the inputs' gradients too; as much of what blocks defer is not counted
                at_once += of_loss
            deferred += self.logit() * self.width
        # what was received lies in its buffer; what was sent is kept as long as the rest
        kept += self.whole_stream * ((not stage.last) - (not stage.first))
        trained = [self.division.whole([s]) * self.division.trained_share([s]) for s in (stage, *self.stages)]
        unit = self.gradients / (sum(trained[1:]) or 1.0)
        gradients, gradients_at_once = (trained[0] - inside_at_once) * unit, inside_at_once * unit
        fresh = 0.0
        if self.plan.schedule.kind in ZERO_BUBBLE and self.engine and self.width < self.reduced_width:
            fresh = (trained[0] - inside_at_once) * self.width
        units = [self.trained(block) for block in stage.blocks]
        return _Sizes(kept, at_once, deferred, gradients, gradients_at_once, fresh, max(self.ends_of(stage), *units))

    def gathered_in(self, moment: Moment, ahead: int) -> float:
        """As `gathered`, of a pipeline: a backward pass leaves the weights of its stage whole for the next forward."""
        if not self.engine or not self.plan.reshards:
            return self.gathered(ahead)
        whole = [sum(self.params(block) for block in stage.blocks) * self.width for stage in self.stages]
        others = sum(size for turn, size in enumerate(whole) if moment.whole[turn] and turn != moment.turn)
        blocks = self.stages[moment.turn].blocks
        some = min(self.largest * self.width * min(ahead, len(blocks) + (moment.work == "F")), whole[moment.turn])
        return self.gathered(0) + others + (whole[moment.turn] if moment.whole[moment.turn] else some)

    def in_action(self, moment: Moment, deferred: float) -> list[tuple[str, Terms]]:
        """What an action of a stage needs beside what is kept: at the loss, and in its last block."""
        work, stage = moment.work, self.stages[moment.turn]
        index, block = stage.start + len(stage.blocks) - 1, stage.blocks[-1]
        wide, row = max(self.width, 4.0), self.row(block) * self.width
        if work == "F":
            gathers = self.engine and self.division.shards > 1 and self.plan.reshards
            own = self.kept_of(stage, stage.blocks[:-1])
            return [("gathering", {"gathered": self.gathered_in(moment, 3), "activations": own})] if gathers else []
        if work == "W":
            return [("weights", {"gathered": self.gathered(1), "gradients": row})]
        working = working_in(block, self.local) * self.tokens + self.again(index, block)
        if work == "I" and stage.last and is_recomputed(index, self.plan):  # the gradient of the logits waits
            working += self.logit() * self.width
        if work == "I" and not is_recomputed(index, self.plan):  # at its end, when all gradients that wait are there
            working = 3 * self.stream(block) + deferred + self.again(index, block)
            working -= self.logit() * wide * stage.last  # what the loss kept is used up
        found: list[tuple[str, Terms]] = []
        if stage.last:
            copies = 1 if self.plan.tensor.loss and self.plan.axes.tp > 1 else 2
            found.append(("loss", {"gathered": self.gathered_in(moment, 1), "logits": copies * wide * self.logit()}))
            if work == "B":  # what the head and the loss kept is used up
                working -= self.head() + self.logit() * wide
        last = {"gathered": self.gathered_in(moment, 2), "gradients": row, "working": working}
        found.append(("last block", last))
        if work == "B":
            found += self.whole_backward(moment, stage, last)
        if self.local_experts(block):
            fresh, less, used = self.in_experts(index, block)
            over = less - used - (working_in(block, self.local) * self.tokens + self.again(index, block))
            terms = {**last, "gradients": row + fresh, "working": working + over}
            found.append(("experts of the last block", terms))
        return found

    def whole_backward(self, moment: Moment, stage: Stage, last: Terms) -> list[tuple[str, Terms]]:
        """Of a backward pass in one piece, the moments around its `last` block, and behind its first one."""
        block, num_blocks = stage.blocks[-1], len(stage.blocks)
        head = self.trained(self.division.profile.head) * stage.last
        found: list[tuple[str, Terms]] = []
        if stage.last:
            logits = self.logit() * (self.width - max(self.width, 4.0))
            found.append(("head", {**last, "gradients": head * self.width, "working": logits}))
        if self.engine and not self.local_experts(block):  # a unit's gradients are added up when it has gone backward
            used_up = working_in(block, self.local) * self.tokens + self.kept_whole(block)
            own = self.row(block) if self.adds_up else self.trained(block) + head
            end = {**last, "gradients": own * self.width}
            end["working"] += _AT_END * self.stream(block) - used_up
            found.append(("end of the last block", end))
            if self.plan.reshards and num_blocks > 2:  # the first one's weights have come, none have gone
                done = self.kept_of(stage, stage.blocks[2:], 2)
                end = {**end, "gathered": self.gathered_in(moment, num_blocks), "activations": -done}
                found.append(("end of the second block", end))
        if stage.first:
            done = self.kept_of(stage, stage.blocks)
            terms = {"gathered": self.gathered_in(moment, num_blocks), "activations": -done}
            found.append(("embedding", {**terms, "gradients": self.embedding() * self.width}))
        return found

    def kept_of(self, stage: Stage, blocks: Sequence[Block], first: int = 0) -> float:
        """Bytes that some blocks of a stage keep, from its block of number `first` on."""
        return sum(self.kept(stage.start + first + place, block) for place, block in enumerate(blocks))
