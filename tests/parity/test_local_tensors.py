"""What is here of a state's tensors, as its plain parts: the same as its DTensors hold, without making them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.parallel.mesh import open_mesh
from shardwise.parallel.placed import Placed
from shardwise.testing.world import World
from shardwise.train.ema import Ema
from shardwise.train.optimizers import OPTIMIZERS, adamw, sgd
from shardwise.train.state import TrainState
from shardwise.train.updates.optim import NamedOptimizer, name_optimizer
from shardwise.train.updates.several import several
from tests.parity.placing import LAYOUTS, place, train


class Counting(torch.optim.SGD):
    """Its state holds plain numbers."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["seen"], state["rate"] = state.get("seen", 0) + 1, 0.5
        return super().step(closure)


def optimizer_of(kind: str, placed: Placed) -> NamedOptimizer:
    if kind == "counting":
        return name_optimizer(Counting(placed.parameters(), lr=0.01, momentum=0.9), placed)
    if kind == "several":
        return several(
            placed, {"*.bias": lambda part: sgd(part, 0.1, momentum=0.9), "*": lambda part: adamw(part, 0.1)}
        )
    return OPTIMIZERS[kind](placed, lr=0.01)


def shares(local: Tensor, tensor: Tensor) -> bool:
    held = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    same = (local.shape, local.dtype, local.stride()) == (held.shape, held.dtype, held.stride())
    plain = not isinstance(local, DTensor) and not local.requires_grad
    return same and plain and (local.data_ptr() == held.data_ptr() or not local.dim())


def differing(layout: str, kind: str, dtype: torch.dtype, other: bool) -> list[str]:
    """Names whose two forms differ; `other`: the layout of another state."""
    with open_mesh(LAYOUTS[layout]) as mesh:
        placed = place(layout, mesh, dtype)
        placed.parts[0].root.register_buffer("scratch", torch.zeros(3), persistent=False)
        placed.parts[0].root.add_module("drift", nn.BatchNorm1d(4, affine=False))
        state = TrainState(placed, optimizer_of(kind, placed), ema=Ema(placed))
        train(placed, state.optimizer, range(2))
        tensors, local = state.tensors(), state.local_tensors()
        if other:
            local = TrainState(placed, adamw(placed, 1.0), ema=Ema(placed)).local_tensors()
        if list(tensors) != list(local):
            return ["other names"]
        assert "model.drift.running_mean" in local and "model.scratch" not in local
        numbers = [
            name for name, tensor in tensors.items() if not tensor.dim() and not torch.equal(tensor, local[name])
        ]
        return numbers + [name for name, tensor in tensors.items() if not shares(local[name], tensor)]


@pytest.mark.share(6)
@pytest.mark.parametrize("layout", ["dp2", "fsdp2", "tp2", "fsdp2tp2", "pp2"])
@pytest.mark.parametrize("kind", [*OPTIMIZERS, "counting", "several"])
def test_they_are_the_parts_of_the_tensors(world: World, layout: str, kind: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):  # with masters
        assert world(LAYOUTS[layout].world, differing, layout, kind, dtype, False) == [[]] * LAYOUTS[layout].world


def test_another_states_are_seen_to_differ(world: World) -> None:
    assert all(world(2, differing, "fsdp2", "adamw", torch.float32, True))
