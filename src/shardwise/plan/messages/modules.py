"""`collectives_of_module`: every message that a rank takes part in during one step of any module. No torch.

Of a module's own parts: its parameters, its blocks, what passes between them. Where data ranks and stages divide it all
of it is known, and equals what `diagnose.tracing.step` counts. `unlisted` says of which plans it is not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from math import prod

from shardwise.errors import PlanError
from shardwise.model.module_step import BEFORE, EVERYWHERE, Event, Held, ModuleStep
from shardwise.plan.messages.data import bucket_messages, carries_numbers, reduce_width
from shardwise.plan.messages.scene import WIDTH, Collective, Messages, Stage, axis_of, index_of
from shardwise.plan.messages.update import update_messages
from shardwise.plan.plan import AXES, Plan
from shardwise.plan.ranks.activations import is_recomputed
from shardwise.plan.ranks.division import sharded_dim
from shardwise.plan.ranks.engines import is_replicated, uses_fully_shard
from shardwise.plan.ranks.shards import ROOT, Dials, Shards
from shardwise.plan.ranks.stages import split_evenly
from shardwise.plan.ranks.weights import Weight
from shardwise.plan.schedule import actions, stages_of
from shardwise.plan.updating import NOT_MUON, NOT_ORTHOGONAL
from shardwise.plan.workload import Workload

DATA = ("dp_replicate", "dp_shard")
GRADIENTS = (*DATA, "cp")


def unlisted(plan: Plan, step: ModuleStep | None = None) -> str:
    """Why what a plan sends of a module is not known from its parts; empty: it is.

    Args:
        plan: any.
        step: of the module; None: of any.

    >>> unlisted(Plan.parse("tp2"))
    'tp: how it is divided within its layers'
    """
    wrap = plan.wrap_min_params > 0
    given = {
        "tp: how it is divided within its layers": plan.axes.tp > 1,
        "cp: what its attention exchanges": plan.axes.cp > 1,
        "ep: what its experts exchange": plan.axes.ep > 1,
        "precision rules": bool(plan.module_types),
        "fp8": plan.float8.recipe != "none",
        "wrap with pipelines or prefetch": wrap and (plan.axes.pp > 1 or plan.communication.prefetch > 1),
    }
    return next((what for what, holds in given.items() if holds), "" if step is None else _unlisted_of(step, plan))


def _unlisted_of(step: ModuleStep, plan: Plan) -> str:
    calls = Counter(event.unit for event in step.forward if event.what == "call")
    unlike = set(calls.values()) != {1} or len(calls) < len(step.units)
    has_unused = not {i for i, held in enumerate(step.held) if held.trained} <= set(step.ready)
    has_unused &= is_replicated(plan) and not plan.communication.find_unused
    is_static = plan.communication.static_graph
    given = {
        "parameters that forward does not use, under static-graph": has_unused and is_static,
        "parameters that forward does not use, for which DDP waits": has_unused and not is_static,
        "blocks that forward calls again, in a pipeline": plan.axes.pp > 1 and unlike,
        "batch norms between blocks, in a pipeline": plan.axes.pp > 1
        and any(n.place == EVERYWHERE for n in step.norms),
    }
    return next((what for what, holds in given.items() if holds), "")


def collectives_of_module(
    step: ModuleStep, plan: Plan, workload: Workload, *, rank: int = 0, is_cpu: bool = False
) -> dict[Collective, int]:
    """What one rank sends and receives in a step of a module, each with how often.

    Args:
        step: of a micro-batch as large as the plan's.
        plan: one of which `unlisted` says nothing; its batch is the workload's.
        workload: global batch and optimizer.
        rank: of `plan.world`.
        is_cpu: under DDP on CPUs the step's own numbers ride with the gradients.

    Raises:
        PlanError: what is not listed.
    """
    if why := unlisted(plan, step):
        raise PlanError(
            f"traffic: what `{plan}` sends of a module is not listed: {why}; needed: a traced step (--trace)"
        )
    scene = _Scene(step, plan, workload, rank, is_cpu)
    found: Counter[Collective] = Counter()
    for part in (_data(scene), _norms(scene), _between(scene), _copies(scene), update_messages(scene), _numbers(scene)):
        for message, times in part:
            if message.num_bytes and times and message.axis:
                found[message] += times
    return dict(found)


@dataclass(frozen=True)
class _Scene:
    """One rank of a plan with a module."""

    step: ModuleStep
    plan: Plan
    workload: Workload
    rank: int
    is_cpu: bool

    def axis(self, *axes: str) -> str:
        return axis_of(self.plan, *axes)

    @property
    def expert_axes(self) -> tuple[str, str]:
        """Of no module that is listed."""
        return "ep", "expert_shard"

    @cached_property
    def index(self) -> dict[str, int]:
        return index_of(self.plan, self.rank)

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        """First block of each stage, and the number of blocks."""
        schedule, count = self.plan.schedule, len(self.step.blocks)
        if self.plan.axes.pp == 1:
            return 0, count
        if schedule.boundaries:
            return 0, *(self.step.blocks.index(name) for name in schedule.boundaries), count
        return *split_evenly(self.step.costs, self.plan.axes.pp * schedule.stages), count

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Those of this rank."""
        here = self.stages_at(self.index["pp"])
        return tuple(Stage(i, self.firsts[i], self.firsts[i + 1]) for i in here)

    def stages_at(self, place: int) -> tuple[int, ...]:
        schedule, pp = self.plan.schedule, self.plan.axes.pp
        return stages_of(schedule.kind, place, pp, schedule.stages) if pp > 1 else (0,)

    @property
    def last_stage(self) -> int:
        return len(self.firsts) - 2

    def stages_with(self, held: Held) -> frozenset[int]:
        """The stages that hold a parameter."""
        last = self.last_stage
        found: set[int] = set()
        for place in held.places:
            if place == EVERYWHERE:
                found |= set(range(last + 1))
            elif place == BEFORE:
                found.add(0)
            else:
                found.add(last if place == len(self.step.blocks) else sum(f <= place for f in self.firsts) - 1)
        return frozenset(found)

    def held_by(self, stage: Stage) -> list[tuple[int, Held]]:
        """Numbers and parameters of a stage."""
        return [(i, held) for i, held in enumerate(self.step.held) if stage.number in self.stages_with(held)]

    @cached_property
    def stepped(self) -> tuple[Weight, ...]:
        """What the optimizer steps: one copy of what two stages of the rank hold."""
        ready = set(self.step.ready)
        held = {i: one for stage in self.stages for i, one in self.held_by(stage) if one.trained and i in ready}
        return tuple(Weight(_kind_of(one.names[0]), one.shape) for one in held.values())

    @cached_property
    def micro_batches(self) -> int:
        return self.plan.batch.micro_batches


def _kind_of(name: str) -> str:
    """Whether Muon leaves a matrix to AdamW, in the names of the reference models."""
    return NOT_ORTHOGONAL[0] if any(fnmatchcase(name, pattern) for pattern in NOT_MUON) else ""


# ---------------------------------------------------------------- gradients and parameters


def _data(scene: _Scene) -> Messages:
    if is_replicated(scene.plan):
        yield from _buckets(scene)
    elif uses_fully_shard(scene.plan):
        for stage in scene.stages:
            yield from _groups(scene, stage)
        yield from _scalars(scene)
        yield from _unused(scene)


def _buckets(scene: _Scene) -> Messages:
    """DDP's, of a module: its gradients in the order in which they were seen to be ready."""
    plan, held = scene.plan, scene.step.held
    trained = [i for i, each in enumerate(held) if each.trained]
    order = trained if plan.communication.find_unused else scene.step.ready
    numbers = [prod(held[i].shape) for i in order]
    yield from bucket_messages(plan, numbers, scene.axis(*GRADIENTS), is_cpu=scene.is_cpu)


def _groups(scene: _Scene, stage: Stage) -> Messages:
    """`fully_shard`'s: gathers, reduce-scatters over the shards and sums over the replicas, group by group."""
    plan = scene.plan
    across, replicas = scene.axis("dp_shard"), scene.axis("dp_replicate")
    ranks, dial = plan.axes.dp_shard, plan.communication.reshard_after_forward
    members = _members(scene, stage)
    shards = _gone_through(scene, stage, members)
    for number, inside in members.items():
        group = shards.groups[number]
        rows_alone = number != ROOT and type(dial) is int  # torch divides them again along the first dim alone
        sizes = [(_padded(held.shape, ranks, rows_alone), held.trained) for _, held in inside]
        reduced = sum(size for size, trained in sizes if trained) * reduce_width(plan)
        if ranks > 1:
            gathered = sum(size for size, _ in sizes) * WIDTH[plan.precision]
            yield Collective("all-gather", across, gathered), group.gathers
            yield Collective("all-gather", f"part of {across}", gathered), group.gathers_of_part
            yield Collective("reduce-scatter", across, reduced), group.reductions
        yield Collective("all-reduce", replicas, reduced // ranks), group.sums


def _padded(shape: tuple[int, ...], ranks: int, rows_alone: bool) -> int:
    """Elements of a parameter as its group gathers it: the dim that is cut is filled up."""
    dim = 0 if rows_alone else sharded_dim(shape, ranks)
    return prod(-(-size // ranks) * ranks if i == dim else size for i, size in enumerate(shape))


def _members(scene: _Scene, stage: Stage) -> dict[int, list[tuple[int, Held]]]:
    """Group -> its parameters: those of each unit that shares none with what is outside of it, and of the root."""
    numbered = list(enumerate(f"{unit}." for unit in scene.step.units))
    here = [(i, unit) for i, unit in numbered if scene.plan.axes.pp == 1 or stage.first <= i < stage.end]
    away = tuple({unit for _, unit in numbered} - {unit for _, unit in here})
    held = {i: [name for name in one.names if not name.startswith(away)] for i, one in scene.held_by(stage)}
    whole = [(i, unit) for i, unit in here if not any(_is_torn(names, unit) for names in held.values())]
    found: dict[int, list[tuple[int, Held]]] = {}
    for i, names in held.items():
        if scene.step.held[i].shape:  # those without dims stay whole
            home = next((number for number, unit in whole if names[0].startswith(unit)), ROOT)
            found.setdefault(home, []).append((i, scene.step.held[i]))
    return found


def _is_torn(names: list[str], unit: str) -> bool:
    """Whether a parameter goes by names inside and outside of a unit."""
    return 0 < sum(name.startswith(unit) for name in names) < len(names)


def _gone_through(scene: _Scene, stage: Stage, members: dict[int, list[tuple[int, Held]]]) -> Shards:
    """The passes of a step, as far as the groups of a stage are concerned."""
    plan, axes, count = scene.plan, scene.plan.axes, scene.micro_batches
    units = sorted(number for number in members if number != ROOT)
    depth, dial = plan.communication.prefetch, plan.communication.reshard_after_forward
    reshards = dial if type(dial) is int and plan.reshards and dial < axes.dp_shard else plan.reshards
    shards = Shards(units, has_root=ROOT in members, reshards=reshards, depth=depth)
    forward, backward = _events(scene, stage)
    if axes.pp == 1:
        for i in range(count):
            last = i == count - 1
            shards.forward(forward)
            dials = Dials(last or plan.zero >= 2, last, last or plan.zero == 3, last)
            shards.backward(backward, dials)
        return shards
    schedule = plan.schedule
    for action in actions(schedule.kind, axes.pp, schedule.stages, count)[scene.index["pp"]]:
        if action.stage == stage.number and action.work == "F":
            shards.forward(forward)
        elif action.stage == stage.number and action.work in "BI":
            shards.backward(backward, Dials(False, False, False, False))
    shards.end(Dials())
    return shards


def _events(scene: _Scene, stage: Stage) -> tuple[list[Event], list[Event]]:
    """Forward and backward: of a later stage every block's input has a gradient."""
    step, inside = scene.step, range(stage.first, stage.end)
    if scene.plan.axes.pp == 1:
        return list(step.forward), list(step.backward)
    forward = [event for event in step.forward if event.unit in inside]
    if stage.number:
        return forward, [Event(what, i) for i in reversed(inside) for what in ("back", "done")]
    return forward, [event for event in step.backward if event.unit in inside]


def _scalars(scene: _Scene) -> Messages:
    """Gradients of parameters without dims, and how many ranks have each."""
    here = {i for stage in scene.stages for i, held in scene.held_by(stage) if held.trained and not held.shape}
    yield Collective("all-reduce", scene.axis(*GRADIENTS), 2 * len(here) * max(4, WIDTH[scene.plan.precision])), 1


def _unused(scene: _Scene) -> Messages:
    """Ranks tell each other which parameters they used, where this one has not used all."""
    groups = [inside for stage in scene.stages for inside in _members(scene, stage).values()]
    held = [(i, each) for inside in groups for i, each in inside]
    if any(each.trained and i not in set(scene.step.ready) for i, each in held):
        yield Collective("all-reduce", scene.axis(*GRADIENTS), 4 * (len(held) + 2 * len(groups))), 1


# ---------------------------------------------------------------- the rest


def _norms(scene: _Scene) -> Messages:
    """Statistics of batch norms: sums and a count, then squares; in a backward pass two sums."""
    plan, width, axis = scene.plan, max(4, WIDTH[scene.plan.precision]), scene.axis(*GRADIENTS)
    ends = {BEFORE: 0, len(scene.step.blocks): scene.last_stage}
    numbers = {stage.number for stage in scene.stages}
    for norm in scene.step.norms:
        inside = 0 <= norm.place < len(scene.step.blocks)
        stage = ends.get(norm.place, sum(first <= norm.place for first in scene.firsts) - 1 if inside else 0)
        if stage in numbers:
            again = 2 if inside and is_recomputed(norm.place, plan) else 1
            times, size = norm.forward * again * scene.micro_batches, norm.channels * width
            yield Collective("all-reduce", axis, size + width), times
            yield Collective("all-reduce", axis, size), times + 2 * norm.backward * scene.micro_batches


def _between(scene: _Scene) -> Messages:
    """Between stages: each tensor on, and its gradient back."""
    if scene.plan.axes.pp == 1:
        return
    here = {stage.number for stage in scene.stages}
    axis = scene.axis("pp")
    for stage in here:
        for other, behind, on, back in ((stage - 1, stage, "recv", "send"), (stage + 1, stage + 1, "send", "recv")):
            if 0 <= other <= scene.last_stage and other not in here:
                for passed in scene.step.passed[scene.firsts[behind] - 1]:
                    yield Collective(on, axis, passed.num_bytes), scene.micro_batches
                    yield Collective(back, axis, passed.num_bytes), scene.micro_batches * passed.has_gradient


def _copies(scene: _Scene) -> Iterator[tuple[Collective, int]]:
    """Parameters that stages on several ranks hold: each exchanges what it has of their gradients."""
    plan, pp = scene.plan, scene.plan.axes.pp
    home = {stage: place for place in range(pp) for stage in scene.stages_at(place)}
    shards, here = (plan.axes.dp_shard, scene.index["dp_shard"]) if plan.zero else (1, 0)
    width = {"fp64": 8, "bf16-pure": 2}.get(plan.precision, 4)
    for held in scene.step.held:
        ranks = {home[stage] for stage in scene.stages_with(held)}
        if scene.index["pp"] not in ranks or not held.trained:
            continue
        size = prod(held.shape)
        if held.shape and shards > 1:
            whole = held.shape[sharded_dim(held.shape, shards)]
            share = -(-whole // shards)
            size = size // whole * max(0, min(share, whole - here * share)) if whole else 0
        for kind in ("send", "recv"):
            yield Collective(kind, scene.axis("pp"), size * width), len(ranks) - 1


def _numbers(scene: _Scene) -> Messages:
    """Seven numbers of a step, the gradient's sum of squares among them; and how many rows each data rank has."""
    if not is_replicated(scene.plan):
        yield Collective("all-reduce", scene.axis(*AXES), 7 * 8), 1
    elif not carries_numbers(scene.plan, scene.is_cpu):
        yield Collective("all-reduce", scene.axis(*GRADIENTS), 6 * 8), 1
    if scene.step.draws:
        yield Collective("all-reduce", scene.axis(*DATA), 8 * scene.plan.axes.data), 1
