"""What torch does with a rank's part of a tensor, without a word: it reads numbers off it, and draws for it alone.

`DTensor._op_dispatcher` is private: torch has no public way to say what an operation does with a DTensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardwise.errors import UsageError
from shardwise.parallel.init import local_slice

_ATEN = torch.ops.aten
_FILLS = (
    _ATEN.normal_.default, _ATEN.uniform_.default, _ATEN.bernoulli_.float, _ATEN.exponential_.default,
    _ATEN.log_normal_.default, _ATEN.cauchy_.default, _ATEN.geometric_.default, _ATEN.random_.default,
    _ATEN.random_.to, getattr(_ATEN.random_, "from"),
)  # fmt: skip
_NEW = (_ATEN.rand_like.default, _ATEN.randn_like.default, _ATEN.randint_like.default, _ATEN.randint_like.low_dtype)


def mind_parts() -> None:
    """From now on, in this process, numbers are read off whole DTensors alone, and draws are those of one process.

    `.item()`, `float()` and `bool()` of what is on this rank in part are refused; they are not summed here, since a
    script that reads on one rank alone would wait for the others. What is drawn for a DTensor is drawn whole by each
    rank, from its own generator, which script and plan leave alike on all ranks, and cut.

    Cost: of a draw the memory and the time of the whole tensor.

    >>> mind_parts()
    """
    dispatcher: Any = DTensor._op_dispatcher
    handlers = dispatcher._custom_op_handlers
    handlers[_ATEN._local_scalar_dense.default] = _number
    handlers.update(dict.fromkeys(_FILLS, _fill) | dict.fromkeys(_NEW, _new))


def _number(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor: DTensor = args[0]
    sizes = tensor.device_mesh.shape
    if any(size > 1 and not each.is_replicate() for size, each in zip(sizes, tensor.placements, strict=True)):
        raise UsageError(
            f"a number is read off a sharded tensor (float, bool, .item()): found {tuple(tensor.placements)} over "
            f"{sizes} ranks, of which this one has a part, and its number alone; needed: the whole, on every rank: "
            "weight.norm().full_tensor().item(), first reduced, then whole (docs/data-parallel.md)"
        )
    return operation(tensor._local_tensor)


def _fill(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    tensor: DTensor = args[0]
    local = tensor._local_tensor
    whole = operation(local.new_empty(tensor.shape), *args[1:], **kwargs)
    local.copy_(local_slice(whole, tensor))
    return tensor


def _new(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    like: DTensor = args[0]
    whole = operation(like._local_tensor.new_empty(like.shape), *args[1:], **kwargs)
    return DTensor.from_local(
        local_slice(whole, like),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=whole.stride(),
    )
