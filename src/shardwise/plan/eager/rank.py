"""`eager_rank`: the moments of a step at which one rank may need most, where kernels are eager. See `kernels.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwise.model.course import Held
from shardwise.model.profile import Block
from shardwise.plan.eager.kernels import attention_in, course_ahead, course_of, norms_in, working_in
from shardwise.plan.eager.moments import moments_of
from shardwise.plan.eager.pipe import PipeRank
from shardwise.plan.eager.sizes import AT_END, RankSizes, Terms, larger
from shardwise.plan.eager.tensors import last_of, tensors_of, widening
from shardwise.plan.ranks.activations import is_recomputed
from shardwise.plan.ranks.division import Division
from shardwise.plan.ranks.engines import is_replicated
from shardwise.plan.ranks.stages import Stage

ROUNDS = 12
"""Rounds of micro-batches of a pipeline that are gone through one by one, for each stage of a rank."""


def eager_rank(
    division: Division, rank: int, stages: tuple[Stage, ...], states: Terms, *, gloo: bool
) -> Mapping[str, Terms]:
    """Bytes by term of one rank of the pipeline at each moment that may be its largest.

    `states`: weights, optimizer, and `gradients` as they are between micro-batches. Terms: these, the inputs of the
    step, gathered weights, activations, logits, working set. `gloo`: joins ranks, with copies that NCCL has not.
    """
    plan = division.plan
    if plan.axes.pp == 1:
        return _Rank(division, stages, dict(states), gloo).moments()
    count, pp, turns = plan.batch.micro_batches, plan.axes.pp, len(stages)

    def moments(number: int) -> Mapping[str, Terms]:
        seen = moments_of(plan.schedule.kind, pp, turns, number)[rank]
        return PipeRank(division, stages, dict(states), gloo).moments(seen)

    rounds = max(0, count - ROUNDS * pp * turns) // pp
    if rounds < 2:
        return moments(count)
    few = count - rounds * pp
    before, there = moments(few), moments(few + pp)
    more = rounds - 1  # each round of micro-batches adds as much as the one before
    return {
        name: {key: value + more * (value - before[name].get(key, 0.0)) for key, value in terms.items()}
        for name, terms in there.items()
    }


class _Rank(RankSizes):
    """The moments of one rank without a pipeline."""

    def moments(self) -> Mapping[str, Terms]:
        """In the forward pass, at the loss, behind, in and before the blocks, and at the update."""
        pending = self.gradients if self.accumulates else 0.0
        several = self.engine and self.plan.zero >= 2 and self.plan.batch.micro_batches > 1
        left = self.last_reduced() * self.reduced_width if several else 0.0  # held of the micro-batch before
        kept = [self.kept_at(place) for place in range(len(self.chain))]
        fixed = {**self.base, "gathered": self.gathered(0), "gradients": pending + left}
        found = {"loss": {**fixed, "activations": sum(kept) + self.head(), "logits": self.logits()}}
        found |= self.ends(kept, pending, left)
        before = self.before(pending + left)
        found |= {**self.gathering(sum(kept[:-1]), before), **self.first_gathering(before)}
        last = len(self.chain) - 1
        for place in self.places():
            name = "last block" if place == last else "first block" if place == 0 else "middle blocks"
            block = self.chain[place][1]
            held_back = (
                left if len(self.apart_behind(place)) == len(self.behind(place)) else 0.0
            )  # nothing is reduced yet
            around = {name: self.at_block(place, held_back)}
            if self.local_experts(block) and course_of(block, self.local) is None:
                around[f"experts of the {name}"] = self.behind_experts(place, held_back)
            for moment, terms in around.items():
                terms["gradients"] += pending
                used_up = min(0.0, terms["working"])
                terms["working"] -= used_up
                alive = sum(kept[: place + 1]) + self.entered(place) + used_up
                terms["activations"] = terms.get("activations", 0.0) + alive
                found[moment] = larger(found.get(moment), {**self.base, **terms})
        found["update"] = {**self.base, "gradients": self.kept_gradients + self.masters}
        if self.casts:
            found["widening"] = self.widened_outside(pending)
        if self.engine:
            found["reduction"] = self.last_reductions()
        return found

    def last_reductions(self) -> Terms:
        """When what is outside of blocks is reduced, behind all of them, or then a block that is apart."""
        apart, worst = [block for _, block in self.blocks if block.apart], Terms()
        lasts = [last_of(block, self.division) for block in (self.division.profile.head, *apart)]
        for place, unit in enumerate((self.summed_outside, *map(self.summed, apart))):
            terms = self.at_end(unit, apart[place:])
            if self.division.shards > 1:  # torch holds the last tensor of them until they are over shards
                terms["gradients"] += lasts[place] * (self.reduced_width if self.sums_first else self.width)
            worst = larger(worst, terms)
        return worst

    def at_end(self, unit: float, waiting: Sequence[Block]) -> Terms:
        """When the gradients of a unit are reduced at the end; those of others wait, whole, and their weights too.

        Micro-batches that are reduced one by one add the last one's to the sums. Where weights stay gathered, they are
        given back in the last micro-batch alone.
        """
        each = self.reduced_width * self.sums_first + self.width * (not self.adds_up)  # sums, and what is new
        waits = sum(map(self.trained, waiting)) * each
        terms = {**self.reduction(self.kept_gradients + waits, unit), "logits": self.logit() * self.width}
        terms["gathered"] = sum(map(self.params, waiting)) * self.width
        several = self.plan.batch.micro_batches * (not self.sums_first)
        shards = self.division.shards if self.plan.zero else 1
        if self.held_width and not self.sums_first:  # before they are cast, or behind
            sent, given = unit * self.reduced_width, unit / shards * self.own_width
            before = sent + (several > 1) * unit / shards * self.reduced_width - given
            terms["gradients"] += max(0.0, before) - sent
        if several < 2:  # they have no shards yet; those of the unit are in the type of sums
            narrow = (self.own_width < self.reduced_width and not self.held_width) * unit
            terms["gradients"] -= (narrow + sum(map(self.summed, waiting))) / shards * self.own_width
            terms["gradients"] += narrow / shards * self.reduced_width * self.sums_first
            return terms
        if not self.plan.reshards:  # which have no gradients in a type of their own yet
            terms["gathered"] = self.gathered(0) - self.kept_gradients * (self.held_width > 0)
        if (self.plan.reshards or several > 2) and not self.held_width:
            width = self.reduced_width - (self.own_width if self.own_width < self.reduced_width else 0.0)
            shared_out = self.own_width < self.reduced_width and self.plan.axes.dp_replicate == 1  # which are counted
            terms["gradients"] += unit / shards * width * (not shared_out)
        return terms

    def before(self, gradients: float) -> Terms:
        """What the micro-batch before has left while the next one runs forward.

        Its output, and where the last block has no backward pass its weights, which were gathered ahead for one.
        """
        several, last = self.plan.batch.micro_batches > 1, self.chain[-1][1]
        ahead = several and self.engine and self.plan.reshards and not (self.goes_back(last) or self.is_one_unit)
        sent = self.params(last) * self.width * (ahead and self.division.shards > 1)
        return {"gradients": gradients, "logits": self.logit() * self.width * several, "gathered ahead": sent}

    def gathering(self, kept: float, before: Terms) -> dict[str, Terms]:
        """When the last block's weights have come in the forward pass: as sent, and cut up; those before as sent."""
        if not self.engine or self.division.shards == 1 or len(self.chain) < 2:
            return {}
        last, other = (self.params(block) * self.width for _, block in (self.chain[-1], self.chain[-2]))
        gathered = self.gathered(0) + last + other
        if not self.plan.reshards:  # they come once, before the first gradients
            return {"gathering": {**self.base, "gathered": gathered, "activations": kept}}
        return {"gathering": {**self.base, "gathered": gathered + last, "activations": kept, **before}}

    def as_sent(self, terms: Terms, last: Block) -> Terms:
        """The same moment of a forward pass in which the last block's weights came, which are there as sent too.

        They stay from the first micro-batch on where they are not given back; then there are no gradients.
        """
        if not self.engine or self.division.shards == 1 or (self.plan.reshards and not self.is_one_unit):
            return terms
        gathered = self.gathered(0) + self.params(last) * self.width
        first = dict.fromkeys(self.before(0.0), 0.0) if not self.plan.reshards else {}
        return {**terms, "gathered": gathered, **first}

    def first_gathering(self, before: Terms) -> dict[str, Terms]:
        """When the first block's weights come, of the next micro-batch too: as sent and cut up, as those outside."""
        _, block = self.blocks[0]
        if not self.engine or self.division.shards == 1:
            return {}
        came = 2 * (self.outside + self.params(block))
        terms = {"gathered": came * self.width, "activations": self.kept_ahead(block)}
        return {"first gathering": {**self.base, **terms, **(before if self.plan.reshards else {})}}

    def last_reduced(self) -> float:
        """Parameters whose gradients are reduced last: those outside, or of a block that is apart.

        Frozen blocks that are fed what has no gradient come behind as well, with nothing.
        """
        profile, first = self.division.profile, self.blocks[0][1]
        if any(block.apart for _, block in self.blocks):
            return self.summed([block for _, block in self.blocks if block.apart][-1])
        return self.summed_outside if self.trained(first) or profile.embedding > profile.frozen else 0.0

    def places(self) -> list[int]:
        """Of the blocks of which one may need most: the ends of the chain, and of each run of equal blocks.

        And those beside them, and the last one ahead of which as many others' weights come as ahead of any.
        """
        edges, last = self.edges(self.chain), len(self.chain) - 1
        near = {place + far for place in edges for far in (-1, 1, self.prefetch)}
        return sorted({*edges, *(place for place in near if 0 <= place <= last)})

    def ends(self, kept: Sequence[float], pending: float, left: float) -> Mapping[str, Terms]:
        """Moments outside the backward pass of the blocks, of a module whose step was seen."""
        (index, last), head = self.chain[-1], self.division.profile.head
        found: dict[str, Terms] = {}
        fixed = {**self.base, "gradients": pending + left}
        passes = not (self.reruns(index, last) and self.goes_back(last))
        if (course := course_of(last, self.local)) and passes:
            most = max((held.size(self.tokens) for held in course.forward), default=0.0)
            table = self.outside - self.params(self.division.profile.head)
            outside = table * self.width * self.casts  # it is there as long as forward runs
            if self.casts and not self.goes_back(last):
                outside += self.used(last) * self.width
            terms = {**fixed, **self.before(pending + left), "activations": sum(kept[:-1]) + most}
            terms["gathered"] = self.gathered(2) + outside
            found["forward"] = larger(terms, self.as_sent(terms, last))
        if course := course_of(head, self.local):
            most = max((held.size(self.tokens) for held in course.forward), default=0.0)
            found["head"] = {**fixed, "gathered": self.gathered(0), "activations": sum(kept) + most}
            for held in course.backward:
                terms = {**found["head"], "logits": self.logit() * self.width, "working": held.size(self.tokens)}
                new = held.fresh if self.accumulates and not self.engine and not self.casts else held.gradients
                terms |= {"gradients": pending + left + new * self.width, "activations": sum(kept)}
                if self.engine:  # the last block's weights come as soon as the output has a gradient
                    terms["gathered"] = self.gathered(1, len(self.chain) - 1)
                found["head"] = larger(found["head"], terms)
        if course := course_ahead(self.blocks[0][1], self.local):
            for held in course.backward:
                terms = self.gradients_at(-1, 0.0, held) | {"working": held.size(self.tokens)}
                terms["gradients"] += pending
                terms = {**self.base, **terms, "gathered": self.gathered(0, -1)}
                found["before the blocks"] = larger(found.get("before the blocks"), terms)
        else:
            embedding = self.embedding()
            terms = self.gradients_at(-1, 0.0, Held(gradients=embedding, fresh=embedding))
            terms["gradients"] += pending
            found["before the blocks"] = {**self.base, **terms, "gathered": self.gathered(0, -1)}
        if not course_of(head, self.local):
            terms = {"gradients": pending + left + self.trained(head) * self.width, "logits": self.logit() * self.width}
            gathered = self.given_back(len(self.chain)) if self.plan.axes.ep > 1 else self.gathered(2)
            terms |= {"gathered": gathered, "activations": sum(kept) + self.head_norm()}
            found["head"] = {**self.base, **terms}
        return found

    def at_block(self, place: int, left: float) -> Terms:
        """While the block at this place of the rank's runs backward; those behind it are done."""
        index, block = self.chain[place]
        again, course, worst = self.again(index, block), course_of(block, self.local), None
        row = self.row(block)
        end = AT_END * self.stream(block) - self.kept_whole(block)
        moments: tuple[Held, ...] = (Held(working_in(block, self.local), 0.0, row, row),)
        if not self.local_experts(block):  # of which see `behind_experts`
            norms = (held._replace(fresh=row) for held in norms_in(block, self.local))
            moments = (*moments, Held(0.0, end, self.trained(block), row), *norms)
        exchanged = attention_in(block, self.local, self.plan.context.kind, self.plan.axes.cp)
        if exchanged:
            moments = (*moments, Held(exchanged.held - exchanged.used_up, 0.0, exchanged.done, row))
        less = 0.0
        if course:
            moments, less = self.held_in(index, block, course), self.kept_whole(block)
        for held in moments:
            terms = self.gradients_at(place, left, held)
            terms["gradients"] += self.swapped(place)
            terms |= {
                "gathered": self.gathered(1 + self.prefetch, place) - self.used_up(held),
                "working": held.size(self.tokens) - less + again,
            }
            worst = larger(worst, terms)
        if worst is None:  # nothing of it is trained
            worst = self.gradients_at(place, left, Held()) | {"gathered": self.gathered(1, place), "working": 0.0}
        ends = self.widened(place) if self.casts else self.reduced(place)
        return larger(worst, ends) if ends else worst

    def swapped(self, place: int) -> float:
        """By how much gradients that were summed once are more than their sums, in the last micro-batch."""
        if not (self.held_width and self.sums_first):
            return 0.0
        behind = self.behind(place)
        given = self.owned_by(behind) * (self.own_width + self.held_width) - self.returned(behind)
        return max(0.0, given - sum(map(self.summed, behind)) * self.reduced_width)

    def used_up(self, held: Held) -> float:
        """Bytes of the cast weights of a block that has gone backward behind them."""
        return (held.gradients - held.fresh) * self.width * self.casts

    def reduced(self, place: int) -> Terms:
        """When a block's gradients are reduced: whole as they are sent, in a copy, and what the sum over shards gives.

        Those that autograd gave, or added up, are freed, but for the last one where there are shards; so is what was
        sent of the block behind. The weights of the blocks before it have come in the place of its own.
        """
        index, block = self.chain[place]
        if not self.engine or block.apart:
            return {}
        experts = self.apart(block)
        whole = self.reduction_of(place, self.summed(block) - experts, experts)
        whole["working"] = self.stream(block) - self.kept_at(place)
        if not experts:
            return whole
        _, behind, used = self.in_experts(index, block)
        stays = (self.params(block) - experts) * self.width
        alone = self.reduction_of(place, experts, 0.0, self.division.expert_shards)
        return larger(whole, {**alone, "gathered": alone["gathered"] + stays, "working": behind - used})

    def reduction_of(self, place: int, own: float, done: float, shards: int = 0) -> Terms:
        """The same of so many parameters of a block; `done`: those of it that were reduced before, its experts."""
        block, wide = self.chain[place][1], self.reduced_width
        shards = (shards or self.division.shards) if self.plan.zero else 1
        terms = self.gradients_at(place, 0.0, Held())
        terms["gradients"] += (self.copies(shards) * own + own / shards - self.sent_behind(place)) * wide
        if shards > 1:
            terms["gradients"] += last_of(block, self.division) * (wide if self.sums_first else self.width)
        if self.sums_first:
            gone = [b for b in self.behind(place) if not b.apart]
            terms["gradients"] -= (sum(map(self.summed, gone)) + own + done) * wide
            terms["gradients"] += sum(map(self.owned, gone)) * (self.own_width + self.held_width)
        if not self.accumulates or self.sums_first:
            terms["gradients"] += done / self.division.expert_shards * self.own_width
        return terms | {"gathered": self.given_back(place)}

    def sent_behind(self, place: int) -> float:
        """Elements of the gradients of the block behind as they were sent, which are held until the next ones are.

        Those that were summed before are counted as they lay then.
        """
        if (self.sums_first and self.plan.zero) or not any(map(self.trained, self.behind(place))):
            return 0.0
        block = self.chain[place + 1][1]
        return 0.0 if block.apart else self.summed(block) - self.apart(block)

    def widened(self, place: int) -> Terms:
        """When the gradients of a block that has cast its weights come back into their type."""
        _, block = self.chain[place]
        terms = self.gradients_at(place, 0.0, Held())
        terms["gradients"] += self.widening(tensors_of(block))
        left = self.gathered(1, place) - self.params(block) * self.width
        return terms | {"gathered": left, "working": self.stream(block) - self.kept_at(place)}

    def widening(self, tensors: Sequence[float]) -> float:
        return widening(tensors, self.width, self.own_width, accumulates=self.accumulates)

    def widened_outside(self, pending: float) -> Terms:
        """The same of what is outside of blocks, which waits for the end of the backward pass."""
        inner = 0.0 if self.accumulates else self.kept_gradients - self.moving * self.own_width
        head, before = self.division.profile.head, self.embedding()
        fresh = self.widening(head.tensors or (before, self.moving - before))
        return {**self.base, "gradients": pending + inner + fresh, "logits": self.logit() * self.width}

    def gradients_at(self, place: int, left: float, held: Held) -> Terms:
        """Gradients and logits while the block at a place runs backward, or (-1) what is before all of them."""
        gone, begun = self.behind(place), self.begun(place)
        done = sum(map(self.trained, gone))
        head = self.trained(self.division.profile.head) if self.is_last else 0.0
        new = (held.fresh if self.adds else head + held.gradients) * self.width
        if self.engine:
            new = (held.fresh if self.adds_up else head + held.gradients) * self.width + left
            if not self.accumulates:
                new += self.owned_by([*gone, *begun]) * self.own_width
            if self.held_width and not self.sums_first:
                new += self.beside_sums(gone)
            if not self.adds_up:
                new += sum(map(self.trained, self.apart_behind(place))) * self.width
            new += self.sent_behind(place) * self.reduced_width
        elif self.casts:
            new = (head + held.gradients) * self.width + (0.0 if self.accumulates else done * self.own_width)
        elif not self.adds:
            new += done * self.width
        elif is_replicated(self.plan) and self.plan.batch.micro_batches == 2 and self.plan.communication.bucket_view:
            # the first one's are not, or lie in the buckets again; a tied table's wait for their sum
            there = done + head - self.tied(False) + held.gradients - held.fresh
            new -= min(there * self.width, self.gradients / 2 - there * self.width)
        new += (self.tied(place < 0) + sum(map(self.trained, begun))) * self.width
        return {"gradients": new, "logits": self.logit() * self.width}

    def owned_by(self, gone: Sequence[Block]) -> float:
        """Elements of this rank's shards of the gradients that blocks have given, but for those that are apart."""
        return sum(self.owned(block) for block in gone if not block.apart)

    def beside_sums(self, gone: Sequence[Block]) -> float:
        """Bytes of what blocks have given in one of two types, beside the other: as it was summed over replicas too."""
        if not self.accumulates:
            return self.owned_by(gone) * self.held_width
        return max(0.0, self.owned_by(gone) * self.own_width - self.returned(gone))

    def returned(self, gone: Sequence[Block]) -> float:
        """Bytes of weights that are counted as gathered, and are given back in the last micro-batch."""
        stays = not self.plan.reshards and self.plan.batch.micro_batches > 2
        return sum(map(self.params, gone)) * self.width * stays

    def entered(self, place: int) -> float:
        """Inputs of the recomputed blocks with experts behind a place, which live until the backward pass ends.

        As traced: a block that hands on its auxiliary losses beside the stream is held by its recorded call.
        """
        if self.plan.recompute.mode == "ops":
            return 0.0
        behind = self.chain[place + 1 :]
        return sum(self.stream(b) for index, b in behind if self.local_experts(b) and is_recomputed(index, self.plan))

    def behind_experts(self, place: int, left: float) -> Terms:
        """When all experts of the block at this place have gone backward."""
        index, block = self.chain[place]
        row = self.row(block)
        fresh, working, used = self.in_experts(index, block)
        terms = self.gradients_at(place, left, Held(gradients=row, fresh=row))
        terms["gradients"] += fresh
        return terms | {
            "gathered": self.gathered(1 + self.prefetch, place),
            "working": working,
            "activations": -used,
        }
