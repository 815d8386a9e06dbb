"""Float8 layers and precision rules: every plan rounds and trains as torchao does in one process, part by part."""

from __future__ import annotations

import functools
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ModelError, PlanError
from shardwise.parallel.layers import float8
from shardwise.parallel.layers.tensor_hooks import wrap_forward
from shardwise.plan.plan import Plan
from tests.parity import grid, test_grid, typed

TOLERANCE = 1e-6


@pytest.fixture(scope="module", autouse=True)
def compiler(world: Any) -> None:
    """torchao looks into the compiler when it converts a layer."""
    world.preload("torch._inductor.codegen.triton")


FP8_PLANS = [  # with those of `COMPILED` every legal pair of float8 and another technique
    "dp1 mb4 / fp8=emulate",
    "dp2 / fp8=rowwise+emulate",
    "fsdp2 mb2 / fp8=emulate / recompute=blocks",
    "fsdp2 zero1 / fp8=rowwise-hp+emulate / recompute=every2",
    "fsdp2 zero2 mb2 / fp8=emulate / recompute=50% offload=activations prefetch=2",
    "fsdp2 / fp8=emulate / recompute=ops offload=state",
    "fsdp4 / fp8=emulate / reshard=2",
    "tp2 gbs4 / fp32 fp8=emulate / loss-parallel",
    "fsdp2 tp2 gbs4 / fp32 fp8=emulate / seq",
    "tp2 / fp32 fp8=rowwise+emulate / seq",
    "pp2 / 1f1b mb4 / fp8=emulate",
    "pp2 / gpipe mb4 / fp8=emulate",
    "pp2 / interleaved mb4 / fp8=emulate",
    "pp2 / looped-bfs mb4 / fp8=emulate",
    "pp2 / zero-bubble mb4 / fp32 fp8=emulate",
    "pp2 / zero-bubble-v mb4 / fp32 fp8=emulate",
    "pp2 / dualpipe-v mb4 / fp32 fp8=emulate",
]
COMPILED = ["fsdp2 / fp8=emulate / compile"]  # minutes of compilation: `make soak`
EXPERTS = ["fsdp2 ep2 / fp32 fp8=emulate"]
RULES = [
    "dp1 / bf16 precision=layers.*.attn_norm:fp32,layers.*.ffn_norm:fp32,norm:fp32",
    "dp2 mb2 gbs4 / fp32 precision=layers.*.ffn:bf16",  # few rows: one number on the other side of a boundary is 1e-3
    "fsdp2 / bf16 precision=layers.*.attn:fp32,layers.*.attn.wo:bf16",
    "fsdp2 zero2 mb2 / bf16 precision=head:fp32,norm:fp32 / recompute=blocks",
    "pp2 / 1f1b mb4 / bf16 precision=layers.*.attn_norm:fp32,head:fp32",
    "fsdp2 / fp8=emulate precision=layers.*.ffn:bf16,layers.*.attn_norm:fp32,head:fp8",
]
GATHERED = ["fsdp2 / fp8=gather+emulate", "fsdp2 zero2 mb2 / fp8=gather+emulate", "fsdp4 / fp8=gather+emulate"]


def alone(plan: Plan) -> str:
    """The same arithmetic in one process."""
    batch = sw.Batch(global_size=plan.batch.global_size)
    kept = replace(plan.float8, all_gather=False)
    return str(Plan(batch=batch, precision=plan.precision, float8=kept, precision_rules=plan.precision_rules))


@functools.cache
def truth(world: Any, text: str, model: str, parts: int) -> grid.Trace:
    return world(1, typed.reference, text, model, parts)[0]


def check(world: Any, text: str, model: str = "decoder") -> None:
    plan = Plan.parse(text)
    model = typed.model_of(plan, model)
    ranks = world(plan.world, typed.run, text, model, timeout_s=300)
    worst = grid.differences(ranks, truth(world, alone(plan), model, plan.axes.data * plan.batch.micro_batches))
    assert max(worst.values()) <= TOLERANCE, worst


SOAK = {plan for plan in FP8_PLANS if plan.startswith("pp2") and "1f1b" not in plan and "dualpipe" not in plan}
SOAK |= {"fsdp4 / fp8=emulate / reshard=2", "fsdp2 zero1 / fp8=rowwise-hp+emulate / recompute=every2"}
SOAK |= {"dp1 mb4 / fp8=emulate", "fsdp2 tp2 gbs4 / fp32 fp8=emulate / seq", "fsdp4 / fp8=gather+emulate"}


@pytest.mark.share(8)
@pytest.mark.parametrize("plan", test_grid.cells(FP8_PLANS, SOAK))
def test_float8(world, plan: str) -> None:
    check(world, plan)


@pytest.mark.parametrize("plan", EXPERTS)
def test_float8_beside_experts(world, plan: str) -> None:
    check(world, plan, "moe")


@pytest.mark.share(2)
@pytest.mark.parametrize("plan", RULES)
def test_precision_rules(world, plan: str) -> None:
    check(world, plan)


@pytest.mark.share(2)
@pytest.mark.parametrize("plan", test_grid.cells(GATHERED, SOAK))
def test_float8_gathered(world, plan: str) -> None:
    """Weights go from fp32 to float8 at once, so one process does too: the same dial on one rank."""
    parsed = Plan.parse(plan)
    parts = parsed.axes.data * parsed.batch.micro_batches
    one = world(1, typed.run, f"dp1 mb{parts} / fp8=gather+emulate", "decoder")[0]
    worst = grid.differences(world(parsed.world, typed.run, plan, "decoder"), one)
    assert max(worst.values()) <= TOLERANCE, worst


def compiled(text: str) -> grid.Trace:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dynamo and inductor trip over warnings of torch's own
        return typed.run(text, "decoder")


@pytest.mark.soak
@pytest.mark.parametrize("plan", COMPILED)
def test_float8_compiled(world, plan: str) -> None:
    """Compiled code rounds in other places: on both sides the same code."""
    one = world(1, compiled, "dp1 mb2 / fp8=emulate / compile", timeout_s=600)[0]
    worst = grid.differences(world(2, compiled, plan, timeout_s=600), one)
    assert max(worst.values()) <= TOLERANCE, worst


def test_the_tolerance_would_see_other_scales(world) -> None:
    """Negative control: as many rows, divided into other parts, round otherwise."""
    one = truth(world, alone(Plan.parse("dp1 / fp8=emulate")), "decoder", 1)
    assert max(grid.differences(world(2, typed.run, "dp2 / fp8=emulate", "decoder"), one).values()) > 1e-4


def table(text: str) -> dict[str, str]:
    plan = Plan.parse(text)
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(typed.MODELS["decoder"], plan, mesh)
        return {name: row.text for name, row in placed.placements.items()}


def test_the_table_says_what_computes_in_what() -> None:
    rows = table("dp1 / fp8=emulate precision=layers.*.attn_norm:fp32,layers.0.ffn:bf16")
    assert rows["layers.0.attn.wq.weight"].endswith("computes in fp8 tensorwise")
    assert rows["layers.0.ffn.w1.weight"].endswith("computes in bf16")
    assert rows["layers.1.attn_norm.weight"].endswith("computes in fp32")
    assert "computes" not in rows["head.weight"]


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"router": nn.Linear(32, 16), "a": nn.Linear(32, 20)}) for _ in "12")
        self.head = nn.Linear(32, 32)


def test_which_layers_are_left() -> None:
    blocks = ("layers.0", "layers.1")
    with pytest.raises(ModelError, match="no layer can be converted.*a router.*20 x 32, not multiples of 16"):
        float8.choose(Odd(), blocks, {})
    with pytest.raises(ModelError, match="20 x 32"):
        float8.choose(Odd(), blocks, {"head": "fp8", "layers.0.a": "fp8"})
    choice = float8.choose(Odd(), blocks, {"head": "fp8"})
    assert choice.converted == ("head",) and choice.left["layers.0.router"] == "a router"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "dp1 / bf16 precision=layers.*.attn_nrom:fp32",
            r"(?s)precision rules.*attn_nrom.*did you mean 'layers\.\*\.attn_norm'",
        ),
        ("dp1 / bf16 precision=layers:fp32", "never called"),
        ("dp1 / bf16 precision=layers.*.ffn:fp32,layers.0.ffn:bf16", "matched by 2 rules"),
        ("dp1 / fp8=emulate precision=norm:fp8", "norm: no linear"),
    ],
)
def test_rules_are_strict(text: str, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        table(text)


def split_too_far(text: str) -> str:
    sizes = sw.DecoderConfig(**typed.SIZES | {"num_heads": 8}, num_layers=2, num_kv_heads=2, ffn_dim=64)
    plan = Plan.parse(text)
    try:
        with sw.open_mesh(plan) as mesh:
            sw.apply(lambda: sw.Decoder(sizes), plan, mesh)
    except ModelError as error:
        return str(error)
    return ""


def test_tp_leaves_multiples_of_16(world) -> None:
    for said in world(2, split_too_far, "tp2 / fp8=emulate"):
        assert "layers.0.attn.wk on the axis tp=2: found 8 x 64 on each rank" in said


def test_devices_and_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match="fp8.device"):
        table("dp1 / fp8")
    assert "8.0, needed 8.9" in float8.what_lacks("cuda", (8, 0), (8, 9))
    assert not float8.what_lacks("cuda", (9, 0), (9, 0))

    def missing(name: str) -> Any:
        raise ImportError("No module named 'torchao'")

    monkeypatch.setattr(float8, "import_module", missing)
    with pytest.raises(PlanError, match=r"pip install 'shardwise\[fp8\]'"):
        table("dp1 / fp8=emulate")


def dtypes_seen(text: str) -> set[torch.dtype]:
    plan, seen = Plan.parse(text), set()
    with sw.open_mesh(plan) as mesh:

        def decoder() -> torch.nn.Module:
            module = typed.MODELS["decoder"]()
            for name, norm in module.named_modules():
                if name.endswith("attn_norm"):
                    wrap_forward(norm, functools.partial(look, norm))
            return module

        def look(norm: torch.nn.Module, forward: Any, x: torch.Tensor) -> torch.Tensor:
            seen.update((x.dtype, norm.weight.dtype))
            return forward(x)

        placed = sw.apply(decoder, plan, mesh)
        placed.parts[0].run(torch.zeros(1, 8, dtype=torch.int64))
    return seen


@pytest.mark.share(4)
@pytest.mark.parametrize("plan", ["dp1", "dp2", "fsdp2", "tp2", "fsdp2 tp2 / seq"])
def test_a_rule_holds_under_every_mesh(world, plan: str) -> None:
    text = f"{plan} / bf16 precision=layers.*.attn_norm:fp32"
    assert world(Plan.parse(text).world, dtypes_seen, text) == [{torch.float32}] * Plan.parse(text).world
