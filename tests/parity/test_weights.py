"""The update is that of one process on the whole global batch, however rows, masks and weights fall on ranks."""

from __future__ import annotations

import functools

import pytest
import torch

import shardwise as sw
from tests.parity import grid, points
from tests.parity.points import Case


@functools.cache
def ragged_truth(world) -> grid.Trace:
    return world(1, grid.reference, "decoder", "fp64", 16)[0]


@pytest.mark.share(6)
@pytest.mark.parametrize("micro_batches", [1, 3, 7])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ragged_masks_under_accumulation(world, ranks: int, micro_batches: int) -> None:
    kind = "fsdp" if micro_batches == 3 and ranks > 1 else "dp"
    results = world(ranks, grid.run_plan, f"{kind}{ranks} / mb{micro_batches} / fp64", "decoder", 16)
    worst = grid.differences(results, ragged_truth(world))
    assert max(worst.values()) <= 1e-11, worst


# 19 samples in windows of 8, 8 and 3: in the last one some ranks have no row, and carry padding that weighs zero
UNEVEN = [
    "dp1 / mb7",
    "dp2 / mb3",
    "dp4 / mb2",
    "fsdp4 / mb2",
    "fsdp4 / zero2",
    "fsdp4 / zero1 / mb3",
    "dp2 fsdp2 / mb2",
    "tp2 / mb7",
    "pp2 / 1f1b mb2",
    "pp2 dp2 / 1f1b mb2",
    "pp2 fsdp2 / zero1 / 1f1b mb4",
]


@pytest.mark.share(4)
@pytest.mark.parametrize("plan", UNEVEN)
def test_uneven_last_window(world, plan: str) -> None:
    points.check(world, plan, Case(rows=19, epochs=1, steps=3))


@pytest.mark.share(4)
@pytest.mark.parametrize("plan", ["dp2", "dp4 / mb2", "fsdp4 / mb2", "pp2 dp2 / 1f1b mb2"])
def test_global_batch_not_divisible_by_ranks(world, plan: str) -> None:
    points.check(world, plan, Case(global_batch=7))


@pytest.mark.share(8)
@pytest.mark.parametrize("loss", list(points.LOSSES))
@pytest.mark.parametrize("plan", ["dp2 / mb2", "fsdp4", "pp2 dp2 / 1f1b mb2"])
def test_every_form_of_a_loss_with_uneven_rows(world, plan: str, loss: str) -> None:
    said = points.check(world, plan, Case(global_batch=7, loss=loss))
    if loss == "a_scalar_mean":
        assert len(said[0]) == 1 and "\n" not in said[0][0] and not any(said[1:]), said
    else:
        assert not any(said)


@pytest.mark.share(4)
@pytest.mark.parametrize("plan", ["dp1", "dp2 / mb2", "pp2 dp2 / 1f1b mb2", "tp2"])
def test_a_scalar_mean_over_equal_rows_says_nothing(world, plan: str) -> None:
    assert not any(points.check(world, plan, Case(loss="a_scalar_mean")))


def one_batch(text: str, form: str) -> list[float]:
    """Loss and norm of one step on this rank's rows, handed over in different forms."""
    case = Case()
    with points.placed_state(text, case) as state:
        data, rank = points.Points(8), state.mesh.batch
        mine = slice(rank.rank * 8 // rank.size, (rank.rank + 1) * 8 // rank.size)
        rows = [data.x[mine], data.y[mine], data.weight[mine]]
        forms = {
            "list": rows,  # what torch's default_collate makes of tuples
            "tuple": tuple(rows),
            "micro-batches": [[t[i : i + 1] for t in rows] for i in range(len(rows[0]))],
        }
        metrics = sw.make_step(state, points.weighted)(forms[form])
        return [metrics.loss, metrics.grad_norm]


@pytest.mark.parametrize("form", ["list", "tuple", "micro-batches"])
def test_a_step_takes_a_batch_or_micro_batches(world, form: str) -> None:
    results = world(2, one_batch, "dp2 / mb2 / fp64", form)
    whole = world(1, one_batch, "dp1 / fp64", "tuple")[0]
    torch.testing.assert_close(results, [whole, whole], rtol=1e-12, atol=0)
