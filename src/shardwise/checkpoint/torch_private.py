"""The private torch names that this folder uses, and nothing else. Each has a test that fails when torch moves it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard


def indices_here(tensor: DTensor) -> list[Sequence[int]]:
    """For each dim, the global indices of the elements that this rank's shard holds, in the local order.

    FSDP2 over tensor parallelism on one dim is a `_StridedShard`, private in torch 2.13: the dim is cut into
    `split_factor` parts, and each part over the axis.
    """
    mesh = tensor.device_mesh
    here: list[Sequence[int]] = [range(n) for n in tensor.shape]
    for axis, placement in enumerate(tensor.placements):
        dim = _dim(placement)
        if dim is None:
            continue
        rank, size = mesh.get_local_rank(axis), mesh.size(axis)
        if isinstance(placement, _StridedShard):
            parts = _chunks(here[dim], int(placement.split_factor))
            here[dim] = [index for part in parts for index in _chunk(part, size, rank)]
        else:
            here[dim] = _chunk(here[dim], size, rank)
    return here


def set_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """How long those who wait in a group's collectives do so before that is an error.

    `torch.distributed.set_timeout`; before torch 2.14 `_set_pg_timeout`.
    """
    known: Any = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
    known(timedelta(seconds=seconds), group)


def _dim(placement: Placement) -> int | None:
    return placement.dim if isinstance(placement, Shard | _StridedShard) else None


def _chunks(indices: Sequence[int], count: int) -> list[Sequence[int]]:
    return [_chunk(indices, count, i) for i in range(count)]


def _chunk(indices: Sequence[int], count: int, i: int) -> Sequence[int]:
    """As `torch.chunk`: parts of equal size, the last ones smaller or empty."""
    step = -(-len(indices) // count)
    return indices[min(i * step, len(indices)) : min((i + 1) * step, len(indices))]


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor, or the tensor itself; no copy, no autograd.

    `DTensor.to_local` goes through autograd: a hundredth of a millisecond for each of hundreds of tensors.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def version_of(tensor: torch.Tensor) -> int:
    """What torch counts up at every change in place of a tensor or a view of it, so that autograd sees it."""
    return int(tensor._version)
