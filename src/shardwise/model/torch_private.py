"""Names of torch that are not in its public interface, used by this folder."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.checkpoint import CheckpointPolicy

__all__ = [
    "READ_NUMBER",
    "TorchDispatchMode",
    "drop_backward_hooks",
    "fake_tensors",
    "hooked_modules",
    "is_fake",
    "keeps_costly",
    "with_values",
]

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


def drop_backward_hooks(root: nn.Module) -> None:
    """Forget what is called in the backward passes of modules: `_backward_hooks`, `_backward_pre_hooks`."""
    for module in root.modules():
        module._backward_hooks.clear()
        module._backward_pre_hooks.clear()


def hooked_modules(root: nn.Module) -> list[str]:
    """Names of the modules whose forward a user looks at: `_forward_hooks`."""
    ours = ("torch", "shardwise")
    return [
        name or type(root).__name__
        for name, module in root.named_modules()
        if any(getattr(hook, "__module__", "").partition(".")[0] not in ours for hook in module._forward_hooks.values())
    ]


COSTLY_OPERATIONS = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.linear.default,
        torch.ops.aten.convolution.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
    }
)
"""Operations whose results `recompute=ops` keeps: the costly ones, as in selective activation recomputation
(Korthikanti et al., arXiv:2205.05198, section 5)."""


def keeps_costly(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """What per-operator recompute does with an operation's result."""
    return CheckpointPolicy.MUST_SAVE if operation in COSTLY_OPERATIONS else CheckpointPolicy.PREFER_RECOMPUTE
