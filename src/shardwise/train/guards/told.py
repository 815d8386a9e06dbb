"""What a loss function is called with, said where its own words do not fit that."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardwise.errors import ShardwiseError, UsageError
from shardwise.parallel.placed import Placed
from shardwise.train.guards.means import remarked_means
from shardwise.train.scaled import refuse_scaler


def told(loss_fn: Callable[..., Any], placed: Placed | None = None) -> Callable[[Any, Any], Any]:
    """The same loss function, whose errors say what it was given.

    Args:
        loss_fn: of a script.
        placed: where it trains a model: means that it takes are remarked, see `means.py`.

    Raises:
        UsageError: it takes other arguments than two, or names a scaler; and, when it is called, that it takes the
            output for the model.
    """
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    if not callable(loss_fn):
        raise UsageError(f"loss_fn: found {loss_fn!r} of type {type(loss_fn).__name__}; {_NEEDED}")
    try:
        inspect.signature(loss_fn).bind(None, None)
    except TypeError as error:
        raise UsageError(f"the loss function {name}{inspect.signature(loss_fn)}: {error}; {_NEEDED}") from None
    except ValueError:  # a builtin does not tell what it takes
        pass
    if placed is not None:
        refuse_scaler(loss_fn)

    @partial(update_wrapper, wrapped=loss_fn, updated=())
    def call(output: Any, batch: Any) -> Any:
        try:
            return loss_fn(output, batch)
        except Exception as error:
            found = f"was given {_kind(output)} as the output, and {_kind(batch)} as the micro-batch"
            if str(error) == f"'{type(output).__name__}' object is not callable":
                raise UsageError(f"the loss function {name} calls what it is given: it {found}; {_NEEDED}") from error
            if isinstance(error, TypeError | AttributeError):
                error.add_note(f"The loss function {name} {found}; {_NEEDED}.")
            if isinstance(error, RuntimeError) and _MIXED in str(error):
                error.add_note(f"The loss function {name} was given {_kind(output)} as the output; {_WHOLE}.")
            if placed is not None and placed.pipeline is not None and not isinstance(error, ShardwiseError):
                error.add_note(
                    f"The loss function {name} is called where the last stage is, `{placed.plan}`: {_STAGED}."
                )
            raise

    return call if placed is None else remarked_means(call, placed)


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        split = f", split over ranks as {value.placements}," if isinstance(value, DTensor) else ""
        return f"a tensor {tuple(value.shape)}{split}"
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, tuple | list) else "")


_MIXED = "mixed torch.Tensor and DTensor"
"""Of torch's error at an operation on what is split over ranks and what is not."""
_WHOLE = (
    "what ranks have parts of (logits under `loss-parallel`, weights under `tp`) is a DTensor; needed: "
    "sw.token_cross_entropy, which takes such logits, or the whole, `output.full_tensor()`, `weight.full_tensor()`; or "
    "a plan without loss-parallel"
)
_STAGED = (
    "what hooks of modules collect, or modules keep as attributes, is there for that stage's layers alone; needed: a "
    "forward that returns all that the loss takes, or a plan without pp"
)
_NEEDED = (
    "needed: a function of the model's output and the micro-batch, `def loss_fn(output, batch)`, which the step calls "
    "after it has called the model itself"
)
