"""Bounds of memory: what no plan of a family needs less of, on a device and on its host."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import add, itemgetter

from shardwise.model.profile import Block
from shardwise.plan.eager.kernels import inputs_of, sent_by
from shardwise.plan.hosting import on_node
from shardwise.plan.memory import COMMUNICATOR, WORKSPACE, gathered_of
from shardwise.plan.memory_terms.around import outside_step
from shardwise.plan.memory_terms.flights import Beside, beside_gradients
from shardwise.plan.memory_terms.holding import frees_last, least_gathered, outside_blocks, sending
from shardwise.plan.memory_terms.states import offloaded_of, states_of
from shardwise.plan.plan import ZERO_BUBBLE, Axes, Batch, Plan, Recompute, Schedule
from shardwise.plan.ranks.activations import is_recomputed
from shardwise.plan.ranks.division import Division
from shardwise.plan.schedule import after_warmup
from shardwise.plan.searching.bounds_kept import (
    Given,
    KeptBytes,
    Passes,
    bytes_kept,
    full_sizes,
    head_in,
    in_passes,
    kept_by,
    waits_at_loss,
)
from shardwise.plan.searching.bounds_work import Cut, Floor, Work, lowest, work_of
from shardwise.plan.searching.families import Core, Flow, Pipe, Spread
from shardwise.plan.searching.keys import cut_as, flow_as, kept_as, states_as
from shardwise.plan.searching.space import Space
from shardwise.plan.updating import OWN

Kept = tuple[tuple[int, float, float, float, float], ...]
"""Of some pipeline ranks: the rank, bytes of micro-batches in flight, of a block that is computed again beside them, of
what is there at the loss beside them (logits, or that block behind it), of its largest block in full."""
SpreadsOf = Callable[[Pipe], list[Spread]]
Filled = tuple[tuple[int, bool], ...]
"""Ranks, each with whether its gradients lie beside all micro-batches that it keeps at once."""


@dataclass(frozen=True)
class SizeBounds:
    """Bounds of memory of a question, and what bounds of time share with them.

    Caches are by what kernels see: loss parallelism and the number of devices are not in it.
    """

    space: Space
    host: float = math.inf
    """Bytes of host memory per device."""
    _works: dict[tuple[Core, bool], Work] = field(default_factory=dict)
    _saved: dict[tuple[Core, bool], KeptBytes] = field(default_factory=dict)
    _cuts: dict[tuple[int, int, bool], list[Cut]] = field(default_factory=dict)
    _states: dict[tuple[object, ...], tuple[float, float, float]] = field(default_factory=dict)
    _divisions: dict[tuple[object, ...], Division] = field(default_factory=dict)
    _sizes: dict[tuple[object, ...], Kept] = field(default_factory=dict)
    _shared: dict[tuple[object, ...], Work] = field(default_factory=dict)
    _shared_kept: dict[tuple[object, ...], KeptBytes] = field(default_factory=dict)
    _core_sizes: dict[tuple[object, ...], float] = field(default_factory=dict)
    _floors: dict[tuple[object, ...], list[Floor]] = field(default_factory=dict)
    _floors_alike: dict[tuple[object, ...], Floor] = field(default_factory=dict)
    _hosted: dict[tuple[object, ...], float] = field(default_factory=dict)
    _passes: dict[tuple[object, ...], Passes] = field(default_factory=dict)
    _around: dict[tuple[object, ...], float] = field(default_factory=dict)
    _of_batch: dict[tuple[object, ...], float] = field(default_factory=dict)
    _telling: dict[tuple[object, ...], tuple[int, ...]] = field(default_factory=dict)
    _spread_states: dict[tuple[object, ...], list[tuple[float, float, float]]] = field(default_factory=dict)

    def work(self, core: Core, *, compiled: bool = True) -> Work:
        """What a core's kernels, and the communication inside of blocks, take: of its plans that compile, if any do."""
        found = self._works.get((core, compiled))
        if found is None:
            context, stack = core.context if core.cp > 1 else "", self.space.stack_for(core, compiled=compiled)
            sizes = (core.tp, core.cp, core.ep, core.samples, core.sequence, core.precision, core.float8)
            key = (*sizes, context, stack.fused)
            found = self._shared.get(key)
            if found is None:
                found = self._shared[key] = work_of(core, stack, self.space, self._blocks, self._recomputed)
            self._works[core, compiled] = found
        return found

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

    def cut(self, pp: int, schedule: Schedule) -> list[Cut]:
        """For each rank the first and the end of each of its stages, whether it holds the head, and which blocks."""
        key = (pp, *cut_as(schedule))
        if key not in self._cuts:
            space = self.space
            plan = Plan(axes=Axes(pp=pp), schedule=schedule)
            numbers = {block: number for number, (block, _) in enumerate(self._blocks)}
            chain = [numbers[block] for block in space.profile.blocks]
            self._cuts[key] = [
                (
                    [(stage.start, stage.start + len(stage.blocks)) for stage in rank],
                    any(stage.last for stage in rank),
                    frozenset(n for stage in rank for n in chain[stage.start : stage.start + len(stage.blocks)]),
                )
                for rank in Division(space.profile, plan, space.workload, space.stack.cut).ranks
            ]
        return self._cuts[key]

    def core_size(self, core: Core) -> float:
        """Below all its plans' device memory: the largest block, or the last rank's logits."""
        key = (core.loss, core.samples, core.cp, *kept_as(core))
        if key not in self._core_sizes:
            blocks = [size * self.tokens(core) for size in full_sizes(self.space, core, self._blocks).values()]
            self._core_sizes[key] = self.on_device(max(*blocks, self.logits(core)))
        return self._core_sizes[key]

    def telling(self, pipe: Pipe, schedule: Schedule) -> tuple[int, ...]:
        """Ranks of a pipeline of which one needs most, often: the first, the one with most parameters, the last.

        Where gradients wait for the weights' part of backward passes, which they do more on later ranks, also the last
        one with most blocks.
        """
        core, waits = pipe.core, schedule.kind in ZERO_BUBBLE
        key = (core.tp, core.ep, pipe.pp, *cut_as(schedule), waits)
        if key not in self._telling:
            plan = Plan(axes=replace(core.axes, pp=pipe.pp), schedule=schedule)
            division = Division(self.space.profile, plan, self.space.workload, self.space.stack.cut)
            most = max(range(pipe.pp), key=lambda rank: division.whole(division.ranks[rank]))
            blocks = [sum(len(stage.blocks) for stage in rank) for rank in division.ranks]
            late = [max(range(pipe.pp), key=lambda rank: (blocks[rank], rank))] * waits
            self._telling[key] = tuple(dict.fromkeys((0, most, *late, pipe.pp - 1)))
        return self._telling[key]

    def flow_size(self, flow: Flow, every_rank: bool = False) -> Kept:
        """Bytes of micro-batches in flight on the `telling` ranks; `every_rank`: also where they are most of all."""
        pipe, key = flow.pipe, (*flow_as(flow), every_rank)
        if key not in self._sizes:
            ranks = self.telling(pipe, flow.schedule)
            found = self._flow_size(flow, range(pipe.pp) if every_rank else ranks)
            if every_rank:
                found = list(dict.fromkeys((max(found, key=itemgetter(1)), *(found[rank] for rank in ranks))))
            self._sizes[key] = tuple(found)
        return self._sizes[key]

    def _flow_size(self, flow: Flow, ranks: Iterable[int]) -> list[tuple[int, float, float, float, float]]:
        pipe, core, schedule = flow.pipe, flow.pipe.core, flow.schedule
        cut, shape = self.cut(pipe.pp, schedule), (pipe.pp, schedule.stages, pipe.micro_batches)
        sizes, tokens, tables = [], self.tokens(core), self._tables(flow)
        for rank in ranks:
            flight = after_warmup(schedule.kind, shape, rank), flow.offload
            size, again, block = (each * tokens for each in kept_by(tables, flow.policy, cut[rank], flight))
            waits = waits_at_loss(self.space, flow, cut[rank], flight[0]) * tokens
            logits = (self.logits(core) + waits) * cut[rank][1]
            sizes.append((rank, size, again, max(again, logits), block))
        return sizes

    def logits(self, core: Core) -> float:
        """Bytes of the logits at the peak of the loss, at least."""
        width, stack = core.width, self.space.stack
        per_logit = stack.logit_bytes if width < 4 else 4 * width
        per_logit -= width * (stack.name in OWN)  # a pipeline gives its output up
        return self._num_logits(core) * (per_logit - max(width, 4.0) * (stack.eager and core.loss))  # one copy less

    def _num_logits(self, core: Core) -> float:
        return self.tokens(core) * self.space.profile.vocab / (core.tp if core.loss else 1)

    def tokens(self, core: Core) -> float:
        """Tokens of a micro-batch on a rank."""
        return core.samples * self.space.workload.seq_len / core.cp

    def plan_size(self, flow: Flow, spread: Spread, kept: Kept) -> float:
        """Device memory in the loss or in a backward pass, on the ranks of `kept`, which is the `flow_size`."""
        return self._plan_size(flow, spread, kept, [self.states(flow, spread, rank) for rank, *_ in kept])

    def plan_sizes(self, flow: Flow, spreads: Sequence[Spread], kept: Kept) -> Iterator[float]:
        """`plan_size` for each spread of the flow's pipe."""
        core, pipe = flow.pipe.core, flow.pipe
        several = pipe.micro_batches > 1
        cut = (pipe.pp, several, *cut_as(flow.schedule))
        key = (core.tp, core.cp, core.ep, core.precision, pipe.data, pipe.offloaded, *cut)
        for rank, *_ in kept:
            if (*key, rank) not in self._spread_states:
                self._spread_states[*key, rank] = [self.states(flow, spread, rank) for spread in spreads]
        tables = [self._spread_states[*key, rank] for rank, *_ in kept]
        for spread, *states in zip(spreads, *tables, strict=True):
            yield self._plan_size(flow, spread, kept, states)

    def _plan_size(self, flow: Flow, spread: Spread, kept: Kept, states: Sequence[tuple[float, float, float]]) -> float:
        pipe, core = flow.pipe, flow.pipe.core
        accumulates = pipe.micro_batches > 1 or self.space.stack.master
        most = 0.0
        for (rank, size, again, beside, block), (held, gradients, gathered) in zip(kept, states, strict=True):
            if pipe.offloaded:
                once = pipe.pp > 1 or (spread.zero < 2 and pipe.micro_batches > 1)
                held, gradients = 0.0, gradients * (once and self.space.stack.keeps_shards)
            there = accumulates and self.beside(flow, rank) is None
            given = self._given(flow, spread, rank, (gradients, gathered))
            beside_block, alone = given.at_least(accumulates)
            both = max(alone, beside_block + (size + again if there else block))
            if accumulates and not there:
                both = max(both, in_passes(self.passes(flow, rank), again, given))
            loss = size + beside + gradients * there + gathered
            most = max(most, held + max(loss, both) + self.of_batch(flow, spread, rank))
        if self.space.stack.eager:  # or when a pipeline's step ends, but for the last micro-batch
            every = (pipe.micro_batches - 1) * self.tokens(core) * core.width * (pipe.pp > 1)
            for (rank, *_), (held, _, _) in zip(kept, states, strict=True):
                sent = every * sent_by(flow.schedule.kind, self.division(flow, spread).ranks[rank])
                end = sent + self.of_batch(flow, spread, rank) + held * (not pipe.offloaded)
                most = max(most, self.around(flow, spread, rank), end)
        groups = (pipe.pp > 1) + (spread.dp_replicate > 1) + (spread.dp_shard * core.cp > 1) + (core.tp > 1)
        return self.on_device(most) + COMMUNICATOR * (groups + (core.ep > 1) + (core.world > 1))

    def on_device(self, allocated: float) -> float:
        """Device memory for so many bytes of live tensors, were they in the allocator without holes."""
        stack, device = self.space.stack, self.space.cluster.device
        return device.context + allocated + stack.context + (0.0 if stack.eager else WORKSPACE)

    def least_size(self, kept: Kept) -> float:
        """Device memory of a family: what it keeps, with no states."""
        return self.on_device(max(size + beside for _, size, _, beside, _ in kept))

    def family_size(self, flow: Flow, spreads: SpreadsOf, refused: tuple[int, ...], kept: Kept) -> float:
        """Device memory that a flow's plans need at least, over all its spreads.

        `spreads`: of a pipe; `refused`: each `zero` that the flow cannot have; `kept`: its `flow_size`.
        """
        sizes = [size + beside for _, size, _, beside, _ in kept] + [block for *_, block in kept]
        sizes += [0.0] * len(kept)
        ranks = tuple((rank, self.beside(flow, rank) is None) for rank, *_ in kept)
        floors = self.floors_of(flow, spreads, refused, ranks)
        return self.on_device(min((max(map(add, sizes, floor)) for floor in floors), default=math.inf))

    def floors_of(self, flow: Flow, spreads: SpreadsOf, refused: tuple[int, ...], ranks: Filled) -> list[Floor]:
        """Of each `zero`, the spread with most shards, which keeps least; none that the host has no room for.

        And the one whose single shard is not gathered, if there is. Of them, those that no other is below.
        """
        core, pipe = flow.pipe.core, flow.pipe
        cut = (pipe.pp, pipe.micro_batches > 1, *cut_as(flow.schedule))
        key = (core.tp, core.cp, core.ep, core.precision, pipe.data, pipe.offloaded, *cut, ranks, refused)
        if key not in self._floors:
            ends: dict[tuple[int, bool], Spread] = {}
            for spread in spreads(pipe):
                if spread.zero not in refused:
                    single = spread.dp_shard * core.cp == 1
                    most = ends.get((spread.zero, single), spread)
                    ends[spread.zero, single] = max(most, spread, key=lambda each: each.dp_shard)
            self._floors[key] = lowest(
                self._floor(flow, spread, ranks)
                for spread in ends.values()
                if not pipe.offloaded or self.hosted(flow, spread) <= self.host
            )
        return self._floors[key]

    def beside(self, flow: Flow, rank: int) -> tuple[Beside, ...] | None:
        """`beside_gradients` of a rank; None: all are there beside as much as `flow_size` has."""
        pipe, schedule = flow.pipe, flow.schedule
        if pipe.pp == 1 or self.space.stack.name not in OWN:
            return None
        return beside_gradients(schedule.kind, (pipe.pp, schedule.stages, pipe.micro_batches), rank)

    def passes(self, flow: Flow, rank: int) -> Passes:
        """The same, in bytes."""
        key = (*flow_as(flow), rank)
        if key not in self._passes:
            core, cut, tables = flow.pipe.core, self.cut(flow.pipe.pp, flow.schedule)[rank], self._tables(flow)
            found = []
            for turn, alive, late, made in self.beside(flow, rank) or ():
                size, *_ = kept_by(tables, flow.policy, cut, (tuple(alive), flow.offload), late)
                size = (size + waits_at_loss(self.space, flow, cut, alive, late)) * self.tokens(core)
                logits = self.logits(core) if cut[1] and turn == head_in(cut) else 0.0
                found.append((size, logits, made, [number > 0 for number in alive]))
            self._passes[key] = tuple(found)
        return self._passes[key]

    def _floor(self, flow: Flow, spread: Spread, ranks: Filled) -> Floor:
        core, pipe, eager = flow.pipe.core, flow.pipe, self.space.stack.eager
        key = (states_as(flow, spread), ranks, pipe.offloaded, (core.cp, pipe.data) if eager else ())
        if key not in self._floors_alike:
            self._floors_alike[key] = self._floor_of(flow, spread, ranks)
        return self._floors_alike[key]

    def _floor_of(self, flow: Flow, spread: Spread, ranks: Filled) -> Floor:
        pipe, tables = flow.pipe, [self.states(flow, spread, rank) for rank, _ in ranks]
        waiting = [self.of_batch(flow, spread, rank) for rank, _ in ranks]
        tables = [(held, grads, ahead + more) for (held, grads, ahead), more in zip(tables, waiting, strict=True)]
        several = pipe.micro_batches > 1
        if pipe.offloaded:
            once = self.space.stack.keeps_shards and (pipe.pp > 1 or (spread.zero < 2 and several))
            tables = [(0.0, grads * once, ahead) for _, grads, ahead in tables]
        accumulates = several or self.space.stack.master
        loss, behind, alone = [], [], []
        for (rank, adds), (held, grads, ahead) in zip(ranks, tables, strict=True):
            least = self._given(flow, spread, rank, (grads, ahead)).at_least(accumulates)
            loss.append(held + grads * (accumulates and adds) + ahead)
            behind.append(held + least[0])
            alone.append(held + least[1])
        return (*loss, *behind, *alone)

    def _given(self, flow: Flow, spread: Spread, rank: int, sizes: tuple[float, float]) -> Given:
        """Of so many bytes of gradients and of gathered weights, which go by stage where kernels are eager."""
        parts, stack, once = self.division(flow, spread).parts, self.space.stack, flow.pipe.micro_batches == 1
        goes = stack.eager or (once and flow.pipe.pp > 1 and stack.name in OWN)  # see `passes_once`
        return Given(*sizes, parts[rank], goes=goes, by_block=spread.zero == 3)

    def hosted(self, flow: Flow, spread: Spread) -> float:
        """Below the bytes of host memory for each device that the states of such plans take, where they are there.

        Where processors compute, hosts and devices have one memory, which `around` and `plan_size` look at.
        """
        if self.space.stack.eager:
            return 0.0
        cluster, key = self.space.cluster, (flow.pipe.core.world, states_as(flow, spread))
        if key not in self._hosted:
            offloaded = offloaded_of(self.division(flow, spread), self.space.stack)
            self._hosted[key] = on_node(offloaded, flow.pipe.core.world, cluster.per_node)
        return self._hosted[key]

    def leanest(self, core: Core) -> int:
        """Number of the recompute policy that keeps least."""
        kept = self.kept(core)[0]
        return min(range(len(kept)), key=lambda policy: kept[policy][-1])

    def states(self, flow: Flow, spread: Spread, rank: int = 0) -> tuple[float, float, float]:
        """(weights and optimizer state, gradients, gathered parameters): bytes on a rank."""
        key = states_as(flow, spread)
        found = self._states.get((key, rank))
        if found is None:
            division, stack = self.division(flow, spread), self.space.stack
            gradients = (terms := dict(states_of(division, stages := division.ranks[rank], stack))).pop("gradients")
            if flow.pipe.micro_batches == 1:  # they come while a backward pass goes on
                gradients = min(gradients, sum(sending(division, stages, gradients, stack)))
            gathered = gathered_of(division, stages, stack, goes_back=not frees_last(stack))
            if stack.eager and spread.zero == 3:  # at the loss no block's are
                gathered = outside_blocks(division, stages) * flow.pipe.core.width
            ahead = least_gathered(division, stages, gathered, stack)
            found = self._states[key, rank] = sum(terms.values()), gradients, ahead
        return found

    def around(self, flow: Flow, spread: Spread, rank: int) -> float:
        """Bytes that a rank needs outside of steps, where they lie in the same memory: a save has its copy there."""
        key = (flow.pipe.core.world, states_as(flow, spread), rank)
        if key not in self._around:
            division, stack = self.division(flow, spread), self.space.stack
            stages = division.ranks[rank]
            phases = outside_step(division, stages, stack, states_of(division, stages, stack)).values()
            self._around[key] = max((sum(phase.values()) for phase in phases), default=0.0)
        return self._around[key]

    def of_batch(self, flow: Flow, spread: Spread, rank: int) -> float:
        """Bytes of the inputs of all micro-batches of a step on a rank."""
        core, pipe, work, stack = flow.pipe.core, flow.pipe, self.space.workload, self.space.stack
        if not stack.eager or stack.name not in OWN:
            return 0.0
        key = (core.cp, core.precision, pipe.data, pipe.pp, *cut_as(flow.schedule), rank)
        if key not in self._of_batch:
            tokens = work.global_batch * work.seq_len / (pipe.data * core.cp)
            self._of_batch[key] = tokens * inputs_of(self.division(flow, spread))
        return self._of_batch[key]

    def division(self, flow: Flow, spread: Spread) -> Division:
        """Of all flows and spreads that have the same states."""
        key = states_as(flow, spread)
        if key not in self._divisions:
            plan = Plan(
                axes=spread.axes, zero=spread.zero, batch=Batch(micro_batches=flow.pipe.micro_batches),
                schedule=flow.schedule, precision=flow.pipe.core.precision,
                recompute=Recompute(mode="blocks"),  # with which one process casts least at once
            )  # fmt: skip
            self._divisions[key] = Division(self.space.profile, plan, self.space.workload, self.space.stack.cut)
        return self._divisions[key]

    def _tables(self, flow: Flow) -> KeptBytes:
        return self.kept(flow.pipe.core, compiled=self.space.compiles_flow(flow))

    def kept(self, core: Core, *, compiled: bool = True) -> KeptBytes:
        """What a core's blocks keep: as little as those of any of its plans, or of those that do not compile."""
        if (core, compiled) not in self._saved:
            key = (*kept_as(core), compiled)
            if key not in self._shared_kept:
                self._shared_kept[key] = bytes_kept(self.space, core, self._blocks, self._marks, compiled=compiled)
            self._saved[core, compiled] = self._shared_kept[key]
        return self._saved[core, compiled]
