"""What a loss function takes over a part of the batch, and no division mends: remarked where a step has several parts.

A mean counts by its rows. One over labels that count, or weights of classes, weighs ranks and micro-batches otherwise
than one process does: the most common error of all in data parallelism. And a factor that is made of the gradient of a
weight (balanced losses) is made of that part's rows.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from functools import partial, update_wrapper
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shardwise.model.nested import leaves, put
from shardwise.parallel.inputs import Signature, model_inputs
from shardwise.parallel.layers.batchnorm import BatchNorm
from shardwise.parallel.placed import Placed
from shardwise.parallel.randomness.generators import states
from shardwise.parallel.refused.written import values_of
from shardwise.train.guards.halving import communicating
from shardwise.train.look import Repeatable
from shardwise.train.of_rows import OfModel, remembers, unlike_parts
from shardwise.train.torch_private import mean_of_labels

_EVERY = 17
"""Calls between two looks at what a loss function does: prime, so that each micro-batch of a step has its turn."""


def remarked_means(loss_fn: Callable[[Any, Any], Any], placed: Placed) -> Callable[[Any, Any], Any]:
    """The same loss function, which is looked at where a step has several parts.

    Cost: in one call of `_EVERY` two microseconds per operation of the loss; in the first a look at the labels, and on
    one rank at parts of it, see `unlike_parts`; two passes over weights of which that rank has the whole.
    """
    parts = placed.mesh.batch.size * placed.plan.batch.micro_batches
    if parts == 1:
        return loss_fn
    weights = dict(values_of(placed.parts[0].root)) if placed.mesh.tells and not communicating(placed) else {}
    looks, calls, plan = _Looks(), count(), f"`{placed.plan}` divides a batch into {parts} parts"
    repeatable = Repeatable()

    @partial(update_wrapper, wrapped=loss_fn, updated=())
    def call(output: Any, batch: Any) -> Any:
        number = next(calls)
        before, given = (states(placed.mesh.device), _versions(output, batch)) if not number else ({}, [])
        with looks if number % _EVERY == 0 else nullcontext(), repeatable.watched() if not number else nullcontext():
            result = loss_fn(output, batch)
        if not number:
            if isinstance(result, torch.Tensor) and (found := _of_labels(result)):
                _warn(
                    f"rank {placed.mesh.rank}: the loss function returned a mean, which counts by its rows, and found "
                    f"{found}; {plan}, and where they differ in what counts that is not the mean of the whole; "
                    "needed: a sum and its weight: sw.token_cross_entropy(logits, labels), or sw.Loss(sum, weight)"
                )
            elif placed.mesh.tells and repeatable.holds:
                seen = _without_graph(output)
                writes = _versions(output, batch) != given
                found = "" if writes else remembers(loss_fn, seen, batch, before, result)
                said = _of_memory(loss_fn, placed, seen, batch, found)
                if said := said or _unlike_parts(loss_fn, placed, seen, batch, weights):
                    _warn(said.format(plan=plan))
        if looks.gradients == 1 and placed.mesh.tells:
            looks.gradients += 1
            _warn(
                "the loss function takes the gradient of a weight (torch.autograd.grad), which is that of a part's "
                f"rows; {plan}, and what is made of it (a factor between two losses) is another number than of the "
                "whole batch; use a factor that the parts share (of the step before, summed over ranks), or one part"
            )
        return result

    return call


_CALLED_OFTEN = (
    "the loss function keeps something of one call for the next: {said}; it is called for each micro-batch, {times} "
    "times in a step of `{of}` and once in one of a plan without micro-batches, so that what it keeps (a hidden state, "
    "a mean, a count) is of other rows; needed: what a step keeps for the next one changed in the loop, after the "
    "step, or a plan with mb1 (docs/loss.md)"
)
_OF_ALL = (
    "{what} keeps something of all rows of one call for the next (a mean, a largest number), and reads it: {said}; "
    "{{plan}}, each with what it has kept of its own rows, which is another training than that of one process; needed: "
    "what is kept summed over ranks first (mesh.all_reduce_sum), or changed in the loop by the step's numbers, which "
    "are of all rows (m.loss) (docs/loss.md)"
)


def _of_memory(loss_fn: Callable[[Any, Any], Any], placed: Placed, output: Any, batch: Any, found: str) -> str:
    """What is wrong with what a loss function keeps, if something is found: of other rows, or of all that it is given.

    What it keeps of each row, or counts, is right where a rank's rows follow those of the same rank.
    """
    times = placed.plan.batch.micro_batches
    if found and times > 1:
        return _CALLED_OFTEN.format(said=found, times=times, of=placed.plan)
    said = unlike_parts(loss_fn, output, batch, later=True) if found else ""
    return said and _OF_ALL.format(what="the loss function", said=said)


_ADDS_UP = (
    "{{plan}}, each with a loss of its own, which is another training than that of one process; needed: what adds up "
    "over rows (sw.mean_over(per_row), sw.Loss(sum, weight)), made of what the model returns for each row; or, where "
    "rows are compared with each other, one part or what gathers them over ranks first (docs/loss.md)"
)
_OF_LOSS = "{} is no mean over rows, nor a sum over them: {}; " + _ADDS_UP
_OF_ROWS = (
    "the model makes a row of its output from the other rows that it is given (a norm over them, a capacity of experts "
    "by the tokens at hand, rows that are compared): {}; {{plan}}, each with its own, which is another training than "
    "that of one process; needed: each row from itself, torch's BatchNorm, which apply sums over ranks, or one data "
    "rank and mb1 (docs/loss.md)"
)
_KEPT = (
    "the model keeps something of one forward for the next and reads it: {}; {{plan}}, which come one after the other "
    "where one process has all of their rows at once; needed: what is kept handed over by the loop, with the batch, or "
    "a plan with mb1: then a rank's rows follow those of the same rank (docs/loss.md)"
)


def _unlike_parts(
    loss_fn: Callable[[Any, Any], Any], placed: Placed, output: Any, batch: Any, weights: Mapping[str, int]
) -> str:
    """What is found of the loss function; else of the model with it, where this rank has the whole of that.

    Of the model as it is, unless it draws (dropout) or has batch norms: then in evaluation. Not where its forward has
    written into its `weights`, which are other values now.
    """
    if said := unlike_parts(loss_fn, output, batch):
        return _OF_LOSS.format("the loss function", said)
    root = placed.parts[0].root
    if communicating(placed) or dict(values_of(root)) != weights:
        return ""
    drew = [any(isinstance(module, BatchNorm) for module in root.modules())]

    def run(part: Any) -> Any:
        before = states(placed.mesh.device)
        args, kwargs = model_inputs(part, Signature.of(root))
        made = root(*args, **kwargs)
        drew.append(states(placed.mesh.device) != before)
        return made

    of_model = OfModel(loss_fn, run, root, output, batch)
    said = "" if drew[0] else _of_model(of_model, placed)
    if not said and any(drew):
        with placed.in_mode(False):
            said = _of_model(of_model, placed)
    return said


def _of_model(of_model: OfModel, placed: Placed) -> str:
    """Rows of a rank follow those of the same rank, but for micro-batches; what is kept of all rows does not."""
    if found := of_model.remembers():
        if placed.plan.batch.micro_batches > 1:
            return _KEPT.format(found)
        said = of_model.unlike_parts(later=True)
        return said and _OF_ALL.format(what="the model", said=said)
    if not (said := of_model.unlike_parts()):
        return ""
    if of_model.returns_numbers:
        return _OF_LOSS.format("what the loss function makes of a number that the model returns", said)
    return _OF_ROWS.format(said)


def _versions(*given: Any) -> list[int]:
    """What tells whether a tensor of these is written into."""
    return [leaf._version for _, leaf in leaves(given) if isinstance(leaf, torch.Tensor) and not leaf.is_inference()]


def _without_graph(output: Any) -> Any:
    """The same numbers: a hook that a loss function registers on them in another call is not met by the step's own."""
    return put(output, {path: leaf.detach() for path, leaf in leaves(output) if isinstance(leaf, torch.Tensor)})


def _of_labels(loss: torch.Tensor) -> str:
    """Over what a mean of labels on the way to a loss is taken; empty: over all alike, or there is none."""
    ignored, labels, is_weighted = mean_of_labels(loss) or (0, 0, False)
    if is_weighted:
        return "one of cross_entropy with weights of classes, by which it divides"
    return f"one of cross_entropy over {labels - ignored} labels of {labels}, which ignores others" if ignored else ""


def _warn(text: str) -> None:
    with suppress(Warning):  # `-W error` does not end a run that may be meant so
        warnings.warn(text, stacklevel=7)


class _Looks(TorchFunctionMode):
    """Whether gradients of weights are taken within it."""

    def __init__(self) -> None:
        super().__init__()
        self.gradients = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every call of a torch function comes here."""
        if func is torch.autograd.grad and not self.gradients:
            inputs = inspect.signature(func).bind(*args, **(kwargs or {})).arguments["inputs"]
            each = inputs if isinstance(inputs, list | tuple) else [inputs]
            self.gradients = int(any(isinstance(one, nn.Parameter) for one in each))
        return func(*args, **(kwargs or {}))
