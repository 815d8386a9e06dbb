"""Batch norm whose statistics are those of the rows of all data ranks, on any device.

torch's `SyncBatchNorm` needs a GPU. This one is two sums over ranks: exact, uneven rows included, and equal to one
process on the whole micro-batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from shardwise.parallel.padding import Padding, follow_pipeline
from shardwise.parallel.placed import Part

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


class AnyBatchNorm(nn.BatchNorm1d):
    """What `convert_sync_batchnorm` has made of a batch norm, which was one of the three."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


def prepare_sync_norms(root: nn.Module) -> None:
    """Let every `SyncBatchNorm` be the batch norm that it was: `synchronise_batch_norm` sees to the ranks.

    torch's own adds up over the whole world, whatever ranks hold, and runs on no CPU.
    """
    for module in root.modules():
        if type(module) is nn.SyncBatchNorm:
            cast(Any, module).__class__ = AnyBatchNorm


def synchronise_batch_norm(part: Part, group: dist.ProcessGroup | None) -> None:
    """Make every batch norm of a part use the rows of the whole group; names and parameters stay.

    A norm with a forward of its own (an activation after it, a cast around it) keeps it: of that the call of
    `torch.nn.functional.batch_norm` is carried out over the ranks.

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
        is_own = "forward" in vars(norm) or type(norm).forward is not nn.BatchNorm1d.forward
        forward = (_Around if is_own else _Forward)(norm, group, padding)
        # an attribute of the instance, as for recompute: the module stays the user's
        object.__setattr__(norm, "forward", forward)
    follow_pipeline(part, padding)


class _Call(NamedTuple):
    """What `torch.nn.functional.batch_norm` is given beside its input."""

    running_mean: torch.Tensor | None
    running_var: torch.Tensor | None
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    training: bool = False
    momentum: Any = 0.1
    eps: float = 1e-5


class _Forward:
    """The forward of a batch norm."""

    def __init__(self, norm: BatchNorm, group: dist.ProcessGroup | None, padding: Padding) -> None:
        self.norm, self.group, self.padding = norm, group, padding

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        norm = self.norm
        tracked = norm.num_batches_tracked if norm.training and norm.track_running_stats else None
        running = (None, None) if norm.training and tracked is None else (norm.running_mean, norm.running_var)
        factor: Any = norm.momentum
        if tracked is not None and norm.running_mean is not None and factor is None:
            factor = (tracked + 1).to(norm.running_mean.dtype).reciprocal()
        trains = norm.training or norm.running_mean is None
        y, counted = self.normalised(x, _Call(*running, norm.weight, norm.bias, trains, factor, norm.eps))
        if tracked is not None and counted:
            tracked.add_(1)
        return y

    def normalised(self, x: torch.Tensor, call: _Call) -> tuple[torch.Tensor, bool]:
        """What `torch.nn.functional.batch_norm` does, over all ranks; and whether there were rows that count."""
        if call.training:
            counts = 0.0 if self.padding.now else 1.0  # padding takes part in the sums, with nothing
            if self.group is None and counts and x.numel() > x.shape[1]:  # of one value torch has no variance
                return _alone(x, call), True
            with torch.no_grad():
                mean, variance, count = found = self.statistics(_wide(x), counts)
            if counts or count:
                if call.running_mean is not None and call.running_var is not None:
                    unbiased = variance * (count / (count - 1).clamp(min=1))
                    for running, value in ((call.running_mean, mean), (call.running_var, unbiased)):
                        running.lerp_(value.to(running.dtype), call.momentum)
                scale = torch.ones_like(mean) if call.weight is None else call.weight.to(mean.dtype)
                shift = torch.zeros_like(mean) if call.bias is None else call.bias.to(mean.dtype)
                apply: Any = _Normalised.apply  # torch does not annotate it
                return apply(x, scale, shift, found, (counts, call.eps), self), True
        if call.running_mean is None:  # padding on all ranks
            return x, False
        kind = call.running_mean.dtype
        weight, bias = (None if each is None else each.to(kind) for each in (call.weight, call.bias))
        return F.batch_norm(x, call.running_mean, call.running_var, weight, bias, eps=call.eps), False

    def statistics(self, x: torch.Tensor, counts: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Mean, biased variance and count of all ranks' rows, as differentiable sums; `counts`: 0 for padding.

        Squares are of what is centred: no cancellation for channels far from zero.
        """
        dims = _dims(x)
        here = x.new_full((1,), counts * x.numel() / x.shape[1])
        total = self.sum_of(torch.cat([x.sum(dims) * counts, here]))
        count = total[-1].detach()
        mean = total[:-1] / count
        return mean, self.sum_of((x - mean.view(_shape(x))).square().sum(dims) * counts) / count, count

    def plain(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, counts: float, eps: float
    ) -> torch.Tensor:
        """What `_Normalised` gives, by operations that can be derived twice."""
        wide, shape = _wide(x), _shape(x)
        mean, variance, _ = self.statistics(wide, counts)
        y = (wide - mean.view(shape)) * torch.rsqrt(variance + eps).view(shape)
        return (y * weight.view(shape) + bias.view(shape)).to(x.dtype)

    def sum_of(self, x: torch.Tensor) -> torch.Tensor:
        """Over all ranks."""
        if self.group is None:
            return x
        apply: Any = _SumOverGroup.apply  # torch does not annotate it
        y: torch.Tensor = apply(x, self.group)
        return y


class _Around(_Forward):
    """A forward of the norm's own, or one that another pass has put in its place."""

    def __init__(self, norm: BatchNorm, group: dist.ProcessGroup | None, padding: Padding) -> None:
        super().__init__(norm, group, padding)
        self.forward, self.is_idle = norm.forward, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tracked, self.is_idle = self.norm.num_batches_tracked, False
        before = tracked.clone() if self.padding.now and tracked is not None else None
        with _OverRanks(self):
            y = self.forward(*args, **kwargs)
        if self.is_idle and tracked is not None and before is not None:
            tracked.copy_(before)
        return y

    def batch_norm(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        y, counted = self.normalised(x, _Call(*args, **kwargs))
        self.is_idle = not counted
        return y


class _OverRanks(TorchFunctionMode):
    """Carries `torch.nn.functional.batch_norm` out over the ranks."""

    def __init__(self, norm: _Around) -> None:
        super().__init__()
        self.norm = norm

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every call of a torch function comes here."""
        return (self.norm.batch_norm if func is F.batch_norm else func)(*args, **(kwargs or {}))


def _alone(x: torch.Tensor, call: _Call) -> torch.Tensor:
    """By torch's own kernels, which take weights and statistics of fp32 beside a half type, and of no other mixture."""
    kind, momentum = _kind(x), call.momentum
    weight, bias = (None if each is None else each.to(kind) for each in (call.weight, call.bias))
    kept = [each for each in (call.running_mean, call.running_var) if each is not None]
    is_apart = any(each.dtype != kind for each in kept) or isinstance(momentum, torch.Tensor)
    if is_apart:
        mean, variance, momentum = *torch.zeros(2, x.shape[1], dtype=kind, device=x.device), 1.0
    else:
        mean, variance = kept or (None, None)
    y = torch.batch_norm(x, weight, bias, mean, variance, True, momentum, call.eps, torch.backends.cudnn.enabled)
    if is_apart:
        for running, found in zip(kept, (mean, variance), strict=True):
            running.lerp_(found.to(running.dtype), call.momentum)
    return y


def _kind(x: torch.Tensor) -> torch.dtype:
    """Half types: statistics are taken and kept in fp32."""
    return torch.promote_types(x.dtype, torch.float32)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(_kind(x))


def _dims(x: torch.Tensor) -> list[int]:
    """All but the channels'."""
    return [d for d in range(x.dim()) if d != 1]


def _shape(x: torch.Tensor) -> list[int]:
    """Of numbers per channel, beside `x`."""
    return [1, -1] + [1] * (x.dim() - 2)


class _Normalised(torch.autograd.Function):
    """Normalised by the statistics of all ranks: only `x` is kept, in its own type."""

    @staticmethod
    def forward(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        found: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        terms: tuple[float, float],
        norm: _Forward,
    ) -> torch.Tensor:
        (mean, variance, _), (_, eps) = found, terms
        scale, shape = torch.rsqrt(variance + eps), _shape(x)  # centred first: there may be two rows
        return (_wide(x) - mean.view(shape)).mul_((weight * scale).view(shape)).add_(bias.view(shape)).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, weight, bias, found, (ctx.counts, ctx.eps), ctx.norm = inputs
        ctx.save_for_backward(x, weight, bias, *found)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias, mean, variance, count = ctx.saved_tensors
        norm: _Forward = ctx.norm
        eps: float = ctx.eps
        if torch.is_grad_enabled():  # the derivative is derived in turn, through the statistics
            wanted = [tensor for tensor in (x, weight, bias) if tensor.requires_grad]
            y = norm.plain(x, weight, bias, ctx.counts, eps)
            found = iter(torch.autograd.grad(y, wanted, grads, create_graph=True))
            return *(next(found) if tensor.requires_grad else None for tensor in (x, weight, bias)), *[None] * 3
        scale, shape = torch.rsqrt(variance + eps), _shape(x)
        dims, slope, centred = _dims(x), _wide(grads[0]), _wide(x) - mean.view(shape)
        to_bias, to_weight = slope.sum(dims), (slope * centred).sum(dims) * scale
        # every rank has a share in the statistics; centred first: of two rows next to nothing is left
        slope = slope - (norm.sum_of(to_bias) * (ctx.counts / count)).view(shape)
        by_scale = norm.sum_of((slope * centred).sum(dims)) * (ctx.counts / count) * scale.square()
        to_x = slope.addcmul_(centred, by_scale.view(shape), value=-1).mul_((weight * scale).view(shape))
        return to_x.to(x.dtype), to_weight, to_bias, *[None] * 3


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
