"""What a loss function holds itself: parameters that no rank reduces and no checkpoint looks for."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from types import FunctionType
from typing import Any

from torch import nn

from shardwise.parallel.compose import APPLIED
from shardwise.parallel.mesh import Mesh
from shardwise.train.losses import Losses


class HeldParameters:
    """After a process's first step: warn of parameters that got a gradient and are of no model that was placed."""

    def __init__(self, mesh: Mesh, loss_fn: Any) -> None:
        """Look where a function's modules are: itself, what it is bound to or given, what its code names."""
        self._mesh = mesh
        self._held: dict[str, nn.Parameter] | None = dict(_parameters(loss_fn))

    def __call__(self, makes_update: bool) -> None:
        """Look, once. Cost: a look at each such parameter, and at those of all models."""
        held, self._held = self._held or {}, None
        trained = {name: parameter for name, parameter in held.items() if parameter.grad is not None}
        placed = {id(parameter) for module in APPLIED if trained for parameter in module.parameters()}
        names = [name for name, parameter in trained.items() if id(parameter) not in placed]
        if names and self._mesh.is_first:
            warnings.warn(
                f"the loss function holds parameters with a gradient: {', '.join(names[:3])} ({len(names)}); it is of "
                "this rank's rows alone, in no norm and in no checkpoint, and ranks that step them drift apart; let "
                "the model hold them, whose forward returns them beside its output (docs/loss.md), or freeze them "
                "(requires_grad_(False)) where nobody trains them",
                stacklevel=2,
            )


def _parameters(function: Any) -> Iterator[tuple[str, nn.Parameter]]:
    for name, value in _named_by(function):
        if isinstance(value, nn.Parameter):
            yield name, value
        elif isinstance(value, nn.Module):
            yield from ((f"{name}.{inner}", parameter) for inner, parameter in value.named_parameters())


def _named_by(function: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(function, Losses):
        yield from _named_by(function.function)
    elif isinstance(function, partial):
        yield from _named_by(function.func)
        yield from ((str(place), value) for place, value in enumerate(function.args))
        yield from function.keywords.items()
    elif isinstance(function, nn.Module):
        yield type(function).__name__, function
    elif inspect.ismethod(function):
        yield type(function.__self__).__name__, function.__self__
        yield from _fields(function.__self__)
    elif isinstance(function, FunctionType):
        code, around = function.__code__, function.__globals__
        yield from ((name, around[name]) for name in code.co_names if name in around)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # nothing was assigned to it yet
                yield name, cell.cell_contents
    else:
        yield from _fields(function)


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, nn.Module):  # of which the parameters are known
        yield from getattr(value, "__dict__", {}).items()
