"""The private torch names that this folder uses, and nothing else. Each has a test that fails when torch moves it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def scale_all(tensors: list[Tensor], factor: float) -> None:
    """Multiply every tensor by a number, in place: `torch._foreach_mul_`, one kernel for all where there is one."""
    torch._foreach_mul_(tensors, factor)


def norms(tensors: list[Tensor]) -> list[Tensor]:
    """The L2 norm of every tensor, shape () each: `torch._foreach_norm`."""
    return list(torch._foreach_norm(tensors))


def average_into(averages: list[Tensor], values: list[Tensor], weight: float) -> None:
    """`average += weight * (value - average)` for every pair, in place: `torch._foreach_lerp_`."""
    values = [value.to(average.dtype) for average, value in zip(averages, values, strict=True)]
    torch._foreach_lerp_(averages, values, weight)


def clamp_all(tensors: list[Tensor], limit: float) -> None:
    """Clamp every element to [-limit, limit], in place: `torch._foreach_clamp_min_` and `_max_`."""
    torch._foreach_clamp_min_(tensors, -limit)
    torch._foreach_clamp_max_(tensors, limit)


def shard_like(local: Tensor, like: DTensor) -> DTensor:
    """`local` as the shard of a DTensor with the layout and global shape of `like`, sharing its storage.

    `DTensor.from_local` would do, but it moves the shard to the mesh's device: state that lives in host memory
    on purpose (offload) would land on the accelerator. So: `DTensor(local, spec)`, private in torch 2.13.
    """
    spec = like._spec
    if spec.tensor_meta is not None and spec.tensor_meta.dtype != local.dtype:
        spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype))
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy every source into its target, in order; from an accelerator without waiting: `torch._foreach_copy_`."""
    if targets:
        torch._foreach_copy_(targets, sources, non_blocking=True)


def local_of(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, or the tensor itself; no copy, no autograd.

    `DTensor.to_local` goes through autograd: a hundredth of a millisecond for each of hundreds of tensors.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def in_backward() -> bool:
    """Whether autograd runs right now, as when a forward is recomputed: `torch._C._current_graph_task_id`."""
    return int(torch._C._current_graph_task_id()) != -1
