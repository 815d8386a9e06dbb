"""Weights that a forward writes: `fully_shard` would lose it, for what is written is a gathered copy of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardwise.errors import ModelError

_PIECE = 1 << 16
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def watch_weights(root: nn.Module) -> None:
    """Look at the first training forward of each unit of `fully_shard`: at the values of its weights before and after.

    Cost: two passes over the parameters, once. A write into a weight that comes later is not seen.
    """
    for name, module in root.named_modules():
        if isinstance(module, FSDPModule) and isinstance(module, nn.Module):
            _Watch(module, name)


class _Watch:
    """Of one unit: its hooks run within those of `fully_shard`, while the weights are whole, and are removed by it."""

    def __init__(self, unit: nn.Module, name: str) -> None:
        self.name = name
        self.before: dict[str, int] = {}
        self.hooks = (
            unit.register_forward_pre_hook(self.begin),
            unit.register_forward_hook(self.end, prepend=True),
        )

    def begin(self, unit: nn.Module, _: Any) -> None:
        """What the weights are."""
        if torch.is_grad_enabled():
            self.before = dict(_values(unit, self.name))

    def end(self, unit: nn.Module, *_: Any) -> None:
        """What they are now.

        Raises:
            ModelError: something else.
        """
        if not torch.is_grad_enabled():
            return
        for hook in self.hooks:
            hook.remove()
        written = [name for name, value in _values(unit, self.name) if self.before.get(name, value) != value]
        if written:
            raise ModelError(
                f"forward writes into the weight {written[0]}, and under a plan that shards parameters, or computes in "
                "another type than theirs, it writes into a copy that is dropped; change weights after the step (under "
                "no_grad, those of placed.parameters()), or in a parametrization (torch.nn.utils.parametrize)",
                row="module.writes-weights",
            )


def _values(unit: nn.Module, prefix: str) -> Iterator[tuple[str, int]]:
    """Name of each parameter of a unit itself -> the sum of its bits, as integers."""
    for name, parameter in unit.named_parameters(prefix, recurse=False):
        local = parameter.to_local().detach() if isinstance(parameter, DTensor) else parameter.detach()
        if type(local) is torch.Tensor and not local.is_meta:  # no shapes without values, no pairs of fp8 and a scale
            yield name, _sum(local.contiguous().view(-1).view(_INTEGERS[local.element_size()]))
    for name, child in unit.named_children():
        if not isinstance(child, FSDPModule):
            yield from _values(child, f"{prefix}.{name}" if prefix else name)


def _sum(bits: torch.Tensor) -> int:
    """On a CPU in pieces, where a sum has a copy of what it adds in the type that it adds it in."""
    pieces = torch.split(bits, _PIECE) if bits.device.type == "cpu" else (bits,)
    return sum(int(piece.sum(dtype=torch.int64)) for piece in pieces)
