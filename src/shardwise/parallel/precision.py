"""`convert_precision`: the type of the parameters, and the policy of mixed precision.

One policy under every plan: bf16 and fp16 compute through `fully_shard`'s mixed precision on any mesh, size 1
included, so that changing the mesh does not change which operations run in which type.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardwise.parallel.mesh import Mesh
from shardwise.parallel.placed import Placed
from shardwise.parallel.torch_private import apply_to_tensors
from shardwise.plan.plan import Plan

_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def convert_precision(placed: Placed, plan: Plan, mesh: Mesh) -> Placed:
    """Give the parameters the type in which the optimizer keeps them.

    fp64 and fp32 convert parameters and floating buffers; bf16 and fp16 keep fp32 parameters (the master
    weights) and compute in the half type; bf16-pure stores parameters in bf16, and the optimizer keeps an fp32
    master copy of them. Floating inputs of the model are converted likewise.
    """
    kept = {"fp64": torch.float64, "bf16-pure": torch.bfloat16}.get(plan.precision, torch.float32)
    for part in placed.parts:
        if plan.precision == "bf16-pure":
            for parameter in part.root.parameters():
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(kept)
        else:
            apply_to_tensors(part.root, lambda t: t.to(kept) if t.is_floating_point() else t)
        if plan.precision not in ("bf16", "fp16"):  # there fully_shard's policy does it
            part.root.register_forward_pre_hook(partial(_cast_inputs, kept), with_kwargs=True)
    if mesh.device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = plan.tf32
        torch.backends.cudnn.allow_tf32 = plan.tf32
    return placed


def _cast_inputs(
    dtype: torch.dtype, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Floating inputs in the type of the parameters: one script runs under every precision."""

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return tuple(cast(value) for value in args), {key: cast(value) for key, value in kwargs.items()}


def mixed_precision(plan: Plan) -> MixedPrecisionPolicy:
    """The policy that `fully_shard` is given: compute type, type of gradients on the wire."""
    reduce = plan.communication.reduce_dtype
    reduce_dtype = _DTYPES[reduce] if reduce else None
    if plan.precision in ("bf16", "fp16"):
        return MixedPrecisionPolicy(param_dtype=_DTYPES[plan.precision], reduce_dtype=reduce_dtype or torch.float32)
    if plan.precision == "bf16-pure":
        return MixedPrecisionPolicy(reduce_dtype=reduce_dtype or torch.float32)
    return MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
