"""The norm of a gradient that is spread over a mesh: each element counted once."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from shardwise.parallel.mesh import Mesh
from shardwise.plan.plan import AXES
from shardwise.train.torch_private import norms
from shardwise.train.updates.joined import Joined

_FULL = {torch.float32, torch.float64}


def local_gradient(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """This rank's shard of the gradient, laid out as the parameter is; None where it has none.

    A gradient that is still a partial sum over the tensor axis is summed here (one collective): without it
    each rank would step on its own part of the sum.
    """
    grad = parameter.grad
    if grad is None or not isinstance(grad, DTensor):
        return grad
    if isinstance(parameter, DTensor) and tuple(grad.placements) != tuple(parameter.placements):
        grad = grad.redistribute(placements=parameter.placements)
        parameter.grad = grad
    local: torch.Tensor = grad.to_local()
    return local


def is_counted_here(parameter: torch.nn.Parameter, mesh: Mesh) -> bool:
    """True on the one rank, of those that hold the same elements, which adds them to a sum over the world.

    Stages of a pipeline hold different parameters: `pp` counts as sharded always.
    """
    outside = [axis for axis in AXES if axis != "pp" and mesh.size(axis) > 1]
    if isinstance(parameter, DTensor):
        here = parameter.device_mesh.get_coordinate()
        assert here is not None, "this rank is outside the mesh of its own parameter"
        for index, placement in zip(here, parameter.placements, strict=True):
            if placement.is_replicate() and index:
                return False  # all others: Shard, and the strided one of tensor shards sharded again
        covered = mesh.axes_of(parameter.device_mesh)
        outside = [axis for axis in outside if axis not in covered]
    return all(mesh.index(axis) == 0 for axis in outside)


def sum_of_squares(grads: Joined) -> torch.Tensor:
    """Sum of squares of this rank's share, fp64, shape (): add it up over the world for the squared norm.

    Half types are accumulated in fp32. What is joined is accumulated in fp64 and rounded to fp32: DDP orders its
    buckets anew after the first step, and a resumed run must not differ from one that went on.
    """
    half: dict[torch.device, list[torch.Tensor]] = {}
    for grad in grads.alone:
        if grad.dtype not in _FULL:
            half.setdefault(grad.device, []).append(grad)
    full = [grad for grad in grads.alone if grad.dtype in _FULL] if half else grads.alone
    found: list[torch.Tensor] = [torch.linalg.vector_norm(run, dtype=torch.float64).float() for run in grads.runs]
    found += [torch.stack(norms(those, torch.float32)) for those in half.values()]  # a few kernels for all of them
    if full or not found:
        found.append(_norm(full) if full else torch.zeros(()))
    first, *rest = [norm.double().square().sum() for norm in found]
    for square in rest:
        first = first + square.to(first.device)
    return first


def _norm(grads: list[torch.Tensor]) -> torch.Tensor:
    """`get_total_norm`, and on CPUs, where its grouping by device and type takes as long as the norms, without that."""
    if all(grad.is_cpu for grad in grads):
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms(grads)))
        return total
    return get_total_norm(grads)
