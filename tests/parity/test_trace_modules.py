"""Modules that are no reference model: their traced step against the real one, to the byte."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.diagnose.tracing.estimate import OPTIMIZERS
from shardwise.diagnose.tracing.module import training_of_module
from shardwise.diagnose.tracing.step import StepTrace, measure_step, trace_step
from shardwise.plan.plan import Plan
from shardwise.plan.workload import Workload
from tests.brought import Given, Unused
from tests.modules import factory, hugging_face
from tests.parity.test_trace_memory import check_close, check_equal

FAST = [("gpt2", "fsdp2 / bf16"), ("pictures", "dp2")]
SOAK = [
    *((model, plan) for model in ("llama", "qwen3", "window") for plan in ("dp2", "fsdp2 / bf16", "tp2")),
    ("bert", "fsdp2 / mb2"),
    ("two", "fsdp2 / recompute=blocks"),
    ("llama", "pp2 / 1f1b mb2"),
    ("qwen3_moe", "dp2 / bf16"),
    ("qwen3_moe", "fsdp2"),
    ("unused", "dp2 / find-unused"),
    ("unused", "dp2 / static-graph"),
    ("unused", "dp2 / find-unused / mb2"),
]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def made(model: str) -> Any:
    if own := {"unused": Unused, "given": Given}.get(model):
        return own
    return hugging_face(model, **EXPERTS) if model == "qwen3_moe" else factory(model)


def training(model: str, optimizer: str = "adamw") -> Any:
    seq = {"pictures": 3, "residual": 3}.get(model, 64)
    return training_of_module(made(model), Workload(seq_len=seq, global_batch=8, optimizer=optimizer))


def measured(model: str, text: str, optimizer: str = "adamw") -> StepTrace:
    torch.manual_seed(0)
    plan = Plan.parse(text)
    with sw.open_mesh(plan) as mesh:
        return measure_step(training(model, optimizer), plan, mesh)


@pytest.mark.share(8)
@pytest.mark.parametrize(("model", "plan"), [*FAST, *(pytest.param(*cell, marks=pytest.mark.soak) for cell in SOAK)])
def test_equal_to_the_byte(world: Any, model: str, plan: str) -> None:
    parsed = Plan.parse(plan)
    real = world(parsed.world, partial(measured, model, plan), timeout_s=300)
    for rank in {0, parsed.world - 1}:
        traced = trace_step(training(model), parsed, rank=rank)
        (check_close if parsed.axes.pp > 1 else check_equal)(traced, real[rank])


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("residual", "dp1 / bf16-pure"),  # batch norms keep moments in fp32, of their running sums
        ("given", "dp1"),  # values that a constructor is given are kept, beside the buffer that has them
    ],
)
def test_buffers_and_what_is_made_of_them_are_equal_too(world: Any, model: str, plan: str) -> None:
    test_equal_to_the_byte(world, model, plan)


def test_a_peak_in_a_reduction_is_equal_too(world: Any) -> None:
    """In which gloo has a copy of all that it sums."""
    real = world(2, partial(measured, "tables", "fsdp2"), timeout_s=300)
    assert trace_step(training("tables"), Plan.parse("fsdp2")).peak == real[0].peak


@pytest.mark.parametrize(
    ("plan", "optimizer"),
    [pytest.param(*cell, marks=pytest.mark.soak) for cell in product(("fsdp2", "dp2 / bf16"), OPTIMIZERS)],
)
def test_other_optimizers_equal_to_the_byte(world: Any, plan: str, optimizer: str) -> None:
    parsed = Plan.parse(plan)
    real = world(parsed.world, partial(measured, "llama", plan, optimizer), timeout_s=300)
    check_equal(trace_step(training("llama", optimizer), parsed), real[0])
