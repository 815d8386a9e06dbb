"""A window's list of micro-batches in place of the window: which of them are padding is still known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import shardwise as sw
from shardwise.errors import UsageError
from shardwise.testing import World

ROWS = 11
DATA = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
GIVEN: dict[str, Callable[[Any], Any]] = {
    "window": lambda window: window,
    "list": lambda window: window.micro_batches,
    "mapped": lambda window: tree_map(lambda tensor: tensor + 0.0, window.micro_batches),
}


def loss_fn(output: Tensor, batch: Tensor) -> sw.Loss:
    return sw.mean_over(output.square().sum(1))


def trained(text: str, how: str) -> list[tuple[float, float]]:
    plan = sw.Plan.parse(f"{text} / fp64")
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(lambda: nn.Linear(4, 2), plan, mesh, seed=1)
        step = sw.make_step(sw.TrainState(placed, sw.sgd(placed, lr=0.1)), loss_fn)
        batch = sw.Batch(global_size=8, micro_batches=plan.batch.micro_batches)
        windows = sw.loader(DATA, batch, mesh, epochs=1)
        made = [step(GIVEN[how](window)) for window in windows]
        return [(m.weight, m.loss) for m in made]


@pytest.mark.parametrize("text", ["dp2 / mb2", "fsdp2 / mb4"])
def test_padding_weighs_nothing(world: World, text: str) -> None:
    """Three rows are left for the last step, on four places: the copy in the fourth was trained on."""
    truth = world(2, trained, text, "window")[0]
    assert [weight for weight, _ in truth] == [8, 3]
    for how in ("list", "mapped"):
        assert world(2, trained, text, how)[0] == truth


def changed() -> str:
    plan = sw.Plan.parse("dp1 / mb2 / fp64")
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(lambda: nn.Linear(4, 2), plan, mesh, seed=1)
        step = sw.make_step(sw.TrainState(placed, sw.sgd(placed, lr=0.1)), loss_fn)
        window = next(sw.loader(DATA, sw.Batch(global_size=8, micro_batches=2), mesh))
        window.micro_batches.pop()
        with pytest.raises(UsageError, match="changed from 2 to 1") as found:
            step(window.micro_batches)
        with pytest.raises(UsageError, match="found one batch"):
            sw.evaluate(placed, loss_fn, window.micro_batches)
        return str(found.value)


def test_a_list_that_lost_one_is_refused() -> None:
    assert "the window" in changed()
