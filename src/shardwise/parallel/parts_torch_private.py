"""What torch does with a part of a tensor, without a word: it reads numbers off it, draws for it, writes into copies.

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
_WRITES = (
    _ATEN.zero_.default, _ATEN.fill_.Scalar, _ATEN.fill_.Tensor, _ATEN.copy_.default, _ATEN.masked_fill_.Scalar,
    _ATEN.masked_fill_.Tensor, _ATEN.index_put_.default, _ATEN.index_fill_.int_Scalar, _ATEN.add_.Tensor,
    _ATEN.add_.Scalar, _ATEN.sub_.Tensor, _ATEN.sub_.Scalar, _ATEN.mul_.Tensor, _ATEN.mul_.Scalar, _ATEN.div_.Tensor,
    _ATEN.div_.Scalar, _ATEN.clamp_.default, _ATEN.clamp_.Tensor, _ATEN.clamp_min_.default, _ATEN.clamp_max_.default,
    _ATEN.lerp_.Scalar, _ATEN.lerp_.Tensor, _ATEN.addcmul_.default, _ATEN.addcdiv_.default, _ATEN.neg_.default,
    _ATEN.abs_.default, _ATEN.sign_.default, _ATEN.tanh_.default, _ATEN.sigmoid_.default, _ATEN.relu_.default,
    _ATEN.exp_.default, _ATEN.sqrt_.default, _ATEN.square_.default, _ATEN.pow_.Scalar, _ATEN.round_.default,
    _ATEN.nan_to_num_.default,
)  # fmt: skip
_NEW = (_ATEN.rand_like.default, _ATEN.randn_like.default, _ATEN.randint_like.default, _ATEN.randint_like.low_dtype)


def mind_parts() -> None:
    """From now on, in this process, numbers are read off whole DTensors alone, and draws are those of one process.

    Nothing is written into what only looks like a part of one: a row or a diagonal of what is on several ranks is a
    copy, which torch has brought together, and `weight[0].zero_()` left the weight as it was.

    `.item()`, `float()` and `bool()` of what is on this rank in part are refused; they are not summed here, since a
    script that reads on one rank alone would wait for the others. What is drawn for a DTensor is drawn whole by each
    rank, from its own generator, which script and plan leave alike on all ranks, and cut.

    Cost: of a draw the memory and the time of the whole tensor, of an operation in place some microseconds.

    >>> mind_parts()
    """
    dispatcher: Any = DTensor._op_dispatcher
    handlers = dispatcher._custom_op_handlers
    handlers[_ATEN._local_scalar_dense.default] = _number
    handlers.update(dict.fromkeys(_WRITES, _write) | dict.fromkeys(_FILLS, _fill) | dict.fromkeys(_NEW, _new))


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


def _write(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _refuse_copy(args[0])
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    handlers.pop(operation, None)  # torch's own way; another thread that comes by meanwhile takes it, too
    try:
        return operation(*args, **kwargs)
    finally:
        handlers[operation] = _write


def _refuse_copy(part: Any) -> None:
    """Subclasses of tensors hold their memory elsewhere, and what is compiled has none: they are let by."""
    whole = part._base if isinstance(part, DTensor) else None
    if not isinstance(whole, DTensor):
        return
    here, there = part._local_tensor, whole._local_tensor
    if not type(here) is type(there) is torch.Tensor:
        return
    if here.untyped_storage().data_ptr() != there.untyped_storage().data_ptr():
        raise UsageError(
            f"a part {tuple(part.shape)} of a sharded tensor {tuple(whole.shape)} is written in place (a row, a slice, "
            f"a diagonal): found {tuple(whole.placements)}, of which torch has made a copy for that, and the tensor "
            "itself would stay as it was; needed: an operation on the whole, as weight.masked_fill_(mask, 0.0) or "
            "weight.copy_(value) with a plain mask, or value, of the weight's whole shape, within torch.distributed."
            "tensor.experimental.implicit_replication() (docs/data-parallel.md)"
        )


def _fill(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    tensor: DTensor = args[0]
    _refuse_copy(tensor)
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
