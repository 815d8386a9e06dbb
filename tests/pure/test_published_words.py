"""How published rows say things: frameworks, names, experts, precisions, recompute, networks and cards."""

from __future__ import annotations

from dataclasses import replace

import pytest

from published.cells import Skip
from published.hardware import _stated
from published.rows import row_of
from published.stacks import FUSED_LOSS, LOSS_APART, LOSS_LOW, SLICED
from shardwise.hardware.cluster import load_cluster
from shardwise.plan.stack import load_stack
from tests.pure.test_published import RAWS, variant

BARE = {"notes": "", "source": "a blog", "date": "2025-06"}


@pytest.mark.parametrize(
    ("cells", "stack"),
    [
        ({"notes": "1.3x faster than DeepSpeed"}, "torchtitan"),
        ({"notes": "compared to Megatron-LM, at the same loss"}, "torchtitan"),
        ({"notes": "converted from Hugging Face"}, "torchtitan"),
        ({"notes": "Hugging Face checkpoint, tokenizer of Llama"}, "torchtitan"),
        ({"notes": "ran with DeepSpeed"}, "deepspeed"),
        ({"model": "Mistral NeMo 12B"}, "torchtitan"),
        ({"notes": "AMD Primus, Megatron backend"}, "megatron-core"),
        ({"notes": "MindSpeed-LLM"}, "megatron-core"),
        ({"source": "InternLM/InternEvo"}, "megatron-core"),
        ({"notes": "LLaMA-Factory"}, "deepspeed"),
        ({"notes": "DeepSpeed AutoTP", "tp": "2", "n_gpus": "32"}, "deepspeed"),
        ({"notes": "Hugging Face, tp_plan auto", "tp": "2", "n_gpus": "32"}, "torchtitan"),
    ],
)
def test_the_framework_is_the_one_that_ran(cells: dict[str, str], stack: str) -> None:
    assert variant("fsdp-1", **BARE | cells).stack.name == stack


def test_no_flash_attention_is_none() -> None:
    for said in ("no flash attention", "without FlashAttention", "flash attention off", "not using flash attention"):
        assert variant("core-8", **BARE | {"notes": said}).stack.attention == "unfused", said
    assert variant("core-8", **BARE | {"notes": "FlashAttention"}).stack.attention == "flash2"
    fused = BARE | {"source": "Pax", "notes": "no flash attention"}
    assert variant("core-8", **fused).stack.attention == "fused-softmax", "XLA fuses what is not one kernel"
    usual = [
        variant("core-8", **BARE | {"source": "NeMo", "date": date}).stack.attention for date in ("2024-04", "2024-09")
    ]
    assert usual == ["flash2", "flash3"], "kernels for Hopper are of July 2024"


def test_a_graph_of_the_whole_step_takes_the_host_out() -> None:
    row = variant("fsdp-1", **BARE | {"notes": "torchtitan; CUDA graph of the whole step"})
    assert row.stack.block_host == row.stack.micro_host == 0 and 0 < row.stack.launch <= 1e-6
    for said in ("torchtitan, no CUDA graph of the whole step", "torchtitan, TE CUDA graphs"):
        assert variant("fsdp-1", **BARE | {"notes": said}).stack.launch > 1e-6, said


def test_a_loss_in_chunks_holds_few_logits() -> None:
    for said in ("loss in 8 chunks", "loss computed in chunks", "chunked loss"):
        assert variant("fsdp-1", **BARE | {"notes": f"torchtitan, {said}"}).stack.logit_bytes == 0.5, said


def test_ligers_cross_entropy_alone_holds_all_logits() -> None:
    said = ("Liger CE", "Liger cross-entropy", "Liger kernels", "Liger fused linear cross entropy", "no Liger CE")
    held = [variant("fsdp-1", **BARE | {"notes": f"PyTorch FSDP2, {notes}"}).stack.logit_bytes for notes in said]
    assert held[0] == held[1] == FUSED_LOSS and held[2] == held[3] == SLICED < held[4]


def test_a_loss_in_chunks_fuses_nothing_else_but_that_of_a_library_of_kernels() -> None:
    def fused(notes: str, compiled: str) -> bool:
        return variant("fsdp-1", **BARE | {"compile": compiled, "notes": f"torchtitan, {notes}"}).stack.fused

    assert not fused("loss in chunks", "n") and fused("loss in chunks", "y") and fused("Liger kernels", "n")


def test_the_kernels_of_a_loss_in_primitives_move_what_they_move_one_by_one() -> None:
    def moved(notes: str, compiled: str) -> float:
        return variant("fsdp-1", **BARE | {"compile": compiled, "notes": notes}).stack.loss_bytes

    assert moved("PyTorch FSDP2", "n") == LOSS_APART > LOSS_LOW == moved("PyTorch FSDP2, logits in 16 bits", "n")
    assert moved("PyTorch FSDP2", "y") == moved("PyTorch FSDP2, Liger kernels", "n") == 0


def test_rotated_heads_and_norms_of_queries_of_a_model_that_has_neither_by_name() -> None:
    sizes = {"model": "GPT 1B", "n_layers": "16", "d_model": "2048", "n_heads": "16"}
    plain, own = (
        variant("fsdp-1", **BARE | sizes | {"notes": notes}).spec for notes in ("no rotary", "rotary, QK norm")
    )
    assert (plain.positions, plain.qk_norm, own.positions, own.qk_norm) == ("learned", False, "rotary", True)


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("GPT-20B", 18e9, 22e9),
        ("GPT-2 345M", 0.3e9, 0.45e9),
        ("GPT 2.7B", 2.4e9, 3e9),
        ("BLOOM-560m", 0.4e9, 0.75e9),
        ("DeepSeek-R1-Distill-Llama-8B", 7.5e9, 8.5e9),
        ("DBRX-mini 23B", 20e9, 26e9),
        ("Llama 3.1 405B", 400e9, 410e9),
        ("Mixtral 8x7B", 46e9, 47e9),
    ],
)
def test_a_model_has_the_size_of_its_name(name: str, least: float, most: float) -> None:
    sizes = {key: "" for key in ("n_params", "n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "vocab")}
    assert least < variant("core-8", **BARE | sizes | {"model": name, "ep": ""}).spec.num_params < most


def test_sizes_in_a_name_are_no_experts() -> None:
    sizes = {"n_params": "", "n_layers": "24", "d_model": "1024", "n_heads": "16", "n_kv_heads": "16", "d_ff": "4096"}
    spec = variant("core-8", **BARE | sizes | {"model": "GPT-2 24x1024", "vocab": "50257", "ep": ""}).spec
    assert (spec.kind, spec.num_layers, spec.dim) == ("gpt", 24, 1024)


def test_a_trainers_type_is_that_of_weights_and_states_where_no_other_fits() -> None:
    alone = {"dp_replicate": "1", "dp_shard": "1", "tp": "1", "pp": "1", "cp": "1", "ep": "", "n_gpus": "1",
             "micro_batch": "4", "global_batch": "4", "precision": "bf16", "activation_checkpoint": "full"}  # fmt: skip
    words = BARE | alone | {"notes": "Hugging Face Trainer, full fine-tuning"}
    large = variant("core-8", **words | {"model": "Mistral 7B", "n_params": "7.2e9", "gpu": "a100-80g"})
    assert (large.plan.precision, large.workload.optimizer) == ("bf16-pure", "adamw-bf16")
    assert "weights and states in 16 bits, without which it would not fit" in large.assumed
    mixed = variant("core-8", **words | {"model": "Mistral 7B", "gpu": "a100-80g", "precision": "bf16 mixed"})
    small = variant("core-8", **words | {"model": "Llama 3.2 1B", "n_params": "1.2e9", "gpu": "a100-80g"})
    assert {mixed.plan.precision, small.plan.precision} == {"bf16"}


def test_transformers_trainer_waits_for_the_loss_of_each_micro_batch() -> None:
    """Since October 2021, and neither on XLA nor on Habana; loops of PyTorch, and of litgpt, do not look at it."""
    alone = {"dp_replicate": "1", "dp_shard": "1", "tp": "1", "pp": "1", "cp": "1", "ep": "", "n_gpus": "1"}

    def waits(notes: str, **changed: str) -> bool:
        row = variant("core-8", **BARE | alone | {"notes": notes, "date": "2024-02", "gpu": "a100-80g"} | changed)
        return row.stack.micro_host == load_stack("deepspeed").micro_host

    trainers = "Hugging Face Trainer", "TRL, SFTTrainer", "LLaMA-Factory", "Axolotl"
    assert [waits(notes) for notes in trainers] == [True] * 4
    assert not waits("litgpt") and not waits("a PyTorch loop") and not waits("Hugging Face Trainer", date="2021-03")
    assert not waits("Hugging Face Trainer", gpu="gaudi2")


def test_who_hands_tokens_on_inside_a_node() -> None:
    for said, once in (("dispatcher DeepEP", True), ("HybridEP", True), ("alltoall dispatcher", False)):
        stack = variant("core-8", **BARE | {"notes": f"Megatron-LM; {said}"}).stack
        assert (stack.once_per_node, stack.once_per_rank) == (once, once), said


def test_experts_that_the_notes_state_are_those_of_a_known_mixture_too() -> None:
    """Of `Mixtral-8x22B-G8T8`, which is Mixtral's in parts of an eighth; and ranks that share each of them."""
    words = BARE | {"model": "Mixtral-8x22B-G8T8", "d_ff": "2048", "ep": "2", "tp": "2", "dp_replicate": "32"}
    fine = variant("core-8", **words | {"notes": "Megatron-Core; 64 experts, top-8; etp 2"})
    assert (fine.spec.num_experts, fine.spec.experts_per_token, fine.spec.ffn_dim) == (128, 16, 1024)
    assert fine.stack.expert_parts == 2 and not fine.stack.once_per_node
    plain = variant("core-8", **words | {"notes": "Megatron-Core; etp 1"})
    assert (plain.spec.num_experts, plain.spec.experts_per_token, plain.stack.expert_parts) == (8, 2, 1)


def test_experts_of_a_model_that_no_table_has() -> None:
    sizes = {"n_params": "", "n_layers": "35", "d_model": "7168", "n_heads": "56", "n_kv_heads": "8", "vocab": ""}
    counted = variant("core-8", **BARE | sizes | {"model": "Some 480B", "d_ff": "4864", "notes": "128 experts, top-2"})
    assert (counted.spec.num_experts, counted.spec.experts_per_token) == (128, 2)
    assert 450e9 < counted.spec.num_params < 490e9
    named = variant("core-8", **BARE | sizes | {"model": "Other-300B-A47B", "d_ff": "3584", "n_layers": "54"})
    assert named.spec.kind == "moe" and abs(named.spec.num_params / 300e9 - 1) < 0.05
    assert abs(named.spec.active_params / 47e9 - 1) < 0.1
    wide = variant("core-8", **BARE | sizes | {"model": "Some 480B", "d_ff": "", "notes": "128 experts, top-2"})
    assert abs(wide.spec.num_params / 480e9 - 1) < 0.02
    with pytest.raises(Skip, match="neither a known name nor its sizes"):
        row_of({**RAWS["core-8"], **BARE, **sizes, "model": "Some MoE", "d_ff": "4864"})


@pytest.mark.parametrize(
    ("said", "gpu", "precision"),
    [
        ("fp16/fp32 mixed", "a100-sxm-80g", "fp16"),
        ("FP16 (fp32 master)", "a100-sxm-80g", "fp16"),
        ("float16", "a100-sxm-80g", "fp16"),
        ("16-mixed", "a100-sxm-80g", "bf16"),
        ("16-mixed", "v100-32g", "fp16"),
        ("amp", "T4", "fp16"),
        ("", "v100-32g", "fp16"),
        ("bfloat16", "h100-sxm-80g", "bf16"),
        ("float32", "a100-sxm-80g", "fp32"),
        ("n/a", "h100-sxm-80g", "bf16"),
        ("int8 optimizer", "h100-sxm-80g", "bf16"),
    ],
)
def test_precisions(said: str, gpu: str, precision: str) -> None:
    assert variant("core-8", **BARE | {"precision": said, "gpu": gpu, "interconnect": ""}).plan.precision == precision


@pytest.mark.parametrize(
    ("said", "mode"),
    [
        ("on", "blocks"),
        ("enabled", "blocks"),
        ("full (uniform, 1)", "blocks"),
        ("Full recompute", "blocks"),
        ("gradient checkpointing", "blocks"),
        ("off", "none"),
        ("disabled", "none"),
        ("no recompute", "none"),
        ("core_attn,mlp", "ratio"),
        ("half", "ratio"),
        ("partial 50%", "ratio"),
        ("op", "ops"),
        ("AC=1", "blocks"),
        ("AC=0", "none"),
        ("unsloth", "blocks"),
        ("remat_block", "blocks"),
        ("offload", "none"),
        ("halfway decided", "none"),
        ("operator unknown", "none"),
    ],
)
def test_recompute(said: str, mode: str) -> None:
    words = BARE | {"source": "Megatron-LM", "activation_checkpoint": said}
    plan = variant("fsdp-1", **words | {"model": "Llama 3.2 1B", "n_params": "", "n_layers": "", "d_model": ""}).plan
    assert plan.recompute.mode == mode and plan.offload.activations is (said == "offload")
    assert mode != "ratio" or plan.recompute.ratio == pytest.approx(2 / 3 if "mlp" in said else 0.5)


def test_only_torchtitan_recomputes_by_default() -> None:
    empty = BARE | {"activation_checkpoint": "unknown", "model": "Llama 3.2 1B", "n_params": "", "compile": ""}
    sizes = {key: "" for key in ("n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "vocab")}
    assert variant("fsdp-1", **empty | sizes).plan.recompute.mode == "none"
    assert variant("fsdp-1", **empty | sizes | {"source": "torchtitan"}).plan.recompute.mode == "ops"


@pytest.mark.parametrize(
    ("said", "gigabytes"),
    [
        ("NVLink 900 GB/s + 8x400 Gb/s", 50),
        ("NVLink4 900 GB/s, IB NDR 400 Gb/s", 50),
        ("8x InfiniBand 200 Gb/s", 25),
        ("3.2 Tbps EFA", 50),
        ("8x400G", 50),
        ("4 * 100Gb RoCE", 6.25),
        ("100 Gb/s EDR x 4", 6.25),
        ("EDR InfiniBand", 1.5625),  # of nodes that had one to four for their eight devices
        ("4x HDR per node", 12.5),
        ("IB NDR400", 50),
        ("10 GbE", 0.15625),
        ("1600 Gbps per node", 25),
        ("25 GB/s per GPU", 25),
        ("NVLink 4", None),
    ],
)
def test_networks(said: str, gigabytes: float | None) -> None:
    found = _stated(said, 8)
    assert found == (None if gigabytes is None else pytest.approx(gigabytes * 1e9))


def test_cards_of_two_dies_and_links_without_nvlink() -> None:
    alone = BARE | {"interconnect": "PCIe only, no NVLink"}
    assert variant("core-8", **alone).cluster.local == load_cluster("a40").local
    die = load_cluster("mi250x").device
    found = variant("fsdp-2", **BARE | {"gpu": "MI250-128GB", "interconnect": ""}).cluster.device
    assert found.rates.bf16 == 2 * die.rates.bf16 and found.bandwidth == 2 * die.bandwidth


def test_attention_in_primitives_goes_by_many_names() -> None:
    for said in ("math attention", "SDPA math", "attention in primitives", "vanilla attention", "materialized scores"):
        assert variant("core-8", **BARE | {"notes": said}).stack.attention == "unfused", said


def test_one_silicon_computes_alike_and_one_code_takes_the_same_times() -> None:
    for one, other in (("h200", "h100"), ("b300", "gb300")):
        a, b = (load_cluster(name).device for name in (one, other))
        assert (a.curve.best, a.curve.depth, a.low_best) == (b.curve.best, b.curve.depth, b.low_best)
    chip, module = (load_cluster(name).device for name in ("gh200", "h100"))  # its watts are the host's too
    assert chip.curve.best / module.curve.best == pytest.approx(0.77, abs=0.005)
    assert chip.low_best / module.low_best == pytest.approx(0.77, abs=0.005)
    large, small = (load_cluster(name).device for name in ("mi325x", "mi300x"))
    assert large.low_best / large.curve.best == pytest.approx(small.low_best / small.curve.best, abs=0.005)
    core, bridge = (load_stack(name) for name in ("megatron-core", "megatron-bridge"))
    # what the recipes of the second choose is not compared
    chosen = {
        "grad_bytes": 0.0,
        "overlap_tensor": 0.0,
        "overlap_data": 0.0,
        "loss_bytes": 0.0,
        "logit_bytes": 0.0,
        "caches_low": 0.0,
    }
    chosen |= {"once_per_node": False, "once_per_rank": False}
    same = [replace(stack, name="", about="", **chosen) for stack in (core, bridge)]
    assert same[0] == same[1] and 0.25 < core.overlap_tensor < 0.5 < bridge.overlap_tensor
    assert core.loss_bytes > bridge.loss_bytes  # whose kernel reads the logits twice


def test_ranks_of_adapters() -> None:
    small, large = (
        variant("tune-1", notes=f"LoRA, r={rank}", model="Llama 3.1 8B LoRA").workload.trained for rank in (8, 64)
    )
    more = variant("tune-1", notes="LoRA rank 8 on every projection", model="Llama 3.1 8B LoRA").workload.trained
    assert large == pytest.approx(8 * small) and small < more < 0.01


def test_a_row_without_a_date_is_as_old_as_its_device() -> None:
    split = BARE | {"date": "", "tp": "8", "dp_replicate": "8"}
    dated = [variant("core-8", **split | {"gpu": gpu}).stack.name for gpu in ("v100-32g", "h100-sxm-80g")]
    assert dated == ["megatron-2021", "megatron-core"]


@pytest.mark.parametrize(
    ("said", "is_on"),
    [
        ("sequence parallel", True),
        ("sequence parallelism, selective recompute", True),
        ("TP + SP", True),
        ("sequence_parallel=True", True),
        ("sequence parallelism enabled", True),
        ("tensor and sequence parallelism", True),
        ("sequence_parallel=False", False),
        ("sequence parallel = false", False),
        ("sequence parallelism is disabled", False),
        ("sequence parallelism not used", False),
        ("no SP", False),
        ("without SP", False),
    ],
)
def test_sequence_parallelism_as_notes_say_it(said: str, is_on: bool) -> None:
    for date in ("2022-05", "2025-06"):  # of stacks whose default is off, and on
        row = variant(
            "core-8", **BARE | {"notes": f"Megatron-LM; {said}", "date": date, "tp": "8", "dp_replicate": "8"}
        )
        assert row.plan.tensor.sequence is is_on, date
        assert not any("sequence parallelism" in line for line in row.assumed)


def test_a_degree_of_sequence_parallelism_is_another_thing() -> None:
    row = variant("core-8", **BARE | {"notes": "Megatron-LM; Ulysses sp=4", "tp": "8", "dp_replicate": "8"})
    assert any(line.startswith("sequence parallelism on, the stack's default") for line in row.assumed)


def test_recompute_and_micro_batch_are_looked_for_together_where_neither_is_printed() -> None:
    bare = {"source": "a paper", "date": "2022-05", "micro_batch": "", "activation_checkpoint": "", "notes": ""}
    row = variant(
        "old-2",
        **bare
        | {"model": "OPT 175B", "n_layers": "96", "d_model": "12288", "gpu": "a100-sxm-80g"}
        | {"n_gpus": "992", "dp_shard": "124", "dp_replicate": "1", "tp": "8", "pp": "1", "global_batch": "992"},
    )
    assert row.plan.recompute.mode != "none" and row.plan.batch.micro_batches < 8
    assert any("with which a larger micro-batch is faster" in line for line in row.assumed)


@pytest.mark.parametrize(
    ("said", "gpu", "date", "kernel"),
    [
        ("FlashAttention 4", "b200", "2026-05", "flash3"),
        ("flash_attention_4", "b300", "2026-05", "flash3"),
        ("FA4", "h100-sxm-80g", "2026-05", "flash3"),
        ("flash attention 3", "h100-sxm-80g", "2025-05", "flash3"),
        ("flash attention 4x faster", "h100-sxm-80g", "2025-05", "flash2"),
        ("flash attention 32 heads", "h100-sxm-80g", "2025-05", "flash2"),
        ("flash attention 4 nodes", "h100-sxm-80g", "2025-05", "flash2"),
        ("Triton flash attention", "a100-sxm-80g", "2023-03", "triton"),
        ("Triton flash attention", "h100-sxm-80g", "2025-09", "flash2"),
        ("Triton RMSNorm", "h100-sxm-80g", "2024-09", "flash3"),
        ("FlashAttention-1", "a100-sxm-80g", "2023-03", "flash1"),
        ("flash attention 128k tokens", "a100-sxm-80g", "2023-09", "flash2"),
        ("FlashAttention 2", "v100-32g", "2024-03", "flash1"),
        ("FlashAttention 2", "Quadro RTX 8000", "2022-11", "fused-softmax"),
        ("sdpa", "RTX 2080 Ti", "2025-03", "flash1"),
        ("FlashAttention 2", "T4", "2025-03", "flash1"),
        ("FlashAttention 2", "RTX 6000 Ada", "2024-03", "flash2"),
        ("xformers", "a100-80g", "2023-03", "flash1"),
    ],
)
def test_kernels_of_attention_by_name_date_and_device(said: str, gpu: str, date: str, kernel: str) -> None:
    cells = {"notes": f"Megatron-LM; {said}", "gpu": gpu, "date": date, "interconnect": "", "precision": "fp16"}
    row = variant("core-8", **BARE | cells)
    assert row.stack.attention == kernel
    assert any("does not run on the device" in line for line in row.assumed) is (gpu in _BEFORE_AMPERE)


_BEFORE_AMPERE = ("v100-32g", "Quadro RTX 8000", "RTX 2080 Ti", "T4")


@pytest.mark.parametrize(
    ("gpu", "preset", "gigabytes"),
    [
        ("A100 SXM4 40 GB", "a100-40g", 42.3), ("A100 (40 GB)", "a100-40g", 42.3), ("A100 80 GB", "a100-80g", 84.9),
        ("A100-SXM4-40", "a100-40g", 42.3), ("A100 x 40", "a100-80g", 84.9), ("Quadro RTX 8000", "titanrtx", 50.9),
        ("Quadro RTX 6000", "titanrtx", 25.4), ("RTX 6000 Ada", "ada6000", 51.0), ("RTX 3060 12 GB", "rtx3060", 12.6),
        ("RTX 3070", "rtx3070", 8.4), ("RTX 4070", "rtx4070", 12.5), ("RTX 4070 Ti Super", "rtx4070tis", 16.9),
        ("RTX 5080", "rtx5080", 16.9), ("RTX 4080 SUPER", "rtx4080s", 16.9), ("GeForce RTX 4080", "rtx4080", 16.9),
        ("GTX 1080 Ti", "gtx1080ti", 11.7), ("A16", "a16", 15.8), ("GB10", "gb10", 128.0), ("DGX Spark", "gb10", 128.0),
        ("GB20", "", 0.0), ("V100-SXM3-32GB", "v100", 33.9), ("p4d.24xlarge", "a100-40g", 42.3),
        ("AWS p4de.24xlarge", "a100-80g", 84.9), ("p5.48xlarge", "h100", 84.9), ("p5en.48xlarge", "h200", 150.0),
        ("p5e", "h200", 150.0), ("a2-highgpu-8g", "a100-40g", 42.3), ("a2-ultragpu-8g", "a100-80g", 84.9),
        ("a3-megagpu-8g", "h100", 84.9), ("ND A100 v4", "a100-40g", 42.3), ("NDm A100 v4", "a100-80g", 84.9),
        ("Standard_ND96amsr_A100_v4", "a100-80g", 84.9), ("ND H100 v5", "h100", 84.9), ("g5.48xlarge", "a10g", 23.7),
        ("g6e.48xlarge", "l40s", 47.8), ("g6.12xlarge", "l4", 24.1), ("Atlas 900 A2", "ascend910b", 68.7),
        ("p3dn.24xlarge", "v100", 33.9), ("p3.16xlarge", "v100", 17.0), ("RTX 3080 Ti", "rtx3080ti", 12.6),
        ("RTX 3060 Ti", "rtx3060ti", 8.4), ("RTX 4060 Ti 16GB", "rtx4060ti", 16.9), ("Tesla P40", "p40", 25.6),
        ("RTX 5070 Ti", "rtx5070ti", 16.9), ("RTX 5060 Ti 8 GB", "rtx5060ti", 8.5), ("TITAN V", "v100", 12.7),
        ("TITAN Xp", "gtx1080ti", 11.7), ("Titan", "titanrtx", 25.3), ("MI308X", "", 0.0),
        ("DGX A100 640GB", "a100-80g", 84.9), ("DGX A100 320 GB", "a100-80g", 42.4), ("DGX H100", "h100", 84.9),
        ("v3-32", "tpu-v3", 33.2), ("v4-64", "tpu-v4", 33.0),
    ],
)  # fmt: skip
def test_names_of_cards_and_of_instances(gpu: str, preset: str, gigabytes: float) -> None:
    cells = BARE | {"gpu": gpu, "interconnect": "", "precision": "fp16"}
    if not gigabytes:
        with pytest.raises(Skip, match="no preset"):
            variant("core-8", **cells)
        return
    device = variant("core-8", **cells).cluster.device
    assert device.rates == load_cluster(preset).device.rates
    assert device.memory / 1e9 == pytest.approx(gigabytes, rel=0.01)


@pytest.mark.parametrize("gpu", ["RTX 4070 Ti", "RTX 3060 Laptop", "RTX 3070 Ti", "RTX 5080 Max-Q", "GTX 1080"])
def test_variants_of_a_card_are_other_chips(gpu: str) -> None:
    with pytest.raises(Skip, match="no preset"):
        variant("core-8", **BARE | {"gpu": gpu, "interconnect": ""})


def test_instances_bring_their_network() -> None:
    said = {"interconnect": "", "n_gpus": "64", "gpus_per_node": "8"}
    wires = {
        gpu: variant("core-8", **BARE | said | {"gpu": gpu}).cluster.network.bandwidth
        for gpu in ("p4d.24xlarge", "p5.48xlarge", "a3-highgpu-8g", "a3-megagpu-8g", "ND A100 v4", "h100")
    }
    assert 4 * wires["a3-highgpu-8g"] == 2 * wires["a3-megagpu-8g"] == wires["h100"] == 2 * wires["ND A100 v4"]
    assert 8 * wires["p4d.24xlarge"] == wires["p5.48xlarge"] < wires["h100"]


def test_a_dgx_2_has_switches_and_other_nodes_of_v100_wires() -> None:
    said = BARE | {"interconnect": "", "tp": "2", "dp_replicate": "32"}
    wires = [
        variant("core-8", **said | cells).cluster.local.wires
        for cells in ({"gpu": "V100-SXM3-32GB"}, {"gpu": "v100-32g", "gpus_per_node": "16"}, {"gpu": "v100-32g"})
    ]
    assert wires == [0, 0, load_cluster("v100").local.wires] and wires[2] > 0


@pytest.mark.parametrize(
    ("said", "gpu", "compute", "says"),
    [
        ("e4m3", "h100-sxm-80g", "fp8", ""), ("int8", "h100-sxm-80g", "fp8", "8-bit integers"),
        ("a8w8", "h100-sxm-80g", "fp8", "8-bit integers"), ("W8A8", "a100-80g", "", "no fp8 unit"),
        ("nvfp4", "b200", "fp4", ""), ("nvfp4", "h100-sxm-80g", "", "no fp4 unit"),
        ("bf16 (int8 states)", "h100-sxm-80g", "", ""), ("mixed", "h100-sxm-80g", "", ""),
    ],
)  # fmt: skip
def test_products_of_few_bits(said: str, gpu: str, compute: str, says: str) -> None:
    row = variant("core-8", **BARE | {"precision": said, "gpu": gpu, "interconnect": ""})
    assert row.workload.compute == compute
    assert any(says in line for line in row.assumed) if says else not any("products" in line for line in row.assumed)


def test_models_whose_names_are_nearly_known() -> None:
    sizes = {key: "" for key in ("n_params", "n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "vocab")}
    bare = BARE | sizes | {"ep": ""}
    wide = variant("core-8", **bare | {"model": "GPT-2 2.0B", "d_model": "1920", "n_params": "2e9"})
    assert abs(wide.spec.num_params / 2e9 - 1) < 0.02 and "43 layers, from the number of parameters" in wide.assumed
    assert variant("core-8", **bare | {"model": "GPT-2 124M", "d_model": "768"}).spec.num_layers == 12
    new = variant("core-8", **bare | {"model": "Qwen3.5-35B-A3B"})
    old = variant("core-8", **bare | {"model": "Qwen3-30B-A3B"})
    assert 34e9 < new.spec.num_params < 36e9 and (old.spec.num_experts, new.spec.num_experts) == (128, 256)
    assert variant("core-8", **bare | {"model": "TinyGPT 117M"}).spec.num_layers == 12
    doubted = variant("core-8", **bare | {"model": "Gemma 7B"})
    assert any("the name says 7.0 B" in line for line in doubted.assumed)
    assert not any("the name says" in line for line in (*old.assumed, *new.assumed))
    for name in ("RWKV-7 7B", "Mamba-2 2.7B", "Falcon-Mamba 7B", "RecurrentGemma 9B"):
        with pytest.raises(Skip, match="not a chain of attention blocks"):
            variant("core-8", **bare | {"model": name})
    assert variant("core-8", **bare | {"model": "Jamba v0.1 52B"}).spec.kind == "moe"
