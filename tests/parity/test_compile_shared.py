"""Blocks that are alike are compiled once, recomputed or not: torch gives up on the ninth version of one function."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch._dynamo.utils import counters

import shardwise as sw
from shardwise.models.decoder import Decoder, DecoderConfig

SIZES = DecoderConfig(vocab_size=32, dim=16, num_layers=10, num_heads=2, num_kv_heads=2, ffn_dim=32, max_seq_len=8)


def graphs(text: str) -> int:
    """In a rank: versions that two steps compile."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dynamo and inductor trip over warnings of torch's own
        plan = sw.Plan.parse(text)
        with sw.open_mesh(plan, device="cpu") as mesh:
            placed = sw.apply(lambda: Decoder(SIZES), plan, mesh, seed=0)
            state = sw.TrainState(placed, sw.adamw(placed, lr=1e-3))
            step = sw.make_step(state, lambda logits, batch: sw.token_cross_entropy(logits, batch["labels"]))
            ids = torch.zeros((1, 8), dtype=torch.long)
            for _ in range(2):
                step({"input_ids": ids, "labels": ids})
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.soak
@pytest.mark.parametrize("plan", ["compile / recompute=blocks", "compile / recompute=ops"])
def test_ten_blocks_are_one_compilation(world, plan: str) -> None:
    assert world(1, graphs, plan, timeout_s=100) == [1]
