"""The private torch names that this folder uses, and nothing else. Each has a test that fails when torch moves it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType, FunctionType
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch._higher_order_ops.flex_attention import math_attention
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import _engine_run_backward
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode


def apply_to_tensors(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace every parameter and buffer in place, ties kept: `Module._apply`, what `Module.to` is made of."""
    module._apply(function)  # type: ignore[no-untyped-call]  # torch has no types here


def run_backward(roots: tuple[torch.Tensor, ...], gradients: tuple[torch.Tensor, ...]) -> None:
    """`torch.autograd.graph._engine_run_backward`; each gradient has the shape and the type of its root.

    What `torch.autograd.backward` ends in. Its comparison of the shapes before that takes as long as a small layer.
    """
    _engine_run_backward(roots, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True)


def storage_key(tensor: torch.Tensor) -> int:
    """Address of a tensor's storage object, on the meta device too: `UntypedStorage._cdata`."""
    return int(tensor.untyped_storage()._cdata)


def version_kept(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """While it lasts writes into a tensor count up no version: `torch.autograd._unsafe_preserve_version_counter`."""
    kept: AbstractContextManager[None] = _unsafe_preserve_version_counter(tensor)
    return kept


def has_gradient_hook(tensor: torch.Tensor) -> bool:
    """Whether `register_hook`, or `register_post_accumulate_grad_hook`, was called on a tensor that is a leaf."""
    return bool(tensor._backward_hooks) or bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


def wrapper_of(tensor: DTensor) -> int:
    """Which storage a DTensor itself has, without numbers: an assignment to `.data` changes that alone."""
    return int(tensor.untyped_storage()._cdata)


def empty_as(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """`torch.empty_like`, of a DTensor without its dispatch: milliseconds for each shape that is new to it."""
    if not isinstance(tensor, DTensor):
        return torch.empty_like(tensor, device=device)
    local = torch.empty_like(tensor._local_tensor, device=device)
    # the constructor has no types in torch
    return DTensor(local, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def skipped_init(frame: FrameType) -> tuple[Callable[..., torch.Tensor], dict[str, Any]] | None:
    """The function of `torch.nn.init` that is about to do nothing because its tensor is on meta, with its arguments.

    `trunc_normal_` (through `_no_grad_trunc_normal_`), `orthogonal_` and `sparse_` return early on meta tensors, and
    offer no other hook than the read of `Tensor.is_meta` in their own frame.
    """
    code = frame.f_code
    if frame.f_globals.get("__name__") != "torch.nn.init":
        return None
    names = code.co_varnames[: code.co_argcount]
    return getattr(torch.nn.init, code.co_name), {name: frame.f_locals[name] for name in names}


def resync_fully_sharded(module: nn.Module) -> None:
    """Tell `fully_shard` that its parameters' local shards are other tensors now: `FSDPModule._apply` does it."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            refresh(part)


def refresh(module: nn.Module) -> None:
    """Tell one module that its tensors are other objects now, after which it rebuilds what it derives from them."""
    module._apply(lambda tensor: tensor, recurse=False)  # type: ignore[no-untyped-call]  # torch has no types here


def saving_hook() -> Callable[..., Any] | None:
    """What keeps the tensors that are saved for a backward pass; None: autograd itself."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks[0] if hooks is not None else None


def in_checkpoint() -> bool:
    """Whether what runs is in `torch.utils.checkpoint`, by the hooks for saved tensors: a reentrant one has none."""
    return getattr(saving_hook(), "__module__", "") == "torch.utils.checkpoint"


def in_backward() -> bool:
    """Whether this thread runs a backward pass, as when a forward is recomputed: `torch._C._current_graph_task_id`."""
    return torch._C._current_graph_task_id() != -1


def behind_backward(function: Callable[[], None]) -> None:
    """Have a function called when the backward pass that runs is over: the engine's `queue_callback`."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def strided_shard_factor(placement: Placement) -> int | None:
    """`split_factor` of a `_StridedShard` (sharded after the placements to its right), None for any other placement."""
    return int(placement.split_factor) if isinstance(placement, _StridedShard) else None


def swap_tensors(first: torch.Tensor, second: torch.Tensor) -> None:
    """Exchange two tensors and keep the objects: `torch.utils.swap_tensors`, public but without types."""
    torch.utils.swap_tensors(first, second)  # type: ignore[no-untyped-call]


OperationMode = TorchDispatchMode
"""Base of a context that sees every aten operation: `torch.utils._python_dispatch.TorchDispatchMode`."""


class BareOperationMode(OperationMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """The same, of which the compiler hears nothing: `_should_skip_dynamo` would put its functions around each."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


_FLASH_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_FLASH_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_FLASH_CUDA = torch.ops.aten._scaled_dot_product_flash_attention.default
_FLASH_CUDA_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward.default


def fused_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Output and log of the sum of exponentials by torch's fused kernel; None where none serves.

    The public function gives the output alone. A query that sees no key has the log 0 in the CPU kernel.
    """
    if q.device.type == "cpu" and q.shape[-1] == v.shape[-1]:
        out, lse = _FLASH_CPU(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
        return out, lse
    if _flash_serves(q, k, v, mask, causal):
        out, lse, *_ = _FLASH_CUDA(q, k, v, 0.0, causal, False, scale=scale)
        return out, lse
    return None


def fused_attention_backward(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    result: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
    *,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Gradients of (queries, keys, values) by the kernel of `fused_attention`, from (gradient, output, lse)."""
    (q, k, v), (grad, out, lse) = inputs, (t.contiguous() for t in result)
    if q.device.type == "cpu" and q.shape[-1] == v.shape[-1]:
        grads = _FLASH_CPU_BACKWARD(grad, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale)
    elif _flash_serves(q, k, v, mask, causal):
        seed = torch.empty(2, dtype=torch.int64, device=q.device)  # of a dropout that is not there
        lengths = (None, None, q.shape[2], k.shape[2])
        grads = _FLASH_CUDA_BACKWARD(grad, q, k, v, out, lse, *lengths, 0.0, causal, seed, seed, scale=scale)
    else:
        return None
    dq, dk, dv = grads
    return dq, dk, dv


def _flash_serves(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool) -> bool:
    if q.device.type != "cuda" or mask is not None or q.shape[-1] % 8:
        return False
    parameters = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, causal, q.shape[1] != k.shape[1])
    return torch.backends.cuda.can_use_flash_attention(parameters)


IS_META: Any = vars(torch._C.TensorBase)["is_meta"].__get__
SET_DATA: Any = vars(torch._C.TensorBase)["data"].__set__
"""How torch names reading `tensor.is_meta` and assigning `tensor.data` to a function mode."""


class FlexCarrier(Protocol):
    """What stands around each call of `flex_attention`."""

    def begin(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """The function to call in its place, and with what."""
        ...

    def end(self, out: Any) -> Any:
        """What the caller gets of its result."""
        ...


def _carried(*args: Any, shardwise_carrier: FlexCarrier, **kwargs: Any) -> Any:
    """Its code stands in for that of `flex_attention`, where only torch's names and its arguments are seen."""
    function, args, kwargs = shardwise_carrier.begin(args, kwargs)
    return shardwise_carrier.end(function(*args, **kwargs))


def flex_is_imported() -> bool:
    """Whether anybody here can call `flex_attention`. Its module alone is cheap; what it needs to run is not."""
    return "torch.nn.attention.flex_attention" in sys.modules


@contextmanager
def flex_carried_by(carrier: FlexCarrier) -> Iterator[None]:
    """`flex_attention` goes through `carrier` meanwhile, however it was imported, and compiled or not.

    It asks no function mode before it looks at the lengths of queries and mask, which differ where a sequence is
    divided, and models hold it under names of their own: so its code (`__code__`) is exchanged, not a name.
    """
    function = _flex()
    own = function.__code__, function.__defaults__, function.__kwdefaults__
    function.__code__, function.__defaults__ = _carried.__code__, None
    function.__kwdefaults__ = {"shardwise_carrier": carrier}
    try:
        yield
    finally:
        function.__code__, function.__defaults__, function.__kwdefaults__ = own


def copy_of_flex_attention() -> Callable[..., Any]:
    """`flex_attention` as it is now, for a carrier to call."""
    function = _flex()
    copy = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = dict(function.__kwdefaults__ or {})
    return copy


def _flex() -> FunctionType:
    return cast(FunctionType, sys.modules["torch.nn.attention.flex_attention"].flex_attention)


def flex_as_torch_defines_it(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score_mod: Any, block_mask: Any, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log of the sum of exponentials of `flex_attention`, made of operations that have gradients.

    `math_attention` is what torch runs where it has no kernel; the public function refuses gradients on the CPU.
    """
    out, lse, _ = math_attention(q, k, v, score_mod, block_mask.as_tuple(), scale, {})
    return out, lse * math.log(2)


def moves_at_forward(module: nn.Module) -> bool:
    """Whether it is, or has, a spectral norm, whose vectors come closer to the true ones at every forward."""
    kinds = {type(each).__name__ for each in (module, *module._forward_pre_hooks.values())}
    return bool(kinds & {"_SpectralNorm", "SpectralNorm"})
