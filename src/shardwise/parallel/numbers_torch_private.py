"""A number that is read off a sharded tensor: torch reads it off this rank's part, without a word.

`DTensor._op_dispatcher` is private: torch has no public way to say what an operation does with a DTensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardwise.errors import UsageError


def refuse_numbers_of_parts() -> None:
    """From now on, in this process, `.item()`, `float()` and `bool()` of what is on this rank in part are refused.

    Not summed here instead: a script that reads on one rank alone would wait for the others.

    >>> refuse_numbers_of_parts()
    """
    dispatcher: Any = DTensor._op_dispatcher
    dispatcher._custom_op_handlers[torch.ops.aten._local_scalar_dense.default] = _number


def _number(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor: DTensor = args[0]
    sizes = tensor.device_mesh.shape
    if any(size > 1 and not each.is_replicate() for size, each in zip(sizes, tensor.placements, strict=True)):
        raise UsageError(
            f"a number is read off a sharded tensor (float, bool, .item()): found {tuple(tensor.placements)} over "
            f"{sizes} ranks, of which this one has a part, and its number alone; needed: the whole, on every rank: "
            "weight.norm().full_tensor().item(), first reduced, then whole (docs/data-parallel.md)"
        )
    return operation(tensor.to_local())
