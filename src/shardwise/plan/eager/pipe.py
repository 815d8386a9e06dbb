"""`PipeRank`: a pipeline's moments at which one rank may need most, where kernels are eager. See `kernels.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from shardwise.model.course import Course, Held
from shardwise.model.profile import Block
from shardwise.plan.eager.kernels import (
    attention_in,
    course_ahead,
    course_of,
    deferred_in,
    kept_by,
    norms_in,
    upcast_norms,
    working_in,
)
from shardwise.plan.eager.moments import Moment
from shardwise.plan.eager.sizes import AT_END, RankSizes, Terms, larger
from shardwise.plan.eager.tensors import last_of
from shardwise.plan.ranks.activations import is_recomputed
from shardwise.plan.ranks.stages import Stage


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
    fresh_at_once: float
    unit: float
    """Parameters of the largest unit whose gradients are reduced together."""
    zeros: float
    """Those of them that nobody uses."""
    shards: int
    """Ranks that share them."""


class PipeRank(RankSizes):
    """The moments of one rank."""

    def moments(self, moments: tuple[Moment, ...]) -> Mapping[str, Terms]:
        """At each backward action, and at the update."""
        sizes = [self.kept_in(stage) for stage in self.stages]
        largest: dict[str, Terms] = {"update": {**self.base, "gradients": self.kept_gradients + self.masters}}
        for moment in moments:
            parts = [self.in_stage(moment, turn, size) for turn, size in enumerate(sizes)]
            alive = sum(kept for kept, _ in parts) + self.in_flight(moment)
            begun = sum(gradients for _, gradients in parts)
            for name, more in self.in_action(moment, sizes[moment.turn].deferred):
                terms = {**self.base, **more, "activations": alive + more.get("activations", 0.0)}
                terms["gradients"] = begun + more.get("gradients", 0.0)
                largest[name] = larger(largest.get(name), terms)
            if self.engine and moment.ends:
                kept, gradients = parts[moment.turn]
                stage, size = self.stages[moment.turn], sizes[moment.turn]
                unit = size.unit
                terms = self.reduction(begun - gradients, unit, self.last_tensor(stage), size.zeros, size.shards)
                terms["gradients"] += size.gradients + size.gradients_at_once
                ends = self.ends_of(stage)[0]  # which come first, the root's; experts come last, of all weights
                back = sum(self.params(b) for b in stage.blocks if self.apart(b)) or unit + ends * (ends < unit)
                whole = self.gathered_in(moment, len(stage.blocks)) - back * self.width
                terms |= {"gathered": max(0.0, whole), "activations": alive - kept}
                largest["reduction"] = larger(largest.get("reduction"), terms)
                if self.held_width:
                    terms = terms | self.last_reduction(moment, stage)
                    terms["gradients"] += begun - gradients
                    largest["last reduction"] = larger(largest.get("last reduction"), terms)
        return largest

    def ends_of(self, stage: Stage) -> tuple[float, float]:
        """Parameters of a stage outside its blocks whose gradients are reduced together; and zeros among these."""
        zeros = self.division.unused_outside((stage,)) * self.fills
        if stage.first and stage.last:
            return self.summed_outside, zeros
        head = self.trained(self.division.profile.head)
        return self.embedding() * stage.first + head * stage.last + zeros, zeros

    def largest_unit(self, stage: Stage) -> tuple[float, float, int]:
        """The same of the ends, the block or its experts of which it is most; and the ranks that share it."""
        shards, alone = (self.division.shards, self.division.expert_shards) if self.plan.zero else (1, 1)
        units = {(self.summed(b) - self.apart(b), self.summed(b) - self.trained(b), shards) for b in stage.blocks}
        return max((*self.ends_of(stage), shards), *units, *((self.apart(b), 0.0, alone) for b in stage.blocks))

    def last_tensor(self, stage: Stage) -> float:
        """Elements of the last parameter of a stage's largest unit: of its ends, or of a block."""
        block = max(stage.blocks, key=self.summed)
        ends = self.summed(block) < self.ends_of(stage)[0]
        block = self.division.profile.head if ends and stage.last else block
        if stage.last or not ends:
            return last_of(block, self.division)
        return (self.embedding() - self.division.embedding_table) or self.embedding()

    def last_reduction(self, moment: Moment, stage: Stage) -> Terms:
        """When a stage's last block is reduced, what others gave is there twice: as it was summed over replicas too."""
        block = stage.blocks[-1]
        sent = self.summed(block) * self.reduced_width
        beside = max(0.0, sent - self.owned(block) * self.own_width)
        ends = self.ends_of(stage)[0]
        owned = sum(map(self.owned, stage.blocks)) + ends / (self.division.shards if self.plan.zero else 1)
        given = owned * (self.own_width + self.held_width)
        back = ends + sum(map(self.params, stage.blocks))
        left = self.gathered_in(moment, len(stage.blocks)) - back * self.width
        return {"gradients": given + sent + beside, "gathered": max(0.0, left)}

    def in_flight(self, moment: Moment) -> float:
        """Bytes of what was sent and is kept, by gloo or 1F1B's own lists, and of what comes and is not used."""
        listed = self.plan.schedule.kind == "1f1b"
        # where no step was seen, what is put together from operators has room for the one that 1F1B keeps
        ahead = course_of(self.stages[0].blocks[0], self.local) is not None if listed else self.gloo
        numbers = zip(moment.outputs, moment.returning, moment.gradients, moment.coming, strict=True)
        elements = sum(
            stage.handed * (on * ahead + returning) + stage.given * (back * (listed or self.gloo) + coming)
            for stage, (on, returning, back, coming) in zip(self.stages, numbers, strict=True)
        )
        return self.sent_bytes(elements) - self.counted(self.stages[moment.turn]) * (moment.work == "F")

    def in_stage(self, moment: Moment, turn: int, size: _Sizes) -> tuple[float, float]:
        """Bytes that a stage keeps at a moment, and those of its gradients."""
        kept = moment.alive[turn] * size.kept + moment.pending[turn] * size.deferred
        kept += (moment.alive[turn] - moment.pending[turn]) * size.kept_at_once
        times, new = moment.reached[turn], 0.0
        gradients = moment.begun[turn] * size.gradients + (times > 0) * size.gradients_at_once
        if self.adds_later:
            gradients = moment.added[turn] * size.gradients + (times > 1) * size.gradients_at_once
            new = moment.fresh[turn] * size.fresh + (times > 0 and not moment.done[turn]) * size.fresh_at_once
        if moment.done[turn] and gradients:
            gradients *= self.kept_gradients / self.gradients
        return kept, gradients + new

    def kept_in(self, stage: Stage) -> _Sizes:
        """What a stage keeps of a micro-batch, and the gradients of its weights."""
        kept = deferred = at_once = inside_at_once = 0.0
        for index, block in enumerate(stage.blocks, stage.start):
            if self.at_once(index, block):
                at_once += self.kept(index, block)
                inside_at_once += self.trained(block)
            else:
                kept += self.kept(index, block)
                deferred += self.tokens * deferred_in(block, self.local)
        if stage.last:
            kept += self.head()
            at_once += self.logit() * max(self.width, 4.0)
            deferred += self.own_logit() * self.width + self.sent_bytes(self.division.profile.head.width)
        again = any(self.reruns(index, block) for index, block in enumerate(stage.blocks, stage.start))
        kept += self.shared(again) * (not stage.first)
        kept += self.sent(stage)
        came, early = self.came(stage) - self.counted(stage), self.at_once(stage.start, stage.blocks[0])
        kept, at_once = kept + came * (not early), at_once + came * early
        trained = [self.division.whole([s]) * self.division.trained_share([s]) for s in (stage, *self.stages)]
        unit = self.gradients / (sum(trained[1:]) or 1.0)
        later = trained[0] - inside_at_once
        unit_params, zeros, shards = self.largest_unit(stage)
        return _Sizes(
            kept=kept,
            kept_at_once=at_once,
            deferred=deferred,
            gradients=later * unit,
            gradients_at_once=inside_at_once * unit,
            fresh=later * self.width,
            fresh_at_once=inside_at_once * self.width,
            unit=unit_params,
            zeros=zeros,
            shards=shards,
        )

    def at_once(self, index: int, block: Block) -> bool:
        """Whether its weights get gradients when its inputs do: as it is recomputed."""
        return is_recomputed(index, self.plan) or self.repeats(block)

    def repeats(self, block: Block) -> bool:
        """Whether it was seen to recompute itself, as a checkpoint of the user's own: it keeps less than half."""
        course = course_of(block, self.local)
        return course is not None and course.kept.size(self.tokens) < kept_by(block, self.local) * self.tokens / 2

    def own_logit(self) -> float:
        """Number of logits of one micro-batch that the head's weights on this rank give."""
        axes, head = self.plan.axes, self.division.profile.head
        whole = axes.tp == 1 or self.plan.tensor.loss or all(op.split != "column" for op in head.matmuls)
        return self.logit() / (1 if whole else axes.tp)

    def sent(self, stage: Stage) -> float:
        """Bytes that it sends and keeps as long as the rest, where the last block was not seen to keep it."""
        block, first = stage.blocks[-1], self.division.profile.blocks[0]
        ahead = course_ahead(first.through or first, self.local)
        seen = block.through is None and course_of(block, self.local)
        keeps_inputs = ahead is not None and ahead.kept.per_token >= first.width * self.width
        return 0.0 if stage.last or (seen and keeps_inputs) else self.sent_bytes(stage.handed)

    def own_output(self, stage: Stage) -> float:
        """Bytes of what a stage sent, which the schedule holds until it has gone backward, where a block counts it.

        A block's own course has it freed with the first operations of its backward pass.
        """
        return 0.0 if self.sent(stage) else self.sent_bytes(stage.handed)

    @cached_property
    def in_blocks(self) -> tuple[tuple[float, float], ...]:
        """Parameters of each stage's blocks, and the most of one in experts that come by themselves."""
        return tuple((sum(map(self.params, s.blocks)), max(map(self.apart, s.blocks))) for s in self.stages)

    @cached_property
    def whole_stages(self) -> tuple[float, ...]:
        """Parameters of each stage with its ends, experts filled up."""
        sizes = self.division
        return tuple(sizes.whole([s]) + sum(sizes.filled(b) - sizes.experts(b) for b in s.blocks) for s in self.stages)

    def gathered_in(self, moment: Moment, ahead: int) -> float:
        """As `gathered`, of a pipeline: a backward pass leaves the weights of its stage whole for the next forward."""
        if not self.engine:
            return 0.0
        if not self.plan.reshards:  # those of a stage are given back when it is done
            return sum(w for w, done in zip(self.whole_stages, moment.done, strict=True) if not done) * self.width
        whole = [params * self.width for params, _ in self.in_blocks]
        others = sum(size for turn, size in enumerate(whole) if moment.whole[turn] and turn != moment.turn)
        blocks = self.stages[moment.turn].blocks
        twice = moment.work == "F"  # the last one's: as sent, and cut up
        most = whole[moment.turn] + self.largest * self.width * twice
        count = min(ahead, len(blocks) + twice)
        alone = self.in_blocks[moment.turn][1] * (count - 1)  # experts come by themselves, when the rest has
        some = min((self.largest * count - alone) * self.width, most)
        return self.outside * self.width + others + (whole[moment.turn] if moment.whole[moment.turn] else some)

    def in_action(self, moment: Moment, deferred: float) -> list[tuple[str, Terms]]:
        """What an action of a stage needs beside what is kept: at the loss, and in its last block."""
        work, stage = moment.work, self.stages[moment.turn]
        index, block = stage.start + len(stage.blocks) - 1, stage.blocks[-1]
        wide, row = max(self.width, 4.0), self.row(block) * self.width
        if work == "F":
            return self.forward(moment, stage)
        if work == "W":
            return [("weights", {"gathered": self.gathered_in(moment, 1), "gradients": row})]
        working = working_in(block, self.local) * self.tokens + self.again(index, block)
        if work == "I" and stage.last and self.at_once(index, block):  # the gradient of the logits waits
            working += self.logit() * self.width
        if work == "I" and not self.at_once(index, block):  # at its end, when all gradients that wait are there
            streams = 20.0 / self.width if self.width < 4 and upcast_norms(block) else 3.0  # of a norm, five in fp32
            working = streams * self.stream(block) + deferred + self.again(index, block)
        found: list[tuple[str, Terms]] = []
        if self.engine and self.division.shards > 1 and self.plan.reshards and not moment.whole[moment.turn]:
            came = self.gathered_in(moment, 1) + self.params(block) * self.width  # as sent, and cut up
            found.append(("gathering", {"gathered": came}))
        if stage.last:
            found += self.in_head(moment)
            copies = 1 if self.plan.tensor.loss and self.plan.axes.tp > 1 else 2
            found.append(("loss", {"gathered": self.gathered_in(moment, 1), "logits": copies * wide * self.logit()}))
            if work == "B":  # what the head and the loss kept is used up
                working -= self.head() + self.logit() * wide
        makes = work == "B" or self.at_once(index, block)  # gradients of weights
        last = {"gathered": self.gathered_in(moment, 1 + self.prefetch), "gradients": row * makes, "working": working}
        course = course_of(block, self.local)
        early = self.at_once(index, block) and not (course or (work == "I" and stage.last))
        last["activations"] = -self.came(stage) * early  # the input's gradient is yet to come
        if work == "I":  # what recomputed blocks give is added up behind all of them
            again = [(i, b) for i, b in enumerate(stage.blocks, stage.start) if self.at_once(i, b)]
            last["gradients"] += sum(self.trained(b) for _, b in again[1:]) * self.width
            last["activations"] -= sum(self.stream(b) for _, b in again[1:])
            if again and not self.adds_later:
                done = sum(self.kept(*each) for each in again) + (self.head() + self.logit() * wide) * stage.last
                end = {"activations": -done, "working": AT_END * self.stream(block)}
                end["gradients"] = sum(self.trained(b) for _, b in again) * self.width
                found.append(("end of the first block", {**last, **end}))
        if course and (work == "B" or self.repeats(block)):
            last = self.seen(course, stage, last, working - working_in(block, self.local) * self.tokens)
        found.append(("last block", last))
        exchanged = attention_in(block, self.local, self.plan.context.kind, self.plan.axes.cp)
        if exchanged:
            waits = work == "I" and not self.at_once(index, block)
            over = exchanged.held - (-exchanged.waiting if waits else exchanged.used_up)
            over = over * self.tokens + self.again(index, block)
            if stage.last and work == "B":
                over -= self.head() + self.logit() * wide
            done = 0.0 if waits else row if self.adds_up and moment.begun[moment.turn] else exchanged.done * self.width
            found.append(("attention of the last block", {**last, "working": over, "gradients": done}))
        if work == "B":
            found += self.whole_backward(moment, stage, last)
            found += self.inner_blocks(moment, stage)
        if self.local_experts(block) and course is None:
            fresh, less, used = self.in_experts(index, block)
            over = less - used - (working_in(block, self.local) * self.tokens + self.again(index, block))
            terms = {**last, "gradients": row + fresh, "working": working + over}
            found.append(("experts of the last block", terms))
        return found

    def forward(self, moment: Moment, stage: Stage) -> list[tuple[str, Terms]]:
        """Of a forward pass: in blocks that were seen, when the last one's weights have come, at a loss in fp32."""
        found: list[tuple[str, Terms]] = []
        for place in self.edges(list(enumerate(stage.blocks, stage.start))):
            if course := course_of(stage.blocks[place], self.local):
                own = self.kept_of(stage, stage.blocks[:place])
                own += max((held.size(self.tokens) for held in course.forward), default=0.0)
                found.append(("forward", {"gathered": self.gathered_in(moment, 2), "activations": own}))
        if self.engine and self.division.shards > 1 and self.plan.reshards:
            own = self.kept_of(stage, stage.blocks[:-1])
            found.append(("gathering", {"gathered": self.gathered_in(moment, 2 + self.prefetch), "activations": own}))
        if stage.last and self.width < 4 and self.plan.tensor.loss and self.plan.axes.tp > 1:
            own = self.kept_of(stage, stage.blocks) + self.head()
            terms = {"gathered": self.gathered_in(moment, 1), "activations": own, "logits": self.logits()}
            found.append(("forward", terms))
        course = course_of(self.division.profile.head, self.local) if stage.last else None
        if course and course.forward:
            own = self.kept_of(stage, stage.blocks) + max(held.size(self.tokens) for held in course.forward)
            found.append(("forward", {"gathered": self.gathered_in(moment, 1), "activations": own}))
        return found

    def in_head(self, moment: Moment) -> list[tuple[str, Terms]]:
        """Of a backward pass, the largest moment that a step of the head showed; its micro-batch counts as alive."""
        course = course_of(self.division.profile.head, self.local)
        fixed = {"gathered": self.gathered_in(moment, 1)}
        used_up = self.head() + self.logit() * (max(self.width, 4.0) - self.width)
        worst = None
        for held in course.backward if course else ():
            own = (held.fresh if self.adds_up or not self.engine else held.gradients) * (moment.work == "B")
            terms = {**fixed, "gradients": own * self.width, "working": held.size(self.tokens) - used_up}
            worst = larger(worst, terms)
        return [("head", worst)] if worst else []

    def seen(self, course: Course, stage: Stage, last: Terms, around: float) -> Terms:
        """The largest moment that a step of the `last` block showed; `around`: what is there whatever the moment."""
        worst = None
        around -= self.kept_whole(stage.blocks[-1])
        around += self.own_output(stage)
        for held in course.backward:
            own = held.fresh if self.adds_up or not self.engine else held.gradients
            working = held.size(self.tokens) + around - (0.0 if stage.last else held.given * self.tokens)
            worst = larger(worst, {**last, "gradients": own * self.width, "working": working})
        return worst or {**last, "gradients": 0.0, "working": 0.0}  # a frozen block without a backward pass

    def whole_backward(self, moment: Moment, stage: Stage, last: Terms) -> list[tuple[str, Terms]]:
        """Of a backward pass in one piece, the moments around its `last` block, and behind its first one."""
        block, num_blocks = stage.blocks[-1], len(stage.blocks)
        head = self.trained(self.division.profile.head) * stage.last
        adds = self.adds_up and moment.begun[moment.turn]  # else what is made stays
        found: list[tuple[str, Terms]] = []
        if stage.last and not course_of(self.division.profile.head, self.local):  # else see `in_head`
            working = self.logit() * (self.width - max(self.width, 4.0)) + max(0.0, self.head_norm() - self.head())
            found.append(("head", {**last, "gradients": head * self.width, "working": working}))
        seen = course_of(block, self.local) or self.local_experts(block)
        for held in () if seen else norms_in(block, self.local):
            own = held.gradients if self.engine and not adds else self.row(block)
            working = last["working"] + held.size(self.tokens) - working_in(block, self.local) * self.tokens
            found.append(("norm of the last block", {**last, "gradients": own * self.width, "working": working}))
        if self.engine and not seen:  # a unit's gradients are added up when it has gone backward
            used_up = working_in(block, self.local) * self.tokens + self.kept_whole(block)
            own = self.row(block) if adds else self.trained(block) + head
            end = {**last, "gradients": own * self.width}
            end["working"] += AT_END * self.stream(block) - used_up
            found.append(("end of the last block", end))
            if self.plan.reshards and num_blocks > 2:  # the first one's weights have come, none have gone
                done = self.kept_of(stage, stage.blocks[2:], 2)
                end = {**end, "gathered": self.gathered_in(moment, num_blocks), "activations": -done}
                found.append(("end of the second block", end))
        if stage.first:
            done = self.kept_of(stage, stage.blocks)
            terms = {"gathered": self.gathered_in(moment, num_blocks), "activations": -done}
            terms["gradients"] = self.embedding() * self.width
            if self.sums_first and not self.adds_up and not moment.begun[moment.turn]:  # beside what they become
                own = self.division.whole([stage]) * self.division.trained_share([stage])
                terms["gradients"] += own * self.reduced_width
            found.append(("embedding", terms))
        return found

    def inner_blocks(self, moment: Moment, stage: Stage) -> list[tuple[str, Terms]]:
        """Of a backward pass in one piece, those of blocks before the last that are unlike a neighbour, or its first.

        Of blocks that were not seen only beside the first gradients: later ones are all there at the last block.
        """
        loss = self.head() + self.logit() * max(self.width, 4.0) if stage.last else 0.0
        head = self.trained(self.division.profile.head) if stage.last else 0.0
        found: list[tuple[str, Terms]] = []
        for place in self.edges(list(enumerate(stage.blocks, stage.start)))[:-1]:
            index, block, behind = stage.start + place, stage.blocks[place], stage.blocks[place + 1 :]
            course, row = course_of(block, self.local), self.row(block)
            if not course and (moment.begun[moment.turn] or self.local_experts(block)):
                continue
            done = loss + self.kept_of(stage, behind, place + 1) - self.own_output(stage)
            new = 0.0 if moment.begun[moment.turn] else head + sum(map(self.trained, behind))
            unseen = (Held(working_in(block, self.local), 0.0, row, row),)
            less = (self.kept_whole(block) if course else 0.0) - self.again(index, block)
            for held in self.held_in(index, block, course) if course else unseen:
                own = held.fresh if self.adds_up or not self.engine else held.gradients
                terms = {"gradients": (own + new) * self.width, "working": held.size(self.tokens) - less}
                terms |= {"gathered": self.gathered_in(moment, 2), "activations": -done}
                found.append(("first block" if place == 0 else "middle blocks", terms))
        return found

    def kept_of(self, stage: Stage, blocks: Sequence[Block], first: int = 0) -> float:
        """Bytes that some blocks of a stage keep, from its block of number `first` on."""
        return sum(self.kept(stage.start + first + place, block) for place, block in enumerate(blocks))
