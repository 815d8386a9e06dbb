"""`shard_data`: replicate or shard parameters, gradients and optimizer state over the data axes.

One dial, `zero`, on torch's `fully_shard`:

| zero | parameters within a step | gradients of a step's micro-batches   | optimizer state |
|------|--------------------------|---------------------------------------|-----------------|
| 0    | whole                    | summed whole, all-reduced once        | whole           |
| 1    | gathered once            | summed whole, reduce-scattered once   | shard           |
| 2    | gathered once            | reduce-scattered per micro-batch      | shard           |
| 3    | gathered per use         | reduce-scattered per micro-batch      | shard           |

Gradients are summed, never averaged: the step divides once, by the weight of the whole window.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from shardwise.parallel.engines.carrier import MAX_RANKS, Carrier
from shardwise.parallel.engines.scalars import scalars_in
from shardwise.parallel.engines.units import experts_in, groups_in
from shardwise.parallel.engines.unpacked import Unpacked
from shardwise.parallel.layers.batchnorm import synchronise_batch_norm
from shardwise.parallel.mesh import GRADIENT_AXES, Mesh
from shardwise.parallel.mesh_torch_private import flatten_mesh, join_meshes, unwrapped
from shardwise.parallel.placed import Part, Placed, Placement
from shardwise.parallel.precision import mixed_precision, ruled_modules
from shardwise.plan.plan import Plan
from shardwise.plan.ranks.division import sharded_dim
from shardwise.plan.ranks.engines import uses_fully_shard


def shard_data(placed: Placed, plan: Plan, mesh: Mesh) -> Placed:
    """Shard every parameter over the data axes (`fully_shard`), grouped by block or by size.

    Plain replication is left to `replicate_data`, which needs real parameters.
    """
    group = mesh.group(*GRADIENT_AXES) if mesh.num_gradient_ranks > 1 else None
    if group is not None or placed.pipeline is not None or plan.mixed or plan.precision == "bf16-pure":
        for part in placed.parts:
            synchronise_batch_norm(part, group)
    if not uses_fully_shard(plan):
        return placed
    data_mesh = _data_mesh(mesh, plan)
    options: dict[str, Any] = {
        "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device.type != "cpu")
        if plan.offload.state
        else OffloadPolicy(),
    }
    reshard = plan.communication.reshard_after_forward
    if reshard is None:
        reshard = plan.zero == 3
    for part in placed.parts:
        names = {module: name for name, module in part.root.named_modules()}
        experts, ruled = experts_in(placed, part), ruled_modules(placed, part)
        grouped = groups_in(placed, part)
        for module in [*experts, *(m for m in [*ruled, *grouped] if m not in experts)]:  # before what holds them
            if not isinstance(module, FSDPModule):
                where = _expert_data_mesh(mesh) if module in experts else data_mesh
                policy = mixed_precision(plan, names[module], placed.types)
                _shard(module, where, reshard, {**options, "mp_policy": policy})
        policy = mixed_precision(plan, "", placed.types)
        _shard(part.run, data_mesh, False, {**options, "mp_policy": policy})
        _set_prefetch(grouped, plan.communication.prefetch)
        for module in part.run.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
    return placed.with_(placements=_record(placed, plan))


def replicate_data(placed: Placed, plan: Plan, mesh: Mesh) -> Placed:
    """Wrap for plain replication (DDP) once the parameters are real. DDP averages; the step undoes it."""
    if mesh.num_gradient_ranks == 1 or uses_fully_shard(plan):
        return placed
    communication = plan.communication
    # DDP's two modes look for parameters that the forward does not use, and would count the numbers as one of them
    looks = communication.find_unused or communication.static_graph
    carries = mesh.device.type == "cpu" and mesh.num_gradient_ranks <= MAX_RANKS and not looks
    group = unwrapped(mesh.group(*GRADIENT_AXES))
    parts = []
    for part in placed.parts:
        first = next((p for p in part.root.parameters() if p.requires_grad), None)
        if first is None:
            parts.append(part)
            continue
        inner = Unpacked(part.root) if looks else Carrier(part.root, first) if carries else part.root
        with warnings.catch_warnings():
            # deprecated in torch 2.13 without a replacement for "never": buffers are equal by construction
            warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
            wrapped = DistributedDataParallel(
                inner,
                process_group=group,
                bucket_cap_mb=communication.bucket_mb,
                broadcast_buffers=False,
                init_sync=False,
                find_unused_parameters=communication.find_unused,
                gradient_as_bucket_view=communication.bucket_view,
                static_graph=communication.static_graph,
            )
        if isinstance(inner, Unpacked):
            inner.around(wrapped)
        parts.append(Part(root=part.root, run=wrapped, stage=part.stage))
    reduced = frozenset(name for name, parameter in placed.named_parameters().items() if parameter.requires_grad)
    return placed.with_(parts=tuple(parts), reduced=reduced)


def gradient_divisor(placed: Placed) -> int:
    """By how much the data-parallel engine has divided the summed gradient: DDP averages, fully_shard sums."""
    return placed.mesh.num_gradient_ranks if isinstance(placed.parts[0].run, DistributedDataParallel) else 1


def _data_mesh(mesh: Mesh, plan: Plan) -> DeviceMesh:
    """The replicas and the shards. Ranks of `cp` hold different tokens of the same rows: they are either of the two."""
    more = ("cp",) if mesh.size("cp") > 1 else ()
    replicate = _axis(mesh.device_mesh, ("dp_replicate", *(() if plan.zero else more)))
    shard = _axis(mesh.device_mesh, ("dp_shard", *(more if plan.zero else ())))
    return join_meshes(replicate, shard) if replicate.size() > 1 else shard


def _axis(device_mesh: DeviceMesh, axes: tuple[str, ...]) -> DeviceMesh:
    """One axis, or several flattened to one."""
    return device_mesh[axes[0]] if len(axes) == 1 else flatten_mesh(device_mesh, axes)


def _expert_data_mesh(mesh: Mesh) -> DeviceMesh:
    """The ranks that hold the same experts: replicas, and the shards of those experts' parameters."""
    assert mesh.expert_mesh is not None
    names = ("dp_replicate", "expert_shard") if mesh.size("dp_replicate") > 1 else ("expert_shard",)
    return mesh.expert_mesh[names]


def _shard(module: nn.Module, data_mesh: DeviceMesh, reshard: bool | int, options: Mapping[str, Any]) -> None:
    """`fully_shard`, each parameter along the dim that the planner reckons with."""
    shards = data_mesh.size(data_mesh.ndim - 1)

    def place(parameter: nn.Parameter) -> Shard:
        shape = parameter.to_local().shape if isinstance(parameter, DTensor) else parameter.shape
        # torch reshards to a number of ranks along the first dim, whatever it was told before
        return Shard(0 if type(reshard) is int else sharded_dim(shape, shards))

    whole = scalars_in(module)
    fully_shard(
        module,
        mesh=data_mesh,
        reshard_after_forward=reshard,
        shard_placement_fn=place,
        ignored_params=whole or None,
        **options,
    )


def _set_prefetch(blocks: list[nn.Module], depth: int) -> None:
    """Gather `depth` blocks ahead; 1 is what torch does by itself in the backward pass."""
    if depth < 2:
        return
    modules = [cast(FSDPModule, block) for block in blocks]
    for i, module in enumerate(modules):
        module.set_modules_to_forward_prefetch(modules[i + 1 : i + 1 + depth])
        module.set_modules_to_backward_prefetch(modules[max(0, i - depth) : i][::-1])


def _record(placed: Placed, plan: Plan) -> dict[str, Placement]:
    rows = dict(placed.placements)
    shards = int(placed.mesh.size("dp_replicate") > 1)  # which of a parameter's axes shards it: replicas come before
    for name, parameter in placed.named_parameters().items():
        before = rows.get(name)
        axes = "replicated over dp_replicate"
        if not parameter.dim():
            axes = "whole on every data rank"
        elif plan.zero and isinstance(parameter, DTensor):
            dim = cast(Any, parameter.placements[shards]).dim  # of a Shard, or of torch's private strided one
            axis = "expert_shard" if name.rpartition(".")[0] in placed.experts else "dp_shard"
            axes = f"Shard({dim}) over {axis}"
        text = f"{before.text}; {axes}" if before else axes
        shape = before.global_shape if before else tuple(parameter.shape)
        rows[name] = Placement(pass_name="shard_data", text=text, global_shape=shape, dtype=str(parameter.dtype))
    return rows
