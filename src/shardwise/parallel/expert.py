"""`shard_experts`: experts over the ranks of the `ep` axis, and counts that are those of the whole batch.

What is an expert module: it owns parameters that are stacked along a first dim of experts, and is called with
(tokens (n, dim), chosen (n, k), weights (n, k)), where `num_experts` as a choice stands for none: the reference
`Experts`, and the expert modules of Hugging Face `transformers` 5. It is named by the rule `experts`, or is called so.

`ep` groups are consecutive ranks of `dp_shard x cp x tp`. Ranks of `dp_shard` and `cp` have tokens of their own; those
of `tp` have the same ones (or shards, with sequence shards), of which each dispatches its share.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import Placement as DTensorPlacement

from shardwise.errors import ModelError
from shardwise.model.rules import match
from shardwise.parallel.layers.dispatch import Dispatch, on_shares, touch
from shardwise.parallel.layers.tensor_hooks import with_local_parameters, wrap_forward
from shardwise.parallel.mesh import GRADIENT_AXES, Mesh
from shardwise.parallel.padding import Padding, follow_pipeline
from shardwise.parallel.placed import Part, Placed, Placement
from shardwise.plan.plan import Plan

STYLE = "experts"
"""The rule that names expert modules; also the last part of their names where no rule does."""


class Counting(Protocol):
    """A module that counts over a step, as the reference `Router` does."""

    counters: tuple[str, ...]
    """Names of its integer buffers; the step adds them up over all ranks that see different tokens."""

    def after_step(self) -> None:
        """Use the sums, and set the counters to zero."""
        ...


def shard_experts(placed: Placed, plan: Plan, mesh: Mesh) -> Placed:
    """Split expert modules over the `ep` axis, send them their tokens, and add counts up over the ranks.

    With `ep` 1 and tensor parallelism experts are whole on every tp rank, and each works on its share of the tokens.

    Raises:
        ModelError: no expert modules, or one that cannot be split: parameters that are not stacked along one first
            dim of experts, modules inside of it, or a forward of another kind; a capacity per row where ranks hold
            parts of rows.

    Cost: no communication here. In each call, see `Dispatch` and `on_shares`.
    """
    sequence_axes = ("cp", *(("tp",) if plan.tensor.sequence else ()))
    placed = _count_over_ranks(placed, mesh, sequence_axes)
    if plan.axes.ep == 1 and plan.axes.tp == 1:
        return placed
    names = expert_names(placed.original_names, placed.rules)
    if not names and plan.axes.ep > 1:
        raise ModelError(
            f"expert parallelism: no expert modules in {type(placed.parts[0].root).__name__}; needed modules named "
            f'`experts`, or a rule for them: apply(..., rules={{"layers.*.mlp.bank": "{STYLE}"}}); or use ep=1',
            row="module.no-experts",
        )
    site = _Site.of(plan, mesh)
    placements = dict(placed.placements)
    for part in placed.parts:
        modules = dict(part.root.named_modules())
        for name in names:
            if name in modules and next(modules[name].parameters(), None) is not None:
                placements |= _shard(name, modules[name], site)
    return placed.with_(placements=placements, experts=names if plan.axes.ep > 1 else ())


def expert_names(names: tuple[str, ...], rules: Mapping[str, str] | None) -> tuple[str, ...]:
    """The modules that a rule `experts` names; without such a rule, those that are called `experts`.

    >>> expert_names(("layers.0.moe", "layers.0.moe.experts"), None)
    ('layers.0.moe.experts',)
    """
    given = {pattern: style for pattern, style in (rules or {}).items() if style == STYLE}
    if given:
        return tuple(match(given, names))
    return tuple(name for name in names if name.rpartition(".")[2] == STYLE)


@dataclass(frozen=True, kw_only=True)
class _Site:
    """What all expert modules share."""

    tp_mesh: DeviceMesh | None
    """Where every tp rank has the same tokens, of which each takes its share."""
    ep_mesh: DeviceMesh | None
    parameter_mesh: DeviceMesh
    placement: DTensorPlacement
    gradient: DTensorPlacement

    @staticmethod
    def of(plan: Plan, mesh: Mesh) -> _Site:
        tp_mesh = mesh.device_mesh["tp"] if plan.axes.tp > 1 else None
        shared = None if plan.tensor.sequence else tp_mesh
        if mesh.expert_mesh is None:
            assert tp_mesh is not None
            return _Site(
                tp_mesh=shared, ep_mesh=None, parameter_mesh=tp_mesh, placement=Replicate(), gradient=Partial()
            )
        ep_mesh = mesh.expert_mesh["ep"]
        return _Site(tp_mesh=shared, ep_mesh=ep_mesh, parameter_mesh=ep_mesh, placement=Shard(0), gradient=Shard(0))


def _shard(name: str, module: nn.Module, site: _Site) -> dict[str, Placement]:
    """Distribute one module's parameters, and put the way of the tokens around its forward."""
    num_experts = _check(name, module, site)
    placements = {}
    for key, parameter in list(module.named_parameters(recurse=False)):
        shared = distribute_tensor(parameter.detach(), site.parameter_mesh, (site.placement,), src_data_rank=None)
        module.register_parameter(key, nn.Parameter(shared, requires_grad=parameter.requires_grad))
        where = "Shard(0) over ep" if site.ep_mesh is not None else "Replicate over tp"
        placements[f"{name}.{key}"] = Placement(
            pass_name="shard_experts",
            text=f"{STYLE}: {where}",
            global_shape=tuple(parameter.shape),
            dtype=str(parameter.dtype),
        )
    takes = inspect.signature(module.forward)
    wrap_forward(module, partial(touch, module))
    with_local_parameters(module, site.gradient)
    if site.ep_mesh is not None:
        for key in [key for key, value in vars(module).items() if type(value) is int and value == num_experts]:
            if _COUNTS.search(key):  # its own code counts what it holds
                vars(module)[key] = num_experts // site.ep_mesh.size()
        wrap_forward(module, Dispatch(site.ep_mesh, num_experts))
    if site.tp_mesh is not None:
        wrap_forward(module, partial(_shared, site.tp_mesh))
    wrap_forward(module, partial(_in_order, name, takes))
    return placements


_COUNTS = re.compile("expert|(^|_)exps?(_|$)")
"""Names of an attribute that says how many experts there are."""


def _in_order(name: str, takes: inspect.Signature, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The call of experts with what its parent gave, by position.

    Raises:
        ModelError: other tensors than one of tokens, and two of choices.
    """
    tensors = takes.bind(*args, **kwargs).args if kwargs else args
    sizes = [tuple(tensor.shape) for tensor in tensors if isinstance(tensor, torch.Tensor)]
    if len(sizes) != len(tensors) or [len(size) for size in sizes] != [2, 2, 2] or sizes[1] != sizes[2]:
        raise ModelError(
            f"experts {name}: called with tensors of shapes {sizes}, needed (tokens, chosen, weights): of shapes "
            "(n, dim), (n, k), (n, k); flatten batch and sequence first; see docs/experts.md",
            row="module.experts-forward",
        )
    return forward(*tensors)


def _shared(tp_mesh: DeviceMesh, forward: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    return on_shares(forward, tp_mesh, *tensors)


def _check(name: str, module: nn.Module, site: _Site) -> int:
    """The number of experts of a module that can be split."""
    own = dict(module.named_parameters(recurse=False))
    inner = [key for key, _ in module.named_parameters() if key not in own]
    leading = {parameter.shape[0] if parameter.dim() else 0 for parameter in own.values()}
    if inner or len(leading) != 1:
        found = f"{inner[0]} inside of it" if inner else {key: tuple(p.shape) for key, p in own.items()}
        raise ModelError(
            f"experts {name} ({type(module).__name__}): found {found}; needed parameters of the module itself, all "
            "stacked along one first dim of experts, as (experts, out, in); stack the experts' weights, or use ep=1 "
            "and tp=1",
            row="module.experts-stacked",
        )
    if next((p for p in own.values() if isinstance(p, DTensor)), None) is not None:
        raise ModelError(
            f"experts {name}: its parameters are DTensors already, and the plan places them too; give apply a module "
            "of plain tensors, or use ep=1 and tp=1"
        )
    arguments = inspect.signature(module.forward).parameters.values()
    if len(arguments) < 3 and not any(p.kind is p.VAR_POSITIONAL for p in arguments):
        raise ModelError(
            f"experts {name} ({type(module).__name__}): its forward takes ({', '.join(p.name for p in arguments)}), "
            "needed (tokens, chosen, weights): of shapes (n, dim), (n, k), (n, k); see docs/experts.md",
            row="module.experts-forward",
        )
    (num_experts,) = leading
    if site.ep_mesh is not None and num_experts % site.ep_mesh.size():
        fits = [d for d in range(1, num_experts + 1) if num_experts % d == 0]
        raise ModelError(
            f"experts {name}: ep={site.ep_mesh.size()} does not divide its {num_experts} experts; use ep in {fits}",
            row="module.experts-divide",
        )
    return num_experts


# ---------------------------------------------------------------- counts


class RowSums:
    """Forward of a module that counts over rows, where a row lies on several ranks: the counts of all its parts."""

    def __init__(
        self,
        inner: Callable[..., torch.Tensor],
        module: nn.Module,
        group: dist.ProcessGroup | None,
        padding: Padding,
    ) -> None:
        """`group`: who shares rows; None: this rank has whole ones."""
        self.inner, self.module, self.group, self.padding = inner, module, group, padding

    def __call__(self, *args: Any) -> torch.Tensor:
        """One all-reduce of (rows, experts) integers."""
        vars(self.module)["is_padding"] = self.padding.now
        counts = self.inner(*args)
        if self.group is not None:
            dist.all_reduce(counts, group=self.group)
        return counts


class StepCounts:
    """Sums of the counters of all modules of a rank, in one all-reduce at the end of a step."""

    def __init__(self, modules: list[nn.Module], mesh: Mesh, axes: tuple[str, ...]) -> None:
        self.modules, self.mesh, self.axes = modules, mesh, axes

    @torch.no_grad()
    def __call__(self, updated: bool) -> None:
        """Sum, and let every module act on it; after a step without an update forget the counts."""
        buffers = [cast(torch.Tensor, getattr(m, key)) for m in self.modules for key in _counting(m).counters]
        if not updated:
            for buffer in buffers:
                buffer.zero_()
            return
        flat = self.mesh.all_reduce_sum(torch.cat([buffer.flatten() for buffer in buffers]), *self.axes)
        totals = torch.split(flat, [buffer.numel() for buffer in buffers])
        for buffer, total in zip(buffers, totals, strict=True):
            buffer.copy_(total.view_as(buffer))
        for module in self.modules:
            _counting(module).after_step()


def _count_over_ranks(placed: Placed, mesh: Mesh, sequence_axes: tuple[str, ...]) -> Placed:
    divided = any(mesh.size(axis) > 1 for axis in sequence_axes)
    counting: list[nn.Module] = []
    for part in placed.parts:
        counting += [module for module in part.root.modules() if _counts(module)]
        for name, module in part.root.named_modules():
            if divided and getattr(module, "capacity_factor", None) is not None:
                raise ModelError(
                    f"experts: {name} fills its experts row by row up to a capacity (capacity_factor="
                    f"{module.capacity_factor}), and under {' and '.join(sequence_axes)} a rank holds parts of rows; "
                    "use capacity_factor=None, or a plan without cp and seq",
                    row="module.capacity",
                )
        _share_rows(part, mesh.group(*sequence_axes) if divided else None)
    axes = tuple(dict.fromkeys((*GRADIENT_AXES, *sequence_axes)))
    mesh.group(*axes)  # created here, while every rank is at the same place
    if not counting:
        return placed
    return placed.with_(after_step=(*placed.after_step, StepCounts(counting, mesh, axes)))


def _share_rows(part: Part, group: dist.ProcessGroup | None) -> None:
    padding = Padding()
    row_counters = [module for module in part.root.modules() if getattr(module, "sums_over_row", False) is True]
    for module in row_counters:
        # an attribute of the instance: the class, the names and the state dict stay the user's
        object.__setattr__(module, "forward", RowSums(module.forward, module, group, padding))
    if row_counters:
        follow_pipeline(part, padding)


def _counts(module: nn.Module) -> bool:
    return isinstance(getattr(module, "counters", None), tuple) and callable(getattr(module, "after_step", None))


def _counting(module: nn.Module) -> Counting:
    return cast(Counting, module)
