"""The space that `find_plan` searches: every value of every dial, from the work of a kernel to the states of a rank.

    Core (what a kernel sees) -> Pipe (stages) -> schedule and savings -> Spread (ranks and states) = a Plan

Nothing here knows a good plan. Whether a plan is legal is asked of the table of constraints, and of nobody else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import get_args

from shardwise.errors import UsageError
from shardwise.findings import nearest
from shardwise.hardware.cluster import Cluster
from shardwise.model.profile import Profile
from shardwise.model.spec import ModelSpec
from shardwise.plan.constraints import ROWS
from shardwise.plan.plan import (
    LOOPED,
    SCHEDULES,
    V_SHAPED,
    ZERO_BUBBLE,
    Axes,
    Batch,
    Context,
    ContextKind,
    Float8,
    Float8Kind,
    Offload,
    Plan,
    PrecisionKind,
    Recompute,
    Schedule,
    ScheduleKind,
    Tensor,
    Zero,
)
from shardwise.plan.ranks.activations import Saving, saving_of
from shardwise.plan.ranks.stages import loops_of
from shardwise.plan.repair import Case, Hit, Read, Row, divisors
from shardwise.plan.rows.pipeline import micro_batches_fit
from shardwise.plan.searching.families import Core, Flow, Pipe, Spread
from shardwise.plan.shorthand import axis_field, axis_word
from shardwise.plan.stack import Stack, stack_of
from shardwise.plan.workload import Workload

EVERY = (4, 3, 2)
"""Of so many blocks one is recomputed: a dial that is not searched in full."""
RATIOS = (0.75,)
"""Shares of the blocks that are recomputed: another."""

RECIPES: tuple[Float8Kind, ...] = ("rowwise-hp", "rowwise", "tensorwise")

OPT_IN: dict[str, str] = {
    "fp8": "matrix products in float8, which change the numbers",
    "bf16-pure": "parameters in bf16, which changes the numbers",
    "fp16": "fp16 in place of bf16",
    "fp32": "fp32 in place of bf16",
    "offload-activations": "saved tensors in host memory",
}
"""What the search leaves out unless `allow` names it."""
FEATURES: tuple[str, ...] = (
    "pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "zero1", "zero2", "zero3", "sequence", "loss-parallel",
    "recompute", "recompute=ops", "recompute=blocks", "recompute=every", "recompute=ratio", "offload", "offload-state",
    "accumulation", "compile", "bf16", "ring", "gather", "ulysses", *SCHEDULES,
)  # fmt: skip
"""What `forbid` may name, beside what `allow` may."""


def features_of(plan: Plan) -> set[str]:
    """The words of a plan that `forbid` may name.

    >>> sorted(features_of(Plan.parse("tp2 fsdp4 / mb2 / bf16 / recompute=blocks")))
    ['accumulation', 'bf16', 'dp_shard', 'recompute', 'recompute=blocks', 'tp', 'zero3']
    """
    axes, tensor, offload = plan.axes, plan.tensor, plan.offload
    found = {
        **{axis: getattr(axes, axis) > 1 for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")},
        **{f"zero{plan.zero}": plan.zero > 0, plan.schedule.kind: axes.pp > 1, plan.context.kind: axes.cp > 1},
        **{plan.precision: True, "fp8": plan.float8.recipe != "none", "compile": plan.compile},
        **{"sequence": tensor.sequence, "loss-parallel": tensor.loss},
        **dict.fromkeys(("recompute", f"recompute={plan.recompute.mode}"), plan.recompute.mode != "none"),
        **{"offload": offload.state or offload.activations, "offload-state": offload.state},
        **{"offload-activations": offload.activations},
        "accumulation": axes.pp == 1 and plan.batch.micro_batches > 1,
    }
    return {word for word, is_there in found.items() if is_there}


Way = tuple[bool, bool, ContextKind, list[tuple[PrecisionKind, Float8Kind]]]
"""Sequences and loss in parallel or not, how context is exchanged, and types to compute in."""
CORE_ROWS = {name: ROWS[name] for name in ("fp8.context", "fp8.precision")}
"""Rows that look at nothing of a plan but its core."""
FLOW_ROWS = {name: ROWS[name] for name in (
    "pp.micro-batches", "pp.zero-bubble-recompute-ops", "pp.zero-bubble-reshard", "recompute.ops-nested",
)}  # fmt: skip
"""Rows that look at nothing of a plan but what `Space.refuses` names, so that one answer holds for all such plans."""


@dataclass(frozen=True)
class Space:
    """A question: model, cluster and workload, and what is allowed."""

    profile: Profile
    spec: ModelSpec | None
    cluster: Cluster
    workload: Workload
    stack: Stack
    allow: tuple[str, ...] = ()
    forbid: tuple[str, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()
    """What the model itself cannot have, words as those of `forbid`, and why."""
    _refused: dict[tuple[object, ...], str] = field(default_factory=dict, init=False, repr=False, compare=False)
    _compiled: dict[tuple[object, ...], bool] = field(default_factory=dict, init=False, repr=False, compare=False)
    _stacks: dict[tuple[object, ...], Stack] = field(default_factory=dict, init=False, repr=False, compare=False)
    _savings: dict[tuple[object, ...], Saving] = field(default_factory=dict, init=False, repr=False, compare=False)
    _schedules: dict[int, list[Schedule]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, known in (("allow", tuple(OPT_IN)), ("forbid", (*FEATURES, *OPT_IN))):
            object.__setattr__(self, name, tuple(map(axis_field, getattr(self, name))))
            unknown = [word for word in getattr(self, name) if word not in known]
            if unknown and unknown[0] in FEATURES:
                raise UsageError(
                    f"allow: found {unknown[0]!r}, which is tried unless it is forbidden; leave it out "
                    f"(what needs it: {', '.join(OPT_IN)})"
                )
            if unknown:
                raise UsageError(
                    f"{name}: found {unknown[0]!r}, which no plan has; {nearest(unknown[0], [*map(axis_word, known)])}"
                )
        if both := sorted({*self.allow} & {*self.forbid}):
            raise UsageError(
                f"allow, forbid: found {both[0]!r} in both, which cannot mean anything; leave it out of one"
            )
        if not self.precisions:
            usual = "fp32" if self.device == "cpu" else "bf16"
            raise UsageError(
                f"forbid: found {usual!r}, in which plans for {self.cluster.device.name} compute, and no other type is "
                f"allowed; allow one ({', '.join(word for word in ('bf16-pure', 'fp16', 'fp32') if word != usual)}) as "
                "well, or leave it out"
            )
        if "fp8" in self.allow and not self.cluster.device.rates.fp8:
            raise UsageError(
                f"allow: found 'fp8', and {self.cluster.device.name} has no unit for it; leave it out, or plan for "
                "another device"
            )

    def has(self, *features: str) -> bool:
        """True where none of these is forbidden or left out, and all that need it are allowed."""
        return all(f not in self._without and (f not in OPT_IN or f in self.allow) for f in features)

    @cached_property
    def _without(self) -> frozenset[str]:
        return frozenset((*self.forbid, *dict(self.left_out)))

    @cached_property
    def _case(self) -> Case:
        read = Read(profile=self.profile, limits=self.spec, left_out=self.left_out, cut=self.stack.cut)
        return Case(plan=Plan(), spec=self.spec, device=self.device, seq_len=self.workload.seq_len, read=read)

    @property
    def device(self) -> str:
        """The type of torch's device."""
        return "cpu" if self.cluster.device.name.startswith("cpu") else "cuda"

    @cached_property
    def precisions(self) -> tuple[PrecisionKind, ...]:
        """Types to compute in: those allowed, else bf16 (fp32 on a CPU)."""
        kinds: tuple[PrecisionKind, ...] = ("bf16-pure", "fp16", "fp32")
        given = tuple(kind for kind in kinds if self.has(kind))
        usual: PrecisionKind = "fp32" if self.device == "cpu" else "bf16"
        first = () if usual in self._without else (usual,)
        return (*first, *(kind for kind in given if kind != usual))

    def broken(self, plan: Plan) -> str:
        """Id of the first row of the table that refuses a plan; empty: none does."""
        return next(self._refusals(plan), "")

    def why_refused(self, plan: Plan) -> str:
        """What of a plan the first row that refuses it says, and its id; empty: none does."""
        return next((f"{hit.what} ({row})" for row, hit in self._hits(plan)), "")

    def _refusals(self, plan: Plan, rows: Mapping[str, Row] = ROWS) -> Iterator[str]:
        return (row for row, _ in self._hits(plan, rows))

    def _hits(self, plan: Plan, rows: Mapping[str, Row] = ROWS) -> Iterator[tuple[str, Hit]]:
        batch = Batch(global_size=self.workload.global_batch, micro_batches=plan.batch.micro_batches)
        case = self._case.with_plan(plan.with_(batch=batch))
        for row in rows.values():
            hit = row.test(case)
            if hit is not None and hit.severity == "error":
                yield row.id, hit

    def refuses(self, flow: Flow, zero: Zero = 0) -> str:
        """Id of a row of `FLOW_ROWS` that refuses a flow with such a `zero`; empty: none does."""
        core, pp, kind = flow.pipe.core, flow.pipe.pp, flow.schedule.kind
        zero = zero if kind in ZERO_BUBBLE else 0  # those rows alone look at it
        fits = micro_batches_fit(kind, pp, flow.pipe.micro_batches)
        key = (core.ep > 1, self.recomputes[flow.policy].mode, pp > 1, fits, kind, zero)
        if key not in self._refused:
            pipe = replace(flow.pipe, offloaded=False)  # none of them looks at it
            spread = Spread(pipe, 1, pipe.data, zero) if zero else Spread(pipe, pipe.data, 1, 0)
            self._refused[key] = next(self._refusals(self.plan(flow, spread), FLOW_ROWS), "")
        return self._refused[key]

    def compiles(self, plan: Plan) -> bool:
        """Whether the blocks of a plan are compiled: wherever the stack does that, and no row refuses it."""
        axes = plan.axes
        return self._compiles(axes.cp > 1, axes.pp > 1, plan.schedule.kind, plan.recompute, plan.float8.recipe)

    def compiles_flow(self, flow: Flow) -> bool:
        """The same of all plans of a flow."""
        core, recompute = flow.pipe.core, self.recomputes[flow.policy]
        return self._compiles(core.cp > 1, flow.pipe.pp > 1, flow.schedule.kind, recompute, core.float8)

    def _compiles(self, cp: bool, pp: bool, kind: ScheduleKind, recompute: Recompute, recipe: Float8Kind) -> bool:
        asked = (cp, pp, kind, recompute.mode, recipe)
        if not self.stack.compiles or not self.has("compile"):
            return False
        if asked not in self._compiled:
            axes, float8 = Axes(cp=1 + cp, pp=1 + pp), Float8(recipe=recipe)
            plan = Plan(axes=axes, schedule=Schedule(kind=kind), recompute=recompute, float8=float8)
            without = set(self._refusals(plan.with_(compile=False)))
            self._compiled[asked] = without.issuperset(self._refusals(plan.with_(compile=True)))
        return self._compiled[asked]

    def stack_for(self, core: Core, *, compiled: bool = True) -> Stack:
        """The stack as it runs the blocks of a core, as fast as any of its plans; or as those that do not compile."""
        key = (core.cp > 1, core.float8, compiled)
        if key not in self._stacks:
            plan = Plan(axes=Axes(cp=core.cp), float8=Float8(recipe=core.float8))
            self._stacks[key] = stack_of(plan.with_(compile=compiled and self.compiles(plan)), self.stack)
        return self._stacks[key]

    def saving(self, core: Core, *, compiled: bool = True) -> Saving:
        """What decides on the bytes that a core's blocks keep: see `stack_for`."""
        key = (core.tp, core.cp > 1, core.sequence, core.precision, core.float8, compiled)
        if key not in self._savings:
            plan = Plan(axes=Axes(tp=core.tp), precision=core.precision, tensor=Tensor(sequence=core.sequence))
            work, compute = self.workload, self.workload.compute or ("fp8" if core.float8 != "none" else "")
            stack = self.stack_for(core, compiled=compiled)
            self._savings[key] = saving_of(plan, stack, work.seq_len, compute, work.adapters)
        return self._savings[key]

    # ------------------------------------------------------------ step 1: cores

    def cores(self, world: int, refused: dict[str, int]) -> Iterator[Core]:
        """Every way to cut a block, with every size of a micro-batch; `refused` counts by constraint."""
        parts = divisors(self.profile.experts) if self.profile.experts and self.has("ep") else [1]
        for tp in self._degrees("tp", world, refused):
            for cp in self._degrees("cp", world // tp, refused):
                ways = list(self._ways(tp, cp, refused))  # whatever `ep`
                for ep in (each for each in parts if world % each == 0):
                    for (sequence, loss, context, types), size in product(ways, divisors(self.workload.global_batch)):
                        for precision, recipe in types:
                            yield Core(world, tp, cp, ep, size, sequence, loss, context, precision, recipe)

    def _degrees(self, axis: str, most: int, refused: dict[str, int]) -> list[int]:
        """Degrees that the axis may have by itself."""
        if not self.has(axis):
            return [1]
        fits = []
        for degree in divisors(most):
            row = self.broken(Plan(axes=Axes(**{axis: degree})))
            if row:
                refused[row] = refused.get(row, 0) + 1
            else:
                fits.append(degree)
        return fits

    def _ways(self, tp: int, cp: int, refused: dict[str, int]) -> Iterator[Way]:
        """Every way to have sequences, the loss and context in parallel, with every pair of types."""
        sequences = [False, True] if tp > 1 and self.has("sequence") else [False]
        losses = [False, True] if tp > 1 and self.has("loss-parallel") else [False]
        kinds: tuple[ContextKind, ...] = ("ring", "gather", "ulysses")
        contexts: list[ContextKind] = [kind for kind in kinds if self.has(kind)] if cp > 1 else ["ring"]
        recipes: tuple[Float8Kind, ...] = ("none", *RECIPES) if self.has("fp8") else ("none",)
        for sequence, loss, context in product(sequences, losses, contexts):
            plan = Plan(axes=Axes(tp=tp, cp=cp), tensor=Tensor(sequence=sequence, loss=loss))
            row = self.broken(plan.with_(context=Context(kind=context)))
            if row:
                refused[row] = refused.get(row, 0) + 1
                continue
            types = []
            for precision, recipe in product(self.precisions, recipes):
                typed = plan.with_(precision=precision, float8=Float8(recipe=recipe))
                if row := next(self._refusals(typed, CORE_ROWS), ""):
                    refused[row] = refused.get(row, 0) + 1
                else:
                    types.append((precision, recipe))
            yield sequence, loss, context, types

    # ------------------------------------------------------------ step 2: stages

    def pipes(self, core: Core) -> Iterator[Pipe]:
        """Every number of pipeline ranks for which the global batch divides, and both places for states."""
        rest = core.world // (core.tp * core.cp)
        for pp in divisors(rest) if self.has("pp") else [1]:
            if pp > len(self.profile.blocks):
                return
            count, left = divmod(self.workload.global_batch, core.samples * (rest // pp))
            if not left and (count == 1 or pp > 1 or self.has("accumulation")):
                for offloaded in (False, True) if self.can_offload else (False,):
                    yield Pipe(core, pp, rest // pp, count, offloaded)

    # ------------------------------------------------------------ step 3: schedules

    def schedules(self, pp: int) -> list[Schedule]:
        """Every schedule with every number of stages on a rank."""
        if pp not in self._schedules:
            self._schedules[pp] = [Schedule()] if pp == 1 else self._all_schedules(pp)
        return self._schedules[pp]

    def _all_schedules(self, pp: int) -> list[Schedule]:
        found = []
        for kind in (kind for kind in SCHEDULES if self.has(kind)):
            blocks = len(self.profile.blocks)
            stages = [2] if kind in V_SHAPED else loops_of(blocks, pp) if kind in LOOPED else [1]
            found += [
                Schedule(kind=kind, stages_per_rank=number if number > 2 else None)
                for number in stages
                if number <= blocks // pp
            ]
        return found

    # ------------------------------------------------------------ step 4: ranks and states

    def spreads(self, pipe: Pipe) -> Iterator[Spread]:
        """Every division of the data ranks into replicas and shards, with every `zero`."""
        for shard in divisors(pipe.data):
            replicas = pipe.data // shard
            if (shard > 1 and not self.has("dp_shard")) or (replicas > 1 and not self.has("dp_replicate")):
                continue
            if shard * pipe.core.cp * pipe.core.tp % pipe.core.ep:
                continue  # `ep` re-uses ranks of these axes
            if shard == 1 and not pipe.offloaded:  # the engine that shards offloads
                yield Spread(pipe, replicas, shard, 0)
            if shard > 1 or replicas == 1:
                kinds = (zero for zero in get_args(Zero) if zero and self.has(f"zero{zero}"))
                yield from (Spread(pipe, replicas, shard, zero) for zero in kinds)

    @cached_property
    def can_offload(self) -> bool:
        """Whether optimizer states may be on the host."""
        return self.device != "cpu" and self.has("offload", "offload-state")  # a CPU's memory is its host's

    # ------------------------------------------------------------ step 5: savings

    @cached_property
    def recomputes(self) -> tuple[Recompute, ...]:
        """Every policy."""
        found = [Recompute()]
        if self.has("recompute", "recompute=ops"):
            found.append(Recompute(mode="ops"))
        if self.has("recompute", "recompute=every"):
            found += [Recompute(mode="every", every=n) for n in EVERY]
        if self.has("recompute", "recompute=ratio"):
            found += [Recompute(mode="ratio", ratio=ratio) for ratio in RATIOS]
        if self.has("recompute", "recompute=blocks"):
            found.append(Recompute(mode="blocks"))
        return tuple(found)

    def flows(self, pipe: Pipe) -> Iterator[tuple[Schedule, bool]]:
        """Every schedule, with saved tensors on the device and (where that is allowed) offloaded."""
        return product(self.schedules(pipe.pp), self.offloads_saved)

    @cached_property
    def offloads_saved(self) -> tuple[bool, ...]:
        """Whether saved tensors are offloaded: no, and (where that is allowed) yes."""
        can = self.device != "cpu" and self.has("offload", "offload-activations")
        return (False, True) if can else (False,)

    def plan(self, flow: Flow, spread: Spread) -> Plan:
        """The plan that all choices make."""
        core = flow.pipe.core
        plan = Plan(
            axes=spread.axes,
            zero=spread.zero,
            batch=Batch(micro_batches=flow.pipe.micro_batches),
            schedule=flow.schedule,
            precision=core.precision,
            float8=Float8(recipe=core.float8),
            recompute=self.recomputes[flow.policy],
            offload=Offload(state=spread.pipe.offloaded, activations=flow.offload),
            tensor=Tensor(sequence=core.sequence, loss=core.loss),
            context=Context(kind=core.context),
        )
        return plan.with_(compile=True) if self.compiles(plan) else plan
