"""Derivatives of derivatives: neither `fully_shard` nor a pipeline can go backward through a model twice."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode

from shardwise.errors import ModelError
from shardwise.parallel.placed import Placed
from shardwise.parallel.tensor_hooks import wrap_forward


def is_first_order(placed: Placed) -> bool:
    """Whether its plan cannot take derivatives of derivatives; compiled code is not watched."""
    sharded = any(isinstance(part.run, FSDPModule) for part in placed.parts)
    return (sharded or placed.pipeline is not None) and not placed.plan.compile


def first_order(function: Callable[..., Any], look: Callable[..., None] | None = None) -> Callable[..., Any]:
    """The same function, whose first call that records gradients is watched.

    Torch itself ends in an error of its storages, or in a segmentation fault.

    Args:
        function: a forward, or a loss function.
        look: called then with its result and what it was given.

    Raises:
        ModelError: within that call, `torch.autograd.grad(..., create_graph=True)`.
    """
    seen: list[bool] = []

    @partial(update_wrapper, wrapped=function, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        if seen or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        seen.append(True)
        with _FirstOrder():
            result = function(*args, **kwargs)
        if look is not None:
            look(result, *args)
        return result

    return call


def watch_forwards(root: nn.Module) -> None:
    """Watch the first forward of a module so."""
    watched = first_order(lambda forward, *args, **kwargs: forward(*args, **kwargs))
    wrap_forward(root, watched)


class _FirstOrder(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every call of a torch function comes here."""
        if func is torch.autograd.grad and (kwargs or {}).get("create_graph"):
            raise ModelError(
                "torch.autograd.grad(..., create_graph=True): found a derivative of which the backward pass takes "
                "another (forces, a gradient penalty), which neither sharded parameters nor pipelines can do: weights "
                "are gathered for one backward pass; use a plan of `dp` alone, in fp32 or fp64",
                row="module.second-derivatives",
            )
        return func(*args, **(kwargs or {}))
