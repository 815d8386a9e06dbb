"""`parameter.data = value` in the step of an optimizer that is the user's: sharded parameters ignore it.

Of a DTensor torch changes the wrapper, and neither the shard nor what computes with it: SAM's way back from where it
has climbed, and rules written by hand (`p.data = p.data - lr * p.grad`), did nothing, without a word.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from shardwise.errors import ModelError
from shardwise.parallel.torch_private import SET_DATA
from shardwise.train.torch_private import local_of


def assigning(optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
    """Within it, what a step of the optimizer assigns to sharded parameters is copied into their shards.

    Torch's own optimizers assign nothing, and are left alone.
    """
    is_own = type(optimizer).__module__.startswith("torch.")
    stepped = (p for group in optimizer.param_groups for p in group["params"])
    return nullcontext() if is_own or not any(isinstance(p, DTensor) for p in stepped) else _Assigned()


class _Assigned(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every call of a torch function comes here."""
        if func != SET_DATA or not isinstance(args[0], DTensor):
            return func(*args, **(kwargs or {}))
        parameter, value = args
        if not isinstance(value, DTensor):
            raise ModelError(
                f"the optimizer assigns a plain tensor {tuple(value.shape)} to `.data` of a sharded parameter "
                f"{tuple(parameter.shape)}: needed one that is sharded as it is (torch.empty_like(parameter), or what "
                "is computed from it)"
            )
        with torch.no_grad():
            same = value.redistribute(parameter.device_mesh, parameter.placements)
            local_of(parameter).copy_(local_of(same))
