"""What adapters keep, what allocators hold beside it, and what an offload leaves on the device; by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import inf

import pytest

from published.stacks import BUCKET, CHUNKED, HOLES, KEPT, LIMITED, LOOP_LOSS, MASKED, SCORES, UNFUSED_LOSS
from shardwise.hardware.cluster import load_cluster
from shardwise.model.profile import profile_of
from shardwise.model.spec import ModelSpec, preset
from shardwise.plan.memory import Memory, estimate_memory
from shardwise.plan.memory_terms.holding import SHARED
from shardwise.plan.plan import Offload, Plan
from shardwise.plan.ranks.activations import saved_bytes, saving_of
from shardwise.plan.stack import Stack, load_stack
from shardwise.plan.workload import Adapters, Workload
from tests.pure.test_planner_memory import LLAMA, WORK
from tests.pure.test_published import variant
from tests.pure.test_published_words import BARE

EAGER, DEEPSPEED, CORE, FSDP1 = map(load_stack, ("eager", "deepspeed", "megatron-core", "fsdp1"))
DIM, KEYS, FFN = 64, 32, 192


def _memory(plan: str, stack: Stack, spec: ModelSpec = LLAMA, seq_len: int = WORK.seq_len, **device: float) -> Memory:
    here, work = replace(load_cluster("h100:8").device, **device) if device else None, replace(WORK, seq_len=seq_len)
    return estimate_memory(profile_of(spec), Plan.parse(plan), work, stack=stack, device=here)


@pytest.mark.parametrize(
    ("on", "copies", "kept"),
    [
        ((), 0.0, 0),
        (("q", "v"), 0.0, 2 * DIM),
        (("q", "v"), 3.0, 2 * 3 * DIM),
        (("qkv",), 3.0, 3 * DIM),
        (("q", "k", "v", "o"), 3.0, 4 * 3 * DIM),
        (("gate", "up", "down"), 3.0, 3 * (2 * DIM + FFN)),
        (("gate", "up", "down"), 0.0, 2 * (DIM + FFN)),
    ],
)
def test_of_frozen_products_only_adapters_keep_inputs(on: tuple[str, ...], copies: float, kept: int) -> None:
    block, plan = profile_of(LLAMA).blocks[0], Plan.parse("bf16-pure")
    none = saved_bytes(block, saving_of(plan, EAGER, 128, adapters=Adapters(on=())))
    some = saved_bytes(block, saving_of(plan, EAGER, 128, adapters=Adapters(on=on, copies=copies)))
    assert some - none == kept
    trained = saved_bytes(block, saving_of(plan, EAGER, 128))
    assert trained - none == 2 * (2 * DIM + FFN), "inputs of qkv, up and down; that of out is the attention's output"


@pytest.mark.parametrize(
    ("cells", "on", "copies"),
    [
        ({"source": "peft"}, ("q", "v"), 3.0),
        ({"source": "peft", "precision": "fp32"}, ("q", "v"), 5.0),
        ({"source": "litgpt"}, ("qkv",), 3.0),
        ({"source": "axolotl"}, ("q", "k", "v", "o", "gate", "up", "down"), 3.0),
        ({"source": "LLaMA-Factory", "date": "2024-02"}, ("q", "k", "v", "o", "gate", "up", "down"), 0.0),
        ({"source": "LLaMA-Factory", "date": "2025-02"}, ("q", "k", "v", "o", "gate", "up", "down"), 2.0),
        ({"source": "peft", "notes": "q_proj, v_proj; no dropout"}, ("q", "v"), 0.0),
        ({"source": "peft", "notes": "attention projections only"}, ("q", "k", "v", "o"), 3.0),
        ({"source": "peft", "notes": "on all linear layers"}, ("q", "k", "v", "o", "gate", "up", "down"), 3.0),
    ],
)
def test_adapters_by_the_words_of_a_row(cells: dict[str, str], on: tuple[str, ...], copies: float) -> None:
    plain = {"model": "Llama-2-7B LoRA", "date": "2024-02", "precision": "bf16"}
    row = variant("tune-1", **BARE | plain | cells)
    assert row.workload.adapters == Adapters(on=on, copies=copies, wide=cells.get("date", "") > "2024-06")
    share = variant("tune-1", **BARE | plain | cells | {"notes": "rank 8; " + cells.get("notes", "")}).workload.trained
    assert share == pytest.approx(row.workload.trained / 2), "rank 16 where nothing says another"


@pytest.mark.parametrize(
    ("notes", "shards", "stays"),
    [
        ("HF SFTTrainer", "2", True),
        ("HF SFTTrainer", "", False),
        ("Hugging Face trainer, DeepSpeed", "2", False),
        ("PyTorch FSDP1, activation checkpointing", "2", False),
        ("PyTorch FSDP1, reentrant checkpoints", "2", True),
        ("PyTorch FSDP1, non-reentrant checkpoints", "2", False),
    ],
)
def test_reentrant_checkpoints_are_those_of_the_trainer_or_said(notes: str, shards: str, stays: bool) -> None:
    cells = {"model": "Llama-2-7B LoRA", "date": "2024-02", "precision": "bf16", "activation_checkpoint": "full"}
    sharded = {"n_gpus": shards, "dp_shard": shards, "zero_stage": "3"} if shards else {}
    row = variant("tune-1", **BARE | cells | {"notes": notes} | sharded)
    assert row.workload.adapters and row.workload.adapters.stays == stays


def test_whole_parameters_have_no_adapters_though_the_source_is_named_for_them() -> None:
    row = variant(
        "tune-1", **BARE | {"source": "hf", "notes": "huggingface/peft README.md; full-parameter fine-tuning"}
    )
    assert row.workload.adapters is None and row.workload.trained == 1.0


def test_freed_blocks_are_a_share_of_what_passes_and_given_back_before_memory_runs_out() -> None:
    plainly = replace(DEEPSPEED, widens_grads=False)
    some, all_of_it = (replace(plainly, cached=share, most_cached=inf) for share in (0.5, 1.0))
    long = partial(_memory, "fsdp8 bf16", seq_len=2**16)
    plain = long(replace(plainly, cached=0.0))
    passing = plain.worst.most_passing
    assert passing >= plain.worst.passing > 0 and plain.held == 0
    assert long(some).held == 0.5 * long(all_of_it).held == 0.5 * passing
    assert long(replace(some, most_cached=7.0)).held == 7.0
    need = long(replace(plainly, cached=0.0), memory=1e12).device
    tight = long(all_of_it, memory=need + 0.25 * passing)
    assert tight.device == pytest.approx(tight.limit) and tight.fits, "as much as there is room for"
    assert not long(all_of_it, memory=need - 1).fits


def test_each_rank_of_a_pipeline_holds_freed_blocks_of_its_own() -> None:
    """What the loss frees is on the last one."""
    stack = replace(load_stack("megatron-2021"), cached=1.0, most_cached=inf, attention="flash2")
    memory = _memory("pp2 / mb8 gbs8 / bf16 / recompute=blocks", stack, preset("llama-8b"), 2**13)
    first, last = memory.stages
    assert memory.worst is last and memory.held == last.most_passing + last.freed
    assert first.held == first.most_passing + first.freed < memory.held
    assert memory.reserved_of(first) - memory.reserved_of(replace(first, held=0.0)) == pytest.approx(first.held)
    assert memory.reserved_of(last) == memory.reserved


def test_tensors_that_share_segments_leave_no_holes() -> None:
    """One of the loss's in fp32 has 4 bytes per logit, the largest of a block 2 for each number of a feed-forward."""
    stack = replace(DEEPSPEED, widens_grads=False, cached=1.0, most_cached=inf)
    loss, block = SHARED // (4 * LLAMA.vocab_size), -(-SHARED // (2 * FFN))
    lengths = round(0.9 * loss), loss + 1, block - 1, block
    below, at_loss, between, both = (_memory("fsdp8 bf16", stack, seq_len=length) for length in lengths)
    assert below.held == 0 < at_loss.held < at_loss.worst.most_passing
    assert between.held < between.worst.most_passing and both.held == both.worst.most_passing


def test_flat_copies_of_gradients_take_the_place_of_tensors_that_were_as_large() -> None:
    stack, profile = replace(DEEPSPEED, cached=0.0), profile_of(preset("llama-8b"))
    flat, plan = 2 * profile.num_params / 8, Plan.parse("fsdp8 / bf16 / recompute=blocks")  # in 16 bits; then in fp32

    def held(size: float) -> float:
        """For them beside a loss whose logits have so many bytes in fp32."""
        work = Workload(seq_len=round(size / (4 * profile.vocab)), global_batch=8)
        with_, without = (replace(stack, widens_grads=widens) for widens in (True, False))
        memory, plain = (estimate_memory(profile, plan, work, stack=each) for each in (with_, without))
        return memory.held - plain.held

    less, one, both = (held(1.01 * size) for size in (0.9 * flat, flat, 2 * flat))
    assert less > 2 * flat > one > both == 0


def test_copies_of_gradients_that_an_update_frees_are_held_beside_the_loss() -> None:
    stack = replace(load_stack("megatron-2021"), cached=0.0)
    whole = _memory("fp16", stack)
    assert whole.worst.phase == "loss" and whole.held == whole.worst.terms["master"] > 0
    roomy = _memory("fp16", stack, memory=1e12)
    assert _memory("fp16", stack, memory=roomy.device - roomy.held).fits, "given back before memory runs out"
    assert _memory("bf16", stack).held == 0, "gradients are in fp32 as they add up"


def test_a_loop_that_holds_its_last_loss_keeps_the_inputs_of_packed_products_twice() -> None:
    block, plan = profile_of(LLAMA).blocks[0], Plan.parse("bf16-pure")
    once = Adapters(on=(), base="nf4", keeps=True)
    kept = [saved_bytes(block, saving_of(plan, EAGER, 128, adapters=replace(once, lasts=lasts))) for lasts in (0, 1)]
    assert kept[1] - kept[0] == 2 * (3 * DIM + FFN), "of qkv, out, up and down"
    cells = {"source": "litgpt", "date": "2024-05", "model": "Llama-2-7B QLoRA", "notes": "bnb.nf4"}
    found = [variant("tune-1", **BARE | cells | {"date": date}).workload.adapters for date in ("2024-05", "2025-05")]
    assert [each and each.lasts for each in found] == [True, False], "bitsandbytes 0.43.2 keeps none"


def test_rows_say_where_logits_are_whole_and_in_which_type_gradients_add_up() -> None:
    cells = {"n_gpus": "8", "tp": "2", "dp_replicate": "4", "precision": "bf16 pure", "source": "a loop on PyTorch"}
    plain = variant("tune-1", **BARE | cells)
    wide = variant("tune-1", **BARE | cells | {"notes": "logits gathered before the loss; fp32 buckets"})
    assert plain.plan.tensor.loss and not wide.plan.tensor.loss
    assert wide.stack.wide_buckets and not plain.stack.wide_buckets
    stacks = (replace(load_stack("torchtitan"), wide_buckets=wide) for wide in (False, True))
    buckets = [_memory("dp8 bf16-pure", stack).worst.terms["buckets"] for stack in stacks]
    assert buckets[1] == 2 * buckets[0] > 0


@pytest.mark.parametrize(
    ("base", "cells", "share", "most"),
    [
        ("core-8", {"notes": "memory of nvidia-smi"}, CORE.cached, CORE.most_cached),
        ("core-8", {"notes": "max reserved"}, CORE.cached, CORE.most_cached),
        ("core-8", {"notes": "peak memory"}, 0.0, CORE.most_cached),
        ("core-8", {"notes": "max reserved; expandable segments"}, 0.0, CORE.most_cached),
        ("tune-1", {"notes": "max reserved"}, 0.0, inf),
        ("tune-1", {"notes": "max reserved; samples as they are"}, HOLES, inf),
        ("tune-1", {"notes": "max reserved, without packing"}, HOLES, inf),
        ("tune-1", {"notes": "max reserved, packed"}, 0.0, inf),
        ("tune-1", {"notes": "max reserved; Alpaca of 2,000 samples, packed"}, 0.0, inf),
        ("tune-1", {"notes": "max reserved; Alpaca as it is"}, HOLES, inf),
        ("tune-1", {"notes": "unfused attention"}, SCORES, inf),
        ("tune-1", {"notes": "max reserved; unfused attention; samples as they are"}, HOLES, inf),
        ("tune-1", {"notes": "unfused attention; expandable segments"}, 0.0, inf),
    ],
)
def test_freed_blocks_by_the_words_of_a_row(base: str, cells: dict[str, str], share: float, most: float) -> None:
    stack = variant(base, **BARE | cells).stack
    assert (stack.cached, stack.most_cached) == (share, most)


def test_fsdp_gathered_all_blocks_ahead_before_it_had_a_limit() -> None:
    early = replace(FSDP1, gathers_ahead=True)
    block = profile_of(LLAMA).blocks[0].params
    gathered = (LLAMA.num_params - 2 * block) * 2
    assert _memory("fsdp8 bf16", early).held - _memory("fsdp8 bf16", FSDP1).held == pytest.approx(gathered, rel=0.01)
    for plan in ("dp8 bf16", "fsdp8 zero1 bf16"):
        assert _memory(plan, early).held == _memory(plan, FSDP1).held, plan
    dates = [variant("foundry-1", date=date).stack.gathers_ahead for date in ("2022-10", "2023-12")]
    assert dates == [True, False] and 2023 < LIMITED < 2023.9
    assert not variant("foundry-1", date="2022-10", notes="FSDP1, limit_all_gathers=True").stack.gathers_ahead


def test_megatrons_offload_leaves_weights_and_gradients_on_the_device() -> None:
    plan = replace(Plan.parse("fsdp8 zero1 bf16"), offload=Offload(state=True))
    size = LLAMA.num_params
    for stack, weights, gradients in ((CORE, size * 2, size * 4), (replace(CORE, offloads_grads=True), size * 2, 0)):
        memory = estimate_memory(profile_of(LLAMA), plan, WORK, stack=stack)
        terms = memory.worst.terms
        assert terms["weights"] == weights and terms.get("gradients", 0) == gradients
        assert "optimizer" not in terms and "master" not in terms
    for said, offload in (
        ("optimizer CPU offload of all states", True),
        ("activation CPU offload of 20 layers", False),
    ):
        assert variant("core-8", **BARE | {"notes": said}).plan.offload.state is offload, said


def test_litgpt_keeps_the_log_softmax_of_every_chunk_and_a_head_of_its_own() -> None:
    tuned = {"date": "2024-10", "activation_checkpoint": "full", "model": "Gemma 2B"}
    litgpt, torchtune = (variant("tune-1", **BARE | tuned | {"source": name}) for name in ("litgpt", "torchtune"))
    assert (litgpt.stack.logit_bytes, torchtune.stack.logit_bytes) == (KEPT, CHUNKED[False])
    assert (litgpt.spec.tie_embeddings, torchtune.spec.tie_embeddings) == (False, True)


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("StableLM-base-alpha-3b", (16, 4096, 16384, "plain")),
        ("StableLM base alpha 7B", (16, 6144, 24576, "plain")),
        ("ViT-g/14 DINOv2", (40, 1536, 4096, "gated")),
        ("Qwen-14B", (40, 5120, 13696, "gated")),
        ("Qwen2.5-14B", (48, 5120, 13824, "gated")),
        ("Qwen1.5-1.8B", (24, 2048, 5504, "gated")),
        ("Vicuna 13B", (40, 5120, 13824, "gated")),
        ("CodeGen 6B", (33, 4096, 16384, "plain")),
        ("stablelm-3b-4e1t", (32, 2560, 6912, "gated")),
        ("RoBERTa-large", (24, 1024, 4096, "plain")),
        ("DINOv2 ViT-g", (40, 1536, 4096, "gated")),
        ("DeepSeek-R1-Distill-Qwen-7B", (28, 3584, 18944, "gated")),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-70B", (80, 8192, 28672, "gated")),
        ("Devstral-24B", (40, 5120, 32768, "gated")),
        ("Falcon3-7B", (28, 3072, 23040, "gated")),
        ("granite-20b-code", (52, 6144, 24576, "plain")),
        ("ESM2 650M", (33, 1280, 5120, "plain")),
        ("nanochat d32", (32, 2048, 8192, "plain")),
        ("GPT-3 XL", (24, 2048, 8192, "plain")),
        ("GPT3-Medium", (24, 1024, 4096, "plain")),
        ("QwQ-32B", (64, 5120, 27648, "gated")),
    ],
)
def test_sizes_of_models_by_name(model: str, sizes: tuple[int, int, int, str]) -> None:
    spec = variant("tune-1", **BARE | {"model": model}).spec
    assert (spec.num_layers, spec.dim, spec.ffn_dim, spec.ffn) == sizes


def test_a_size_alone_makes_an_encoder_of_pictures_or_words_one() -> None:
    picture, word = (variant("tune-1", **BARE | {"model": name}).spec for name in ("ViT-10B/14", "BERT 1.2B"))
    assert (picture.patch, picture.causal, picture.vocab_size) == (14, False, 1000)
    assert (word.patch, word.causal, word.vocab_size) == (0, False, 30522)


def test_a_familys_sizes_are_no_code_that_ran() -> None:
    row = variant("tune-1", **BARE | {"source": "a script", "notes": "PyTorch FSDP2; GPT-NeoX sizes"})
    assert not row.stack.name.startswith("megatron")


def test_frozen_weights_under_autocast_are_fp32_and_cast_as_long_as_needed() -> None:
    size, work = LLAMA.num_params, replace(WORK, trained=0.01, adapters=Adapters(on=("q", "v"), copies=3.0))
    block = profile_of(LLAMA).blocks[0].params
    for plan, stack, weights, casts in (
        ("bf16", EAGER, 4 * size, 2 * size),
        ("bf16 / recompute=blocks", EAGER, 4 * size, 2 * block),
        ("bf16-pure", EAGER, 2 * size, 0),
        ("fp32", EAGER, 4 * size, 0),
        ("bf16", DEEPSPEED, 2 * size, 0),
    ):
        terms = estimate_memory(profile_of(LLAMA), Plan.parse(plan), work, stack=stack).worst.terms
        assert terms["weights"] == weights, plan
        assert terms.get("gathered", 0) == pytest.approx(casts, rel=0.01), plan


def test_trl_loads_fp32_and_a_loop_on_fsdp2_has_its_own_loss() -> None:
    tuned = BARE | {"model": "Llama 3.1 8B LoRA", "precision": "bf16", "gpu": "h200"}
    found = [
        variant("tune-1", **tuned | {"source": source, "date": date}).plan.precision
        for source, date in (("TRL", "2025-06"), ("TRL", "2026-06"), ("peft", "2026-06"))
    ]
    assert found == ["bf16-pure", "bf16", "bf16-pure"]
    alone = BARE | {"date": "2026-01"}
    loss = [
        variant("new-2", **alone | {"notes": notes}).stack.logit_bytes
        for notes in ("PyTorch FSDP2 with Hugging Face models", "a loop", "Hugging Face Trainer")
    ]
    assert loss == [LOOP_LOSS, LOOP_LOSS, UNFUSED_LOSS]


@pytest.mark.parametrize(
    ("plan", "buffers"),
    [
        ("fsdp8 zero2 / bf16", 2), ("fsdp8 zero1 / bf16-pure", 2), ("fsdp8 zero1 / fp16", 2), ("fsdp8 / bf16", 1),
        ("dp8 / bf16", 0),
    ],
)  # fmt: skip
def test_deepspeeds_buckets_are_two_flat_buffers_below_zero_3(plan: str, buffers: int) -> None:
    """`reduce_bucket_size` elements each, where communication overlaps: in its stage_1_and_2.py and stage3.py."""
    flat = replace(DEEPSPEED, reduce_bucket=1e6)
    sizes = [_memory(plan, stack).worst.terms.get("buckets", 0.0) for stack in (DEEPSPEED, flat)]
    assert sizes[1] - sizes[0] == buffers * 1e6 * 2


@pytest.mark.parametrize(
    ("notes", "bucket"),
    [
        ("DeepSpeed ZeRO-2, reduce_bucket_size 5e8 with overlap_comm", 5e8),
        ("DeepSpeed ZeRO-2", BUCKET),
        ("DeepSpeed ZeRO-3", 0.0),
        ("ColossalAI, ZeRO-2", 0.0),
    ],
)
def test_where_no_bucket_is_printed_deepspeeds_has_its_default_size_below_zero_3(notes: str, bucket: float) -> None:
    assert variant("tune-1", **BARE | {"notes": notes}).stack.reduce_bucket == bucket


def test_deepspeed_updates_a_sub_group_of_shards_at_once() -> None:
    """Flattened in 16 bits and widened to fp32: `_prepare_fp32_grad_for_sub_group` of its stage3.py."""
    few = replace(DEEPSPEED, most_updated=1e4)
    for plan, copied in (("fsdp8 / bf16", 1e4), ("fsdp8 zero2 / bf16", LLAMA.num_params / 8)):
        assert _memory(plan, few).peaks["update"] - sum(
            _memory(plan, few).worst.terms.get(name, 0.0) for name in ("weights", "master", "gradients", "optimizer")
        ) == pytest.approx(6 * copied), plan


def test_gradients_of_fsdp2_stay_on_the_stream_that_reduces_them() -> None:
    """But not those of whole weights, nor what a pipeline adds up before it reduces."""
    titan = load_stack("torchtitan")
    one = replace(titan, grads_apart=False)
    gradients = LLAMA.num_params / 8 * 4
    for plan, left in (("fsdp8 / bf16", gradients), ("dp8 / bf16", 0.0), ("pp2 fsdp4 zero1 / mb2 / bf16", 0.0)):
        assert _memory(plan, titan).held - _memory(plan, one).held == pytest.approx(left), plan


def test_a_head_over_masked_tokens_and_masks_of_numbers() -> None:
    bert = {"model": "BERT-large", "n_params": "", "n_layers": "", "d_model": "", "n_heads": "", "n_kv_heads": ""}
    bert |= {"d_ff": "", "date": "2020-06", "precision": "fp32", "activation_checkpoint": "none"}
    rows = [
        variant("tune-1", **BARE | bert | {"notes": notes})
        for notes in ("PyTorch", "TensorFlow 1.15; logits of masked tokens only", "PyTorch; logits of every token")
    ]
    assert [row.stack.wide_masks for row in rows] == [False, True, False]
    assert [row.stack.logit_share for row in rows] == [1.0, MASKED, 1.0]
    block = profile_of(rows[0].spec).blocks[0]
    narrow, wide = (
        saved_bytes(block, saving_of(rows[0].plan, replace(rows[0].stack, wide_masks=on), 128)) for on in (False, True)
    )
    assert wide - narrow == 3 * (2 * 1024 + 16 * 128), "of both sublayers' outputs, and of 16 heads' probabilities"
    logits = [_memory("bf16", replace(EAGER, logit_share=share)).worst.terms["logits"] for share in (1.0, 0.5)]
    assert logits[1] == logits[0] / 2


def test_words_for_flat_parameters_gradients_that_stay_and_grouped_heads() -> None:
    later = BARE | {"date": "2026-06"}
    roots = [
        variant("fsdp-1", **later | {"notes": notes}).stack.one_root
        for notes in ("PyTorch FSDP FULL_SHARD, Hugging Face", "PyTorch FSDP2, Hugging Face")
    ]
    assert roots == [True, False]
    assert variant("tune-1", **later | {"notes": "a loop, gradients never set to zero"}).stack.zeroes_grads
    grouped = later | {"model": "Llama 3.1 8B", "notes": "Hugging Face Trainer", "precision": "fp16", "n_kv_heads": "8"}
    kernels = [
        variant("new-2", **grouped | {"gpu": gpu, "date": date}).stack.attention
        for gpu, date in (("v100-sxm-32g", "2026-06"), ("v100-sxm-32g", "2024-06"), ("a100-sxm-80g", "2026-06"))
    ]
    assert kernels[0] == "unfused" != kernels[1] and kernels[2].startswith("flash")
