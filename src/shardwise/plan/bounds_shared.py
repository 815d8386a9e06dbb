"""Tighter bounds: of kernels that cores share, and of the states that even the best spread of a family keeps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from operator import add, le

from shardwise.plan.bounds import Bounds, Kept, KeptBytes
from shardwise.plan.bounds_work import Work
from shardwise.plan.division import Division
from shardwise.plan.families import Core, Flow, Pipe, Spread
from shardwise.plan.loading import loading_time
from shardwise.plan.memory import WORKSPACE
from shardwise.plan.plan import V_SHAPED, Axes, Plan
from shardwise.plan.updating import OWN, matrices, newton_schulz_time

SpreadsOf = Callable[[Pipe], list[Spread]]


Floor = tuple[float, ...]
"""States of a spread: bytes of each rank of a `Kept`, with gradients where they are there before the first backward."""


@dataclass(frozen=True)
class SharedBounds(Bounds):
    """Bounds by what a core's kernels see: loss parallelism and the number of devices are not in it."""

    host: float = math.inf
    """Bytes of host memory per device."""
    _shared: dict[tuple[object, ...], Work] = field(default_factory=dict)
    _shared_kept: dict[tuple[object, ...], KeptBytes] = field(default_factory=dict)
    _core_sizes: dict[tuple[object, ...], float] = field(default_factory=dict)
    _floors: dict[tuple[object, ...], list[Floor]] = field(default_factory=dict)

    _loads: dict[tuple[int, int], float] = field(default_factory=dict)

    # ------------------------------------------------------------ time

    def core_time(self, core: Core, more: float = 0.0) -> float:
        """As `Bounds.core_time`, with Muon's iterations, and no faster than data is loaded."""
        groups = core.world // (core.tp * core.cp)
        fixed = self._orthogonal / core.world * self.stragglers
        return max(super().core_time(core, more) + fixed, self._loading(core, groups))

    def pipe_time(self, core: Core, policy: int, pp: int, limit: float) -> float:
        """Below the step of all plans with this core and policy, and so many pipeline ranks or more.

        As `core_time`, with the loss, what the policy adds, the host's part, and the optimizer's in `limit` bytes per
        device. Data may be loaded behind all of that.
        """
        stack, again, batch = self.space.stack, self.work(core).again[policy], self.space.workload.global_batch
        rounds = batch * core.tp * core.cp / (core.samples * core.world)
        host = stack.micro_host * rounds * pp + stack.fill_host * (pp - 1)
        update = self.least_update(core, -(-batch * core.tp * core.cp * pp // (core.samples * core.world)), limit)
        seconds = self.core_time(core, (2 * self._loss(core) + again) * rounds + host + update)
        return max(seconds, self._loading(core, core.world // (core.tp * core.cp * pp)))

    def flow_time(self, flow: Flow) -> tuple[float, float, float]:
        """As `Bounds.flow_time`, with Muon's iterations: some rank has its share of the matrices, at least."""
        seconds, forward, backward = super().flow_time(flow)
        return seconds + self._orthogonal / flow.pipe.core.world, forward, backward

    def least_time(self, flow: Flow, limit: float) -> float:
        """Below the step of all plans of a flow, with `limit` bytes per device."""
        core, pipe = flow.pipe.core, flow.pipe
        seconds = self.flow_time(flow)[0] + self.least_update(core, pipe.micro_batches, limit)
        return max(seconds * self.stragglers, self._loading(core, pipe.data))

    def plan_time(self, flow: Flow, spread: Spread, family: tuple[float, float, float] | None = None) -> float:
        """As `Bounds.plan_time`, and no faster than data is loaded."""
        return max(super().plan_time(flow, spread, family), self._loading(flow.pipe.core, flow.pipe.data))

    @cached_property
    def _orthogonal(self) -> float:
        """Seconds of Muon's iterations of the whole model, at least; 0: another optimizer."""
        space = self.space
        if space.workload.optimizer != "muon" or space.stack.name not in OWN:
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

    def work(self, core: Core) -> Work:
        """What a core's kernels, and the communication inside of blocks, take."""
        found = self._works.get(core)
        if found is None:
            context = core.context if core.cp > 1 else ""
            key = (core.tp, core.cp, core.ep, core.samples, core.sequence, context, core.precision, core.float8)
            found = self._shared.get(key)
            if found is None:
                found = self._shared[key] = self._work(core)
            self._works[core] = found
        return found

    # ------------------------------------------------------------ memory

    def core_size(self, core: Core) -> float:
        """Below all its plans' device memory: one rank has the largest block in full, the last one logits and one."""
        key = (core.loss, core.samples, core.cp, *_kept_as(core))
        if key not in self._core_sizes:
            self._core_sizes[key] = super().core_size(core)
        return self._core_sizes[key]

    def leanest(self, core: Core) -> int:
        """Number of the recompute policy that keeps least."""
        kept = self._kept(core)[0]
        return min(range(len(kept)), key=lambda policy: kept[policy][-1])

    def _kept(self, core: Core) -> KeptBytes:
        if core not in self._saved:
            key = _kept_as(core)
            if key not in self._shared_kept:
                self._shared_kept[key] = super()._kept(core)
            self._saved[core] = self._shared_kept[key]
        return self._saved[core]

    def on_device(self, allocated: float) -> float:
        """Device memory for so many bytes of live tensors, were they in the allocator without holes."""
        stack = self.space.stack
        return super().on_device(allocated) + stack.context + (0.0 if stack.eager else WORKSPACE)

    def least_size(self, kept: Kept) -> float:
        """Device memory of a family: what it keeps, with no states."""
        return self.on_device(max(size + logits for _, size, logits, _ in kept))

    def family_size(
        self, flow: Flow, spreads: SpreadsOf, refused: tuple[int, ...], kept: Kept, *, offloads: bool = True
    ) -> float:
        """Device memory that a flow's plans need at least, over all its spreads.

        `spreads`: of a pipe; `refused`: each `zero` that the flow cannot have; `kept`: its `flow_size`; `offloads`:
        with states on the host too, where they may be there.
        """
        sizes, ranks = [size + logits for _, size, logits, _ in kept], tuple(rank for rank, *_ in kept)
        floors = self.floors_of(flow, spreads, refused, ranks, offloads=offloads)
        return self.on_device(min((max(map(add, sizes, floor)) for floor in floors), default=math.inf))

    def floors_of(
        self, flow: Flow, spreads: SpreadsOf, refused: tuple[int, ...], ranks: tuple[int, ...], *, offloads: bool = True
    ) -> list[Floor]:
        """Of each `zero`, the spread with most shards, which keeps least; on the device, and where it may be offloaded.

        And the one with fewest: a single shard is not gathered. Of them, those that no other is below.
        """
        core, pipe, schedule = flow.pipe.core, flow.pipe, flow.schedule
        several = pipe.micro_batches > 1
        cut = (pipe.pp, several, schedule.stages, schedule.kind in V_SHAPED)
        key = (core.tp, core.cp, core.ep, core.precision, pipe.data, *cut, ranks, refused, offloads)
        if key not in self._floors:
            ends: dict[int, tuple[Spread, Spread]] = {}
            for spread in (each for each in spreads(pipe) if each.zero not in refused):
                few, many = ends.get(spread.zero, (spread, spread))
                ends[spread.zero] = (
                    min(few, spread, key=lambda each: each.dp_shard),
                    max(many, spread, key=lambda each: each.dp_shard),
                )
            self._floors[key] = _lowest(
                floor
                for few, many in ends.values()
                for spread in dict.fromkeys((few, many))
                for floor in self._floor(flow, spread, ranks)[: 1 + offloads]
            )
        return self._floors[key]

    def _floor(self, flow: Flow, spread: Spread, ranks: tuple[int, ...]) -> list[Floor]:
        accumulates = flow.pipe.micro_batches > 1 or self.space.stack.master
        tables = [self.states(flow, spread, rank) for rank in ranks]
        floors = [tuple(held + grads * accumulates + ahead for held, grads, ahead in tables)]
        if self.space.offloads(spread) and min(held + grads for held, grads, _ in tables) <= self.host:
            several, pp = flow.pipe.micro_batches > 1, flow.pipe.pp
            once = self.space.stack.keeps_shards and several and (spread.zero < 2 or pp > 1)  # `accumulates_whole`
            floors.append(tuple(grads * once + ahead for _, grads, ahead in tables))
        return floors


def _lowest(floors: Iterable[Floor]) -> list[Floor]:
    """Without those that another is nowhere above."""
    found: list[Floor] = []
    for floor in dict.fromkeys(floors):
        if not any(all(map(le, other, floor)) for other in found):
            found = [other for other in found if not all(map(le, floor, other))] + [floor]
    return found


def _kept_as(core: Core) -> tuple[object, ...]:
    """What decides on the bytes per token that a core's blocks keep."""
    return core.tp, core.cp > 1, core.sequence, core.precision, core.float8
