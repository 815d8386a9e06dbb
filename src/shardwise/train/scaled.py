"""A `GradScaler` that a script of mixed precision has left in its loss function: the step scales by itself.

The loss would be reported, and with rules that are not free of scale (SGD, clipping) stepped, 65,536 times too large.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.errors import UsageError
from shardwise.parallel.named import named_by
from shardwise.train.of_rows import reached


def refuse_scaler(loss_fn: Callable[..., Any]) -> None:
    """Refuse a loss function that names a scaler which is on, or calls a function that does.

    Raises:
        UsageError: it does.

    Cost: a look at what the function's code names.
    """
    for function in reached(loss_fn)[0]:
        for name, value in named_by(function):
            if isinstance(value, torch.amp.GradScaler) and value.is_enabled():
                called = getattr(loss_fn, "__name__", type(loss_fn).__name__)
                raise UsageError(
                    f"the loss function {called}: found the GradScaler {name}, by which it would be multiplied: the "
                    f"step reports the loss as it is given and divides gradients by no scale but its own; needed: the "
                    f"loss itself. The plan has the scaler: `fp16` (docs/precision.md)"
                )
