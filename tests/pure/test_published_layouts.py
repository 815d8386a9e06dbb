"""How published rows say their layout: hybrid sharding, stages, degrees in lists, adapters, engines under trainers."""

from __future__ import annotations

import pytest

from published.cells import Cells
from published.degrees import sizes_of, stage_said
from published.rows import Row
from published.score import predict
from shardwise.plan.stack import load_stack
from tests.pure.test_published import variant
from tests.pure.test_published_words import BARE

FREE = BARE | {
    "dp_replicate": "",
    "dp_shard": "",
    "tp": "",
    "pp": "",
    "cp": "",
    "zero_stage": "",
    "global_batch": "128",
}
SMALL = FREE | {key: "" for key in ("n_params", "n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "vocab")}
ONE_NODE = SMALL | {"model": "Llama 3.2 1B", "n_gpus": "8"}


@pytest.mark.parametrize(
    ("cells", "data"),
    [
        ({"n_gpus": "8", "notes": "HSDP 2x4"}, (2, 4)),
        ({"n_gpus": "8", "notes": "hybrid shard (replicate 2, shard 4)"}, (2, 4)),
        ({"n_gpus": "64", "notes": "HYBRID_SHARD"}, (8, 8)),
        ({"n_gpus": "64", "zero_stage": "HSDP"}, (8, 8)),
        ({"n_gpus": "64", "notes": "HSDP with 16 replicas"}, (16, 4)),
        ({"n_gpus": "64", "notes": "hybrid_shard_degree=16"}, (4, 16)),
        ({"n_gpus": "64", "notes": "MiCS, partition group size 16"}, (4, 16)),
        ({"n_gpus": "64", "notes": "HSDP 3x5"}, (8, 8)),
        ({"n_gpus": "64", "notes": "HSDP; TP=2"}, (8, 4)),
        ({"n_gpus": "64", "notes": "HSDP; TP=8"}, (1, 8)),
        ({"n_gpus": "64", "dp_shard": "8 (HSDP)"}, (8, 8)),
        ({"n_gpus": "64", "dp_replicate": "2", "notes": "HSDP"}, (2, 32)),
        ({"n_gpus": "64", "dp_shard": "8", "tp": "1", "pp": "1"}, (8, 8)),
        ({"n_gpus": "64", "notes": "FSDP, not HSDP"}, (64, 1)),
        ({"n_gpus": "8", "notes": "HYBRID_SHARD"}, (1, 8)),
    ],
)
def test_hybrid_sharding(cells: dict[str, str], data: tuple[int, int]) -> None:
    sizes = sizes_of(Cells({"gpu": "h100", **cells}))
    assert (sizes.replicate, sizes.shard) == data


def test_groups_that_nobody_counts_are_assumed() -> None:
    row = variant("fsdp-1", **FREE | {"notes": "HYBRID_SHARD", "global_batch": "32"})
    assert (row.plan.axes.dp_replicate, row.plan.axes.dp_shard, row.plan.zero) == (2, 8, 3)
    assert "hybrid sharding: over the 8 data ranks of a node, replicated over 2" in row.assumed
    stated = variant("fsdp-1", **FREE | {"notes": "HSDP 4x4", "global_batch": "32"})
    assert stated.plan.axes.dp_shard == 4 and not any("hybrid" in line for line in stated.assumed)


@pytest.mark.parametrize(
    ("notes", "stage"),
    [
        ("DeepSpeed ZeRO-3", 3), ("zero_stage=2", 2), ("ZeRO (stage 1)", 1), ("strategy deepspeed_stage_2", 2),
        ("ds_z3", 3), ("ZeRO++", 3), ("FULL_SHARD", 3), ("FSDP, SHARD_GRAD_OP", 2), ("FSDP", 3), ("no_shard", 0),
        ("plain DDP", 0), ("distributed optimizer", 1), ("without distributed optimizer", None), ("no ZeRO-3", None),
        ("faster than ZeRO-3", None), ("zero bubble", None),
    ],
)  # fmt: skip
def test_stages_that_notes_say_are_not_assumed(notes: str, stage: int | None) -> None:
    assert stage_said(Cells({"notes": notes})) == stage
    row = variant("core-8", **BARE | {"zero_stage": "", "notes": notes, "model": "Llama 3.2 1B", "n_params": ""})
    assert any(line.startswith("zero ") for line in row.assumed) is (stage is None)
    assert stage is None or row.plan.zero == stage


@pytest.mark.parametrize(
    ("notes", "degrees"),
    [
        ("TP/PP/DP = 8/4/2", (8, 4, 1)), ("(t, p, d) = (8, 4, 2)", (8, 4, 1)), ("(p, t, d) = (8, 4, 2)", (4, 8, 1)),
        ("t=8, p=4", (8, 4, 1)), ("tp8pp4", (8, 4, 1)), ("TP-8 PP-4", (8, 4, 1)), ("MP=8", (8, 1, 1)),
        ("8-way model parallelism", (8, 1, 1)), ("8-way TP, 4-stage pipeline", (8, 4, 1)), ("Ulysses SP=8", (1, 1, 8)),
        ("TP/PP = 8/4/2; FSDP", (1, 1, 1)),
    ],
)  # fmt: skip
def test_degrees_in_lists_and_letters(notes: str, degrees: tuple[int, int, int]) -> None:
    sizes = sizes_of(Cells({"n_gpus": "64", "gpu": "h100", "notes": notes}))
    assert (sizes.tp, sizes.pp, sizes.cp) == degrees


@pytest.mark.parametrize(
    ("said", "base"),
    [
        *((words, "nf4") for words in ("load_in_4bit", "bnb 4-bit", "nf4", "bnb-4bit")),
        *((words, "nf4-double") for words in ("QLoRA", "4bit base weights", "Q-LoRA 4-bit", "nf4 with double quant")),
        ("int4 by GPTQ", "gptq"), ("int8 by GPTQ", "gptq-int8"), ("int4 GPTQ by Triton kernels", "int4"),
        ("load_in_8bit", "int8"), ("LLM.int8", "int8"), ("4-bit AdamW", ""), ("8-bit AdamW", ""),
    ],
)  # fmt: skip
def test_what_frozen_weights_are_packed_as(said: str, base: str) -> None:
    adapters = variant("tune-1", source="", model="Llama 3.1 8B", notes=f"LoRA, {said}").workload.adapters
    assert adapters and adapters.base == base


def test_what_libraries_make_of_packed_weights() -> None:
    """PEFT casts the rest to fp32, not under FSDP; bitsandbytes kept the inputs of its products until July 2024."""
    plain = {"source": "", "notes": "QLoRA, Hugging Face Trainer"}
    early, late = (variant("tune-1", **plain, date=date) for date in ("2024-06", "2024-08"))
    found = [row.workload.adapters for row in (early, late)]
    assert [(each.keeps, each.rest) for each in found if each] == [(True, 4.0), (False, 4.0)]
    several = {"n_gpus": "8", "dp_shard": "8", "zero_stage": "3", "global_batch": "16"}
    sharded = variant("tune-1", **plain, **several).workload.adapters
    assert sharded and sharded.rest == 0
    others = variant("tune-1", notes="QLoRA, torchtune", date="2024-01").workload.adapters
    assert others and (others.keeps, others.rest) == (False, 0)


def test_steps_of_an_ablation_have_what_those_before_them_have() -> None:
    said = "torchtune; cumulative ablation step: {}"
    plans = [variant("tune-1", notes=said.format(step)).plan for step in ("QLoRA", "+8-bit AdamW", "+compile")]
    assert [plan.offload.activations for plan in plans] == [True, True, False]


@pytest.mark.parametrize(
    ("notes", "is_adapter"),
    [("lora_rank=8", True), ("rsLoRA", True), ("DoRA", True), ("PEFT", True), ("no LoRA", False), ("vs LoRA", False)],
)
def test_adapters_in_words(notes: str, is_adapter: bool) -> None:
    assert (variant("tune-1", model="Llama 3.1 8B", notes=notes).workload.trained < 1) is is_adapter


@pytest.mark.parametrize(
    ("cells", "stack"),
    [
        ({"source": "Axolotl", "notes": "DeepSpeed ZeRO-3"}, "deepspeed"),
        ({"source": "Axolotl", "notes": "FSDP"}, "torchtitan"),
        ({"source": "Axolotl", "notes": "FSDP", "date": "2024-01"}, "fsdp1"),
        ({"source": "Lightning AI", "notes": "deepspeed_stage_2"}, "deepspeed"),
        ({"source": "PyTorch Lightning", "notes": "FSDP2", "date": "2024-05"}, "torchtitan"),
        ({"source": "ms-swift", "notes": "Megatron-SWIFT, TP=8"}, "megatron-core"),
        ({"source": "HF accelerate", "notes": "Megatron-LM plugin, TP=8"}, "megatron-core"),
        ({"source": "LLaMA-Factory", "notes": ""}, "eager"),
        ({"source": "LLaMA-Factory", "notes": "", "n_gpus": "64"}, "deepspeed"),
        ({"source": "unsloth", "notes": "", "n_gpus": "1"}, "eager"),
        ({"source": "torchtune", "notes": ""}, "eager"),
        ({"source": "torchtune", "notes": "", "n_gpus": "64"}, "torchtitan"),
        ({"source": "a blog", "notes": "FSDP with Transformer Engine"}, "torchtitan"),
        ({"source": "a blog", "notes": "FSDP, Megatron-style tensor parallelism, TP=2"}, "torchtitan"),
        ({"source": "a blog", "notes": "DeepSpeed-Ulysses, ZeRO-3"}, "deepspeed"),
        (
            {"source": "a blog", "notes": "bigscience-workshop/bigscience x.md @0286906; HF Trainer, ZeRO-3"},
            "deepspeed",
        ),
        ({"source": "o/megatron-notes", "notes": "Accelerate with DeepSpeed, ZeRO-3"}, "deepspeed"),
        ({"source": "o/megatron-notes", "notes": "TP=4"}, "megatron-core"),
        ({"source": "a blog", "notes": "DDP", "zero_stage": "0", "tp": "1", "pp": "1"}, "torchtitan"),
        ({"source": "a blog", "notes": "", "zero_stage": "DDP", "tp": "1", "pp": "1"}, "torchtitan"),
        ({"source": "a blog", "notes": "DDP, TP=4", "zero_stage": "0", "tp": "4", "pp": "1"}, "megatron-core"),
        ({"source": "a blog", "notes": "no DDP", "zero_stage": "0", "tp": "1", "pp": "1"}, "megatron-core"),
        ({"source": "a blog", "notes": "", "zero_stage": "ZeRO-2", "tp": "1", "pp": "1"}, "deepspeed"),
        ({"source": "a blog", "notes": "", "zero_stage": "1", "tp": "1", "pp": "1"}, "megatron-core"),
    ],
)
def test_the_engine_is_stronger_than_its_trainer(cells: dict[str, str], stack: str) -> None:
    row = variant("core-8", **ONE_NODE | cells)
    kernels = stack == "megatron-core" or cells["source"] == "unsloth"
    assert row.stack.name == stack and row.stack.fused is kernels


def test_eager_is_of_one_node() -> None:
    row = variant("core-8", **ONE_NODE | {"source": "torchtune", "n_gpus": "64"})
    assert (
        not row.stack.pure_master
        and "stack torchtitan, not compiled: eager's constants are those of one node" in row.assumed
    )


@pytest.mark.parametrize(
    ("cells", "stack"),
    [
        ({"notes": "GPT-NeoX; TP=2, PP=4", "date": "2022-06"}, "megatron-2021"),
        ({"notes": "GPT-NeoX; TP=2, PP=4", "date": "2024-06"}, "megatron-flash"),
        ({"source": "EleutherAI/gpt-neox", "tp": "2", "date": "2022-06"}, "megatron-2021"),
        ({"model": "GPT-NeoX-20B", "notes": "FSDP"}, "torchtitan"),
        ({"notes": "FSDP, gpt-neox-20b tokenizer"}, "torchtitan"),
        ({"notes": "Megatron-DeepSpeed, flash attention; TP=4", "date": "2024-06"}, "megatron-flash"),
        ({"notes": "DeepSpeed 0.3.0 with its Megatron-LM example; ZeRO-1", "date": "2020-12"}, "megatron-2021"),
        ({"notes": "TP=4, PP=2"}, "megatron-core"),
        ({"source": "bigscience-workshop/bigscience", "notes": "HF data; TP=4", "date": "2022-01"}, "megatron-2021"),
    ],
)
def test_forks_of_megatron(cells: dict[str, str], stack: str) -> None:
    assert variant("core-8", **SMALL | {"n_gpus": "64", "model": "Llama 3.2 1B"} | cells).stack.name == stack


def test_a_trainer_without_engine_shards_where_a_rank_needs_it() -> None:
    small = variant("core-8", **ONE_NODE | {"source": "HF Trainer"})
    large = variant("core-8", **ONE_NODE | {"source": "HF Trainer", "model": "Llama 3.1 8B"})
    tuned = variant("core-8", **ONE_NODE | {"source": "HF Trainer", "model": "Llama 3.1 8B", "notes": "LoRA"})
    assert [row.plan.zero for row in (small, large, tuned)] == [0, 3, 0]


@pytest.mark.parametrize(
    ("notes", "mode"),
    [
        ("activation checkpointing off", "none"), ("AC none", "none"), ("gradient_checkpointing=True", "blocks"),
        ("checkpoint activations", "blocks"), ("unsloth gradient checkpointing", "blocks"),
        ("AC every other block", "every"), ("AC on 1/3 of blocks", "ratio"), ("selective AC; torchtitan", "ops"),
        ("no unsloth gradient checkpointing", "none"),
    ],
)  # fmt: skip
def test_recompute_and_compile_in_words(notes: str, mode: str) -> None:
    row = variant("core-8", **ONE_NODE | {"activation_checkpoint": "", "notes": f"FSDP; {notes}"})
    assert row.plan.recompute.mode == mode and not any("recompute" in line for line in row.assumed if mode != "ops")


@pytest.mark.parametrize(
    ("notes", "compiled"),
    [("torch.compile", True), ("+compile", True), ("no torch.compile", False), ("compile state not printed", None)],
)
def test_compile_in_words(notes: str, compiled: bool | None) -> None:
    assert Cells({"notes": notes}).compiled is compiled
    assert Cells({"notes": notes, "compile": "n"}).compiled is False


def test_batches_in_the_words_of_trainers() -> None:
    said = {
        "global_batch": "",
        "micro_batch": "",
        "notes": "FSDP; per_device_train_batch_size=4, gradient_accumulation_steps=8",
    }
    batch = variant("core-8", **ONE_NODE | said).plan.batch
    assert (batch.global_size, batch.micro_batches) == (256, 8)


@pytest.mark.parametrize(
    "notes",
    [
        "deepspeed z3 offload",
        "deepspeed_stage_3_offload",
        "ZeRO-3, CPU offload",
        "ZeRO-3; adam offload",
        "ZeRO-3 with CPU offload of params",
    ],
)
def test_states_on_the_host_in_words(notes: str) -> None:
    assert variant("core-8", **ONE_NODE | {"notes": notes}).plan.offload.state
    for notes in (
        "ZeRO-3, CPU offload not used",
        "ZeRO-3 without CPU offload of params",
        "ZeRO-3, no offload of the optimizer",
    ):
        assert not variant("core-8", **ONE_NODE | {"notes": notes}).plan.offload.state, notes


def test_the_network_that_notes_name() -> None:
    said = {"gpu": "A100-80GB", "n_gpus": "64", "interconnect": "", "model": "Llama 3.2 1B"}
    usual, roce, cloud = (
        variant("core-8", **SMALL | said | {"notes": f"FSDP; {notes}"}).cluster.network.bandwidth
        for notes in ("", "2 Tb/s RoCE", "p4d.24xlarge, EFA")
    )
    assert cloud < usual < roce


def test_activations_on_the_host_are_no_states() -> None:
    offload = variant("core-8", **ONE_NODE | {"notes": "ZeRO-3, activation CPU offload"}).plan.offload
    assert offload.activations and not offload.state


DEEP = FREE | {
    "model": "GPT", "n_layers": "32", "d_model": "4096", "n_heads": "32", "n_params": "", "n_kv_heads": "", "d_ff": "",
    "vocab": "32000", "n_gpus": "64", "tp": "2", "pp": "8", "dp_shard": "4", "micro_batch": "1", "seq_len": "2048",
}  # fmt: skip


@pytest.mark.parametrize(
    ("cells", "turns", "says"),
    [
        ({"notes": "Megatron-core", "global_batch": "64"}, 4, "4 stages per rank, the fastest that fit"),
        ({"notes": "Megatron-core"}, 1, ""),
        ({"notes": "Megatron-core, no interleaving", "global_batch": "64"}, 1, ""),
        ({"notes": "Megatron-core", "pp_schedule": "1f1b"}, 1, ""),
        ({"notes": "Megatron-core", "vp": "2"}, 2, ""),
        ({"notes": "DeepSpeed"}, 1, ""),  # whose pipelines have no interleaving
        ({"notes": "Megatron-LM; interleaved schedule"}, 2, "2 stages per rank, the least that divide its layers"),
        ({"notes": "Megatron-LM; interleaved schedule", "n_layers": "24"}, 3, "3 stages per rank, the least"),
        ({"notes": "Megatron-core, plain 1F1B", "global_batch": "64"}, 1, ""),
        ({"notes": "Megatron-core; a bubble of 30 %", "global_batch": "64"}, 1, ""),
        (
            {"notes": "Megatron-core; no zero bubble", "global_batch": "64"},
            4,
            "4 stages per rank, the fastest that fit",
        ),
        ({"notes": "Megatron-core", "pp_schedule": "vpp"}, 2, "2 stages per rank, the least"),
        ({"notes": "Megatron-core", "pp_schedule": "depth-first"}, 2, "2 stages per rank, the least"),
        ({"notes": "Megatron-core", "pp_schedule": "AFAB"}, 1, ""),
    ],
)
def test_stages_per_rank_that_nobody_says(cells: dict[str, str], turns: int, says: str) -> None:
    row = variant("fsdp-1", **DEEP | cells)
    assert row.plan.schedule.stages == turns
    assert any(line.startswith(says) for line in row.assumed) if says else not any("stages" in n for n in row.assumed)


@pytest.mark.parametrize(
    ("stated", "each"),
    [("RoCE 400G", 50e9), ("RoCE 400G per node", 6.25e9), ("1600 Gb/s node-to-node RoCE", 25e9), ("8x 200 GbE", 25e9)],
)
def test_rates_of_an_adapter_and_of_a_node(stated: str, each: float) -> None:
    row = variant("fsdp-1", **DEEP | {"interconnect": stated, "gpus_per_node": "8"})
    assert row.cluster.network.bandwidth == pytest.approx(0.9 * each, rel=0.02)


def test_all_forward_all_backward_is_gpipe() -> None:
    kinds = [variant("fsdp-1", **DEEP | {"pp_schedule": said}).plan.schedule.kind for said in ("AFAB", "1F1B", "vpp")]
    assert kinds == ["gpipe", "1f1b", "interleaved"]


@pytest.mark.parametrize(
    ("notes", "share", "states"),
    [
        ("CPU offloading layers 4", 0.25, False), ("4 layers CPU offloaded", 0.25, False),
        ("activation offload of 4 layers", 0.25, False), ("cpu_offloading_num_layers=4", 0.25, False),
        ("activation CPU offload of 4 layers in recipe", 0.25, False), ("activation CPU offload", 1.0, False),
        ("ZeRO-1, CPU offload; 4 layers", 0.0, True), ("CPU offloading", 0.0, True),
    ],
)  # fmt: skip
def test_layers_whose_activations_wait_on_the_host(notes: str, share: float, states: bool) -> None:
    row = variant("core-8", **ONE_NODE | {"notes": f"Megatron-LM; {notes}", "zero_stage": "1"})
    assert (row.plan.offload.activations, row.plan.offload.state) == (share > 0, states)
    assert not share or row.stack.offloads_blocks == share


def test_only_those_layers_leave_the_device() -> None:
    job = ONE_NODE | {"zero_stage": "1", "micro_batch": "4", "activation_checkpoint": "none"}
    kept = [
        predict(variant("core-8", **job | {"notes": f"Megatron-LM; {notes}"})).memory_gib
        for notes in ("", "CPU offloading layers 4", "CPU offloading layers 8", "CPU offloading layers 16")
    ]
    assert kept[0] - kept[1] == pytest.approx(kept[1] - kept[2], rel=0.01) and kept[2] > kept[3] > 0


@pytest.mark.parametrize("fits", [True, False])
def test_what_ran_out_of_memory_is_not_made_to_fit(fits: bool) -> None:
    job = SMALL | {
        "model": "Llama 3.1 8B",
        "n_gpus": "8",
        "micro_batch": "2",
        "notes": "FSDP",
        "step_time_s": "",
        "global_batch": "",
    }
    job |= {"tokens_per_s_per_gpu": "", "tflops_per_gpu": "", "mfu": "", "activation_checkpoint": ""}
    row = variant("core-8", **job | ({"step_time_s": "3"} if fits else {"peak_mem_gib": "OOM"}))
    assert (row.plan.recompute.mode == "none") is not fits and row.infers_recompute is fits


def test_kernels_of_the_loss_and_states_of_a_trainer_as_notes_say_them() -> None:
    def read(notes: str, **cells: str) -> Row:
        return variant(
            "core-8", **ONE_NODE | {"zero_stage": "3", "date": "2023-10", "compile": "false", "notes": notes} | cells
        )

    tuned = "HF SFTTrainer, FSDP1"
    plain, fused, liger = (read(tuned + said) for said in ("", "; fused kernels, without Liger's loss", "; Liger"))
    assert [row.stack.logit_bytes for row in (plain, fused, liger)] == [load_stack("fsdp1").logit_bytes, 8.0, 0.5]
    assert read(tuned, source="o/r refs/a100_liger.csv").stack.logit_bytes == plain.stack.logit_bytes
    assert not plain.stack.fused_optimizer and load_stack("fsdp1").fused_optimizer
    assert fused.stack.fused and not plain.stack.fused


def test_weights_in_16_bits_as_notes_say_them() -> None:
    def read(notes: str, **cells: str) -> str:
        return variant("fsdp-1", **BARE | {"notes": notes, "precision": "fp16"} | cells).plan.precision

    assert read("HF Trainer, FSDP") == "fp16"
    assert read("HF Trainer, FSDP, trained without mixed-precision master copy") == "bf16-pure"
    assert read("HF Trainer, FSDP", model="Llama 3.1 8B LoRA") == "bf16-pure"


def test_recompute_that_a_table_does_not_show_is_looked_for() -> None:
    for said in ("not stated", "not shown", "and optimizer sharding not in the table"):
        assert variant(
            "fsdp-1", **BARE | {"activation_checkpoint": "", "notes": f"recompute {said}"}
        ).infers_recompute, said
    assert not variant("fsdp-1", **BARE | {"activation_checkpoint": "full", "notes": "recompute"}).infers_recompute


def test_what_a_peak_counts_and_of_which_rank() -> None:
    def read(notes: str) -> tuple[str, str]:
        row = variant("core-8", **ONE_NODE | {"zero_stage": "3", "notes": notes, "peak_mem_gib": "30"})
        return row.memory_kind, row.memory_stage

    assert read("peak is mem-max-allocated-bytes, logged by the last rank") == ("allocated", "last")
    assert read("peak reserved 77.9 GB (allocated is in the memory column)") == ("allocated", "worst")
    assert read("max reserved of rank 0") == ("reserved", "first")


def test_ranks_of_a_context_exchange_heads_where_the_row_names_ulysses() -> None:
    cells = ONE_NODE | {"cp": "8", "seq_len": "131072", "global_batch": "8"}
    said = ("DeepSpeed ZeRO-3, sequence parallel (Ulysses)", "a/b docs/ulysses-sp.md @0123abc; ring attention", "CP 8")
    assert [variant("fsdp-1", **cells | {"notes": notes}).plan.context.kind for notes in said] == [
        "ulysses",
        "ring",
        "ring",
    ]
    alone = cells | {"cp": "1", "notes": "Ulysses"}
    assert variant("fsdp-1", **alone).plan.context.kind == "ring", "there is no such axis"
