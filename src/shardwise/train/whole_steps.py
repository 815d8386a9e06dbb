"""What the step of an optimizer that is the user's does with sharded parameters, and torch does not do.

`parameter.data = value`: of a DTensor torch changes the wrapper, and neither the shard nor what computes with it: SAM's
way back from where it has climbed, and rules written by hand (`p.data = p.data - lr * p.grad`), did nothing, without a
word. `float(update.norm())`: torch reads it off this rank's part, so that each rank would step by another number.
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


def of_whole(optimizer: torch.optim.Optimizer, *, is_of_stage: bool) -> AbstractContextManager[Any]:
    """Within it, what a step of the optimizer assigns goes into shards, and numbers that it reads are of the whole.

    Torch's own optimizers do neither, and are left alone.

    Args:
        optimizer: the user's.
        is_of_stage: it steps a stage of a pipeline, of which alone such a number would be.

    Raises:
        ModelError: within it, of what cannot be done.

    Cost: a collective for each number, which all ranks read in the same order.
    """
    is_own = type(optimizer).__module__.startswith("torch.")
    stepped = (p for group in optimizer.param_groups for p in group["params"])
    return nullcontext() if is_own or not any(isinstance(p, DTensor) for p in stepped) else _OfWhole(is_of_stage)


_READS = {torch.Tensor.item, torch.Tensor.__float__, torch.Tensor.__int__, torch.Tensor.__bool__}


class _OfWhole(TorchFunctionMode):
    def __init__(self, is_of_stage: bool) -> None:
        super().__init__()
        self.is_of_stage = is_of_stage

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every call of a torch function comes here."""
        if func in _READS and isinstance(args[0], DTensor):
            return func(self._whole(args[0]))
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

    def _whole(self, tensor: DTensor) -> torch.Tensor:
        if self.is_of_stage:
            raise ModelError(
                f"the optimizer reads a number ({tensor.dtype}) off what it computes from sharded parameters, which "
                "in a pipeline is of one stage, and each would step by another one; needed: a plan without pp, or a "
                "rule that keeps it a tensor"
            )
        return tensor.full_tensor()
