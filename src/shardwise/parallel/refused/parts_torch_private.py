"""What torch does with a part of a tensor, without a word: it reads numbers off it, draws for it, writes into copies.

`DTensor._op_dispatcher` is private: torch has no public way to say what an operation does with a DTensor.
"""

from __future__ import annotations

from functools import cache
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

    Nothing is written into what only looks like a part of one: a row or a diagonal of what is on several ranks is a
    copy, which torch has brought together, and `weight[0].zero_()` left the weight as it was; so did
    `torch.mul(weight[0], 2, out=weight[0])` and `torch._foreach_mul_([weight[0]], 2)`.

    `.item()`, `float()` and `bool()` of what is on this rank in part are refused; they are not summed here, since a
    script that reads on one rank alone would wait for the others. What is drawn for a DTensor is drawn whole by each
    rank, from its own generator, which script and plan leave alike on all ranks, and cut.

    Cost: of a draw the memory and the time of the whole tensor, of an operation in place some microseconds.

    >>> mind_parts()
    """
    dispatcher: Any = DTensor._op_dispatcher
    handlers = dispatcher._custom_op_handlers
    handlers[_ATEN._local_scalar_dense.default] = _number
    handlers |= dict.fromkeys(_writes() - handlers.keys(), _write) | dict.fromkeys(_FILLS, _fill)
    handlers |= dict.fromkeys(_NEW, _new) | {_ATEN.eye.m_out: _eye, _ATEN._foreach_copy_.default: _copy_each}
    handlers[_ATEN._is_any_true.default] = _any_here


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


@cache
def _writes() -> set[Any]:
    """All operations that write into a tensor that they are given, and that torch can do with DTensors."""
    rules: Any = DTensor._op_dispatcher.sharding_propagator
    known = {*rules.op_to_rules, *rules.op_strategy_funcs, *getattr(rules, "op_single_dim_strategy_funcs", ())}
    plain = (_ATEN.fill_.Tensor, _ATEN.masked_fill_.Tensor)  # no rule, and yet common: what is wrong is said first
    return {operation for operation in known if operation._schema.is_mutable} | set(plain)


@cache
def _targets(operation: Any) -> list[tuple[int, str]]:
    """Place and name of each argument that an operation writes into."""
    arguments = enumerate(operation._schema.arguments)
    return [(place, each.name) for place, each in arguments if each.alias_info is not None and each.alias_info.is_write]


def _write(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    for place, name in _targets(operation):
        target = args[place] if place < len(args) else kwargs.get(name)
        for each in target if isinstance(target, list | tuple) else (target,):
            _refuse_copy(each)
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


def _eye(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """`torch.nn.init.eye_`; torch makes the shard as large as the whole."""
    out: DTensor = kwargs["out"]
    _refuse_copy(out)
    if tuple(args) != tuple(out.shape):
        raise UsageError(f"torch.eye{args} into a sharded tensor {tuple(out.shape)}: needed its own shape")
    local = out._local_tensor
    local.copy_(local_slice(operation(*args, out=local.new_empty(out.shape)), out))
    return out


def _any_here(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """What `torch.autograd.set_detect_anomaly` asks of each gradient: the rank whose part has a NaN says so."""
    found: torch.Tensor = operation(args[0]._local_tensor)
    return found


def _copy_each(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Torch has no rule for it, and one for each copy."""
    targets, sources, *rest = args
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, *rest, **kwargs)


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
