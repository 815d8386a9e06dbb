"""A mixture of experts of `transformers`, which knows nothing of plans, trains under `ep` as in one process.

In fp32, whatever the type of the model: its routers compute in it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import MixtralConfig, MixtralForCausalLM

import shardwise as sw
from shardwise.parallel.init import init_model
from tests.parity import grid

STEPS, ROWS = 2, 8


def mixtral() -> nn.Module:
    sizes = MixtralConfig(
        vocab_size=grid.VOCAB,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=grid.SEQ,
        initializer_range=0.2,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return MixtralForCausalLM(sizes)


def loss_fn(output: Any, batch: dict[str, torch.Tensor]) -> sw.Loss:
    return sw.token_cross_entropy(output.logits, batch["labels"])


def rows(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    data, here = grid.Rows(), slice(step * ROWS, (step + 1) * ROWS)
    return data.ids[here, :-1], data.labels[here]


def reference() -> dict[str, torch.Tensor]:
    module = init_model(mixtral, seed=grid.SEED, dtype=torch.float32)
    optimizer = torch.optim.SGD(module.parameters(), lr=grid.LR, momentum=0.9)
    for step in range(STEPS):
        ids, labels = rows(step)
        logits = module(input_ids=ids).logits.flatten(0, 1)
        loss = F.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum") / (labels != -100).sum()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), grid.CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def worst_parameter(text: str) -> float:
    """Largest relative difference of a parameter after two steps."""
    plan = sw.Plan.parse(f"{text} / fp32")
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(mixtral, plan, mesh, seed=grid.SEED)
        step = sw.make_step(sw.TrainState(placed, sw.sgd(placed, lr=grid.LR, momentum=0.9)), loss_fn, clip=grid.CLIP)
        for number in range(STEPS):
            ids, labels = (part.chunk(mesh.batch.size)[mesh.batch.rank] for part in rows(number))
            step({"input_ids": ids, "labels": labels})
        mine = {name: grid.whole(parameter) for name, parameter in placed.named_parameters().items()}
    truth = reference()
    assert mine.keys() == truth.keys()
    return max(float((mine[name] - whole).norm() / whole.norm()) for name, whole in truth.items())


@pytest.mark.parametrize("plan", ["fsdp2 ep2"])
def test_mixtral(world: Any, plan: str) -> None:
    assert max(world(2, worst_parameter, plan)) < 1e-6
