"""What a script does with a placed module by itself: copies, loads, and calls of its parts; wrong ones are refused.

Torch itself ends deep inside, or (a copy whose forward is a function around that of the first) computes with the
weights of the first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

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


def refuse_copies_and_loads(placed: Placed) -> None:
    """Let copies of a placed module be refused, loads of what is not its own, and draws for a stage's weights.

    Raises:
        ModelError: at one of them.
    """
    refuse_copies(placed)
    for part in placed.parts:
        for module in part.root.modules():
            if placed.pipeline is not None:
                for method in ("apply", "reset_parameters"):
                    if callable(own := getattr(module, method, None)):
                        # an attribute of the instance, as above
                        vars(module)[method] = partial(_without_draws, str(placed.plan), own)
        check = partial(_check_loaded, placed.pipeline is not None)
        root: Any = part.root  # torch has no types for this hook
        root.register_load_state_dict_pre_hook(check)


def _without_draws(plan: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _WithoutDraws(plan):
        return method(*args, **kwargs)


class _WithoutDraws(TorchFunctionMode):
    def __init__(self, plan: str) -> None:
        super().__init__()
        self.plan = plan

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every call of a torch function comes here."""
        if getattr(func, "__name__", "") in _DRAWS:
            raise ModelError(
                f"after shardwise.apply: found `{func.__name__}`, which draws weights, in a module's method, and under "
                f"`{self.plan}` each stage would draw for the layers that it has, so that every plan starts from other "
                "weights; needed: draws in the model's constructor, or `sw.apply(Net, plan, mesh, init=function)`, "
                "which calls it with each module"
            )
        return func(*args, **(kwargs or {}))


_DRAWS = {
    "uniform_", "normal_", "kaiming_uniform_", "bernoulli_", "exponential_", "random_", "cauchy_", "log_normal_",
    "geometric_",
}  # fmt: skip
"""Functions that fill a tensor; of `torch.nn.init` those that a mode sees in place of what they call."""


def _check_loaded(is_stage: bool, module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    own = {f"{prefix}{name}": p for name, p in module.named_parameters(remove_duplicate=False)}
    plain = [k for k, value in state.items() if isinstance(own.get(k), DTensor) and not isinstance(value, DTensor)]
    others = sorted(state.keys() - module.state_dict(prefix=prefix).keys()) if is_stage else []
    assigned = bool(rest[0].get("assign_to_params_buffers"))
    if not (plain or others or assigned):
        return
    found = (
        "assign=True, which puts other parameters in place of those that apply has placed"
        if assigned
        else (
            f"a whole tensor for {plain[0]}, of which each rank has a part"
            if plain
            else f"{others[0]}, of another stage"
        )
    )
    raise ModelError(
        f"load_state_dict after apply: found {found}; needed: load before it, and give apply the module that has the "
        "weights (`net = Net(); net.load_state_dict(...); sw.apply(net, plan, mesh)`, on every rank), or, where a rank "
        "cannot hold them, `shardwise ckpt convert` and store.load(state, path, weights_only=True), or sw.load_hf",
        row="module.loaded",
    )


def watch_calls(placed: Placed) -> None:
    """Let modules that are gathered with the whole model say so where a script calls them by themselves.

    Cost: a microsecond per call of such a module: of those beside the blocks.
    """
    for part in (part for part in placed.parts if isinstance(part.run, FSDPModule)):
        for module in (module for module in part.root.modules() if isinstance(module, FSDPModule)):
            module.register_forward_pre_hook(_check_mode, prepend=True)  # before what gathers
        units = tuple(f"{name}." for name, m in part.root.named_modules() if name and isinstance(m, FSDPModule))
        for name, module in part.root.named_modules():
            sharded = ((k, p) for k, p in module.named_parameters(recurse=False) if isinstance(p, DTensor) and p.dim())
            key, own = next(sharded, ("", None))
            if own is not None and name and not f"{name}.".startswith(units):
                module.register_forward_pre_hook(partial(_check_gathered, name, key, own))


def _check_mode(module: nn.Module, args: tuple[Any, ...]) -> None:
    if torch.is_inference_mode_enabled():
        raise ModelError(
            f"{type(module).__name__.removeprefix('FSDP')} was called in torch.inference_mode(): what fully_shard "
            "gathers there, no training step could write to again; needed: torch.no_grad() around it, or sw.evaluate"
        )


def _check_gathered(name: str, key: str, shard: Tensor, module: nn.Module, args: tuple[Any, ...]) -> None:
    if getattr(module, key) is shard and any(type(arg) is torch.Tensor for arg in args):
        raise ModelError(
            f"{name} was called by itself, found its {key} sharded: it is gathered where the model is called as a "
            "whole; needed: a call of the model, or, once after apply, torch.distributed.fsdp."
            "register_fsdp_forward_method(placed.module, METHOD) of a method of the model that calls it, which every "
            "rank then calls",
            row="module.called-by-parts",
        )
