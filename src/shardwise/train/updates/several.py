"""`several`: parameter groups by name pattern, each with an optimizer of its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.errors import ModelError, UsageError
from shardwise.findings import nearest
from shardwise.model.rules import MAX_SHOWN
from shardwise.parallel.placed import Placed, check_placed
from shardwise.train.updates.groups import matches
from shardwise.train.updates.optim import NamedOptimizer, name_optimizer
from shardwise.train.updates.state_values import Kind, same_forms

Factory = Callable[[Placed], NamedOptimizer | torch.optim.Optimizer]


class SeveralOptimizers(NamedOptimizer):
    """Several optimizers that step together; made by `several`. State keeps its names, whoever steps a parameter."""

    def __init__(self, parts: Mapping[str, NamedOptimizer]) -> None:
        """`parts`: pattern -> the optimizer of the parameters that it took."""
        self.parts = dict(parts)
        self.torch = next(iter(parts.values())).torch
        self.params: dict[str, nn.Parameter] = {n: p for part in parts.values() for n, p in part.params.items()}
        self.live: dict[str, nn.Parameter] = {n: p for part in parts.values() for n, p in part.live.items()}
        self.base_lrs = [lr for part in parts.values() for lr in part.base_lrs]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of all parts, in order."""
        return [group for part in self.parts.values() for group in part.param_groups]

    @property
    def kind(self) -> str:
        """Names of the parts' classes, each once."""
        return "+".join(dict.fromkeys(part.kind for part in self.parts.values()))

    def owner(self, name: str) -> torch.optim.Optimizer:
        """The torch optimizer of the part that steps a parameter."""
        return next(part.torch for part in self.parts.values() if name in part.params)

    def take_grads(self, grads: Mapping[str, Tensor | None]) -> None:
        """Hand each part the gradients of its parameters; see `NamedOptimizer.take_grads`."""
        unknown = sorted(grads.keys() - self.params.keys())
        if unknown:
            raise ModelError(
                f"take_grads: {unknown[0]} is stepped by none of the optimizers; "
                f"{nearest(unknown[0], list(self.params))}"
            )
        for part in self.parts.values():
            part.take_grads({name: grad for name, grad in grads.items() if name in part.params})

    def step(self) -> None:
        """Step all parts."""
        for part in self.parts.values():
            part.step()

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for part in self.parts.values():
            part.zero_grad()

    def state_tensors(self) -> dict[str, Tensor]:
        """State of all parts by name."""
        return {name: tensor for part in self.parts.values() for name, tensor in part.state_tensors().items()}

    def states_by_parameter(self) -> dict[str, dict[str, Tensor]]:
        """Those of all parts, as plain tensors."""
        return {name: state for part in self.parts.values() for name, state in part.states_by_parameter().items()}

    def forms(self) -> dict[str, str]:
        """Those of all parts, where they agree."""
        return same_forms(part.forms() for part in self.parts.values())

    def state_template(
        self, names: Collection[str], *, late: Mapping[str, Kind] | None = None, forms: Mapping[str, str] | None = None
    ) -> dict[str, Tensor]:
        """Templates of all parts; see `NamedOptimizer.state_template`."""
        made = [part.state_template(names, late=late, forms=forms) for part in self.parts.values()]
        return {name: tensor for each in made for name, tensor in each.items()}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Give each part the state of its parameters."""
        for part in self.parts.values():
            own = tuple(f"optim.{name}." for name in part.params)
            part.load_state_tensors({name: t for name, t in tensors.items() if name.startswith(own)})


def several(placed: Placed, parts: Mapping[str, Factory]) -> NamedOptimizer:
    """One optimizer per group of parameters.

    Args:
        placed: from `apply`.
        parts: shell-style pattern over original names (`*` crosses dots) -> a function of a placed model that makes the
            optimizer of the parameters it sees, one of torch over its `parameters()` too. The first pattern that
            matches takes a parameter.

    Raises:
        UsageError: what is given is not placed; no parts, or no functions; or what one gives is no optimizer.
        ModelError: a pattern that takes nothing on any pipeline stage, or a trainable parameter that none takes, all
            listed.

    >>> optimizer = several(placed, {  # doctest: +SKIP
    ...     "*norm*": lambda p: adamw(p, 1e-3, weight_decay=0.0),
    ...     "layers.*.weight": lambda p: muon(p, 2e-2),
    ...     "*": lambda p: adamw(p, 3e-4),
    ... })
    """
    check_placed(placed, "several")
    wrong = next((each for each in parts.values() if not callable(each)), None) if isinstance(parts, Mapping) else parts
    if wrong is not None:
        raise UsageError(
            f"several: found {type(wrong).__name__} as what makes an optimizer; needed: patterns with functions of "
            "what each takes, {'*': lambda p: torch.optim.SGD(p.parameters(), lr=0.1)}"
        )
    if not parts:
        raise UsageError("several: found no parts, needed at least one; as {'*': lambda p: adamw(p, 3e-4)}")
    left = [name for name, parameter in placed.named_parameters().items() if parameter.requires_grad]
    taken: dict[str, frozenset[str]] = {}
    for pattern in parts:
        taken[pattern] = frozenset(name for name in left if matches(name, pattern))
        left = [name for name in left if name not in taken[pattern]]
    if left:
        shown = ", ".join(left[:MAX_SHOWN])
        raise ModelError(
            f"several: {len(left)} trainable parameters match none of {', '.join(map(repr, parts))}: {shown}; end with "
            "a pattern for the rest, as '*'"
        )
    _check_taken(placed, taken)
    made: dict[str, NamedOptimizer] = {}
    for pattern, names in taken.items():
        if not names:
            continue
        part = replace(placed, trains=names)
        optimizer = parts[pattern](part)
        if not isinstance(optimizer, NamedOptimizer | torch.optim.Optimizer):
            raise UsageError(
                f"several: the function of {pattern!r} gave {type(optimizer).__name__}, needed an optimizer; write "
                "lambda p: adamw(p, 3e-4), or lambda p: torch.optim.SGD(p.parameters(), lr=0.1)"
            )
        made[pattern] = name_optimizer(optimizer, part)
    return SeveralOptimizers(made)


def _check_taken(placed: Placed, taken: Mapping[str, frozenset[str]]) -> None:
    """Every pattern takes something on some stage; all ranks of the pp axis agree on the answer."""
    found = [bool(names) for names in taken.values()]
    if placed.mesh.size("pp") > 1:
        stages: list[list[bool]] = [[] for _ in range(placed.mesh.size("pp"))]
        dist.all_gather_object(stages, found, group=placed.mesh.group("pp"))
        found = [any(column) for column in zip(*stages, strict=True)]
    for pattern, ok in zip(taken, found, strict=True):
        if not ok:
            names = list(placed.named_parameters())
            raise ModelError(
                f"several: pattern {pattern!r} takes no parameter: it matches none, or patterns before it took them; "
                f"{nearest(pattern, names)}"
            )
