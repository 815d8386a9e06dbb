"""Data ranks of a pipeline whose rows, or lengths of rows, are not those of others: shards are gathered by all."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.testing.world import World

PLANS = ["pp2 fsdp2 / 1f1b mb2", "pp2 fsdp2 / interleaved mb2", "pp2 dp2 / gpipe mb2"]
LENGTHS = ((6, 6), (6, 7), (5, 9), (7, 6))
"""Of each step: the tokens of a row of the first data rank, and of the second."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Summing(Block):
    """What it hands on has a number without dims, too."""

    def forward(self, given: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return (out := super().forward(given[0])), given[1] + out.square().sum()


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Summing() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = (x, x.new_zeros(()))
        for block in self.blocks:
            state = block(state)
        return state[0] + 0 * state[1]


def build() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(4)))


def loss(output: torch.Tensor, batch: tuple[torch.Tensor]) -> sw.Loss:
    return sw.Loss(output.square().sum(), torch.tensor(float(output.numel()), dtype=torch.float64))


def rows(step: int, rank: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(4, LENGTHS[step][rank], 8, generator=draw, dtype=torch.float64)


def trained(text: str, made: Callable[[], nn.Module] = build) -> list[float]:
    """Losses, norms, and the sums of evaluations of seven rows and three."""
    plan = sw.Plan.parse(f"{text} / gbs8 / fp64")
    found: list[float] = []
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(made, plan, mesh, sample=torch.zeros(2, 6, 8, dtype=torch.float64))
        state = sw.TrainState(placed, sw.sgd(placed, lr=0.1))
        step = sw.make_step(state, loss)
        for index in range(len(LENGTHS)):
            metrics = step((rows(index, mesh.batch.rank),))
            found += [float(metrics.loss), float(metrics.grad_norm)]
        for count in (7, 3):
            dataset = torch.utils.data.TensorDataset(
                torch.randn(7, 6, 8, generator=torch.Generator().manual_seed(9)).double()
            )
            part = torch.utils.data.Subset(dataset, range(count))
            found.append(float(sw.evaluate(placed, loss, sw.eval_batches(part, plan.batch, mesh)).sum))
    return found


@pytest.mark.parametrize("text", PLANS)
def test_sizes_that_are_new_to_one_data_rank(world: World, text: str) -> None:
    truth = world(2, trained, "dp2")[0]
    for found in world(4, trained, text, timeout_s=60):
        assert found == pytest.approx(truth, rel=1e-11)


def test_a_number_without_dims_passes_too(world: World) -> None:
    truth = world(2, trained, "dp2", Sums)[0]
    for found in world(4, trained, PLANS[0], Sums, timeout_s=60):
        assert found == pytest.approx(truth, rel=1e-11)
