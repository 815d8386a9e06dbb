"""`host`: a back-end whose messages pass through the host's memory, so that several ranks may share one device.

NCCL refuses two ranks on one GPU. With this back-end a plan for 8 GPUs runs on the one that is there: its maths on the
real kernels, at no speed to speak of. Every collective copies its tensors to the host, runs gloo and copies back what
was written. `torch.futures` carry the results, since DDP asks for them.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]  # not in its stubs

from shardwise.launch.environment import HOST
from shardwise.parallel.history import substitute, tensors_in
from shardwise.parallel.mesh_torch_private import Store


class HostGroup(dist.ProcessGroup):
    """Ranks that talk through gloo, wherever their tensors are."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        """Join them; collective."""
        super().__init__(rank, size)  # type: ignore[call-arg]  # the constructor without a store has no stub
        self._gloo = dist.ProcessGroup(store, rank, size)
        self._gloo._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self.carrier = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._gloo._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self.carrier)

    def _set_group_name(self, name: Any) -> None:  # torch keeps it in its own back-ends
        self._gloo._set_group_name(name)

    @property
    def group_name(self) -> Any:  # torch has a new type for it
        """The name that torch gave it."""
        return self._gloo.group_name

    def getBackendName(self) -> str:
        """As torch lists it."""
        return HOST

    def barrier(self, opts: Any = None) -> dist.Work:
        """All are here; work that was issued to a device goes on."""
        self._gloo.barrier().wait()
        return _done([])

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> dist.Work:
        """Hand over a copy; the work is done when it has left."""
        return self._gloo.send(_on_host(tensors), to, tag)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> dist.Work:
        """Ask for a message; it reaches its tensors when the work is waited for."""
        landing = _on_host(tensors)
        return _Received(self._gloo.recv(landing, source, tag), tensors, landing)


class _Received(dist.Work):
    """A message on its way to host memory, and from there to a device."""

    def __init__(self, work: dist.Work, tensors: list[torch.Tensor], landing: list[torch.Tensor]) -> None:
        super().__init__()
        self._work, self._tensors, self._landing = work, tensors, landing

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until it is in its tensors."""
        self._work.wait(*([timeout] if timeout else []))
        _copy_back(self._tensors, self._landing)
        self._tensors, self._landing = [], []
        return True

    def is_completed(self) -> bool:
        """It is on the host at least."""
        return self._work.is_completed()


def _collective(*names: str) -> Callable[..., dist.Work]:
    """A collective by the first of its names that this torch has; its first argument is what it writes."""
    name = next(name for name in names if hasattr(dist.ProcessGroup, name))

    def run(self: HostGroup, written: Any, *others: Any) -> dist.Work:
        landing = _on_host(written)
        getattr(self._gloo, name)(landing, *(_on_host(other) for other in others)).wait()
        _copy_back(written, landing)
        return _done(list(tensors_in(written)))

    return run


_NAMES = (
    ("allreduce",), ("allreduce_coalesced",), ("broadcast",), ("reduce",), ("gather",), ("scatter",), ("allgather",),
    ("reduce_scatter",), ("alltoall",),
    # named by what they take since torch 2.13, by where they put it before
    ("all_gather_single", "_allgather_base"), ("reduce_scatter_single", "_reduce_scatter_base"),
    ("all_to_all_single", "alltoall_base"), ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
    ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
)  # fmt: skip
for names in _NAMES:
    for spelling in names:
        setattr(HostGroup, spelling, _collective(*names))


def register() -> None:
    """Make torch know the back-end; again is no harm."""
    if HOST not in dist.Backend.backend_list:
        dist.Backend.register_backend(HOST, HostGroup, devices=["cpu", "cuda", "xpu"])


def _on_host(value: Any) -> Any:
    """Tensors of nested lists on the CPU; a tensor that is there already, and what is no tensor, is itself."""
    return substitute(value, torch.Tensor, lambda tensor: tensor.detach().cpu())


def _copy_back(written: Any, landing: Any) -> None:
    with torch.no_grad():
        for tensor, arrived in zip(tensors_in(written), tensors_in(landing), strict=True):
            if tensor.device.type != "cpu":
                tensor.copy_(arrived)


def _done(tensors: list[torch.Tensor]) -> dist.Work:
    devices = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=list(devices))
    future.set_result(tensors)
    work: dist.Work = _create_work_from_future(future)
    return work
