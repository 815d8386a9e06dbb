"""What a loss function takes over a part of the batch, and no division mends: remarked where a step has several parts.

A mean counts by its rows. One over labels that count, or weights of classes, weighs ranks and micro-batches otherwise
than one process does: the most common error of all in data parallelism. And a factor that is made of the gradient of a
weight (balanced losses) is made of that part's rows.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial, update_wrapper
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from shardwise.parallel.placed import Placed

_LOSSES = (F.cross_entropy, F.nll_loss)


def remarked_means(loss_fn: Callable[[Any, Any], Any], placed: Placed) -> Callable[[Any, Any], Any]:
    """The same loss function, which is looked at where a step has several parts.

    Cost: two microseconds per operation of the loss; in the first call a look at the labels.
    """
    parts = placed.mesh.batch.size * placed.plan.batch.micro_batches
    if parts == 1:
        return loss_fn
    looks, plan = _Looks(), f"`{placed.plan}` divides a batch into {parts} parts"

    @partial(update_wrapper, wrapped=loss_fn, updated=())
    def call(output: Any, batch: Any) -> Any:
        with looks:
            result = loss_fn(output, batch)
        if isinstance(result, torch.Tensor) and looks.labels:
            _warn(
                f"rank {placed.mesh.rank}: the loss function returned a mean, which counts by its rows, and found "
                f"{looks.labels}; {plan}, and where they differ in what counts that is not the mean of the whole; "
                "needed: a sum and its weight, as sw.token_cross_entropy(logits, labels) has, or sw.Loss(sum, weight)"
            )
        if looks.gradients == 1 and placed.mesh.tells:
            looks.gradients += 1
            _warn(
                "the loss function takes the gradient of a weight (torch.autograd.grad), which is that of a part's "
                f"rows; {plan}, and what is made of it (a factor between two losses) is another number than of the "
                "whole batch; use a factor that the parts share (of the step before, summed over ranks), or one part"
            )
        looks.labels, looks.is_first = "", False
        return result

    return call


def _warn(text: str) -> None:
    with suppress(Warning):  # `-W error` does not end a run that may be meant so
        warnings.warn(text, stacklevel=7)


class _Looks(TorchFunctionMode):
    """What is remarkable in a call of the loss function."""

    def __init__(self) -> None:
        super().__init__()
        self.is_first, self.labels, self.gradients = True, "", 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every call of a torch function comes here."""
        if self.is_first and func in _LOSSES and not self.labels:
            self.labels = _of_what(func.__name__, _bound(func, args, kwargs))
        if func is torch.autograd.grad and not self.gradients:
            inputs = _bound(func, args, kwargs)["inputs"]
            self.gradients = int(any(isinstance(each, nn.Parameter) for each in _listed(inputs)))
        return func(*args, **(kwargs or {}))


def _bound(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Mapping[str, Any]:
    return inspect.signature(func).bind(*args, **(kwargs or {})).arguments


def _listed(values: Any) -> Any:
    return values if isinstance(values, list | tuple) else [values]


def _of_what(name: str, given: Mapping[str, Any]) -> str:
    """Over what a loss of torch takes its mean; empty: over all labels alike, or none."""
    target, ignored = given["target"], given.get("ignore_index", -100)
    if given.get("reduction", "mean") != "mean" or target.is_meta:
        return ""
    if given.get("weight") is not None:
        return f"{name} with weights of classes, by which it divides"
    labels = target.numel()
    counted = labels if target.is_floating_point() else int((target != ignored).sum())
    return f"{name} over {counted} labels of {labels}: it ignores {ignored}" if counted < labels else ""
