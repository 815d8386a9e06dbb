"""Give every parameter and buffer its value from (seed, name): the same bits under every plan.

A rank makes one full tensor at a time, keeps its own shard of it, and frees the rest. Nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from shardwise.errors import ModelError
from shardwise.parallel.initial.blueprint import Blueprint, Init, blueprint_of, record
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.placed import Placed
from shardwise.parallel.torch_private import (
    empty_as,
    refresh,
    resync_fully_sharded,
    strided_shard_factor,
    swap_tensors,
)


def blueprint_for(module_or_factory: nn.Module | Callable[[], nn.Module], init: Init | None, mesh: Mesh) -> Blueprint:
    """The blueprint of what a user hands to `apply`, checked to be the same on every rank.

    A collective when the mesh has several ranks and the module holds values that are not drawn from the seed.

    Raises:
        ModelError: a constructor that cannot run without values, or values that differ between ranks.
    """
    if isinstance(module_or_factory, nn.Module):
        blueprint = blueprint_of(module_or_factory, init)
    else:
        blueprint = record(module_or_factory, init)
    blueprint.check_equal_on_all_ranks(mesh)
    return blueprint


def init_model(
    factory: Callable[[], nn.Module],
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    init: Init | None = None,
) -> nn.Module:
    """The whole module on one process, with the bits that `apply` gives under any plan.

    Args:
        factory: a class or function that takes no argument and returns a new module.
        seed: the job's.
        device: where the module goes.
        dtype: type of floating-point parameters and buffers; None: the constructor's.
        init: see `Init`.

    Raises:
        ModelError: the constructor cannot run without values.

    >>> init_model(lambda: nn.Linear(2, 1), seed=0).weight.shape
    torch.Size([1, 2])
    """
    blueprint = record(factory, init)
    fill(blueprint.module, blueprint, seed, allocate(blueprint.module, torch.device(device), torch.device(device)))
    return blueprint.module if dtype is None else blueprint.module.to(dtype)


def materialize(placed: Placed, init: Init | None, seed: int, device: torch.device) -> Placed:
    """Allocate this rank's shards of all tensors that are on meta and give them their values.

    Tensors that are real already are left alone. With `plan.offload.state` parameters go to the CPU.

    Args:
        placed: after the passes; its blueprint is that of the module before them.
        init: another way to initialise than the constructor's; None: what the blueprint says.
        seed: the job's.
        device: this rank's.

    Raises:
        ModelError: a tensor on meta has no value in the blueprint, or a shard whose shape is not what its
            placement says.

    Cost: every operation of the constructor once for the tensors of this rank's stages; at most one full tensor
    (and what its constructor needs besides) on the CPU at a time.
    """
    blueprint = placed.blueprint
    meta = [name for part in placed.parts for name in _meta_names(part.root)]
    if not meta:
        return placed.with_(blueprint=blueprint.released() if blueprint is not None else None)
    if blueprint is None:
        raise ModelError(
            f"materialize: {meta[0]} is on meta and there is no blueprint to give it a value; call apply()"
        )
    if init is not None and init != blueprint.init:
        if blueprint.factory is None:
            raise ModelError(
                "materialize: init= with an instance must be given when the blueprint is made; pass a factory"
            )
        blueprint = record(blueprint.factory, init)
    parameter_device = torch.device("cpu") if placed.plan.offload.state else device
    for part in placed.parts:
        names = allocate(part.root, device, parameter_device)
        if part.run is not part.root:
            resync_fully_sharded(part.run)  # a stage's wrapper may be what was sharded
        fill(part.root, blueprint, seed, names)
    return placed.with_(blueprint=blueprint.released())


def _meta_names(root: nn.Module) -> list[str]:
    tensors = [*root.named_parameters(), *root.named_buffers()]
    return [name for name, tensor in tensors if tensor.is_meta]


def allocate(root: nn.Module, device: torch.device, parameter_device: torch.device) -> list[str]:
    """Give the tensors on meta memory for this rank's shard; the names of those. Tied tensors stay tied."""
    names = _meta_names(root)
    parameters: dict[nn.Parameter, nn.Parameter] = {}
    buffers: dict[torch.Tensor, torch.Tensor] = {}
    for module in root.modules():
        own = [*module._parameters.items(), *module._buffers.items()]
        waiting = [(key, tensor) for key, tensor in own if tensor is not None and tensor.is_meta]
        for key, tensor in waiting:
            if isinstance(tensor, nn.Parameter):
                if tensor not in parameters:
                    # one without dims is no part of the shards, which may live on another device
                    parameters[tensor] = _allocate_parameter(tensor, parameter_device if tensor.dim() else device)
                module._parameters[key] = parameters[tensor]
            else:
                if tensor not in buffers:
                    buffers[tensor] = torch.empty_like(tensor, device=device)
                module._buffers[key] = buffers[tensor]
        if waiting and isinstance(module, nn.RNNBase):
            refresh(module)  # it keeps a second list of its weights
    resync_fully_sharded(root)
    return names


def _allocate_parameter(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    with torch.no_grad():
        real = nn.Parameter(empty_as(parameter, device), requires_grad=parameter.requires_grad)
    if isinstance(parameter, DTensor):
        swap_tensors(parameter, real)  # fully_shard holds on to the object
        return parameter
    vars(real).update(vars(parameter))  # marks of the user's own, such as `weight.no_decay = True`
    return real


@torch.no_grad()
def fill(root: nn.Module, blueprint: Blueprint, seed: int, names: list[str]) -> None:
    """Write this rank's shard of each named tensor, and of plain attribute tensors, from its full value.

    Raises:
        ModelError: a name that the blueprint does not know, or a shape that its placement does not give.
    """
    tensors = dict(root.named_parameters()) | dict(root.named_buffers())
    for name in names:
        target = tensors[name]
        local = target.to_local() if isinstance(target, DTensor) else target
        shard = local_slice(blueprint.value(name, seed), target, name)
        local.copy_(shard)
        del shard  # the full tensor goes with it, before the next one is made
    modules = dict(root.named_modules())
    device = next((t.device for t in root.buffers()), None) or next((t.device for t in root.parameters()), None)
    for name in blueprint.attributes:
        path, _, key = name.rpartition(".")
        held = vars(modules[path]).get(key) if path in modules else None
        if isinstance(held, torch.Tensor) and held.is_meta:
            setattr(modules[path], key, blueprint.value(name, seed, device or "cpu", held.dtype))


def local_slice(full: torch.Tensor, target: torch.Tensor, name: str = "tensor") -> torch.Tensor:
    """This rank's part of a full tensor, as a view: from placements and mesh coordinates, nothing communicated.

    Shards follow `torch.chunk`: the first ones are the larger, the last may be empty. A strided shard
    (`fully_shard` over tensor parallelism on the same dim) is taken after the shards to its right.

    Args:
        full: the whole tensor.
        target: the parameter or buffer that it is for.
        name: for the message.

    Raises:
        ModelError: shapes that do not agree.
    """
    if tuple(full.shape) != tuple(target.shape):
        raise ModelError(
            f"{name}: its value has shape {tuple(full.shape)}, its place in the plan {tuple(target.shape)}; they must "
            f"be equal; a pass changed the parameter's shape, so place it with DTensor in place of cutting it"
        )
    if not isinstance(target, DTensor):
        return full
    coordinate = target.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is outside the mesh of its own parameter"
    placements = list(enumerate(target.placements))
    plain = [(axis, p) for axis, p in placements if strided_shard_factor(p) is None]
    strided = [(axis, p) for axis, p in reversed(placements) if strided_shard_factor(p) is not None]
    local = full
    for axis, placement in (*plain, *strided):
        if not placement.is_replicate():
            dim = _shard_dim(placement, name)
            local = _chunk(local, dim, target.device_mesh.size(axis), coordinate[axis])
    if local.shape != target.to_local().shape:
        raise ModelError(
            f"{name}: rank's shard has shape {tuple(target.to_local().shape)}, but {target.placements} on "
            f"{tuple(target.device_mesh.shape)} gives {tuple(local.shape)} of {tuple(full.shape)}; "
            f"choose degrees that divide the dim"
        )
    return local


def _shard_dim(placement: object, name: str) -> int:
    dim = getattr(placement, "dim", None)
    if not isinstance(dim, int) or not (isinstance(placement, Shard) or hasattr(placement, "split_factor")):
        raise ModelError(f"{name}: a parameter placed as {placement}; only shards and replicas can be initialised")
    return dim


def _chunk(tensor: torch.Tensor, dim: int, count: int, index: int) -> torch.Tensor:
    size = tensor.shape[dim]
    step = -(-size // count)
    start = min(index * step, size)
    return tensor.narrow(dim, start, min(step, size - start))
