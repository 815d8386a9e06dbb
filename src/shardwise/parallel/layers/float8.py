"""Linear layers that multiply in float8 (torchao): which ones, on which device, and with which scales.

A product's operands are scaled to the range of float8 before they are rounded to it. The scale is the power of two that
takes the largest value there: that of a whole tensor (`tensorwise`), or of each of its rows (`rowwise`; `rowwise-hp`
leaves the weight's gradient alone).

Whose largest value? Weights: the whole one, also where `tp` splits it, for DTensor reduces the maximum over the axis.
Activations and their gradients: those of one micro-batch on one data rank, whole over `tp`. So data ranks x
micro-batches decide about rounding, and the mesh does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from shardwise.errors import ModelError, PlanError
from shardwise.model.rules import match, type_of
from shardwise.parallel.layers.regions import own
from shardwise.parallel.placed import Placed
from shardwise.plan.plan import RULE_TYPES, Plan
from shardwise.plan.ranks.groups import FLOAT8_MULTIPLE as MULTIPLE

ROUTERS = ("router", "gate")
"""Names of modules that choose experts: they decide, and small differences of theirs change the choice."""
_RECIPES = {"tensorwise": "tensorwise", "rowwise": "rowwise", "rowwise-hp": "rowwise_with_gw_hp"}
_LEAST = {"tensorwise": (8, 9), "rowwise": (9, 0), "rowwise-hp": (9, 0)}
"""CUDA's compute capability with products of that kind: Ada and Hopper; Hopper."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What becomes of each linear layer of a model."""

    converted: tuple[str, ...]
    left: Mapping[str, str]
    """Name -> why it multiplies in the plan's type."""


def types_of_modules(names: Sequence[str], plan: Plan) -> dict[str, str]:
    """The type that a precision rule of the plan gives to a module, by its name.

    Raises:
        ModelError: a pattern matches nothing, or two patterns match one module; with the nearest names.
    """
    kinds = dict.fromkeys(RULE_TYPES, "")
    return match(plan.module_types, [name for name in names if name], kinds=kinds, what="precision rules")


def choose(root: nn.Module, blocks: Sequence[str], types: Mapping[str, str]) -> Choice:
    """The linear layers of the repeated blocks whose dims are multiples of 16, without routers and what rules exclude.

    A rule `fp8` takes further ones in, as the head.

    Raises:
        ModelError: a rule `fp8` names a layer that cannot be converted, or no layer is left.
    """
    converted: list[str] = []
    left: dict[str, str] = {}
    for name, module in root.named_modules():
        if isinstance(module, nn.Linear):
            reason = _reason(name, module, blocks, type_of(name, types))
            converted += [name] if not reason else []
            left |= {name: reason} if reason else {}
    empty = [r for r, t in types.items() if t == "fp8" and not any(type_of(n, {r: t}) for n in converted)]
    wrong = [f"{n}: {why}" for n, why in left.items() if type_of(n, types) == "fp8"] or [
        f"{r}: no linear" for r in empty
    ]
    if wrong or not converted:
        found = "; ".join(wrong or [f"{n}: {why}" for n, why in list(left.items())[:5]]) or "no nn.Linear at all"
        raise ModelError(
            f"fp8: {'a rule `fp8` takes in' if wrong else 'no layer can be converted in'} {type(root).__name__} "
            f"what cannot be: {found}; needed: nn.Linear with both dims multiples of {MULTIPLE}, inside the repeated "
            "blocks or named by a rule; name the blocks (blocks=PATTERN), change the rule, or drop fp8",
            row="module.float8",
        )
    return Choice(converted=tuple(converted), left=left)


def _reason(name: str, module: nn.Linear, blocks: Sequence[str], rule: str | None) -> str:
    """Why a linear layer is not converted; empty: it is."""
    if rule not in (None, "fp8"):
        return f"a rule says {rule}"
    if rule is None and not any(name.startswith(block + ".") for block in blocks):
        return "outside of the repeated blocks"
    if rule is None and set(name.split(".")) & set(ROUTERS):
        return "a router"
    if type(module) is not nn.Linear or "forward" in vars(module):
        return f"a {type(module).__name__} with a forward of its own"
    if module.in_features % MULTIPLE or module.out_features % MULTIPLE:
        return f"{module.out_features} x {module.in_features}, not multiples of {MULTIPLE}"
    return ""


def convert_linears(placed: Placed, plan: Plan, device: torch.device, types: Mapping[str, str]) -> Placed:
    """Replace the chosen linear layers by torchao's `Float8Linear`: same names, same parameters.

    Raises:
        PlanError: the device has no float8 products and the plan does not emulate them, or torchao is not installed.
        ModelError: see `choose`.
    """
    if plan.float8.recipe == "none":
        return placed
    check_device(plan, device)
    library = _library(plan)
    config = library.Float8LinearConfig.from_recipe_name(_RECIPES[plan.float8.recipe])
    config = replace(
        config,
        emulate=plan.float8.emulate,
        round_scales_to_power_of_2=True,  # scaling is then exact, and shards of a sum round as the whole does
        pad_inner_dim=True,  # tokens are that of a weight's gradient, and need not be a multiple of 16
        enable_fsdp_float8_all_gather=plan.float8.all_gather,
    )
    (part,) = placed.parts
    choice = choose(part.root, placed.blocks, types)
    new: dict[nn.Module, nn.Module] = {}
    for name in choice.converted:
        linear = part.root.get_submodule(name)
        new[linear] = library.convert_to_float8_training(linear, config=config)
        vars(new[linear]).update({key: value for key, value in vars(linear).items() if key != "_parameters"})
        new[linear].register_forward_hook(lambda _, __, output: own(output))  # a view, which `fully_shard` warns of
    for module in [*part.root.modules()]:
        for key, child in module._modules.items():
            if child in new:
                module._modules[key] = new[child]
    return placed.with_(float8=choice.converted)


def check_device(plan: Plan, device: torch.device) -> None:
    """Refuse a device without float8 products, unless they are emulated.

    Raises:
        PlanError: naming what the device lacks.
    """
    if plan.float8.emulate:
        return
    least = _LEAST[plan.float8.recipe]
    found = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if lacks := what_lacks(device.type, found, least):
        raise PlanError(
            f"fp8: the plan `{plan}` multiplies in float8 on {device}: {lacks}; drop fp8 from the plan, or add "
            "`fp8=...+emulate` to compute it slowly in fp32, as a proof"
        )


def what_lacks(kind: str, capability: tuple[int, int] | None, least: tuple[int, int]) -> str:
    """What a device lacks for float8 products; empty: nothing.

    >>> what_lacks("cuda", (8, 0), (8, 9))
    'found compute capability 8.0, needed 8.9'
    """
    if kind != "cuda" or capability is None:
        return f"found a {kind} device, which has no float8 products, needed a CUDA device of {least[0]}.{least[1]}"
    if capability < least:
        return f"found compute capability {capability[0]}.{capability[1]}, needed {least[0]}.{least[1]}"
    return ""


def _library(plan: Plan) -> Any:
    try:
        return import_module("torchao.float8")
    except ImportError as error:
        raise PlanError(
            f"fp8: the plan `{plan}` converts linear layers, found no library for it ({error}); needed: torchao 0.18; "
            "run: pip install 'shardwise[fp8]', or drop fp8 from the plan"
        ) from error


def check_split(placed: Placed) -> None:
    """What `tp` leaves of a converted weight must be multiples of 16 too.

    Raises:
        ModelError: naming the layer, its split shape and the axis.
    """
    for part in placed.parts:
        modules = dict(part.root.named_modules())
        for name in placed.float8:
            weight = modules[name].weight if name in modules else None
            shape = _split_shape(weight) if isinstance(weight, torch.Tensor) else (0, 0)
            if any(size % MULTIPLE for size in shape):
                raise ModelError(
                    f"fp8: {name} on the axis tp={placed.plan.axes.tp}: found {shape[0]} x {shape[1]} on each rank, "
                    f"needed multiples of {MULTIPLE}; use a smaller tp, or leave the layer out: a rule "
                    f"precision={name}:{placed.plan.precision} in the plan",
                    row="module.float8-shard",
                )


def _split_shape(weight: torch.Tensor) -> tuple[int, int]:
    """Rows and columns of a weight on one rank of `tp`, whole over every other axis."""
    shape = [*weight.shape]
    if isinstance(weight, DTensor):
        for axis, placement in enumerate(weight.placements):
            names = weight.device_mesh.mesh_dim_names or ()
            if isinstance(placement, Shard) and "tp" in names[axis : axis + 1]:
                shape[placement.dim] //= weight.device_mesh.size(axis)
    return shape[0], shape[1]
