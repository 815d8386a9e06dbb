"""What a store takes: a state that it saves and loads, and what measures one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from shardwise.checkpoint.torch_private import local_of
from shardwise.errors import UsageError
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.placed import Placed
from shardwise.parallel.randomness.generators import Drawn

Kind = tuple[tuple[int, ...], str]
"""Shape and type of a stored tensor."""


class Saveable(Protocol):
    """What a store saves and loads; `TrainState` is one."""

    @property
    def placed(self) -> Placed:
        """The placed model: its plan goes into the manifest."""
        ...

    @property
    def mesh(self) -> Mesh:
        """All ranks that take part."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """This rank's tensors by name, sharded ones as DTensors; a name has one global value over all ranks."""
        ...

    def scalars(self) -> dict[str, Any]:
        """Everything else as JSON, the same on every rank; `step` is in it."""
        ...

    def template(
        self, names: Collection[str], *, late: Mapping[str, Kind] | None = None, forms: Mapping[str, str] | None = None
    ) -> dict[str, Tensor]:
        """Fresh tensors, of the names, layouts and types that a checkpoint holding `names` would load here.

        `late`: shape and type of those of them that an optimizer of the same kind may have made after its first step.
        `forms`: what of its state was a number of Python's, a list, a tuple or a dict, by key. A state without an
        optimizer in its scalars is given neither.
        """
        ...

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take over the filled template."""
        ...

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        """Take over what `scalars` gave at the save."""
        ...


_NEEDED = ("placed", "mesh", "tensors", "scalars", "template", "load_tensors", "load_scalars")


def mesh_of(state: Saveable) -> Mesh:
    """All ranks that take part in a save or a load.

    Raises:
        UsageError: a module, an optimizer or what `apply` gave in place of a state.
    """
    if not all(hasattr(state, name) for name in _NEEDED):
        raise UsageError(
            f"a store saves and loads a TrainState: found {type(state).__name__}; needed TrainState(placed, optimizer, "
            "...), which holds all that goes on after a resume"
        )
    return state.mesh


@runtime_checkable
class Forgetful(Protocol):
    """A state that knows what no checkpoint of it will have."""

    def forgets(self) -> str:
        """What that is, and what to do; empty: nothing that is known."""
        ...


def broken_weight(state: Saveable) -> str:
    """The first weight in training with a NaN or an infinity here, where updates are left out for such; else empty.

    Cost: none while updates are made; then a pass over the weights.
    """
    trained = state.placed.named_parameters().items() if getattr(state, "unmade", 0) else ()
    return next((n for n, p in trained if p.requires_grad and not bool(torch.isfinite(local_of(p)).all())), "")


@runtime_checkable
class Grouping(Protocol):
    """A state that knows which parameters are trained, in which group of the optimizer."""

    def members(self) -> list[dict[str, Any]]:
        """Of each group on this rank: `settings`, and `names` of parameters."""
        ...

    def factors(self, at: Mapping[str, Sequence[int]]) -> Mapping[str, Sequence[tuple[int, list[float]]]]:
        """What the functions of schedulers that are kept give at some steps, by name."""
        ...


@runtime_checkable
class Drawing(Protocol):
    """A state that knows which generators the script has drawn from since it was made."""

    generators: Drawn


class Prober(Protocol):
    """What measures a state on rows that are kept; `shardwise.Probe` is one."""

    def measure(self, state: Any) -> tuple[float, float, str]:
        """Loss, gradient norm and a digest of the rows; every rank takes part, the state is as before."""
        ...
