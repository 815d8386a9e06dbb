"""Numbers that the step of a user's optimizer reads off sharded parameters, by which it goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.errors import ModelError
from shardwise.testing import World

SEQ, VOCAB = 8, 32


class ByTrust(torch.optim.Optimizer):
    """LARS by hand: a step of each tensor is as long as it is; one of all tensors (as Prodigy's) grows with them."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        weights = [p for p in group["params"] if p.grad is not None]
        of_all = sum((p * p.grad).sum().item() for p in weights)
        for p in weights:
            length = float(p.norm())
            if p.grad.norm() > 1e-8:
                p.add_(p.grad, alpha=-group["lr"] * (length + abs(of_all)) / p.grad.norm().item())


def trained(text: str) -> list[float]:
    plan = sw.Plan.parse(f"{text} / fp64")
    config = sw.DecoderConfig(vocab_size=VOCAB, dim=16, num_layers=2, num_heads=2, num_kv_heads=2)
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(lambda: sw.Decoder(config), plan, mesh)
        step = sw.make_step(
            sw.TrainState(placed, ByTrust(placed.parameters())),
            lambda logits, batch: sw.token_cross_entropy(logits, batch["labels"]),
        )
        ids = torch.arange(4 * SEQ).view(4, SEQ) * 7 % VOCAB
        rows = ids[mesh.batch.rank :: mesh.batch.size]
        losses = [step({"input_ids": rows, "labels": rows.roll(-1, 1)}).loss for _ in range(3)]
        return [*losses, *(float(full(p.detach()).square().sum()) for p in placed.named_parameters().values())]


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@pytest.mark.parametrize("text", ["dp2", "fsdp2", "fsdp2 zero1", "tp2", "fsdp2 tp2"])
def test_each_rank_steps_by_the_number_of_the_whole(world: World, text: str) -> None:
    """Each rank stepped by that of its own part, without a word."""
    (expected,) = world(1, trained, "dp1")
    assert (
        world(sw.Plan.parse(text).world, trained, text)
        == [pytest.approx(expected, rel=1e-11)] * sw.Plan.parse(text).world
    )


def refused(text: str) -> str:
    with pytest.raises(ModelError) as found:
        trained(text)
    return str(found.value)


def test_a_number_of_one_stage_is_refused(world: World) -> None:
    for said in world(4, refused, "pp2 fsdp2 / mb2"):
        assert "in a pipeline is of one stage" in said
