"""What modules keep beside parameters and buffers goes on after a load, or is refused before the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import CheckpointError, ModelError
from shardwise.testing import World

ROWS = [(torch.randn(4, generator=torch.Generator().manual_seed(i)),) for i in range(64)]


class Counting(nn.Module):
    """Its output grows with the number of its calls."""

    kept: Any = None

    def __init__(self, inner: bool = True) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0
        self.scale = torch.ones(2, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and torch.is_grad_enabled():
            self.calls += 1
            self.scale = self.scale * 1.5
        return self.linear(x) * (1 + 0.1 * self.calls) * self.scale[0]

    def get_extra_state(self) -> Any:
        seen = {"calls": self.calls, "said": ["a", None, 0.1], "scale": self.scale, "none": torch.empty(0, 3)}
        return self.kept if self.kept is not None else seen

    def set_extra_state(self, state: Any) -> None:
        assert state["said"] == ["a", None, 0.1] and state["none"].shape == (0, 3)
        self.calls, self.scale = state["calls"], state["scale"]


def loss_fn(output: torch.Tensor, batch: Any) -> sw.Loss:
    return sw.mean_over((output.float() - 1).square())


def made(mesh: sw.Mesh, factory: Any = Counting) -> sw.TrainState:
    placed = sw.apply(factory, PLAN, mesh, seed=1)
    return sw.TrainState(placed, sw.adamw(placed, lr=1e-2), sw.loader(ROWS, 4, mesh, seed=3))


PLAN = sw.Plan.parse("fsdp2")


def go_on(path: str) -> tuple[list[float], list[float], str]:
    with sw.open_mesh(PLAN) as mesh:
        first, losses = made(mesh), []
        for metrics in sw.steps(first, loss_fn, until=6):
            losses.append(metrics.loss)
            if metrics.step == 3:
                sw.Store(path).save(first)
        other = made(mesh)
        assert sw.Store(path).load_latest(other) is not None
        again = [metrics.loss for metrics in sw.steps(other, loss_fn, until=6)]
        said = ""
        try:
            sw.Store(path).load_latest(made(mesh, lambda: nn.Sequential(nn.Linear(4, 4))))
        except CheckpointError as error:
            said = str(error)
        return losses[3:], again, said


def test_it_goes_on_where_it_was(world: World, tmp_path: Path) -> None:
    for losses, again, said in world(2, go_on, str(tmp_path / "store")):
        assert losses == again and len(again) == 3
        assert said


def test_a_step_without_an_update_leaves_it_as_it_was() -> None:
    rows = [(row[0] * (float("nan") if 4 <= place < 8 else 1.0),) for place, row in enumerate(ROWS)]
    with sw.open_mesh(sw.Plan()) as mesh:
        placed = sw.apply(Counting, sw.Plan(), mesh, seed=1)
        state = sw.TrainState(placed, sw.adamw(placed, lr=1e-2), sw.loader(rows, 4, mesh, shuffle=False))
        calls = [
            (m.skipped, state.scalars()["extra_state"]["the model"]["calls"]) for m in sw.steps(state, loss_fn, until=3)
        ]
    assert calls == [(False, 1), (True, 1), (False, 2)]


def without(path: str) -> str:
    with sw.open_mesh(PLAN) as mesh:
        sw.Store(path).save(made(mesh, Silent))
        try:
            sw.Store(path).load_latest(made(mesh))
        except CheckpointError as error:
            return str(error)
    return ""


class Silent(Counting):
    def get_extra_state(self) -> Any:
        return None


def test_a_checkpoint_without_it_is_refused(world: World, tmp_path: Path) -> None:
    for said in world(2, without, str(tmp_path / "store")):
        assert "get_extra_state of the model: this model has it, and the checkpoint does not" in said


@pytest.mark.parametrize(
    ("kept", "found"),
    [((1, 2), "found tuple"), ({1: 2}, "keys are no strings"), (float("nan"), "not JSON compliant"),
     ("x" * 70_000, "70002 bytes as JSON"), ({"a": [b"x"]}, "found bytes"), (torch.ones(2) * 1j, "found Tensor")],
)  # fmt: skip
def test_what_a_checkpoint_cannot_hold_is_refused_at_the_start(kept: Any, found: str) -> None:
    class Keeping(Counting):
        pass

    Keeping.kept = kept
    with sw.open_mesh(sw.Plan()) as mesh:
        placed = sw.apply(Keeping, sw.Plan(), mesh)
        with pytest.raises(ModelError, match="get_extra_state of the model") as refused:
            sw.TrainState(placed, sw.adamw(placed, lr=1e-2))
    assert found in str(refused.value)


class Stages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Counting(), Counting()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def in_a_pipeline() -> str:
    plan = sw.Plan.parse("pp2 / gpipe mb2")
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(Stages, plan, mesh)
        try:
            sw.TrainState(placed, sw.adamw(placed, lr=1e-2))
        except ModelError as error:
            return str(error)
    return ""


def test_in_a_pipeline_it_is_refused(world: World) -> None:
    for rank, said in enumerate(world(2, in_a_pipeline)):
        assert f"get_extra_state of layers.{rank}: " in said and "a plan without pp" in said
