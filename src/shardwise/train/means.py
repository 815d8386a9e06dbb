"""Means that a loss function takes over something else than rows: over labels that count, or weights of classes.

It may return a mean, which counts by its rows. Ranks and micro-batches with other numbers of labels then weigh them
otherwise than one process does, without a word: the most common error of all in data parallelism.
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
from torch.overrides import TorchFunctionMode

from shardwise.parallel.placed import Placed

_LOSSES = (F.cross_entropy, F.nll_loss)


def remarked_means(loss_fn: Callable[[Any, Any], Any], placed: Placed) -> Callable[[Any, Any], Any]:
    """The same loss function, whose first call is looked at where a step has several parts.

    Cost: in the first call a look at the labels.
    """
    parts = placed.mesh.batch.size * placed.plan.batch.micro_batches
    seen: list[bool] = [] if parts > 1 else [True]

    @partial(update_wrapper, wrapped=loss_fn, updated=())
    def call(output: Any, batch: Any) -> Any:
        if seen:
            return loss_fn(output, batch)
        seen.append(True)
        with _Means() as means:
            result = loss_fn(output, batch)
        if isinstance(result, torch.Tensor) and means.found:
            with suppress(Warning):  # `-W error` does not end a run that may be meant so
                warnings.warn(
                    f"rank {placed.mesh.rank}: the loss function returned a mean, which counts by its rows, and found "
                    f"{means.found}; `{placed.plan}` divides a batch into {parts} parts, and where they differ in what "
                    "counts that is not the mean of the whole; needed: a sum and its weight, as "
                    "sw.token_cross_entropy(logits, labels) returns, or sw.Loss(sum, weight)",
                    stacklevel=6,
                )
        return result

    return call


class _Means(TorchFunctionMode):
    """What is remarkable of the means that are taken within it."""

    found = ""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every call of a torch function comes here."""
        if func in _LOSSES and not self.found:
            self.found = _of_what(func.__name__, inspect.signature(func).bind(*args, **(kwargs or {})).arguments)
        return func(*args, **(kwargs or {}))


def _of_what(name: str, given: Mapping[str, Any]) -> str:
    """Over what a loss of torch takes its mean; empty: over all labels alike, or none."""
    target, ignored = given["target"], given.get("ignore_index", -100)
    if given.get("reduction", "mean") != "mean" or target.is_meta:
        return ""
    if given.get("weight") is not None:
        return f"{name} with weights of classes, by which it divides"
    left_out = 0 if target.is_floating_point() else int((target == ignored).sum())
    return (
        f"{name} over {target.numel() - left_out} labels of {target.numel()}: it ignores {ignored}" if left_out else ""
    )
