"""Batch norm whose statistics are those of the rows of all data ranks, on any device.

torch's `SyncBatchNorm` needs a GPU. This one is two sums over ranks: exact, uneven rows included, and equal to one
process on the whole micro-batch.
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
        norm = self.norm
        if not (norm.training or norm.running_mean is None):
            return self._by_running_statistics(x)
        counts = 0.0 if self.padding.now else 1.0  # padding takes part in the sums, with nothing
        with torch.no_grad():
            mean, variance, count = self.statistics(_wide(x), counts)
        if self.padding.now and not count:  # padding on all ranks
            return self._by_running_statistics(x) if norm.running_mean is not None else x
        if norm.track_running_stats:
            self._update(mean, variance, count)
        found = mean, variance, count
        weight, bias = (norm.weight, norm.bias) if norm.affine else (torch.ones_like(mean), torch.zeros_like(mean))
        apply: Any = _Normalised.apply  # torch does not annotate it
        y: torch.Tensor = apply(x, weight.to(mean.dtype), bias.to(mean.dtype), found, counts, self)
        return y

    def statistics(self, x: torch.Tensor, counts: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Mean, biased variance and count of all ranks' rows, as differentiable sums; `counts`: 0 for padding.

        Squares are of what is centred: no cancellation for channels far from zero.
        """
        dims = _dims(x)
        here = x.new_full((1,), counts * x.numel() / x.shape[1])
        if self.group is None and counts:
            variance, mean = torch.var_mean(x, dims, correction=0)
            return mean, variance, here
        total = self.sum_of(torch.cat([x.sum(dims) * counts, here]))
        count = total[-1].detach()
        mean = total[:-1] / count
        return mean, self.sum_of((x - mean.view(_shape(x))).square().sum(dims) * counts) / count, count

    def plain(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, counts: float) -> torch.Tensor:
        """What `_Normalised` gives, by operations that can be derived twice."""
        wide, shape = _wide(x), _shape(x)
        mean, variance, _ = self.statistics(wide, counts)
        y = (wide - mean.view(shape)) * torch.rsqrt(variance + self.norm.eps).view(shape)
        return (y * weight.view(shape) + bias.view(shape)).to(x.dtype)

    def _by_running_statistics(self, x: torch.Tensor) -> torch.Tensor:
        norm = self.norm
        kind = norm.running_mean.dtype if norm.running_mean is not None else x.dtype
        weight, bias = (norm.weight.to(kind), norm.bias.to(kind)) if norm.affine else (None, None)
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

    def sum_of(self, x: torch.Tensor) -> torch.Tensor:
        """Over all ranks."""
        if self.group is None:
            return x
        apply: Any = _SumOverGroup.apply  # torch does not annotate it
        y: torch.Tensor = apply(x, self.group)
        return y


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Half types: statistics are taken and kept in fp32."""
    return x if x.element_size() >= 4 else x.float()


def _dims(x: torch.Tensor) -> list[int]:
    """All but the channels'."""
    return [d for d in range(x.dim()) if d != 1]


def _shape(x: torch.Tensor) -> list[int]:
    """Of numbers per channel, beside `x`."""
    return [1, -1] + [1] * (x.dim() - 2)


class _Normalised(torch.autograd.Function):
    """Normalised by the statistics of all ranks: only `x` is kept, in its own type. One rank runs torch's kernels."""

    @staticmethod
    def forward(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        found: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        counts: float,
        norm: _Forward,
    ) -> torch.Tensor:
        mean, variance, _ = found
        if norm.group is None:
            return F.batch_norm(x, mean, variance, weight, bias, training=False, eps=norm.norm.eps)
        scale, shape = torch.rsqrt(variance + norm.norm.eps), _shape(x)  # centred first: there may be two rows
        return (_wide(x) - mean.view(shape)).mul_((weight * scale).view(shape)).add_(bias.view(shape)).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, weight, bias, found, ctx.counts, ctx.norm = inputs
        ctx.save_for_backward(x, weight, bias, *found)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias, mean, variance, count = ctx.saved_tensors
        norm: _Forward = ctx.norm
        if torch.is_grad_enabled():  # the derivative is derived in turn, through the statistics
            wanted = [tensor for tensor in (x, weight, bias) if tensor.requires_grad]
            y = norm.plain(x, weight, bias, ctx.counts)
            found = iter(torch.autograd.grad(y, wanted, grads, create_graph=True))
            return *(next(found) if tensor.requires_grad else None for tensor in (x, weight, bias)), None, None, None
        scale, shape = torch.rsqrt(variance + norm.norm.eps), _shape(x)
        if norm.group is None and ctx.counts:
            fused, every = torch.ops.aten.native_batch_norm_backward, [True, True, True]
            return *fused(grads[0], x, weight, None, None, mean, scale, True, norm.norm.eps, every), None, None, None
        dims, slope, centred = _dims(x), _wide(grads[0]), _wide(x) - mean.view(shape)
        to_bias, to_weight = slope.sum(dims), (slope * centred).sum(dims) * scale
        # every rank has a share in the statistics; centred first: of two rows next to nothing is left
        slope = slope - (norm.sum_of(to_bias) * (ctx.counts / count)).view(shape)
        by_scale = norm.sum_of((slope * centred).sum(dims)) * (ctx.counts / count) * scale.square()
        to_x = slope.addcmul_(centred, by_scale.view(shape), value=-1).mul_((weight * scale).view(shape))
        return to_x.to(x.dtype), to_weight, to_bias, None, None, None


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
        apply: Any = _SumOverGroup.apply  # and so it can be derived in turn
        return apply(grads[0], ctx.group), None
