from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import PlanError
from shardwise.findings import Finding, errors_in
from shardwise.model.profile import profile_of
from shardwise.model.spec import ModelSpec, preset, presets
from shardwise.plan.constraints import ROWS, check, docs_text, refuse
from shardwise.plan.plan import PRECISIONS, SCHEDULES, Float8, Plan
from shardwise.plan.repair import Read, change

ODD = ModelSpec(
    name="odd", num_layers=6, dim=60, num_heads=6, num_kv_heads=3, ffn_dim=90, vocab_size=255, max_seq_len=64
)
TIED = ModelSpec(
    name="tied", num_layers=8, dim=64, num_heads=8, ffn_dim=128, vocab_size=256, max_seq_len=64, tie_embeddings=True
)


def read(frozen: int = 0, **options: Any) -> Read:
    """`tiny` as a module without sizes; its embedding and the first so many blocks have no gradients."""
    profile = profile_of(preset("tiny"))
    blocks = [replace(block, frozen=block.params * (i < frozen)) for i, block in enumerate(profile.blocks)]
    profile = replace(profile, blocks=tuple(blocks), frozen=profile.embedding if frozen else 0)
    return Read(profile=profile, **options)


REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    ("world.size", "fsdp4", {"world": 8}),
    ("world.size", "pp4 tp2 mb4", {"world": 6}),
    ("world.size", "tp8", {"world": 1}),
    ("cp.options", "dp2 context=ulysses", {}),
    ("cp.options", "dp2 balance=contiguous", {}),
    ("cp.compile", "cp2 compile", {"world": 2}),
    ("cp.heads", "cp4 context=ulysses", {"spec": ODD}),
    ("cp.heads", "tp4 cp4 context=ulysses", {"spec": preset("tiny")}),
    ("cp.length", "cp4", {"seq_len": 7}),
    ("cp.length", "cp8 balance=contiguous", {"seq_len": 7}),
    ("cp.sequence-length", "cp2 tp2 seq", {"seq_len": 14}),
    ("zero.axis", "dp4 zero1", {}),
    ("zero.axis", "dp4 zero3", {}),
    ("zero.axis", "fsdp4 zero0", {}),
    ("zero.axis", "hsdp2x2 zero0", {}),
    ("zero.reshard", "fsdp4 zero2 reshard=true", {}),
    ("zero.reshard", "fsdp4 zero1 reshard=2", {}),
    ("zero.reshard", "fsdp8 reshard=3", {}),
    ("zero.reshard", "dp2 reshard=false", {}),
    ("zero.reshard-tensor", "fsdp4 tp2 reshard=2", {}),
    ("zero.reshard-tensor", "fsdp2 cp2 tp2 reshard=2", {}),
    ("zero.reshard-pipeline", "pp2 fsdp4 mb2 reshard=2", {}),
    ("offload.state", "dp2 offload=state", {}),
    ("offload.state", "dp1 offload=state", {}),
    ("ddp.flags", "fsdp2 static-graph", {}),
    ("ddp.flags", "dp2 tp2 find-unused", {}),
    ("ddp.flags", "dp2 bf16 static-graph", {}),
    ("ddp.static-unused", "dp2 static-graph find-unused", {}),
    ("ddp.static-accumulation", "dp2 mb2 static-graph", {}),
    ("ddp.reduce", "dp2 reduce=bf16", {}),
    ("batch.small", "dp8 gbs4", {"world": 8}),
    ("batch.small", "dp8", {"global_batch": 4}),
    ("batch.divide", "pp2 dp2 mb4 gbs12", {"world": 4}),
    ("batch.divide", "pp2 mb4", {"global_batch": 6}),
    ("pp.stages-per-rank", "pp2 1f1b vs2 mb4", {}),
    ("pp.stages-per-rank", "pp2 zbv vs3 mb4", {}),
    ("pp.micro-batches", "pp4 mb2", {}),
    ("pp.micro-batches", "pp4 interleaved mb9", {}),
    ("pp.micro-batches", "pp2 zb mb5 zero0", {}),
    ("pp.micro-batches", "pp2 dualpipev mb3", {}),
    ("pp.layers", "pp16 mb16", {"spec": preset("tiny"), "world": 16}),
    ("pp.layers", "pp4 interleaved:3 mb4", {"spec": preset("tiny")}),
    ("pp.layers", "pp16 mb16", {"spec": read(), "world": 16}),
    ("pp.layers", "pp4 interleaved:3 mb4", {"spec": read(limits=preset("llama-8b"))}),
    ("pp.frozen", "pp2 mb4", {"spec": read(4), "world": 2}),
    ("pp.frozen", "pp4 dp2 gpipe mb4", {"spec": read(4), "world": 8}),
    ("module.left-out", "pp2 tp2 dp2 mb4 seq", {"spec": read(left_out=(("pp", "module.chain"), ("tp", "no recipe")))}),
    ("module.left-out", "fsdp2 cp2 compile", {"spec": read(left_out=(("cp", "module.chain"), ("compile", "no")))}),
    ("module.left-out", "fsdp2 recompute=ops", {"spec": read(left_out=(("recompute", "module.no-blocks"),))}),
    (
        "module.left-out",
        "dp2 fsdp2 mb2",
        {"spec": read(left_out=tuple((word, "module.rows-together") for word in ("dp_shard", "accumulation")))},
    ),
    (
        "module.left-out",
        "fsdp2 ep2 offload=activations",
        {"spec": read(left_out=(("ep", "module.no-experts"), ("offload-activations", "module.no-blocks")))},
    ),
    ("pp.boundaries", "pp2 mb2 split=layers.1,layers.2", {}),
    ("pp.boundaries", "pp4 mb4 split=layers.1,layers.2,layers.1", {}),
    ("pp.boundaries", "pp2 mb2 split=layer.3", {"spec": preset("tiny")}),
    ("pp.boundaries", "pp2 mb2 split=layers.8", {"spec": preset("tiny")}),
    ("pp.boundaries", "pp2 mb2 split=layers.0", {"spec": preset("tiny")}),
    ("pp.boundaries", "pp4 mb4 split=layers.2,layers.6,layers.4", {"spec": preset("tiny")}),
    ("pp.zero-bubble-reshard", "pp2 fsdp2 zb mb4", {}),
    ("pp.zero-bubble-reshard", "pp2 fsdp2 zbv mb4", {}),
    ("pp.zero-bubble-reshard", "pp2 fsdp2 dualpipev mb4", {}),
    ("pp.zero-bubble-reshard", "pp2 fsdp4 zb mb4 reshard=2", {}),
    ("pp.zero-bubble-recompute-ops", "pp2 zb mb2 recompute=ops", {}),
    ("pp.zero-bubble-compile", "pp2 zbv mb2 compile", {}),
    ("tp.heads", "tp4", {"spec": ODD, "world": 4}),
    ("tp.kv-heads", "tp2", {"spec": ODD}),
    ("tp.ffn", "tp4", {"spec": ODD}),
    ("tp.vocab", "tp2", {"spec": ODD}),
    ("tp.sequence", "dp2 seq", {}),
    ("tp.sequence-length", "tp4 seq", {"seq_len": 63}),
    ("tp.loss", "dp2 loss-parallel", {}),
    ("tp.recipe", "tp2 recipe=lama", {}),
    ("ep.model", "fsdp4 ep2", {"spec": preset("tiny"), "world": 4}),
    ("ep.experts", "fsdp8 ep8", {"spec": preset("tiny-moe"), "world": 8}),
    ("ep.experts", "fsdp3 ep3", {"spec": preset("tiny-moe")}),
    ("ep.ranks", "dp2 ep2", {"world": 2}),
    ("ep.ranks", "fsdp4 tp2 ep3", {}),
    ("ep.zero", "tp4 ep2", {}),
    ("ep.wrap", "fsdp2 ep2 wrap=1000", {}),
    ("ep.reshard", "fsdp4 ep2 reshard=2", {}),
    ("ep.compile", "fsdp2 ep2 compile", {}),
    ("ep.compile", "fsdp2 compile", {"spec": preset("tiny-moe")}),
    ("tp.recipe", "tp2 recipe=gpt", {"spec": preset("tiny")}),
    ("recompute.every", "dp1 recompute=every0", {}),
    ("recompute.ratio", "dp1 recompute=0%", {}),
    ("recompute.ops-nested", "fsdp2 recompute=ops wrap=1000", {}),
    ("recompute.ops-nested", "fsdp2 ep2 recompute=ops", {}),
    ("recompute.ratio", "dp1 recompute=150%", {}),
    ("precision.fp64-mps", "dp1 fp64", {"device": "mps"}),
    ("fp8.device", "dp1 fp8", {"device": "cpu"}),
    ("fp8.device", "fsdp2 fp8=rowwise", {"device": "mps"}),
    ("fp8.precision", "dp1 fp8 fp64", {}),
    ("fp8.precision", "dp1 fp8 bf16-pure", {}),
    ("fp8.gather", "fsdp2 fp8=rowwise+gather", {}),
    ("fp8.gather", "fsdp2 tp2 fp8=gather", {}),
    ("fp8.gather", "dp2 fp8=gather", {}),
    ("fp8.gather", "fsdp2 fp32 fp8=gather", {}),
    ("fp8.context", "cp2 fp8", {}),
    ("fp8.context", "cp2 fp8=rowwise", {}),
    ("precision.rules", "dp1 fp64 precision=layers.*.attn_norm:fp32", {}),
    ("precision.rules", "dp1 bf16 precision=head:fp8", {}),
    ("precision.rules-groups", "fsdp2 bf16 compile precision=layers.*.attn_norm:fp32", {}),
    ("precision.rules-groups", "fsdp2 bf16 recompute=ops precision=layers.*.attn_norm:fp32", {}),
    ("precision.rules-groups", "fsdp2 bf16 wrap=1000 precision=layers.*.attn_norm:fp32", {}),
]

REMARKED: list[tuple[str, str, str, dict[str, Any]]] = [
    ("zero.single", "note", "dp1 zero3", {}),
    ("ddp.flags", "note", "dp1 static-graph", {}),
    ("ddp.bucket", "warning", "fsdp2 bucket=10", {}),
    ("ddp.prefetch", "warning", "dp2 prefetch=2", {}),
    ("batch.uneven", "note", "dp2 mb2 gbs6", {}),
    ("batch.uneven", "warning", "dp2 mb4 gbs6", {}),
    ("pp.schedule", "note", "dp2 gpipe", {}),
    ("recompute.ratio", "warning", "dp1 recompute=1%", {"spec": preset("tiny")}),
    ("precision.tf32", "note", "dp1 bf16 tf32", {}),
    ("precision.tf32", "note", "dp1 tf32", {"device": "cpu"}),
    ("precision.reduce", "warning", "fsdp2 fp64 reduce=fp32", {}),
    ("fp8.micro-batch", "note", "dp2 mb2 fp8", {}),
]

LEGAL: list[tuple[str, dict[str, Any]]] = [
    ("dp1", {"world": 1, "spec": preset("tiny"), "global_batch": 1, "device": "cpu"}),
    ("pp2 dp2 fsdp4 tp2 / 1f1b mb8 / bf16 / recompute=blocks", {"spec": preset("llama-8b"), "world": 32}),
    ("pp8 fsdp64 tp8 interleaved mb16 bf16 seq", {"spec": preset("gpt3-175b"), "world": 4096, "seq_len": 2048}),
    ("pp2 fsdp2 zero2 zbv mb4 recompute=blocks", {"spec": preset("tiny"), "world": 4}),
    ("pp2 tp2 dualpipev mb4", {"world": 4}),
    ("pp2 dp2 dualpipev mb4", {"world": 4}),
    ("pp2 mb2 split=layers.3", {"spec": preset("tiny")}),
    ("pp2 interleaved mb4", {"spec": read(4)}),  # each rank has a stage that is trained
    ("pp2 mb2", {"spec": read(3)}),
    ("hsdp2x4 zero1 reshard=false bf16", {"world": 8}),
    ("fsdp8 reshard=4", {"world": 8}),
    ("fsdp4 tp2 reshard=4", {}),
    ("dp4 static-graph reduce=fp32", {"global_batch": 8}),
    ("dp1 zero3 offload=state", {}),
    ("dp3 mb2", {"global_batch": 7}),
    ("fsdp8", {"spec": preset("mixtral-8x7b")}),
]


def fix_of(finding: Finding) -> Plan:
    matched = re.search(r"nearest plan that works: `([^`]+)`$", finding.fix)
    assert matched, finding.fix
    return Plan.parse(matched.group(1))


@pytest.mark.parametrize(("row", "text", "facts"), REFUSED)
def test_is_refused_with_a_plan_that_works(row: str, text: str, facts: dict[str, Any]) -> None:
    findings = {f.id: f for f in errors_in(check(Plan.parse(text), **facts))}
    assert row in findings
    assert findings[row].evidence
    assert errors_in(check(fix_of(findings[row]), **facts)) == []


@pytest.mark.parametrize(("row", "severity", "text", "facts"), REMARKED)
def test_is_remarked_and_legal(row: str, severity: str, text: str, facts: dict[str, Any]) -> None:
    findings = check(Plan.parse(text), **facts)
    assert [(f.id, f.severity) for f in findings] == [(row, severity)]
    refuse(findings)


def test_zero_shards_over_ranks_of_a_sequence_too() -> None:
    assert check(Plan.parse("cp2 zero3 / bf16")) == []


@pytest.mark.parametrize(("text", "facts"), LEGAL)
def test_is_legal(text: str, facts: dict[str, Any]) -> None:
    assert errors_in(check(Plan.parse(text), **facts)) == []


def test_every_row_has_an_example() -> None:
    assert {row for row, *_ in REFUSED} | {row for row, *_ in REMARKED} == set(ROWS)


@pytest.mark.parametrize(
    ("text", "facts", "works"),
    [
        ("fsdp4", {"world": 8}, "fsdp8 / fp32"),
        ("fsdp4 tp2", {"world": 4}, "fsdp2 tp2 / fp32"),
        ("dp4 zero1", {}, "fsdp4 zero1 / fp32"),
        ("fsdp4 zero0", {}, "dp4 / fp32"),
        ("pp2 fsdp2 zb mb4", {}, "pp2 fsdp2 zero2 / zero-bubble mb4 / fp32"),
        ("fsdp2 tp8", {"spec": preset("tiny"), "world": 16}, "fsdp4 tp4 / fp32"),
        ("pp4 interleaved mb9", {}, "pp4 / interleaved mb10 / fp32"),
        ("pp2 mb4", {"global_batch": 7}, "pp2 / 1f1b mb7 / fp32"),
        ("pp2 dp2 mb4", {"global_batch": 7}, "pp2 dp2 / 1f1b mb4 gbs8 / fp32"),
        ("cp2 compile", {"world": 2}, "cp2 / fp32"),
        ("cp4 context=ulysses", {"spec": ODD, "world": 4}, "cp4 / fp32"),
        ("cp4", {"seq_len": 6, "world": 4}, "dp2 cp2 / fp32"),
    ],
)
def test_the_plan_that_works_is_the_near_one(text: str, facts: dict[str, Any], works: str) -> None:
    first, *_ = errors_in(check(Plan.parse(text), **facts))
    assert str(fix_of(first)) == works


def test_refuse_lists_all_errors() -> None:
    with pytest.raises(PlanError) as caught:
        refuse(check(Plan.parse("cp2 compile recipe=gtp / recompute=every0"), world=4))
    text = str(caught.value)
    assert "4 constraints do not hold" in text
    assert all(f"[{row}]" in text for row in ("world.size", "cp.compile", "tp.recipe", "recompute.every"))
    assert "did you mean 'gpt'" in text


@pytest.mark.parametrize(
    ("left_out", "says"),
    [
        (("dp_replicate", "dp_shard", "accumulation"), "nearest plan that works: `tp2 / fp64`"),
        (("dp_replicate", "dp_shard", "accumulation", "tp"), "nearest plan that works: `cp2 / fp64`"),
        (
            ("dp_replicate", "dp_shard", "accumulation", "tp", "pp", "cp"),
            "no plan for 2 processes works, one process does",
        ),
    ],
)
def test_where_ranks_cannot_share_the_batch_another_axis_has_them(left_out: tuple[str, ...], says: str) -> None:
    model = read(left_out=tuple((word, "module.rows-together") for word in left_out))
    (finding,) = errors_in(check(Plan.parse("dp1 / fp64"), spec=model, world=2))
    assert finding.id == "world.size" and finding.fix.endswith(says), finding.fix


DRAWS = int(os.environ.get("SHARDWISE_SOAK", "0")) or 80
SMALL = st.sampled_from([1, 1, 1, 2, 2, 3, 4])
LEFT_OUT = tuple((word, "module.chain") for word in ("pp", "cp", "recompute", "compile", "offload-activations"))
ROWS_TOGETHER = tuple((word, "module.rows-together") for word in ("dp_replicate", "dp_shard", "accumulation"))
SPECS = st.sampled_from(
    [
        None,
        ODD,
        TIED,
        *(preset(name) for name in presets()),
        read(4),
        read(left_out=LEFT_OUT),
        read(left_out=ROWS_TOGETHER),
    ]
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Plan, dict[str, Any]]:
    axes = {f"axes__{a}": draw(SMALL) for a in ("pp", "dp_replicate", "dp_shard", "tp")}
    axes |= {f"axes__{a}": draw(st.sampled_from([1] * 5 + [2, 4])) for a in ("cp", "ep")}
    sometimes = st.sampled_from([False] * 4 + [True])
    plan = change(
        Plan(),
        **axes,
        zero=draw(st.integers(0, 3)),
        batch__global_size=draw(st.none() | st.integers(1, 70)),
        batch__micro_batches=draw(st.integers(1, 9)),
        schedule__kind=draw(st.sampled_from(SCHEDULES)),
        schedule__stages_per_rank=draw(st.sampled_from([None, None, 1, 2, 3])),
        schedule__boundaries=draw(st.sampled_from([(), (), ("layers.2",), ("h.1", "h.2")])),
        precision=draw(st.sampled_from(PRECISIONS)),
        recompute__mode=draw(st.sampled_from(["none", "blocks", "ops"])),
        offload__state=draw(sometimes),
        communication__static_graph=draw(sometimes),
        communication__find_unused=draw(sometimes),
        communication__reshard_after_forward=draw(st.sampled_from([None, None, True, False, 2, 3])),
        communication__reduce_dtype=draw(st.sampled_from([None, None, "fp32", "bf16"])),
        tensor__sequence=draw(sometimes),
        tensor__loss=draw(sometimes),
        context__kind=draw(st.sampled_from(["ring"] * 3 + ["gather", "ulysses"])),
        context__balance=draw(st.sampled_from(["zigzag"] * 3 + ["contiguous"])),
        compile=draw(sometimes),
        float8=draw(st.sampled_from([Float8()] * 3 + [Float8(recipe="tensorwise"), Float8(recipe="rowwise-hp")])),
        precision_rules=draw(st.sampled_from([()] * 3 + [("layers.*.attn_norm:fp32",)])),
    )
    world = draw(st.sampled_from([None, plan.world, plan.world, *range(1, 17)]))
    device = draw(st.sampled_from([None, "cpu", "cuda", "mps"]))
    return plan, {
        "spec": draw(SPECS),
        "world": world,
        "seq_len": draw(st.sampled_from([None, 63, 64])),
        "device": device,
    }


@settings(max_examples=DRAWS, deadline=None)
@given(cases())
def test_every_refusal_names_a_plan_that_works(case: tuple[Plan, dict[str, Any]]) -> None:
    plan, facts = case
    for finding in errors_in(check(plan, **facts)):
        if finding.fix.endswith("works, one process does"):
            world = facts["world"] or plan.world
            for axis in ("dp", "fsdp", "tp", "pp", "cp"):
                assert errors_in(check(Plan.parse(f"{axis}{world} / {plan.precision}"), **facts))
            assert not errors_in(check(Plan(precision=plan.precision), **(facts | {"world": 1})))
            continue
        works = fix_of(finding)
        assert errors_in(check(works, **facts)) == []
        assert facts["world"] in (None, works.world)
        assert works.precision == plan.precision or facts["device"] == "mps"


@settings(max_examples=DRAWS, deadline=None)
@given(cases(), st.sampled_from(["pp1", "dp1", "fsdp1", "cp1", "tp1", "ep1"]))
def test_an_axis_of_size_one_changes_nothing(case: tuple[Plan, dict[str, Any]], token: str) -> None:
    plan, facts = case
    spelled = str(plan)
    if not re.search(rf"\b{token[:-1]}\d", spelled):
        spelled += f" {token}"
    assert check(Plan.parse(spelled), **facts) == check(plan, **facts)


BREAKS: dict[str, dict[str, Any]] = {
    "cp.compile": {"axes__cp": 2, "compile": True},
    "ep.wrap": {"axes__ep": 2, "wrap_min_params": 1000},
    "zero.axis": {"axes__dp_replicate": 2, "axes__dp_shard": 1, "zero": 2},
    "offload.state": {"offload__state": True, "zero": 0},
    "ddp.static-unused": {"communication__static_graph": True, "communication__find_unused": True},
    "batch.small": {"axes__dp_replicate": 4, "batch__global_size": 3},
    "pp.stages-per-rank": {"axes__pp": 2, "schedule__kind": "gpipe", "schedule__stages_per_rank": 2},
    "pp.micro-batches": {"axes__pp": 3, "schedule__kind": "1f1b", "batch__micro_batches": 2},
    "pp.zero-bubble-compile": {"axes__pp": 2, "schedule__kind": "zero-bubble", "compile": True},
    "pp.zero-bubble-reshard": {
        "axes__pp": 2, "schedule__kind": "zero-bubble", "zero": 3, "communication__reshard_after_forward": None
    },
    "tp.sequence": {"axes__tp": 1, "tensor__sequence": True},
    "tp.recipe": {"tensor__recipe": "none-such"},
}  # fmt: skip


@settings(max_examples=DRAWS, deadline=None)
@given(cases(), st.sampled_from(sorted(BREAKS)))
def test_a_planted_fault_is_found_under_its_id(case: tuple[Plan, dict[str, Any]], row: str) -> None:
    plan, facts = case
    broken = change(plan, **BREAKS[row])
    assert row in {f.id for f in errors_in(check(broken, **facts))}


def test_the_property_would_notice_a_fix_that_does_not_work() -> None:
    finding = Finding(id="x", severity="error", what="x", fix="do; nearest plan that works: `dp4 zero1 / fp32`")
    assert errors_in(check(fix_of(finding)))
    with pytest.raises(AssertionError):
        fix_of(Finding(id="x", severity="error", what="x", fix="no plan here"))


def test_the_documents_table_is_current() -> None:
    assert (Path(__file__).parents[2] / "docs" / "constraints.md").read_text() == docs_text()
