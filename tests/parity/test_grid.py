"""The parity grid: every plan trains as one process does. Loss, norm, each gradient, each parameter, two steps."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch

from shardwise.plan.plan import Plan
from tests.parity import grid

TOLERANCE = {"fp32": 1e-6, "fp64": 1e-11}
PLANS = [
    # data axes
    "dp1 / mb1",
    "dp1 / mb4",
    "dp2",
    "dp4 / mb3",
    "dp8",
    "dp2 / static-graph",
    "dp2 / find-unused",
    "dp2 / no-bucket-view",
    "dp2 / bucket=0.01",
    "fsdp2 / zero1",
    "fsdp2 / zero2",
    "fsdp2",
    "fsdp4 / zero1 / mb2",
    "fsdp4 / zero2 / mb2",
    "fsdp4 / mb2",
    "fsdp8 / mb2",
    "dp2 fsdp2",
    "dp2 fsdp2 / zero1 / mb2",
    "dp2 fsdp2 / zero2 / mb2",
    "dp2 fsdp4 / mb2",
    "fsdp4 / reshard=2",
    "fsdp2 / prefetch=2",
    "fsdp2 / wrap=2000",
    "fsdp2 / offload=state",
    "fsdp4 / mb3",
    # tensor axis
    "tp2",
    "tp2 / seq",
    "tp2 / loss-parallel",
    "tp2 / seq / loss-parallel / mb2",
    "dp2 tp2",
    "dp2 tp2 / seq",
    "fsdp2 tp2",
    "fsdp2 tp2 / seq / loss-parallel / mb2",
    "fsdp2 tp2 / zero1 / seq / mb2",
    "fsdp2 tp2 / zero2",
    "dp2 fsdp2 tp2 / seq",
    "fsdp4 tp2 / mb2",
    # pipelines
    "pp2 / gpipe mb4",
    "pp2 / 1f1b mb4",
    "pp4 / 1f1b mb4",
    "pp2 / interleaved mb4",
    "pp4 / interleaved mb4",
    "pp2 / looped-bfs mb4",
    "pp2 / zero-bubble mb4",
    "pp4 / zero-bubble mb8",
    "pp2 / zero-bubble-v mb4",
    "pp2 / dualpipe-v mb4",
    "pp2 dp2 / gpipe mb2",
    "pp2 dp2 / 1f1b mb4",
    "pp2 dp2 / interleaved mb4",
    "pp2 dp2 / zero-bubble mb4",
    "pp2 fsdp2 / gpipe mb4",
    "pp2 fsdp2 / 1f1b mb4",
    "pp2 fsdp2 / zero1 / 1f1b mb4",
    "pp2 fsdp2 / zero2 / interleaved mb4",
    "pp2 fsdp2 / interleaved mb4",
    "pp2 fsdp2 / looped-bfs mb4",
    "pp2 fsdp2 / zero2 / zero-bubble mb4",
    "pp2 fsdp2 / zero2 / zero-bubble-v mb4",
    "pp2 tp2 / 1f1b mb4",
    "pp2 tp2 / seq / gpipe mb4",
    "pp2 tp2 / interleaved mb4 / seq",
    "pp2 tp2 / zero-bubble mb4",
    "pp2 dp2 fsdp2 / 1f1b mb2",
    "pp2 fsdp2 tp2 / 1f1b mb4 / seq / loss-parallel",
    "pp2 fsdp2 tp2 / gpipe mb4",
    "pp2 fsdp2 tp2 / interleaved mb4",
    "pp2 fsdp2 tp2 / looped-bfs mb4",
    "pp2 fsdp2 tp2 / zero2 / zero-bubble-v mb4 / seq",
    "pp2 fsdp2 tp2 / zero2 / dualpipe-v mb4 / seq",
    "pp2 fsdp2 / zero2 / dualpipe-v mb4",
    "pp2 dp2 tp2 / 1f1b mb4 / seq",
    # what happens block by block
    "dp2 / recompute=blocks",
    "fsdp2 / recompute=blocks",
    "fsdp2 / recompute=every2",
    "fsdp2 / recompute=50%",
    "fsdp2 / recompute=ops",
    "fsdp2 tp2 / recompute=blocks / seq",
    "fsdp2 tp2 / recompute=ops",
    "pp2 / 1f1b mb4 / recompute=blocks",
    "pp2 / zero-bubble mb4 / recompute=blocks",
    "pp2 fsdp2 / 1f1b mb4 / recompute=ops",
    "fsdp2 / offload=activations",
    "fsdp2 tp2 / offload=state+activations / mb2",
]
SOAK = {  # in four or eight processes
    "dp4 / mb3",
    "fsdp4 / zero1 / mb2",
    "pp2 dp2 / interleaved mb4",
    "pp2 fsdp2 / looped-bfs mb4",
    "dp2 fsdp2 / zero1 / mb2",
    "dp2 fsdp2 / zero2 / mb2",
    "fsdp4 / zero2 / mb2",
    "fsdp4 / mb3",
    "fsdp2 tp2 / zero2",
    "fsdp2 tp2 / recompute=ops",
    "pp2 fsdp2 / gpipe mb4",
    "pp2 tp2 / zero-bubble mb4",
    "dp8",
    "fsdp8 / mb2",
    "dp2 fsdp4 / mb2",
    "dp2 fsdp2 tp2 / seq",
    "fsdp4 tp2 / mb2",
    "pp2 dp2 fsdp2 / 1f1b mb2",
    "pp2 fsdp2 tp2 / gpipe mb4",
    "pp2 fsdp2 tp2 / interleaved mb4",
    "pp2 fsdp2 tp2 / looped-bfs mb4",
    "pp2 fsdp2 tp2 / zero2 / zero-bubble-v mb4 / seq",
    "pp2 dp2 tp2 / 1f1b mb4 / seq",
}
COMPILED = ["dp2 / compile", "tp2 / compile / seq", "pp2 / 1f1b mb4 / compile"]
GLOBAL_BATCH = 16


@functools.cache
def truth(world, model: str, precision: str) -> grid.Trace:
    return world(1, grid.reference, model, precision, GLOBAL_BATCH)[0]


def check(world, plan: str, model: str, precision: str, run=grid.run_plan) -> dict[str, float]:
    text = f"{plan} / {precision}"
    if model == "decoder":
        pp, stages = Plan.parse(text).axes.pp, Plan.parse(text).schedule.stages
        model = "decoder-flat" if pp == 1 else "decoder" if pp * stages <= 4 else "decoder-deep"
    ranks = world(Plan.parse(text).world, run, text, model, GLOBAL_BATCH, timeout_s=300)
    worst = grid.differences(ranks, truth(world, model, precision))
    assert max(worst.values()) <= TOLERANCE[precision], worst
    return worst


def cells(plans: list[str], soak: set[str]) -> list[Any]:
    return [pytest.param(plan, id=plan, marks=pytest.mark.soak if plan in soak else ()) for plan in plans]


@pytest.mark.share(4)
@pytest.mark.parametrize("plan", cells(PLANS, SOAK))
def test_decoder_fp64(world, plan: str) -> None:
    check(world, plan, "decoder", "fp64")


@pytest.mark.parametrize("plan", cells(COMPILED, set(COMPILED[1:])))
def test_compiled(world, plan: str) -> None:
    # torch 2.11 and 2.12 compile the backward of fp64 attention on a CPU wrongly, without Shardwise too
    check(world, plan, "decoder", "fp32" if torch.__version__ < "2.13" else "fp64", run=run_compiled)


def run_compiled(text: str, model: str, global_batch: int) -> grid.Trace:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dynamo and inductor trip over warnings of torch's own
        return grid.run_plan(text, model, global_batch)


IN_FP32 = {plan for i, plan in enumerate(PLANS[1::3]) if Plan.parse(plan).world < (8 if i % 4 == 1 else 4)}


@pytest.mark.share(4)
@pytest.mark.parametrize("plan", cells(PLANS[1::3], set(PLANS) - IN_FP32))
def test_decoder_fp32(world, plan: str) -> None:
    check(world, plan, "decoder", "fp32")


@pytest.mark.share(3)
@pytest.mark.parametrize("plan", ["tp4 / seq / loss-parallel", "fsdp2 tp4 / seq", "pp2 tp4 / 1f1b mb2 / seq"])
def test_more_heads(world, plan: str) -> None:
    check(world, plan, "decoder-tp4", "fp64")


@pytest.mark.share(4)
@pytest.mark.parametrize(
    "plan",
    cells(
        ["fsdp2", "tp2", "tp2 / seq", "fsdp2 tp2 / seq / loss-parallel", "pp2 tp2 / 1f1b mb4", "pp4 dp2 / gpipe mb4"],
        {"tp2", "pp4 dp2 / gpipe mb4"},
    ),
)
def test_gpt_names(world, plan: str) -> None:
    check(world, plan, "gpt", "fp64")
