"""Copies of a module without its values: on meta, or on tensors of a CPU that are shapes alone."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from shardwise.errors import ModelError
from shardwise.model.nested import Path, leaves
from shardwise.model.standin import leave_out_warnings, stand_in_experts
from shardwise.model.torch_private import drop_backward_hooks


def tensors_in(value: Any) -> list[tuple[Path, torch.Tensor]]:
    """The tensors of nested tuples, lists, dicts and dataclasses with their paths."""
    return [(path, leaf) for path, leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


def refuse_parameters(module: nn.Module) -> None:
    """What no plan can place.

    Raises:
        ModelError: a parameter that has no shape yet, or is complex; by its name.
    """
    for whole, parameter in module.named_parameters():
        name = whole.removeprefix("whole.")  # of what stands around a model without blocks
        if isinstance(parameter, UninitializedParameter):
            raise ModelError(
                f"parameter {name} has no shape yet (a lazy module); needed: its sizes; give them, or call the model "
                "once on a sample where it is made"
            )
        if parameter.is_complex():
            raise ModelError(
                f"parameter {name} is complex, which fully_shard and the norm of gradients do not take; hold "
                "torch.view_as_real of it, and take torch.view_as_complex of that in forward"
            )


def meta_copy(module: nn.Module) -> nn.Module:
    """A copy of a module on the meta device: same code and names, ties and hooks of forward kept, no data.

    Hooks of the backward pass are left out: torch puts a tensor of its own around what goes into such a module.

    Raises:
        ModelError: the module holds something that Python cannot copy.
    """
    copied = copy_module(module, _without_values(module, "meta"))
    drop_backward_hooks(copied)
    stand_in_experts(copied)
    leave_out_warnings(copied)
    return copied


def cpu_copy(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy on a CPU, made within `fake_tensors`, whose parameters have a type, as mixed precision casts them.

    Raises:
        ModelError: the module holds something that Python cannot copy.
    """
    memo = _without_values(module, "cpu")
    for parameter in module.parameters():
        if parameter.is_floating_point():
            cast = nn.Parameter(_empty(parameter, "cpu", dtype), requires_grad=parameter.requires_grad)
            memo[id(parameter)] = cast
    return copy_module(module, memo)


def _without_values(module: nn.Module, device: str) -> dict[int, Any]:
    """By `id`: what stands for the parameters and buffers of a module.

    On a CPU for the other tensors that it holds too. Those that were computed (the weight that the hooks of
    `torch.nn.utils.weight_norm` leave) cannot be copied, on meta either.
    """
    refuse_parameters(module)
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        empty = _empty(tensor, device, tensor.dtype)
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
    for held in _attributes(module):
        if id(held) not in memo and (device == "cpu" or not held.is_leaf):
            memo[id(held)] = _empty(held, device, held.dtype)
    return memo


def _attributes(module: nn.Module) -> list[torch.Tensor]:
    """The tensors in the attributes of its modules. What many hold, a configuration, is looked through once."""
    values = {id(value): value for inner in module.modules() for value in vars(inner).values()}
    return [tensor for _, tensor in tensors_in(list(values.values()))]


def _empty(tensor: torch.Tensor, device: str, dtype: torch.dtype) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        return torch.empty_like(tensor, device=device, dtype=dtype, requires_grad=False)
    return torch.empty_strided(tensor.shape, tensor.stride(), device=device, dtype=dtype)  # asks nothing of the tensor


def copy_module(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy in which the objects of `memo` (by `id`) are replaced by what it gives for them.

    Tensors that were computed (the weight that hooks of `torch.nn.utils.weight_norm` and `prune` make anew in each
    forward) are the same ones, without their history.

    Raises:
        ModelError: the module holds something that Python cannot copy.
    """
    for held in _attributes(module):
        if not held.is_leaf:
            memo.setdefault(id(held), held.detach())
    try:
        return copy.deepcopy(module, memo)
    except (TypeError, RuntimeError) as error:
        raise ModelError(
            f"a pipeline copies the structure of {type(module).__name__} (not its weights), and an attribute of it "
            f"cannot be copied ({error}); keep locks, files and process groups out of the module"
        ) from error
