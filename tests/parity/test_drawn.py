"""What a script draws for the weights of a stage is warned of, where stages have drawn differently."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.testing import World


def net() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4, bias=i > 0), nn.Tanh()) for i in range(4)))


def orthogonal(placed: sw.Placed, step: int) -> None:
    for p in placed.parameters() if step == 0 else ():
        if p.dim() > 1:
            nn.init.orthogonal_(p)
            nn.init.normal_(p.new_empty(len(list(placed.parameters()))))


def noise(placed: sw.Placed, step: int) -> None:
    with torch.no_grad():
        for p in placed.parameters() if step else ():
            p.add_(torch.randn(p.shape, dtype=p.dtype), alpha=1e-3)


def noise_of_rows(placed: sw.Placed, step: int) -> None:
    torch.randn(3)
    if step == 1:
        torch.manual_seed(7)


def by_rank(placed: sw.Placed, step: int) -> None:
    torch.manual_seed(placed.mesh.rank)
    torch.rand(placed.mesh.rank + 1)


def told(text: str, draw: Callable[[sw.Placed, int], None], trains: bool = True) -> list[str]:
    plan = sw.Plan.parse(f"{text} / fp64")
    with sw.open_mesh(plan) as mesh, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        placed = sw.apply(net, plan, mesh, seed=1)
        torch.manual_seed(3)
        step = sw.make_step(sw.TrainState(placed, sw.sgd(placed, lr=0.1)), lambda out, x: sw.mean_over(out.square()))
        for i in range(3):
            draw(placed, i)
            rows = torch.ones(4, 4, dtype=torch.float64)
            if trains:
                step(rows.tensor_split(mesh.batch.size)[mesh.batch.rank])
            else:
                sw.evaluate(placed, lambda out, x: sw.mean_over(out.square()), [rows])
        return [str(one.message) for one in caught if "have drawn differently" in str(one.message)]


@pytest.mark.parametrize(("draw", "step"), [(orthogonal, 1), (noise, 3)])
def test_draws_for_the_weights_of_a_stage_are_warned_of_once(world: World, draw: Callable, step: int) -> None:
    """They are other numbers than those of one process."""
    first, second = world(2, told, "pp2 / 1f1b mb2", draw)
    assert len(first) == 1 and not second
    assert first[0].startswith(f"step {step} of this process") and "apply(..., init=)" in first[0]


def test_draws_between_evaluations_are_warned_of(world: World) -> None:
    first, second = world(2, told, "pp2 / 1f1b mb2", noise, False)
    assert first and first[0].startswith("evaluate(): stages") and not second


@pytest.mark.parametrize(
    ("text", "draw"),
    [
        ("pp2 / 1f1b mb2", noise_of_rows),
        ("pp2 / 1f1b mb2", by_rank),
        ("dp2", by_rank),
        ("fsdp2", noise_of_rows),
    ],
)
def test_draws_that_are_alike_or_seeded_otherwise_are_not(world: World, text: str, draw: Callable) -> None:
    assert world(2, told, text, draw) == [[], []]
