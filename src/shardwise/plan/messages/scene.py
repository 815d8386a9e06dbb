"""`Scene`: one rank of a plan with the sizes of a reference model, and the messages that are counted for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from shardwise.model.profile import profile_of
from shardwise.model.spec import ModelSpec
from shardwise.plan.plan import AXES, Plan
from shardwise.plan.ranks import sequence
from shardwise.plan.ranks.division import Division
from shardwise.plan.ranks.groups import Member, around, group_names, module_of, type_at, types_of
from shardwise.plan.ranks.weights import Weight, Weights, weights_of
from shardwise.plan.schedule import stages_of
from shardwise.plan.workload import Workload

WIDTH = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "bf16-pure": 2}
"""Bytes of an activation."""


class Collective(NamedTuple):
    """A collective, or a message to one other rank."""

    kind: str
    """all-reduce, all-gather, reduce-scatter, all-to-all, send or recv."""
    axis: str
    """The axis of the mesh, or several joined by `+`."""
    num_bytes: int
    """The larger of what it takes from this rank and what it gives it: the whole result of an all-gather, the whole
    input of a reduce-scatter."""


class Stage(NamedTuple):
    """A pipeline stage of the rank; without a pipeline, the whole model."""

    number: int
    first: int
    """Its first block."""
    end: int
    """One past its last block."""


def axis_of(plan: Plan, *axes: str) -> str:
    """The name of some axes together: those that are above 1, in the order of the mesh.

    >>> axis_of(Plan.parse("dp2 fsdp2"), "dp_shard", "dp_replicate", "tp")
    'dp_replicate+dp_shard'
    """
    return "+".join(axis for axis in AXES if axis in axes and getattr(plan.axes, axis) > 1)


def index_of(plan: Plan, rank: int) -> dict[str, int]:
    """Where a rank lies on each axis.

    >>> index_of(Plan.parse("pp2 tp2"), 2)["pp"]
    1
    """
    found, rest = {}, rank
    for axis in reversed(AXES):
        rest, found[axis] = divmod(rest, getattr(plan.axes, axis))
    return found


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One rank of a plan: what `collectives_of` and its parts ask of the sizes."""

    spec: ModelSpec
    plan: Plan
    workload: Workload
    rank: int
    is_cpu: bool

    @cached_property
    def weights(self) -> Weights:
        """The model's parameters."""
        return weights_of(self.spec)

    @cached_property
    def index(self) -> Mapping[str, int]:
        """Where the rank lies on each axis, and on `ep`."""
        return {**index_of(self.plan, self.rank), "ep": self.rank % self.plan.axes.ep}

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        """First block of every stage of the pipeline, and the number of blocks."""
        return (*Division(profile_of(self.spec), self.plan, self.workload).firsts, self.spec.num_layers)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Those of this rank."""
        axes, schedule = self.plan.axes, self.plan.schedule
        here = stages_of(schedule.kind, self.index["pp"], axes.pp, schedule.stages) if axes.pp > 1 else (0,)
        return tuple(Stage(i, self.firsts[i], self.firsts[i + 1]) for i in here)

    @property
    def last_stage(self) -> int:
        """Index of the stage with the head."""
        return len(self.firsts) - 2

    @cached_property
    def micro_batches(self) -> int:
        """Forward and backward passes of each block in a step."""
        return self.plan.batch.micro_batches

    @cached_property
    def rows(self) -> int:
        """Sequences of a micro-batch on this rank."""
        return self.workload.global_batch // (self.plan.axes.data * self.micro_batches)

    @cached_property
    def layout(self) -> sequence.Layout:
        """How `cp` divides a sequence."""
        return sequence.divide(self.workload.seq_len, self.plan.axes.cp, self.plan.context.balance)

    @cached_property
    def tokens(self) -> int:
        """Tokens of a micro-batch on this rank, before `tp` shards sequences."""
        length = self.layout.sizes[self.index["cp"]] if self.plan.axes.cp > 1 else self.workload.seq_len
        return self.rows * length

    @cached_property
    def types(self) -> Mapping[str, str]:
        """Module -> the type that a precision rule gives it."""
        return types_of(self.plan, {name for path, _ in self._all for name in around(path)})

    @cached_property
    def groups(self) -> frozenset[str]:
        """The modules that `fully_shard` gathers by themselves."""
        return group_names(self.spec, self.plan, self._all, self.types)

    @property
    def _all(self) -> list[Member]:
        return [member for stage in range(len(self.firsts) - 1) for member in self.members(stage)]

    def members(self, stage: int) -> list[Member]:
        """The weights of a stage in the order in which they are registered, each with the name of its module."""
        spec, weights = self.spec, self.weights
        found = [(module_of(spec, w), w) for w in weights.before] if stage == 0 else []
        for block in spec.block_names[self.firsts[stage] : self.firsts[stage + 1]]:
            found += self.block_members(block)
        if stage == self.last_stage:
            found += [(module_of(spec, w), w) for w in weights.after]
            if weights.tied and stage:
                found.append((module_of(spec, Weight("head", ())), weights.before[0]))
        return found

    def block_members(self, block: str) -> list[Member]:
        """The same of one block."""
        return [(f"{block}.{module_of(self.spec, w)}", w) for w in self.weights.block]

    @property
    def stepped(self) -> list[Weight]:
        """What the rank's optimizer steps, in order: of a tied parameter one copy."""
        numbers, found = [stage.number for stage in self.stages], []
        for number in numbers:
            members = [weight for _, weight in self.members(number)]
            copied = self.weights.tied and number == self.last_stage > 0 and 0 in numbers
            found += members[:-1] if copied else members
        return found

    def width(self, module: str = "") -> int:
        """Bytes of an activation in a module; empty: between modules."""
        return WIDTH[type_at(self.plan, module, self.types) if self.types else self.plan.precision]

    def stream(self, module: str = "") -> int:
        """Bytes of the residual stream of a micro-batch, in the type of a module."""
        return self.tokens * self.spec.dim * self.width(module)

    def axis(self, *axes: str) -> str:
        """See `axis_of`."""
        return axis_of(self.plan, *axes)

    @cached_property
    def expert_axes(self) -> tuple[str, str]:
        """Names of the `ep` groups and of the groups that shard experts further: of axes that they coincide with."""
        inner, size = [], 1
        for axis in ("tp", "cp", "dp_shard"):
            if size == self.plan.axes.ep:
                break
            size *= getattr(self.plan.axes, axis)
            inner.append(axis)
        if size != self.plan.axes.ep:
            return "ep", "expert_shard"
        return self.axis(*inner), self.axis(*{"dp_shard", "cp", "tp"}.difference(inner))


Messages = Iterable[tuple[Collective, int]]
"""Each with how often a step has it."""
