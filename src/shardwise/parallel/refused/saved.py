"""What a script saves of a placed module by itself: of a tensor, or of a model, this rank's part alone.

`torch.save` writes shards, and a stage's layers, as it writes a whole model, and so does every other pickle (an object
that is sent to another rank). Where the ranks write one file, the last one's part is what is left.
"""

from __future__ import annotations

import copy
import sys
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.errors import UsageError
from shardwise.parallel.placed import Placed


class _Where(NamedTuple):
    rank: int
    plan: str
    is_staged: bool


def refuse_saves(placed: Placed) -> None:
    """Let parts refuse to be pickled: parameters, and what a `state_dict` has of them.

    Raises:
        UsageError: at it.
    """
    where = _Where(placed.mesh.rank, str(placed.plan), placed.pipeline is not None)
    for part in placed.parts:
        for name, parameter in part.root.named_parameters():
            _mark(name, parameter, where)
        for module in part.root.modules():
            if any(where.is_staged or isinstance(p, DTensor) for p in module.parameters(recurse=False)):
                holder: Any = module  # torch has no types for this hook
                holder.register_state_dict_post_hook(partial(_mark_all, where))


def _mark_all(where: _Where, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for key, _parameter in module.named_parameters(recurse=False):
        if isinstance(value := state.get(name := f"{prefix}{key}"), Tensor):
            _mark(name, value, where)


def _mark(name: str, tensor: Tensor, where: _Where) -> None:
    is_part = isinstance(tensor, DTensor) and any(
        size > 1 and not each.is_replicate()
        for size, each in zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    )
    if is_part or where.is_staged:
        what = f"its part {tuple(tensor.to_local().shape)}" if isinstance(tensor, DTensor) and is_part else "a layer"
        # an attribute of the instance: pickle looks for it there first, and the class stays torch's
        vars(tensor)["__reduce_ex__"] = partial(_refuse, f"{what} of {name} {tuple(tensor.shape)}", where)


def _refuse(what: str, where: _Where, protocol: int) -> Any:
    asks = sys._getframe(1)
    if asks.f_code is copy.copy.__code__:  # in the way of a pickle; what it makes stays in this process
        tensor: Any = asks.f_locals["x"]
        kind: Any = type(tensor)
        return kind.__reduce_ex__(tensor, protocol)
    raise UsageError(
        f"a part of a model is pickled (torch.save, an object that is sent): found {what} under `{where.plan}` "
        f"on rank {where.rank}, which without those of the other ranks is no model; needed: "
        "sw.Store(path).save(state) on every rank, which loads under any plan, and `shardwise ckpt export` or "
        "sw.export_hf for one file of all; or whole tensors, `weight.full_tensor()` on every rank (docs/checkpoints.md)"
    )
