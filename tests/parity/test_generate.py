"""Tokens drawn on the training mesh, between two steps: those that one process draws."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.errors import ReplicaError
from shardwise.models.sample import generate
from shardwise.testing.world import World
from tests.parity import grid, hf_models

PLANS = ("tp2 / seq", "dp2", "pp2 / 1f1b mb2", "fsdp2", "cp2", "fsdp2 tp2 / loss-parallel")
PROMPTS = torch.tensor([[3, 1, 4], [1, 5, 9]])
DRAWS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1, "seq_len": 4},
)


@pytest.fixture(scope="module", autouse=True)
def warm(world: World) -> None:
    world.preload(__name__, "transformers.models.llama.modeling_llama")


def models() -> dict[str, Any]:
    families = {family: sw.hf_factory(hf_models.config(family)) for family in ("llama",)}
    return {"decoder": grid.MODELS["decoder"], **families}


def drawn(text: str) -> dict[str, list[list[int]]]:
    plan, found = sw.Plan.parse(f"{text} / fp64"), {}
    with sw.open_mesh(plan) as mesh:
        for name, factory in models().items():
            placed = sw.apply(factory, plan, mesh, seed=grid.SEED)
            modules = [module for part in placed.parts for module in part.root.modules()]
            modules[-1].eval()  # as a script trains it
            found[name] = [sw.generate(placed, PROMPTS, 5, **draw).tolist() for draw in DRAWS]
            assert [module.training for module in modules] == [True] * (len(modules) - 1) + [False]
    return found


def alone() -> dict[str, list[list[int]]]:
    """The same with a plain module."""
    found = {}
    for name, factory in models().items():
        module = sw.init_model(factory, seed=grid.SEED, dtype=torch.float64)
        logits = Logits(module)
        draws = [
            {"max_seq_len": draw.get("seq_len"), **{k: v for k, v in draw.items() if k != "seq_len"}} for draw in DRAWS
        ]
        module.eval()
        found[name] = [generate(logits, PROMPTS, 5, **draw).tolist() for draw in draws]
        assert logits.training and not module.training
    return found


class Logits(torch.nn.Module):
    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        output = self.module(ids)
        return getattr(output, "logits", output)


@functools.cache
def truth(world: World) -> dict[str, list[list[int]]]:
    return world(1, alone)[0]


@pytest.mark.share(4)
@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_draws_what_one_process_draws(world: World, plan: str) -> None:
    wanted = truth(world)
    assert all(len({str(rows) for rows in draws}) == len(DRAWS) for draws in wanted.values())
    for rank, found in enumerate(world(sw.Plan.parse(plan).world, drawn, plan)):
        assert found == wanted, rank


def given_otherwise(text: str, what: str) -> str:
    """What is said where a rank has rows of its own, or draws otherwise."""
    with sw.open_mesh(plan := sw.Plan.parse(text)) as mesh:
        placed = sw.apply(grid.MODELS["decoder"], plan, mesh, seed=grid.SEED)
        own = mesh.rank if what == "rows" else 0
        with pytest.raises(ReplicaError) as caught:
            sw.generate(placed, PROMPTS[:, : 2 + own], 3, seed=mesh.rank if what == "seed" else 0)
    return str(caught.value)


@pytest.mark.parametrize(("what", "named"), [("rows", "shape of ids"), ("seed", "seed")])
def test_ranks_that_continue_other_rows_are_told(world: World, what: str, named: str) -> None:
    """Rank 0's tokens came out behind the others' own."""
    for said in world(2, given_otherwise, "dp2 / fp64", what):
        assert said.startswith(f"generate(): {named} must be equal on ranks 0, 1: found ")
