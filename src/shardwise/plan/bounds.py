"""Bounds of what no plan of a family can beat: they say which families need no full estimate.

Each is below the estimate of every plan of its family (a test holds them to it), so that a search which drops what is
bounded away finds what an exhaustive one finds. They are built from the estimators' own kernels and collectives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import log2
from operator import itemgetter

from shardwise.model.profile import Block
from shardwise.plan.activations import is_recomputed, kept_bytes, saved_bytes
from shardwise.plan.bounds_work import Cut, Flight, RankWork, Upto, Work, rank_works, work_of
from shardwise.plan.division import Division
from shardwise.plan.families import Core, Flow, Pipe, Spread
from shardwise.plan.memory import COMMUNICATOR, gathered_of, states_of
from shardwise.plan.plan import V_SHAPED, ZERO_BUBBLE, Axes, Batch, Plan, Recompute, Schedule
from shardwise.plan.schedule import after_warmup
from shardwise.plan.space import Space
from shardwise.plan.timing import STRAGGLERS, Part, Wire, loss_time
from shardwise.plan.updating import HOST_UPDATE, update_bytes
from shardwise.plan.workload import STATE_BYTES

Kept = tuple[tuple[int, float, float, float], ...]
"""Of some pipeline ranks: the rank, bytes of micro-batches in flight, of logits, of its largest block in full."""
KeptBytes = tuple[list[Upto], list[list[float]], list[float]]
"""Bytes per token of a micro-batch: by policy, kept up to each block, and of it; and distinct blocks in full."""


@dataclass(frozen=True)
class Bounds:
    """The bounds of a question."""

    space: Space
    _works: dict[Core, Work] = field(default_factory=dict)
    _saved: dict[Core, KeptBytes] = field(default_factory=dict)
    _cuts: dict[tuple[int, int, bool], list[Cut]] = field(default_factory=dict)
    _sends: dict[tuple[object, ...], tuple[float, float, float]] = field(default_factory=dict)
    _states: dict[tuple[object, ...], tuple[float, float, float]] = field(default_factory=dict)
    _divisions: dict[tuple[object, ...], Division] = field(default_factory=dict)
    _sizes: dict[tuple[object, ...], Kept] = field(default_factory=dict)
    _spread_states: dict[tuple[object, ...], list[tuple[float, float, float]]] = field(default_factory=dict)
    _updates: dict[tuple[object, ...], float] = field(default_factory=dict)
    _rank_works: dict[tuple[object, ...], list[RankWork]] = field(default_factory=dict)
    _agains: dict[tuple[Work, int], Upto] = field(default_factory=dict)

    # ------------------------------------------------------------ time

    def core_time(self, core: Core, more: float = 0.0) -> float:
        """Below the step of all plans with this core: its blocks, evenly on all ranks, without a bubble; and `more`."""
        groups, work = core.world // (core.tp * core.cp), self.work(core)
        passes = self.space.workload.global_batch / core.samples
        return ((work.busy[-1] + work.head) * passes / groups + more + self.space.stack.step) * self.stragglers

    def least_update(self, core: Core, count: int, limit: float) -> float:
        """Below the optimizer's part of a step of `count` micro-batches or more, with `limit` bytes per device.

        No rank holds less than a shard of everything; where that does not fit, the host updates. Without stragglers.
        """
        space, stack, key = self.space, self.space.stack, (core.precision, core.world, count, limit)
        if key not in self._updates:
            plan = Plan(axes=Axes(dp_shard=core.world), zero=3 if core.world > 1 else 0, precision=core.precision)
            division = Division(space.profile, plan, space.workload, stack.cut)
            held = sum(states_of(division, division.ranks[0], stack).values())
            owned = self._params[0] + self._params[1]
            self._updates[key] = self._update_of(owned / core.world, count, offloaded=self.on_device(held) > limit)
        return self._updates[key]

    @cached_property
    def stragglers(self) -> float:
        """What a step takes with the slowest nodes, over what it takes with equal ones."""
        return 1 + STRAGGLERS * log2(self.space.cluster.nodes)

    def flow_time(self, flow: Flow) -> tuple[float, float, float]:
        """(step without data axes and stragglers; most forward, most backward seconds of a rank and micro-batch).

        The rank at place r starts when a micro-batch has passed the first stages of the ranks before it, and ends that
        long before the step does, where a backward pass is not split; where it is, forwards count alone.
        """
        pipe, work, stack = flow.pipe, self.work(flow.pipe.core), self.space.stack
        again, count, loss = work.again[flow.policy], pipe.micro_batches, self._loss(pipe.core)
        step = stack.step + (self._offloaded(flow) if flow.offload else 0.0) + stack.fill_host * (pipe.pp - 1)
        step += stack.micro_host * count * (flow.schedule.stages if pipe.pp > 1 else 1)
        if pipe.pp == 1:
            one = work.busy[-1] + work.head
            forward, backward = one * work.most + loss, one * (1 - work.least) + again + loss
            return (one + 2 * loss + again) * count + step, forward, backward
        path = before = total = forward = backward = 0.0
        split = flow.schedule.kind in ZERO_BUBBLE
        cut = self.cut(pipe.pp, flow.schedule)
        for rank, (_, last, _) in zip(self._ranks(pipe.core, pipe.pp, flow.schedule, flow.policy), cut, strict=True):
            own = loss if last else 0.0
            path = max(path, (rank.busy + rank.again + 2 * own) * count + before)
            before += rank.first * min(work.least, 0.33) if split else rank.first + rank.first_again
            total += rank.busy + rank.again + 2 * own
            forward = max(forward, rank.busy * work.most + own)
            backward = max(backward, rank.busy * (1 - work.least) + rank.again + own)
        # one micro-batch passes all stages, the others wait for the last of them
        start = max(start for stages, *_ in cut for start, _ in stages)
        end = work.busy[-1] - work.busy[start] + work.head + 2 * loss
        path = max(path, (total + (count - 1) * end) * (0.6 if split else 1.0)) + step
        return path, forward, backward

    def _loss(self, core: Core) -> float:
        """Seconds of the cross entropy of a micro-batch, each way."""
        return loss_time(self._num_logits(core), self.space.cluster, self.space.stack)

    def _offloaded(self, flow: Flow) -> float:
        """Seconds of saved tensors on their way to the host and back that compute cannot hide."""
        pipe, stack, work = flow.pipe, self.space.stack, self.work(flow.pipe.core)
        ranks = self._ranks(pipe.core, pipe.pp, flow.schedule, flow.policy)
        upto, most, hides = self._kept(pipe.core)[0][flow.policy], 0.0, stack.hides_copies
        for rank, (stages, last, _) in zip(ranks, self.cut(pipe.pp, flow.schedule), strict=True):
            own = self._loss(pipe.core) if last else 0.0
            moved = sum([upto[end] - upto[start] for start, end in stages]) * self.tokens(pipe.core)
            passes = rank.busy * work.most + own, rank.busy * (1 - work.least) + rank.again + own
            one_way = moved * stack.offloads_blocks / self.space.cluster.host_bandwidth
            most = max(most, sum([max(0.0, one_way - hides * each) for each in passes]))
        return most * pipe.micro_batches

    def plan_time(self, flow: Flow, spread: Spread, family: tuple[float, float, float] | None = None) -> float:
        """With what data axes send and compute cannot hide, and an offloaded update; `family`: the `flow_time`."""
        seconds, forward, backward = family or self.flow_time(flow)
        pipe, stack = flow.pipe, self.space.stack
        count, blocks = pipe.micro_batches, self._blocks_of(pipe.pp)
        owned = self._owned(spread, *self._local(pipe))
        seconds += self._update_of(owned, count, offloaded=spread.offloaded)
        gather, again, reduce = self._sent(spread)
        hides = stack.overlap_data
        if spread.zero == 3 and pipe.pp > 1 and stack.keeps_shards:
            most = max(sum(end - start for start, end in stages) for stages, *_ in self.cut(pipe.pp, flow.schedule))
            exposed = max(0.0, again - hides * backward) + stack.gather_wait * blocks + again / (most + 1)
            seconds += exposed * count + max(0.0, reduce - hides * backward)
        elif spread.zero == 3:
            exposed = max(0.0, gather - hides * forward) + max(0.0, again + reduce - hides * backward)
            exposed += (gather + reduce) / (len(self.space.profile.blocks) + 1)
            seconds += (exposed + 2 * stack.gather_wait * blocks) * count
        else:
            times = count if spread.zero == 2 and pipe.pp == 1 else 1
            total = gather + reduce * times
            behind = backward * times + (forward if spread.zero else 0.0)
            seconds += total - hides * min(behind, total) + (stack.gather_wait * blocks if spread.zero else 0.0)
        return seconds * self.stragglers

    def _update_of(self, owned: float, count: int, *, offloaded: bool) -> float:
        """Seconds of the optimizer for so many parameters of a rank, and of what an offloaded state moves."""
        cluster, work, stack = self.space.cluster, self.space.workload, self.space.stack
        traffic = owned * update_bytes(STATE_BYTES[work.optimizer], stack) * work.trained * self.space.profile.trained
        if offloaded:
            sent = owned * 12 * count * (1 - stack.overlap_data)
            return (traffic / HOST_UPDATE + sent) / cluster.host_bandwidth
        return traffic / (cluster.device.bandwidth * cluster.device.stream)

    def work(self, core: Core) -> Work:
        """What a core's kernels, and the communication inside of blocks, take."""
        return self._works.get(core) or self._works.setdefault(core, self._work(core))

    def _work(self, core: Core) -> Work:
        return work_of(core, self.space, self._blocks, self._recomputed)

    @cached_property
    def _blocks(self) -> list[tuple[Block, int]]:
        """Distinct blocks, with how many there are."""
        counts = Counter(id(block) for block in self.space.profile.blocks)
        return [(block, counts.pop(id(block))) for block in self.space.profile.blocks if id(block) in counts]

    @cached_property
    def _marks(self) -> list[list[bool]]:
        """For each policy, which blocks it recomputes."""
        plans = [Plan(recompute=recompute) for recompute in self.space.recomputes]
        return [[is_recomputed(i, plan) for i in range(len(self.space.profile.blocks))] for plan in plans]

    @cached_property
    def _recomputed(self) -> list[Counter[int]]:
        """For each policy, how often it recomputes each distinct block."""
        blocks = self.space.profile.blocks
        return [Counter(id(block) for block, on in zip(blocks, marks, strict=True) if on) for marks in self._marks]

    def _ranks(self, core: Core, pp: int, schedule: Schedule, policy: int) -> list[RankWork]:
        """What a micro-batch takes of each rank of the pipeline."""
        work = self.work(core)
        key = (work, pp, *cut_as(schedule), policy)
        if key not in self._rank_works:
            self._rank_works[key] = rank_works(work, self._again(work, policy), self.cut(pp, schedule))
        return self._rank_works[key]

    def _again(self, work: Work, policy: int) -> Upto:
        """Seconds that a policy adds, before each block."""
        if (work, policy) not in self._agains:
            one = work.repeats[self.space.recomputes[policy].mode == "ops"]
            blocks = zip(self.space.profile.blocks, self._marks[policy], strict=True)
            self._agains[work, policy] = tuple(accumulate((one[id(b)] if on else 0.0 for b, on in blocks), initial=0.0))
        return self._agains[work, policy]

    def cut(self, pp: int, schedule: Schedule) -> list[Cut]:
        """For each rank the first and the end of each of its stages, whether it holds the head, and which blocks."""
        key = (pp, *cut_as(schedule))
        if key not in self._cuts:
            space = self.space
            plan = Plan(axes=Axes(pp=pp), schedule=schedule)
            numbers = {block: number for number, (block, _) in enumerate(self._blocks)}
            self._cuts[key] = [
                (
                    [(stage.start, stage.start + len(stage.blocks)) for stage in rank],
                    any(stage.last for stage in rank),
                    frozenset(numbers[block] for stage in rank for block, _ in stage.counts),
                )
                for rank in Division(space.profile, plan, space.workload, space.stack.cut).ranks
            ]
        return self._cuts[key]

    def _blocks_of(self, pp: int) -> int:  # at least, on the rank with most parameters
        return max(len(self.space.profile.blocks) // pp - (pp > 1), 0)

    def _sent(self, spread: Spread) -> tuple[float, float, float]:
        """Seconds on an average rank: (sent once or ahead of a forward pass, gathered for a backward pass, reduced)."""
        pipe, core, profile = spread.pipe, spread.pipe.core, self.space.profile
        key = (core.tp, core.cp, core.ep, core.precision, pipe.pp, spread.dp_replicate, spread.dp_shard, spread.zero)
        if key not in self._sends:
            plan = Plan(axes=spread.axes, zero=spread.zero, precision=core.precision)
            (dense, experts), shards = self._local(pipe), core.cp * spread.dp_shard if spread.zero else 1
            ends, blocks = min(dense, (profile.embedding + profile.head.params) / core.tp), self._blocks_of(pipe.pp)
            apart = experts if core.ep > 1 else 0.0
            parts = (
                Part("data", dense - ends + experts - apart, max(blocks, 1), 1, shards),
                Part("data", ends, 1, 1, shards, True),
                Part("expert_data", apart, 1, 1, max(1, shards * core.tp // core.ep)),
            )
            wire = Wire(plan, self.space.stack, self.space.cluster, parts)
            sums = wire.time("reduce_scatter" if spread.zero else "all_reduce", wire.gradient)
            ahead, again = (wire.time("all_gather", core.width, again=each) for each in (False, True))
            once = (ahead if spread.zero else 0.0) + (wire.across() if spread.zero < 3 else 0.0)
            self._sends[key] = once, again, sums
        return self._sends[key]

    # ------------------------------------------------------------ memory

    def core_size(self, core: Core) -> float:
        """Below all its plans' device memory: largest block; of the last rank, logits and (if not greedy) a block."""
        blocks = [size * self.tokens(core) for size in self._full(core).values()]
        return self.on_device(max(*blocks, self.logits(core) + min(blocks) * (self.space.stack.cut != "greedy")))

    def flow_size(self, flow: Flow, every_rank: bool = False) -> Kept:
        """Bytes of micro-batches in flight on the first and the last rank; `every_rank`: also on the one with most."""
        pipe, core = flow.pipe, flow.pipe.core
        # how context is exchanged changes no size, so its kinds share theirs
        sizes = (core.tp, core.cp, core.ep, core.samples, core.sequence, core.loss, core.precision, core.float8)
        key = (*sizes, pipe.pp, pipe.micro_batches, flow.schedule, flow.policy, flow.offload, every_rank)
        if key not in self._sizes:
            ranks = range(pipe.pp) if every_rank else (0, pipe.pp - 1) if pipe.pp > 1 else (0,)
            found = self._flow_size(flow, ranks)
            self._sizes[key] = tuple(dict.fromkeys((found[0], max(found, key=itemgetter(1)), found[-1])))
        return self._sizes[key]

    def _flow_size(self, flow: Flow, ranks: Iterable[int]) -> list[tuple[int, float, float, float]]:
        pipe, core, schedule = flow.pipe, flow.pipe.core, flow.schedule
        cut, shape = self.cut(pipe.pp, schedule), (pipe.pp, schedule.stages, pipe.micro_batches)
        sizes, tokens = [], self.tokens(core)
        for rank in ranks:
            flight = after_warmup(schedule.kind, shape, rank), flow.offload
            size, block = self.kept_by(core, flow.policy, cut[rank], flight)
            sizes.append((rank, size * tokens, self.logits(core) if cut[rank][1] else 0.0, block * tokens))
        return sizes

    def kept_by(self, core: Core, policy: int, cut: Cut, flight: Flight) -> tuple[float, float]:
        """Bytes per token of a rank with so many micro-batches in flight on each stage; of its largest block in full.

        Of a flight that offloads they are on the host, but for those of the block at work and of the one ahead of it.
        """
        (kept, steps, blocks), (stages, _, distinct), (counts, offload) = self._kept(core), cut, flight
        upto, block, size = kept[policy], max([blocks[number] for number in distinct], default=0.0), 0.0
        for (start, end), count in zip(stages, counts, strict=False):
            size += count * (upto[end] - upto[start])
        if offload:
            size = min(size, 2 * max([max(steps[policy][start:end], default=0.0) for start, end in stages]))
        return size + (block if policy else 0.0), block

    def logits(self, core: Core) -> float:
        """Bytes of the logits at the peak of the loss."""
        width = core.width
        return self._num_logits(core) * (self.space.stack.logit_bytes if width < 4 else 4 * width)

    def _num_logits(self, core: Core) -> float:
        return self.tokens(core) * self.space.profile.vocab / (core.tp if core.loss else 1)

    def tokens(self, core: Core) -> float:
        """Tokens of a micro-batch on a rank."""
        return core.samples * self.space.workload.seq_len / core.cp

    def plan_size(self, flow: Flow, spread: Spread, kept: Kept) -> float:
        """Device memory in the loss or in a backward pass, on the ranks of `kept`, which is the `flow_size`."""
        return self._plan_size(flow, spread, kept, [self.states(flow, spread, rank) for rank, *_ in kept])

    def plan_sizes(self, flow: Flow, spreads: Sequence[Spread], kept: Kept) -> Iterator[tuple[float, float]]:
        """For each spread of the flow's pipe: `plan_size`, and bytes of the states of the rank that has fewest."""
        core, pipe = flow.pipe.core, flow.pipe
        several = pipe.micro_batches > 1
        key = (core.tp, core.cp, core.ep, core.precision, pipe.data, pipe.pp, several, *cut_as(flow.schedule))
        for rank, *_ in kept:
            if (*key, rank) not in self._spread_states:
                self._spread_states[*key, rank] = [self.states(flow, spread, rank) for spread in spreads]
        tables = [self._spread_states[*key, rank] for rank, *_ in kept]
        for spread, *states in zip(spreads, *tables, strict=True):
            yield self._plan_size(flow, spread, kept, states), min(held + grads for held, grads, _ in states)

    def _plan_size(self, flow: Flow, spread: Spread, kept: Kept, states: Sequence[tuple[float, float, float]]) -> float:
        pipe, core = flow.pipe, flow.pipe.core
        accumulates = pipe.micro_batches > 1 or self.space.stack.master
        most = 0.0
        for (_, size, logits, block), (held, gradients, gathered) in zip(kept, states, strict=True):
            if spread.offloaded:
                held = 0.0
                once = pipe.micro_batches > 1 and (spread.zero < 2 or pipe.pp > 1)
                gradients *= once and self.space.stack.keeps_shards
            both = gradients + size if accumulates else gradients + block
            loss = size + logits + gradients if accumulates else size + logits
            most = max(most, held + gathered + max(loss, both))
        groups = (pipe.pp > 1) + (spread.dp_replicate > 1) + (spread.dp_shard * core.cp > 1) + (core.tp > 1)
        return self.on_device(most) + COMMUNICATOR * (groups + (core.ep > 1) + (core.world > 1))

    def on_device(self, allocated: float) -> float:
        """Device memory for so many bytes of live tensors, were they in the allocator without holes."""
        return self.space.cluster.device.context + allocated

    def states(self, flow: Flow, spread: Spread, rank: int = 0) -> tuple[float, float, float]:
        """(weights and optimizer state, gradients, gathered parameters): bytes on a rank."""
        core, cut = flow.pipe.core, (flow.pipe.pp, flow.pipe.micro_batches > 1, *cut_as(flow.schedule))
        shards = spread.dp_shard * core.cp if spread.zero else 1
        key = (core.tp, core.ep, core.precision, shards, spread.zero, *cut)
        found = self._states.get((key, rank))
        if found is None:
            division, stack = self._division(flow, spread, key), self.space.stack
            stages = division.ranks[rank]
            terms = dict(states_of(division, stages, stack))
            gradients = terms.pop("gradients")
            found = sum(terms.values()), gradients, gathered_of(division, stages, stack)
            self._states[key, rank] = found
        return found

    def _division(self, flow: Flow, spread: Spread, key: tuple[object, ...]) -> Division:
        """Of all flows and spreads with one key: what decides on their states."""
        if key not in self._divisions:
            plan = Plan(
                axes=spread.axes, zero=spread.zero, batch=Batch(micro_batches=flow.pipe.micro_batches),
                schedule=flow.schedule, precision=flow.pipe.core.precision,
            )  # fmt: skip
            self._divisions[key] = Division(self.space.profile, plan, self.space.workload, self.space.stack.cut)
        return self._divisions[key]

    def _owned(self, spread: Spread, dense: float, experts: float) -> float:
        """Parameters that a rank updates, of so many."""
        core = spread.pipe.core
        shards = spread.dp_shard * core.cp if spread.zero else 1
        pool = max(1, shards * core.tp // core.ep) if core.ep > 1 and spread.zero else shards
        return dense / shards + experts / pool

    @cached_property
    def _params(self) -> tuple[float, float]:
        """(dense, expert) parameters of the model."""
        experts = float(sum(block.expert_params * count for block, count in self._blocks))
        return self.space.profile.num_params - experts, experts

    def _local(self, pipe: Pipe) -> tuple[float, float]:
        """(dense, expert) parameters of an average rank, before data axes shard them."""
        core, (dense, experts) = pipe.core, self._params
        return dense / core.tp / pipe.pp, experts / (core.ep if core.ep > 1 else core.tp) / pipe.pp

    def _kept(self, core: Core) -> KeptBytes:
        if core not in self._saved:
            space, full, how = self.space, self._full(core), self.space.saving(core)
            less = {
                mode: {
                    id(block): kept_bytes(block, 0, Plan(recompute=Recompute(mode=mode)), how)
                    for block, _ in self._blocks
                }
                for mode in ("ops", "blocks")
            }
            keys = [id(block) for block in space.profile.blocks]
            steps = []
            for recompute, marks in zip(space.recomputes, self._marks, strict=True):
                part = less["ops" if recompute.mode == "ops" else "blocks"]
                steps.append([part[key] if on else full[key] for key, on in zip(keys, marks, strict=True)])
            upto = [tuple(accumulate(sizes, initial=0.0)) for sizes in steps]
            self._saved[core] = upto, steps, [full[id(block)] for block, _ in self._blocks]
        return self._saved[core]

    def _full(self, core: Core) -> dict[int, float]:
        """Bytes per token that each distinct block keeps of a micro-batch, by its `id`."""
        return {id(block): saved_bytes(block, self.space.saving(core)) for block, _ in self._blocks}


def cut_as(schedule: Schedule) -> tuple[int, bool]:
    """What a schedule decides of where stages lie."""
    return schedule.stages, schedule.kind in V_SHAPED
