"""Weights that a forward writes: `fully_shard` would lose it, for what is written is a gathered copy of them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardwise.errors import ModelError
from shardwise.parallel.layers.tensor_hooks import wrap_forward

_PIECE = 1 << 16
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def watch_weights(root: nn.Module) -> None:
    """Look at the first training forward of each unit of `fully_shard`: at the values of its weights before and after.

    Cost: two passes over the parameters, once. A write into a weight that comes later is not seen.
    """
    units = [module for module in root.modules() if isinstance(module, FSDPModule)]
    for name, module in root.named_modules():
        if module in units:
            wrap_forward(module, watched(module, name, units))


def watched(unit: nn.Module, name: str, units: Container[object]) -> Callable[..., Any]:
    """A function of a unit's forward and its arguments, which calls it, and the first time looks at the weights.

    Args:
        unit: a module whose weights are copies while its forward runs.
        name: of it.
        units: all of these modules; weights in those inside of it are not its own.

    Raises:
        ModelError: by the function: forward has written into a weight.
    """
    seen: list[bool] = []

    def call(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if seen or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        seen.append(True)
        before = dict(values_of(unit, name, units))
        output = forward(*args, **kwargs)
        written = [name for name, value in values_of(unit, name, units) if before.get(name, value) != value]
        if written:
            raise ModelError(
                f"forward writes into the weight {written[0]}, and under a plan that shards parameters, or computes in "
                "another type than theirs, it writes into a copy that is dropped; change weights after the step (under "
                "no_grad, those of placed.parameters()), or in a parametrization (torch.nn.utils.parametrize)",
                row="module.writes-weights",
            )
        return output

    return call


def values_of(unit: nn.Module, prefix: str = "", units: Container[object] = ()) -> Iterator[tuple[str, int]]:
    """Name of each parameter of a unit itself -> the sum of its bits, as integers."""
    for name, parameter in unit.named_parameters(prefix, recurse=False):
        local = parameter.to_local().detach() if isinstance(parameter, DTensor) else parameter.detach()
        if not (local.is_meta or hasattr(local, "__tensor_flatten__")):  # no pairs of fp8 and a scale
            yield name, _sum(local.contiguous().view(-1).view(_INTEGERS[local.element_size()]))
    for name, child in unit.named_children():
        if child not in units:
            yield from values_of(child, f"{prefix}.{name}" if prefix else name, units)


def _sum(bits: torch.Tensor) -> int:
    """On a CPU in pieces, where a sum has a copy of what it adds in the type that it adds it in."""
    pieces = torch.split(bits, _PIECE) if bits.untyped_storage().device.type == "cpu" else (bits,)  # "meta" in a trace
    return sum(int(piece.sum(dtype=torch.int64)) for piece in pieces)
