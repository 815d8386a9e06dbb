"""Losses as a sum and a weight, so that a mean of means cannot be written by accident.

A step adds the sums and the weights of all micro-batches on all ranks and divides once; see docs/loss.md.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from shardwise.errors import ModelError, UsageError
from shardwise.train.torch_private import is_mean

IGNORED = -100
"""Label of a token that does not count, as in torch."""


class Loss(NamedTuple):
    """A loss before its division: what a loss function returns.

    `sum` is a 0-dim tensor to back-propagate; `weight` is what it is divided by in the end (number of tokens, of
    samples, ...), a 0-dim tensor or a number, zero or more. The value is `sum / weight`.
    """

    sum: torch.Tensor
    weight: torch.Tensor | float


def token_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, *, ignore_index: int = IGNORED, z_loss: float = 0.0
) -> Loss:
    """Cross-entropy summed over the tokens whose label is not `ignore_index`, and their number.

    Args:
        logits: (..., vocab), floating; fp16 and bf16 are computed in fp32. Also a DTensor sharded along the vocabulary
            (`Tensor(loss=True)`): the loss comes from the shards, the whole logits are never built.
        labels: (...) int64, the same leading shape; the same on every tp rank.
        ignore_index: Label that does not count.
        z_loss: Factor of `log(sum(exp(logits)))^2`, added per token (Chowdhery et al., arXiv:2204.02311, section 5).

    Returns:
        `Loss(sum, weight)`: a 0-dim tensor in the computing type, and a 0-dim int64 count.

    Raises:
        UsageError: Shapes do not fit; labels are not int64; on the CPU, a label outside the vocabulary. (On an
            accelerator that check would wait for the device: there a label outside of sharded logits makes the
            loss NaN, and torch asserts on the device for whole ones.)

    Cost: one pass over the logits. Sharded: three all-reduces of one number per token, and one copy of the shard kept
    for the backward pass in place of the whole logits.

    Example:
        >>> token_cross_entropy(torch.zeros(1, 2, 4), torch.tensor([[3, -100]]))
        Loss(sum=tensor(1.3863), weight=tensor(1))
    """
    _check_shapes(logits, labels)
    labels = labels.reshape(-1)
    kept = labels != ignore_index
    if isinstance(logits, DTensor):
        local, tp_mesh = _vocabulary_shard(logits)
        if tp_mesh is not None:
            _check_range(labels, logits.shape[-1], ignore_index)
            local = _promoted(local.reshape(labels.numel(), local.shape[-1]))
            terms: tuple[torch.Tensor, torch.Tensor] = _ShardedTerms.apply(  # type: ignore[no-untyped-call]
                local, labels, tp_mesh, logits.shape[-1]
            )
            target, log_total = terms
            return _total(log_total - target, log_total, kept, z_loss)
        logits = local
    logits = _promoted(logits.reshape(-1, logits.shape[-1]))
    reduction = "sum" if z_loss == 0.0 else "none"
    try:
        nll = F.cross_entropy(logits, labels, ignore_index=ignore_index, reduction=reduction)
    except IndexError:  # the kernel has looked at every label already; say which one, and what to do
        _check_range(labels, logits.shape[-1], ignore_index)
        raise
    if z_loss == 0.0:
        return Loss(nll, kept.sum())
    return _total(nll, torch.logsumexp(logits, dim=-1), kept, z_loss)


def _total(nll: torch.Tensor, log_total: torch.Tensor, kept: torch.Tensor, z_loss: float) -> Loss:
    per_token = nll if z_loss == 0.0 else nll + z_loss * log_total.square()
    return Loss(torch.where(kept, per_token, torch.zeros_like(per_token)).sum(), kept.sum())


def _promoted(logits: torch.Tensor) -> torch.Tensor:
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def _check_shapes(logits: torch.Tensor, labels: torch.Tensor) -> None:
    if not isinstance(logits, torch.Tensor) or not logits.is_floating_point() or logits.dim() < 1:
        found = f"{logits.dtype} {tuple(logits.shape)}" if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise UsageError(
            f"token_cross_entropy: logits are {found}, needed a floating tensor of shape (..., vocab); pass what the "
            "model returns, or its .logits"
        )
    if labels.dtype != torch.int64 or labels.shape != logits.shape[:-1]:
        raise UsageError(
            f"token_cross_entropy: labels are {labels.dtype} of shape {tuple(labels.shape)}, needed torch.int64 of "
            f"shape {tuple(logits.shape[:-1])}, as the logits are {tuple(logits.shape)}; shift or reshape the labels"
        )


def _check_range(labels: torch.Tensor, vocab: int, ignore_index: int) -> None:
    # values on an accelerator are not looked at: that would make the host wait for the device
    if labels.device.type != "cpu" or type(labels) is not torch.Tensor or torch.compiler.is_compiling():
        return
    wrong = labels[(labels != ignore_index) & ((labels < 0) | (labels >= vocab))]
    if wrong.numel():
        raise UsageError(
            f"token_cross_entropy: {wrong.numel()} label(s) lie outside the vocabulary, the first is {int(wrong[0])}; "
            f"needed 0 to {vocab - 1}, or ignore_index={ignore_index}; the tokenizer's vocabulary must not exceed the "
            "model's"
        )


def _vocabulary_shard(logits: DTensor) -> tuple[torch.Tensor, DeviceMesh | None]:
    """This rank's shard and the mesh it is one of; or the whole logits and None when they are not split."""
    if len(logits.placements) != 1:
        raise ModelError(
            f"token_cross_entropy: logits lie on {len(logits.placements)} mesh axes {logits.placements}, needed one, "
            "sharded along the vocabulary; let the head alone return a DTensor"
        )
    (placement,) = logits.placements
    if isinstance(placement, Partial):
        logits = logits.redistribute(placements=(Replicate(),))
    elif isinstance(placement, Shard):
        if placement.dim % logits.dim() != logits.dim() - 1:
            raise ModelError(
                f"token_cross_entropy: logits of shape {tuple(logits.shape)} are sharded along dim {placement.dim}, "
                f"needed dim {logits.dim() - 1}, the vocabulary; give the output layer the rule 'head'"
            )
        return logits.to_local(), logits.device_mesh
    return logits.to_local(), None


class _ShardedTerms(torch.autograd.Function):
    """From this rank's shard of the logits: each token's target logit, and its log of the sum of exponentials.

    Both are the same on every rank of the mesh; so are the gradients that come back, and the gradient of the shard
    needs no communication: `onehot * grad_target + softmax * grad_log_total`.
    """

    @staticmethod
    def forward(
        ctx: Any, local_logits: torch.Tensor, labels: torch.Tensor, tp_mesh: DeviceMesh, vocab: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`local_logits` (tokens, local vocab), `labels` (tokens,) -> two tensors (tokens,)."""
        group = tp_mesh.get_group()
        first = tp_mesh.get_local_rank() * math.ceil(vocab / tp_mesh.size())
        num_local = local_logits.shape[-1]
        here = (labels >= first) & (labels < first + num_local)
        index = torch.where(here, labels - first, 0).clamp_(max=max(num_local - 1, 0))
        top = local_logits.amax(dim=-1) if num_local else local_logits.new_full(labels.shape, -math.inf)
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        softmax = (local_logits - top.unsqueeze(-1)).exp_()
        total = softmax.sum(dim=-1)
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
        softmax.div_(total.unsqueeze(-1))
        target = local_logits.new_zeros(labels.shape)
        if num_local:
            target = torch.where(here, local_logits.gather(-1, index.unsqueeze(-1)).squeeze(-1), target)
        dist.all_reduce(target, op=dist.ReduceOp.SUM, group=group)
        # a label that no rank holds must not pass for a logit of zero
        target = torch.where((labels >= 0) & (labels < vocab), target, math.nan)
        ctx.save_for_backward(softmax, index, here)
        return target, top + total.log()

    @staticmethod
    def backward(
        ctx: Any, grad_target: torch.Tensor, grad_log_total: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None]:
        """Gradient of the shard."""
        softmax, index, here = ctx.saved_tensors
        gradient = softmax * grad_log_total.unsqueeze(-1)
        if gradient.shape[-1]:
            gradient.scatter_add_(-1, index.unsqueeze(-1), (grad_target * here).unsqueeze(-1))
        return gradient, None, None, None


def mean_over(values: torch.Tensor, mask: torch.Tensor | None = None) -> Loss:
    """The mean of per-item losses, as a sum and a weight.

    Args:
        values: Losses of any shape, floating.
        mask: Which of them count (bool), or with which weight (floating, not negative); broadcast to `values`. A value
            that does not count may be NaN.

    Raises:
        UsageError: `values` are not floating, or `mask` does not broadcast to them.

    Example:
        >>> mean_over(torch.tensor([1.0, 5.0, 3.0]), torch.tensor([True, False, True]))
        Loss(sum=tensor(4.), weight=tensor(2))
    """
    if not values.is_floating_point():
        raise UsageError(f"mean_over: values are {values.dtype}, needed a floating tensor of per-item losses")
    values = _promoted(values)
    if mask is None:
        return Loss(values.sum(), torch.tensor(values.numel(), device=values.device))
    try:
        mask = mask.expand(values.shape)
    except RuntimeError as error:
        raise UsageError(
            f"mean_over: the mask has shape {tuple(mask.shape)}, needed one that broadcasts to the values' "
            f"{tuple(values.shape)}; reshape the mask"
        ) from error
    kept = torch.where(mask != 0, values, torch.zeros_like(values))
    if mask.is_floating_point():
        return Loss((kept * mask).sum(), mask.sum())
    return Loss(kept.sum(), (mask != 0).sum())


def refuse_mean(result: Any) -> None:
    """Refuse a scalar mean where a rank has a part of each sequence: means of parts do not add up to that of the whole.

    Raises:
        UsageError: `result` is a tensor, where a sum and a weight are needed.
    """
    if isinstance(result, torch.Tensor):
        raise UsageError(
            "the loss function returned a scalar mean under context parallelism (cp above 1), where this rank has a "
            "part of each sequence; needed a sum and its weight, which add up exactly: return Loss(sum, weight), as "
            "token_cross_entropy and mean_over do"
        )


def as_loss(result: Any, rows: int) -> Loss:
    """What a loss function returned, as a `Loss`.

    Args:
        result: A `Loss`; a tuple `(sum, weight)`; or a scalar mean over the batch, which counts as
            `(mean * rows, rows)`.
        rows: Number of rows of the micro-batch.

    Raises:
        UsageError: `result` is none of these, is not 0-dim, or its weight is negative or not finite. (A weight on an
            accelerator is not looked at: that would make the host wait for the device.) Or it is a tuple, not called a
            `Loss`, of a mean and a number that counts nothing: a measure beside a loss.

    Example:
        >>> as_loss(torch.tensor(2.0), rows=3)
        Loss(sum=tensor(6.), weight=3)
    """
    if isinstance(result, tuple):
        if len(result) != 2:
            raise UsageError(
                f"the loss function returned a tuple of {len(result)}, needed (sum, weight); return "
                "shardwise.Loss(sum, weight)"
            )
        loss = Loss(_scalar(result[0], "sum"), _checked_weight(result[1]))
        if not isinstance(result, Loss):
            _refuse_measure(loss)
        return loss
    mean = _scalar(result, "result")
    return Loss(mean * rows if rows else mean.nan_to_num() * 0, rows)  # the mean of no rows is not a number


def _refuse_measure(loss: Loss) -> None:
    weight = loss.weight
    is_number = isinstance(weight, float) or (isinstance(weight, torch.Tensor) and weight.is_floating_point())
    if not is_number or not is_mean(loss.sum):
        return
    if isinstance(weight, torch.Tensor) and (type(weight) is not torch.Tensor or weight.is_meta):
        return
    if not float(weight).is_integer():  # on an accelerator the host waits; a mean with such a weight is rare
        raise UsageError(
            f"the loss function returned a mean and {float(weight):.4g}: a tuple of two is a sum and its weight, what "
            "the sum is divided by, and no count is such a number; needed: the mean alone, where the other is a "
            "measure (measures belong into evaluate()); sw.Loss(sum, weight), where it is a weight"
        )


def differentiable(loss: Loss) -> Loss:
    """The loss, that a backward pass can begin from.

    Raises:
        UsageError: it depends on no parameter, by autograd.
    """
    if isinstance(loss.sum, torch.Tensor) and loss.sum.requires_grad:
        return loss
    raise UsageError(
        "the loss has no gradient: found one from which autograd does not lead back to a parameter (made under "
        "no_grad or of detached outputs, of whole numbers as argmax gives them, or of the batch alone); needed what "
        "training shall make smaller; measures belong into evaluate()"
    )


def _scalar(value: Any, what: str) -> torch.Tensor:
    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() == 1:
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        return whole if whole.dim() == 0 else whole.sum()  # no view: pipelines detach their outputs in place
    found = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
    unlabelled = "; a model is not given `labels`, so that `output.loss` of one of transformers is None: take "
    unlabelled += '`output.logits` and `batch["labels"]`'
    raise UsageError(
        f"the loss function returned as its {what} {found}, needed a floating tensor of one element; return a scalar "
        f"mean, or Loss(sum, weight), as token_cross_entropy and mean_over do{unlabelled if value is None else ''}"
    )


def _checked_weight(weight: Any) -> torch.Tensor | float:
    if isinstance(weight, torch.Tensor) and weight.numel() == 1:
        if weight.requires_grad:
            raise UsageError(
                "the loss function returned a weight that requires a gradient; the weight is what the sum is "
                "divided by, a constant of the batch: return weight.detach()"
            )
        if not weight.is_cpu or type(weight) is not torch.Tensor:
            return weight.reshape(())
        value = float(weight)
    elif isinstance(weight, int | float) and not isinstance(weight, bool):
        value = float(weight)
    else:
        found = (
            f"a tensor of shape {tuple(weight.shape)}" if isinstance(weight, torch.Tensor) else type(weight).__name__
        )
        raise UsageError(
            f"the loss function returned as its weight {found}, needed a number or a tensor of one element"
        )
    if not math.isfinite(value) or value < 0:
        raise UsageError(
            f"the loss function returned the weight {value}, needed a finite number, zero or more: the count of "
            "tokens or samples in the sum"
        )
    return weight.reshape(()) if isinstance(weight, torch.Tensor) and weight.dim() else weight
