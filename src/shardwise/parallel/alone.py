"""What a script does with a placed module by itself: copies of it, and calls of its parts; wrong ones are refused.

Torch itself ends deep inside, or (a copy whose forward is a function around that of the first) computes with the
weights of the first.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardwise.errors import ModelError
from shardwise.parallel.placed import Placed


def refuse_copies(placed: Placed) -> None:
    """Let `copy.deepcopy` refuse modules that are not what they were: sharded, with another forward, a part of a model.

    Raises:
        ModelError: at a copy.
    """
    for part in placed.parts:
        changed = {
            name
            for name, module in part.root.named_modules()
            if isinstance(module, FSDPModule) or "forward" in vars(module) or placed.pipeline is not None
        }
        around = {name[:end] for name in changed for end in range(len(name)) if name[end] == "."} | changed | {""}
        for name in around if changed else ():
            # an attribute of the instance: the class stays the user's, and what is copied looks for it there first
            vars(part.root.get_submodule(name))["__deepcopy__"] = partial(_refuse_copy, str(placed.plan))


def _refuse_copy(plan: str, memo: Any) -> NoReturn:
    raise ModelError(
        f"copy.deepcopy: found a module to which apply has put `{plan}` (AveragedModel copies, too), whose copy would "
        "compute with the weights of the first, or be a part of a model; needed: for an average of the weights "
        "TrainState(..., ema=sw.Ema(placed)); for a model that stays as it is (a teacher, a reference) a second "
        "sw.apply of the same factory and seed, or copy.deepcopy in the constructor of the model",
        row="module.copied",
    )


def watch_calls(placed: Placed) -> None:
    """Let modules that are gathered with the whole model say so where a script calls them by themselves.

    Cost: a microsecond per call of such a module: of those beside the blocks.
    """
    for part in (part for part in placed.parts if isinstance(part.run, FSDPModule)):
        units = tuple(f"{name}." for name, m in part.root.named_modules() if name and isinstance(m, FSDPModule))
        for name, module in part.root.named_modules():
            sharded = ((k, p) for k, p in module.named_parameters(recurse=False) if isinstance(p, DTensor) and p.dim())
            key, own = next(sharded, ("", None))
            if own is not None and name and not f"{name}.".startswith(units):
                module.register_forward_pre_hook(partial(_check_gathered, name, key, own))


def _check_gathered(name: str, key: str, shard: Tensor, module: nn.Module, args: tuple[Any, ...]) -> None:
    if getattr(module, key) is shard and any(type(arg) is torch.Tensor for arg in args):
        raise ModelError(
            f"{name} was called by itself, found its {key} sharded: it is gathered where the model is called as a "
            "whole; needed: a call of the model, or, once after apply, torch.distributed.fsdp."
            "register_fsdp_forward_method(placed.module, METHOD) of a method of the model that calls it, which every "
            "rank then calls",
            row="module.called-by-parts",
        )
