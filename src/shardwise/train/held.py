"""What a loss function holds itself: parameters that no rank reduces and no checkpoint looks for."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch import nn

from shardwise.parallel.placed import Placed
from shardwise.train.losses import Losses


class HeldParameters:
    """After a process's first step: warn of parameters that got a gradient and are none of the model's."""

    def __init__(self, placed: Placed, loss_fn: Any) -> None:
        """Look where a function's modules are: itself, what it is bound to or given, what its code names."""
        self._placed = placed
        self._held: dict[str, nn.Parameter] | None = dict(_parameters(loss_fn))

    def __call__(self, makes_update: bool) -> None:
        """Look, once. Cost: a look at each such parameter."""
        held, self._held = self._held or {}, None
        own = {id(parameter) for parameter in self._placed.parameters()}
        names = [name for name, p in held.items() if p.grad is not None and id(p) not in own]
        if names and self._placed.mesh.is_first:
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
    elif inspect.isfunction(function):
        found = inspect.getclosurevars(function)
        yield from {**found.globals, **found.nonlocals}.items()
    else:
        yield from _fields(function)


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    fields = getattr(value, "__dict__", {})
    if isinstance(fields, Mapping) and not isinstance(value, nn.Module):
        yield from fields.items()
