"""Weights that the code of another module reads: `self.conv1d.weight` in a mixer's forward, a pre-forward hook's."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from shardwise.parallel.layers.tensor_hooks import check_same_input, wrap_forward


def let_holders_read(root: nn.Module, alike: Collection[str], tp_mesh: DeviceMesh) -> None:
    """While a module runs that holds whole layers alone, its code sees the weights of its children as plain tensors.

    Only where nothing in it is split: each rank then computes the same from the same input, so the same gradient. Where
    a layer beside them is split, what meets the weight may be a share, and its gradient a summand: that is refused.

    Args:
        root: the module that the names are of.
        alike: modules whose own parameters are replicated DTensors, with the same gradient on every rank.
        tp_mesh: that they are on.
    """
    whole = set(alike)
    for name in dict.fromkeys(name.rpartition(".")[0] for name in alike if name):
        holder = root.get_submodule(name)
        head = name + "." if name else ""
        if all((head + key).rpartition(".")[0] in whole for key, _ in holder.named_parameters()):
            _read(holder, [child for key, child in holder.named_children() if head + key in whole], tp_mesh)
            check_same_input(holder, tp_mesh, f"'replicate' on all that {name or 'the model'} holds")


def _read(holder: nn.Module, children: list[nn.Module], tp_mesh: DeviceMesh) -> None:
    def run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        kept: list[tuple[dict[str, Any], str, DTensor]] = []
        for child in children:
            own = cast(dict[str, Any], child._parameters)
            # what `fully_shard` has not gathered is on a mesh of more axes, and no weight yet
            found = {key: p for key, p in own.items() if isinstance(p, DTensor) and p.device_mesh == tp_mesh}
            kept += [(own, key, parameter) for key, parameter in found.items()]
        try:
            for own, key, parameter in kept:
                own[key] = parameter.to_local(grad_placements=(Replicate(),))
            return forward(*args, **kwargs)
        finally:
            for own, key, parameter in kept:
                own[key] = parameter

    wrap_forward(holder, run)
