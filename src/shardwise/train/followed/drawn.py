"""Whether ranks along `pp` have drawn as much from torch's generators: what a script draws for weights is of a stage.

`nn.init.orthogonal_(weight)` after `apply`, or noise for all of `placed.parameters()`: each stage draws for the layers
that it has, from where its generator stands, and so other numbers than one process does.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

from shardwise.parallel.mesh import Mesh
from shardwise.train.exchange import digest, gathered


class Draws:
    """After a process's steps 1, 3, 9, ...: compare, and warn once. The second step sends what most do."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._steps, self._next, self._is_told = mesh, 0, 1, False

    def __call__(self, makes_update: bool) -> None:
        """Cost: now and then an all-gather of three numbers."""
        self._steps += 1
        if self._is_told or self._steps != self._next:
            return
        self._next *= 3
        self._is_told = compare_draws(self._mesh, f"step {self._steps} of this process", 6)


def compare_draws(mesh: Mesh, where: str, stacklevel: int = 3) -> bool:
    """Warn where ranks of a pipeline that were seeded alike have drawn differently; every rank calls it.

    Args:
        mesh: all ranks.
        where: it is looked, for the message.
        stacklevel: of the warning.

    Returns:
        Whether they have, the same on every rank. Stages whose draws are as many are not seen.

    Cost: under a pipeline an all-gather of three numbers.
    """
    if mesh.size("pp") == 1:
        return False
    rows = [
        tuple(rank[0]) for rank in gathered([(mesh.batch.rank, digest([torch.initial_seed()]), _state(mesh))], mesh)
    ]
    if len({row[:2] for row in rows}) == len(set(rows)):
        return False
    if mesh.is_first:
        with suppress(Warning):  # `-W error` does not end a run that may be meant so
            warnings.warn(
                f"{where}: stages of the pipeline have drawn differently from torch's generator, which began alike. "
                "If the script draws for weights (torch.nn.init after apply, noise for placed.parameters()), each "
                "stage draws for the layers that it has, and other numbers than one process; needed: draws in the "
                "model's constructor or apply(..., init=), or a torch.Generator for each weight, seeded by its name",
                stacklevel=stacklevel,
            )
    return True


def _state(mesh: Mesh) -> int:
    """Of this process's generators of the CPU and, where it computes on one, the accelerator."""
    states = [torch.get_rng_state().numpy().tobytes()]
    if mesh.device.type == "cuda":
        states.append(torch.cuda.get_rng_state().numpy().tobytes())
    return digest(states)


def generator_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, bool]:
    """Which one an operation draws from, and whether it was seeded since it drew last."""
    own = next((each for each in (*args, *kwargs.values()) if isinstance(each, torch.Generator)), None)
    generator = own if own is not None else torch.default_generator
    fresh = torch.Generator(generator.device).manual_seed(generator.initial_seed())
    # by its seed: a dispatcher wraps a generator anew for each operation
    return generator.initial_seed(), bool(torch.equal(fresh.get_state(), generator.get_state()))
