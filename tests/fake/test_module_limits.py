"""Every limit of plan/rows/modules.py is met by an example, and refused with its id; no other id is raised."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.cli.options.hf import hf_findings
from shardwise.errors import ModelError
from shardwise.plan.rows.modules import MODULES
from shardwise.testing import fake_world
from tests.fake.test_context import Model, also, attends, by_hand, run
from tests.fake.test_misuse import Skip
from tests.parity import grid, hf_models, moe_models, test_lora, test_tensor_refusals
from tests.parity.test_experts import model_of

SOURCE = Path(sw.__file__).parent
DECODER = grid.decoder(2)
ROLLED = also(lambda x: torch.roll(x, 1, dims=1))


class Chain(nn.Module):
    """Two blocks; what else its forward does is given."""

    def __init__(self, course: str = "", width: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(2))
        self.course = course
        if course == "statistics":
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(4)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            again = self.course == "reentrant" and x.requires_grad
            x = checkpoint(layer, x, use_reentrant=True) if again else layer(x)
        return -x if self.course == "values" and x.sum().item() > 0 else x


class WithoutPositions(Model):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids)


def refused_rules(name: str) -> tuple[nn.Module, str, dict[str, Any]]:
    """A fault of tests/parity/test_tensor_refusals.py, as `apply` meets it."""
    model = test_tensor_refusals.Model()
    rules, options = test_tensor_refusals.change(name, model)
    return model, "tp2 / seq" if options.get("sequence") else "tp2", {"rules": rules}


def parted_tie() -> tuple[Any, str, dict[str, Any]]:
    rules = {"embed": "replicate", "head": "head", "norm": "sequence", "layers.*.attn_norm": "sequence"}
    rules |= {"layers.*.ffn_norm": "sequence", "layers.*.attn.wo": "row", "layers.*.ffn.w2": "row"}
    rules |= {f"layers.*.{name}": "column" for name in ("attn.wq", "attn.wk", "attn.wv", "ffn.w1", "ffn.w3")}
    tied = dataclasses.replace(DECODER.args[0], tie_embeddings=True)
    return functools.partial(sw.Decoder, tied), "tp2", {"rules": rules}


def adapted() -> nn.Module:
    return test_lora.model("decoder")


def rows_with_capacity() -> nn.Module:
    return moe_models.MODELS["capacity"]()


def hooked() -> nn.Module:
    model = nn.Linear(4, 4)
    model.weight.register_hook(lambda grad: grad.clamp(-1, 1))
    return model


def transposed() -> nn.Module:
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(torch.ones(4, 3).t())
    return model


def spectral() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))


SAMPLE = {"sample": torch.zeros(2, 4)}
APPLIED: dict[str, Callable[[], tuple[Any, str, dict[str, Any]]]] = {
    "module.no-blocks": lambda: (lambda: nn.Linear(4, 4), "recompute=blocks", {}),
    "module.chain": lambda: (Skip, "pp2 / mb2", SAMPLE),
    "module.needs-values": lambda: (lambda: Chain("values"), "pp2 / mb2", SAMPLE),
    "module.gradients-off": lambda: (lambda: Chain("reentrant"), "pp2 / mb2", SAMPLE),
    "module.gradient-hook": lambda: (hooked, "dp1", {}),
    "module.sparse-gradient": lambda: (lambda: nn.Embedding(4, 4, sparse=True), "dp1", {}),
    "module.rows-together": lambda: (lambda: nn.Embedding(4, 4, max_norm=1.0), "fsdp2", {}),
    "module.parameter-layout": lambda: (transposed, "fsdp2", {}),
    "module.moves-at-forward": lambda: (spectral, "dp1 / mb2", {}),
    "module.statistics-twice": lambda: (lambda: Chain("statistics"), "compile / recompute=blocks", {}),
    "module.tp-divides": lambda: (DECODER, "tp4", {}),
    "module.rule-kind": lambda: refused_rules("type"),
    "module.mixed-rules": lambda: refused_rules("siblings"),
    "module.tied-layouts": parted_tie,
    "module.adapter-on-row": lambda: (adapted, "tp2 / seq", {}),
    "module.column-in-block": lambda: refused_rules("column in block"),
    "module.nested-columns": lambda: refused_rules("nested"),
    "module.replicate-in-block": lambda: refused_rules("replicate in block"),
    "module.mixes-tokens": lambda: (lambda: Model(extra=nn.Conv1d(8, 8, 3)), "cp2", {}),
    "module.no-positions": lambda: (WithoutPositions, "cp2", {}),
    "module.experts-stacked": lambda: (functools.partial(model_of, "list"), "fsdp2 ep2", {}),
    "module.experts-forward": lambda: (functools.partial(model_of, "linear"), "fsdp2 ep2", {}),
    "module.experts-divide": lambda: (functools.partial(model_of, "three"), "fsdp2 ep2", {}),
    "module.capacity": lambda: (rows_with_capacity, "tp2 / seq", {}),
    "module.float8": lambda: (lambda: Chain(width=24), "fp8=rowwise+emulate", {}),
    "module.float8-shard": lambda: (
        lambda: Chain(width=16),
        "tp2 / fp8=rowwise+emulate",
        {"rules": {"layers.*.0": "column-gather"}},
    ),
}
"""Limits of any model -> a model, a plan and options of `apply`."""
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "module.declared-plan": ("llama", "pp2 / 1f1b mb2", {"base_model_pp_plan": {"lagers": (["x"], ["x"])}}),
    "module.two-chains": ("t5", "pp2 / 1f1b mb2", {}),
    "module.pictures": ("vit", "tp2 / seq", {}),
    "module.no-row-layer": ("bert", "tp2 / seq", {}),
    "module.attention-by-hand": ("gemma2", "cp2", {}),
    "module.attention-direct": ("falcon", "cp2", {}),
    "module.attention-kind": ("llama4_text", "cp2", {}),
    "module.window-in-mask": ("phimoe", "cp2", {"sliding_window": 4}),
    "module.window-ahead": ("gemma3_text", "cp2", {"use_bidirectional_attention": True}),
    "module.flex-ring": ("llama", "cp2", {"_attn_implementation": "flex_attention"}),
    "module.no-experts": ("llama", "fsdp2 ep2", {}),
}
"""Limits of models of transformers -> a family, a plan and changes of its configuration."""
CALLED: list[tuple[Callable[..., torch.Tensor], str]] = [
    (by_hand, "module.attention-by-hand"),
    (lambda x: x, "module.attention-by-hand"),
    (attends(dropout_p=0.1), "module.attention-call"),
    (ROLLED, "module.mixes-tokens"),
]
"""What only a forward shows."""
ELSEWHERE = {
    "module.second-derivatives",
    "module.writes-weights",
    "module.unused",
    "module.tokens-in-rows",
    "module.weights-in-loss",
    "module.written-late",
    "module.transformed",
    "module.weight-elsewhere",
    "module.writes-input",
    "module.copied",
    "module.called-by-parts",
    "module.loaded",
    "module.other-weights",
}
"""What only a step shows: tests/parity/test_after_apply.py, test_unused.py, test_ported.py, test_reruns.py; or a
forward under `seq`: tests/fake/test_mixing.py; or what a script does after `apply`: test_brought_to_steps.py."""


def test_the_ids_that_the_package_raises_are_those_of_the_table_and_of_the_examples() -> None:
    raised = set()
    for path in SOURCE.rglob("*.py"):
        raised |= set(re.findall(r'\brow(?:: str)? ?= ?"(module[^"]+)"', path.read_text()))
    assert raised == set(MODULES)
    assert {*APPLIED, *FAMILIES, *(row for _, row in CALLED), *ELSEWHERE} == set(
        MODULES
    ) and not APPLIED.keys() & FAMILIES.keys()


@pytest.mark.parametrize("row", APPLIED)
def test_apply_refuses_with_the_id(row: str) -> None:
    model, text, options = APPLIED[row]()
    plan = sw.Plan.parse(text)
    with (
        pytest.raises(ModelError) as caught,
        fake_world(plan.world),
        sw.open_mesh(plan, device="cpu") as mesh,
    ):
        sw.apply(model, plan, mesh, **options)
    assert caught.value.row == row and str(caught.value).startswith(f"[{row}] "), caught.value


@pytest.mark.parametrize("row", FAMILIES)
def test_models_of_transformers_have_a_finding_with_the_id(row: str) -> None:
    family, text, changes = FAMILIES[row]
    (finding,) = hf_findings(hf_models.config(family, **changes), sw.Plan.parse(text))
    assert (finding.id, finding.severity) == (row, "error"), finding.what


@pytest.mark.parametrize(("mix", "row"), CALLED)
def test_what_only_the_first_forward_shows_has_an_id_too(mix: Callable[..., torch.Tensor], row: str) -> None:
    with pytest.raises(ModelError) as caught:
        run("cp2", lambda: Model(mix))
    assert caught.value.row == row
