"""bf16 parameters without an fp32 copy: the same bits under every layout, right on average, the same after a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.errors import UsageError
from shardwise.parallel.randomness.counter import Elements, Numbers, Stream
from shardwise.train.updates.rounding import rounded
from tests.parity.placing import LAYOUTS, State, full, place

BF16 = torch.bfloat16


def trained(layout: str, directory: str = "", rest: int = 0) -> dict[str, torch.Tensor]:
    """Three updates; with a directory, one that is saved and `rest` more after a load of it."""
    with sw.open_mesh(LAYOUTS[layout]) as mesh:
        placed = place(layout, mesh, BF16)
        state = State(placed, sw.stochastic_adamw(placed, 1e-2))
        if directory and rest:
            sw.Store(directory).load_latest(state)
        state.run(rest or (1 if directory else 3))
        if directory and not rest:
            sw.Store(directory).save(state).wait()
        return {name: full(p) for name, p in placed.named_parameters().items()}


@pytest.mark.share(2)
@pytest.mark.parametrize("layout", ["fsdp4", "tp2", "fsdp2tp2", "hsdp2x2", "pp2"])
def test_a_sharded_parameter_is_rounded_as_the_whole_one(world, layout: str) -> None:
    (truth,) = world(1, trained, "one")
    for rank in world(LAYOUTS[layout].world, trained, layout):
        assert all(torch.equal(value, truth[name]) for name, value in rank.items())


def test_a_resumed_run_rounds_as_the_saved_one(world, tmp_path: Path) -> None:
    world(2, trained, "fsdp2", str(tmp_path))
    (truth,), resumed = world(1, trained, "one"), world(2, trained, "tp2", str(tmp_path), 2)
    assert all(torch.equal(value, truth[name]) for name, value in resumed[0].items())


def numbers(*key: object, size: int = 100_000) -> Numbers:
    device = torch.device("cpu")
    return Numbers(Stream.of(*key), Elements.row_major((size,), device), device)


def test_rounding_is_right_on_average_and_to_a_neighbour() -> None:
    for value in (1.001, -3.14159, 1e-30, 257.3):
        values = torch.full((100_000,), value)
        result = rounded(values, numbers("average", value)).float()
        low, high = result.min(), result.max()
        assert low <= value <= high and len(result.unique()) == 2
        share = (value - low) / (high - low)
        assert abs((result == high).float().mean() - share) < 4 * (share * (1 - share) / 100_000) ** 0.5


def test_what_bf16_can_hold_and_what_is_not_finite_stay_as_they_are() -> None:
    values = torch.tensor([0.0, -0.0, 1.5, -2.0, float("inf"), float("-inf"), float("nan")]).repeat(1000)
    result = rounded(values, numbers("exact", size=7000))
    assert torch.equal(result.isnan(), values.isnan())
    assert torch.equal(result[~result.isnan()].float(), values[~values.isnan()])


def test_small_updates_add_up_where_rounding_to_nearest_loses_them(world) -> None:
    stochastic, nearest = world(1, small_updates)[0]
    assert nearest == 1.0 and abs(stochastic - 0.95) < 0.005


def small_updates() -> tuple[float, float]:
    """500 updates of -1e-4 from 1: the mean of 10,000 parameters, and the same in plain bf16."""
    with sw.open_mesh(plan := sw.Plan.parse("dp1 / bf16-pure")) as mesh:
        placed = sw.apply(lambda: torch.nn.Linear(100, 100, bias=False), plan, mesh)
        (parameter,) = placed.parameters()
        torch.nn.init.ones_(parameter)
        optimizer, plain = sw.stochastic_adamw(placed, 1e-4, weight_decay=0.0), torch.ones((), dtype=BF16)
        for _ in range(500):
            optimizer.take_grads({"weight": torch.ones_like(parameter)})
            optimizer.step()
            plain -= 1e-4
        return float(parameter.detach().float().mean()), float(plain)


def test_a_plan_without_bf16_parameters_is_refused(world) -> None:
    assert "bf16-pure" in world(1, refused)[0]


def refused() -> str:
    with sw.open_mesh(plan := sw.Plan.parse("dp1")) as mesh:
        placed = sw.apply(lambda: torch.nn.Linear(2, 2), plan, mesh)
        with pytest.raises(UsageError) as error:
            sw.stochastic_adamw(placed, 1e-3)
        return str(error.value)
