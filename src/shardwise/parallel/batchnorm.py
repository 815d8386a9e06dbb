"""Batch norm whose statistics are those of the rows of all data ranks, on any device.

torch's `SyncBatchNorm` needs a GPU. This one is two differentiable sums: exact, uneven rows included, and equal
to one process on the whole micro-batch.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from shardwise.parallel.padding import Padding, follow_pipeline
from shardwise.parallel.placed import Part

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


def synchronise_batch_norm(part: Part, group: dist.ProcessGroup | None) -> None:
    """Make every batch norm of a part use the rows of the whole group; names and parameters stay.

    Args:
        part: whose norms.
        group: the data ranks; None: this rank is the only one.

    Cost: one all-reduce of channels + 1 numbers and one of channels per norm in forward, and the same in backward.
    """
    norms = [module for module in part.root.modules() if isinstance(module, BatchNorm)]
    if not norms:
        return
    padding = Padding()
    for norm in norms:
        # an attribute of the instance, as for recompute: the module stays the user's
        object.__setattr__(norm, "forward", _Forward(norm, group, padding))
    follow_pipeline(part, padding)


class _Forward:
    def __init__(self, norm: BatchNorm, group: dist.ProcessGroup | None, padding: Padding) -> None:
        self.norm, self.group, self.padding = norm, group, padding

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.element_size() >= 4:
            return self._normalised(x)
        return self._normalised(x.float()).to(x.dtype)  # half types: statistics are taken and kept in fp32

    def _normalised(self, x: torch.Tensor) -> torch.Tensor:
        norm = self.norm
        if not (norm.training or norm.running_mean is None):
            return self._by_running_statistics(x)
        dims = [d for d in range(x.dim()) if d != 1]
        shape = [1, -1] + [1] * (x.dim() - 2)
        counts = 0.0 if self.padding.now else 1.0  # padding takes part in the sums, with nothing
        count = x.new_full((1,), counts * x.numel() / x.shape[1])
        total = self._sum(torch.cat([x.sum(dims) * counts, count]))
        count = total[-1].detach()
        if self.padding.now and not count:  # padding on all ranks
            return self._by_running_statistics(x) if norm.running_mean is not None else x
        mean = total[:-1] / count
        # squares of what is centred: no cancellation for channels far from zero
        variance = self._sum((x - mean.view(shape)).square().sum(dims) * counts) / count
        if norm.track_running_stats:
            self._update(mean.detach(), variance.detach(), count)
        y = (x - mean.view(shape)) * torch.rsqrt(variance + norm.eps).view(shape)
        return y * norm.weight.view(shape) + norm.bias.view(shape) if norm.affine else y

    def _by_running_statistics(self, x: torch.Tensor) -> torch.Tensor:
        norm = self.norm
        weight, bias = (norm.weight.to(x.dtype), norm.bias.to(x.dtype)) if norm.affine else (None, None)
        return F.batch_norm(x, norm.running_mean, norm.running_var, weight, bias, training=False, eps=norm.eps)

    def _update(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        norm = self.norm
        tracked = cast(torch.Tensor, norm.num_batches_tracked)
        tracked.add_(1)
        unbiased = variance * (count / (count - 1).clamp(min=1))
        for running, value in ((norm.running_mean, mean), (norm.running_var, unbiased)):
            assert running is not None  # track_running_stats is on
            factor: Any = tracked.to(running.dtype).reciprocal() if norm.momentum is None else norm.momentum
            running.lerp_(value.to(running.dtype), factor)

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        if self.group is None:
            return x
        y: torch.Tensor = _SumOverGroup.apply(x, self.group)  # type: ignore[no-untyped-call]  # torch has no types here
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
