"""Modules that are no reference model: the closed form, read off their forward, against the trace of their step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwise.diagnose.read_module import read_module
from shardwise.diagnose.trace_module import estimate_module_by_trace
from shardwise.errors import ModelError, PlanError
from shardwise.plan.memory import estimate_memory
from shardwise.plan.plan import Plan
from shardwise.plan.stack import stack_on
from shardwise.plan.workload import Workload
from tests.modules import TwoInputs, factory

BOUND = 0.03
SEQ = {"pictures": 3, "two": 64}
"""What counts as the tokens of their examples; of the others 64."""
FAST = [
    ("llama", "fsdp2 / bf16"),
    ("gpt2", "dp2 / bf16"),
    ("qwen3", "fsdp2 / mb2"),
    ("window", "fsdp2 / zero2 / bf16"),
    ("gemma2", "fsdp2"),
    ("two", "dp2"),
    ("two", "pp2 / 1f1b mb2"),
]
PLANS = ["dp2", "dp2 / bf16", "fsdp2 / bf16", "fsdp4 / mb2", "dp2 fsdp2 / zero2 / mb2 / bf16", "fsdp2 / zero1 / bf16"]
MODELS = ["llama", "gpt2", "qwen3", "gemma2", "bert", "phi", "window"]


def cells() -> list[Any]:
    rest = [(model, plan) for model in MODELS for plan in PLANS if (model, plan) not in FAST]
    return [*FAST, *(pytest.param(*cell, marks=pytest.mark.soak) for cell in rest)]


@pytest.mark.parametrize(("model", "plan"), cells())
def test_closed_form_is_near_the_trace(model: str, plan: str) -> None:
    made, parsed, seq = factory(model), Plan.parse(plan), SEQ.get(model, 64)
    work = Workload(seq_len=seq, global_batch=16)
    traced = estimate_module_by_trace(made, parsed, work)
    closed = estimate_memory(read_module(model, made, seq, "meta"), parsed, work, stack=stack_on("cpu"))
    assert abs(closed.allocated / traced.peak - 1) <= BOUND, (closed.worst, traced)


def test_what_is_said_of_a_trace() -> None:
    traced = estimate_module_by_trace(factory("two"), Plan.parse("fsdp2"), Workload(seq_len=64, global_batch=4))
    assert (traced.layers, traced.traced) == (4, (4,))
    assert traced.num_params == sum(p.numel() for p in factory("two")().parameters())
    assert traced.traffic["reduce-scatter", "dp_shard"].num_bytes >= traced.num_params * 4


def test_negative_control_another_length_keeps_something_else() -> None:
    made, plan = factory("llama"), Plan.parse("fsdp2 / bf16")
    closed = estimate_memory(
        read_module("llama", made, 32, "meta"), plan, Workload(seq_len=32, global_batch=16), stack=stack_on("cpu")
    )
    traced = estimate_module_by_trace(made, plan, Workload(seq_len=64, global_batch=16))
    assert abs(closed.allocated / traced.peak - 1) > 5 * BOUND


def test_what_is_refused() -> None:
    work = Workload(seq_len=64, global_batch=4)
    with pytest.raises(ModelError, match=r"the module's example_input_array has 3; needed the same: give --seq 3"):
        estimate_module_by_trace(factory("pictures"), Plan.parse("fsdp2"), work)
    with pytest.raises(PlanError, match="is not divided by 8 data ranks"):
        estimate_module_by_trace(factory("two"), Plan.parse("fsdp8"), work)
    with pytest.raises(ModelError, match="found lion, needed adamw"):
        estimate_module_by_trace(
            factory("two"), Plan.parse("fsdp2"), Workload(seq_len=64, global_batch=4, optimizer="lion")
        )
    with pytest.raises(ModelError, match="returned no floating tensor, and a step needs a loss"):
        estimate_module_by_trace(Classes, Plan(), work)


class Classes(TwoInputs):
    """Returns what has no gradient."""

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return super().forward(one, other).argmax(-1)
