"""`cut_pipeline`: blocks divided over the ranks of the pp axis, and the run of torch's schedules over them.

    user's module --trace_chain--> Chain --split_blocks--> cuts --prune--> a stage's module --torch--> schedule

torch carries the tensors and keeps the order of work. Where to cut, what each stage keeps and the proof that the
forward is a chain are ours. Every stage sees every micro-batch's inputs, so loss functions, masks and dict outputs
are written as without a pipeline.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.errors import ModelError, PlanError, UsageError
from shardwise.findings import nearest
from shardwise.model.nested import leaves
from shardwise.model.tracer import AFTER, BEFORE, Chain, find_blocks, meta_copy, trace_chain
from shardwise.parallel.inputs import Signature, model_inputs
from shardwise.parallel.looks.reach import unseen
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.module_torch_private import global_hooks, hooks_of
from shardwise.parallel.named import collections_kept
from shardwise.parallel.placed import Batch, Part, Placed
from shardwise.parallel.precision import compute_type
from shardwise.parallel.refused.derivatives import FirstOrder
from shardwise.parallel.stages.stage import Cut, Feed, StageModule, Wiring, prune, signature_of
from shardwise.parallel.stages.transport import Shapes, Transport
from shardwise.plan.plan import ZERO_BUBBLE, Plan
from shardwise.plan.ranks.stages import split_evenly
from shardwise.plan.schedule import stages_of

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The cut of a whole model, the same on every rank."""

    blocks: tuple[str, ...]
    firsts: tuple[int, ...]
    """Index of the first block of each stage."""
    owners: Mapping[str, frozenset[int]]
    """Stages that hold each parameter, and each buffer known to be written to."""

    def cut(self, stage: int) -> Cut:
        """What one stage keeps."""
        return Cut(
            stage=stage,
            num_stages=len(self.firsts),
            first=self.firsts[stage],
            last=(*self.firsts, len(self.blocks))[stage + 1] - 1,
            blocks=self.blocks,
            elsewhere=frozenset(n for n, own in self.owners.items() if stage not in own and not _in(n, self.blocks)),
        )


class Pipeline:
    """This rank's stages and the schedule over them; `placed.pipeline`. Made by `cut_pipeline`."""

    def __init__(self, stages: Sequence[StageModule], layout: Layout, blueprint: nn.Module, placed: Placed) -> None:
        self.stages, self.layout, self.blueprint = tuple(stages), layout, blueprint
        self.signature = Signature.of(blueprint)
        self.transport = Transport(self.stages, placed.plan.schedule.kind, placed.mesh, self._passed)
        self._verified, self._says = set[tuple[Any, ...]](), placed.mesh.is_first

    def run(
        self,
        micro_batches: list[Batch],
        loss_fn: Callable[[Any, Batch], torch.Tensor],
        *,
        backward: bool,
        flushes: int = 1,
    ) -> list[torch.Tensor]:
        """Run forward, and backward if asked, over micro-batches, in the plan's schedule.

        Args:
            micro_batches: the same list on every rank of the pp axis; equal shapes. Their number may differ from the
                plan's: any number in evaluation, one that the schedule takes in training.
                With several flushes that holds for each of them.
            loss_fn: called as loss_fn(output, micro_batch) on the last stage, with what the model returns; gives the
                0-dim tensor to back-propagate. Gradients are summed over micro-batches and divided by nothing.
            backward: False runs forward only, without graphs.
            flushes: runs of the schedule, one after another, over every `flushes`-th micro-batch, from the first one
                on, from the second one on, and so on: fewer micro-batches are in flight.

        Returns:
            One detached loss per micro-batch on the rank of the last stage, an empty list on the others.

        Raises:
            ModelError: the forward is no chain, or uses a parameter on a stage that does not have it; raised on all
                ranks before anything is computed.
            UsageError: no micro-batches, or of different shapes.
            PlanError: the schedule does not take this number of micro-batches.

        Cost: the first call also runs one forward of every stage on zeros, to learn what passes between stages, and one
        with other shapes two of the whole model without values. What is received has memory until it is used.
        """
        inputs = [model_inputs(batch, self.signature) for batch in micro_batches]
        run = self.transport.train if backward else self.transport.evaluate
        losses: list[torch.Tensor] = []
        try:
            for first in range(flushes):
                flush = inputs[first::flushes]
                self._check_equal(flush)
                self._verify(flush[0])
                for stage in self.stages:
                    stage.feed = Feed(micro_batches, loss_fn, first, flushes)
                losses += run(flush)
            return losses
        except RuntimeError as error:
            # torch wraps what a stage raised in a description of its inputs, which hides who failed and why
            if error.__cause__ is not None and "[Stage " in str(error):
                raise error.__cause__ from None
            raise
        finally:
            for stage in self.stages:
                stage.feed = Feed()

    def _check_equal(self, inputs: list[Inputs]) -> None:
        if not inputs:
            raise UsageError("pipeline.run: no micro-batches were given; give at least one")
        first, *others = signature_of(inputs)
        for index, other in enumerate(others, start=1):
            if other != first:
                raise UsageError(
                    f"pipeline.run: micro-batch {index} has inputs {_spell(other)}, micro-batch 0 has {_spell(first)}; "
                    "all micro-batches of a step need equal shapes: make the rows of a step divisible by the number "
                    "of micro-batches, and pad sequences to one length within a step"
                )

    def _verify(self, inputs: Inputs) -> None:
        """Trace the forward as these inputs make it go, once per kind of inputs, and wire the stages by it."""
        training = self.stages[0].training
        kind = (training, *((p, x.dim() if isinstance(x, torch.Tensor) else repr(x)) for p, x in leaves(inputs)))
        if kind in self._verified:
            return
        self.blueprint.train(training)
        chain = _traced(self.blueprint, *inputs, self.layout.blocks, says=self._says)
        self._check_owners(chain)
        for stage in self.stages:
            stage.wiring.chain = chain
        self._verified.add(kind)

    def _passed(self, inputs: Inputs) -> dict[int, Shapes]:
        """Stage -> shapes of what it receives in the whole model, as these inputs make it go."""
        self.blueprint.train(self.stages[0].training)
        chain = _traced(self.blueprint, *inputs, self.layout.blocks, says=False)
        return {stage: chain.links[first - 1].shapes for stage, first in enumerate(self.layout.firsts) if first}

    def _check_owners(self, chain: Chain) -> None:
        """That every stage has what the traced forward uses there: the same answer on every rank."""
        blocks, firsts, placed = self.layout.blocks, self.layout.firsts, self.layout.owners
        for name, stages in _owners(self.blueprint, blocks, firsts, chain).items():
            if name in chain.phases and not (stages <= placed.get(name, frozenset())) and not _in(name, blocks):
                where = f"on stage {_listed(placed[name])}" if name in placed else "on every stage"
                raise ModelError(
                    f"pipeline.run: {name} is used {' and '.join(chain.phases[name])}, that is on stage "
                    f"{_listed(stages)}, and was placed {where} by the order of registration; give "
                    "apply(..., sample=micro_batch), so that "
                    "it is placed by use"
                )


def cut_pipeline(placed: Placed, plan: Plan, mesh: Mesh) -> Placed:
    """Leave on this rank what its pipeline stages need; no change without a pp axis.

    With `placed.sample` the stage of each parameter is read off the traced forward. Without it, parameters
    registered before the first block belong to the first stage and later ones to the last, and the first step
    verifies that, before it computes anything.

    Raises:
        ModelError: the forward is no chain of blocks, or a parameter is needed by two stages.
        PlanError: more stages than blocks, or boundaries that name no block or are out of order.
    """
    if plan.axes.pp == 1:
        return placed
    root = placed.parts[0].root
    blocks = placed.blocks or find_blocks(root, plan.blocks)
    blueprint = meta_copy(root)
    chain = None
    if placed.sample is not None:
        chain = _traced(blueprint, *model_inputs(placed.sample, Signature.of(root)), blocks, says=mesh.is_first)
    firsts = first_blocks(root, blocks, plan, chain)
    layout = Layout(blocks=blocks, firsts=firsts, owners=_owners(root, blocks, firsts, chain))
    own = {name for name, parameter in root.named_parameters(remove_duplicate=False) if parameter.is_floating_point()}
    types = {name: compute_type(plan, name.rpartition(".")[0], placed.types) for name in own if plan.mixed}
    stages = []
    for stage in stages_of(plan.schedule.kind, mesh.index("pp"), plan.axes.pp, plan.schedule.stages):
        cut, wiring = layout.cut(stage), Wiring(chain=chain)
        stages.append(StageModule(prune(root, cut, wiring, mesh.device, types), cut, wiring, placed.randomness))
        if plan.schedule.kind in ZERO_BUBBLE:
            stages[-1].watch_repeats()
    pipeline = Pipeline(stages, layout, blueprint, placed)
    parts = tuple(Part(root=stage.root, run=stage, stage=stage.cut.stage) for stage in stages)
    names = [name for name, _ in root.named_parameters()]
    shared = {name: tuple(sorted(layout.owners[name])) for name in names if len(layout.owners[name]) > 1}
    return placed.with_(parts=parts, blocks=blocks, pipeline=pipeline, shared_stages=shared)


def _traced(
    root: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], blocks: tuple[str, ...], *, says: bool
) -> Chain:
    """`trace_chain`, of which what a script's hooks collect keeps nothing; that they do is warned of."""
    hooks = (hook for module in root.modules() for hook in hooks_of(module))
    with (
        unseen(root, global_hooks()),
        collections_kept(hooks) as collected,
        FirstOrder(),
    ):  # which torch ends in words of its engine, without data
        chain = trace_chain(root, args, kwargs, blocks)
    if collected and says:
        with suppress(Warning):  # `-W error` does not end a run that may be meant so
            warnings.warn(
                f"{type(root).__name__}: forward hooks collect what modules return ({type(collected[0]).__name__} of "
                "the script or the model): stages of a pipeline are copies of the model, and a rank finds there what "
                "its own blocks return, or nothing, which a loss function would take for all; return it from forward",
                stacklevel=2,
            )
    return chain


def first_blocks(root: nn.Module, blocks: tuple[str, ...], plan: Plan, chain: Chain | None = None) -> tuple[int, ...]:
    """Index of the first block of each stage: the plan's boundaries, or the most even split by cost.

    The cost of a block is its flops as the trace counted them, as the planner counts them too
    (`plan.ranks.division.cut`). Without a trace it is the number of parameters that a token meets, which for layers of
    matrices is proportional to its flops (2 per parameter and token, forward): of experts those that it is routed to;
    an embedding is a lookup and costs nothing, a head that is tied to it as much as any. What runs before the blocks
    counts on the first stage, what runs after them (a head) on the last.

    Raises:
        PlanError: see `cut_pipeline`.
    """
    num_stages = plan.axes.pp * plan.schedule.stages
    if num_stages > len(blocks):
        raise PlanError(
            f"cut_pipeline: `{plan}` has {num_stages} stages (pp {plan.axes.pp} x {plan.schedule.stages} per rank) and "
            f"{type(root).__name__} has {len(blocks)} blocks; every stage needs one: use fewer stages or a deeper model"
        )
    if plan.schedule.boundaries:
        return _given(plan.schedule.boundaries, blocks, num_stages)
    costs = chain.flops if chain and any(chain.flops.values()) else _parameter_costs(root, blocks)
    own = [costs.get(block, 0) for block in blocks]
    own[0] += costs.get(BEFORE, 0)
    own[-1] += costs.get(AFTER, 0)
    return split_evenly(tuple(own), num_stages)


def _parameter_costs(root: nn.Module, blocks: tuple[str, ...]) -> dict[str, int]:
    lookups = {f"{name}.weight" for name, m in root.named_modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    phases = _phase_of(root, blocks, None)
    routed = _routed(root)
    costs: dict[str, int] = {}
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for parameter, called in names.items():
        name = next((name for name in called if name not in lookups), called[0])  # a tied head is a product
        phase = phases.get(name) or next(block for block in blocks if _in(name, (block,)))
        met = 0 if name in lookups else parameter.numel()
        stacks = {count: chosen for layer, count, chosen in routed if _in(name, (layer,))}
        if parameter.ndim > 2 and (count := parameter.shape[0]) in stacks:
            met = met // count * stacks[count]
        costs[phase] = costs.get(phase, 0) + met
    return costs


def _routed(root: nn.Module) -> list[tuple[str, int, int]]:
    """Layers of experts that say how many there are and how many a token meets, by the names that routers have."""
    found = []
    for name, module in root.named_modules():
        count = getattr(module, "num_experts", None)
        chosen = getattr(module, "experts_per_token", getattr(module, "top_k", None))
        if isinstance(count, int) and isinstance(chosen, int):
            found.append((name.rpartition(".")[0], count, chosen))
    return found


def _given(boundaries: tuple[str, ...], blocks: tuple[str, ...], num_stages: int) -> tuple[int, ...]:
    for name in boundaries:
        if name not in blocks:
            raise PlanError(
                f"cut_pipeline: boundary {name} is no block; name the first block of a stage: {nearest(name, blocks)}"
            )
    firsts = (0, *(blocks.index(name) for name in boundaries))
    if len(firsts) != num_stages or list(firsts) != sorted(set(firsts)):
        raise PlanError(
            f"cut_pipeline: boundaries {', '.join(boundaries)} do not cut {len(blocks)} blocks into {num_stages} "
            f"stages; needed {num_stages - 1} names: the first block of every stage but the first one, in order, each "
            f"once, none of them {blocks[0]}; without `split` stages are balanced"
        )
    return firsts


def _in(name: str, blocks: Sequence[str]) -> bool:
    return any(name.startswith(f"{block}.") for block in blocks)


def _phase_of(root: nn.Module, blocks: tuple[str, ...], chain: Chain | None) -> dict[str, str]:
    """Before or after the blocks, for each parameter outside of them: as traced, else by order of registration."""
    phases, phase = {}, BEFORE
    for name, _ in root.named_parameters(remove_duplicate=False):
        if _in(name, blocks):
            phase = AFTER
            continue
        traced = chain.phases.get(name) if chain else None
        phases[name] = traced[0] if traced else phase
    return phases


def _owners(
    root: nn.Module, blocks: tuple[str, ...], firsts: tuple[int, ...], chain: Chain | None
) -> dict[str, frozenset[int]]:
    """The stages that hold each parameter, and each buffer that forward writes to; one parameter has one answer.

    Raises:
        ModelError: two stages write to one buffer.
    """
    last = len(firsts) - 1
    owners = {name: {0 if phase == BEFORE else last} for name, phase in _phase_of(root, blocks, chain).items()}
    names: dict[int, list[str]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        if _in(name, blocks):
            index = next(i for i, block in enumerate(blocks) if _in(name, (block,)))
            owners[name] = {sum(first <= index for first in firsts) - 1}
    if chain:
        for name, phases in chain.phases.items():
            used = _stages_that_use(phases, blocks, firsts)
            if name in owners:
                owners[name] = used
            elif name in chain.written and not _in(name, blocks):
                if len(used) > 1:
                    raise _written_twice(name, phases)
                owners[name] = used
    for tied in names.values():
        union = set().union(*(owners[name] for name in tied))
        owners |= dict.fromkeys(tied, union)
    return {name: frozenset(stages) for name, stages in owners.items()}


def _stages_that_use(phases: Sequence[str], blocks: tuple[str, ...], firsts: tuple[int, ...]) -> set[int]:
    used = set()
    for phase in phases:
        if phase in blocks:
            used.add(sum(first <= blocks.index(phase) for first in firsts) - 1)
        elif phase == AFTER:
            used.add(len(firsts) - 1)
        elif phase == BEFORE:
            used.add(0)
        else:  # between two blocks: on every stage
            used |= set(range(len(firsts)))
    return used


def _written_twice(name: str, where: Sequence[str]) -> ModelError:
    return ModelError(
        f"cut_pipeline: the buffer {name} is written to in more than one pipeline stage ({', '.join(where)}), found "
        "one buffer where each stage needs its own; give each block a buffer of its own, or use a plan with pp1",
        row="module.chain",
    )


def _listed(stages: frozenset[int]) -> str:
    return " and ".join(map(str, sorted(stages)))


def _spell(signature: tuple[Any, ...]) -> str:
    return ", ".join(f"{'.'.join(map(str, path[1:]))} {list(shape)} {dtype}" for path, shape, dtype in signature)
