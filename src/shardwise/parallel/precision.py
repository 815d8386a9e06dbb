"""`convert_precision`: the type of the parameters, and the policy of mixed precision.

One policy under every plan: bf16 and fp16 compute by the rules of `fully_shard`'s mixed precision on any mesh. One
process applies them itself (`casts`), so that changing the mesh does not change which operations run in which type.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardwise.errors import ModelError
from shardwise.parallel.layers.float8 import convert_linears, types_of_modules
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.placed import Part, Placed
from shardwise.parallel.stages.stage import PassThrough
from shardwise.parallel.torch_private import apply_to_tensors
from shardwise.plan.plan import Plan
from shardwise.plan.ranks.groups import type_at

_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def convert_precision(placed: Placed, plan: Plan, mesh: Mesh) -> Placed:
    """Give the parameters the type in which the optimizer keeps them.

    fp64 and fp32 convert parameters and floating buffers; bf16 and fp16 keep fp32 parameters (the master
    weights) and compute in the half type; bf16-pure stores parameters in bf16, and the optimizer keeps an fp32
    master copy of them. Floating inputs of the model are converted likewise. Linear layers that multiply in float8
    are replaced here; modules with a type of their own by a precision rule get it from `shard_data`.

    Raises:
        PlanError: float8 on a device without it, or without its library.
        ModelError: precision rules that do not fit the model, or no layer that can be converted.
    """
    kept = _stored(plan)
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
    types = types_of_modules(placed.original_names, plan)
    return convert_linears(placed.with_(types=types), plan, mesh.device, types)


def _cast_inputs(
    dtype: torch.dtype, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Floating inputs in the type of the parameters: one script runs under every precision."""

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return tuple(cast(value) for value in args), {key: cast(value) for key, value in kwargs.items()}


def mixed_precision(plan: Plan, name: str, types: Mapping[str, str]) -> MixedPrecisionPolicy:
    """The policy that `fully_shard` is given for a module: compute type, type of gradients on the wire.

    A module with a type of its own takes its inputs in it, and gives its outputs in the type of what is around it.
    """
    reduce = plan.communication.reduce_dtype
    reduce_dtype = _DTYPES[reduce] if reduce else None
    own = compute_type(plan, name, types)
    if plan.mixed:
        outer = compute_type(plan, name.rpartition(".")[0], types)
        return MixedPrecisionPolicy(
            param_dtype=own if own != _stored(plan) or name in types else None,
            reduce_dtype=reduce_dtype or torch.float32,
            output_dtype=outer if name in types else None,
        )
    if plan.precision == "bf16-pure":
        return MixedPrecisionPolicy(reduce_dtype=reduce_dtype or torch.float32)
    return MixedPrecisionPolicy(reduce_dtype=reduce_dtype)


def _stored(plan: Plan) -> torch.dtype:
    """The type of the parameters between steps."""
    return {"fp64": torch.float64, "bf16-pure": torch.bfloat16}.get(plan.precision, torch.float32)


def compute_type(plan: Plan, name: str, types: Mapping[str, str]) -> torch.dtype:
    """The type in which a module's parameters are used: its innermost rule's, else the plan's."""
    return _DTYPES.get(type_at(plan, name, types), torch.bfloat16)  # that of bf16-pure


def ruled_modules(placed: Placed, part: Part) -> list[nn.Module]:
    """The modules of a stage that compute in another type than what is around them, innermost first.

    Raises:
        ModelError: one is never called (a list of modules), or shares a parameter with what is outside of it.
    """
    modules, found = dict(part.root.named_modules()), []
    for name in sorted(placed.types, key=lambda name: -name.count(".")):
        outer = compute_type(placed.plan, name.rpartition(".")[0], placed.types)
        is_here = name in modules and not isinstance(modules[name], PassThrough)
        if not is_here or compute_type(placed.plan, name, placed.types) == outer:
            continue  # on another stage, or as it is anyway
        module = modules[name]
        inside = {id(p) for p in module.parameters()}
        shared = [n for n, p in part.root.named_parameters(remove_duplicate=False) if id(p) in inside]
        shared = [n for n in shared if not n.startswith(name + ".")]
        if shared or type(module).forward is nn.Module.forward:
            what = f"shares a parameter with {shared[0]}" if shared else f"is a {type(module).__name__}, never called"
            raise ModelError(
                f"precision rules: {name} on rank {placed.mesh.rank} {what}; needed: a module that is called and whose "
                f"parameters are its own; name {'modules inside of it' if not shared else 'another module'}"
            )
        found.append(module)
    return found
