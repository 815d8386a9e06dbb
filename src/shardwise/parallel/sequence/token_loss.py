"""A loss function under `cp`, where a rank has some tokens of each sequence.

What it adds up of single tokens adds up over ranks. Neighbours (labels that are shifted in the loss), an order, or more
than a sum of a row's tokens are others on a part.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial, update_wrapper
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from shardwise.errors import ModelError
from shardwise.model.tracer import tensors_in
from shardwise.parallel.sequence.mixing import MIXING, REDUCING, mixed


def of_each_token(loss_fn: Callable[..., Any], *, says: bool) -> Callable[..., Any]:
    """The same loss function, that may look at each token alone.

    Args:
        loss_fn: of the output for this rank's tokens.
        says: whether this rank warns of sums over the tokens of a row, once.

    Raises:
        ModelError: within a call: it takes a part of the sequence, or mixes its tokens.

    Cost: two microseconds per operation of the loss.
    """
    warned: list[str] = [] if says else [""]

    @partial(update_wrapper, wrapped=loss_fn, updated=())
    def call(output: Any, batch: Any) -> Any:
        shapes = (tuple(tensor.shape[:2]) for _, tensor in tensors_in(output) if tensor.dim() > 1)
        tokens: Any = next(shapes, None)
        if tokens is None:
            return loss_fn(output, batch)
        with _Tokens(tokens, warned):
            return loss_fn(output, batch)

    return call


class _Tokens(TorchFunctionMode):
    def __init__(self, shape: tuple[int, int], warned: list[str]) -> None:
        super().__init__()
        self.shape, self.warned = shape, warned

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every call of a torch function comes here."""
        found = mixed(func, args, kwargs or {}, self.shape, numbers=True) if func in MIXING else ""
        tensor = args[0] if args else (kwargs or {}).get("input")
        is_sum_of_numbers = func in REDUCING and isinstance(tensor, torch.Tensor) and tensor.dim() == 2
        if found and not is_sum_of_numbers:
            raise ModelError(
                f"the loss function takes {found}, of which this rank has {self.shape[1]} tokens (cp above 1): "
                "needed a loss of each token alone, added up; shift labels before, in the data set or in `collate`, "
                "or use a plan with cp1",
                row="module.mixes-tokens",
            )
        if found and not self.warned:
            self.warned.append(found)
            with suppress(Warning):  # `-W error` does not end a run that may be meant so
                warnings.warn(
                    f"the loss function takes {found}, of one number per token, and under cp a rank has a part of each "
                    "sequence: that is right where the parts are only added up, and another loss where more is made "
                    "of each (a mean of each row, a preference between two); for such a loss use a plan with cp1",
                    stacklevel=2,
                )
        return func(*args, **(kwargs or {}))
