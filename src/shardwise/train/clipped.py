"""`torch.nn.utils.clip_grad_norm_` in a hook of an optimizer, whose gradients are a rank's part of the model's.

Each rank would scale by another norm, without a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from shardwise.errors import ModelError
from shardwise.train.torch_private import has_step_hooks, is_norm_of_all
from shardwise.train.whole_steps import of_whole


class Stepped(Protocol):
    """As much of an optimizer with names as is looked at."""

    torch: torch.optim.Optimizer
    params: dict[str, nn.Parameter]
    live: dict[str, nn.Parameter]
    is_of_stage: bool


@contextmanager
def watched(optimizer: Stepped) -> Iterator[None]:
    """Within it an optimizer steps: what it assigns goes into shards, and a hook's norm of a rank's part is refused.

    Cost: without hooks nothing.
    """
    norms = _Whole(optimizer) if has_step_hooks(optimizer.torch) else nullcontext()
    with of_whole(optimizer.torch, is_of_stage=optimizer.is_of_stage), norms:
        yield


class _Whole(TorchFunctionMode):
    def __init__(self, optimizer: Stepped) -> None:
        super().__init__()
        self.optimizer = optimizer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Every call of a torch function comes here."""
        if is_norm_of_all(func):
            self._check(args[0])
        return func(*args, **(kwargs or {}))

    def _check(self, tensors: list[Tensor]) -> None:
        """A DTensor has the norm of all its shards."""
        given, live = {id(tensor) for tensor in tensors}, self.optimizer.live
        for name, parameter in self.optimizer.params.items():
            is_part = isinstance(live[name], DTensor) and not isinstance(parameter, DTensor)
            if id(parameter.grad) in given and (is_part or self.optimizer.is_of_stage):
                raise ModelError(
                    f"a hook of {type(self.optimizer.torch).__name__}: found a norm over gradients "
                    f"(clip_grad_norm_), of which {name} is {'a shard' if is_part else 'of one stage'}: each rank "
                    "would scale by another one; needed: clip= of make_step or steps, which is of all; for a norm of "
                    "each group sum the squares over ranks first (docs/optimizers.md)"
                )
