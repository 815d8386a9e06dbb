"""Parameters without dims (CLIP's `logit_scale`, a gate): `fully_shard` takes none, so they stay whole on every rank.

What it does for all others is done for them here: they are cast to the type that their module computes in, and their
gradients are summed over the data axes once per step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardwise.parallel.mesh import GRADIENT_AXES, Mesh
from shardwise.parallel.module_torch_private import put_parameter
from shardwise.parallel.placed import Placed, SharedParameters
from shardwise.parallel.precision import compute_type
from shardwise.parallel.ties import gradient_like, local_gradient_of
from shardwise.plan.plan import Plan
from shardwise.plan.ranks.engines import casts_weights


def scalars_in(module: nn.Module) -> set[nn.Parameter]:
    """The parameters without dims."""
    return {parameter for parameter in module.parameters() if not parameter.dim()}


def cast_scalars(placed: Placed, plan: Plan, mesh: Mesh) -> Placed:
    """Within the forward of its module a parameter without dims has the type that is computed in."""
    if not plan.mixed or casts_weights(plan):
        return placed
    for part in placed.parts:
        for name, module in part.root.named_modules():
            here = module.named_parameters(recurse=False)
            own = tuple(key for key, p in here if not p.dim() and p.is_floating_point())
            if own:
                dtype = compute_type(plan, name, placed.types)
                # an attribute of the instance: the class, the names and the state dict stay the user's
                casting = partial(_casting, module, module.forward, own, dtype)
                object.__setattr__(module, "forward", update_wrapper(casting, module.forward))  # with its signature
    return placed


def _casting(
    module: nn.Module, forward: Callable[..., Any], own: tuple[str, ...], dtype: torch.dtype, *args: Any, **kwargs: Any
) -> Any:
    kept = {key: cast(nn.Parameter, module._parameters[key]) for key in own}
    for key, parameter in kept.items():
        put_parameter(module, key, parameter.to(dtype))
    try:
        return forward(*args, **kwargs)
    finally:
        for key, parameter in kept.items():
            put_parameter(module, key, parameter)


def bind_scalars(placed: Placed) -> Placed:
    """Let the step sum the gradients of parameters without dims; no change where others do it, or there are none."""
    names = [name for name, p in placed.named_parameters().items() if not p.dim() and p.requires_grad]
    is_sharded = any(isinstance(module, FSDPModule) for part in placed.parts for module in part.run.modules())
    if not names or not is_sharded or placed.mesh.num_gradient_ranks == 1:
        return placed
    return placed.with_(copies=WholeScalars(placed, names, placed.copies))


class WholeScalars:
    """The trained parameters without dims, and what else is shared by ranks; `placed.copies`."""

    def __init__(self, placed: Placed, names: list[str], others: SharedParameters | None) -> None:
        parameters = placed.named_parameters()
        self._parameters = [parameters[name] for name in sorted(names)]
        self._group, self._others = placed.mesh.group(*GRADIENT_AXES), others

    def counts_here(self, name: str) -> bool:
        """See `SharedParameters`."""
        return self._others is None or self._others.counts_here(name)

    def sum_gradients(self) -> None:
        """Give every rank the sum over the data axes; what no rank has a gradient of keeps none.

        Cost: one all-reduce of two numbers per parameter.
        """
        if self._others is not None:
            self._others.sum_gradients()  # of the stages: the sum is in the first copy
        own = [parameter.grad is not None for parameter in self._parameters]
        grads = [local_gradient_of(parameter) for parameter in self._parameters]
        wide = torch.promote_types(torch.float32, max((g.dtype for g in grads), key=lambda dtype: dtype.itemsize))
        total = torch.stack(
            [
                *(g.to(wide) for g in grads),
                *(torch.full_like(g, h, dtype=wide) for g, h in zip(grads, own, strict=True)),
            ]
        )
        dist.all_reduce(total, group=self._group)
        for i, (parameter, grad) in enumerate(zip(self._parameters, grads, strict=True)):
            # on shapes alone, which have no values, others have what this rank has
            if own[i] or (type(total) is torch.Tensor and total[len(grads) + i].item()):
                parameter.grad = gradient_like(parameter, total[i].to(grad.dtype))

    def refresh(self) -> None:
        """See `SharedParameters`."""
        if self._others is not None:
            self._others.refresh()
