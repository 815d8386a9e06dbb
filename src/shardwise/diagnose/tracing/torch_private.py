"""The private torch names that this folder uses, and nothing else. Each has a test that fails when torch moves it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch._C._distributed_c10d as c10d_typed
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket as GradBucket
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

c10d: Any = c10d_typed  # not all of it has types

OperationMode = TorchDispatchMode
"""Base of a context that sees every aten and c10d operation."""

READ_NUMBER = torch.ops.aten._local_scalar_dense.default
"""What `.item()` is."""

AWAIT = torch.ops._c10d_functional.wait_tensor.default
"""The wait for a functional collective: gives the tensor that it takes."""

REDUCE_SCATTER = torch.ops.c10d._reduce_scatter_base_.default
"""That of one tensor, as `fully_shard` issues it: output, input."""

NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
"""What torch raises for an operation whose result depends on the values of a tensor that has none."""


def fake_tensors() -> AbstractContextManager[Any]:
    """Within it every operation gives tensors with shapes, strides and devices, and no memory: `FakeTensorMode`."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def real_tensors() -> AbstractContextManager[Any]:
    """Within it operations on tensors that have values are run, inside of `fake_tensors`: `unset_fake_temporarily`."""
    return unset_fake_temporarily()


def is_fake(tensor: torch.Tensor) -> bool:
    """True for a tensor of `fake_tensors`."""
    return isinstance(tensor, FakeTensor)


def is_plain(kind: type) -> bool:
    """True where operations on tensors of this class are those on memory, and not on parts of a distributed one."""
    return kind is torch.Tensor or kind is torch.nn.Parameter or kind is FakeTensor


def group_of(argument: Any) -> dist.ProcessGroup | None:
    """The process group that a c10d operation was given: `ProcessGroup.unbox`; None: the argument is no group."""
    if isinstance(argument, torch.ScriptObject) and str(argument._type()).endswith(".ProcessGroup"):
        group: dist.ProcessGroup = dist.ProcessGroup.unbox(argument)
        return group
    return None


def group_named(name: str) -> dist.ProcessGroup:
    """The process group of a functional collective: `_resolve_process_group`."""
    group: dist.ProcessGroup = c10d._resolve_process_group(name)
    return group


def work_that_holds(tensors: list[torch.Tensor]) -> Any:
    """A communication that is done, as c10d operations return it, and keeps tensors as long as somebody keeps it.

    `_create_work_from_future`, and `Work.boxed`.
    """
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result(tensors)
    return c10d._create_work_from_future(future).boxed()


def rebuild_buckets(module: DistributedDataParallel) -> None:
    """Let DDP put its buckets into the order in which gradients came, if it is time: `Reducer._rebuild_buckets`.

    The next forward would do it.
    """
    module.reducer._rebuild_buckets()


def storage_key(storage: torch.UntypedStorage) -> int:
    """Address of a storage object, which no other has while it lives: `UntypedStorage._cdata`."""
    return int(storage._cdata)


@contextmanager
def shards_known_by_storage() -> Iterator[None]:
    """Within it `fully_shard` knows a shard that it has padded by its storage: `FSDPParam.reset_sharded_param`.

    It compares addresses, which shapes have not, and would pad into another tensor at each look.
    """
    renew = FSDPParam.reset_sharded_param

    def reset(self: FSDPParam) -> None:
        parameter = getattr(self._module_info.module, self._module_info.param_name)
        local, known = parameter._local_tensor, self._sharded_param_data
        is_same = storage_key(known.untyped_storage()) == storage_key(local.untyped_storage())
        if parameter is not self.sharded_param or local.is_meta or not is_same:
            renew(self)  # type: ignore[no-untyped-call]  # torch has no types here

    with patch.object(FSDPParam, "reset_sharded_param", reset):
        yield
