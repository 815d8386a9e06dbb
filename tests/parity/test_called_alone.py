"""What every rank must call, called by one alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.errors import UsageError
from shardwise.testing import World


def model() -> nn.Module:
    return sw.GPT(sw.GPTConfig(vocab_size=8, dim=8, num_layers=1, num_heads=2, max_seq_len=8))


def left(text: str, call: str) -> str:
    """Rank 0 looks at the model, the other one trains on; what ends that."""
    plan, ids = sw.Plan.parse(text), torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises((UsageError, RuntimeError)) as caught, sw.open_mesh(plan, timeout_s=0.6) as mesh:
        placed = sw.apply(model, plan, mesh, seed=3)
        step: Any = sw.make_step(
            sw.TrainState(placed, sw.sgd(placed, lr=0.1)), lambda output, _: output.square().mean()
        )
        step(ids)
        if mesh.is_first and call == "evaluate":
            sw.evaluate(placed, lambda output, _: output.square().mean(), [ids])
        if mesh.is_first and call == "generate":
            sw.generate(placed, ids, 2)
        step(ids)
        dist.barrier()
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(("text", "call"), [("dp2", "evaluate"), ("fsdp2", "generate")])
def test_a_rank_that_looks_at_the_model_alone_says_so(world: World, text: str, call: str) -> None:
    """Its messages were taken for those of a step: gloo ended the process, or one waited for ever."""
    looks, trains = world(2, left, text, call)
    assert trains.startswith("RuntimeError")
    assert looks.startswith(
        f"UsageError: {call}(): rank 0 has waited 1 s for the other ranks, and not all of them came"
    )
