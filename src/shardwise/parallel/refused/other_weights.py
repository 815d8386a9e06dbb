"""Weights that stand in place of a module's for the time of a call: `torch.func.functional_call`, as in MAML.

`fully_shard` would put what it has gathered in their place, and a recomputed block would run again with the module's
own: other outputs, other gradients, without a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardwise.errors import ModelError
from shardwise.parallel.blocks import own_blocks, recomputed
from shardwise.parallel.module_torch_private import hook_first
from shardwise.parallel.placed import Placed


def refuse_other_weights(placed: Placed) -> None:
    """Let the units of `fully_shard`, and recomputed blocks, look at their weights before they are called.

    Raises:
        ModelError: at a call with others.

    Cost: a look at the class of each weight in each forward.
    """
    chosen = recomputed(placed.blocks, placed.plan.recompute)
    for part in placed.parts:
        names = {module: name for name, module in part.root.named_modules()}
        units: list[Any] = [module for module in names if isinstance(module, FSDPModule)]
        blocks = [block for name, block in own_blocks(placed) if name in chosen and block in names]
        for unit in dict.fromkeys([*units, *blocks]):
            own = [(module, key) for module in _own(unit, units) for key, _ in module.named_parameters(recurse=False)]
            if own:
                hook_first(unit, partial(_check, str(placed.plan), names, own))


def _own(unit: nn.Module, units: list[Any]) -> Iterator[nn.Module]:
    yield unit
    for child in unit.children():
        if child not in units:
            yield from _own(child, units)


def _check(plan: str, names: dict[nn.Module, str], own: list[tuple[nn.Module, str]], *_: Any) -> None:
    for module, key in own:
        if not isinstance(getattr(module, key, None), nn.Parameter):
            raise ModelError(
                f"{names[module] or 'the model'} is called with another tensor in the place of its parameter {key} "
                f"(torch.func.functional_call), which `{plan}` would not compute with, or not in the backward pass: "
                "weights are gathered, or blocks computed again, from the module's own; give the weights to a forward "
                "as arguments (torch.nn.functional.linear(x, weight)), or use a plan of `dp` without recompute",
                row="module.other-weights",
            )
