"""What a model, or a block of it, returns as a view may be written into, under sharded parameters too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.testing import World

ROWS = 8
Pair = tuple[Tensor, Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))).unflatten(1, (2, 2)).flatten(1)


class Net(nn.Module):
    """Adds to what its blocks return, in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            before, x = x, block(x)
            x += before
        return x[:, :3]


def scaled(output: Tensor, batch: Pair) -> Tensor:
    return F.cross_entropy(output.mul_(2), batch[1])


def masked(output: Tensor, batch: Pair) -> Tensor:
    output[:, 0] = -1e3
    return F.cross_entropy(output, batch[1] + 1)


def plain(output: Tensor, batch: Pair) -> Tensor:
    return F.cross_entropy(output, batch[1])


LOSSES: dict[str, Callable[..., Any]] = {"scaled": scaled, "masked": masked, "plain": plain}


def trained(text: str, name: str) -> list[float]:
    plan = sw.Plan.parse(f"{text} / fp64")
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(Net, plan, mesh, seed=1)
        step = sw.make_step(sw.TrainState(placed, sw.sgd(placed, lr=0.1)), LOSSES[name])
        x = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        mine = slice(mesh.batch.rank, None, mesh.batch.size)
        steps = [step((x[mine], (torch.arange(ROWS) // 2 % 2)[mine])) for _ in range(3)]
    return [number for m in steps for number in (m.loss, m.grad_norm)]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("text", ["dp2", "fsdp2", "fsdp2 / mb2 / zero2", "fsdp2 / recompute=blocks"])
def test_views_that_are_written_into_train_as_on_one_process(world: World, text: str, name: str) -> None:
    """Under `fsdp` the weights got no gradient: the norm was zero, and nothing was said but a warning of torch's."""
    expected = world(1, trained, "dp1", name)[0]
    assert all(number > 0 for number in expected)
    for found in world(2, trained, text, name):
        assert found == pytest.approx(expected, rel=1e-10)
