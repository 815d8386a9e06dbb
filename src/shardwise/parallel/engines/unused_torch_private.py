"""The private torch names that `unused` needs. Each has a test that fails when torch moves it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.nn.parallel import DistributedDataParallel

SUMS_APART = hasattr(FSDPParam, "accumulate_unsharded_grad_if_needed")
"""Before torch 2.15 `fully_shard` adds up the gradients of micro-batches outside of autograd."""


class Sharded(Protocol):
    """What is read of torch's `FSDPParam`."""

    sharded_param: nn.Parameter
    """What the module holds between steps."""
    unsharded_param: nn.Parameter
    unsharded_accumulated_grad: torch.Tensor | None
    """The sum of micro-batches before; from torch 2.15 on the gradient itself."""

    def accumulate_unsharded_grad_if_needed(self) -> None:
        """Add the last micro-batch's gradient to the sum of those before."""

    def to_accumulated_grad_if_needed(self) -> None:
        """Make it a sum, in the type in which gradients are reduced."""


@dataclass
class Watched:
    """A group of `fully_shard`: what is gathered and reduced together."""

    name: str
    """Of its module."""
    parameters: list[Sharded]
    calls: int = 0
    """Of its forward, since they were set to 0."""
    used: set[int] = field(default_factory=set)
    """Places in `parameters` of those that had a gradient at a reduction."""


def watch_groups(module: nn.Module) -> list[Watched]:
    """Let `fully_shard` reduce zeros for a parameter that has no gradient here: `FSDPParamGroup.post_backward`.

    Torch 2.13 has `set_reduce_scatter_unused_params`, which does not tell which ones were used.

    Args:
        module: with all that it holds.

    Returns:
        The groups, in an order that ranks share.
    """
    found: list[Watched] = []
    for name, part in module.named_modules():
        if isinstance(part, FSDPModule):
            state: Any = part._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # torch 2.13, 2.11
            found += [_watched(group, name) for group in groups if group is not None]
    return found


def _watched(group: Any, name: str) -> Watched:
    """The one of a group: several trainers of a model share it, or each would see the zeros of the one before it."""
    if isinstance(known := getattr(group.post_backward, "keywords", {}).get("watched"), Watched):
        return known
    watched = Watched(name, group.fsdp_params)
    group.pre_forward = partial(_before_forward, group.pre_forward, watched)
    group.post_backward = partial(_after_backward, group, group.post_backward, watched=watched)
    return watched


def _before_forward(gather: Callable[..., Any], watched: Watched, *arguments: Any) -> Any:
    watched.calls += 1
    return gather(*arguments)


def _after_backward(group: Any, reduce: Callable[..., None], *arguments: Any, watched: Watched) -> None:
    placed = ((i, each) for i, each in enumerate(watched.parameters) if hasattr(each, "_unsharded_param"))
    trained = [(i, each) for i, each in placed if each.unsharded_param.requires_grad]
    for i, each in trained:
        if each.unsharded_param.grad is not None or each.unsharded_accumulated_grad is not None:
            watched.used.add(i)
        elif group.reduce_grads:
            dtype = None if SUMS_APART else each.unsharded_param.grad_dtype
            each.unsharded_param.grad = torch.zeros_like(each.unsharded_param, dtype=dtype)
    if SUMS_APART and group.reduce_grads and any(each.unsharded_accumulated_grad is not None for _, each in trained):
        for _, each in trained:  # zeros, and what the last micro-batch alone gave, have not the type of the sums yet
            each.accumulate_unsharded_grad_if_needed()
            each.to_accumulated_grad_if_needed()
    reduce(*arguments)


def not_reduced(wrapped: DistributedDataParallel) -> list[str] | None:
    """Names of the parameters for which DDP still waits after a backward that it was to reduce; None: for none.

    `DistributedDataParallel._check_reducer_finalized`, which torch itself calls in the next forward only.
    """
    check: Any = wrapped._check_reducer_finalized  # torch does not annotate it
    try:
        check()
    except RuntimeError as error:
        names = [name for name, parameter in wrapped.module.named_parameters() if parameter.requires_grad]
        told = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
        return [names[int(place)] for place in told[1].split()] if told else []
    return None
