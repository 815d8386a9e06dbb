"""Small gradients that lie side by side in one buffer, as one tensor: DDP's buckets, the shards that FSDP2 has reduced.

On a CPU, an operation on a list of tensors is a kernel call per tensor, and for small ones the calls are all it costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

SMALL = 2**14
"""Elements of a gradient whose kernel takes no longer than its call."""


class Joined(NamedTuple):
    """Gradients of a step; each element in exactly one tensor."""

    runs: list[torch.Tensor]
    """Shape (n,): several small gradients each."""
    alone: list[torch.Tensor]
    """All others, as they are, in their order."""


class _Run(NamedTuple):
    """Elements `start` to `stop` of a storage, which are gradients and nothing else."""

    first: int
    """Place in the list of the gradient that begins it."""
    start: int
    stop: int


class JoinedGradients:
    """Finds the runs once, and again when a gradient has another address than in the step before.

    >>> whole = torch.arange(5.0)
    >>> JoinedGradients().of({"a": whole[3:5], "b": whole[0:3], "c": torch.ones(2)})
    Joined(runs=[tensor([0., 1., 2., 3., 4.])], alone=[tensor([1., 1.])])
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._addresses: list[int] = []
        self._runs: list[_Run] = []
        self._alone: list[int] = []

    def of(self, gradients: Mapping[str, torch.Tensor]) -> Joined:
        """Join what can be; on accelerators, where one kernel takes a list, nothing.

        Args:
            gradients: plain tensors by name; that of a name has the same shape in every step.

        Cost: a look at the address of each tensor.
        """
        names, tensors = list(gradients), list(gradients.values())
        if not tensors or not tensors[0].is_cpu:
            return Joined([], tensors)
        addresses = [tensor.data_ptr() for tensor in tensors]
        if addresses != self._addresses or names != self._names or not self._fit(tensors):
            self._find(tensors)
            self._names, self._addresses = names, addresses
        runs = [tensors[i].as_strided((stop - start,), (1,), start) for i, start, stop in self._runs]
        return Joined(runs, [tensors[i] for i in self._alone])

    def _fit(self, tensors: list[torch.Tensor]) -> bool:
        """The memory at these addresses is one storage, as it was when the runs were found."""
        return all(
            tensors[i].storage_offset() == start
            and tensors[i].untyped_storage().nbytes() >= stop * tensors[i].element_size()
            for i, start, stop in self._runs
        )

    def _find(self, tensors: list[torch.Tensor]) -> None:
        self._runs = []
        joined: set[int] = set()
        buffers: dict[tuple[int, torch.dtype], list[tuple[int, int]]] = {}
        for i, tensor in enumerate(tensors):
            if _is_small(tensor):
                key = (tensor.untyped_storage().data_ptr(), tensor.dtype)
                buffers.setdefault(key, []).append((int(tensor.storage_offset()), i))
        for members in buffers.values():
            for run in _neighbours(sorted(members), tensors):
                if len(run) > 1:
                    start = int(tensors[run[0]].storage_offset())
                    self._runs.append(_Run(run[0], start, start + sum(tensors[i].numel() for i in run)))
                    joined.update(run)
        self._alone = [i for i in range(len(tensors)) if i not in joined]


def _is_small(tensor: torch.Tensor) -> bool:
    """Not in fp64: the norm of a run has no type to be accumulated in that would hide the order."""
    small = 0 < tensor.numel() <= SMALL and tensor.dtype != torch.float64
    return small and type(tensor) is torch.Tensor and tensor.is_contiguous()


def _neighbours(members: list[tuple[int, int]], tensors: list[torch.Tensor]) -> list[list[int]]:
    """Members of one storage, in the order of their place in it, cut where there is a gap or an overlap."""
    runs: list[list[int]] = []
    stop = -1
    for offset, i in members:
        if offset != stop:
            runs.append([])
        runs[-1].append(i)
        stop = offset + tensors[i].numel()
    return runs
