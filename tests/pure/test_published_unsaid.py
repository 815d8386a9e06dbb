"""What a row's trainer does where its cells are empty, by the trainer's sources of the row's date."""

from __future__ import annotations

from dataclasses import replace

import pytest

from published.stacks import CHUNKED_NLL, ONE_LIST, SLICED, UNFUSED_LOSS
from shardwise.model.profile import profile_of
from shardwise.model.spec import preset
from shardwise.plan.memory import estimate_memory
from shardwise.plan.plan import Plan
from shardwise.plan.ranks.activations import kept_outputs, saving_of
from shardwise.plan.stack import load_stack
from shardwise.plan.workload import Workload
from tests.pure.test_published import variant
from tests.pure.test_published_words import BARE

ONE = BARE | {"model": "Llama-3 8B", "activation_checkpoint": "", "micro_batch": "1", "global_batch": "1"}


@pytest.mark.parametrize(
    ("notes", "date", "mode"),
    [
        ("LLaMA-Factory", "2024-03", "blocks"),
        ("ms-swift, full-parameter", "2024-05", "blocks"),
        ("XTuner", "2024-05", "blocks"),
        ("TRL SFTTrainer", "2025-03", "none"),
        ("TRL SFTTrainer", "2025-10", "blocks"),
        ("TRL SFTTrainer; gradient checkpointing off", "2025-10", "none"),
        ("verl", "2025-10", "blocks"),
        ("Hugging Face Trainer", "2025-10", "none"),
        ("OpenRLHF", "2025-10", "none"),
    ],
)
def test_trainers_that_recompute_every_block_unless_told_otherwise(notes: str, date: str, mode: str) -> None:
    row = variant("tune-1", **ONE | {"date": date, "notes": notes, "gpu": "h200", "optimizer": "SGD"})
    assert row.plan.recompute.mode == mode
    assert ("recompute of every block, the trainer's default" in row.assumed) == (mode == "blocks")


def test_a_trainers_default_is_not_that_of_the_megatron_that_it_runs() -> None:
    assert variant("core-8", source="ms-swift, Megatron-Core", date="2025-10").plan.recompute.mode == "none"


def test_trl_fine_tunes_with_a_loss_in_chunks_since_its_version_1_7() -> None:
    def bytes_of(notes: str, date: str) -> float:
        return variant("tune-1", **ONE | {"date": date, "notes": notes}).stack.logit_bytes

    assert CHUNKED_NLL == 2026.5
    assert bytes_of("TRL SFTTrainer", "2026-08") == SLICED
    assert bytes_of("TRL SFTTrainer", "2026-03") == UNFUSED_LOSS
    assert bytes_of("TRL, loss_type='nll'", "2026-08") == UNFUSED_LOSS
    assert bytes_of("TRL, GRPO", "2026-08") == UNFUSED_LOSS
    assert bytes_of("Hugging Face Trainer", "2026-08") == UNFUSED_LOSS


def test_transformers_loss_is_the_same_below_fsdp2() -> None:
    eight = {"n_gpus": "8", "zero_stage": "3", "dp_shard": "8", "global_batch": "8", "date": "2025-06"}
    by_trainer = variant("tune-1", **ONE | eight | {"notes": "Hugging Face Trainer, PyTorch FSDP2"}).stack
    by_loop = variant("tune-1", **ONE | eight | {"notes": "PyTorch FSDP2"}).stack
    assert by_trainer.name == by_loop.name == "torchtitan"
    assert (by_trainer.logit_bytes, by_loop.logit_bytes) == (UNFUSED_LOSS, load_stack("torchtitan").logit_bytes)


@pytest.mark.parametrize(
    ("notes", "date", "model", "precision"),
    [
        ("axolotl", "2024-06", "Llama-3 8B", "bf16-pure"),
        ("axolotl, bf16 mixed precision", "2024-06", "Llama-3 8B", "bf16-pure"),
        ("Hugging Face Trainer", "2025-06", "Llama-3.2 1B", "bf16"),
        ("Hugging Face Trainer", "2026-06", "Llama-3.2 1B", "bf16-pure"),
        ("Hugging Face Trainer", "2026-06", "GPT-2 XL", "bf16"),
        ("Hugging Face Trainer, from scratch", "2026-06", "Llama-3.2 1B", "bf16"),
        ("TRL SFTTrainer", "2026-06", "Llama-3.2 1B", "bf16"),
        ("LLaMA-Factory on the Hugging Face Trainer", "2026-06", "Llama-3.2 1B", "bf16"),
    ],
)
def test_weights_in_the_type_in_which_a_trainer_loads_them(notes: str, date: str, model: str, precision: str) -> None:
    cells = {"date": date, "notes": notes, "model": model, "gpu": "h200", "precision": "bf16"}
    assert variant("tune-1", **ONE | cells).plan.precision == precision


def test_a_row_that_says_mixed_has_weights_in_fp32() -> None:
    cells = {"date": "2024-06", "notes": "axolotl", "gpu": "h200", "precision": "bf16 mixed"}
    assert variant("tune-1", **ONE | cells | {"model": "Llama-3.2 1B"}).plan.precision == "bf16"


def test_torchtitans_list_has_every_product_with_a_bias_since_there_is_one_list() -> None:
    cells = BARE | {"source": "torchtitan", "activation_checkpoint": "selective", "model": "gpt-oss-20b"}
    before, since = (variant("new-2", **cells | {"date": date}).stack for date in ("2025-12", "2026-06"))
    assert ONE_LIST == 2026.1
    assert (before.keeps_biased, since.keeps_biased) == (0.0, 1.0)
    row = variant("new-2", **cells | {"date": "2026-06"})
    block, plan = profile_of(row.spec).blocks[0], Plan.parse("fsdp8 / bf16 / recompute=ops")
    kept = [kept_outputs(block, saving_of(plan, stack, 4096)) for stack in (before, since)]
    biased = {op.name: op.gives for op in block.matmuls if op.biased}
    assert kept[1] - kept[0] == 2 * sum(biased.values()) and set(biased) == {"qkv", "out"}
    plain = profile_of(preset("llama-8b")).blocks[0]
    assert kept_outputs(plain, saving_of(plan, before, 4096)) == kept_outputs(plain, saving_of(plan, since, 4096))


@pytest.mark.parametrize(
    ("notes", "date", "dropped"),
    [
        ("Megatron-LM, dropout 0.1", "2026-06", True),
        ("Megatron-LM, dropout of 0.1", "2026-06", True),
        ("Megatron-LM", "2026-06", False),
        ("Megatron-LM, attention dropout 0.1", "2026-06", False),
        ("Megatron-LM, dropout 0", "2021-06", False),
        ("LoRA rank 8, dropout 0.1", "2026-06", False),
    ],
)
def test_dropout_that_a_row_names(notes: str, date: str, dropped: bool) -> None:
    assert variant("new-2", **BARE | {"model": "GPT 2B", "date": date, "notes": notes}).spec.dropout is dropped


def test_an_updates_temporary_leaves_no_holes_for_samples_of_other_lengths() -> None:
    profile, work = profile_of(preset("llama-8b")), Workload(seq_len=512, global_batch=1)
    plan, stack = Plan.parse("bf16-pure / recompute=blocks"), replace(load_stack("eager"), cached=1.6)
    at_once, singly = (
        estimate_memory(profile, plan, work, stack=replace(stack, fused_optimizer=fused)) for fused in (False, True)
    )
    assert at_once.worst.phase == "update" and at_once.worst.terms["temporary"] > 10e9
    assert at_once.held == singly.held > 0
