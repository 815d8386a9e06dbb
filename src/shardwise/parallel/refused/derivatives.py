"""Derivatives of derivatives: no model whose parts ranks gather, split or exchange can go backward twice."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode

from shardwise.errors import ModelError
from shardwise.parallel.layers.tensor_hooks import wrap_forward
from shardwise.parallel.placed import Placed


def is_first_order(placed: Placed) -> bool:
    """Whether its plan cannot take derivatives of derivatives; compiled code is not watched."""
    plan = placed.plan
    sharded = any(isinstance(part.run, FSDPModule) for part in placed.parts)
    return (sharded or plan.axes.world > plan.axes.data) and not plan.compile


def first_order(function: Callable[..., Any], look: Callable[..., None]) -> Callable[..., Any]:
    """The same loss function, whose calls that record gradients are watched: a penalty may come in later steps.

    Torch itself ends in an error of its storages, in a segmentation fault, or (with split layers) in other numbers.

    Args:
        function: a loss function.
        look: called with its result and what it was given.

    Raises:
        ModelError: within a call, `torch.autograd.grad(..., create_graph=True)`.

    Cost: two microseconds per operation of the loss.
    """
    watching = FirstOrder()

    @partial(update_wrapper, wrapped=function, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        with watching:
            result = function(*args, **kwargs)
        look(result, *args)
        return result

    return call


def watch_forwards(root: nn.Module) -> None:
    """Watch the first forward of a module that records gradients so; all would cost as much as its small kernels."""
    seen: list[bool] = []

    def watched(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if seen or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        seen.append(True)
        with FirstOrder():
            return forward(*args, **kwargs)

    wrap_forward(root, watched)


class FirstOrder(TorchFunctionMode):
    """Within it, derivatives of derivatives are refused.

    Raises:
        ModelError: at `torch.autograd.grad(..., create_graph=True)`.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every call of a torch function comes here."""
        if func is torch.autograd.grad and (kwargs or {}).get("create_graph"):
            raise ModelError(
                "torch.autograd.grad(..., create_graph=True): found a derivative of which the backward pass takes "
                "another (forces, a gradient penalty), which only a whole model can take: weights are gathered, and "
                "what ranks exchange is summed, for one backward pass; use a plan of `dp` alone, in fp32 or fp64",
                row="module.second-derivatives",
            )
        return func(*args, **(kwargs or {}))
