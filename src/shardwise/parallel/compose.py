"""`apply`: the passes, in their order, and what makes the module real at the end."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from weakref import WeakSet

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardwise.errors import ModelError, PlanError, UsageError
from shardwise.model.rules import type_of
from shardwise.model.rules_file import Rules, load_rules
from shardwise.model.tracer import find_blocks, is_called, meta_copy, refuse_parameters
from shardwise.parallel.blocks import compile_blocks, recompute_blocks
from shardwise.parallel.context import shard_context
from shardwise.parallel.data import replicate_data, shard_data
from shardwise.parallel.declared import check_declared, declared_blocks, declares, divide_declared, prepare, sample_of
from shardwise.parallel.engines.casts import cast_compiled, cast_weights
from shardwise.parallel.engines.scalars import bind_scalars, cast_scalars
from shardwise.parallel.engines.views import return_no_views
from shardwise.parallel.expert import shard_experts
from shardwise.parallel.gathered_torch_private import Gathered
from shardwise.parallel.init import blueprint_for, materialize
from shardwise.parallel.initial.blueprint import Blueprint, Init
from shardwise.parallel.layers.batchnorm import prepare_sync_norms
from shardwise.parallel.layers.float8 import check_split
from shardwise.parallel.memory import MODEL_ROOM, fitting
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.pipeline import cut_pipeline
from shardwise.parallel.placed import Batch, Part, Placed, Placement
from shardwise.parallel.precision import convert_precision
from shardwise.parallel.random import key_randomness
from shardwise.parallel.refused.alone import refuse_copies_and_loads, watch_calls
from shardwise.parallel.refused.bags import watch_bags
from shardwise.parallel.refused.derivatives import is_first_order, watch_forwards
from shardwise.parallel.refused.explained import explain_errors
from shardwise.parallel.refused.first_forward import look_at_first_forward
from shardwise.parallel.refused.limits import refuse_limits
from shardwise.parallel.refused.other_weights import refuse_other_weights
from shardwise.parallel.refused.own_steps import refuse_own_steps
from shardwise.parallel.refused.parts_torch_private import mind_parts
from shardwise.parallel.refused.saved import refuse_saves
from shardwise.parallel.refused.slices import watch_slices
from shardwise.parallel.refused.written import watch_weights
from shardwise.parallel.tensor import shard_tensor
from shardwise.parallel.ties import bind_stages, find_ties
from shardwise.parallel.torch_private import wrapper_of
from shardwise.plan.constraints import check, refuse
from shardwise.plan.plan import AXES, Plan

APPLIED: WeakSet[nn.Module] = WeakSet()
"""Modules whose parameters `apply` has placed, as long as they live: their gradients are somebody's to reduce."""
Pass = Callable[[Placed, Plan, Mesh], Placed]

PASSES: tuple[Pass, ...] = (
    convert_precision,  # first: every later pass sees parameters in the type that is kept
    key_randomness,  # before anything is cut: it looks at the whole model
    cut_pipeline,  # before sharding: what is on no stage of this rank is never sharded
    shard_experts,  # before the layers around them: what is placed already, no tensor rule has to cover
    shard_tensor,  # before recompute: a recomputed block holds the collectives of its own layers
    shard_context,  # before recompute: a recomputed block exchanges its keys and values again
    cast_scalars,  # before recompute: a recomputed block casts them again
    cast_weights,  # likewise
    recompute_blocks,  # inside compile, so that the compiler sees what is recomputed
    cast_compiled,  # inside compile too: compiled code casts what it uses
    compile_blocks,  # inside the data shards: gathers stay outside of compiled code
    shard_data,  # last: it groups whatever parameters the others left
)


def apply(
    module: nn.Module | Callable[[], nn.Module],
    plan: Plan,
    mesh: Mesh,
    *,
    init: Init | None = None,
    seed: int = 0,
    sample: Batch | None = None,
    rules: Mapping[str, str] | str | os.PathLike[str] | None = None,
) -> Placed:
    """Put a plan onto a module: same names, same initial weights, this rank's share of them.

    Args:
        module: a factory (a class or a function without arguments), built on the meta device and materialised
            shard by shard; or a module, whose own weights are kept and must be equal on all ranks.
        plan: the layout.
        mesh: from `open_mesh(plan)`.
        init: None: what the constructor does, replayed per parameter; a function called with each submodule;
            or `"reset_parameters"`.
        seed: initial weights are a function of (seed, parameter name), the same bits under every plan.
        sample: an example micro-batch; lets a pipeline place parameters by how forward uses them.
        rules: tensor-parallel styles by name pattern, in place of the plan's recipe; or the path of a file of them,
            which must be verified (docs/rules.md).

    Returns:
        The module's parts on this rank, ready to train.

    Raises:
        PlanError: the constraints refuse the plan, or the mesh was opened with other axes.
        ModelError: the module does not allow what the plan asks for.
        UsageError: an argument of the wrong kind, such as a factory that needs arguments.
        OutOfMemoryError: this rank's parameters do not fit.

    Cost: collective; time to build the module once, memory of this rank's shard plus one full parameter.

    >>> placed = apply(GPT, plan, mesh, seed=1234)  # doctest: +SKIP
    """
    _check_arguments(module, plan, mesh, init, seed, rules)
    table = load_rules(rules) if isinstance(rules, str | os.PathLike) else rules
    if isinstance(table, Rules):
        table.check(tp=plan.axes.tp, sequence=plan.tensor.sequence)
    refuse(check(plan, world=mesh.world, device=mesh.device.type))
    _check_mesh(plan, mesh)
    blueprint = blueprint_for(module, init, mesh)
    marks = {name: dict(vars(p)) for name, p in blueprint.module.named_parameters()}
    placed = place(blueprint, plan, mesh, sample=sample, rules=table, seed=seed)
    with fitting(f"apply, rank {mesh.rank}, plan `{plan}`", f"{_size_here(placed)} of parameters; {MODEL_ROOM}"):
        placed = bind_scalars(bind_stages(materialize(placed, init, seed, mesh.device)))
        for name, parameter in placed.named_parameters().items():  # `weight.no_decay = True`: shards are new objects
            vars(parameter).update({k: mark for k, mark in marks.get(name, {}).items() if k not in vars(parameter)})
        _watch(placed)
        APPLIED.update(part.root for part in placed.parts)
        sharded = {name: wrapper_of(p) for name, p in placed.named_parameters().items() if isinstance(p, DTensor)}
        if sharded:
            mind_parts()
        by_hand = placed.pipeline is None and isinstance(placed.parts[0].run, FSDPModule)
        gathered = Gathered(placed.parts[0].run) if by_hand else None
        return replicate_data(placed.with_(wrappers=sharded, gathered=gathered, plain=None), plan, mesh)


def _watch(placed: Placed) -> None:
    """Let be refused what a forward, or a script, does by itself to what is placed, and would train otherwise."""
    if not placed.plan.compile:  # hooks would be compiled
        look_at_first_forward(placed)
        watch_bags(placed)
        watch_calls(placed)
        watch_slices(placed)
        refuse_other_weights(placed)
        for part in placed.parts:
            return_no_views(part.run)
            watch_weights(part.run)
            if is_first_order(placed):
                watch_forwards(part.run)
                explain_errors(part.root)
    refuse_copies_and_loads(placed)
    refuse_saves(placed)
    refuse_own_steps(placed)


def place(
    blueprint: Blueprint,
    plan: Plan,
    mesh: Mesh,
    *,
    sample: Batch | None = None,
    rules: Mapping[str, str] | None = None,
    seed: int = 0,
) -> Placed:
    """Run the passes: every parameter has its place and no value yet. What `apply` refuses, it refuses here.

    Raises:
        ModelError: see `apply`.
    """
    root = blueprint.module
    refuse_parameters(root)
    refuse_limits(root, plan)
    check_declared(root, plan)
    plain = _plain(root) if plan.axes.tp > 1 and not plan.compile else None
    prepare(root, blocks_of_plan(root, plan))
    prepare_sync_norms(root)
    placed = Placed(
        parts=(Part(root=root, run=root),),
        plan=plan,
        mesh=mesh,
        blocks=blocks_of_plan(root, plan),
        sample=sample if sample is not None else sample_of(root),
        blueprint=blueprint,
        rules=rules,
        plain=plain,
        seed=seed,
        ties=find_ties(root),
        original_names=tuple(name for name, _ in root.named_modules()),
    )
    for run in PASSES:
        placed = run(placed, plan, mesh)
    check_split(placed)
    return record_types(record_replicated(divide_declared(placed)))


def _plain(root: nn.Module) -> nn.Module | None:
    """A copy without values; None: of what declares its own rules, or cannot be copied."""
    with suppress(ModelError):
        return None if declares(root) else meta_copy(root)
    return None


def _size_here(placed: Placed) -> str:
    """Of the parameters that are to be here, in words."""
    local = (p.to_local() if isinstance(p, DTensor) else p for p in placed.named_parameters().values())
    return f"{sum(p.numel() * p.element_size() for p in local) / 2**20:.1f} MiB"


def _check_arguments(module: object, plan: object, mesh: object, init: object, seed: object, rules: object) -> None:
    for name, value, kind, write in (
        ("plan", plan, Plan, "Plan.parse(...)"),
        ("mesh", mesh, Mesh, "the mesh of `with open_mesh(plan) as mesh`"),
        ("seed", seed, int, "an integer"),
        (
            "rules",
            rules,
            Mapping | str | os.PathLike | None,
            'None, a path, or a mapping, as {"layers.*.attn.wq": "column", ...}',
        ),
    ):
        if not isinstance(value, kind):
            raise UsageError(f"apply: {name}: found {value!r} of type {type(value).__name__}; give {write}")
    if not (init is None or callable(init) or init == "reset_parameters"):
        raise UsageError(f"apply: init: found {init!r}; give None, a function of a module, or 'reset_parameters'")
    if isinstance(module, nn.Module):
        return
    if not callable(module):
        raise UsageError(
            f"apply: found {module!r} of type {type(module).__name__}, needed a module or a factory: a class or a "
            "function without arguments that returns a new module"
        )
    needed = _required(module)
    if needed:
        name = getattr(module, "__name__", repr(module))
        raise UsageError(
            f"apply: the factory {name} needs arguments ({', '.join(needed)}), and a factory is called without; write "
            f"`lambda: {name}(...)`, or functools.partial({name}, ...)"
        )


def _required(factory: Callable[..., object]) -> list[str]:
    """Names of the parameters that a call without arguments leaves open."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (ValueError, TypeError):  # written in C, says nothing
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in optional]


def _check_mesh(plan: Plan, mesh: Mesh) -> None:
    differ = [axis for axis in AXES if mesh.size(axis) != getattr(plan.axes, axis)]
    if differ:
        raise PlanError(
            f"apply: the mesh was opened for other axes than those of the plan `{plan}`: "
            + ", ".join(f"{axis} is {mesh.size(axis)} and the plan has {getattr(plan.axes, axis)}" for axis in differ)
            + "; give apply the plan that open_mesh was given"
        )


def blocks_of_plan(root: nn.Module, plan: Plan) -> tuple[str, ...]:
    """Names of the blocks of a module under a plan; empty: it shows none, and the plan names none.

    Raises:
        ModelError: the plan names blocks that are none.
    """
    if plan.blocks == "auto" and (declared := declared_blocks(root)):
        return declared
    try:
        found = find_blocks(root, plan.blocks)
    except ModelError:
        if plan.blocks != "auto":
            raise
        return ()  # a model without repeated blocks: the passes that need blocks say so
    containers = [name for name in found if not is_called(root.get_submodule(name))]
    if containers and plan.blocks != "auto":
        name = containers[0]
        raise ModelError(
            f"apply: blocks={plan.blocks} names {name} of {type(root).__name__}, a "
            f"{type(root.get_submodule(name)).__name__} that is never called; blocks are modules with a forward of "
            f"their own: write blocks={name}.*"
        )
    return () if containers else found


def record_replicated(placed: Placed) -> Placed:
    """Complete the placement table: what no pass placed is whole on every rank, and says so."""
    rows = dict(placed.placements)
    for name, parameter in placed.named_parameters().items():
        rows.setdefault(
            name,
            Placement(
                pass_name="none",
                text="replicated",
                global_shape=tuple(parameter.shape),
                dtype=str(parameter.dtype),
            ),
        )
    return placed.with_(placements={name: rows[name] for name in placed.named_parameters()})


def record_types(placed: Placed) -> Placed:
    """Say in the placement table which parameters are used in float8, or in a type that a rule gives them."""
    rows = dict(placed.placements)
    for name, row in rows.items():
        owner, _, key = name.rpartition(".")
        kind = type_of(owner, placed.types)
        if owner in placed.float8 and key == "weight":
            kind = f"fp8 {placed.plan.float8.recipe}"
        if kind not in (None, "fp8"):
            rows[name] = replace(row, text=f"{row.text}; computes in {kind}")
    return placed.with_(placements=rows)
