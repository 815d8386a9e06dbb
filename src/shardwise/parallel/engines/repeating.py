"""`Repeating`: what a backward pass runs again of a unit, by a checkpoint of the model, meets cast weights too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shardwise.parallel.module_torch_private import map_tensors, put_parameter
from shardwise.parallel.torch_private import behind_backward, in_backward, saving_hook

Cast = Callable[[torch.Tensor], torch.Tensor]
CastAll = Callable[[list[torch.Tensor]], list[torch.Tensor]]
Places = tuple[tuple[tuple[nn.Module, str], ...], ...]
"""Of each parameter: the modules that have it, and by what name."""


def put_casts(places: Places, to_compute: CastAll) -> list[torch.Tensor]:
    """Put casts in the place of parameters; returns these."""
    kept = [cast(torch.Tensor, module._parameters[key]) for (module, key), *_ in places]
    for value, sites in zip(to_compute(kept), places, strict=True):
        for module, key in sites:
            put_parameter(module, key, value)
    return kept


def put_back(places: Places, kept: list[torch.Tensor]) -> None:
    """What `put_casts` has returned."""
    for parameter, sites in zip(kept, places, strict=True):
        for module, key in sites:
            put_parameter(module, key, parameter)


def cast_forward(places: Places, to_compute: CastAll, inputs: Cast, forward: Any, *args: Any, **kwargs: Any) -> Any:
    """Call forward with cast inputs, while casts are in the place of parameters."""
    kept = put_casts(places, to_compute)
    try:
        return forward(*map_tensors(inputs, args), **map_tensors(inputs, kwargs))
    finally:
        put_back(places, kept)


class Repeating:
    """Calls the forward of a unit that casts its weights, and has them cast in its backward pass where that is needed.

    That is where its first training forward uses a weight while tensors are saved in another way than it began with, or
    nothing is recorded: as in `torch.utils.checkpoint`, whose second forward runs when weights are parameters again.

    Cost: of such a unit one more cast of its weights in each backward pass, which live until it ends.
    """

    def __init__(
        self, places: Places, to_compute: CastAll, inputs: Cast, running: list[Repeating], *, compiles: bool
    ) -> None:
        """`running`: the units that are called, innermost last; `compiles`: modules inside may be, so hooks must do."""
        self.places, self.to_compute, self.inputs = places, to_compute, inputs
        self.running, self.compiles = running, compiles
        self.repeats: bool | None = None
        self.kept: list[torch.Tensor] | None = None
        """The parameters, while a backward pass has their casts in their place."""

    def __call__(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """Call forward; see the class."""
        if self.kept is not None and not in_backward():  # of a backward pass that did not come to its end
            self.end()
        looks = self.repeats is None and torch.is_grad_enabled() and not in_backward()
        kept = put_casts(self.places, self.to_compute)
        self.running.append(self)
        try:
            with self.looking(looks) as seen:
                output = forward(*map_tensors(self.inputs, args), **map_tensors(self.inputs, kwargs))
        finally:
            self.running.pop()
            put_back(self.places, kept)
        if looks:
            self.repeats = bool(seen)
        if self.repeats and torch.is_grad_enabled():
            map_tensors(self.watch, output)
        return output

    @contextmanager
    def looking(self, looks: bool) -> Iterator[list[bool]]:
        """What is yielded is not empty once something in it may be run again; without `looks` nobody looks."""
        found: list[bool] = []
        if not looks:
            yield found
            return
        entered = saving_hook()

        def look(*given: Any) -> None:
            if self.running[-1] is not self:
                return  # a unit inside of it, which looks itself
            is_apart = saving_hook() is not entered or not torch.is_grad_enabled()
            if is_apart and any(map(self.is_weight, given)):
                found.append(True)

        if not self.compiles:
            with _Looking(look):
                yield found
            return
        modules = self.modules()
        hooks = [module.register_forward_pre_hook(look) for module in modules]
        try:
            yield found
        finally:
            for hook in hooks:
                hook.remove()

    def modules(self) -> set[nn.Module]:
        """Those that have its parameters."""
        return {module for sites in self.places for module, _ in sites}

    def is_weight(self, value: object) -> bool:
        """Whether it is one of the weights, a list of them, or a module that has some."""
        if isinstance(value, list | tuple):
            return any(map(self.is_weight, value))
        if isinstance(value, nn.Module):
            return value in self.modules()
        return any(module._parameters[key] is value for (module, key), *_ in self.places)

    def watch(self, output: torch.Tensor) -> torch.Tensor:
        """Have the weights cast when the backward pass comes to an output."""
        if output.requires_grad:
            output.register_hook(self.begin)  # type: ignore[no-untyped-call]  # torch has no types here
        return output

    def begin(self, _: torch.Tensor) -> None:
        """The backward pass of the unit begins."""
        if self.kept is None:
            with torch.enable_grad():  # what is run again is recorded as it was
                self.kept = put_casts(self.places, self.to_compute)
            behind_backward(self.end)

    def end(self) -> None:
        """The backward pass is over."""
        if self.kept is not None:
            put_back(self.places, self.kept)
            self.kept = None


class _Looking(TorchFunctionMode):
    def __init__(self, look: Callable[..., None]) -> None:
        super().__init__()
        self.look = look

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every call of a torch function comes here."""
        if not torch.compiler.is_compiling():  # what the model compiles itself is traced with this mode around it
            self.look(*args, *(kwargs or {}).values())
        return func(*args, **(kwargs or {}))
