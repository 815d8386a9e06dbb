"""The reader of published measurements, on rows made up for every branch, and the numbers that sum errors up."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import accuracy
from published import COLUMNS, Row, read
from published.cells import Cells, Skip
from published.constants import ESTIMATORS, formula_constants, tables
from published.models import _entries
from published.page import page
from published.rows import row_of
from published.score import Result, chosen, oom, predict, predict_all, printed, quantile, ranking, report, spread
from published.stacks import CHUNKED
from shardwise.errors import ConfigError, PlanError
from shardwise.hardware.cluster import device_names, load_cluster
from shardwise.model.spec import ModelSpec
from shardwise.plan.memory import Memory, RankMemory
from shardwise.plan.plan import Plan

SAMPLE = Path(__file__).parents[1] / "data" / "published_sample.csv"
with SAMPLE.open(encoding="utf-8") as _file:
    RAWS = {raw["id"]: raw for raw in csv.DictReader(_file)}
SKIPS = {
    "skip-1": "model: neither a known name nor its sizes",
    "skip-2": "model: not a chain of equal blocks",
    "skip-3": "hardware: not stated",
    "skip-4": "hardware: no preset for abacus",
    "skip-5": "hardware: number of devices not stated",
    "skip-6": "layout: not stated",
    "skip-7": "layout: product is not the number of devices",
    "skip-8": "batch: not stated",
    "skip-9": "measurement: none",
}


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    return {row.id: row for row in read(SAMPLE)[0]}


def variant(base: str, **cells: str) -> Row:
    """A row of the sample with some cells replaced."""
    return row_of({**RAWS[base], **cells})


def test_every_row_is_read_or_counted() -> None:
    found, skipped = read(SAMPLE)
    assert {row.id for row in found} == set(RAWS) - set(SKIPS)
    assert skipped == {reason: 1 for reason in SKIPS.values()}
    assert {row.group for row in found} == {identifier.split("-")[0] for identifier in set(RAWS) - set(SKIPS)}


def test_plans(rows: dict[str, Row]) -> None:
    plans = {
        "fsdp-1": "dp2 fsdp8 / gbs32 / bf16 / recompute=ops compile",
        "fsdp-2": "fsdp8 / gbs8 / bf16 fp8=tensorwise+gather / recompute=ops",
        "fsdp-3": "fsdp8 / gbs8 / bf16 / recompute=every2",
        "core-1": "pp8 fsdp4 tp4 zero1 / interleaved vs5 mb64 gbs256 / bf16 fp8=rowwise / seq loss-parallel",
        "core-2": "fsdp64 ep8 zero1 / mb2 gbs512 / bf16 / recompute=ops",
        "core-4": "pp2 tp8 / 1f1b mb32 gbs32 / bf16 / loss-parallel recompute=25%",
        "core-5": "fsdp64 tp4 ep32 zero1 / mb4 gbs256 / bf16 / seq loss-parallel",
        "core-6": "tp8 / mb32 gbs32 / bf16 / seq loss-parallel offload=activations",
        "core-8": "fsdp64 / gbs64 / bf16",
        "old-1": "pp4 dp2 tp4 / 1f1b mb16 gbs64 / fp16 / loss-parallel recompute=blocks reduce=fp16",
        "sweep-1": "pp2 fsdp8 tp4 zero1 / 1f1b mb256 gbs2048 / bf16 / seq",
        "nano-1": "pp2 dp4 tp4 / 1f1b mb64 gbs256 / bf16 / seq loss-parallel",
        "nano-2": "dp8 / gbs48 / bf16",
        "foundry-1": "fsdp8 / mb2 gbs64 / bf16 / reduce=bf16",
        "zero-1": "fsdp8 / gbs8 / bf16 / recompute=blocks offload=state reduce=bf16",
        "tune-1": "dp1 / gbs2 / bf16-pure / recompute=blocks",
        "jax-1": "fsdp128 / gbs256 / bf16 / recompute=blocks",
        "new-2": "dp1 / mb8 gbs8 / fp32",
    }
    assert {name: rows[name].plan for name in plans} == {name: Plan.parse(text) for name, text in plans.items()}


@pytest.mark.parametrize(
    ("text", "turns", "says"),
    [
        ("ZB-V", "2", "zero-bubble-v"),
        ("DualPipe", "2", "dualpipe-v"),
        ("zero bubble", "2", "zero-bubble vs2"),
        ("GPipe", "1", "gpipe"),
        ("looped BFS", "4", "looped-bfs vs4"),
        ("1f1b", "1", "1f1b"),
    ],
)
def test_schedules(text: str, turns: str, says: str) -> None:
    found = variant("core-1", pp_schedule=text, vp=turns).plan.schedule
    assert found.stages == Plan.parse(f"pp8 / {says} mb64").schedule.stages and found.kind == says.split()[0]


def test_stacks_and_kernels(rows: dict[str, Row]) -> None:
    stacks = {name: (row.stack.name, row.stack.attention, row.stack.fused) for name, row in rows.items()}
    assert stacks["fsdp-1"] == ("torchtitan", "flash2", True)
    assert stacks["fsdp-2"][2] is False, "not compiled"
    assert stacks["old-1"][:2] == ("megatron-2021", "fused-softmax")
    assert stacks["sweep-1"] == ("megatron-flash", "flash1", False)
    assert stacks["sweep-2"] == ("megatron-flash", "flash2", True), "the RMS kernel"
    assert stacks["sweep-3"][1] == "unfused"
    assert stacks["nano-1"][0] == "nanotron" and stacks["foundry-1"][0] == "fsdp1"
    assert stacks["zero-1"][:2] == ("deepspeed", "flash3") and rows["zero-1"].stack.logit_bytes < 1
    assert stacks["tune-1"][0] == "eager" and stacks["jax-1"][0] == "jax"
    assert rows["tune-1"].stack.logit_bytes == CHUNKED[False] < variant("tune-1", source="litgpt").stack.logit_bytes
    assert variant("tune-1", compile="y").stack.logit_bytes == CHUNKED[True], "no chunk in fp32"
    assert variant("tune-1", activation_checkpoint="none").stack.logit_bytes == 12, "step by step: not yet"
    assert variant("tune-1", activation_checkpoint="none", notes="+chunked CE").stack.logit_bytes == CHUNKED[False]
    assert stacks["new-1"][0] == "torchtitan" and stacks["new-2"][0] == "eager"
    assert all(stacks[f"core-{i}"][0] in ("megatron-core", "megatron-bridge") for i in range(1, 9))


def test_hardware(rows: dict[str, Row]) -> None:
    bandwidth = {name: row.cluster.network.bandwidth for name, row in rows.items()}
    ib400 = load_cluster("h100").network.bandwidth
    assert bandwidth["fsdp-1"] == bandwidth["core-1"] == ib400, "400 Gb/s per device, said in two ways"
    assert bandwidth["foundry-1"] == ib400 / 2, "1600 Gb/s for eight devices"
    assert bandwidth["old-1"] < ib400 / 5, "four adapters of 100 Gb/s for eight devices"
    cluster = rows["core-2"].cluster
    assert (cluster.nodes, cluster.per_node, cluster.domain) == (16, 4, 64)
    assert rows["core-5"].cluster.domain == 72 and rows["tune-1"].cluster.world == 1
    assert "an A100 of 80 GB" in rows["old-1"].assumed and rows["old-2"].cluster.device.name == "a100-40g"
    assert variant("core-1", gpu="v100-16g").cluster.device.memory < 18e9
    limited = variant("core-3", gpu="b200 (power limited)").cluster.device
    assert limited.curve.best < load_cluster("b200").device.curve.best
    assert variant("core-1", gpu="H800").cluster.local.bandwidth < load_cluster("h100").local.bandwidth
    assert variant("core-1", interconnect="8x50 GB/s IB").cluster.network.bandwidth == ib400
    assert variant("core-1", interconnect="HDR").cluster.network.bandwidth == ib400 / 2
    assert variant("core-1", interconnect="PCIe").cluster.local.bandwidth < 1e11


@pytest.mark.parametrize("name", device_names())
def test_every_device_has_its_name(name: str) -> None:
    if name != "cpu":
        assert variant("core-1", gpu=name).cluster.device.name == name


@pytest.mark.parametrize(
    ("gpu", "preset"),
    [
        ("A800 80G", "a100-80g"), ("H800", "h100"), ("H20-96GB", "h20"), ("GB200 NVL72", "gb200"),
        ("H100 NVL", "h100-nvl"), ("MI250", "mi250x"), ("Tesla V100", "v100"), ("TPU v4", "tpu-v4"),
        ("TPUv5p", "tpu-v5p"), ("Trillium", "tpu-v6e"),
        ("AWS trn2", "trainium2"), ("Gaudi 2", "gaudi2"), ("L40S", "l40s"), ("L40", "l40"), ("RTX 3090", "rtx3090"),
        ("RTX 6000 Ada", "ada6000"), ("RTX A6000", "a6000"), ("Intel Max 1550", "max1550"), ("T4", "t4"),
    ],
)  # fmt: skip
def test_names_that_people_write(gpu: str, preset: str) -> None:
    assert variant("core-1", gpu=gpu, precision="bf16").cluster.device.rates == load_cluster(preset).device.rates


def test_what_the_date_of_a_release_changes() -> None:
    said = {"source": "Megatron-Bridge", "notes": "", "model": "GPT-OSS 120B", "activation_checkpoint": "none"}
    before, after = (variant("core-8", **said, date=date).stack for date in ("2026-04", "2026-06"))
    assert (before.attention, after.attention) == ("flash2", "flash3")
    assert before.overlap_expert < after.overlap_expert == 0.5
    assert variant("core-8", **{**said, "model": "Llama 3 8B"}, date="2026-04").stack.attention == "flash3"


def test_the_forks_of_vendors_have_fused_attention() -> None:
    said = {"source": "Megatron-DeepSpeed", "notes": "", "model": "Llama 2 7B", "date": "2024-05"}
    assert variant("nano-1", **said, gpu="MI250X").stack.name == "megatron-flash"
    assert variant("nano-1", **said).stack.name == "megatron-2021"


def test_a_tensor_processor_runs_jax_and_a_missing_unit_16_bits() -> None:
    assert variant("core-1", gpu="v5litepod-128", source="a blog", notes="", precision="bf16").stack.name == "jax"
    alone = {"source": "a paper", "optimizer": "", "notes": ""}
    assert variant("core-8", gpu="TPU v4", **alone).stack.name == "jax"
    assert variant("core-1", gpu="A100-80G", precision="fp8").workload.compute == ""


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("n_params", "7B", 7e9), ("n_params", "350M", 350e6), ("seq_len", "8k", 8192), ("global_batch", "1,024", 1024),
        ("mfu", "45%", 0.45), ("mfu", "45", 0.45), ("mfu", "0.45", 0.45), ("step_time_s", "850 ms", 0.85),
        ("tokens_per_s_per_gpu", "12.5k tok/s", 12500), ("peak_mem_gib", "~70 GiB", 70), ("tp", "n/a", None),
    ],
)  # fmt: skip
def test_units_in_cells(name: str, text: str, value: float | None) -> None:
    assert Cells({name: text}).number(name) == (pytest.approx(value) if value else None)


def test_a_model_that_no_table_has(rows: dict[str, Row]) -> None:
    sizes = dict.fromkeys(("n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "vocab"), "")
    koala = variant("fsdp-1", model="Koala 13B", n_params="", **sizes)
    assert koala.spec.num_params == pytest.approx(13e9, rel=0.05)
    assert any("width 5120" in line for line in koala.assumed)
    with pytest.raises(Skip, match="neither a known name"):
        variant("fsdp-1", model="SwitchMoE 26B", n_params="", **sizes)


def test_recompute_is_assumed_where_nothing_else_fits() -> None:
    long = variant("core-8", activation_checkpoint="", seq_len="16384", notes="")
    assert long.plan.recompute.mode != "none"
    assert any("without which it would not fit" in line for line in long.assumed)
    unsaid = variant(
        "core-8",
        activation_checkpoint="",
        seq_len="16384",
        notes="recompute not stated in the README; micro batch not printed",
    )
    assert any("without which it would not fit" in line for line in unsaid.assumed)
    assert long.infers_recompute and not variant("core-8", activation_checkpoint="full").infers_recompute


def test_fsdp2_in_a_pipeline_gathers_once(rows: dict[str, Row]) -> None:
    axes = rows["fsdp-1"].plan.axes
    staged = variant("fsdp-1", pp="2", dp_replicate="1", dp_shard=str(axes.world // 2), micro_batch="1")
    assert (rows["fsdp-1"].plan.zero, staged.plan.zero) == (3, 1)
    other = variant("core-8", pp="2", dp_replicate="", dp_shard="4", tp="1", cp="1", n_gpus="8", zero_stage="")
    assert other.plan.zero == 2 and any("weights stay gathered" in sentence for sentence in other.assumed)


def test_models(rows: dict[str, Row]) -> None:
    sizes = {name: row.spec.num_params / 1e9 for name, row in rows.items()}
    assert sizes["fsdp-1"] == pytest.approx(8.03, abs=0.01) and sizes["core-3"] == pytest.approx(671.03, abs=0.01)
    assert rows["core-3"].spec.ffn_dim == 2048, "18432 is the width of the dense layers"
    grok = rows["core-5"].spec
    assert (grok.num_layers, grok.num_experts, grok.experts_per_token, grok.ffn_dim) == (8, 32, 8, 8192), (
        "four share one"
    )
    whole = variant("core-5", notes="ETP 1")
    assert whole.spec.num_params == pytest.approx(grok.num_params, rel=1e-3) and whole.plan.axes.ep == 8
    assert variant("core-5", notes="", date="2024-11").spec == grok and variant("core-5", notes="").spec == grok
    assert rows["core-7"].spec.num_layers == 23 and sizes["core-7"] == pytest.approx(31.6, abs=0.1)
    assert rows["old-1"].spec.num_layers == 38, "from 18 B parameters"
    assert rows["sweep-1"].spec.vocab_size == 128000
    assert rows["nano-1"].spec.tie_embeddings and rows["nano-1"].spec.num_kv_heads == 20
    assert rows["new-1"].spec.ffn_dim == 5632 and rows["new-1"].spec.head_dim == 128
    assert variant("new-1", model="thing", n_params="8030261248", n_layers="", d_model="").spec.num_kv_heads == 8
    assert variant("core-3", notes="1 dense + 3 MoE layers", n_layers="4").spec.num_dense_layers == 1


def test_every_entry_of_the_table_is_a_model() -> None:
    for pattern, sizes in _entries():
        known = {key: value for key, value in sizes.items() if key in ModelSpec.__dataclass_fields__}
        assert ModelSpec(**known).num_params > 5e6, pattern  # the least vision transformer


def test_times(rows: dict[str, Row]) -> None:
    assert rows["core-1"].step_time == 9
    assert rows["fsdp-1"].step_time == pytest.approx(32 * 8192 / 6000 / 16), "from tokens per second"
    assert rows["old-2"].step_time == pytest.approx(5 * 66 / 64), "of the batch that the layout divides"
    causal, full = (variant("core-3", notes=notes).step_time for notes in ("causal attention", "non-causal"))
    assert causal and full and 1.05 < full / causal < 1.3
    again = variant("core-3", notes="non-causal; hardware FLOPs").step_time
    assert again and again / full == pytest.approx(4 / 3)
    half = variant("sweep-1", mfu="0.25").step_time
    assert half == pytest.approx(2 * (rows["sweep-1"].step_time or 0))
    eight = variant("sweep-1", gpu="h100", precision="fp8").step_time
    assert eight == pytest.approx((rows["sweep-1"].step_time or 0) * 312 / 1979, rel=1e-3), "over the rate of fp8"


def test_memory_kinds(rows: dict[str, Row]) -> None:
    kinds = {name: (row.memory_kind, row.memory_stage) for name, row in rows.items() if row.memory_gib}
    assert kinds == {
        "fsdp-1": ("reserved", "worst"),
        "old-1": ("device", "worst"),
        "nano-1": ("reserved", "first"),
        "zero-1": ("allocated", "worst"),
        "tune-1": ("allocated", "worst"),
    }
    assert variant("core-1", peak_mem_gib="50").memory_kind == "reserved"
    assert variant("core-1", peak_mem_gib="50", notes="rank-0 allocated").memory_stage == "first"
    assert variant("core-1", peak_mem_gib="50", notes="on the last pipeline stage").memory_stage == "last"


def test_out_of_memory_and_doubts(rows: dict[str, Row]) -> None:
    assert {name for name, row in rows.items() if row.oom} == {"fsdp-3", "sweep-2"}
    assert not variant("fsdp-1", notes="1D FSDP on 128 GPUs OOMs").oom
    assert {name for name, row in rows.items() if row.doubtful} == {"old-1", "nano-1"}


def test_precision_and_optimizer(rows: dict[str, Row]) -> None:
    work = {name: (row.workload.compute, row.workload.optimizer) for name, row in rows.items()}
    assert work["core-1"] == ("fp8", "adamw") and work["core-2"] == ("fp4", "adamw")
    assert work["tune-1"] == ("", "adamw-8bit") and work["new-2"] == ("", "lion")
    assert work["core-3"] == ("", "adamw-bf16") and variant("core-3", optimizer="Adam").workload.optimizer == "adamw"
    assert 0 < rows["core-6"].workload.trained < 0.01
    assert variant("new-2", precision="tf32").workload.compute == "tf32"
    assert variant("new-2", precision="bf16-true", optimizer="").workload.optimizer == "adamw-bf16"
    assert variant("old-2").plan.precision == "fp16"


def test_weights_that_stay_gathered_between_micro_batches() -> None:
    sharded = {"source": "litgpt", "n_gpus": "2", "dp_shard": "2", "zero_stage": "3"}
    many = variant("tune-1", **sharded, global_batch="32")
    assert not many.plan.reshards and any("stay gathered" in sentence for sentence in many.assumed)
    assert variant("tune-1", **sharded, global_batch="4").plan.reshards, "one micro-batch"
    assert variant("tune-1", **{**sharded, "source": "torchtune"}, global_batch="32").plan.reshards


def test_batches() -> None:
    assert variant("nano-1", micro_batch="", notes="grad accum 4").plan.batch.micro_batches == 4
    said = variant("nano-1", micro_batch="", notes="grad accum 64")
    assert said.plan.batch.micro_batches == 64, "what the notes say is no guess, and is kept"
    tuned, tried = variant("nano-1", micro_batch=""), [variant("nano-1", micro_batch=str(n)) for n in (1, 2, 4, 8, 16)]
    assert any("the fastest that fits" in sentence for sentence in tuned.assumed)
    best = min((result for result in map(predict, tried) if result.fits), key=lambda result: result.step_time)
    assert tuned.plan == best.row.plan != tried[0].plan
    assert variant("foundry-1", micro_batch="", notes="").plan.batch.micro_batches == 2, "what fits, not all in one"
    assert variant("nano-1", global_batch="").workload.global_batch == 4 * 8


@pytest.mark.parametrize(
    ("base", "cells", "mode"),
    [
        ("core-2", {"notes": "recompute modules: core_attn"}, "none"),
        ("core-2", {"notes": "recompute modules: moe"}, "ratio"),
        ("core-2", {"activation_checkpoint": "", "notes": "no recompute in recipe"}, "none"),
        ("core-2", {"activation_checkpoint": "", "notes": "recompute modules: norm"}, "ops"),
        ("core-2", {"activation_checkpoint": "", "notes": ""}, "none"),
        ("foundry-1", {"activation_checkpoint": "", "notes": "FSDP with activation checkpointing"}, "blocks"),
        ("foundry-1", {"activation_checkpoint": "", "notes": "TFLOPs count causal; counts recompute"}, "blocks"),
        ("old-2", {}, "ops"),
        ("core-2", {"activation_checkpoint": "50%", "notes": ""}, "ratio"),
        ("core-2", {"activation_checkpoint": "2 of 8 layers", "notes": ""}, "ratio"),
        ("core-2", {"activation_checkpoint": "full (block, 1 layers)", "notes": ""}, "ratio"),
        ("core-2", {"activation_checkpoint": "full, uniform, 1 layer", "notes": ""}, "blocks"),
        ("core-2", {"activation_checkpoint": "every 2", "notes": ""}, "every"),
    ],
)
def test_recompute(base: str, cells: dict[str, str], mode: str) -> None:
    assert variant(base, **cells).plan.recompute.mode == mode


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="make accuracy ROWS"):
        read(tmp_path / "none.csv")
    (tmp_path / "short.csv").write_text("id,source\n1,2\n")
    with pytest.raises(ConfigError, match="found no date"):
        read(tmp_path / "short.csv")
    with (tmp_path / "odd.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerow({**RAWS["fsdp-1"], "zero_stage": "7"})
    assert read(tmp_path / "odd.csv") == ([], {"layout: not one that can be": 1})


# ---- the numbers


def test_quantiles_and_spread() -> None:
    assert quantile([3.0], 0.9) == 3.0
    assert quantile([1.0, 2.0, 3.0, 4.0, 5.0], 0.9) == pytest.approx(4.6)
    assert spread([0.1, -0.3, 0.2]) == {"median": 0.2, "p90": 0.28, "bias": 0.1}
    assert spread([]) == {"median": None, "p90": None, "bias": None}


def results(row: Row) -> list[Result]:
    """Three layouts of one job: measured 1.00, 1.04 and 2 s, predicted 1.5, 1.0 and 1.2 s."""
    plans = ("fsdp16", "dp2 fsdp8", "dp4 fsdp4")
    numbers = ((1.0, 1.5), (1.04, 1.0), (2.0, 1.2))
    return [
        Result(replace(row, plan=Plan.parse(plan), step_time=measured), predicted, 55.0, True, {"compute": predicted})
        for plan, (measured, predicted) in zip(plans, numbers, strict=True)
    ]


def test_ranking_by_hand(rows: dict[str, Row]) -> None:
    three = results(rows["fsdp-1"])
    assert ranking(three) == {"pairs": 2, "right": 1}, "1.00 and 1.04 are a tie; 1.00 to 2 is wrong, 1.04 to 2 right"
    assert chosen(three) == {"jobs": 1, "median_loss": 0.04, "within_5_percent": 1.0}
    other = replace(three[2], row=replace(three[2].row, group="elsewhere"))
    assert ranking([*three[:2], other]) == {"pairs": 0, "right": 0}
    assert chosen(three[:2])["jobs"] == 0
    same = replace(three[2], row=replace(three[2].row, plan=three[0].row.plan))
    assert ranking([three[0], same]) == {"pairs": 0, "right": 0}, "one layout measured twice"


def test_out_of_memory_by_hand(rows: dict[str, Row]) -> None:
    ran, failed = results(rows["fsdp-1"])[0], Result(rows["sweep-2"], 1.0, 90.0, False, {})
    assert oom([ran, ran, replace(ran, fits=False), ran, failed, replace(failed, fits=True)]) == {
        "recall": 0.5,
        "false_alarms": 0.25,
    }
    assert oom([ran])["recall"] is None


def test_the_number_of_a_rank(rows: dict[str, Row]) -> None:
    ranks = (RankMemory(0, {"weights": 100.0}, "loss"), RankMemory(1, {"weights": 60.0, "logits": 60.0}, "loss"))
    memory = Memory(ranks, fragmentation=0.5, context=7.0, held=4.0, workspace=2.0)
    row = rows["fsdp-1"]
    assert printed(memory, row) == 60 + 60 * 1.5 + 4 + 2  # holes arise in what comes and goes, not in the states
    assert printed(memory, replace(row, memory_kind="device", memory_stage="first")) == 100 + 4 + 2 + 7
    assert printed(memory, replace(row, memory_kind="allocated", memory_stage="last")) == 120


def test_report_and_page(rows: dict[str, Row]) -> None:
    three = results(rows["fsdp-1"])
    numbers = report(three, 5, {"batch: not stated": 2})
    assert list(numbers) == ["rows", "used", "skipped", "time", "memory", "oom", "ranking", "by_source"]
    assert numbers["used"] == 3 and numbers["memory"]["bias"] == 0.1
    assert list(numbers["by_source"]) == ["fsdp"] and numbers["by_source"]["fsdp"]["chosen"]["jobs"] == 1
    text = page(three, numbers)
    assert "5 rows, 3 used" in text and "`fsdp-1`" in text and "median loss 4.0 %" in text
    assert text.index("## At a glance") < text.index("## How a row is read") < text.index("## By source")
    named = re.search(r"^\| fsdp \| (.*?) \| 3 \|", text, re.MULTILINE)
    assert named and rows["fsdp-1"].source.startswith(named[1]), "whose abbreviation it is"


def test_a_plan_that_the_planner_refuses_is_counted(rows: dict[str, Row]) -> None:
    def refuse(row: Row) -> Result:
        raise PlanError(f"pipeline: {row.id}")

    assert predict_all([rows["core-1"]], refuse) == ([], {"planner: pipeline": 1})


def test_constants_are_all_there() -> None:
    text = tables()
    assert all(f"| {name} |" in text for name in device_names())
    assert "`overlap_data`" in text and "`megatron-2021`" in text and "`HOST_UPDATE`" in text
    shown = {row[:2] for row in formula_constants(ESTIMATORS)}
    assert {("memory", "`COMMUNICATOR`"), ("kernels", "`TAIL`"), ("links", "`HOP`"), ("blocktime", "`CAST`")} <= shown
    assert "`STALLS_AT`" in text


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: dict[str, Row]) -> None:
    out, where = tmp_path / "a.json", tmp_path / "docs" / "page.md"
    assert accuracy.main([str(SAMPLE), "--out", str(out), "--page", str(where)]) == 0
    numbers = json.loads(out.read_text())
    assert numbers["rows"] == len(RAWS) and numbers["used"] == len(rows)
    assert where.exists() and (where.parent / "images" / "accuracy-time.png").stat().st_size > 1000
    assert (where.parent / "accuracy.toml").exists()
    assert predict(rows["fsdp-1"]).step_time > 0
    assert accuracy.main([str(tmp_path / "none.csv")]) == 2 and "cannot be read" in capsys.readouterr().err
