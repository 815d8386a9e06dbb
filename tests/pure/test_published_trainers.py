"""What trainers and loops hold: DeepSpeed's offload, Accelerate's micro-batches, losses and steps of one's own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from published.layout import ACCUMULATES, WHOLE_GRADIENTS
from published.stacks import CHUNKED, LOOP_LOSS, LOW_LOSS, NATIVE_LOSS, OWN_LOSS, STAGED, TUNED
from shardwise.model.profile import profile_of
from shardwise.model.spec import preset
from shardwise.plan.memory import Memory, estimate_memory
from shardwise.plan.plan import Plan
from shardwise.plan.ranks.activations import saved_bytes, saving_of
from shardwise.plan.stack import Stack, load_stack
from tests.pure.test_planner_memory import LLAMA, WORK
from tests.pure.test_published import variant
from tests.pure.test_published_words import BARE

EAGER, DEEPSPEED = load_stack("eager"), load_stack("deepspeed")
SIZE = LLAMA.num_params


def _memory(plan: str, stack: Stack) -> Memory:
    return estimate_memory(profile_of(LLAMA), Plan.parse(plan), WORK, stack=stack)


def _date(year: float) -> str:
    """The month that begins behind `year`."""
    month = int((year % 1) * 12) + 2
    return f"{int(year)}-{month:02d}" if month <= 12 else f"{int(year) + 1}-01"


@pytest.mark.parametrize(
    ("plan", "changes", "staged"),
    [
        ("fsdp8 zero2 / bf16 / offload=state", {}, SIZE / 8 * 4),  # its pull request 5301
        ("fsdp8 zero2 / bf16 / offload=state", {"casts_on_host": True}, 0.0),
        ("bf16 / offload=state", {}, SIZE * 4),
        ("fsdp8 / bf16 / offload=state", {}, SIZE / 8 * 6),
        ("fsdp8 / bf16 / offload=state", {"offloads_weights": True}, 0.0),
    ],
)
def test_what_an_offloaded_step_brings_to_the_device(plan: str, changes: dict[str, bool], staged: float) -> None:
    stack = replace(DEEPSPEED, offloads_weights=False, offloads_grads=True, reduce_bucket=0.0)
    weights = SIZE * 2 / (8 if Plan.parse(plan).zero == 3 else 1) * (not changes.get("offloads_weights"))
    assert _memory(plan, replace(stack, **changes)).peaks["update"] == pytest.approx(weights + staged)


def test_deepspeed_casts_on_the_host_before_its_pull_request() -> None:
    cells = BARE | {"notes": "DeepSpeed ZeRO-2", "zero_stage": "2"}
    dates = "2024-02", _date(STAGED)
    assert [variant("tune-1", **cells | {"date": date}).stack.casts_on_host for date in dates] == [True, False]
    assert not variant("tune-1", **BARE | {"date": "2024-02"}).stack.casts_on_host, "no DeepSpeed"


def test_buckets_stay_on_the_device_under_an_offload() -> None:
    few = replace(DEEPSPEED, reduce_bucket=1e3)
    for plan, buffers in (("fsdp8 zero2 / bf16", 2), ("fsdp8 / bf16", 1)):
        assert _memory(f"{plan} / offload=state", few).worst.terms["buckets"] == buffers * 2e3, plan


@pytest.mark.parametrize(
    ("notes", "share"),
    [
        ("DeepSpeed ZeRO-2, reduce_bucket_size 2e8", 1.0),
        ("DeepSpeed ZeRO-2, reduce_bucket_size 2e8; overlap_comm off", 0.5),
        ("DeepSpeed ZeRO-2, reduce_bucket_size 2e8; without overlap_comm", 0.5),
        ("DeepSpeed ZeRO-2, reduce_bucket_size 2e8; overlap_comm on", 1.0),
    ],
)
def test_deepspeed_has_a_second_buffer_where_it_overlaps(notes: str, share: float) -> None:
    assert variant("tune-1", **BARE | {"notes": notes}).stack.reduce_bucket == 2e8 * share


def test_of_weights_that_are_offloaded_one_device_too_keeps_what_it_gathers() -> None:
    """With weights on the device of one rank there is nothing to gather; a model that is built early is not inside."""
    stack = replace(DEEPSPEED, keeps_gathered=True, widens_grads=False)
    plan, profile = "zero3 / bf16 / offload=state", profile_of(LLAMA)
    gathered = [_memory(plan, replace(stack, offloads_weights=on)).worst.terms["gathered"] for on in (False, True)]
    block, table = profile.blocks[0].params, LLAMA.vocab_size * LLAMA.dim
    assert gathered == pytest.approx([((blocks + 1) * block + table) * 2 for blocks in (2, 8)], rel=1e-3)
    cells = BARE | {"source": "Hugging Face Trainer", "zero_stage": "3"}
    said = ("DeepSpeed ZeRO-3", "DeepSpeed ZeRO-3; the model is built outside of zero.Init")
    assert [variant("tune-1", **cells | {"notes": notes}).stack.keeps_gathered for notes in said] == [False, True]


def test_a_loop_over_parameters_steps_one_after_the_other() -> None:
    singly = replace(EAGER, fused_optimizer=False, steps_singly=True)
    at_once = replace(singly, steps_singly=False)
    table = LLAMA.vocab_size * LLAMA.dim
    spare = [
        _memory("bf16", each).peaks["update"] - _memory("bf16", EAGER).peaks["update"] for each in (singly, at_once)
    ]
    assert spare == [table * 4, SIZE * 4]
    cells = BARE | {"notes": "a loop of its own", "date": "2024-06"}
    found = [variant("new-2", **cells | {"optimizer": name}).stack for name in ("AdamW", "AdamW of its own")]
    assert [each.steps_singly for each in found] == [False, True]
    assert not any(each.fused_optimizer for each in found), "its passes are as many"


def test_losses_of_loops_and_of_torchtunes_time() -> None:
    cells = BARE | {"precision": "bf16 pure", "n_gpus": "1", "dp_replicate": "1", "dp_shard": "1", "global_batch": "4"}
    loop = cells | {"notes": "a loop of its own", "micro_batch": "4"}
    assert variant("tune-1", **loop).stack.logit_bytes == LOOP_LOSS
    low = variant("tune-1", **loop | {"notes": "a loop of its own; logits in 16 bits"})
    assert low.stack.logit_bytes == LOW_LOSS
    dates = [
        variant("tune-1", **cells | {"source": "torchtune", "date": date, "activation_checkpoint": "full"}).stack
        for date in ("2024-04", _date(TUNED))
    ]
    assert [each.logit_bytes == CHUNKED[False] for each in dates] == [False, True]


def test_a_compiled_loop_on_replicas_has_the_loss_in_its_graph() -> None:
    cells = BARE | {"notes": "a loop of its own; DDP", "compile": "y", "zero_stage": "0", "date": "2025-03"}
    cells |= {"dp_replicate": "16", "dp_shard": "1", "precision": "bf16 pure"}
    stack = variant("fsdp-1", **cells).stack
    assert (stack.name, stack.logit_bytes, stack.fragmentation) == ("torchtitan", OWN_LOSS, 0.0)
    stack = variant("fsdp-1", **cells | {"notes": "a loop of its own; FSDP", "zero_stage": "3"}).stack
    assert stack.logit_bytes != OWN_LOSS


@pytest.mark.parametrize(
    ("changes", "whole"),
    [
        ({}, True),
        ({"notes": "Accelerate, FSDP"}, True),
        ({"notes": "Hugging Face Trainer, FSDP; sync_each_batch true"}, False),
        ({"notes": "a loop of its own, FSDP"}, False),
        ({"notes": "Hugging Face Trainer, FSDP; LoRA rank 16"}, False),
        ({"global_batch": "32"}, False),  # one micro-batch
        ({"date": "2023-02"}, False),
    ],
)
def test_accelerate_reduces_gradients_of_fsdp_behind_the_last_micro_batch(changes: dict[str, str], whole: bool) -> None:
    assert ACCUMULATES > 2023.1
    cells = BARE | {"global_batch": "128", "zero_stage": "3", "dp_shard": "16", "dp_replicate": "1", "peak_mem_gib": ""}
    row = variant("fsdp-1", **cells | {"precision": "bf16", "notes": "Hugging Face Trainer, FSDP"} | changes)
    assert (WHOLE_GRADIENTS in row.assumed, row.plan.zero == 1) == (whole, whole)
    if whole:
        memory = estimate_memory(profile_of(row.spec), row.plan, row.workload, stack=row.stack)
        assert memory.worst.terms["gradients"] == pytest.approx(2 * row.spec.num_params, rel=0.01)
        assert row.plan.reshards


def test_megatron_bridge_has_the_loss_of_a_models_recipe_and_splits_the_gates_of_qwen() -> None:
    def found(model: str, date: str, notes: str = "") -> tuple[float, bool]:
        stack = variant("core-8", **BARE | {"model": model, "date": date, "notes": f"Megatron-Bridge; {notes}"}).stack
        return stack.logit_bytes, stack.splits_gate

    own = load_stack("megatron-bridge").logit_bytes
    assert found("Llama 3.1 8B", "2025-09") == (own, False)
    assert found("Llama 3.1 8B", "2024-09") == (NATIVE_LOSS, False), "before Transformer Engine had one"
    assert found("Qwen3-8B", "2025-09") == (NATIVE_LOSS, True)
    assert found("Qwen3-8B", "2026-06") == (own, True)
    assert found("Qwen3-8B", "2025-09", "performance script") == (own, False)
    assert found("Nemotron-4 15B", "2026-06") == (NATIVE_LOSS, False)
    core = load_stack("megatron-core")
    block = profile_of(preset("qwen3-8b")).blocks[0]
    one, two = (saving_of(Plan.parse("bf16"), each, 4096) for each in (core, replace(core, splits_gate=True)))
    assert saved_bytes(block, two) - saved_bytes(block, one) == 2 * preset("qwen3-8b").ffn_dim


def test_gates_are_two_kernels_before_megatron_core_fused_them() -> None:
    for notes in ("Megatron-LM, flash attention", "PaddleNLP"):
        dates = ("2023-11", "2024-03")
        found = [variant("core-8", **BARE | {"date": date, "notes": notes}).stack for date in dates]
        assert [stack.name for stack in found] == ["megatron-core"] * 2
        assert [stack.splits_gate for stack in found] == [True, False], notes


@pytest.mark.parametrize(
    ("cells", "each"),
    [
        ({"gpu": "h100", "notes": "Megatron-Core with Transformer Engine"}, 2.0),
        ({"gpu": "b200", "notes": "Megatron-Core with Transformer Engine"}, 1.0),
        ({"gpu": "b200", "notes": "Megatron-Core with Transformer Engine", "precision": "mxfp8"}, 2.0),
        ({"gpu": "h100", "notes": "nanochat with Transformer Engine's layers, autocast in bf16"}, 1.0),
        ({"gpu": "h100", "notes": "Megatron-Core; gathered in fp8"}, 0.0),
        ({"gpu": "h100", "notes": "Megatron-Bridge"}, 0.0),
    ],
)
def test_products_in_fp8_keep_their_weights_so_beside_those_in_16_bits(cells: dict[str, str], each: float) -> None:
    row = variant("core-8", **BARE | {"precision": "fp8", "model": "Llama 3.1 8B"} | cells)
    assert row.stack.caches_low == each
    stack, plan = replace(load_stack("megatron-core"), caches_low=each), Plan.parse("bf16 fp8=tensorwise")
    work, inside = replace(WORK, compute="fp8"), sum(block.params for block in profile_of(LLAMA).blocks)

    def weights(stack: Stack) -> float:
        return estimate_memory(profile_of(LLAMA), plan, work, stack=stack).worst.terms["weights"]

    assert weights(stack) - weights(replace(stack, caches_low=0.0)) == each * inside
