"""Batch norm whose statistics are those of the rows of all data ranks, on any device.

torch's `SyncBatchNorm` needs a GPU. This one is two differentiable sums: exact, uneven rows included, and equal
to one process on the whole micro-batch.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


def synchronise_batch_norm(root: nn.Module, group: dist.ProcessGroup) -> None:
    """Make every batch norm below `root` use the rows of the whole group; names and parameters stay.

    Cost: one all-reduce of 2 x channels + 1 numbers per norm in forward, and one in backward.
    """
    for module in root.modules():
        if isinstance(module, BatchNorm):
            # an attribute of the instance, as for recompute: the module stays the user's
            object.__setattr__(module, "forward", _Forward(module, group))


class _Forward:
    def __init__(self, norm: BatchNorm, group: dist.ProcessGroup) -> None:
        self.norm, self.group = norm, group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        norm = self.norm
        if not (norm.training or norm.running_mean is None):
            return type(norm).forward(norm, x)
        dims = [d for d in range(x.dim()) if d != 1]
        shape = [1, -1] + [1] * (x.dim() - 2)
        count = torch.full((1,), x.numel() / x.shape[1], dtype=x.dtype, device=x.device)
        total = _sum(torch.cat([x.sum(dims), count]), self.group)
        count = total[-1].detach()
        mean = total[:-1] / count
        # squares of what is centred: no cancellation for channels far from zero
        variance = _sum((x - mean.view(shape)).square().sum(dims), self.group) / count
        if norm.track_running_stats:
            self._update(mean.detach(), variance.detach(), count)
        y = (x - mean.view(shape)) * torch.rsqrt(variance + norm.eps).view(shape)
        return y * norm.weight.view(shape) + norm.bias.view(shape) if norm.affine else y

    def _update(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        norm = self.norm
        tracked = cast(torch.Tensor, norm.num_batches_tracked)
        tracked.add_(1)
        unbiased = variance * (count / (count - 1))
        for running, value in ((norm.running_mean, mean), (norm.running_var, unbiased)):
            assert running is not None  # track_running_stats is on
            factor: Any = (1.0 / tracked).to(running.dtype) if norm.momentum is None else norm.momentum
            running.lerp_(value.to(running.dtype), factor)


def _sum(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    y: torch.Tensor = _SumOverGroup.apply(x, group)  # type: ignore[no-untyped-call]  # torch has no types here
    return y


class _SumOverGroup(torch.autograd.Function):
    """y = sum of x over ranks; every rank's y depends on every rank's x, so gradients are summed too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        y = x.clone()
        dist.all_reduce(y, group=group)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grads[0].clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None
