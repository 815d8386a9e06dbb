"""Private torch names of pipelines: a stage and schedules that torch 2.11 to 2.15 run alike. Each has a test."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
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

from shardwise.parallel.stages.backward_torch_private import Gradients, backward_to_inputs, backward_to_weights

CARRIES_INTEGERS = torch.__version__ >= "2.13"
"""Torch 2.11 and 2.12 ask everything that crosses stages for a gradient."""


class Stage(PipelineStage):
    """A stage as torch 2.13 has it, on torch 2.11 and 2.15 too, that divides its backward right.

    Torch before 2.15 makes the buffers in which it receives once, for each micro-batch and neighbour, and keeps them.
    Here they are shapes alone (on the meta device) until something is to come, and again when it was used.
    """

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._on_meta():
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._on_meta():
            return super()._prepare_backward_infra(*args, **kwargs)

    @contextmanager
    def _on_meta(self) -> Iterator[None]:
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Torch's, into new buffers."""
        _put(self.args_recv_info[fwd_chunk_id], self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Torch's, into new buffers."""
        _put(self.grad_recv_info.get(bwd_chunk_id, ()), self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Torch's, and lets go of the gradients that it received."""
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        _put(self.grad_recv_info.get(bwd_chunk_id, ()), torch.device("meta"))

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Torch's, and leaves what it received to the backward pass that needs it.

        Torch 2.11 keeps every argument for the backward, which then asks numbers for their gradients.
        """
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        _put(self.args_recv_info[fwd_chunk_id], torch.device("meta"))
        if CARRIES_INTEGERS:
            return output
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

    def _output_slot_is_releasable(self, output: object) -> tuple[bool, str]:
        """Torch 2.15 lets go of what was sent, and begins the backward at its edge; two parts begin at tensors."""
        return False, "its backward may have two parts"

    def _validate_fwd_outputs(self, outputs: tuple[torch.Tensor, ...]) -> None:
        """Torch 2.11 holds them against the examples; that of the loss has another type than the loss."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Torch 2.11 begins with messages to neighbours; V-shaped schedules have their own rank among them."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]


def _put(infos: Iterable[Any], device: torch.device) -> None:
    """New buffers of the same shapes on a device, in place of those that are on another."""
    for info in infos:
        old = getattr(info, "buffer", None)  # none: an argument of the model, what gets no gradient, torch 2.15
        if old is not None and old.device.type != device.type:
            info.buffer = torch.empty_like(old, device=device, requires_grad=old.requires_grad)


def _to_send(gradients: Gradients, inputs: Sequence[object]) -> Gradients:
    """Zeros for an input that reaches no loss, as torch 2.13 sends them: 2.11 raises where there is no gradient."""
    pairs = zip(gradients, inputs, strict=True)
    return tuple(
        torch.zeros_like(x) if dx is None and isinstance(x, torch.Tensor) and x.requires_grad else dx for dx, x in pairs
    )


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
