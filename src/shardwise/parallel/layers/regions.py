"""Moving activations between the three forms that they have on the tensor-parallel axis.

*Whole*: the same on every rank. *Split*: a shard of one dim on each rank. *Summand*: the ranks' tensors add up to
the value. Each function takes and gives plain local tensors; forward and backward are those of `DTensor`
(`from_local`, `redistribute`, `to_local`), so that a gradient is always that of one process.

The pairs are those of Shoeybi et al. (arXiv:1909.08053, section 3) and Korthikanti et al. (arXiv:2205.05198,
section 4.2).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, view: torch.Tensor) -> torch.Tensor:
        # a collective still in flight: compiled code that is given one loses its gradient (torch 2.13)
        wait = getattr(view, "wait", None)
        return view.detach() if wait is None else cast(torch.Tensor, wait())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def own(view: torch.Tensor) -> torch.Tensor:
    """A view that nothing else uses, as a complete tensor of its own, without a copy.

    `DTensor.to_local` gives views of collectives in flight. What leaves a module must be neither: an in-place operation
    on a view drops the hook by which `fully_shard` gathers parameters for the backward pass, and a compiled block
    sends the gradient of a view to its base.
    """
    result: torch.Tensor = _Own.apply(view)  # type: ignore[no-untyped-call]  # torch has no types here
    return result


def fan_out(whole: torch.Tensor, tp_mesh: DeviceMesh) -> torch.Tensor:
    """Whole -> whole, for a consumer whose gradient is a summand on each rank. Backward: one all-reduce."""
    shared = DTensor.from_local(whole, tp_mesh, (Replicate(),), run_check=False)
    return shared.to_local(grad_placements=(Partial(),))


def split(whole: torch.Tensor, tp_mesh: DeviceMesh, dim: int) -> torch.Tensor:
    """Whole -> split along `dim`, without communication. Backward: one all-gather."""
    shared = DTensor.from_local(whole, tp_mesh, (Replicate(),), run_check=False)
    return shared.redistribute(placements=(Shard(dim),)).to_local()


def gather(shard: torch.Tensor, tp_mesh: DeviceMesh, dim: int) -> torch.Tensor:
    """Split along `dim` -> whole: one all-gather. Backward: this rank's slice, without communication."""
    shared = DTensor.from_local(shard, tp_mesh, (Shard(dim),), run_check=False)
    return own(shared.redistribute(placements=(Replicate(),)).to_local())


def add_up(summand: torch.Tensor, tp_mesh: DeviceMesh) -> torch.Tensor:
    """Summand -> whole: one all-reduce. Backward: the gradient as it is."""
    shared = DTensor.from_local(summand, tp_mesh, (Partial(),), run_check=False)
    return shared.redistribute(placements=(Replicate(),)).to_local()


def enter(local: torch.Tensor, tp_mesh: DeviceMesh, sequence_dim: int | None) -> tuple[torch.Tensor, DTensor]:
    """The input of a module that holds column layers, in two forms with the same values.

    The first is a plain whole tensor, right for any use whose gradient is the same on every rank. The second is for
    column layers alone: their gradients are summands, and all layers that take it share one reduction.

    Args:
        local: The whole input, or this rank's shard of it along `sequence_dim`.
        tp_mesh: The tensor-parallel axis, one-dimensional.
        sequence_dim: The dim along which the input is split; None: it is whole.

    Cost: whole: forward none, backward one all-reduce. Split: one all-gather, backward one reduce-scatter.
    """
    here = Replicate() if sequence_dim is None else Shard(sequence_dim)
    shared = DTensor.from_local(local, tp_mesh, (here,), run_check=False)
    if sequence_dim is not None:
        shared = shared.redistribute(placements=(Replicate(),))
    return shared.to_local(), shared
