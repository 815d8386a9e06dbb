"""Names of torch that are not in its public interface, used by this folder."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = ["ASK_DEVICE", "READ_NUMBER", "TorchDispatchMode", "device_of", "fake_tensors", "is_fake", "with_values"]

READ_NUMBER = torch.ops.aten._local_scalar_dense.default
"""What `.item()` is."""
ASK_DEVICE = torch.ops.prim.device.default
"""What `.device` of a fake tensor is, in torch's own code too: three of four operations of a step."""


def fake_tensors() -> AbstractContextManager[Any]:
    """Within it every operation gives tensors with shapes, strides and devices, and no memory: `FakeTensorMode`."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(tensor: torch.Tensor) -> bool:
    """True for a tensor of `fake_tensors`."""
    return isinstance(tensor, FakeTensor)


def device_of(tensor: torch.Tensor) -> torch.device:
    """Where a tensor of `fake_tensors` is said to be, without asking its modes."""
    assert isinstance(tensor, FakeTensor)
    return tensor.fake_device


def with_values() -> AbstractContextManager[Any]:
    """Within it no mode sees or changes an operation: `_disable_current_modes`."""
    return _disable_current_modes()
