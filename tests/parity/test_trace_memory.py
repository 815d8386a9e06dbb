"""The traced step against the real one: the same peaks of live tensor bytes, to the byte, and the same collectives."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.diagnose.tracing.estimate import estimate_by_trace
from shardwise.diagnose.tracing.ledger import KINDS
from shardwise.diagnose.tracing.step import StepTrace, measure_step, trace_step
from shardwise.diagnose.tracing.without_values import Training, token_loss
from shardwise.errors import ModelError
from shardwise.model.spec import ModelSpec
from shardwise.models.decoder import Decoder, DecoderConfig
from shardwise.models.gpt import GPT, GPTConfig
from shardwise.models.moe import MoEConfig, MoEDecoder, MoEOutput, Router
from shardwise.models.presets import build
from shardwise.plan.plan import Plan
from shardwise.plan.workload import Workload

VOCAB, SEQ, ROWS = 96, 16, 32
SIZES: dict[str, Any] = {"vocab_size": VOCAB, "dim": 32, "num_heads": 4, "ffn_dim": 48, "max_seq_len": SEQ}


class EvenRouter(Router):
    """Experts in turn, in place of the preferred ones: as many tokens for each, which is what a trace assumes."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        chosen, weights, losses = super().forward(x)
        turn = torch.arange(chosen.numel(), device=x.device) % self.num_experts
        return turn.view_as(chosen), weights, losses


def even_experts(num_layers: int) -> nn.Module:
    model = MoEDecoder(MoEConfig(**SIZES, num_layers=num_layers, num_kv_heads=2, num_experts=4, experts_per_token=2))
    for layer in model.layers:
        layer.moe.router.__class__ = EvenRouter
    return model


def decoder(**changes: Any) -> nn.Module:
    return Decoder(DecoderConfig(**SIZES | {"num_layers": 4, "num_kv_heads": 2} | changes))


MODELS = {
    "decoder": decoder,
    "short": functools.partial(decoder, num_layers=2),
    "tied": functools.partial(decoder, tie_embeddings=True, qkv_bias=True, qk_norm=True),
    "gpt": functools.partial(GPT, GPTConfig(**SIZES, num_layers=4)),
    "moe": functools.partial(even_experts, 4),
    "uneven": functools.partial(decoder, num_layers=2, dim=40, ffn_dim=56, vocab_size=98),
    "short-moe": functools.partial(even_experts, 2),
}
FAST = [
    ("dp2", "short"),
    ("fsdp2 / recompute=ops", "short"),
    ("fsdp2 tp2 / seq / mb2", "short"),
    ("fsdp2 ep2", "short-moe"),
    ("cp2 / offload=activations", "short"),
    ("fsdp3 / zero2 / mb2", "uneven"),  # shards of two sizes, padded
    ("fsdp3", "uneven"),
    ("fsdp8", "decoder"),  # its first forward is at its most while it looks at written weights
]
FAST_PIPELINES = [("pp2 / 1f1b mb4", "short")]
PLANS = [
    "dp1",
    "dp1 / mb4",
    "dp1 / recompute=blocks",
    "dp4 / mb2",
    "dp2 / static-graph",
    "dp2 / find-unused",
    "dp2 / bucket=0.01",
    "dp2 / bf16",
    "dp2 / recompute=blocks",
    "fsdp2 / zero1",
    "fsdp2 / zero2",
    "fsdp2",
    "fsdp2 / bf16",
    "fsdp4 / zero1 / mb2",
    "fsdp4 / zero2 / mb2",
    "fsdp4 / mb2",
    "fsdp8",
    "dp2 fsdp2",
    "dp2 fsdp2 / zero2 / mb2",
    "dp2 fsdp4 / mb2",
    "fsdp2 / recompute=every2",
    "fsdp2 / recompute=50%",
    "fsdp2 / prefetch=2",
    "fsdp2 / offload=state",
    "fsdp2 / offload=activations",
    "tp2",
    "tp2 / seq",
    "tp2 / loss-parallel",
    "dp2 tp2",
    "fsdp2 tp2",
    "fsdp2 tp2 / zero2 / seq / loss-parallel",
    "fsdp2 tp2 / seq / recompute=blocks",
    "dp2 fsdp2 tp2 / seq",
    "cp2",
    "cp4 / context=ulysses",
    "fsdp2 cp2 / mb2",
    "fsdp2 tp2 cp2 / seq",
]
PIPELINES = [
    "pp2 / gpipe mb4",
    "pp2 / 1f1b mb4",
    "pp4 / 1f1b mb4",
    "pp2 / interleaved mb4",
    "pp2 / zero-bubble mb4",
    "pp2 / zero-bubble-v mb4",
    "pp2 dp2 / 1f1b mb4",
    "pp2 fsdp2 / zero2 / interleaved mb4",
    "pp2 tp2 / 1f1b mb4 / seq",
    "pp2 fsdp2 tp2 / 1f1b mb4",
    "pp2 / 1f1b mb4 / recompute=blocks",
]
EXPERT_PLANS = ["fsdp2 ep2", "fsdp4 ep2 / mb2", "dp2 fsdp2 ep2 / zero1", "tp2 ep2 / seq", "pp2 fsdp2 ep2 / 1f1b mb4"]


def soak() -> list[Any]:
    wide = [(plan, model) for model in ("decoder", "tied", "gpt", "moe") for plan in (*PLANS, *PIPELINES)]
    wide += [(plan, "moe") for plan in EXPERT_PLANS]
    return [pytest.param(*cell, id=" | ".join(cell), marks=pytest.mark.soak) for cell in wide]


def batch(mesh: sw.Mesh) -> dict[str, torch.Tensor]:
    shape = (ROWS // mesh.batch.size, SEQ)
    return {"input_ids": torch.randint(0, VOCAB, shape), "labels": torch.randint(0, VOCAB, shape)}


def moe_loss(output: MoEOutput, batch: dict[str, torch.Tensor]) -> sw.Loss:
    return sw.token_cross_entropy(output.logits, batch["labels"])


def training(model: str) -> Training:
    return Training(model=MODELS[model], batch=batch, loss=moe_loss if "moe" in model else token_loss)


def measured(text: str, model: str) -> StepTrace:
    plan = Plan.parse(text)
    with sw.open_mesh(plan) as mesh:
        return measure_step(training(model), plan, mesh)


def both(world: Any, text: str, model: str) -> list[tuple[StepTrace, StepTrace]]:
    """(traced, measured) of the first and the last rank."""
    plan = Plan.parse(text)
    real = world(plan.world, measured, text, model, timeout_s=300)
    return [(trace_step(training(model), plan, rank=r), real[r]) for r in sorted({0, plan.world - 1})]


def check_equal(traced: StepTrace, real: StepTrace) -> None:
    assert (traced.rank, traced.resting) == (real.rank, real.resting)
    for mine, theirs in ((traced.first, real.first), (traced.later, real.later)):
        for phase in ("forward", "backward"):
            assert mine.by_phase[phase] == theirs.by_phase[phase], phase
        assert mine.num_bytes == theirs.num_bytes
        # the list of norms of all gradients, 4 bytes each, is one storage on memory and many on shapes
        assert abs(mine.by_phase["update"] - theirs.by_phase["update"]) < 1024
        assert set(mine.held) == set(KINDS) and sum(mine.held.values()) == mine.num_bytes
    assert traced.later.collectives == real.later.collectives


@pytest.mark.share(8)
@pytest.mark.parametrize(("plan", "model"), FAST)
def test_equal_to_the_byte(world: Any, plan: str, model: str) -> None:
    for traced, real in both(world, plan, model):
        check_equal(traced, real)


@pytest.mark.parametrize(("plan", "model"), FAST_PIPELINES)
def test_pipelines(world: Any, plan: str, model: str) -> None:
    for traced, real in both(world, plan, model):
        check_close(traced, real)


def check_close(traced: StepTrace, real: StepTrace) -> None:
    assert abs(traced.peak - real.peak) <= 0.02 * real.peak, (traced.peak, real.peak)
    assert traced.later.collectives == real.later.collectives


def test_a_value_that_is_not_there_is_refused() -> None:
    spoilt = replace(training("short"), loss=lambda output, batch: output[batch["labels"] > 3].square().sum())
    with pytest.raises(ModelError, match="depends on the values of its input"):
        trace_step(spoilt, Plan.parse("fsdp2"))


def test_negative_control_a_forgotten_shard_is_seen(world: Any) -> None:
    """The trace of another plan is not equal: what is compared does depend on the layout."""
    real = world(2, measured, "fsdp2", "short")[0]
    assert trace_step(training("short"), Plan.parse("fsdp2 / zero2")).peak != real.peak


@pytest.mark.soak  # in every run: tests/fake/test_trace_module.py, the same of modules
def test_few_layers_extrapolate_to_many() -> None:
    spec = ModelSpec(**SIZES, num_layers=5, num_kv_heads=2)
    plan, work = Plan.parse("fsdp4 / mb2"), Workload(seq_len=SEQ, global_batch=8)
    guess = estimate_by_trace(spec, plan, work)
    whole = Training(model=build(spec), batch=even_batch)
    true = trace_step(whole, plan)
    assert (guess.layers, guess.traced, guess.num_params) == (5, (3, 4), spec.num_params)
    assert guess.peak == true.peak
    sent = sum(times * issued.num_bytes for issued, times in true.later.collectives.items())
    assert sum(traffic.num_bytes for traffic in guess.traffic.values()) == sent


def even_batch(mesh: sw.Mesh) -> dict[str, torch.Tensor]:
    return {key: torch.zeros(8 // mesh.batch.size, SEQ, dtype=torch.long) for key in ("input_ids", "labels")}


@pytest.mark.parametrize(("plan", "model"), soak())
def test_every_plan(world: Any, plan: str, model: str) -> None:
    for traced, real in both(world, plan, model):
        (check_close if Plan.parse(plan).axes.pp > 1 else check_equal)(traced, real)
