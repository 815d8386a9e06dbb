"""The private torch names that this folder uses, and nothing else. Each has a test that fails when torch moves it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from types import FrameType, FunctionType
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._higher_order_ops.flex_attention import math_attention
from torch.autograd.graph import _engine_run_backward
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.parallel.backward_torch_private import Gradients, backward_to_inputs, backward_to_weights


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
    """Whether this thread runs a backward pass: `torch._C._current_graph_task_id`."""
    return torch._C._current_graph_task_id() != -1


def behind_backward(function: Callable[[], None]) -> None:
    """Have a function called when the backward pass that runs is over: the engine's `queue_callback`."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def strided_shard_factor(placement: Placement) -> int | None:
    """`split_factor` of a `_StridedShard` (sharded after the placements to its right), None for any other placement."""
    return int(placement.split_factor) if isinstance(placement, _StridedShard) else None


CARRIES_INTEGERS = torch.__version__ >= "2.13"
"""Torch 2.11 and 2.12 ask everything that crosses stages for a gradient."""


class Stage(PipelineStage):
    """A stage as torch 2.13 has it, on torch 2.11 too, that divides its backward right."""

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Torch 2.11 keeps every argument for the backward, which then asks numbers for their gradients."""
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        outputs, inputs = self.fwd_cache[fwd_chunk_id]
        self.fwd_cache[fwd_chunk_id] = (outputs, [value for value in inputs if isinstance(value, torch.Tensor)])
        return output

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[Gradients, Any]:
        """Torch's own, and for the two parts of a divided backward `backward_torch_private`."""
        module: Any = self.submod
        weights = module.parameters()
        if backward_type != "full" and isinstance(self.submod, FSDPModule):
            # as torch does: schedules reduce at the end
            self.submod.set_is_last_backward(False)
            self.submod.set_reshard_after_backward(False)
            self.submod.set_requires_gradient_sync(False)
        if backward_type == "input":
            outputs, gradients, inputs = (bwd_kwargs[k] for k in ("stage_output", "output_grads", "input_values"))
            found, groups = backward_to_inputs(outputs, gradients, inputs, weights, module.weights_at_once())
            return _to_send(found, inputs), groups
        if backward_type == "weight":
            backward_to_weights(weights, bwd_kwargs["param_groups"])
            return (), None
        found, rest = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        return _to_send(found, bwd_kwargs["input_values"]), rest

    def _validate_fwd_outputs(self, outputs: tuple[torch.Tensor, ...]) -> None:
        """Torch 2.11 holds them against the examples; that of the loss has another type than the loss."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Torch 2.11 begins with messages to neighbours; V-shaped schedules have their own rank among them."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]


def _to_send(gradients: Gradients, inputs: Sequence[torch.Tensor]) -> Gradients:
    """Zeros for an input that reaches no loss, as torch 2.13 sends them: 2.11 raises where there is no gradient."""
    pairs = zip(gradients, inputs, strict=True)
    return tuple(torch.zeros_like(x) if dx is None and x.requires_grad else dx for dx, x in pairs)


SCHEDULE_CLASSES: dict[str, type[PipelineScheduleSingle] | type[PipelineScheduleMulti]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "looped-bfs": ScheduleLoopedBFS,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zero-bubble-v": ScheduleZBVZeroBubble,
    "dualpipe-v": ScheduleDualPipeV,
}
"""torch's schedule for each kind of a plan."""


def run_schedule(
    schedule: PipelineScheduleSingle | PipelineScheduleMulti,
    stages: list[Stage],
    arguments: list[tuple[torch.Tensor, ...]],
    keywords: list[dict[str, object]],
) -> list[torch.Tensor]:
    """One forward and backward of every micro-batch: `_step_microbatches`, the part of `step` after it splits a batch.

    Returns the losses on the rank of the last stage, an empty list elsewhere.
    """
    losses: list[torch.Tensor] = []
    for stage in stages:
        stage.has_backward = True
        stage.clear_runtime_states()
    targets = [None] * len(arguments)
    schedule._step_microbatches(arguments, keywords, targets, losses, return_outputs=False)
    for stage in stages:
        stage.clear_runtime_states()
    return losses


@dataclass
class _StandIn:
    """As much of a stage as a schedule looks at when it writes its table."""

    num_stages: int
    group_size: int
    stage_index: int = 0
    group_rank: int = 0
    is_first: bool = True
    is_last: bool = False
    submod: None = None
    stage_index_to_group_rank: dict[int, int] = dataclass_field(default_factory=dict)


def schedule_order(
    kind: str, num_ranks: int, stages_per_rank: int, micro_batches: int
) -> list[list[tuple[str, int, int]]]:
    """Torch's own order of work: rows per rank of (kind of work, stage, micro-batch), without a process group.

    `F` forward, `B` whole backward, `I` backward to the inputs, `W` backward to the weights. An overlapped pair is
    two rows, as torch runs it. From `_get_pipeline_order` of single-stage schedules, `pipeline_order` of others.
    """
    stages: Any = [_StandIn(num_ranks * stages_per_rank, num_ranks) for _ in range(stages_per_rank)]
    single = issubclass(SCHEDULE_CLASSES[kind], PipelineScheduleSingle)
    schedule: Any = SCHEDULE_CLASSES[kind](stages[0] if single else stages, micro_batches, scale_grads=False)
    table = []
    for rank in range(num_ranks):
        rows = []
        for action in schedule.pipeline_order[rank]:
            for part in () if action is None else action.sub_actions or (action,):
                work = part.computation_type.value
                if work in ("F", "B", "I", "W"):
                    rows.append((work, int(part.stage_index), int(part.microbatch_index)))
        table.append(rows)
    return table


def swap_tensors(first: torch.Tensor, second: torch.Tensor) -> None:
    """Exchange two tensors and keep the objects: `torch.utils.swap_tensors`, public but without types."""
    torch.utils.swap_tensors(first, second)  # type: ignore[no-untyped-call]


OperationMode = TorchDispatchMode
"""Base of a context that sees every aten operation: `torch.utils._python_dispatch.TorchDispatchMode`."""


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
