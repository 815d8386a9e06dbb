"""What stacks of an era hold in memory, by a row's words and its date; the terms of it by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from published.attention import SDPA
from published.score import predict
from published.stacks import GATHERS_AGAIN, KERNELS, LIBRARY, LOOP_LOSS, ONCE, TWICE_LOSS, UNFUSED_LOSS
from shardwise.hardware.cluster import load_cluster
from shardwise.model.profile import profile_of
from shardwise.model.spec import preset
from shardwise.plan.memory import estimate_memory
from shardwise.plan.plan import Plan
from shardwise.plan.ranks.activations import kept_outputs, saved_bytes, saving_of, working_bytes
from shardwise.plan.stack import Stack, load_stack
from shardwise.plan.timing import estimate_time
from shardwise.plan.updating import matrices
from shardwise.plan.workload import Workload
from tests.pure.test_planner_memory import GPT, LLAMA, WORK
from tests.pure.test_published import variant
from tests.pure.test_published_words import BARE

EAGER, DEEPSPEED = load_stack("eager"), load_stack("deepspeed")
SIZE = LLAMA.num_params


def _peak(plan: str, stack: Stack, phase: str) -> float:
    return estimate_memory(profile_of(LLAMA), Plan.parse(plan), WORK, stack=stack).peaks[phase]


def _terms(plan: str, stack: Stack) -> Mapping[str, float]:
    return estimate_memory(profile_of(LLAMA), Plan.parse(plan), WORK, stack=stack).worst.terms


@pytest.mark.parametrize("name", ["eager", "torchtitan", "fsdp1"])
def test_data_ranks_of_whole_parameters_reduce_copies_of_their_gradients(name: str) -> None:
    stack = load_stack(name)
    plain = replace(stack, copies_grads=False)
    for plan, width in (("dp8 fp32", 4), ("dp8 bf16", 4), ("dp8 bf16-pure", 2)):
        assert _peak(plan, stack, "update") - _peak(plan, plain, "update") == width * SIZE, plan
    for plan in ("bf16", "fsdp8 bf16", "fsdp8 zero1 bf16"):
        assert _peak(plan, stack, "update") == _peak(plan, plain, "update"), plan


def test_gradients_that_are_set_to_zero_are_there_in_the_forward_pass() -> None:
    kept = replace(EAGER, zeroes_grads=True)
    assert _peak("bf16", kept, "loss") - _peak("bf16", EAGER, "loss") == 4 * SIZE
    assert _peak("bf16", kept, "update") == _peak("bf16", EAGER, "update")
    dates = [variant("tune-1", **BARE | {"date": date}).stack.zeroes_grads for date in ("2022-06", "2023-06")]
    assert dates == [True, False], "to None from torch 2.0"
    assert not variant("core-8", **BARE | {"date": "2022-06"}).stack.zeroes_grads, "loops of their own"


def test_deepspeed_keeps_16_bits_of_a_gradient_and_steps_on_a_copy_in_fp32() -> None:
    memory = estimate_memory(profile_of(LLAMA), Plan.parse("fsdp8 zero2 bf16"), WORK, stack=DEEPSPEED)
    assert memory.worst.terms["gradients"] == SIZE / 8 * 2
    plain = replace(DEEPSPEED, widens_grads=False)
    for plan, copy in (("fsdp8 bf16", SIZE / 8 * 6), ("bf16", SIZE * 4), ("fsdp8 fp32", 0)):  # flattened, and widened
        assert _peak(plan, DEEPSPEED, "update") - _peak(plan, plain, "update") == copy, plan


@pytest.mark.parametrize("name", ["eager", "torchtitan", "fsdp1"])
def test_pure_16_bits_have_no_master_weights_in_torch(name: str) -> None:
    plan = Plan.parse("fsdp8 bf16-pure")
    terms = estimate_memory(profile_of(LLAMA), plan, WORK, stack=load_stack(name)).worst.terms
    assert "master" not in terms and terms["weights"] == SIZE / 8 * 2


def test_autocast_of_whole_weights_leaves_the_residual_stream_in_fp32() -> None:
    row = variant("new-2", **BARE | {"precision": "fp16", "notes": "Hugging Face Trainer"})
    assert (row.plan.zero, row.plan.precision, row.stack.residual_bytes) == (0, "fp16", 4.0)
    for cells in (
        {"precision": "fp32"},
        {"notes": "FSDP of one device"},
        {"date": "2022-11", "notes": "PaddlePaddle, AMP"},
    ):
        other = variant("new-2", **BARE | {"precision": "fp16", "notes": "Hugging Face Trainer"} | cells)
        assert other.stack.residual_bytes == 0.0, cells
    assert variant("fsdp-1", **BARE).stack.residual_bytes == 0.0, "sharded weights are cast once"
    plain, wide = (replace(EAGER, attention="unfused", residual_bytes=width) for width in (0.0, 4.0))
    block = profile_of(GPT).blocks[0]
    more = [saved_bytes(block, saving_of(Plan.parse("bf16"), stack, 128)) for stack in (plain, wide)]
    scores = 4 * 128 * 2
    assert more[1] - more[0] > scores, "a softmax in fp32 is saved as it is"


def test_weights_that_are_gathered_in_fp32_under_autocast_leave_their_casts_until_the_backward_pass() -> None:
    """Resharding frees what was gathered, and not what a product kept of it: the weight that autocast cast."""
    said = {"notes": "fully_shard of one's own, weights gathered in fp32 under autocast"}
    row = variant("fsdp-1", **BARE | said)
    assert (row.plan.zero, row.stack.residual_bytes, row.stack.gathers_wide) == (3, 4.0, True)
    for other in ({"notes": "fully_shard under autocast"}, {"notes": "weights gathered in fp32"}):
        assert not variant("fsdp-1", **BARE | other).stack.gathers_wide, other
    narrow = replace(load_stack("torchtitan"), fused=False)
    wide = replace(narrow, gathers_wide=True)
    profile, block = profile_of(LLAMA), profile_of(LLAMA).blocks[0].params

    def gathered(stack: Stack, plan: str) -> float:
        return estimate_memory(profile, Plan.parse(plan), WORK, stack=stack).worst.terms["gathered"]

    casts = (LLAMA.num_layers * block + profile.head.params) * 2
    once = gathered(narrow, "fsdp8 bf16")
    assert gathered(wide, "fsdp8 bf16") == pytest.approx(2 * once + casts, rel=0.01)
    again = gathered(wide, "fsdp8 bf16 recompute=blocks")
    assert again == pytest.approx(gathered(wide, "fsdp8 bf16") - (LLAMA.num_layers - 1) * block * 2, rel=0.01)
    cluster = load_cluster("h100:8")
    sent = [estimate_time(profile, cluster, Plan.parse("fsdp8 bf16"), WORK, stack=each) for each in (narrow, wide)]
    assert sent[1].total > sent[0].total, "twice the bytes"


def test_a_clamped_gate_apart_keeps_both_parts_twice() -> None:
    """gpt-oss: what is clamped, and clamped, the sigmoid and what it multiplies, of each token in each of its experts.

    So does the slope of torchtitan's memory over the batch say: 12.6 GiB per 8,192 tokens beyond a plain gate.
    """
    spec = preset("gpt-oss-20b")
    own, usual = (profile_of(each).blocks[0] for each in (spec, replace(spec, hf="")))
    apart, fused = (replace(load_stack("torchtitan"), fused=on) for on in (False, True))
    plan = Plan.parse("fsdp8 bf16")
    more = {
        stack.fused: [saved_bytes(each, saving_of(plan, stack, 8192)) for each in (own, usual)]
        for stack in (apart, fused)
    }
    assert more[False][0] - more[False][1] == 3 * spec.experts_per_token * spec.ffn_dim * 2, "bytes per token"
    assert more[True][0] == more[True][1], "compiled code keeps the two parts"
    assert variant("fsdp-1", **BARE | {"model": "gpt-oss-20b"}).spec.hf == "gpt_oss"


def test_what_torch_and_cuda_of_a_date_hold() -> None:
    context = [variant("tune-1", **BARE | {"date": date}).stack.context for date in ("2022-06", "2023-06")]
    assert context == [KERNELS, 0.0], "every kernel is loaded at the start before CUDA 11.7"
    trained = [variant("tune-1", **BARE | {"source": "HF Trainer", "date": date}) for date in ("2022-06", "2023-06")]
    assert [row.stack.context for row in trained] == [KERNELS, LIBRARY], "those of a trainer's libraries"
    kept = [variant("core-8", **BARE | {"date": date}).stack.placeholds_grads for date in ("2025-03", "2025-06")]
    assert kept == [False, True], "Transformer Engine keeps a placeholder per shape from its version 2.3"
    old = [variant("old-1", source=source).stack.context for source in ("Megatron-LM log", "Megatron-DeepSpeed log")]
    assert old[0] == KERNELS < old[1], "the memory beside its tensors is that of DeepSpeed's fork"
    late, core = variant("old-1", source="Megatron-DeepSpeed log", date="2024-06").stack, load_stack("megatron-core")
    assert late.context == core.context < old[1], "that of its groups' communicators alone"
    assert late.fragmentation < load_stack("megatron-2021").fragmentation and late.cached == 0, "as others of its time"


def test_a_loop_around_the_layers_of_transformer_engine_has_weights_in_fp32_and_a_loss_of_its_own() -> None:
    said = "nanochat with Transformer Engine's layers"
    stacks = [variant("core-8", **BARE | {"notes": said + more}).stack for more in ("", ", autocast in bf16")]
    assert [stack.name for stack in stacks] == ["megatron-core", "megatron-core"]
    assert [stack.master for stack in stacks] == [True, False]
    assert [stack.logit_bytes for stack in stacks] == [load_stack("megatron-core").logit_bytes, LOOP_LOSS]


def test_attention_without_dropout_keeps_its_probabilities_once() -> None:
    """Sailor's models multiply what the softmax gives: 4 bytes per score in fp32, as its cards show, and not 9."""
    block = profile_of(GPT).blocks[0]
    scores = GPT.num_heads * 128 * block.attentions[0].reach
    for plan, wide, more in (("fp32", False, 5), ("bf16", False, 3), ("bf16", True, 1)):
        stack = replace(EAGER, attention="unfused", wide_softmax=wide)
        found = [
            saved_bytes(block, saving_of(Plan.parse(plan), replace(stack, drops_scores=on), 128))
            for on in (True, False)
        ]
        assert found[0] - found[1] == more * scores, (plan, wide)
    said = {"": True, "no dropout": True, "unfused attention without dropout": False, "attention dropout 0.1": True}
    for notes, drops in said.items():
        assert variant("core-8", **BARE | {"notes": notes}).stack.drops_scores is drops, notes


@pytest.mark.parametrize(
    ("cells", "fused"),
    [
        ({"notes": "Hugging Face Trainer", "date": "2024-06"}, False),
        ({"notes": "Hugging Face Trainer", "date": "2026-01"}, True),
        ({"notes": "Hugging Face Trainer", "date": "2022-06"}, True),
        ({"notes": "Hugging Face Trainer", "date": "2024-06", "optimizer": "adamw_bnb_8bit"}, True),
        ({"notes": "Hugging Face Trainer", "date": "2024-06", "optimizer": "fused AdamW"}, True),
        ({"notes": "a loop of its own", "date": "2024-06"}, False),
        ({"notes": "a loop of its own, fused AdamW", "date": "2024-06"}, True),
        ({"notes": "a loop of its own, no fused AdamW", "date": "2024-06"}, False),
        ({"notes": "a loop of its own", "date": "2024-06", "gpu": "gaudi2"}, True),
        ({"notes": "a loop of its own, PyTorch FSDP full_shard", "date": "2026-06"}, True),
        ({"notes": "a loop of its own, PyTorch FSDP full_shard, AdamW with foreach", "date": "2026-06"}, False),
    ],
)
def test_adamw_of_a_date_goes_over_all_parameters_at_once(cells: dict[str, str], fused: bool) -> None:
    assert variant("new-2", **BARE | {"optimizer": "AdamW"} | cells).stack.fused_optimizer is fused


def test_losses_and_gradients_by_what_the_row_names() -> None:
    cells = BARE | {"date": "2024-06"}
    found = [variant("foundry-1", **cells | {"notes": f"FSDP1, {said}"}).stack for said in ("", "transformers 4.40")]
    assert found[0].name == found[1].name == "fsdp1"
    assert [stack.logit_bytes for stack in found] == [load_stack("fsdp1").logit_bytes, UNFUSED_LOSS]
    dates = ("2024-09", "2025-01", "2025-06")
    shifted = [variant("new-2", **BARE | {"date": date, "notes": "Hugging Face Trainer"}).stack for date in dates]
    assert [stack.logit_bytes for stack in shifted] == [UNFUSED_LOSS, TWICE_LOSS, UNFUSED_LOSS]
    assert variant("sweep-1").stack.grad_bytes == load_stack("megatron-flash").grad_bytes < 4
    assert variant("sweep-1", source="Megatron-LM log").stack.grad_bytes == 4.0


def test_nanotron_kept_what_it_gathered_before_august_2024() -> None:
    held = [variant("nano-1", date=date).stack for date in ("2024-01", "2024-12")]
    assert [stack.saves_gathered for stack in held] == [True, False] and 2024.1 < GATHERS_AGAIN < 2024.9
    assert held[0].runs_ahead == 0.0 < held[1].runs_ahead


def test_models_of_transformers_had_no_fused_attention_before_its_version_of_december_2023() -> None:
    for date, kernel in (("2023-06", "unfused"), ("2024-06", "flash2")):
        row = variant("new-2", **BARE | {"date": date, "notes": "Hugging Face Trainer"})
        assert row.stack.attention == kernel and 2023.5 < SDPA < 2024.5
    assert variant("new-2", **BARE | {"date": "2023-06", "notes": "a loop of its own"}).stack.attention == "flash2"
    late = BARE | {"date": "2025-06", "notes": "Hugging Face Trainer"}
    found = [variant("new-2", **late | {"model": name}).stack.attention for name in ("bloom-560m", "GPT-NeoX 20B")]
    assert found == ["unfused", "flash2"], "and some never had one"


def test_parameters_that_are_offloaded_leave_the_device() -> None:
    said = "AdamW on CPU (DeepSpeed offload)"
    for notes, leaves in (("DeepSpeed, param offload", True), ("DeepSpeed, offload_param", True), ("DeepSpeed", False)):
        assert variant("zero-1", optimizer=said, notes=notes).stack.offloads_weights is leaves, notes


def test_words_for_memory_of_the_device_and_for_weights() -> None:
    for said in ("device-level", "ROCm memory"):
        assert variant("fsdp-1", notes=f"{said} peak").memory_kind == "device", said
    assert variant("tune-1", precision="bf16 mixed", notes="weights in 16 bits").plan.precision == "bf16-pure"
    assert variant("fsdp-2", **BARE | {"source": "Lightning Thunder"}).plan.precision == "bf16-pure"
    full = variant("tune-1", source="LongLoRA", notes="full fine-tuning")
    assert full.workload.trained == 1.0, "the source's name says nothing of a row of whole parameters"
    assert variant("tune-1", source="LongLoRA", notes="LoRA").workload.trained < 1.0


def test_a_peak_of_no_kind_is_what_the_device_shows_of_pytorchs_loops() -> None:
    for base, kind in (("new-2", "device"), ("zero-1", "device"), ("core-8", "reserved"), ("fsdp-2", "reserved")):
        row = variant(base, **BARE | {"notes": "DeepSpeed" if base == "zero-1" else "", "peak_mem_gib": "20"})
        assert row.memory_kind == kind, base
    torch = ("peak memory of torch", "allocated")
    for words, kind in (
        ("max reserved", "reserved"),
        ("peak memory allocated", "allocated"),
        torch,
        ("nvidia-smi", "device"),
    ):
        assert variant("new-2", **BARE | {"notes": words, "peak_mem_gib": "20"}).memory_kind == kind


def test_what_blocks_are_given_waits_on_the_host_of_a_tpu_where_it_would_not_fit() -> None:
    """MaxText's configurations of Trillium and Ironwood: `decoder_layer_input: offload`."""
    job = {
        "source": "MaxText", "gpu": "tpu-v6e", "n_layers": "80", "d_model": "8192", "n_gpus": "256", "zero_stage": "3",
        "seq_len": "8192", "global_batch": "1024", "micro_batch": "4", "activation_checkpoint": "", "precision": "bf16",
    }  # fmt: skip
    found = [variant("new-2", **BARE | job | {"date": date}).plan for date in ("2023-06", "2025-06")]
    assert [(plan.recompute.mode, plan.offload.activations) for plan in found] == [("blocks", False), ("blocks", True)]
    some = variant("new-2", **BARE | job | {"date": "2025-06", "global_batch": "256", "micro_batch": "1"}).plan
    assert not some.offload.activations, "one that fits"
    said = variant("new-2", **BARE | {"notes": "gradient checkpointing whose inputs are offloaded"}).plan
    assert said.offload.activations


def test_xla_lays_memory_out_before_it_runs_and_a_tpu_holds_logits_once() -> None:
    """So what a row of a TPU leaves open is what fits, to the byte; elsewhere a tenth is in doubt."""
    jax = BARE | {"source": "MaxText", "interconnect": "", "date": "2025-06", "precision": "bf16"}
    stacks = [variant("new-2", **jax | {"gpu": gpu}).stack for gpu in ("tpu-v6e", "h100")]
    assert [stack.logit_bytes for stack in stacks] == [ONCE, load_stack("jax").logit_bytes]
    assert load_stack("jax").fragmentation == 0.0
    job = {
        "gpu": "tpu-v6e", "d_model": "8192", "n_gpus": "256", "zero_stage": "3", "seq_len": "4096",
        "global_batch": "1024", "micro_batch": "4", "activation_checkpoint": "",
    }  # fmt: skip
    for layers in range(60, 100, 4):
        row = variant("new-2", **jax | job | {"n_layers": str(layers)})
        assert row.plan.offload.activations or predict(row).fits, (layers, row.assumed)


def test_loops_that_are_compiled_leave_no_holes_and_forks_are_no_paths() -> None:
    loop = BARE | {"date": "2025-06", "notes": "a loop of its own"}
    assert variant("new-2", **loop | {"compile": "y"}).stack.fragmentation == 0.0 < EAGER.fragmentation
    path = "bigscience-workshop/bigscience experiments/gpt2.md @0123abc; Megatron-LM"
    old = [variant("old-1", source="x", notes=notes).stack.context for notes in (path, "Megatron-DeepSpeed")]
    assert old[0] < old[1]


@pytest.mark.parametrize(
    ("model", "notes", "apart"),
    [
        ("GPT-2 XL", "Hugging Face Trainer", True), ("minGPT", "minGPT", True), ("GPT-2 XL", "nanoGPT", False),
        ("GPT-NeoX 20B", "Hugging Face Trainer", False), ("phi-2", "litgpt", False),
    ],
)  # fmt: skip
def test_gelu_is_a_formula_in_the_models_of_transformers(model: str, notes: str, apart: bool) -> None:
    assert variant("new-2", **BARE | {"date": "2024-06", "model": model, "notes": notes}).stack.gelu_apart is apart


def test_the_memory_of_a_row_without_a_micro_batch_is_not_compared() -> None:
    cells = {"peak_mem_gib": "40", "micro_batch": "", "global_batch": "64"}
    assert variant("core-8", **cells).memory_gib is None
    assert variant("core-8", **cells | {"micro_batch": "1"}).memory_gib == 40
    assert variant("core-8", **cells | {"notes": "micro batch size 1"}).memory_gib == 40


def test_products_of_four_bits_run_again_below_torchtitan() -> None:
    cells = {"source": "torchtitan", "date": "2026-07", "gpu": "gb200", "activation_checkpoint": "selective"}
    kept = [variant("new-2", **BARE | cells | {"precision": kind}).stack.keeps_products for kind in ("nvfp4", "mxfp8")]
    assert kept == [0.0, load_stack("torchtitan").keeps_products]


def test_deepspeeds_optimizer_of_bf16_shares_out_its_states_below_megatron_whatever_the_stage_is() -> None:
    cells = {"source": "Megatron-DeepSpeed", "date": "2023-06", "zero_stage": "0", "dp_replicate": "64", "dp_shard": ""}
    stages = [variant("core-8", **cells | {"precision": kind}).plan.zero for kind in ("bf16", "fp16")]
    assert stages == [1, 0]
    assert variant("core-8", **cells | {"source": "Megatron-LM", "precision": "bf16"}).plan.zero == 0


def test_attention_in_primitives_of_llama_in_transformers_keeps_probabilities_in_fp32() -> None:
    cells = BARE | {"date": "2023-07", "notes": "Hugging Face Trainer; no flash attention"}
    wide = [variant("tune-1", **cells | {"model": name}).stack.wide_softmax for name in ("Llama-2-7B", "GPT-2 XL")]
    assert wide == [True, False]
    block = profile_of(LLAMA).blocks[0]
    kept = [
        saved_bytes(
            block, saving_of(Plan.parse("bf16-pure"), replace(EAGER, attention="unfused", wide_softmax=on), 128)
        )
        for on in (False, True)
    ]
    assert kept[1] - kept[0] == 2 * LLAMA.num_heads * 128


def test_deepspeeds_own_linear_is_there_where_the_model_is_built_within_its_context() -> None:
    loop = BARE | {"source": "own loop", "zero_stage": "3", "notes": "DeepSpeed ZeRO-3", "date": "2025-06"}
    for other, kept in (
        ({}, True),
        ({"date": "2026-09"}, False),
        ({"notes": "DeepSpeed ZeRO-3; Hugging Face Trainer"}, False),
        ({"notes": "DeepSpeed ZeRO-3; torch.compile"}, False),
        ({"notes": "DeepSpeed ZeRO-3, memory_efficient_linear false; Hugging Face"}, True),
    ):
        stack = variant("tune-1", **loop | other).stack
        assert (stack.name, stack.keeps_gathered) == ("deepspeed", kept), other


def test_gradients_that_ranks_reduce_behind_the_last_micro_batch_are_whole_until_then() -> None:
    """`fully_shard` keeps them in the type that they are reduced in."""
    cells = BARE | {"global_batch": "128", "zero_stage": "3", "dp_shard": "16", "dp_replicate": "1", "peak_mem_gib": ""}
    cells |= {"precision": "bf16", "notes": "FSDP2 loop, weights in bf16"}
    said = "; accumulates with set_requires_gradient_sync(False)"

    def plan(notes: str, **more: str) -> Plan:
        return variant("fsdp-1", **cells | more | {"notes": cells["notes"] + notes}).plan

    late, usual = plan(said), plan("")
    assert (late.zero, late.reshards, usual.zero) == (1, True, 3)
    assert plan(said, global_batch="32").zero == 3, "one micro-batch"
    wide = plan(said + "; gradients reduced in fp32")
    assert [each.communication.reduce_dtype for each in (late, wide)] == ["bf16", "fp32"]
    assert plan("; gradients reduced in fp32", precision="fp32").communication.reduce_dtype is None

    torchtitan, low = load_stack("torchtitan"), "fsdp4 zero1 / mb2 / bf16-pure / reshard=true reduce="
    held = [_terms(f"{low}{kind}", torchtitan)["gradients"] for kind in ("fp32", "bf16")]
    assert held == [4.0 * SIZE, 2.0 * SIZE]


def test_a_pipeline_whose_stages_reshard_gathers_for_each_micro_batch() -> None:
    cells = BARE | {"source": "torchtitan", "date": "2026-05", "zero_stage": "3", "pp": "2", "dp_shard": "8"}
    cells |= {"dp_replicate": "1", "global_batch": "32", "peak_mem_gib": ""}
    stages = [variant("fsdp-1", **cells | {"notes": said}).plan.zero for said in ("reshard_after_forward True", "")]
    assert stages == [3, 1]


def test_the_loss_of_torchtitan_is_compiled_with_16_bits_of_a_logit_and_a_loops_own_with_eight_bytes() -> None:
    loop = BARE | {"date": "2026-02", "compile": "y", "zero_stage": "3", "n_gpus": "16"}
    found = [variant("new-2", **loop | {"notes": said}).stack for said in ("torchtitan", "a loop on FSDP2")]
    assert [(stack.name, stack.logit_bytes) for stack in found] == [("torchtitan", 4.0), ("torchtitan", 8.0)]


def test_recompute_per_operator_keeps_what_experts_ranks_send_each_other() -> None:
    moe = profile_of(variant("fsdp-1", **BARE | {"model": "Qwen3-30B-A3B", "ep": "8"} | _SIZELESS).spec)
    block, dim, choices = moe.blocks[0], 2048, 8

    def kept(plan: str, stack: Stack) -> float:
        return kept_outputs(block, saving_of(Plan.parse(plan), stack, 4096))

    stack, eight, alone = load_stack("torchtitan"), "fsdp8 ep8 bf16", "fsdp8 bf16"
    listed, once = replace(stack, keeps_exchanged=True), replace(stack, keeps_exchanged=True, once_per_node=True)
    without = kept(eight, replace(stack, keeps_exchanged=False))
    assert kept(alone, listed) == without == kept(alone, replace(stack, keeps_exchanged=False))
    assert kept(eight, listed) - without == 2 * choices * dim * 2, "there and back, for each choice"
    assert kept(eight, once) - without == (choices + 1) * dim * 2, "what comes back is summed up on its way"


def test_muon_of_a_loop_steps_matrix_by_matrix_and_its_average_has_the_type_of_the_parameter() -> None:
    """torch.optim.Muon has no `foreach`; tables and the head go to AdamW, which has."""
    spec, work = preset("llama-1b"), Workload(seq_len=128, global_batch=1, optimizer="muon")
    profile, stack = profile_of(spec), replace(load_stack("eager"), fused_optimizer=False)
    table = profile.num_params - sum(matrix.num_params for block in profile.blocks for matrix in matrices(block))
    for precision, width in (("fp32", 4.0), ("bf16-pure", 2.0)):
        plan = Plan.parse(f"dp1 / {precision}")
        found = estimate_memory(profile, plan, work, stack=stack)
        assert table < 0.3 * profile.num_params
        assert found.peaks["update"] == pytest.approx(width * (3 * profile.num_params + table)), precision
        both = replace(work, optimizer="sgd-momentum")
        whole = estimate_memory(profile, plan, both, stack=stack).peaks["update"]
        assert whole >= width * 4 * profile.num_params, precision


def test_torchtitan_weighs_what_experts_give_in_fp32_by_operators_that_keep_it_compiled_or_not() -> None:
    cells = BARE | {"model": "Qwen3-30B-A3B", "date": "2026-03"} | _SIZELESS
    said = ("torchtitan, eager", "a loop on FSDP2", "torchtitan, DeepEP", "torchtitan, DistMoE")
    row, *others = (variant("fsdp-1", **cells | {"notes": notes}) for notes in said)
    assert row.stack.weighs_wide and not any(other.stack.weighs_wide for other in others)
    block, choices, dim = profile_of(row.spec).blocks[0], 8, 2048

    def at(fused: bool, wide: bool) -> tuple[float, float]:
        how = saving_of(Plan.parse("fsdp8 bf16"), replace(row.stack, fused=fused, weighs_wide=wide), 4096)
        return saved_bytes(block, how), working_bytes(block, how)

    (kept, works), (before, narrow) = at(fused=False, wide=True), at(fused=False, wide=False)
    assert kept - before == 2 * choices * dim, "four bytes in place of two"
    assert works == 3 * 4 * choices * dim > narrow, "its gradient, that of the weighed, and their product"
    (kept, works), (before, narrow) = at(fused=True, wide=True), at(fused=True, wide=False)
    assert kept - before == 2 * choices * dim and works == 2 * 4 * choices * dim > narrow


@pytest.mark.parametrize(
    ("model", "date", "notes", "listed"),
    [
        ("DeepSeek-V2-Lite", "2025-08", "torchtitan", False),
        ("DeepSeek-V2-Lite", "2025-10", "torchtitan", True),
        ("Qwen3-30B-A3B", "2025-12", "torchtitan", False),
        ("Qwen3-30B-A3B", "2025-12", "torchtitan, DeepEP", True),
        ("Qwen3-30B-A3B", "2026-03", "torchtitan", True),
        ("Qwen3-30B-A3B", "2026-03", "Megatron-Core", False),
    ],
)
def test_the_list_of_torchtitan_has_the_exchange_of_tokens_by_model_and_date(
    model: str, date: str, notes: str, listed: bool
) -> None:
    cells = {"model": model, "date": date, "notes": notes, "ep": "8"}
    assert variant("fsdp-1", **BARE | _SIZELESS | cells).stack.keeps_exchanged == listed


_SIZELESS = {key: "" for key in ("n_params", "n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "vocab")}


def test_weights_without_a_copy_in_fp32_have_none_in_any_stack() -> None:
    cells = BARE | {"precision": "bf16", "date": "2026-03"}
    for said, copied in (("", True), ("; no fp32 copy", False), ("; no master weights", False)):
        row = variant("core-8", **cells | {"notes": f"pure bf16; Megatron-Core{said}"})
        assert (row.plan.precision, row.stack.pure_master) == ("bf16-pure", copied), said
    apart = variant("core-8", **cells | {"notes": "Megatron-Core; no fp32 copy of the logits"})
    assert apart.plan.precision == "bf16", "of something else"


def test_fsdp_that_never_reshards_holds_all_weights_in_a_step_of_one_micro_batch_too() -> None:
    cells = BARE | {"micro_batch": "2", "global_batch": "16", "n_gpus": "8", "dp_shard": "8", "dp_replicate": "1"}
    plans = [
        variant("fsdp-1", **cells | {"notes": f"torchtitan{said}"}).plan
        for said in ("", "; reshard after forward: never", "; FSDP never reshards")
    ]
    assert all(plan.batch.micro_batches == 1 for plan in plans)
    assert [plan.reshards for plan in plans] == [True, False, False]
