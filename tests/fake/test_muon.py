"""Muon's update as the planner counts it against the real one: messages, memory, operations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from shardwise.diagnose.tracing.estimate import training_of
from shardwise.diagnose.tracing.step import trace_step
from shardwise.model.profile import profile_of
from shardwise.model.spec import ModelSpec
from shardwise.models.presets import build
from shardwise.plan.memory import estimate_memory
from shardwise.plan.plan import Plan
from shardwise.plan.stack import load_stack
from shardwise.plan.traffic import collectives_of
from shardwise.plan.updating import NOT_MUON, matrices
from shardwise.plan.workload import Workload
from shardwise.train.updates.groups import matches
from shardwise.train.updates.update_rules import Muon
from tests.fake.references import references

SIZES: dict[str, Any] = {
    "vocab_size": 390,
    "dim": 36,
    "num_heads": 6,
    "ffn_dim": 54,
    "max_seq_len": 48,
    "num_layers": 4,
}
MODELS = references(**SIZES)
MODELS["llama"] = replace(MODELS["llama"], num_layers=2)
WORK = Workload(seq_len=46, global_batch=24, optimizer="muon")
FAST = [("fsdp4 / mb2", "llama"), ("fsdp2 tp2", "llama"), ("dp2 / bf16", "llama"), ("fsdp2 cp3", "llama")]
FAST += [("dp2", "llama"), ("dp2 fsdp2 tp2", "moe"), ("tp2", "moe"), ("fsdp12 tp2", "llama")]
PLANS = ["dp2", "tp2 / seq", "dp2 tp2", "fsdp2 / bf16-pure", "fsdp2 / fp64", "dp2 fsdp2", "fsdp4 / zero1 / mb2"]
PLANS += ["pp2 fsdp2 / 1f1b mb4", "pp2 tp2 / 1f1b mb4", "fsdp2 tp2 cp3"]
MANY = [(plan, model) for plan in PLANS for model in ("tied", "gpt", "moe")] + [("fsdp3 ep3", "moe")]


def check_messages(text: str, model: str, ranks: set[int]) -> None:
    plan, spec = Plan.parse(text), MODELS[model]
    for rank in sorted(ranks):
        mine = collectives_of(spec, plan, WORK, rank=rank, is_cpu=True)
        assert mine == dict(trace_step(training_of(spec, WORK), plan, rank=rank).later.collectives)


@pytest.mark.share(4)
@pytest.mark.parametrize(("plan", "model"), FAST)
def test_messages_equal_the_trace(plan: str, model: str) -> None:
    check_messages(plan, model, {Plan.parse(plan).world - 1})


@pytest.mark.parametrize(("plan", "model"), [pytest.param(*cell, marks=pytest.mark.soak) for cell in MANY])
def test_messages_of_every_composition(plan: str, model: str) -> None:
    check_messages(plan, model, {0, Plan.parse(plan).world - 1})


def test_a_batch_has_a_matrix_for_each_rank() -> None:
    """14 matrices over 4 ranks go there and back in 4 batches; of two replicas each works on every other batch."""
    for text, sent in (("fsdp4 / mb2", {"all-to-all": 8}), ("dp2 fsdp4", {"all-to-all": 4, "broadcast": 4})):
        plan, spec = Plan.parse(text), MODELS["llama"]
        found = collectives_of(spec, plan, WORK)
        adam = collectives_of(spec, plan, replace(WORK, optimizer="adamw"))
        more = {each: times - adam.get(each, 0) for each, times in found.items() if times != adam.get(each, 0)}
        assert {k: sum(n for each, n in more.items() if each.kind == k) for k in {each.kind for each in more}} == sent


WIDE: dict[str, Any] = SIZES | {"vocab_size": 512, "dim": 128, "num_heads": 4, "ffn_dim": 352}


@pytest.mark.share(2)
@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("dp1", "llama"),
        ("fsdp4", "llama"),
        ("fsdp2 tp2", "llama"),
        pytest.param("fsdp2 ep2", "moe", marks=pytest.mark.soak),
        pytest.param("fsdp2 / bf16", "gpt", marks=pytest.mark.soak),
        pytest.param("dp2", "gpt", marks=pytest.mark.soak),
    ],
)
def test_the_update_needs_what_the_trace_says(text: str, kind: str) -> None:
    more: dict[str, Any] = {} if kind == "gpt" else {"num_kv_heads": 2}
    more |= {"kind": kind} if kind != "llama" else {}
    more |= {"num_experts": 4, "experts_per_token": 2} if kind == "moe" else {}
    spec, plan = ModelSpec(**WIDE, **more), Plan.parse(text)
    work = Workload(seq_len=8, global_batch=plan.axes.data, optimizer="muon")
    peaks = trace_step(training_of(spec, work), plan).later.by_phase
    stack = load_stack("shardwise-cpu")
    closed = estimate_memory(profile_of(spec), plan, work, stack=stack).peaks
    assert closed["update"] == pytest.approx(peaks["update"], rel=0.03)
    plain = estimate_memory(profile_of(spec), plan, replace(work, optimizer="sgd-momentum"), stack=stack)
    assert plain.peaks["update"] < 0.9 * peaks["update"], "without the matrices that come and go"


@pytest.mark.parametrize("model", ["llama", "gpt", "moe"])
def test_operations_are_those_of_the_real_iterations(model: str) -> None:
    module, spec = build(MODELS[model])(), MODELS[model]
    chosen = [
        p for name, p in module.named_parameters() if p.dim() == 2 and not any(matches(name, word) for word in NOT_MUON)
    ]
    for parameter in chosen:
        parameter.grad = torch.ones_like(parameter)
    with FlopCounterMode(display=False) as counter:
        Muon(chosen, lr=1e-3).step()
    told = sum(matrix.flops for block in profile_of(spec).blocks for matrix in matrices(block))
    assert told == counter.get_total_flops()
