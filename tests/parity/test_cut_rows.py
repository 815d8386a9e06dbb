"""Micro-batches that were halved because memory ran out: under every plan the step of one process, masks included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

import shardwise as sw
from shardwise.parallel.stages.stage import Feed
from shardwise.train import step
from shardwise.train.options import StepOptions
from tests.parity import grid, moe_models, test_experts, test_random

TOLERANCE = 1e-11
BATCH = 12
"""In four data ranks: three rows, of which four pieces are three rows and one of padding."""
PLANS = {
    "decoder": [
        "fsdp2 tp2",
        "dp2 fsdp2 / zero2 / mb2",
        "fsdp2 / zero1",
        "fsdp2 cp2",
        "pp2 / gpipe mb2",
        "pp2 fsdp2 / 1f1b mb2",
        "pp2 / zero-bubble-v mb4",
    ],
    "experts": ["fsdp2 ep2", "pp2 fsdp2 ep2 / 1f1b mb2", "tp2 ep2 / seq"],
    "masks": ["pp2 fsdp2 / 1f1b mb2", "fsdp2 tp2 / seq / recompute=blocks", "pp2 / zero-bubble mb4"],
}
ALWAYS = {"fsdp2 / zero1", "fsdp2 ep2", "pp2 / gpipe mb2", "pp2 / zero-bubble mb4"}
"""In two processes; the others in `make soak`."""


def cut(run: Callable[..., Any], *args: Any) -> Any:
    """`run` of a state whose micro-batches were halved twice before its first step."""

    def begin(state: sw.TrainState, options: StepOptions) -> list[dict[str, Any]]:
        state.halvings = 2
        return []

    with mock.patch.object(step, "go_on", begin):
        return run(*args)


CELLS = [
    pytest.param(model, plan, marks=() if plan in ALWAYS else pytest.mark.soak, id=f"{model}: {plan}")
    for model, plans in PLANS.items()
    for plan in plans
]


@pytest.mark.share(4)
@pytest.mark.parametrize(("model", "plan"), CELLS)
def test_a_step_of_pieces_is_that_of_one_process(world: Any, model: str, plan: str) -> None:
    ranks, text = sw.Plan.parse(plan).world, f"{plan} / fp64"
    if model == "decoder":
        truth = world(1, grid.reference, model, "fp64", BATCH)[0]
        worst = grid.differences(world(ranks, cut, grid.run_plan, text, model, BATCH, timeout_s=100), truth)
    elif model == "experts":
        expected = world(1, moe_models.reference, "bias", "fp64", BATCH)[0]
        found = world(ranks, cut, moe_models.run_plan, text, "bias", BATCH, timeout_s=100)
        worst = test_experts.worst_of(found, expected)
    else:
        worst = grid.differences(world(ranks, cut, test_random.train, plan, timeout_s=100), test_random.truth(world))
    assert max(worst.values()) <= TOLERANCE, worst


def misnumbered(text: str) -> grid.Trace:
    """Each flush draws the masks of the first one."""

    def number(feed: Feed, index: int) -> int:
        return index * feed.stride

    with mock.patch.object(Feed, "number", number):
        return cut(test_random.train, text)


def test_a_flush_that_takes_itself_for_another_is_seen(world: Any) -> None:
    worst = grid.differences(world(2, misnumbered, "pp2 / gpipe mb2"), test_random.truth(world))
    assert worst["grad"] > 1e-3, worst
