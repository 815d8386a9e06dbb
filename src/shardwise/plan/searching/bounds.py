"""Bounds of what no plan of a family can beat: they say which families need no full estimate.

Each is below the estimate of every plan of its family (tested), and made of the estimators' kernels and collectives.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, repeat
from math import inf, log2

from shardwise.plan.costs.hosts import host_rate, hosted_times
from shardwise.plan.costs.links import Group, collective_time
from shardwise.plan.frozen import gather_copied, gathered_share
from shardwise.plan.memory_terms.states import states_of
from shardwise.plan.plan import V_SHAPED, ZERO_BUBBLE, Axes, Plan, Schedule, Zero
from shardwise.plan.ranks.activations import GATHERED
from shardwise.plan.ranks.division import Division
from shardwise.plan.rows.pipeline import micro_batches_fit
from shardwise.plan.searching.bounds_sizes import SizeBounds
from shardwise.plan.searching.bounds_work import RankWork, Upto, Work, rank_works, stage_costs
from shardwise.plan.searching.families import Core, Flow, Pipe, Spread
from shardwise.plan.searching.keys import cut_as, sent_as
from shardwise.plan.time_terms.datatime import Part, Rounds, Sends, Wire, exposed_time, sends_of, turns_of
from shardwise.plan.time_terms.loading import loading_time
from shardwise.plan.timing import STRAGGLERS, fixed_time, loss_time, schedule_time
from shardwise.plan.updating import (
    OWN,
    RULES,
    is_muon,
    matrices,
    newton_schulz_time,
    rule_time,
    state_bytes,
    update_bytes,
)
from shardwise.plan.workload import STATE_BYTES

ENDLESS = 1e18
"""Seconds of a pass behind which all hides that can."""


@dataclass(frozen=True)
class Bounds(SizeBounds):
    """The bounds of a question: those of time here, those of memory in `SizeBounds`."""

    _sends: dict[tuple[object, ...], Sends] = field(default_factory=dict)
    _least_sends: dict[tuple[object, ...], dict[Zero, Sends]] = field(default_factory=dict)
    _rules: dict[tuple[object, ...], float] = field(default_factory=dict)
    _loads: dict[tuple[int, int], float] = field(default_factory=dict)
    _updates: dict[tuple[object, ...], float] = field(default_factory=dict)
    _shards: dict[tuple[object, ...], float] = field(default_factory=dict)
    _rank_works: dict[tuple[object, ...], list[RankWork]] = field(default_factory=dict)
    _groups: dict[tuple[int, int, bool], int] = field(default_factory=dict)
    _agains: dict[tuple[Work, int], Upto] = field(default_factory=dict)

    def core_time(self, core: Core, more: float = 0.0) -> float:
        """Below the step of all plans with this core: its blocks, evenly on all ranks, without a bubble; and `more`.

        And no less than data takes to be loaded.
        """
        groups = core.world // (core.tp * core.cp)
        passes = self.space.workload.global_batch / core.samples
        seconds = self._alone(core, self.work(core)) * passes / groups + self._orthogonal / core.world
        return max(
            (seconds + more + fixed_time(core.world, self.space.stack)) * self.stragglers, self._loading(core, groups)
        )

    def _alone(self, core: Core, work: Work) -> float:
        """Below a micro-batch through blocks and head on one pipeline rank, without recompute and loss."""
        return work.busy[-1] + work.head - min(work.lag, work.head + 2 * self._loss(core))

    def fitting_time(self, core: Core, limit: float) -> float:
        """Below the step of all plans with this core in `limit` bytes per device, by where states have room."""
        here, there = (Pipe(core, 1, 0, 0, offloaded) for offloaded in (False, True))
        where = [here] if self._held(core) <= limit else []
        is_faster = not where or self._least_update(there, 1) < self._least_update(here, 1)
        where += [there] if self.space.can_offload and is_faster else []
        return min((self.pipe_time(pipe, 0) for pipe in where), default=inf)

    def _held(self, core: Core) -> float:
        """Device memory that no rank is without: a shard of all states; `tp` divides gradients that data axes leave."""
        if (key := (core.precision, core.world)) not in self._shards:
            space, tables = self.space, []
            for world in (core.world, 1):
                plan = Plan(axes=Axes(dp_shard=world), zero=3 if world > 1 else 0, precision=core.precision)
                division = Division(space.profile, plan, space.workload, space.stack.cut)
                tables.append(states_of(division, division.ranks[0], space.stack))
            gradients = min(tables[0].pop("gradients"), tables[1]["gradients"] / core.world)
            self._shards[key] = self.on_device(sum(tables[0].values()) + gradients)
        return self._shards[key]

    def pipe_time(self, pipe: Pipe, policy: int, data: float = 0.0) -> float:
        """Below the step of all plans with this pipe's core, where its states are, so many pipeline ranks or more.

        As `core_time`, with the loss, what the policy adds, the host's part, the optimizer's, and `data`, the seconds
        of data axes. Samples may be loaded behind all of that.
        """
        core, pp = pipe.core, pipe.pp
        stack, again, batch = self.space.stack, self.work(core).again[policy], self.space.workload.global_batch
        rounds = batch * core.tp * core.cp / (core.samples * core.world)
        host = stack.micro_host * (rounds * pp if pp > 1 or not stack.scans else 1) + stack.fill_host * (pp - 1)
        update = self._least_update(pipe, -(-batch * core.tp * core.cp * pp // (core.samples * core.world)))
        loss, ends = 2 * self._loss(core), host + update + data
        seconds = self.core_time(core, (loss + again) * rounds + ends)
        if pp > 1:  # a micro-batch passes all stages
            work = self.work(core)
            through = work.busy[-1] + work.head + loss + again - work.weights[-1] - work.head_weight
            seconds = max(seconds, (through + ends + fixed_time(core.world, stack)) * self.stragglers)
        return max(seconds, self._loading(core, core.world // (core.tp * core.cp * pp)))

    def least_time(self, flow: Flow) -> float:
        """Below the step of all plans of a flow."""
        core, pipe = flow.pipe.core, flow.pipe
        seconds, *passes = self.flow_time(flow)
        seconds += self._least_update(pipe, pipe.micro_batches) + self.least_data(flow, (passes[0], passes[1]))
        return max(seconds * self.stragglers, self._loading(core, pipe.data))

    def _least_update(self, pipe: Pipe, count: int) -> float:
        """Below the optimizer's part of a step of `count` micro-batches or more; without stragglers.

        No rank holds less than a shard of everything.
        """
        key = (pipe.core.world, count, pipe.offloaded, pipe.core.precision)
        if key not in self._updates:
            dense, experts = (params / pipe.core.world for params in self._params)
            self._updates[key] = self._update_of(dense, experts, pipe, count)
        return self._updates[key]

    @cached_property
    def stragglers(self) -> float:
        """What a step takes with the slowest nodes, over what it takes with equal ones."""
        return 1 + STRAGGLERS * log2(self.space.cluster.nodes)

    def flow_time(self, flow: Flow, *, simulates: bool = False) -> tuple[float, float, float]:
        """(step without data axes and stragglers; most forward, most backward seconds of a rank and micro-batch).

        The rank at place r starts when a micro-batch has passed the first stages of the ranks before it, and ends that
        long before the step does, where a backward pass is not split; where it is, forwards count alone. `simulates`:
        and there no less than the schedule's own table takes.
        """
        pipe, work, stack = flow.pipe, self._work(flow), self.space.stack
        again, count, loss = work.again[flow.policy], pipe.micro_batches, self._loss(pipe.core)
        step = fixed_time(pipe.core.world, stack) + stack.fill_host * (pipe.pp - 1)
        step += self._offloaded(flow) if flow.offload else 0.0
        step += self._orthogonal / pipe.core.world  # some rank has its share of the matrices, at least
        step += stack.micro_host * stack.starts(count, flow.schedule.stages if pipe.pp > 1 else 0)
        if pipe.pp == 1:
            one = work.busy[-1] + work.head
            step -= (one - self._alone(pipe.core, work)) * count
            forward, backward = one * work.most + loss, one * (1 - work.least) + again + loss
            return (one + 2 * loss + again) * count + step, forward, backward
        path = before = total = forward = backward = slowest = 0.0
        split, send = flow.schedule.kind in ZERO_BUBBLE, self._send(flow)
        cut = self.cut(pipe.pp, flow.schedule)
        for rank, (_, last, _) in zip(self._ranks(flow), cut, strict=True):
            own = loss if last else 0.0
            whole = rank.busy + rank.again + 2 * own
            path, slowest, total = max(path, whole * count + before), max(slowest, whole), total + whole
            before += rank.first_forward if split else rank.first + rank.first_again
            before += send if split else 2 * send
            forward = max(forward, rank.busy * work.most + own)
            backward = max(backward, rank.busy * (1 - work.least) + rank.again + own)
        # one micro-batch passes all stages, the others wait for the last of them
        start = max(start for stages, *_ in cut for start, _ in stages)
        end = work.busy[-1] - work.busy[start] + work.head + 2 * loss
        if split:  # gradients of weights can wait
            total -= work.weights[-1] + work.head_weight
            end -= work.weights[-1] - work.weights[start] + work.head_weight
        hops = pipe.pp * flow.schedule.stages - 1 - (flow.schedule.kind in V_SHAPED)  # where a V turns, nothing is sent
        path = max(path, total + (count - 1) * end + 2 * hops * send)
        path += 2 * send * max(0, count - 9 * pipe.pp) * (flow.schedule.kind == "1f1b")  # as `schedule_time` adds them
        if simulates and split:
            path = max(path, self._simulated(flow, slowest, send))
        return path + step, forward, backward

    def _simulated(self, flow: Flow, slowest: float, send: float) -> float:
        """Seconds of all micro-batches by the schedule's own table, as the estimate runs it; 0: it has another rule."""
        pipe, kind, turns = flow.pipe, flow.schedule.kind, flow.schedule.stages
        pp, count = pipe.pp, pipe.micro_batches
        if not micro_batches_fit(kind, pp, count):
            return 0.0
        work, loss = self._work(flow), self._loss(pipe.core)
        costs = stage_costs(
            work, self._again(work, flow.policy), self._marks[flow.policy], self.cut(pp, flow.schedule), loss
        )
        return schedule_time(kind, (pp, turns, count), costs, slowest, send)

    def _send(self, flow: Flow) -> float:
        """Seconds of what a stage gives the next one for a micro-batch, and compute does not hide."""
        pipe, core, stack = flow.pipe, flow.pipe.core, self.space.stack
        if not micro_batches_fit(flow.schedule.kind, pipe.pp, pipe.micro_batches):
            return 0.0  # these are priced by another rule
        least = min(block.width + block.beside for block in self.space.profile.blocks)
        size = self.tokens(core) * least * core.width / (core.tp if core.sequence or stack.splits_sends else 1)
        group = Group(pipe.pp, core.world // pipe.pp)
        return collective_time("send", size, group, self.space.cluster, stack.network) * (1 - stack.overlap_pipeline)

    def _loss(self, core: Core) -> float:
        """Seconds of the cross entropy of a micro-batch, each way."""
        return loss_time(self._num_logits(core), self.space.cluster, self.space.stack)

    def _offloaded(self, flow: Flow) -> float:
        """Seconds of saved tensors on their way to the host and back that compute cannot hide."""
        pipe, stack, work, ranks = flow.pipe, self.space.stack, self._work(flow), self._ranks(flow)
        upto, most, hides = self.kept(pipe.core)[0][flow.policy], 0.0, stack.hides_copies
        for rank, (stages, last, _) in zip(ranks, self.cut(pipe.pp, flow.schedule), strict=True):
            own = self._loss(pipe.core) if last else 0.0
            moved = sum([upto[end] - upto[start] for start, end in stages]) * self.tokens(pipe.core)
            passes = rank.busy * work.most + own, rank.busy * (1 - work.least) + rank.again + own
            one_way = moved * stack.offloads_blocks / self.space.cluster.host_bandwidth
            most = max(most, sum([max(0.0, one_way - hides * each) for each in passes]))
        return most * pipe.micro_batches

    def plan_time(self, flow: Flow, spread: Spread, family: tuple[float, float, float] | None = None) -> float:
        """With what data axes send and compute cannot hide, and the update; `family`: the `flow_time`."""
        (seconds, forward, backward), pipe = family or self.flow_time(flow), flow.pipe
        seconds += self._update_of(*self._owned(spread), pipe, pipe.micro_batches)
        seconds += self._exposed(flow, spread.zero, self._sent(spread), (forward, backward)) + self._rule(flow, spread)
        seconds += self._copied(pipe, spread.zero, spread.dp_shard)
        return max(seconds * self.stragglers, self._loading(pipe.core, pipe.data))

    def least_data(self, flow: Flow, passes: tuple[float, float] | None = None) -> float:
        """Seconds of data axes, and of the optimizer's rule on them, that no spread of a flow is without.

        `passes`: a rank's longest forward and backward pass; None: of all flows of the pipe.
        """
        found = inf
        for zero, sent in self._least_sent(flow.pipe).items():
            copied = self._copied(flow.pipe, zero, flow.pipe.data)
            if passes is None:
                found = min(found, self._exposed(flow, zero, sent, (ENDLESS, ENDLESS)) + copied)
            elif not self.space.refuses(flow, zero):
                found = min(found, self._exposed(flow, zero, sent, passes) + self._least_rule(flow, zero) + copied)
        return found if found < inf else 0.0

    def _copied(self, pipe: Pipe, zero: Zero, shards: int) -> float:
        """Seconds in which an average rank without a peer copies what `fully_shard` gathers, if so many shard it."""
        core, device, work = pipe.core, self.space.cluster.device, self.space.workload
        moved = gather_copied(work, self.space.stack, core.width)
        if core.world == 1 and not zero:  # or casts
            moved = min(moved, self.space.stack.cast_copies * pipe.micro_batches * work.trained)
        if (zero and shards * core.cp > 1) or not (zero or core.precision in GATHERED):
            return 0.0
        return moved * sum(self._local(pipe)) / (device.bandwidth * device.stream)

    def _exposed(self, flow: Flow, zero: Zero, sends: Sends, passes: tuple[float, float]) -> float:
        """What is sent, less what hides behind the forward and the backward pass of a micro-batch."""
        pipe, groups = flow.pipe, self._most_groups(flow.pipe.pp, flow.schedule)
        rounds = Rounds(zero, zero == 3, pipe.micro_batches, pipe.pp, turns_of(pipe.pp, flow.schedule))
        return exposed_time(rounds, sends, passes, self.space.stack, waits=self._blocks_of(pipe.pp), groups=groups)[0]

    def _most_groups(self, pp: int, schedule: Schedule) -> int:
        """Groups of `fully_shard` on the rank that has most blocks."""
        key = (pp, *cut_as(schedule))
        if key not in self._groups:
            held = (stages for stages, *_ in self.cut(pp, schedule))
            self._groups[key] = 1 + max(sum(end - start for start, end in stages) for stages in held)
        return self._groups[key]

    def _update_of(self, dense: float, experts: float, pipe: Pipe, count: int) -> float:
        """Seconds of the optimizer for so many parameters of a rank, and of what an offloaded state moves."""
        cluster, work, stack = self.space.cluster, self.space.workload, self.space.stack
        each, every = (update_bytes(state, stack, pipe.core.precision) for state in self._state_bytes)
        traffic = (dense * each + experts * every) * work.trained * self.space.profile.trained
        if pipe.offloaded:
            # whatever `zero` is: below 3 least moves
            added = (dense + experts) * sum(hosted_times(work, (0, count), stack, cluster, pipe.core.world))
            return traffic / host_rate(cluster, pipe.core.world) + added
        return traffic / (cluster.device.bandwidth * cluster.device.stream)

    def _work(self, flow: Flow) -> Work:
        return self.work(flow.pipe.core, compiled=self.space.compiles_flow(flow))

    def _ranks(self, flow: Flow) -> list[RankWork]:
        """What a micro-batch takes of each rank of the pipeline."""
        work, policy = self._work(flow), flow.policy
        key = (work, flow.pipe.pp, *cut_as(flow.schedule), policy)
        if key not in self._rank_works:
            self._rank_works[key] = rank_works(work, self._again(work, policy), self.cut(flow.pipe.pp, flow.schedule))
        return self._rank_works[key]

    def _again(self, work: Work, policy: int) -> Upto:
        """Seconds that a policy adds, before each block."""
        if (work, policy) not in self._agains:
            one = work.repeats[self.space.recomputes[policy].mode == "ops"]
            blocks = zip(self.space.profile.blocks, self._marks[policy], strict=True)
            self._agains[work, policy] = tuple(accumulate((one[id(b)] if on else 0.0 for b, on in blocks), initial=0.0))
        return self._agains[work, policy]

    def _rule(self, flow: Flow, spread: Spread) -> float:
        """Seconds of the optimizer's rule that `flow_time` does not have."""
        if not self._has_rule:
            return 0.0
        key = (sent_as(flow.pipe), *cut_as(flow.schedule), spread.dp_replicate, spread.dp_shard, spread.zero)
        if key not in self._rules:
            space, core = self.space, flow.pipe.core
            plan = Plan(axes=spread.axes, zero=spread.zero, schedule=flow.schedule, precision=core.precision)
            division = Division(space.profile, plan, space.workload, space.stack.cut)
            whole = sum(rule_time(division, space.cluster, space.stack))
            self._rules[key] = max(0.0, whole - self._orthogonal / core.world)
        return self._rules[key]

    def _least_rule(self, flow: Flow, zero: Zero) -> float:
        """The least of all spreads with such a `zero`."""
        if not self._has_rule:
            return 0.0
        key = (sent_as(flow.pipe), *cut_as(flow.schedule), flow.pipe.data, zero)
        if key not in self._rules:
            spreads = (spread for spread in self.space.spreads(flow.pipe) if spread.zero == zero)
            self._rules[key] = min(self._rule(flow, spread) for spread in spreads)
        return self._rules[key]

    @cached_property
    def _has_rule(self) -> bool:
        return self.space.workload.optimizer in RULES and self.space.stack.name in OWN

    @cached_property
    def _orthogonal(self) -> float:
        """Seconds of Muon's iterations of the whole model, at least; 0: another optimizer."""
        space = self.space
        if not is_muon(space.workload, space.stack):
            return 0.0
        sums = []
        for precision in space.precisions:
            plan = Plan(precision=precision)
            found = ((matrix, count) for block, count in self._blocks for matrix in matrices(block))
            sums.append(sum(newton_schulz_time(m, plan, space.cluster, space.stack) * n for m, n in found))
        return min(sums)

    def _loading(self, core: Core, data: int) -> float:
        """Seconds in which a node's loaders make the samples of so many data ranks."""
        if (core.world, data) not in self._loads:
            plan, space = Plan(axes=Axes(dp_shard=data, tp=core.world // data)), self.space
            seconds = loading_time(Division(space.profile, plan, space.workload), space.cluster)
            self._loads[core.world, data] = seconds * self.stragglers
        return self._loads[core.world, data]

    def _blocks_of(self, pp: int) -> int:  # at least, on the rank with most parameters
        return max(len(self.space.profile.blocks) // pp - (pp > 1), 0)

    def _least_sent(self, pipe: Pipe) -> dict[Zero, Sends]:
        """Of each `zero` the least of all spreads, each way by itself."""
        key = sent_as(pipe), pipe.data, pipe.offloaded
        if key not in self._least_sends:
            found = self._least_sends[key] = {}
            for spread in self.space.spreads(pipe):
                found[spread.zero] = Sends._make(map(min, self._sent(spread), found.get(spread.zero, repeat(inf))))
        return self._least_sends[key]

    def _sent(self, spread: Spread) -> Sends:
        """Of an average rank."""
        pipe, core, profile = spread.pipe, spread.pipe.core, self.space.profile
        key = (sent_as(pipe), spread.dp_replicate, spread.dp_shard, spread.zero)
        if key not in self._sends:
            plan = Plan(axes=spread.axes, zero=spread.zero, precision=core.precision)
            (dense, experts), shards = self._local(pipe), core.cp * spread.dp_shard if spread.zero else 1
            tied = profile.vocab * profile.dim if profile.tied else 0
            ends = min(dense, (profile.embedding + profile.head.params - tied) / core.tp)
            apart = experts if core.ep > 1 else 0.0
            packed = gathered_share(profile, self.space.workload.packed, core.width)  # and of ends, at least
            parts = (
                Part(
                    "data", dense - ends + experts - apart, max(self._blocks_of(pipe.pp), 1), 1, shards, packed=packed
                ),
                Part("data", ends, 1, 1, shards, True, packed),
                Part("expert_data", apart, 1, 1, max(1, shards * core.tp // core.ep), packed=packed),
            )
            self._sends[key] = sends_of(
                Wire(plan, self.space.stack, self.space.cluster, parts, self.space.workload.trained)
            )
        return self._sends[key]

    def _owned(self, spread: Spread) -> tuple[float, float]:
        """(dense, expert) parameters that an average rank updates."""
        core, (dense, experts) = spread.pipe.core, self._local(spread.pipe)
        shards = spread.dp_shard * core.cp if spread.zero else 1
        pool = max(1, shards * core.tp // core.ep) if core.ep > 1 and spread.zero else shards
        return dense / shards, experts / pool

    @cached_property
    def _params(self) -> tuple[float, float]:
        """(dense, expert) parameters of the model."""
        experts = float(sum(block.expert_params * count for block, count in self._blocks))
        return self.space.profile.num_params - experts, experts

    @cached_property
    def _state_bytes(self) -> tuple[float, float]:
        """Bytes of optimizer state per (dense, expert) parameter of the whole model, on average, and at least."""
        (dense, experts), stack = self._params, self.space.stack
        division = Division(self.space.profile, Plan(precision="bf16-pure"), self.space.workload)
        mean = state_bytes(division, division.ranks[0], stack)
        every = STATE_BYTES["adamw"] if is_muon(division.workload, stack) else mean
        return ((dense + experts) * mean - experts * every) / max(dense, 1.0), every

    def _local(self, pipe: Pipe) -> tuple[float, float]:
        """(dense, expert) parameters of an average rank, before data axes shard them."""
        core, (dense, experts) = pipe.core, self._params
        return dense / core.tp / pipe.pp, experts / (core.ep if core.ep > 1 else core.tp) / pipe.pp
