"""What stacked experts keep for a backward pass, in a copy of a model that is described without values.

The stand-ins of `model.standin` have the shapes and products of experts. These do what theirs do between the products
too: rows by choice, the activation, the weighted sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

BY_GROUP = "runs_by_group"
"""The attribute of a copy's experts whose real products are grouped ones."""


def keep_rows(copy: nn.Module) -> None:
    """Exchange the stand-ins of a meta copy whose experts are two stacks: into the hidden size, and out of it."""
    for module in copy.modules():
        forward = vars(module).get("forward")
        stacks = [p for p in module.parameters(recurse=False) if p.dim() == 3]
        if isinstance(forward, partial) and len(stacks) == 2:
            # an attribute of the instance: this copy is only ever traced
            object.__setattr__(module, "forward", partial(_forward, module, stacks, forward))
            object.__setattr__(module, BY_GROUP, True)


def stacks_by_group(copy: nn.Module) -> Iterator[nn.Parameter]:
    """The stacks whose real products are grouped ones, which per-operator recompute runs again."""
    for module in copy.modules():
        if getattr(module, BY_GROUP, False):
            yield from (p for p in module.parameters(recurse=False) if p.dim() == 3)


def _forward(module: nn.Module, stacks: list[nn.Parameter], other: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Experts that are called with tokens, their choices and weights; `other` is for all else."""
    given = [*args, *named.values()]
    if len(given) != 3 or not all(isinstance(value, torch.Tensor) for value in given):
        return other(*args, **named)
    tokens, chosen, weights = given
    first, second = (p if getattr(module, "is_transposed", False) else p.mT for p in stacks)
    times = first.shape[2] / second.shape[1]
    if first.shape[1] != tokens.shape[-1] or times not in (1, 2) or weights.numel() != chosen.numel():
        return other(*args, **named)
    rows = tokens[torch.zeros(chosen.numel(), dtype=torch.long)] @ first[0]
    hidden = _gated(module, rows) if times == 2 else _activation(module)(rows)
    weighted = (hidden @ second[0]) * weights.reshape(-1, 1).to(tokens.dtype)
    return weighted.view(tokens.shape[0], -1, weighted.shape[-1]).sum(1)


def _gated(module: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    own = getattr(module, "_apply_gate", None)
    if own is not None:
        result: torch.Tensor = own(rows)
        return result
    gate, up = rows.chunk(2, dim=-1)
    return _activation(module)(gate) * up


def _activation(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    found: Callable[[torch.Tensor], torch.Tensor] = getattr(module, "act_fn", F.silu)
    return found
