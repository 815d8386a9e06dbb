"""Names of torch that are not in its public interface, used by this folder."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = ["READ_NUMBER", "TorchDispatchMode", "fake_tensors", "is_fake", "with_values"]

READ_NUMBER = torch.ops.aten._local_scalar_dense.default
"""What `.item()` is."""


def fake_tensors() -> AbstractContextManager[Any]:
    """Within it every operation gives tensors with shapes, strides and devices, and no memory: `FakeTensorMode`."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(tensor: torch.Tensor) -> bool:
    """True for a tensor of `fake_tensors`."""
    return isinstance(tensor, FakeTensor)


def with_values() -> AbstractContextManager[Any]:
    """Within it no mode sees or changes an operation: `_disable_current_modes`."""
    return _disable_current_modes()
