"""The copies in memory that `--recover` and `--elastic` go on from, taken over by other ranks than made them."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.testing import World
from shardwise.train.kept.mirror import Mirror
from shardwise.train.kept.outliving import Memory, Place


class Block(nn.Module):
    """One with a batch norm, or without."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4) if number == 3 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))


class NormsAtTheEnd(nn.Module):
    """A batch norm that only the last stage of a pipeline has."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(number) for number in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def loss_fn(output: torch.Tensor, batch: list[torch.Tensor]) -> sw.Loss:
    return sw.mean_over(output.square())


def train(text: str, folder: str, order: str) -> list[str]:
    """Take over the copy that is there, make a step and a copy of that; the warnings."""
    plan = sw.Plan.parse(text)
    board, *files, told = (
        os.open(Path(folder, name), os.O_RDWR | os.O_CREAT) for name in ("board", "0a", "0b", "1a", "1b", order)
    )
    memory = Memory(board=board, slots=((files[0], files[1]), (files[2], files[3])))
    with sw.open_mesh(plan) as mesh, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        placed = sw.apply(NormsAtTheEnd, plan, mesh, sample=torch.ones(2, 4))
        state = sw.TrainState(placed, sw.adamw(placed, lr=1e-3))
        mirror = Mirror(Place(job="ab" * 16, rank=mesh.rank, world=int(order), order=told, memory=memory))
        mirror.join(state)
        sw.make_step(state, loss_fn)([[torch.ones(2, 4)] for _ in range(plan.batch.micro_batches)])
        mirror.keep(state)
    memory.close()
    return [str(each.message) for each in caught if "batch norm" in str(each.message)]


@pytest.mark.parametrize(
    ("then", "now"), [("pp2 / mb4", "pp2 / mb2"), ("pp2 / mb4", "dp1 / mb2"), ("dp1", "pp2 / mb2")]
)
def test_a_batch_norm_of_a_later_stage_is_said_too(world: World, tmp_path: Path, then: str, now: str) -> None:
    plans = sw.Plan.parse(then), sw.Plan.parse(now)
    (tmp_path / "1").write_text('{"count": 0, "ranks": 0}\n')
    (tmp_path / "2").write_text(json.dumps({"count": 1, "ranks": plans[0].world}) + "\n")
    assert world(plans[0].world, train, then, str(tmp_path), "1")[0] == []
    said = world(plans[1].world, train, now, str(tmp_path), "2")[0]
    numbers = [plan.batch.micro_batches for plan in reversed(plans)]
    assert [text.split(";")[0] for text in said] == [
        "batch norm: found {} micro-batches per step, and {} up to step 1".format(*numbers)
    ]
