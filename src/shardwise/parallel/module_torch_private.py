"""The private torch names for modules' hooks, parameters and inputs. Each has a test that fails when torch moves it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.utils import _apply_to_tensors
from torch.nn.modules import module as modules


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], values: Any) -> Any:
    """The tensors in lists, mappings and dataclasses each by what a function makes of it, as `fully_shard` does it."""
    return _apply_to_tensors(function, values)


def put_parameter(module: nn.Module, key: str, value: torch.Tensor) -> None:
    """Put a tensor in the place of a parameter: `Module._parameters`, and `RNNBase._flat_weights`, which would keep it.

    Not as an attribute: the compiler of torch 2.12 deletes the parameter where one of its name is deleted.
    """
    cast(dict[str, Any], module._parameters)[key] = value
    if isinstance(module, nn.RNNBase) and key in module._flat_weights_names:
        module._flat_weights[module._flat_weights_names.index(key)] = value


def has_forward_pre_hook(module: nn.Module) -> bool:
    """Whether `register_forward_pre_hook` was called on a module."""
    return bool(module._forward_pre_hooks)


def hooks_of(module: nn.Module) -> list[Callable[..., Any]]:
    """The hooks before and after a module's forward: `_forward_hooks`, `_forward_pre_hooks`."""
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def drop_hooks(root: nn.Module) -> None:
    """Forget what is called before and after the forward of its modules: `_forward_hooks`, `_forward_pre_hooks`."""
    for module in root.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            hooks.clear()


def global_hooks() -> list[Callable[..., Any]]:
    """Those before and after the forward of every module: `_global_forward_hooks`, `_global_forward_pre_hooks`."""
    return [*modules._global_forward_hooks.values(), *modules._global_forward_pre_hooks.values()]


def hook_first(module: nn.Module, hook: Callable[..., Any], *, with_kwargs: bool = False) -> None:
    """Register a pre-hook of forward that runs before those that are there: `_forward_pre_hooks`.

    Torch's `prepend` turns the order of that dict round in a way that the compiler of torch 2.11 does not see: it looks
    one hook up in the place of another. So they are put in anew.
    """
    module.register_forward_pre_hook(hook, prepend=True, with_kwargs=with_kwargs)
    hooks = list(module._forward_pre_hooks.items())
    module._forward_pre_hooks.clear()
    module._forward_pre_hooks.update(hooks)


def in_transform() -> bool:
    """Whether what runs is within a transform of `torch.func`: `peek_interpreter_stack`."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def copy_together(into: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    """Copy each into its place, cast where types differ: `torch._foreach_copy_`, one kernel for all of two types."""
    torch._foreach_copy_(into, tensors)
