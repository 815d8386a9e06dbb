"""`Trained`: the parameters that a step trains, as they were when it was made."""

from __future__ import annotations

from collections.abc import Mapping
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.errors import ModelError
from shardwise.parallel.placed import Placed
from shardwise.parallel.refused.limits import refuse_gradient_hook
from shardwise.parallel.torch_private import has_gradient_hook, wrapper_of
from shardwise.train.followed.between import Between, leave
from shardwise.train.state import TrainState


class Trained:
    """Trainable parameters by name, and a look at each step whether they still are the ones."""

    def __init__(self, state: TrainState) -> None:
        """Raises ModelError: parameters are not as `apply` saw them, see `Placed.check_trainable`."""
        state.placed.reshard()
        state.placed.check_trainable()
        self._state, self._placed, named = state, state.placed, state.placed.named_parameters()
        self.parameters = {name: p for name, p in named.items() if p.requires_grad}
        self._frozen = {name: p for name, p in named.items() if not p.requires_grad}
        self.between = Between(state.placed)
        rows = state.placed.placements
        self._types = [
            (n, p, getattr(torch, rows[n].dtype.removeprefix("torch."))) for n, p in named.items() if n in rows
        ]
        self._places = _places(state.placed)
        self._held = [value for _, _, value in self._places]
        for optimizer in (state.optimizer, *getattr(state.optimizer, "parts", {}).values()):
            optimizer.is_of_stage = state.placed.pipeline is not None

    def _check_places(self) -> None:
        """Whether it is more than what a forward has gathered."""
        self._placed.reshard()
        if any(held.get(key) is not value for held, key, value in self._places):
            now = self._placed.named_parameters()
            name = next((name for name, p in self.parameters.items() if now.get(name) is not p), "of a frozen module")
            raise ModelError(
                f"parameter {name} was replaced or removed after make_step (a module assigned anew, a weight that was "
                "tied, pruned or parametrized): what is summed, stepped and saved is the one from before; do it in the "
                "model's constructor. To go on with another model, save, and start again with a constructor that "
                "makes it"
            )

    def _refuse_types(self) -> None:
        name, parameter, dtype = next(each for each in self._types if each[1].dtype is not each[2])
        raise ModelError(
            f"parameter {name} is {parameter.dtype}, and `{self._placed.plan}` made it {dtype}: found a module whose "
            "type was changed after apply (module.half(), .float(), .to(dtype)); needed: types of the plan, of which "
            "optimizer, gradients and what ranks send are made: `fp32`, `bf16`, `bf16-pure`, `fp16` or `fp64` "
            "(docs/precision.md)"
        )

    def check(self) -> None:
        """Refuse others or averages in their place, hooks, and those unfrozen since then (under DDP: frozen).

        And those of another type than `apply` gave them, and those to whose `.data` somebody assigned, where that does
        nothing.

        A torch optimizer that was built over all parameters would step what has a gradient, though it is in no sum over
        ranks, no norm and no checkpoint.

        Raises:
            ModelError: names the first.
            UsageError: within `Ema.applied`.

        Cost: a look at flags of each parameter, and a microsecond per sharded one.
        """
        leave()
        if self._state.ema is not None:
            self._state.ema.check_own("stepped")
        if self._placed.reduced is not None and not all(p.requires_grad for p in self.parameters.values()):
            self._placed.check_trainable()
        if not all(map(is_, self._held, [held.get(key) for held, key, _ in self._places])):
            self._check_places()
        if any(map(has_gradient_hook, self.parameters.values())):
            for name, parameter in self.parameters.items():
                refuse_gradient_hook(name, parameter)
        for name, before in self._placed.wrappers.items():
            sharded: Any = self.parameters.get(name)
            if isinstance(sharded, DTensor) and wrapper_of(sharded) != before:
                raise ModelError(
                    f"parameter {name} is sharded, and its `.data` was assigned, which changed nothing: torch puts it "
                    "into the DTensor, and neither into the shard nor into what computes with it; write "
                    "parameter.copy_(value) under torch.no_grad(), or change what is there (parameter.data.clamp_()). "
                    "A type (module.half(), .float(), .to(dtype)) is the plan's"
                )
        if not all(parameter.dtype is dtype for _, parameter, dtype in self._types):
            self._refuse_types()
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise ModelError(
                    f"parameter {name} was unfrozen after make_step: no norm of gradients and no checkpoint holds it; "
                    "unfreeze it in the model's constructor. To train more from some step on, save, and start again "
                    "with a constructor that freezes less"
                )


def _places(placed: Placed) -> list[tuple[Mapping[str, Any], str, object]]:
    """Where modules hold what is trained or sharded, and the modules that do."""
    found: list[tuple[Mapping[str, Any], str, object]] = []
    for module in (module for part in placed.parts for module in part.root.modules()):
        found += [(module._parameters, key, p) for key, p in module._parameters.items() if _matters(p)]
        for key, child in module._modules.items():
            if child is not None and any(map(_matters, child.parameters())):
                found.append((module._modules, key, child))
    return found


def _matters(parameter: nn.Parameter | None) -> bool:
    return parameter is not None and (parameter.requires_grad or isinstance(parameter, DTensor))
