"""Published rows as people print them: numbers with words around them, layouts and batches in notes, words for OOM."""

from __future__ import annotations

import csv
import io
import random
from math import inf
from pathlib import Path

import pytest

from accuracy import main as accuracy
from published import COLUMNS, Row, read
from published.cells import Cells, Skip
from published.degrees import batch_of, expert_degree, sizes_of, stage_of
from published.models import model_of
from published.rows import row_of
from published.score import Result, predict_all
from shardwise.errors import ConfigError, ExitCode
from shardwise.hardware.cluster import load_cluster
from shardwise.model.spec import preset
from tests.pure.test_published import RAWS, variant
from tests.pure.test_published_words import BARE

EMPTY = dict.fromkeys(("dp_replicate", "dp_shard", "tp", "pp", "cp", "zero_stage"), "")
SIZES = {key: "" for key in ("n_params", "n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "vocab")}


@pytest.mark.parametrize(
    ("text", "value"),
    [("3,25", 3.25), ("0,385", 0.385), ("1,234", 1234), ("1,234,567", 1234567), ("12,345.6", 12345.6), ("0,9 s", 0.9),
     ("3,2514", 3.2514), ("~12,5", 12.5), ("1_000", 1000)],
)  # fmt: skip
def test_commas_before_decimals_and_between_thousands(text: str, value: float) -> None:
    assert Cells({"step_time_s": text}).number("step_time_s") == pytest.approx(value)


@pytest.mark.parametrize(
    ("mark", "encoding", "ends", "delimiter"),
    [
        (b"\xef\xbb\xbf", "utf-8", "\r\n", ","), (b"", "utf-16", "\n", "\t"), (b"", "utf-8", "\r\n", ";"),
        (b"", "cp1252", "\n", ","), (b"\n\n", "utf-8", "\n", ","),
    ],
)  # fmt: skip
def test_files_as_spreadsheets_write_them(
    tmp_path: Path, mark: bytes, encoding: str, ends: str, delimiter: str
) -> None:
    names = [f" {name.upper()} " for name in reversed(COLUMNS)]
    cells = [{**RAWS["fsdp-1"], "source": 'café "x",\r\nb'}.get(name, "") for name in reversed(COLUMNS)]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator=ends, delimiter=delimiter)
    writer.writerows([[*names, "more"], [*cells, "0"], [""] * len(cells)])
    (tmp_path / "rows.csv").write_bytes(mark + text.getvalue().encode(encoding))
    (row,), skipped = read(tmp_path / "rows.csv")
    assert (row.id, row.step_time, skipped) == (RAWS["fsdp-1"]["id"], variant("fsdp-1").step_time, {})


@pytest.mark.parametrize("data", [b"", b"\n\n", b"\x9d\x00\xff", b"id\n" + b"x" * 200_000, b"\xff\xfe\x00"])
def test_what_is_no_table_is_said(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "rows.csv").write_bytes(data)
    with pytest.raises(ConfigError, match="rows.csv: (columns: found no id|is no table of text)"):
        read(tmp_path / "rows.csv")


def test_places_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.csv").write_text(",".join(COLUMNS) + "\n")
    for out, page in (("no/o.json", "p.md"), (".", "p.md"), ("o.json", "rows.csv/p.md")):
        words = [str(tmp_path / "rows.csv"), "--out", str(tmp_path / out), "--page", str(tmp_path / page)]
        assert accuracy(words) == ExitCode.USAGE
        assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("tp", "TP=4", 4), ("tp", "TP=4,PP=2", 4), ("pp", "PP 8", 8), ("dp_shard", "8 (HSDP)", 8),
        ("dp_shard", "-1", None), ("dp_shard", "auto", None), ("cp", "no", None), ("micro_batch", "1/GPU", 1),
        ("mfu", "38-41%", 0.395), ("tokens_per_s_per_gpu", "600 to 700", 650), ("n_heads", "32-64", None),
        ("peak_mem_gib", "65.2 (82%)", 65.2), ("tflops_per_gpu", "310 TFLOP/s/GPU", 310), ("n_params", "1e400", None),
        ("n_layers", "1000000000", None),
    ],
)  # fmt: skip
def test_words_around_numbers(name: str, text: str, value: float | None) -> None:
    cells = Cells({name: text})
    if name in ("n_layers", "dp_shard"):
        assert cells.count(name) == value
    else:
        assert cells.number(name) == (pytest.approx(value) if value else None)


@pytest.mark.parametrize(
    ("count", "gpu", "devices"),
    [
        ("64", "h100", 64), ("8 GPUs", "h100", 8), ("8 nodes x 8", "h100", 64), ("16x8", "a100", 128),
        ("", "8xA100-80GB", 8), ("", "64 x H100", 64), ("", "H100 x64", 64), ("", "h100", None), ("8x0", "h100", None),
    ],
)  # fmt: skip
def test_devices_beside_their_name(count: str, gpu: str, devices: int | None) -> None:
    assert Cells({"n_gpus": count, "gpu": gpu}).devices == devices


@pytest.mark.parametrize(
    ("said", "axes"),
    [
        ({"tp": "TP=4,PP=4"}, (4, 4, 4)),
        ({"notes": "TP4 PP4"}, (4, 4, 4)),
        ({"notes": "tensor parallel size 8; pipeline parallel 2"}, (8, 2, 4)),
        ({"notes": "8-way tensor parallelism"}, (8, 1, 8)),
        ({"notes": "tensor_model_parallel_size=4, pipeline_model_parallel_size: 4"}, (4, 4, 4)),
        ({"notes": "DeepSpeed ZeRO stage 2"}, (1, 1, 64)),
        ({"notes": "plain DDP"}, (1, 1, 64)),
        ({"zero_stage": "zero2"}, (1, 1, 64)),
        ({"dp_shard": "auto"}, (1, 1, 64)),
    ],
)
def test_layouts_in_words(said: dict[str, str], axes: tuple[int, int, int]) -> None:
    sizes = sizes_of(Cells({"n_gpus": "64", "gpu": "h100", **said}))
    assert (sizes.tp, sizes.pp, sizes.data) == axes


@pytest.mark.parametrize(
    ("notes", "degree"),
    [("TP=1, EP=8", 8), ("EP8", 8), ("expert parallel size 8", 8), ("8-way expert", 8), ("step 8, deepep 2, ETP=4", 1)],
)
def test_experts_in_words(notes: str, degree: int) -> None:
    assert expert_degree(Cells({"notes": notes})) == degree
    assert expert_degree(Cells({"notes": notes, "ep": "2"})) == 2


@pytest.mark.parametrize(
    ("notes", "said"),
    [
        ("VP=2", "interleaved vs2"), ("VPP4", "interleaved vs4"), ("virtual pipeline size 4", "interleaved vs4"),
        ("interleaved 1F1B", "interleaved vs2"), ("no interleaved schedule", "1f1b"), ("", "1f1b"),
    ],
)  # fmt: skip
def test_schedules_in_words(notes: str, said: str) -> None:
    cells = {"tp": "4", "pp": "4", "dp_replicate": "4", "n_gpus": "64", "micro_batch": "1", "vp": "", "pp_schedule": ""}
    assert f"/ {said} " in str(variant("core-8", **cells, global_batch="64", notes=notes).plan)
    of_cell = variant("core-8", **cells | {"vp": "1"}, global_batch="64", notes=notes).plan
    assert "/ 1f1b " in str(of_cell), "notes do not overrule cells"


@pytest.mark.parametrize(("notes", "stage"), [("ZeRO-2", 2), ("SHARD_GRAD_OP", 2), ("ZeRO stage 1", 1), ("ZeRO 3", 3)])
def test_stages_in_notes(notes: str, stage: int) -> None:
    assert variant("fsdp-1", zero_stage="", dp_shard="", dp_replicate="", notes=notes).plan.zero == stage


@pytest.mark.parametrize(
    ("notes", "mode"),
    [
        ("full activation recomputation", "blocks"), ("recompute all layers", "blocks"), ("remat full", "blocks"),
        ("full AC", "blocks"), ("no activation recomputation", "none"),
    ],
)  # fmt: skip
def test_recompute_in_notes(notes: str, mode: str) -> None:
    assert variant("core-8", activation_checkpoint="", notes=notes).plan.recompute.mode == mode


def test_fp8_in_notes() -> None:
    assert variant("core-8", precision="", notes="FP8 training with Transformer Engine").workload.compute == "fp8"
    assert variant("core-8", precision="bf16", notes="fp8 training is faster").workload.compute == ""


@pytest.mark.parametrize("notes", ["TP5 on others", "tensor and data parallel", "", "a fast run"])
def test_words_that_are_no_layout(notes: str) -> None:
    with pytest.raises(Skip, match="layout: not stated"):
        sizes_of(Cells({"n_gpus": "64", "gpu": "h100", "notes": notes}))


def test_notes_do_not_overrule_cells() -> None:
    sizes = sizes_of(Cells({"n_gpus": "64", "tp": "2", "pp": "1", "cp": "1", "notes": "TP=4, PP=4 was slower"}))
    assert (sizes.tp, sizes.pp) == (2, 1)


@pytest.mark.parametrize(
    ("said", "stage"),
    [
        ("ZeRO-3 + offload", 3), ("FSDP2", 3), ("full shard", 3), ("HSDP", 3), ("SHARD_GRAD_OP", 2), ("no_shard", 0),
        ("distributed optimizer", 1), ("DDP", 0), ("", None), ("os+g", 2), ("P_os", 1), ("optim", 1), ("ZeRO++", 3),
        ("optim_grads", 2), ("optim_grads_params", 3), ("ZeRO-Infinity", 3), ("Gemini", 3),
    ],
)  # fmt: skip
def test_stages_in_words(said: str, stage: int | None) -> None:
    assert stage_of(Cells({"zero_stage": said})) == stage


def test_states_on_the_host_beside_the_stage() -> None:
    assert variant("zero-1", zero_stage="ZeRO-3 + offload", optimizer="AdamW", notes="").plan.offload.state
    assert not variant("zero-1", zero_stage="ZeRO-3", optimizer="AdamW", notes="").plan.offload.state


@pytest.mark.parametrize(
    ("cells", "batch"),
    [
        ({"global_batch": "1M tokens", "micro_batch": "1"}, 128),
        ({"global_batch": "1M", "micro_batch": "1"}, 128),
        ({"global_batch": "1048576", "micro_batch": "1"}, 128),
        ({"global_batch": "1,048,576 tok", "micro_batch": "1"}, 128),
        ({"global_batch": "128 seqs", "micro_batch": "2 (seq)"}, 128),
        ({"notes": "GBS=128, MBS=2"}, 128),
        ({"notes": "global batch size 128; micro batch 4"}, 128),
        ({"notes": "a 1M-token batch"}, 128),
        ({"notes": "batch size of 2M tokens", "micro_batch": "1"}, 256),
        ({"global_batch": "65536", "micro_batch": "1"}, 65536),
    ],
)
def test_batches_in_words(cells: dict[str, str], batch: int) -> None:
    found = Cells({"n_gpus": "8", "dp_replicate": "8", **cells})
    assert batch_of(found, sizes_of(found), 512 if batch == 65536 else 8192)[0] == batch


def test_a_step_of_a_batch_in_tokens_is_a_step_of_its_sequences() -> None:
    said, tokens = (variant("core-8", **BARE | {"global_batch": text}) for text in ("128", str(128 * 8192) + " tokens"))
    assert said.workload == tokens.workload and said.step_time == tokens.step_time


@pytest.mark.parametrize(
    ("cells", "data"),
    [
        ({"dp_shard": "16", "tp": "1", "pp": "1", "ep": "4"}, (1, 64)),
        ({"dp_replicate": "8", "tp": "2", "pp": "1", "ep": "4"}, (32, 1)),
        ({"dp_shard": "64", "tp": "1", "pp": "1", "ep": "4"}, (1, 64)),
    ],
)
def test_experts_that_a_mesh_counts_beside_its_data_ranks(cells: dict[str, str], data: tuple[int, int]) -> None:
    sizes = sizes_of(Cells({"n_gpus": "64", "gpu": "tpu-v5p", **cells}))
    assert (sizes.replicate, sizes.shard) == data


def test_a_micro_batch_of_another_run() -> None:
    with pytest.raises(Skip, match="batch"):
        variant("core-8", global_batch="", micro_batch="", notes="micro batch 2 goes OOM")


@pytest.mark.parametrize(
    "said",
    [
        {"peak_mem_gib": "OOM"},
        {"tokens_per_s_per_gpu": "OOM"},
        {"mfu": "out of memory"},
        {"notes": "this run went OOM"},
        {"notes": "the job failed with CUDA out of memory"},
        {"notes": "does not fit in memory"},
    ],
)
def test_out_of_memory_in_words(said: dict[str, str]) -> None:
    assert variant("core-8", **BARE | {"step_time_s": ""} | said).oom
    assert not variant("core-8", **BARE | {"step_time_s": "6"} | said).oom, "what was timed has run"


def test_what_was_measured_and_how_it_counts() -> None:
    one = variant("core-8", **BARE, step_time_s="", tokens_per_s_per_gpu="650")
    whole = variant("core-8", **BARE, step_time_s="", tokens_per_s_per_gpu="41,600 (total)")
    assert whole.step_time == pytest.approx(one.step_time)
    both = variant("old-2", step_time_s="", tflops_per_gpu="140", activation_checkpoint="full").step_time
    used = variant("old-2", step_time_s="", mfu=str(140 / 312), activation_checkpoint="full").step_time
    assert both and used and both / used == pytest.approx(4 / 3), "an MFU never counts recompute"


@pytest.mark.parametrize(
    ("cells", "stack"),
    [
        ({"model": "bigscience/bloom-7b1", "date": "2025-06", "tp": "8", "dp_replicate": "8"}, "megatron-core"),
        ({"gpu": "v100-32g", "tp": "8", "dp_replicate": "8"}, "megatron-2021"),
        ({"source": "NeMo", "date": "2023-06", "precision": "fp8"}, "megatron-bridge"),
        ({"source": "NeMo", "date": "2023-06", "precision": "bf16"}, "megatron-bridge"),
        ({"source": "Megatron-LM", "date": "2023-03"}, "megatron-core"),
        ({"source": "Megatron-LM", "date": "2022-12"}, "megatron-2021"),
        ({"source": "Megatron-LM", "date": "2022-12", "notes": "FlashAttention"}, "megatron-flash"),
        ({"dp_replicate": "", "dp_shard": "64", "zero_stage": ""}, "torchtitan"),
        ({"zero_stage": "ZeRO-3"}, "torchtitan"),
        ({"dp_replicate": "1", "dp_shard": "8", "pp": "8", "zero_stage": ""}, "megatron-core"),
        ({"tp": "", "pp": "", "cp": ""}, "torchtitan"),
        ({"tp": "", "pp": "", "cp": "", "date": "2023-01"}, "fsdp1"),
        ({"source": "lit-llama", "n_gpus": "8", "dp_replicate": "8"}, "eager"),
        ({"source": "lit-llama"}, "torchtitan"),
        ({"source": "t5x"}, "jax"),
        ({"source": "FairScale", "date": "2021-06"}, "fsdp1"),
        ({"source": "NeMo AutoModel", "notes": "TE + DeepEP"}, "megatron-bridge"),
        ({"source": "x", "notes": "PyTorch FSDP with Transformer Engine's layers", "tp": ""}, "megatron-core"),
        ({"source": "NeMo AutoModel", "notes": "LoRA"}, "torchtitan"),
        ({"source": "NeMo AutoModel", "notes": "LoRA", "n_gpus": "1", "tp": "", "dp_replicate": ""}, "eager"),
    ],
)
def test_a_framework_that_no_rule_knows_gets_that_of_its_era(cells: dict[str, str], stack: str) -> None:
    assert variant("core-8", **BARE | SIZES | cells).stack.name == stack


def test_an_unknown_framework_shards_and_compiles_nothing_by_itself() -> None:
    plain = variant("core-8", **BARE | SIZES | {"model": "Llama 3.2 1B", "tp": "", "pp": "", "cp": ""})
    assert plain.plan.zero == 0 and not plain.stack.fused
    assert variant("core-8", **BARE | {"dp_replicate": "", "dp_shard": "64", "compile": "torch.compile"}).stack.fused
    assert not variant("fsdp-1", compile="off").stack.fused and variant("fsdp-1", compile="on").plan.compile


@pytest.mark.parametrize(
    ("said", "mode"),
    [
        ({"activation_checkpoint": "✓"}, "blocks"),
        ({"activation_checkpoint": "yes (every layer)"}, "blocks"),
        ({"activation_checkpoint": "minimal", "source": "MaxText"}, "ops"),
        ({"activation_checkpoint": "every 3 layers"}, "every"),
        ({"activation_checkpoint": "op-level SAC", "source": "torchtitan"}, "ops"),
        ({"activation_checkpoint": "selective", "source": "llm-foundry", "date": "2024-03"}, "every"),
        ({"activation_checkpoint": "", "notes": "FSDP; activation checkpointing"}, "blocks"),
        ({"activation_checkpoint": "", "notes": "without activation checkpointing", "model": "Llama 3.2 1B"}, "none"),
    ],
)
def test_recompute_in_words(said: dict[str, str], mode: str) -> None:
    found = variant("fsdp-1", **BARE | SIZES | said).plan.recompute
    assert found.mode == mode and (mode != "every" or found.every == (3 if "3" in said["activation_checkpoint"] else 2))


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("PaLM 540B", 540.4), ("OPT-350M", 0.356), ("Megatron 8.3B", 8.3), ("Turing-NLG 17B", 17.2),
        ("Jamba v0.1 52B", 51.1), ("Qwen1.5-110B", 111.2), ("bloom-560m", 0.559), ("phi-4-mini", 3.84),
        ("RoBERTa-large", 0.355), ("ViT-L/16", 0.304), ("Command R+", 103.8), ("open_llama_3b", 3.43),
    ],
)  # fmt: skip
def test_models_of_papers(name: str, billions: float) -> None:
    assert model_of(Cells({"model": name}), None).num_params / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama7b", 6.738), ("7B LLaMA-2", 6.738), ("google/vit-base-patch16-224", 0.0866), ("ViT-G/14", 1.844),
        ("ViT-g/14", 1.013), ("BEiT-L/16", 0.304), ("DINOv2-B/14", 0.0866), ("internlm/internlm2-1_8b", 1.889),
        ("stablelm-2-1_6b", 1.645), ("OLMo-2-0425-1B", 1.485), ("BERT-L", 0.335), ("MLPerf BERT", 0.335),
        ("XLM-R XL", 3.48), ("distilgpt2", 0.082), ("DSv3", 671.0), ("DeepSeek-Coder-V2-Lite", 15.7),
        ("deepseek-moe-16b", 16.38), ("BloombergGPT", 50.6), ("Grok-2", 269.5), ("GPT-1.5B", 1.558),
        ("GPT 345M", 0.355), ("GPT-3", 174.6), ("nanoGPT", 0.124), ("Mistral-Small-22B", 22.25),
        ("INTELLECT-1", 10.2), ("ModernBERT-large", 0.395), ("deberta-v3-large", 0.435), ("Command R7B", 8.03),
        ("MiniCPM-2B", 2.725), ("Jamba-1.5-Large", 398.0), ("Pangu Ultra MoE 718B", 718.0), ("GLM-5", 744.0),
        ("exaone-3.5-7.8b", 7.82), ("starcoder2-7b", 7.174), ("codellama-70b", 68.98), ("Ling-mini-2.0", 16.26),
        ("EuroLLM-9B", 9.15), ("Pangu Pro MoE", 72.0), ("Skywork-MoE", 146.0), ("Phi-4-multimodal", 3.836),
        ("Hunyuan-7B", 7.5), ("GLM-4.7-Flash", 29.8), ("bloom-7.1b", 7.069), ("Megatron-LM 4.2B", 4.2),
        ("facebook/opt-6.7b", 6.658), ("Qwen3-30B-A3B", 30.53), ("llama3.1_405b", 405.9), ("Llama_3_8B", 8.03),
    ],
)  # fmt: skip
def test_ways_to_spell_a_model(name: str, billions: float) -> None:
    assert model_of(Cells({"model": name}), None).num_params / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize(
    "name",
    ["ALBERT-xxlarge", "NLLB-200-3.3B", "CodeT5+ 770M", "HunyuanVideo 13B", "SD3-8B", "OpenCLIP ViT-H/14", "T5-3B"],
)
def test_models_that_are_no_chain_are_no_decoder_of_their_size(name: str) -> None:
    with pytest.raises(Skip, match="chain"):
        model_of(Cells({"model": name}), None)


def test_pictures_are_as_long_as_their_patches() -> None:
    empty = SIZES | {"seq_len": "", "tp": "", "pp": "", "cp": ""}
    found = variant("core-8", **BARE | empty | {"model": "ViT-L/16"})
    assert found.workload.seq_len == preset("vit-l-16").max_seq_len and found.spec.patch == 16
    with pytest.raises(Skip, match="chain"):
        row_of({**RAWS["core-8"], "model": "T5-11B"})


@pytest.mark.parametrize(
    ("name", "millions", "tokens"),
    [
        ("vit_base_patch16_224", 86.6, 197), ("deit_small_patch16_224", 22.1, 197), ("vit_tiny_patch16_224", 5.7, 197),
        ("vit_large_patch32_384", 306.6, 145), ("ViT-B/32", 88.2, 50), ("vit_huge_patch14_224", 632.1, 257),
    ],
)  # fmt: skip
def test_names_of_vision_transformers_say_patches_and_pictures(name: str, millions: float, tokens: int) -> None:
    found = model_of(Cells({"model": name}), None)
    assert found.num_params / 1e6 == pytest.approx(millions, rel=0.01) and found.max_seq_len == tokens


def test_adapters_are_trained_beside_weights_in_16_bits() -> None:
    tuned = variant("fsdp-1", **BARE | {"model": "Llama 3.1 8B LoRA", "precision": "bf16"})
    assert tuned.plan.precision == "bf16-pure" and tuned.workload.trained < 0.01
    assert (
        variant("fsdp-1", **BARE | {"model": "Llama 3.1 8B LoRA", "precision": "bf16-mixed"}).plan.precision == "bf16"
    )


def test_sixteen_v100_are_a_dgx_2() -> None:
    usual = load_cluster("v100").network
    old = {"gpu": "v100-32g", "interconnect": "", "tp": "8", "dp_replicate": "8"}
    assert variant("core-8", **BARE | old).cluster.network == usual
    assert variant("core-8", **BARE | old | {"gpus_per_node": "16"}).cluster.network.bandwidth > 3 * usual.bandwidth


ODD = (
    "",
    "0",
    "-1",
    "1e400",
    "nan",
    "½",
    "8x0",
    "TP=4,PP=2",
    "OOM",
    "auto",
    "8-16",
    "2 x 8",
    "FSDP",
    "dualpipe",
    "h100-0gb",
)
WORDS = (
    "etp 0",
    "ep 0",
    "gbs 0",
    "r=0; LoRA",
    "16 experts, top-0",
    "offload of 0 layers",
    "tp 0 pp 0",
    "1M-token batch",
)


def test_no_slip_of_the_keyboard_ends_the_reading(tmp_path: Path) -> None:
    draw, path, count = random.Random(5), tmp_path / "odd.csv", 150
    sound = [raw for name, raw in RAWS.items() if not name.startswith("skip")]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for _ in range(count):
            slips = {name: draw.choice(ODD) for name in draw.sample(COLUMNS, 2)}
            writer.writerow({**draw.choice(sound), "notes": draw.choice(WORDS), **slips})
    rows, skipped = read(path)
    assert len(rows) + sum(skipped.values()) == count and all(skipped)
    results, refused = predict_all(rows)
    assert len(results) + sum(refused.values()) == len(rows)
    assert all(0 < result.step_time < inf for result in results)


def test_a_number_that_ends_an_estimate_is_counted() -> None:
    def fail(row: Row) -> Result:
        raise ZeroDivisionError(row.id)

    assert predict_all([variant("core-8")], fail) == ([], {"planner: numbers that cannot be": 1})
