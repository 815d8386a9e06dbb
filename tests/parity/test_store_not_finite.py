"""Weights that are not finite: what is saved of them replaces no checkpoint, and no run goes on from it."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwise.checkpoint.store import Store
from shardwise.errors import CheckpointError
from shardwise.parallel.compose import apply
from shardwise.parallel.mesh import Mesh, open_mesh
from shardwise.plan.plan import Plan
from shardwise.testing.world import World
from shardwise.train.loss import Loss
from shardwise.train.optimizers import adamw
from shardwise.train.options import StepOptions
from shardwise.train.state import TrainState
from shardwise.train.step import make_step


def begun(plan: Plan, mesh: Mesh) -> TrainState:
    placed = apply(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), plan, mesh, seed=1)
    return TrainState(placed, adamw(placed, 0.01))


def spoilt(text: str, where: str, in_weights: bool) -> tuple[int, list[str], list[str]]:
    """The step that a run goes on from, what the store held, and what was said of saves."""
    plan, folder = Plan.parse(text), Path(where)
    with open_mesh(plan) as mesh, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        state = begun(plan, mesh)
        step = make_step(
            state,
            lambda output, y: Loss(output.square().sum(), torch.tensor(float(len(output)))),
            options=StepOptions(on_nonfinite="skip"),
        )
        store = Store(folder, keep=2)
        for number in range(1, 7):
            batch = torch.ones(4, 4)
            if number == 4 and in_weights and mesh.rank == 0:
                next(iter(state.placed.parameters())).detach().view(-1)[:1].fill_(float("nan"))
            elif number >= 4 and not in_weights:
                batch.fill_(float("nan"))
            step((batch, batch))
            store.save_async(state).wait()
        held = sorted(path.name for path in folder.glob("step-*"))
        loaded = Store(folder).load_latest(begun(plan, mesh))
        assert loaded is not None
        return loaded.step, held, [str(each.message) for each in said]


@pytest.mark.parametrize("plan", ["dp1", "dp2"])
def test_a_run_goes_on_from_before_its_weights_were_not_finite(world: World, plan: str, tmp_path: Path) -> None:
    step, held, said = world(Plan.parse(plan).world, spoilt, plan, str(tmp_path / "s"), True)[0]
    assert step == 3
    assert held == [f"step-{number:08d}" for number in range(2, 7)]  # 2 and 3 stay: those after them count for nothing
    assert any("step 4 is saved with NaN or infinity in the weight 0.weight" in text for text in said)
    assert any("loaded in place of" in text and "holds NaN or infinity" in text for text in said)


def test_what_is_not_finite_in_the_data_alone_is_saved_as_ever(world: World, tmp_path: Path) -> None:
    step, held, _ = world(1, spoilt, "dp1", str(tmp_path / "s"), False)[0]
    assert (step, held) == (6, ["step-00000005", "step-00000006"])


def loaded_by_path(where: str) -> str:
    plan = Plan.parse("dp1")
    with open_mesh(plan) as mesh:
        state = begun(plan, mesh)
        next(iter(state.placed.parameters())).detach().fill_(float("inf"))
        state.unmade = 1
        store = Store(where)
        with warnings.catch_warnings(action="ignore"):
            path = store.save(state).path
        try:
            store.load_latest(state)
        except CheckpointError as error:
            assert store.load(begun(plan, mesh), path).step == 0
            return str(error)
    return ""


def test_where_no_other_is_there_a_load_says_why_and_a_path_loads_it(world: World, tmp_path: Path) -> None:
    assert "the weight 0.weight holds NaN or infinity" in world(1, loaded_by_path, str(tmp_path / "s"))[0]
