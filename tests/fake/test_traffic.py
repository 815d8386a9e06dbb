"""The closed form of a step's messages against the traced step: equal in kind, axis, bytes and number."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from shardwise.diagnose.tracing.estimate import training_of
from shardwise.diagnose.tracing.step import trace_step
from shardwise.errors import ModelError, PlanError
from shardwise.plan.plan import Plan
from shardwise.plan.traffic import collectives_of
from shardwise.plan.workload import Workload
from tests.fake.references import references

# nothing here divides evenly that need not: shards are padded, parts of a sequence differ
MODELS = references(vocab_size=390, dim=36, num_heads=6, ffn_dim=54, max_seq_len=48, num_layers=4)
MODELS |= {
    "short": replace(MODELS["llama"], num_layers=2),
    "tied-gpt": replace(MODELS["gpt"], tie_embeddings=True),
    "short-moe": replace(MODELS["moe"], num_layers=2),
}
WORK = Workload(seq_len=46, global_batch=24)

FAST = [
    ("dp2 / bucket=0.01", "short"),
    ("dp2 / fp64", "short"),
    ("fsdp2 / bf16-pure", "short"),
    ("dp2 fsdp2 / mb3", "short"),
    ("fsdp2 tp2 / seq / bf16 / mb2", "short"),
    ("tp2 / loss-parallel / recompute=blocks", "short"),
    ("cp3", "short"),
    ("fsdp3 ep3", "short-moe"),
    ("fsdp12", "short-moe"),  # more shards than experts: inside of experts, rows of one matrix and columns of others
    ("fsdp12 ep6 / mb2", "short-moe"),
    ("tp2 / recompute=ops", "short-moe"),
    ("pp2 fsdp2 / 1f1b mb4", "short"),
]
DATA = [
    "dp2",
    "dp2 / bucket=0.01",
    "dp2 / static-graph",
    "dp2 / find-unused / bucket=0.02",
    "dp2 / bf16-pure",
    "dp2 / fp64",
    "dp2 / bf16 / mb2",
    "fsdp4",
    "fsdp4 / zero1 / bf16 / mb2",
    "fsdp4 / zero2 / mb2",
    "fsdp2 / bf16-pure / mb2",
    "fsdp2 / fp16",
    "fsdp2 / reduce=bf16 / bf16",
    "fsdp2 / reshard=false / mb2",
    "fsdp2 / offload=state",
    "fsdp2 / offload=activations",
    "dp2 fsdp4 / mb3",
]
MODEL = [
    "tp2",
    "tp2 / recompute=blocks",
    "tp2 / recompute=ops",
    "tp2 / seq / mb2",
    "tp2 / seq / loss-parallel",
    "tp2 / seq / recompute=blocks",
    "tp2 / seq / recompute=ops",
    "dp2 tp2 / bf16",
    "fsdp2 tp2 / seq / mb2",
    "fsdp2 tp2 / zero1 / seq / mb2 / bf16",
    "fsdp2 tp2 / seq / recompute=50%",
    "cp3 / recompute=every2",
    "cp4 / context=gather",
    "cp2 / context=ulysses / bf16",
    "cp3 / balance=contiguous / bf16",
    "tp2 cp3",
]
PIPELINES = [
    "pp2 / gpipe mb4",
    "pp4 tp2 / 1f1b mb8 / seq",
    "pp2 tp2 / 1f1b mb4",
    "pp2 tp2 / seq / mb4",
    "pp2 cp2 / 1f1b mb4",
    "pp2 fsdp2 / 1f1b mb4",
    "pp2 fsdp2 / reshard=false / 1f1b mb4",
    "pp2 fsdp2 / interleaved mb4 / bf16",
    "pp2 fsdp2 / zero2 / zero-bubble mb4",
    "pp2 fsdp2 / zero2 / zero-bubble-v mb4",
    "pp2 dp2 fsdp2 / looped-bfs mb2",
    "pp2 / dualpipe-v mb4",
]
EXPERTS = [
    "fsdp2 tp2 ep2 / recompute=blocks",
    "fsdp3 ep3",
    "dp2 fsdp4 ep2",
    "fsdp8 ep2 / zero1 / mb3",
    "fsdp2 cp3 / context=ulysses",
    "fsdp2 cp3 ep6",
    "fsdp8",
    "fsdp12 / bf16",
    "fsdp12 ep6 / zero2 / mb2",
    "dp2 fsdp12 ep6",
    "fsdp6 tp2 ep6 / seq",
    "fsdp12 tp2",
    "pp2 fsdp12 ep6 / 1f1b mb2",
    "pp2 fsdp2 tp2 ep2 / 1f1b mb4 / seq",
    "pp2 fsdp2 ep2 / interleaved mb4 / bf16",
]


def soak() -> list[Any]:
    cells = [
        (plan, model) for model in ("llama", "tied", "gpt", "tied-gpt", "moe") for plan in DATA + MODEL + PIPELINES
    ]
    cells += [(plan, "moe") for plan in EXPERTS]
    return [pytest.param(*cell, id=" | ".join(cell), marks=pytest.mark.soak) for cell in cells]


@cache
def traced(text: str, model: str, rank: int) -> dict[Any, int]:
    training = training_of(MODELS[model], WORK)
    return dict(trace_step(training, Plan.parse(text), rank=rank).later.collectives)


def check_equal(text: str, model: str, ranks: set[int]) -> None:
    for rank in sorted(ranks):
        mine = collectives_of(MODELS[model], Plan.parse(text), WORK, rank=rank, is_cpu=True)
        theirs = traced(text, model, rank)
        differing = {key for key in {*mine, *theirs} if mine.get(key) != theirs.get(key)}
        assert mine == theirs, [(tuple(key), mine.get(key), theirs.get(key)) for key in sorted(differing, key=str)]


@pytest.mark.share(8)
@pytest.mark.parametrize(("plan", "model"), FAST)
def test_closed_form_equals_the_trace(plan: str, model: str) -> None:
    check_equal(plan, model, {Plan.parse(plan).world - 1})


@pytest.mark.parametrize(("plan", "model"), soak())
def test_every_composition(plan: str, model: str) -> None:
    world = Plan.parse(plan).world
    check_equal(plan, model, {0, world // 2, world - 1})


def test_negative_control_another_plan_sends_something_else() -> None:
    other = collectives_of(MODELS["short"], Plan.parse("dp2 fsdp2 / zero2 / mb3"), WORK, rank=3, is_cpu=True)
    assert other != traced("dp2 fsdp2 / mb3", "short", 3)


def test_a_batch_that_is_not_divided_is_refused() -> None:
    with pytest.raises(PlanError, match="do not divide"):
        collectives_of(MODELS["short"], Plan.parse("fsdp5"), WORK)


def test_a_model_with_other_parts_is_refused() -> None:
    with pytest.raises(ModelError, match="kv_rank"):
        collectives_of(replace(MODELS["moe"], kv_rank=8), Plan.parse("fsdp8"), WORK)


def test_one_rank_sends_nothing() -> None:
    assert collectives_of(MODELS["moe"], Plan.parse("dp1 / bf16 / mb2"), WORK) == {}
