"""A model that returns a bare tuple trains as the one that returns the first of its elements, which the loss reads."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import shardwise as sw
from tests.parity import grid

PLANS = [
    "dp2 / mb2",
    "fsdp2 / recompute=blocks",
    "tp2 / seq",
    "tp2 / loss-parallel",
    "cp2",
    "pp2 / 1f1b mb4",
    "pp2 fsdp2 / zero2 / zero-bubble-v mb4",
]


class Pair(sw.Decoder):
    """Logits, and what no loss reads: their mean, and ids that have no gradient."""

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> Any:
        logits = super().forward(input_ids, position_ids=position_ids)
        return logits, (logits.mean(-1), input_ids)


def first_loss(output: Any, batch: dict[str, torch.Tensor]) -> sw.Loss:
    assert type(output) is tuple and type(output[1]) is tuple
    return sw.token_cross_entropy(output[0], batch["labels"])


def run(plan: str) -> grid.Trace:
    config = grid.MODELS["decoder"].args[0]
    grid.MODELS["pair"] = functools.partial(Pair, config)
    grid.loss_fn = first_loss
    return grid.run_plan(f"{plan} / fp64", "pair", 16)


@functools.cache
def truth(world: Any) -> grid.Trace:
    return world(1, grid.reference, "decoder", "fp64", 16)[0]


@pytest.mark.share(3)
@pytest.mark.parametrize("plan", PLANS)
def test_a_bare_tuple(world, plan: str) -> None:
    worst = grid.differences(world(sw.Plan.parse(plan).world, run, plan), truth(world))
    assert max(worst.values()) <= 1e-11, worst
