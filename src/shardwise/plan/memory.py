"""`estimate_memory`: bytes per rank and pipeline stage at their peak, by term. Closed form, no torch.

Three numbers, as people print three: `allocated` is live tensors, `reserved` what the caching allocator holds for them,
`device` what the driver shows. `diagnose` has the other estimator, which traces the real step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from shardwise.hardware.cluster import GIB, Device
from shardwise.model.profile import Profile
from shardwise.plan.eager.rank import eager_rank
from shardwise.plan.frozen import cast_head, gathered_share, held_width, kept_on, kept_whole
from shardwise.plan.memory_terms.around import copied, outside_step
from shardwise.plan.memory_terms.casting import cast_last, cast_whole
from shardwise.plan.memory_terms.holding import (
    beside_weights,
    frees_last,
    given_back,
    held_apart,
    held_freed,
    of_units,
    reduced_last,
    sending,
    sent_before,
)
from shardwise.plan.memory_terms.passing import (
    adds_in_another_type,
    at_end,
    beside_buckets,
    block_bytes,
    made_inside,
    of_block,
    passing_of,
)
from shardwise.plan.memory_terms.states import (
    STATES,
    accumulates_whole,
    offloaded_of,
    on_device,
    passes_once,
    states_of,
)
from shardwise.plan.messages.data import held_sums
from shardwise.plan.plan import Plan
from shardwise.plan.ranks.activations import compute_width, recomputed_in
from shardwise.plan.ranks.division import Division, divide
from shardwise.plan.ranks.engines import casts_weights, is_replicated, uses_fully_shard
from shardwise.plan.ranks.imbalance import busiest
from shardwise.plan.ranks.stages import Stage
from shardwise.plan.stack import Stack, stack_of
from shardwise.plan.time_terms.stalls import held_ahead
from shardwise.plan.updating import OWN, at_once, compared, update_spike
from shardwise.plan.workload import Workload

COMMUNICATOR = 0.12 * GIB
"""Device memory of one communicator's channels and buffers."""
WORKSPACE = 0.15 * GIB
"""Workspaces of matrix libraries, and segments that small blocks fill in part, in the allocator beside all tensors."""


@dataclass(frozen=True)
class RankMemory:
    """One rank of the `pp` axis (all its stages): bytes by term at the peak."""

    rank: int
    terms: Mapping[str, float]
    phase: str
    """When the peak is reached: in a step loss (or the backward pass of the block before it), backward or update;
    outside of it place, load or save."""
    most_passing: float = 0.0
    """The most that comes and goes within a pass."""
    freed: float = 0.0
    """Beyond the peak: what a block that is computed again left free in the forward pass, and nothing of the loss fits
    into."""
    held: float = math.inf
    """Freed blocks that its allocator keeps; `inf`: as many as the rank that needs most has (`Memory.held`)."""

    @property
    def allocated(self) -> float:
        """Live tensors."""
        return sum(self.terms.values())

    @property
    def passing(self) -> float:
        """What comes and goes within a step, between which holes arise: all but the states."""
        return sum(value for name, value in self.terms.items() if name not in STATES)


@dataclass(frozen=True)
class Memory:
    """Peak memory of every rank of the pipeline, in bytes."""

    stages: tuple[RankMemory, ...]
    """Of a step."""
    fragmentation: float
    context: float
    """Driver, libraries and communicators."""
    limit: float = 0.0
    """Device memory; 0: not given."""
    peaks: Mapping[str, float] = field(default_factory=dict)
    """Phase -> allocated bytes of the worst rank in that phase."""
    held: float = 0.0
    """Freed blocks that the allocator keeps, or that streams behind the host have not given back, until memory runs
    out: see `plan.memory_terms.holding`."""
    workspace: float = 0.0
    """Of libraries, in the allocator."""
    outside: tuple[RankMemory, ...] = ()
    """Each rank outside of steps, where it needs most then; see `plan.memory_terms.around`."""
    host: float = 0.0
    """Bytes of the host's memory that a rank's copy of what a save writes takes, from the first save on; 0 where host
    and device are one memory."""
    offloaded: tuple[float, ...] = ()
    """Bytes of each rank's states in its host's memory, where the plan offloads them; see `plan.hosting`."""

    @property
    def worst(self) -> RankMemory:
        """The rank that needs the most of the allocator in a step; of equal ones, that with more holes."""
        return max(self.stages, key=self.reserved_of)

    @property
    def peak(self) -> RankMemory:
        """The rank and the phase for which the allocator reserves the most, outside of steps too."""
        return max((self.worst, *self.outside), key=self.reserved_of)

    @property
    def allocated(self) -> float:
        """Live tensors on the worst rank in a step."""
        return self.worst.allocated

    @property
    def reserved(self) -> float:
        """The same with the caching allocator's rounding and holes, and what streams hold."""
        return self.reserved_of(self.worst)

    def reserved_of(self, rank: RankMemory) -> float:
        """The same of any rank."""
        return rank.allocated + rank.passing * self.fragmentation + self.workspace + min(self.held, rank.held)

    @property
    def device(self) -> float:
        """At the peak, outside of steps too, with driver context and communicators."""
        return self.reserved_of(self.peak) + self.context

    @property
    def fits(self) -> bool:
        """True where the device's memory is known and suffices."""
        return self.fits_in(self.limit)

    def fits_in(self, limit: float) -> bool:
        """True where so many bytes of a device suffice: `held` is given back before memory runs out."""
        return limit > 0 and self.device - self.held <= limit


def estimate_memory(
    profile: Profile,
    plan: Plan,
    workload: Workload,
    *,
    stack: Stack | None = None,
    device: Device | None = None,
    room: float = math.inf,
) -> Memory:
    """Peak memory of every rank of the pipeline under a plan.

    Terms of a step: weights, master weights, gradients, optimizer state, gathered parameters, activations, logits,
    working set, temporary (of the update). Outside of it: drawn (initial values), loaded, saved (copies of states).
    Sources: arXiv:1910.02054 (states under zero 0 to 3), arXiv:2205.05198 (activations), arXiv:2104.04473 (in flight).
    `room`: bytes of a device; where a rank needs more in a step, others may be left out, and nothing is said of what is
    outside of steps.

    Raises:
        PlanError: a batch or a pipeline that the model does not divide.

    Cost: some 100 microseconds, and as many for each rank of a pipeline.

    >>> from shardwise.model.profile import profile_of
    >>> from shardwise.model.spec import preset
    >>> eight = profile_of(preset("llama-8b"))
    >>> memory = estimate_memory(eight, Plan.parse("fsdp8 bf16"), Workload(seq_len=8192, global_batch=8))
    >>> 60e9 < memory.allocated < 110e9
    True
    """
    stack = stack_of(plan, stack)
    division = divide(busiest(profile, plan, workload), plan, workload, stack.cut)
    division = replace(division, splits_experts=stack.splits_experts, fills_up=stack.name in OWN)
    workspace, context = 0.0 if stack.eager else WORKSPACE, _context(plan, stack, device)
    states = division.of_ranks(partial(states_of, division, stack=stack))
    ranks = _ranks_within(division, states, stack, room - workspace - context)
    worst = max(sorted(ranks), key=lambda rank: ranks[rank][0].allocated)
    ahead, left = held_ahead(division, stack, device), _left(division, worst, ranks[worst], states[worst], stack)
    found = {rank: each for rank, (each, _) in ranks.items()}
    for rank in ranks.keys() - {worst} if len(ranks) == plan.axes.pp else ():
        found[rank] = replace(found[rank], held=ahead + _left(division, rank, ranks[rank], states[rank], stack))
    memory = Memory(
        stages=tuple(found[rank] for rank in sorted(found)),
        fragmentation=stack.fragmentation,
        context=context,
        limit=device.memory if device else 0.0,
        peaks=max((peaks for _, peaks in ranks.values()), key=lambda peaks: max(peaks.values())),
        held=ahead + left,
        workspace=workspace,
        host=0.0 if stack.eager else max(division.of_ranks(partial(copied, division, stack=stack))),
        offloaded=offloaded_of(division, stack) if plan.offload.state and not stack.eager else (),
    )
    if len(ranks) < plan.axes.pp:
        return memory
    memory = _with_outside(memory, division, states, stack)
    short = memory.device - memory.limit
    if memory.held and memory.limit and short > 0:  # its host waits, and the rest gives back what is asked for
        return replace(memory, held=max(0.0, min(memory.held - ahead, memory.held - short)))
    return memory


def _left(
    division: Division,
    rank: int,
    found: tuple[RankMemory, Mapping[str, float]],
    states: Mapping[str, float],
    stack: Stack,
) -> float:
    """Bytes of freed blocks that the allocator of a rank keeps, and that no stream holds."""
    stages, (largest, peaks) = division.ranks[rank], found
    inside = made_inside(division, stages, largest.most_passing, stack)
    apart = held_apart(division, stages, peaks, states, stack)
    return apart + held_freed(division, stages, peaks, inside, stack) + largest.freed


def _ranks_within(
    division: Division, states: Sequence[Mapping[str, float]], stack: Stack, room: float
) -> dict[int, tuple[RankMemory, dict[str, float]]]:
    """Ranks of the pipeline, up to one that needs more than so many bytes: the last one, with the logits, is first."""
    found: dict[int, tuple[RankMemory, dict[str, float]]] = {}
    for rank in dict.fromkeys((division.plan.axes.pp - 1, *range(division.plan.axes.pp))):
        found[rank] = largest, _ = _rank_memory(division, rank, states[rank], stack)
        if largest.allocated + largest.passing * stack.fragmentation > room:
            break
    return found


def _context(plan: Plan, stack: Stack, device: Device | None) -> float:
    """Bytes of a device beside the allocator's: of the driver, and of communicators."""
    axes = plan.axes
    groups = sum(size > 1 for size in (axes.pp, axes.dp_replicate, axes.dp_shard * axes.cp, axes.tp, axes.ep))
    return (device.context if device else 0.0) + stack.context + COMMUNICATOR * (groups + (plan.world > 1))


def _with_outside(memory: Memory, division: Division, states: Sequence[Mapping[str, float]], stack: Stack) -> Memory:
    """The same with what ranks need outside of steps.

    Nothing is held for streams then: what is needed beyond a step takes the place of what is held within one.
    """
    kept = dict(zip(map(id, division.ranks), states, strict=True))
    phases = division.of_ranks(lambda stages: outside_step(division, stages, stack, kept[id(stages)]))
    found = [_largest(rank, each) for rank, each in enumerate(phases) if each]
    if not found:
        return memory
    outside = tuple(rank for rank, _ in found)
    peaks = {name: max(sums[name] for _, sums in found) for name in found[0][1]}
    whole = replace(memory, outside=outside, peaks={**memory.peaks, **peaks})
    beyond = whole.reserved_of(whole.peak) - whole.reserved_of(whole.worst)
    return replace(whole, held=max(0.0, memory.held - beyond))


def _rank_memory(
    division: Division, rank: int, kept: Mapping[str, float], stack: Stack
) -> tuple[RankMemory, dict[str, float]]:
    """The peak of one rank with these states, and its allocated bytes in each phase."""
    plan, stages, states = division.plan, division.ranks[rank], dict(kept)
    if division.profile.buffers:
        states["constants"] = division.buffers(stages) * (2.0 if stack.name in OWN else 1.0)  # as they were before it
    states |= beside_weights(division, stages, states, stack)
    spike = max(update_spike(division, stages), compared(division, stages, stack)) if stack.name in OWN else 0.0
    if stack.eager:
        moments = dict(eager_rank(division, rank, stages, states, gloo=True))
        moments["update"] = {**moments["update"], "temporary": spike}
        return _largest(rank, moments)
    gradients = states.pop("gradients")
    block = block_bytes(division, stages, stack) + kept_on(division, stages)
    there = gradients * (accumulates_whole(plan, stack) or not (plan.offload.state and stack.name in OWN))
    most, running = passing_of(division, rank, stages, there, stack)
    held = {**states, "gathered": gathered_of(division, stages, stack), "buffers": most.sent}
    loss = {**held, "activations": most.kept + most.again, "working": most.working, "logits": most.logits}
    loss["gathered"] = gathered_of(division, stages, stack, goes_back=not frees_last(stack)) + most.gathered + most.made
    backward = {**held, "activations": block, "working": running.working, "buffers": running.sent}
    sent, backward["gradients"] = sending(division, stages, gradients, stack)
    backward["gathered"] += sent + running.gathered
    backward |= given_back(division, stages, gradients, stack)
    buffered = stack.master and not stack.copies_grads  # in buffers that stay
    several = plan.batch.micro_batches > 1 or (plan.axes.pp > 1 and stack.name in OWN)  # which passes go back apart
    if buffered or stack.zeroes_grads or several:  # gradients are there before it
        loss["gradients"] = most.gradients + most.fresh
        loss["gathered"] += sent_before(division, stack)
        begins = running.kept + running.again, backward["gradients"] - gradients + running.gradients, running.made
        ends = at_end(division, stages, block, running.working, stack), backward["gradients"]
        either = max(begins, (*ends, _added(division, stages, stack)), key=lambda a: a[0] + a[1] * bool(there) + a[2])
        backward |= {"activations": either[0], "gradients": either[1], "gathered": backward["gathered"] + either[2]}
    elif casts_weights(plan) and stack.name in OWN:
        backward["gathered"] = cast_last(division, stages)
    if stack.name in OWN:
        trained = division.profile.trained * division.workload.trained
        backward["gradients"] += division.owned(stages) * trained * held_sums(plan)
    stepped = gradients
    if "master" in states and plan.precision == "bf16-pure":
        stepped = states["master"] + compute_width(plan) * (division.owned if plan.zero else division.whole)(stages)
    update = {**states, "gradients": stepped, "temporary": spike + at_once(division, stages, stack)}
    if stack.name in OWN and is_replicated(plan):
        ahead = most.gradients, backward["gradients"]
        loss["gradients"], backward["gradients"], update["gradients"] = beside_buckets(plan, gradients, ahead)
    found = {"loss": loss, "backward": backward, "update": update}
    phases = {name: on_device(name, terms, plan, stack) for name, terms in found.items()}
    units = of_units(division, stages, {**states, "activations": running.kept}, gradients, stack)
    for name, terms in (*units.items(), *reduced_last(division, stages, states, gradients, stack).items()):
        here = on_device(name, terms, plan, stack)
        phases[name] = max(phases[name], here, key=lambda each: sum(each.values()))
    by_course = stack.name in OWN and not stack.fused and any(block.courses for block in division.profile.blocks)
    if by_course and not plan.offload.state:
        whole_states = states_of(division, stages, replace(stack, eager=True))
        for name, terms in eager_rank(division, rank, stages, {**states, **whole_states}, gloo=False).items():
            if sum(terms.values()) > sum(phases.get(name, {}).values()):
                phases[name] = dict(terms)  # of a module whose own forward was followed, moment by moment
    largest, sums = _largest(rank, phases)
    left = sums["loss"] + (running.again if most.logits else 0.0)
    return replace(largest, freed=max(0.0, left - sums[largest.phase])), sums


def _added(division: Division, stages: tuple[Stage, ...], stack: Stack) -> float:
    """Bytes of a pipeline's gradient that is being added to others when all are there; of a single pass it is one."""
    plan = division.plan
    if plan.axes.pp == 1 or stack.name not in OWN or (passes_once(plan, stack) and not adds_in_another_type(plan)):
        return 0.0
    return of_block(division, stages)[0]


def _largest(rank: int, phases: Mapping[str, Mapping[str, float]]) -> tuple[RankMemory, dict[str, float]]:
    sums = {name: sum(terms.values()) for name, terms in phases.items()}
    phase = max(sums, key=lambda name: sums[name])
    stay = (*STATES, "temporary")  # an update's fits nothing of a pass
    most = max(total - sum(phases[name].get(term, 0.0) for term in stay) for name, total in sums.items())
    return RankMemory(rank, {name: value for name, value in phases[phase].items() if value}, phase, most), sums


def gathered_of(division: Division, stages: tuple[Stage, ...], stack: Stack, *, goes_back: bool = True) -> float:
    """Parameters in the compute dtype beside the weights: all, or a block, those ahead of it, and its gradient.

    That is there where the backward pass goes on, `goes_back`, and not at the loss.

    Blocks that are apart wait for the end of the backward pass, with their gradients.
    """
    plan = division.plan
    apart = sum(division.dense(block) for stage in stages for block in stage.blocks if block.apart)
    width, packed = compute_width(plan), division.workload.packed
    sharded = plan.zero > 0 and (plan.zero == 3 or stack.keeps_shards) and division.shards > 1
    if packed and not sharded:
        return kept_whole(division, stages) + cast_head(division, stages, stack)
    if plan.zero < 3 and not sharded and (stack.master or plan.precision == "bf16-pure"):
        return 0.0  # the weights are in the compute dtype as they are
    if casts_weights(plan) and stack.name in OWN:
        return cast_whole(division, stages, stack)
    if not plan.reshards:
        engine = stack.name in OWN and uses_fully_shard(plan)  # which copies weights that nobody shares, too
        gathered = plan.zero == 3 or sharded or engine
        if division.workload.trained < 1 and not gathered and plan.recompute.mode == "blocks":
            blocks = (division.dense(block) for stage in stages for block, _ in stage.counts)
            return max(blocks, default=0.0) * width if width < 4 else 0.0  # autocast keeps no casts of frozen weights
        held = held_width(division, stages, width)  # packed weights are gathered so
        return (division.whole(stages) + apart * gathered) * held if width < 4 or gathered else 0.0
    counts = [(division.dense(block) + division.filled(block), n) for stage in stages for block, n in stage.counts]
    most, every = max((size for size, _ in counts), default=0.0), sum(size * n for size, n in counts)
    ends = division.embedding * any(stage.first for stage in stages)
    head = division.dense(division.profile.head) * any(stage.last for stage in stages)
    ends = ends + head * (not division.profile.tied) if stack.one_root else max(ends, head)
    unit, live = most, most * (1 + plan.communication.prefetch)
    if stack.most_gathered < live:
        unit = max((division.largest_product(block) for stage in stages for block, _ in stage.counts), default=0.0)
        live = min(live, max(stack.most_gathered, unit * (1 + plan.communication.prefetch)))
    in_line = plan.axes.pp > 1 and stack.name in OWN  # see `of_block`
    gradient = unit if division.workload.trained == 1 and goes_back and not in_line else 0.0  # frozen weights have none
    if stack.keeps_gathered and (division.shards > 1 or (plan.offload.state and stack.offloads_weights)):
        courses = (each for stage in stages for each in recomputed_in(stage, plan))
        live = max(live, sum(division.dense(block) * (n - again) for block, n, again in courses))
    inside = max(min(live, every) + gradient, 2 * apart) + max(0.0, every - live) * division.part_left
    share = gathered_share(division.profile, packed, width)
    casts = cast_whole(division, stages, stack) if stack.gathers_wide and width < 4 else 0.0
    return (inside * share + ends) * (4.0 if casts else width) + casts + kept_whole(division, stages)
