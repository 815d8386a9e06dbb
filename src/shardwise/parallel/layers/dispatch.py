"""Tokens on their way to the experts of other ranks and back.

Sorted by expert, the tokens of a rank lie in one piece per rank of the `ep` group: one all-to-all takes each piece to
the rank that holds its experts, the same one backwards brings the results (GShard, Lepikhin et al., arXiv:2006.16668,
section 3). How many tokens a rank gets is known only when it happens; none is a number like any other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.parallel.layers.regions import gather, own, split

Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(tokens (n, dim), chosen (n, k), weights (n, k)) -> weighted sum over the chosen experts, (n, dim)."""


class _Exchange(torch.autograd.Function):
    """One all-to-all of rows; backward is the same one backwards. Every rank of the group takes part in both."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.received, ctx.sent, ctx.group = received, sent, group
        return _all_to_all(rows, received, sent, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _all_to_all(grads[0], ctx.sent, ctx.received, ctx.group), None, None, None


def _all_to_all(rows: torch.Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    result = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
    return result


class _Touch(torch.autograd.Function):
    """Identity on the first tensor; the others get a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*others)
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0], *(torch.zeros_like(tensor) for tensor in ctx.saved_tensors)


def touch(module: nn.Module, forward: Experts, x: torch.Tensor, chosen: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Run experts so that their gradients exist, and that gradients flow through, also where no token came.

    Without it a rank would stay out of the collectives of the backward pass, and the others would wait for it.
    """
    if len(x):
        return forward(x, chosen, w)
    own = [getattr(module, name) for name, _ in module.named_parameters(recurse=False)]
    touched = _Touch.apply(x.new_zeros(x.shape), x, *own)  # type: ignore[no-untyped-call]  # torch has no types here
    return cast(torch.Tensor, touched)


class Dispatch:
    """Lets experts that are spread over an `ep` group work on the tokens of all its ranks."""

    def __init__(self, ep_mesh: DeviceMesh, num_experts: int) -> None:
        """`num_experts` over the whole group; each rank holds an equal share, in order."""
        self.group = ep_mesh.get_group()
        self.num_ranks = ep_mesh.size()
        self.num_experts = num_experts

    def __call__(self, forward: Experts, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Run `forward`, which knows this rank's experts only, for all choices of this rank's tokens.

        Cost: three all-to-alls: one of counts, one of `dim` numbers per choice each way; backward two more.
        """
        k = chosen.shape[1]
        flat = chosen.flatten()
        counts = flat.bincount(minlength=self.num_experts + 1)[: self.num_experts]
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        local = self.num_experts // self.num_ranks
        sent, received = torch.stack((counts, theirs)).view(2, self.num_ranks, local).sum(-1).tolist()
        order = flat.argsort(stable=True)[: sum(sent)]  # dropped choices are sorted last
        rows = _exchange(x[order // k], received, sent, self.group)
        # from each rank in turn: its tokens for my first expert, for my second one, ...
        expert = torch.arange(local, device=x.device).repeat(self.num_ranks).repeat_interleave(theirs)
        done = forward(rows, expert[:, None], rows.new_ones(len(rows), 1))
        back = _exchange(done, sent, received, self.group)
        slots = back.new_zeros(len(flat), back.shape[1]).index_copy(0, order, back)  # no two share a slot
        return (slots.view(*chosen.shape, back.shape[1]) * weights[..., None]).sum(1).to(x.dtype)


def _exchange(rows: torch.Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    return cast(torch.Tensor, _Exchange.apply(rows, received, sent, group))  # type: ignore[no-untyped-call]  # torch has no types here


def on_shares(
    forward: Experts, tp_mesh: DeviceMesh, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Run experts on tokens that are the same on all tp ranks: each rank takes its share, and all get all results.

    Tokens are filled up to a multiple of the ranks with ones of weight zero.
    Cost: one all-gather of the results; backward one of the tokens' gradients and one of the weights'.
    """
    count = len(x)
    fill = -count % tp_mesh.size()
    if fill:
        x, chosen, weights = (F.pad(tensor, (0, 0, 0, fill)) for tensor in (x, chosen, weights))
    here = slice(tp_mesh.get_local_rank() * (len(x) // tp_mesh.size()), None)
    mine = chosen[here][: len(x) // tp_mesh.size()]
    result = forward(split(x, tp_mesh, 0), mine, split(weights, tp_mesh, 0))
    whole = gather(result, tp_mesh, 0)
    return own(whole[:count]) if fill else whole
