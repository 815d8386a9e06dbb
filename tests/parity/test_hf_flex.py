"""transformers models by FlexAttention over a divided sequence, against their own attention in one process."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

import shardwise as sw
from shardwise.cli.options.hf import hf_findings
from shardwise.testing.world import World
from tests.parity import hf_models
from tests.parity.grid import Trace, differences

FAMILIES = ("llama", "gemma2", "bert")  # causal; causal, windows and capped logits; full


def config(family: str, flex: bool) -> Any:
    made = hf_models.config(family)
    if flex:
        made._attn_implementation = "flex_attention"
    return made


@pytest.fixture(scope="module", autouse=True)
def warm(world: World) -> None:
    world.preload(__name__, *(f"transformers.models.{name}.modeling_{name}" for name in FAMILIES))


def trained(text: str, made: dict[str, Any]) -> dict[str, Trace]:
    """`hf_models.run_families`, but for the warnings of torch's compiler, which transformers calls, of torch itself."""
    plan = sw.Plan.parse(text)
    with warnings.catch_warnings(), sw.open_mesh(plan) as mesh, hf_models.KeepFp64():
        warnings.simplefilter("ignore")
        return {name: hf_models.run_plan(one, plan, mesh) for name, one in made.items()}


@pytest.mark.parametrize(
    "plan", ["cp2 / context=gather", pytest.param("cp2 / context=ulysses", marks=pytest.mark.soak)]
)
def test_families_train_as_one_process_does(world: World, plan: str) -> None:
    truth = world(1, hf_models.references, {name: config(name, False) for name in FAMILIES}, timeout_s=300)[0]
    made = {name: config(name, True) for name in FAMILIES}
    ranks = world(2, trained, f"{plan} / fp64", made, timeout_s=300)
    for name in FAMILIES:
        worst = differences([rank[name] for rank in ranks], truth[name])
        assert max(worst.values()) <= 1e-11, f"{name}: {worst}"


def test_a_ring_is_refused_before_launch() -> None:
    (finding,) = hf_findings(config("llama", True), sw.Plan.parse("cp2"))
    assert finding.severity == "error" and "needed context=gather or context=ulysses" in finding.what
