"""Buffers that forward writes: each micro-batch of a step writes them, and one process of one part once."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.testing import World


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.norm(self.head(x))


def trained(text: str) -> tuple[list[str], float]:
    """What is said in two steps, and the count."""
    plan = sw.Plan.parse(f"{text} / fp64")
    with sw.open_mesh(plan) as mesh, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        placed = sw.apply(Net, plan, mesh, seed=3)
        step = sw.make_step(
            sw.TrainState(placed, sw.sgd(placed, lr=0.1)), lambda output, _: sw.mean_over(output.square().sum(1))
        )
        for _ in range(2):
            step(torch.arange(32.0).view(8, 4).tensor_split(mesh.batch.size)[mesh.batch.rank].double())
        words = [str(each.message) for each in said]
        return [each for each in words if each.startswith("forward writes the buffers")], float(placed.module.count)


@pytest.mark.parametrize(("text", "told"), [("dp1", 0), ("dp2", 0), ("dp1 / mb2", 1)])
def test_buffers_that_each_micro_batch_writes_are_told(world: World, text: str, told: int) -> None:
    """Statistics of batch norms, which are those of micro-batches, are no news."""
    said, count = world(sw.Plan.parse(text).world, trained, text)[0]
    assert len(said) == told and count == 2 + 2 * told
    assert all("writes the buffers count, and `dp1 / mb2 / fp64` calls it 2 times" in each for each in said)
