"""What a loss function holds itself: parameters that no rank reduces and no checkpoint looks for."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from torch import nn

from shardwise.parallel.compose import APPLIED
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.named import named_by
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
        if names and self._mesh.tells:
            with suppress(Warning):  # `-W error` does not end one rank, for which the others would wait
                warnings.warn(
                    f"the loss function holds parameters with a gradient: {', '.join(names[:3])} ({len(names)}); it is "
                    "of this rank's rows alone, in no norm and in no checkpoint, and ranks that step them drift apart; "
                    "let the model hold them, whose forward returns them beside its output (docs/loss.md), or freeze "
                    "them (requires_grad_(False)) where nobody trains them",
                    stacklevel=2,
                )


def _parameters(function: Any) -> Iterator[tuple[str, nn.Parameter]]:
    for name, value in _named_by(function):
        if isinstance(value, nn.Parameter):
            yield name, value
        elif isinstance(value, nn.Module):
            yield from ((f"{name}.{inner}", parameter) for inner, parameter in value.named_parameters())


def _named_by(function: Any) -> Iterator[tuple[str, Any]]:
    yield from named_by(function.function if isinstance(function, Losses) else function)
