"""The list of known faults: each evidence convicts the right one first, and none convicts the innocent."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.diagnose.verifying.clues import Evidence
from shardwise.diagnose.verifying.faults import FAULTS, causes
from shardwise.model.spec import ModelSpec, preset, presets
from shardwise.plan.constraints import check
from shardwise.plan.plan import Plan
from shardwise.plan.shrink import LARGE, describe_shrink, shrink

PAGE = Path(__file__).parents[2] / "docs" / "verify.md"
TWO = Evidence(data=2, world=2, rows=8, num_grads=10)
EVIDENCE = {
    "initial-weights": replace(TWO, initial=("w",), grads=("w",), loss_ratio=1.1),
    "untied": replace(TWO, untied=("wte = head",)),
    "global-batch": replace(TWO, rows_extra=8, loss_ratio=1.3, weight_ratio=2.0),
    "same-data": replace(TWO, rows_repeated=4, rows_missing=4, loss_ratio=1.2),
    "other-data": replace(TWO, rows_missing=3, rows_extra=3, loss_ratio=1.2),
    "stage-boundary": replace(
        TWO, pp=2, data=1, first_forward="layers.2.mlp", first_block="layers.2", block_starts=("layers.2",)
    ),
    "batch-norm": replace(TWO, first_forward="1", first_class="BatchNorm2d", buffers=("1.running_mean",)),
    "sequence-positions": replace(TWO, data=1, tp=2, sequence=True, first_forward="layers.0.attn", first_class="Attn"),
    "dropout": replace(TWO, draws=True, first_forward="drop", first_class="Dropout", loss_ratio=1.1),
    "grouping": replace(TWO, order_matters=True, first_forward="layers.0", loss_ratio=1.1),
    "mean-of-means": replace(TWO, loss_ratio=1.07, weight_ratio=0.01),
    "divided-by-accumulation": replace(TWO, data=1, world=1, micro_batches=4, loss_ratio=0.25, grad_factor=0.25),
    "loss-counted-twice": replace(TWO, loss_ratio=2.0, grad_factor=2.0, grads=("w",)),
    "gradients-divided": replace(TWO, grad_factor=0.5, grads=("w",)),
    "gradients-multiplied": replace(TWO, grad_factor=2.0, grads=("w",)),
    "unreduced": replace(TWO, copies=("norm.weight",), grads=("norm.weight",)),
    "clipping-per-shard": replace(TWO, norm_ratio=0.7, ranks_disagree=("norm",), params=("w",)),
    "learning-rate": replace(TWO, lr_ratio=2.0, params=("w",)),
    "optimizer-per-shard": replace(TWO, params=("w",), state=("w.m",)),
    "names": replace(TWO, added=("layers.4.w",)),
    "sharded-layer": replace(TWO, data=1, tp=2, first_forward="layers.0.mlp.w2", first_class="Linear", loss_ratio=1.1),
}


@pytest.mark.parametrize("fault", EVIDENCE)
def test_evidence_convicts_the_fault_first(fault: str) -> None:
    found = causes(EVIDENCE[fault])
    assert found and found[0].id == f"verify.{fault}", [str(f) for f in found]
    assert found[0].evidence and found[0].fix


def test_every_fault_of_the_list_has_evidence_here() -> None:
    assert [fault.id for fault in FAULTS] == [f"verify.{name}" for name in EVIDENCE]


def test_nothing_convicts_the_innocent() -> None:
    assert causes(TWO) == []


def test_a_factor_that_is_no_number_of_the_plan_is_not_called_one() -> None:
    assert [f.id for f in causes(replace(TWO, grad_factor=0.37, grads=("w",)))] == []


def test_a_mean_of_nothing_is_a_mean() -> None:
    (found,) = causes(replace(TWO, loss_ratio=float("nan"), grads=("w",), grad_factor=float("nan")))
    assert found.id == "verify.mean-of-means" and "the loss is no number (0/0?), and it is one on" in str(found)


def test_the_page_lists_every_fault() -> None:
    page = PAGE.read_text(encoding="utf-8")
    missing = [fault.id for fault in FAULTS if f"`{fault.id}`" not in page]
    assert missing == []


def test_the_list_needs_no_torch() -> None:
    code = "import sys, shardwise.diagnose.verifying.faults, shardwise.plan.shrink; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


@pytest.mark.parametrize("name", presets(built=True))
@pytest.mark.parametrize("text", ["dp2", "tp2 / seq", "tp8", "pp4 / interleaved mb8", "ep2 fsdp2"])
def test_shrinking_keeps_what_plans_meet(name: str, text: str) -> None:
    spec, plan = preset(name), Plan.parse(text)
    small = shrink(spec, plan)
    assert small.num_params < LARGE
    assert small.num_heads * spec.num_kv_heads == small.num_kv_heads * spec.num_heads
    assert (small.kind, small.tie_embeddings, small.experts_per_token, small.qk_norm, small.qkv_bias) == (
        spec.kind, spec.tie_embeddings, spec.experts_per_token, spec.qk_norm, spec.qkv_bias
    )  # fmt: skip

    def refused(model: ModelSpec) -> list[str]:
        return [finding.id for finding in check(plan, spec=model) if finding.severity == "error"]

    assert set(refused(small)) <= set(refused(spec))
    assert "num_layers" in describe_shrink(spec, small) or spec.num_layers <= 8
