"""What rows leave to their library: unsloth's and PEFT's checkpoints, Apex's casts, heads of tasks, cards' links."""

from __future__ import annotations

import pytest

from shardwise.hardware.cluster import load_cluster
from tests.pure.test_published import variant

SAID = {"source": "a blog", "date": "2024-05", "activation_checkpoint": ""}
BERT = {
    "model": "BERT-large",
    "n_params": "",
    "n_layers": "",
    "d_model": "",
    "n_heads": "",
    "n_kv_heads": "",
    "d_ff": "",
}


def test_checkpoints_of_unsloth_wait_on_the_host_and_its_loss_holds_few_logits() -> None:
    tuned = SAID | {"model": "Llama 3.1 8B", "notes": "QLoRA with Unsloth"}
    row, later = variant("tune-1", **tuned), variant("tune-1", **tuned | {"date": "2025-01"})
    assert row.plan.recompute.mode == "blocks" and row.plan.offload.activations and row.stack.fused
    assert 12.0 > row.stack.logit_bytes > later.stack.logit_bytes, "cut cross entropy is of November 2024"
    assert not variant("tune-1", **tuned | {"date": "2024-01"}).plan.offload.activations
    whole = variant("tune-1", **tuned | {"notes": "QLoRA with Unsloth, no gradient checkpointing"})
    assert whole.plan.recompute.mode == "none" and not whole.plan.offload.activations
    other = variant("tune-1", **tuned | {"notes": "unslothai/unsloth README @0123abc; QLoRA by PEFT"})
    assert not other.plan.offload.activations, "a table of that repository about another library"


@pytest.mark.parametrize(
    ("notes", "mode"),
    [
        ("Hugging Face PEFT, QLoRA", "blocks"),
        ("HF Trainer, LoRA, load_in_8bit", "blocks"),
        ("Hugging Face PEFT, LoRA", "none"),
        ("QLoRA, a loop of its own", "none"),
        ("Hugging Face PEFT, QLoRA, no gradient checkpointing", "none"),
    ],
)
def test_what_prepares_packed_weights_turns_checkpoints_on(notes: str, mode: str) -> None:
    small = SAID | {"model": "Llama 3.2 1B", "n_params": "", "seq_len": "256", "notes": notes}
    assert variant("tune-1", **small).plan.recompute.mode == mode


def test_apex_of_the_second_level_casts_all() -> None:
    cells = SAID | {"precision": "fp16", "date": "2021-01"}
    assert variant("new-2", **cells | {"notes": "DDP, apex amp O1"}).stack.residual_bytes == 4.0
    assert variant("new-2", **cells | {"notes": "DDP, Apex O2 with FusedAdam"}).stack.residual_bytes == 0.0


def test_a_task_without_logits_has_a_table_of_words_and_no_head() -> None:
    masked = variant("new-2", **SAID | BERT | {"vocab": "", "notes": "DDP; masked words"}).spec
    answers = variant("new-2", **SAID | BERT | {"vocab": "", "notes": "DDP; fine-tuning on SQuAD"}).spec
    assert masked.vocab_size == 30522 and answers.vocab_size < 10 and masked.dropout
    assert answers.num_params == pytest.approx(masked.num_params, rel=0.01)


def test_a_loop_of_its_own_spends_nothing_of_a_trainers_each_step() -> None:
    one = {
        "n_gpus": "8",
        "gpus_per_node": "8",
        "dp_replicate": "8",
        "dp_shard": "1",
        "zero_stage": "",
        "tp": "",
        "pp": "",
    }
    cells = SAID | one | {"date": "2026-03", "compile": "true"}
    own, other = (
        variant("fsdp-1", **cells | {"notes": notes}).stack
        for notes in ("a loop of its own, DDP, step of all", "torchtitan, DDP")
    )
    assert own.name == other.name == "torchtitan"
    assert own.step + own.micro_host < 0.001 < other.step + other.micro_host
    eager = variant("fsdp-1", **cells | {"notes": "a loop of its own, DDP, step of all", "compile": "n"}).stack
    assert (eager.step, eager.micro_host) == (own.step, own.micro_host)
    single = {"compile": "n", "n_gpus": "1", "gpus_per_node": "1", "dp_replicate": "1"}
    alone = variant("fsdp-1", **cells | {"notes": "a loop of its own"} | single).stack
    assert (eager.block_host, eager.backward_host) == (alone.block_host, alone.backward_host), "the same loop"
    assert own.block_host == other.block_host < eager.block_host, "compiled blocks start as a trainer's do"
    cut = {"notes": "a loop of its own", "compile": "n", "tp": "2", "dp_replicate": "4"}
    assert variant("fsdp-1", **cells | cut).stack.step == other.step, "what cuts models too is a trainer"


def test_links_between_two_cards() -> None:
    pair = SAID | {
        "gpu": "Titan RTX",
        "n_gpus": "2",
        "gpus_per_node": "2",
        "dp_replicate": "2",
        "dp_shard": "1",
        "zero_stage": "",
    }
    slow, wired, plain = (
        variant("fsdp-1", **pair | {"interconnect": said}).cluster.local.bandwidth
        for said in ("PCIe 3, no NVLink", "NVLink bridge", "")
    )
    assert wired > plain == slow == load_cluster("t4").local.bandwidth
    third, fourth = (
        variant("fsdp-1", **pair | {"gpu": "RTX 3090", "interconnect": said}).cluster.local.bandwidth
        for said in ("PCIe Gen3 x16", "PCIe 4")
    )
    assert fourth == 2 * third


def test_megatron_shares_its_sends_over_tp_and_deepspeeds_pipeline_does_not() -> None:
    log = {"notes": "tp 8, pp 4"}
    found = [
        variant("old-1", **log | {"source": source}).stack for source in ("Megatron-LM log", "Megatron-DeepSpeed log")
    ]
    assert [stack.splits_sends for stack in found] == [True, False]
