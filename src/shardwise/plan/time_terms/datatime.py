"""Seconds that data axes send, message by message, and what of it no compute hides. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

from shardwise.hardware.cluster import Cluster
from shardwise.plan.costs.links import Group, group_of, messages_time
from shardwise.plan.frozen import gathered_share
from shardwise.plan.messages.data import reductions_of
from shardwise.plan.messages.scene import WIDTH
from shardwise.plan.plan import Plan, Schedule
from shardwise.plan.ranks.activations import compute_width
from shardwise.plan.ranks.division import Division
from shardwise.plan.ranks.engines import is_replicated, uses_fully_shard
from shardwise.plan.ranks.stages import Stage
from shardwise.plan.stack import Stack
from shardwise.plan.updating import OWN


class Part(NamedTuple):
    """Parameters of a rank that data axes gather and reduce alike."""

    axis: str
    """data or expert_data: whose ranks share them."""
    params: float
    groups: int
    """Groups of `fully_shard` that they are in: blocks, or what is outside of them."""
    tensors: int
    """Products that they belong to, at most as many as parameters."""
    shards: int = 1
    """Ranks that share the optimizer state."""
    outside: bool = False
    """Embedding and head: gathered once for both passes."""
    packed: float = 1.0
    """Bytes that they are gathered in, over those of the compute type: see `frozen.gathered_share`."""


@dataclass(frozen=True, slots=True)
class Wire:
    """What data axes send for a rank, message by message: each pays the latency of its collective."""

    plan: Plan
    stack: Stack
    cluster: Cluster
    parts: Sequence[Part]
    trained: float = 1.0
    """Share of the parameters whose gradients are sent: adapters, over the model."""

    @property
    def gradient(self) -> float:
        """Bytes of a gradient on the wire."""
        given = self.plan.communication.reduce_dtype
        return WIDTH[given] if given else self.stack.reduce_bytes or compute_width(self.plan)

    def time(self, kind: str, width: float, *, again: bool = False, share: float = 1.0) -> float:
        """Seconds of a collective over the shards for all parameters; `again`: of those gathered for a backward pass.

        With `reshard=n` these come from n neighbours, with `reshard=false` they are there.
        """
        plan, network, seconds = self.plan, self.stack.network, 0.0
        if again and not plan.reshards:
            return seconds
        dial = plan.communication.reshard_after_forward
        for part in (part for part in self.parts if not (again and part.outside)):
            group = group_of(plan.axes, part.axis)
            if again and type(dial) is int:
                group = replace(group, size=min(dial, group.size))
            size = part.params * width * share * (part.packed if kind == "all_gather" else 1.0)
            seconds += messages_time(kind, size, self._count(part), group, self.cluster, network)
        return seconds

    @property
    def at_once(self) -> bool:
        """Whether ranks of `cp` and replicas are one group, over which gradients are added at once (`DDP`)."""
        return self.plan.zero == 0 and self.plan.axes.dp_replicate > 1 and self.stack.name not in OWN

    def across(self) -> float:
        """Seconds of adding gradients over replicas."""
        axes, network, width = self.plan.axes, self.stack.network, self.gradient * self.trained
        group = group_of(axes, "dp_replicate")
        if self.at_once:
            group = Group(axes.dp_replicate * axes.dp_shard * axes.cp, axes.tp)
        return sum(
            messages_time(
                "all_reduce", part.params * width / part.shards, self._count(part), group, self.cluster, network
            )
            for part in self.parts
        )

    def _count(self, part: Part) -> int:
        """Messages: a group of `fully_shard` each; below zero 3 the stack's buckets, or those of DDP."""
        plan, stack = self.plan, self.stack
        if plan.zero == 3 or plan.reshards or not part.params:
            return part.groups
        if stack.bucket:
            return ceil(part.params / (stack.bucket * max(plan.axes.data, 40)))
        if is_replicated(plan):
            size = part.params * compute_width(plan)
            return min(ceil(size / (plan.communication.bucket_mb * 2**20)), part.tensors)
        return part.groups


def wire_of(division: Division, stages: tuple[Stage, ...], cluster: Cluster, stack: Stack) -> Wire:
    """Of the stages of a rank; experts that `ep` does not divide go with the rest of their block."""
    counts = [pair for stage in stages for pair in stage.counts]
    experts = sum(division.stage_experts(stage) for stage in stages)
    ends = sum(division.stage_dense(stage) for stage in stages) - sum(division.dense(b) * n for b, n in counts)
    if uses_fully_shard(division.plan):  # each call gathers and reduces
        counts = [(block, count * block.calls) for block, count in counts]
    inner = sum(division.dense(block) * count for block, count in counts)
    products = sum(len(tuple(block.matmuls)) * count for block, count in counts)
    blocks, routed = sum(count for _, count in counts), sum(count for block, count in counts if block.expert_params)
    apart = division.plan.axes.ep > 1
    packed = gathered_share(division.profile, division.workload.packed, compute_width(division.plan))
    parts = [
        Part("data", inner if apart else inner + experts, blocks, products, division.shards, packed=packed),
        Part("data", ends, sum(stage.first or stage.last for stage in stages), 2, division.shards, outside=True),
    ]
    if apart:
        parts.append(Part("expert_data", experts, routed, routed, division.expert_shards, packed=packed))
    parts = [part for part in parts if part.params > 0 and part.groups]
    return Wire(division.plan, stack, cluster, parts, division.workload.trained)


class Sends(NamedTuple):
    """Seconds that data axes send for a rank, each time."""

    gather: float
    """Parameters, ahead of a forward pass; 0: they are there."""
    again: float
    """For a backward pass, of what was freed after the forward pass."""
    reduce: float
    """Gradients, over their shards; without shards over all data ranks."""
    across: float
    """Gradients over replicas, once per step."""
    shared: bool = True
    """These go over the links of the others; False: shards are inside a node, replicas are not, and each kind has a
    stream of its own (`_all_reduce_stream` of FSDP1, `all_reduce_stream` of `fully_shard`)."""

    def backward(self, times: int, again: float = 0.0) -> float:
        """Seconds of sending beside a backward pass, of `times` that share what replicas add."""
        ours, theirs = again + self.reduce, self.across / times
        return ours + theirs if self.shared else max(ours, theirs)


def sends_of(wire: Wire) -> Sends:
    """What is sent for the parameters of a rank."""
    width, sharded = 4.0 if wire.stack.gathers_wide else compute_width(wire.plan), wire.plan.zero > 0
    whole = wire.plan.zero == 3 or wire.stack.keeps_shards  # weights are shards, frozen ones too; else an update's are
    parts = sharded and (wire.plan.zero == 3 or not wire.stack.reduces_whole)
    shards, kind = group_of(wire.plan.axes, "data"), "reduce_scatter" if parts else "all_reduce"
    return Sends(
        gather=wire.time("all_gather", width, share=1.0 if whole else wire.trained) if sharded else 0.0,
        again=wire.time("all_gather", width, again=True) if sharded else 0.0,
        reduce=0.0 if wire.at_once else wire.time(kind, wire.gradient, share=wire.trained),
        across=wire.across(),
        shared=not sharded or shards.inside(wire.cluster) < shards.size,
    )


class Rounds(NamedTuple):
    """How often data axes send in a step."""

    zero: int
    reshards: bool
    """Parameters are freed after a forward pass, and gathered again."""
    micro_batches: int
    pp: int
    turns: int = 1
    """Stages of a rank that follow one another in the pipeline."""

    @property
    def behind(self) -> float:
        """Micro-batches' passes that a reduction, or the gather of a step, may hide behind.

        The last one's backward pass. Where a rank has several stages, interleaved, they take turns for as many
        micro-batches as there are ranks: a stage is reduced when its turn ends, behind the turns of those that are
        left, and gathered before it starts (Megatron-Core's `grad_sync_func` and `param_sync_func`).
        """
        if self.turns == 1:
            return 1.0
        return max(1.0, min(self.pp, self.micro_batches) * (1.0 - 1.0 / self.turns))

    @property
    def frees(self) -> bool:
        """Whether parameters are gathered for each micro-batch, and not once."""
        return self.reshards or (self.zero == 3 and self.pp == 1)

    @property
    def reductions(self) -> int:
        """How often a gradient is reduced over its shards."""
        return reductions_of(self.zero, self.pp, self.micro_batches)


def rounds_of(plan: Plan) -> Rounds:
    """Of a plan."""
    return Rounds(
        plan.zero, plan.reshards, plan.batch.micro_batches, plan.axes.pp, turns_of(plan.axes.pp, plan.schedule)
    )


def turns_of(pp: int, schedule: Schedule) -> int:
    """Stages of a rank that take turns."""
    return schedule.stages if pp > 1 and schedule.kind == "interleaved" else 1


def exposed_time(
    rounds: Rounds, sends: Sends, passes: tuple[float, float], stack: Stack, *, waits: int, groups: int
) -> tuple[float, float]:
    """(exposed, sent): seconds per step that no compute hides, and all that are sent.

    What an engine that keeps shards sends (FSDP2, DDP) hides behind as much compute as `overlap_data` says, the first
    gather and the last reduction apart: nothing runs ahead of the one, nor behind the other (`_left`). Of other stacks,
    and on a CPU, where the processor sends, that share of all that is sent at most is hidden.
    Source: what `fully_shard` prefetches and when it reduces (arXiv:2304.11277, section 3.3); shares are fitted to
    published runs (docs/planner-accuracy.md).

    Args:
        rounds: how often.
        sends: each time.
        passes: a forward and a backward pass of a micro-batch.
        stack: what of it overlaps.
        waits: blocks whose gather the host waits for.
        groups: what is gathered and reduced one after the other.
    """
    (gather, again, reduce, across), count, hides = sends[:4], rounds.micro_batches, stack.overlap_data
    forward, backward = hides * passes[0], hides * passes[1]
    ahead = _left(gather, gather, forward, groups)
    if rounds.frees:
        wait = stack.gather_wait * (waits + (not rounds.reshards))  # gathered once, it is what `zero` 1 does below
        back = _left(sends.backward(count, again), sends.backward(count), backward, groups, early=again)
        exposed = (ahead + back + (1 + rounds.reshards) * wait) * count
        sent = (gather + again + reduce) * count + across
        if rounds.pp > 1 and stack.keeps_shards:  # backward passes leave weights for the forward passes between them
            early = min(count, rounds.pp)
            exposed = (_left(again, again, backward, groups) + wait) * count + (ahead + wait) * early
            exposed += _left(sends.backward(1), sends.backward(1), backward, groups)
            sent = again * count + gather * early + reduce + across
        return exposed, max(sent, exposed)
    times, wait = rounds.reductions, stack.gather_wait * (1 + waits) * (rounds.zero > 0)
    sent = gather + reduce * times + across
    if rounds.zero and stack.reduces_late:
        exposed = sent * stack.reduces_late + wait
        return exposed, exposed
    if stack.keeps_shards and not stack.eager:
        added = sends.backward(times)
        exposed = ahead + wait + _left(added, added, backward, groups) * times
        return exposed, max(sent, exposed)
    behind = passes[1] * times + passes[0] * (rounds.zero > 0)  # the gather hides behind the next forward pass
    hidden = hides * min(behind * rounds.behind, sent)
    return sent - hidden + wait, sent + wait


def _left(sent: float, apart: float, hides: float, groups: int, early: float = 0.0) -> float:
    """Seconds of sending that are left of a pass which hides so many of `groups` equal parts.

    Args:
        sent: all that is sent beside the pass.
        apart: of it, what is of the kind whose one part has no compute beside it: the first gather, the last reduction.
        hides: seconds of the pass that hide what is sent.
        groups: parts.
        early: of it, what is gathered ahead of the next part, so that some is there to send beside the first part too;
            beside that one nothing else is: no gradient is there yet, as no part is left to gather beside the last.
    """
    return max(apart / groups, sent - (hides - max(0.0, hides - early) / groups))
