"""`cast_weights`: one process computes in another type than its parameters have, and shards nothing.

The rules are those of `fully_shard`'s mixed precision, by which several ranks compute: what it would gather by itself,
a block or a module with a type of its own, casts its inputs and its parameters when it is called. Autograd brings the
gradients back into the parameters' type, and compiled blocks cast within their own code.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise.parallel.engines.repeating import Cast, CastAll, Places, Repeating, cast_forward, put_back, put_casts
from shardwise.parallel.engines.units import groups_in
from shardwise.parallel.layers.tensor_hooks import wrap_forward
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.module_torch_private import copy_together, has_forward_pre_hook, hook_first, map_tensors
from shardwise.parallel.placed import Placed
from shardwise.parallel.precision import mixed_precision, ruled_modules
from shardwise.parallel.refused.written import watched
from shardwise.plan.plan import Plan
from shardwise.plan.ranks.engines import CAST_TOGETHER, casts_weights


def cast_weights(placed: Placed, plan: Plan, mesh: Mesh) -> Placed:
    """Within the forward of its unit, a parameter of one process has the type that is computed in.

    Cost: a copy of each parameter in that type, from its use to that of its gradient.
    """
    return placed if plan.compile else _cast_units(placed, plan)


def cast_compiled(placed: Placed, plan: Plan, mesh: Mesh) -> Placed:
    """The same of a plan that compiles: round what is recomputed, in which the compiler takes no writes."""
    return _cast_units(placed, plan) if plan.compile else placed


def _cast_units(placed: Placed, plan: Plan) -> Placed:
    if not casts_weights(plan):
        return placed
    running: list[Repeating] = []
    for part in placed.parts:
        names = {module: name for name, module in part.root.named_modules()}
        units = dict.fromkeys([*ruled_modules(placed, part), *groups_in(placed, part), part.root])
        for unit in units:
            policy = mixed_precision(plan, names[unit], placed.types)
            if policy.param_dtype is None:
                continue
            if not plan.compile:  # what looks at values would be compiled
                wrap_forward(unit, watched(unit, names[unit], units))
            places, inputs = _places(unit, units), partial(_to, policy.param_dtype)
            to_compute = partial(_each_to if plan.compile else _all_to, policy.param_dtype)
            if plan.compile and unit is not part.root:  # no state of its own, which would compile each block apart
                wrap_forward(unit, partial(cast_forward, places, to_compute, inputs))
            else:
                wrap_forward(unit, Repeating(places, to_compute, inputs, running, compiles=plan.compile))
            if policy.output_dtype is not None:
                wrap_forward(unit, partial(_cast_output, policy.output_dtype))
            if has_forward_pre_hook(unit):
                _cast_for_hooks(unit, places, to_compute, inputs)
    return placed


def _places(unit: nn.Module, units: Container[nn.Module]) -> Places:
    """Those of a unit: of the modules in it that are in no unit inside of it."""
    found: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in _own_modules(unit, units):
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            found.setdefault(parameter, []).append((module, key))
    return tuple(map(tuple, found.values()))


def _own_modules(unit: nn.Module, units: Container[nn.Module]) -> Iterator[nn.Module]:
    yield unit
    for child in unit.children():
        if child not in units:
            yield from _own_modules(child, units)


def _cast_output(dtype: torch.dtype, forward: Any, *args: Any, **kwargs: Any) -> Any:
    return map_tensors(partial(_to, dtype), forward(*args, **kwargs))


def _cast_for_hooks(unit: nn.Module, places: Places, to_compute: CastAll, inputs: Cast) -> None:
    """Let hooks before a unit's forward see what forward sees: that of `weight_norm` makes a weight of parameters."""
    kept: list[list[torch.Tensor]] = []

    def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        kept.append(put_casts(places, to_compute))
        return map_tensors(inputs, args), map_tensors(inputs, kwargs)

    def end(*_: Any) -> None:
        put_back(places, kept.pop())

    hook_first(unit, begin, with_kwargs=True)
    unit.register_forward_hook(end, always_call=True)


def _to(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _each_to(dtype: torch.dtype, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """One by one: the compiler puts them together."""
    return [_to(dtype, tensor) for tensor in tensors]


def _all_to(dtype: torch.dtype, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The small ones of fp32 together, those that are trained and the others apart: all results are alike in that."""
    small = [i for i, each in enumerate(tensors) if each.dtype == torch.float32 and each.numel() <= CAST_TOGETHER]
    apply: Any = _Together.apply  # torch does not annotate it
    found: dict[int, torch.Tensor] = {}
    for trained in (True, False):
        if len(some := [i for i in small if tensors[i].requires_grad is trained]) > 1:
            found |= zip(some, apply(dtype, *(tensors[i] for i in some)), strict=True)
    return [found[i] if i in found else _to(dtype, each) for i, each in enumerate(tensors)]


class _Together(torch.autograd.Function):
    """Casts of several tensors of one type by one kernel, and those of their gradients."""

    @staticmethod
    def forward(dtype: torch.dtype, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        casts = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
        copy_together(casts, list(tensors))
        return tuple(casts)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)  # a weight that forward did not use has none
        ctx.dtype = inputs[1].dtype

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        apply: Any = _Together.apply  # and so it can be derived in turn
        found = iter(apply(ctx.dtype, *(grad for grad in grads if grad is not None)))
        return None, *(None if grad is None else next(found) for grad in grads)
