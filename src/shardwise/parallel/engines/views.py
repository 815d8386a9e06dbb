"""What a unit of `fully_shard` returns is no view, so that it may be written into.

Before the backward pass of a unit its weights are gathered, by a hook on the tensors that it returned. Of a view
(`flatten`, `squeeze`, a slice) torch makes the history anew where something is written into it (`logits[mask] = -1e9`,
`h += x`), and drops the hook: the weights got no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardwise.parallel.layers.regions import own
from shardwise.parallel.layers.tensor_hooks import wrap_forward
from shardwise.parallel.module_torch_private import map_tensors


def return_no_views(root: nn.Module) -> None:
    """Have each unit return the same numbers, in the same memory, as tensors of their own.

    Cost: a node of autograd for each view that is returned.
    """
    for module in root.modules():
        if isinstance(module, FSDPModule):
            wrap_forward(module, _run)


def _run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    output = forward(*args, **kwargs)
    return map_tensors(_own, output) if torch.is_grad_enabled() else output


def _own(tensor: torch.Tensor) -> torch.Tensor:
    is_view = tensor._is_view() and tensor.requires_grad and type(tensor) is torch.Tensor
    return own(tensor) if is_view else tensor
