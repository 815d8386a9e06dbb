"""Stand-ins for modules whose forward depends on values, in a copy of a model that has none.

The expert modules of `transformers` look for the experts that some token chose (`nonzero`). What they give has the
shape of their tokens whatever was chosen, and its cost is known.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise.errors import ModelError

FOREIGN = "transformers."


def stand_in_experts(copy: nn.Module) -> None:
    """Exchange the forward of stacked experts in a meta copy: same shapes, same parameters used, same flops."""
    for name, module in copy.named_modules():
        stacked = [p for p in module.parameters(recurse=False) if p.dim() == 3]
        if name.rpartition(".")[2] == "experts" and stacked and type(module).__module__.startswith(FOREIGN):
            # an attribute of the instance: this copy is only ever traced
            object.__setattr__(module, "forward", partial(_forward, name, module, stacked))


def _forward(name: str, module: nn.Module, stacked: list[nn.Parameter], *args: Any, **kwargs: Any) -> Any:
    """What is called in place of the forward of experts: how it is called says of which kind they are.

    Raises:
        ModelError: they are of no known kind.
    """
    given = [*args, *kwargs.values()]
    tensors = all(isinstance(value, torch.Tensor) for value in given)
    if tensors and len(given) == 1:  # grouped by expert before (Llama 4): nothing is chosen inside, it runs as it is
        return type(module).forward(module, *args, **kwargs)
    if tensors and len(given) == 3:
        return _experts(stacked, *given)
    kinds = [f"{key}={type(value).__name__}" for key, value in kwargs.items()]
    found = ", ".join([*(type(value).__name__ for value in args), *kinds])
    raise ModelError(
        f"{name} ({type(module).__name__}): its experts are called with ({found}), and their cost without data is "
        "known for three tensors (tokens, chosen experts, weights), or one (tokens grouped by expert); to plan, read "
        "it with values (--trace-on cpu); to train, use a plan with pp1"
    )


def _experts(
    stacked: list[nn.Parameter], tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """(n, dim) tokens and (n, k) choices: each token meets k experts, that is one matrix of each stack k times."""
    total = tokens * weights.sum(-1, keepdim=True).to(tokens.dtype)
    for parameter in stacked:
        rows = tokens.new_empty(chosen.numel(), parameter.shape[2])
        total = total + (rows @ parameter[0].mT).sum() * 0
    return total
