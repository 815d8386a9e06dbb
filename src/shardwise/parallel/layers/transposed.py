"""Tensor parallelism for linear layers that keep their weight as (in, out): `Conv1D` of GPT-2 in `transformers`.

`y = x @ weight + bias`. Split by outputs, `weight` is sharded on dim 1 and `bias` on dim 0; split by inputs, `weight`
on dim 0, and the bias is added once.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor


def split_transposed(module: nn.Module, tp_mesh: DeviceMesh, row: bool, output: Placement) -> None:
    """Distribute the parameters, take plain or shared inputs, and give this rank's part of `output`.

    Args:
        module: its own forward is left as it is; it works on DTensors.
        tp_mesh: the axis, one-dimensional.
        row: split by inputs; else by outputs.
        output: what the other modules see: `Shard(-1)`, `Replicate()`, or `Shard(1)` of a sequence.

    Cost: as for `nn.Linear` of the same style.
    """
    width = cast(nn.Parameter, module.weight).shape[0]
    places = {"weight": Shard(0) if row else Shard(1), "bias": Replicate() if row else Shard(0)}
    for name, parameter in list(module.named_parameters(recurse=False)):
        shared = distribute_tensor(parameter.detach(), tp_mesh, (places[name],))
        module.register_parameter(name, nn.Parameter(shared, requires_grad=parameter.requires_grad))

    def take(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        tensor: torch.Tensor = args[0]
        if not isinstance(tensor, DTensor):
            split = row and tensor.shape[-1] != width
            here: Placement = Shard(tensor.dim() - 1) if split else Replicate()
            tensor = DTensor.from_local(tensor, tp_mesh, (here,), run_check=False)
        if row:
            tensor = tensor.redistribute(placements=(Shard(tensor.dim() - 1),))
        return (tensor, *args[1:])

    def give(_: nn.Module, args: tuple[Any, ...], result: DTensor) -> torch.Tensor:
        return result.redistribute(placements=(_positive(output, result.dim()),)).to_local()

    module.register_forward_pre_hook(take)
    module.register_forward_hook(give)


def _positive(placement: Placement, dims: int) -> Placement:
    return Shard(placement.dim % dims) if isinstance(placement, Shard) else placement
