"""What a script reads off weights, and writes into parts of them: of the whole, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.experimental import implicit_replication

import shardwise as sw
from shardwise.errors import UsageError
from shardwise.testing import World


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.gate = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.gate


def read(text: str) -> tuple[list[float], list[str]]:
    """Numbers of the whole, and what was said of those of parts."""
    plan = sw.Plan.parse(text)
    with sw.open_mesh(plan) as mesh:
        module = sw.apply(Net, plan, mesh).module
        weight, said = module.linear.weight.detach(), []
        whole = [w.full_tensor() if hasattr(w := f(weight), "full_tensor") else w for f in (torch.norm, torch.max)]
        for part in (weight.norm(), weight.max(), weight.mean()):
            try:
                float(part), bool(part)
            except UsageError as error:
                said.append(str(error))
        return [*map(float, whole), float(module.gate.detach())], said


@pytest.mark.parametrize(("text", "ranks"), [("fsdp2", 2), ("dp2", 2), ("fsdp1", 1)])
def test_a_number_of_a_shard_is_refused(world: World, text: str, ranks: int) -> None:
    """Each rank got that of its own part, without a word."""
    alone, nothing = world(1, read, "dp1")[0]
    assert not nothing
    for numbers, said in world(ranks, read, text):
        assert numbers == pytest.approx(alone, rel=1e-6)
        assert len(said) == (3 if text == "fsdp2" else 0)
        assert not said or "found (Partial(avg),) over (2,) ranks" in said[2] and ".full_tensor().item()" in said[2]


def row(weight: Tensor) -> None:
    weight[0].zero_()


def row_of_data(weight: Tensor) -> None:
    weight.data[0].normal_()


def rows(weight: Tensor) -> None:
    weight[1:3] = 0.5


def diagonal(weight: Tensor) -> None:
    weight.diagonal().mul_(2)


def column(weight: Tensor) -> None:
    weight[:, 1].zero_()


def masked(weight: Tensor) -> None:
    mask = torch.zeros(weight.shape, dtype=torch.bool)
    mask[0], mask[:, 2] = True, True
    with implicit_replication():
        weight.masked_fill_(mask, 0.5)


def written(text: str, write: Callable[[Tensor], None]) -> Any:
    """A weight after a write; or what was said."""
    plan = sw.Plan.parse(f"{text} / fp64")
    with sw.open_mesh(plan) as mesh, torch.no_grad():
        weight: Any = sw.apply(Net, plan, mesh, seed=1).module.linear.weight
        torch.manual_seed(2)
        try:
            write(weight)
        except UsageError as error:
            return str(error)
        return (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).clone()


@pytest.mark.parametrize("write", [row, row_of_data, rows, diagonal])
def test_a_write_into_a_part_that_is_a_copy_is_refused(world: World, write: Callable[[Tensor], None]) -> None:
    """The weight stayed as it was, without a word."""
    for said in world(2, written, "fsdp2", write):
        assert isinstance(said, str) and "of a sharded tensor (4, 4) is written in place" in said


@pytest.mark.parametrize(("text", "write"), [("fsdp2", column), ("fsdp2", masked), ("dp2", row), ("dp2", masked)])
def test_a_write_that_reaches_the_weight_is_made(world: World, text: str, write: Callable[[Tensor], None]) -> None:
    (alone,) = world(1, written, "dp1", write)
    assert all(torch.equal(one, alone) for one in world(2, written, text, write))
