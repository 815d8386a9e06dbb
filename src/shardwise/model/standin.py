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
WARNS = "warn_if_padding_and_no_attention_mask"
"""A method that looks at token ids and has no result."""


def stand_in_experts(copy: nn.Module) -> None:
    """Exchange the forward of stacked experts in a meta copy: same shapes, same parameters used, same flops."""
    for name, module in copy.named_modules():
        stacked = [p for p in module.parameters(recurse=False) if p.dim() == 3]
        if name.rpartition(".")[2] == "experts" and stacked and type(module).__module__.startswith(FOREIGN):
            # an attribute of the instance: this copy is only ever traced
            object.__setattr__(module, "forward", partial(_forward, name, module, stacked))


def leave_out_warnings(copy: nn.Module) -> None:
    """In a meta copy, of models of `transformers`: they ask token ids for padding, of which they only warn."""
    for module in copy.modules():
        if hasattr(module, WARNS) and type(module).__module__.startswith(FOREIGN):
            object.__setattr__(module, WARNS, _say_nothing)


def _say_nothing(*given: object) -> None:
    pass


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


def spread_evenly(count: int, bins: int) -> list[int]:
    """So many tokens over so many experts.

    >>> spread_evenly(7, 3)
    [3, 2, 2]
    """
    share, rest = divmod(count, max(bins, 1))
    return [share + (i < rest) for i in range(bins)]


class Attended(torch.autograd.Function):
    """Stands for fused attention: a result of its shape that depends on its inputs."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """What fused attention keeps: its inputs, its result, and a number per query and head."""
        like = q.transpose(-2, -3)  # fused kernels lay it out as the queries, or else heads last
        out = torch.empty_like(like) if v.shape[-1] == q.shape[-1] else q.new_empty(*like.shape[:-1], v.shape[-1])
        out = out.transpose(-2, -3)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Gradients of queries, keys and values."""
        return tuple(map(torch.empty_like, ctx.saved_tensors[:3]))


class LossOf(torch.autograd.Function):
    """Stands for a loss: the gradient of what it takes is new."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        """A number."""
        ctx.save_for_backward(values)
        return values.new_empty(())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        """The gradient of what the loss was given."""
        return torch.empty_like(ctx.saved_tensors[0])


def drop(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Dropout in one kernel, as devices have it and as keyed draws are made: it keeps a mask of bytes."""
    return torch.native_dropout(x, p, True)[0] if training and p else x


BITS = torch.uint64
"""The type of what stands for random bits, and of nothing else."""


def drop_by_key(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Dropout as `shardwise.parallel.randomness.draws` has it, by kernel: two buffers of random bits, then the mask."""
    if not training or not p:
        return x
    keep = x.new_empty(x.shape, dtype=torch.bool)
    bits = x.new_empty(x.shape, dtype=BITS)
    bits = bits.clone()
    del bits
    return x.masked_fill_(keep, 0.0).mul_(2.0) if inplace else torch.where(keep, x * 2.0, 0.0)
