"""How published rows say what is off, which ranks there are, and what their cards hold."""

from __future__ import annotations

import pytest

from published.cells import Skip
from published.layout import UNEVEN
from published.rows import row_of
from shardwise.hardware.cluster import Cluster
from shardwise.plan.plan import Offload
from shardwise.plan.stack import load_stack
from tests.pure.test_published import RAWS, variant

BARE = {"notes": "", "source": "a blog", "date": "2025-06"}


@pytest.mark.parametrize(
    "said",
    [
        "CPU offload disabled",
        "FSDP with CPU offload off",
        "optimizer offload: false",
        "cpu_offload is not used",
        "no activation offloading",
        "without optimizer state offloading",
    ],
)
def test_an_offload_that_is_off_moves_nothing(said: str) -> None:
    assert variant("fsdp-1", **BARE | {"notes": f"torchtitan; {said}"}).plan.offload == Offload(), said


def test_an_offload_beside_another_that_is_off_is_on() -> None:
    row = variant("fsdp-1", **BARE | {"notes": "optimizer offloading; activation offloading off"})
    assert row.plan.offload == Offload(state=True)


def test_a_stage_may_stand_in_the_name_of_a_file() -> None:
    few = dict.fromkeys(("dp_replicate", "dp_shard", "tp", "pp", "cp", "zero_stage", "optimizer"), "")
    for stage in (1, 2, 3):
        row = variant("fsdp-1", **BARE | few | {"notes": f"DeepSpeed, zero{stage}.json"})
        assert row.plan.zero == stage
    assert variant("fsdp-1", **BARE | few | {"notes": "DeepSpeed zero 2.5"}).plan.zero != 2


@pytest.mark.parametrize(
    "said",
    [
        {"zero_stage": "DDP"},
        {"notes": "nanoGPT, DP=8"},
        {"notes": "data parallel size = 8"},
        {"ep": "8", "model": "Mixtral 8x7B", "n_params": "", "n_layers": "", "d_model": ""},
    ],
)
def test_a_row_that_names_its_data_or_expert_ranks_alone_has_no_others(said: dict[str, str]) -> None:
    few = dict.fromkeys(("dp_replicate", "dp_shard", "tp", "pp", "cp", "zero_stage", "optimizer"), "")
    axes = variant("fsdp-1", **BARE | few | {"n_gpus": "8"} | said).plan.axes
    assert (axes.tp, axes.pp, axes.cp, axes.dp_replicate * axes.dp_shard) == (1, 1, 1, 8)
    with pytest.raises(Skip, match="layout"):
        row_of(RAWS["fsdp-1"] | BARE | few | {"n_gpus": "8", "notes": "DP=4"})


def test_drivers_name_a_gh200_by_the_memory_of_its_cpu() -> None:
    chip = variant("fsdp-1", **BARE | {"gpu": "NVIDIA GH200"}).cluster.device
    for name in ("NVIDIA GH200 480GB", "GH200 120GB"):
        assert variant("fsdp-1", **BARE | {"gpu": name}).cluster.device.memory == chip.memory, name
    assert variant("fsdp-1", **BARE | {"gpu": "NVIDIA GH200 144G HBM3e"}).cluster.device.memory > 1.4 * chip.memory


def test_the_a100_of_64_gb_is_leonardos() -> None:
    for name in ("NVIDIA A100-SXM-64GB", "a100-64g"):
        device = variant("fsdp-1", **BARE | {"gpu": name}).cluster.device
        assert (device.curve.units, round(device.memory / 1e9)) == (124, 68), name
        assert device.rates.bf16 == pytest.approx(312e12 * 124 / 108, rel=1e-2), name


def test_the_h100_of_64_gb_is_marenostrums_with_the_slower_memory() -> None:
    usual = variant("fsdp-1", **BARE | {"gpu": "H100 SXM 80GB"}).cluster.device
    for name in ("NVIDIA H100 64GB HBM2", "h100-64g"):
        device = variant("fsdp-1", **BARE | {"gpu": name}).cluster.device
        assert (device.rates, round(device.memory / 1e9)) == (usual.rates, 68), name
        assert device.bandwidth < 0.5 * usual.bandwidth, name


def test_the_owner_of_a_repository_is_not_what_ran() -> None:
    said = "Oneflow-Inc/DLPerf PyTorch/BERT/README.md; NVIDIA DeepLearningExamples, DDP"
    assert not variant("fsdp-1", **BARE | {"notes": said}).stack.name.startswith("megatron")
    laid = variant("fsdp-1", **BARE | {"notes": "OneFlow 0.8; memory by nvidia-smi"}).stack
    assert laid.name.startswith("megatron"), "memory is laid out before it runs"
    assert laid.fragmentation == laid.cached == 0, "so that no holes arise, and none are kept"
    said = "hpcaitech/ColossalAI-Pytorch-lightning benchmark/README.md; PyTorch Lightning, DDP"
    assert (
        variant("fsdp-1", **BARE | {"notes": said, "n_gpus": "8", "dp_replicate": "8", "dp_shard": "1"}).stack.name
        == "eager"
    )


def test_replicas_of_other_frameworks_are_reduced_as_ddps() -> None:
    few = BARE | dict.fromkeys(("tp", "pp", "cp", "zero_stage"), "") | {"date": "2020-06"}
    for said in ("TensorFlow 1.15, Horovod", "MXNet", "PaddlePaddle"):
        row = variant("fsdp-1", **few | {"notes": said, "n_gpus": "8", "dp_replicate": "8", "dp_shard": "1"})
        assert (row.stack.name, row.plan.zero) == ("fsdp1", 0), said
    for said in ({"notes": "Megatron-LM"}, {"notes": "PaddleNLP", "date": "2024-10"}):
        assert variant("fsdp-1", **few | said).stack.name.startswith("megatron"), said


def test_twelve_devices_of_six_cards_are_tiles() -> None:
    few = BARE | {"gpu": "Intel Max 1550", "n_gpus": "24", "dp_replicate": "1", "dp_shard": "24"}
    card, tile = (variant("fsdp-1", **few | {"gpus_per_node": count}) for count in ("6", "12"))
    assert tile.cluster.device.rates.bf16 == card.cluster.device.rates.bf16 / 2


def test_torch_on_xla_hides_nothing_of_what_is_sent() -> None:
    on = {said: variant("fsdp-1", **BARE | {"gpu": "TPU v4", "notes": said}).stack for said in ("JAX", "PyTorch/XLA")}
    assert on["PyTorch/XLA"].name == on["JAX"].name and on["PyTorch/XLA"].overlap_data == 0 < on["JAX"].overlap_data


def test_no_more_blocks_are_recomputed_than_need_be() -> None:
    unsaid = BARE | {"source": "Megatron-LM", "activation_checkpoint": ""}
    found = {gpu: variant("core-8", **unsaid | {"gpu": gpu}) for gpu in ("h100-96g", "h200", "gb300")}
    assert [found[gpu].plan.recompute.ratio for gpu in ("h100-96g", "h200")] == [0.75, 0.5]
    assert any("without which it would not fit" in line for line in found["h200"].assumed)
    assert found["gb300"].plan.recompute.mode == "none"


def test_an_exchange_between_experts_says_that_ranks_share_them() -> None:
    few = dict.fromkeys(("dp_replicate", "tp", "pp", "cp", "n_params", "n_layers", "d_model", "ep"), "")
    moe = BARE | few | {"model": "Mixtral 8x7B", "n_gpus": "16", "dp_shard": "16", "gpus_per_node": "8"}
    for said in ("FSDP2 + EP", "DeepEP", "expert parallelism"):
        row = variant("fsdp-1", **moe | {"notes": said})
        assert row.plan.axes.ep == 8 and any("no degree" in line for line in row.assumed), said
    for said in ("", "no expert parallelism", "steps + episodes"):
        assert variant("fsdp-1", **moe | {"notes": said}).plan.axes.ep == 1, said
    assert variant("fsdp-1", **moe | {"notes": "DeepEP", "ep": "4"}).plan.axes.ep == 4
    assert variant("fsdp-1", **BARE | {"notes": "DeepEP"}).plan.axes.ep == 1, "a dense model has none"


def test_in_a_graph_of_the_whole_step_the_host_waits_for_no_gather() -> None:
    graphed = variant("fsdp-1", **BARE | {"notes": "torchtitan; CUDA graph of the whole step"})
    assert graphed.stack.gather_wait == 0 < variant("fsdp-1", **BARE | {"notes": "torchtitan"}).stack.gather_wait


def test_megatron_bridge_graphs_the_steps_of_mixtures_on_blackwell() -> None:
    row = BARE | {"model": "Qwen3-30B-A3B", "gpu": "gb300", "date": "2026-06", "notes": "Megatron-Bridge"}
    other = ({"date": "2026-02"}, {"gpu": "h100"}, {"model": "Llama-3-8B"}, {"model": "Nemotron-3-Nano 30B-A3B"})
    hosts = [variant("fsdp-1", **row | cells).stack.route_host for cells in ({}, *other)]
    assert hosts[0] == 0 and all(hosts[1:]), "elsewhere the host launches each kernel"


def test_what_overlaps_and_is_fused_by_date() -> None:
    zero3 = BARE | {"zero_stage": "3", "notes": "DeepSpeed ZeRO-3"}
    hidden = [variant("fsdp-1", **zero3 | {"date": date}).stack.overlap_data for date in ("2022-06", "2024-01")]
    assert hidden == [0.0, load_stack("deepspeed").overlap_data] and hidden[1] > 0
    fsdp = BARE | {"zero_stage": "3", "notes": "PyTorch FSDP"}
    first = [variant("fsdp-1", **fsdp | {"date": date}).stack for date in ("2022-06", "2023-06")]
    assert {stack.name for stack in first} == {"fsdp1"}
    assert [stack.overlap_data for stack in first] == [0.0, load_stack("fsdp1").overlap_data]
    cores = [variant("core-8", date=date, notes="Megatron-Core").stack for date in ("2023-10", "2025-01")]
    assert (
        cores[0].name == cores[1].name
        and cores[0].loss_bytes == load_stack("megatron-2021").loss_bytes > cores[1].loss_bytes
    )


def test_a_core_of_trainium_is_half_a_chip() -> None:
    def cluster(gpu: str, count: str) -> Cluster:
        alone = {"n_gpus": count, "gpus_per_node": count, "dp_replicate": count, "global_batch": "64"}
        return variant("core-8", **BARE | alone | {"gpu": gpu}).cluster

    chip = cluster("trn1.32xlarge", "16")
    for core in (cluster("trn1.32xlarge", "32"), cluster("Trainium NeuronCore", "16")):
        assert core.device.rates.bf16 == chip.device.rates.bf16 / 2 and core.device.memory == chip.device.memory / 2
        assert core.local.bandwidth == chip.local.bandwidth / 2


def test_gaudi_compiles_what_pytorch_runs() -> None:
    said = BARE | {"gpu": "gaudi2", "notes": "Hugging Face Trainer"}
    assert variant("fsdp-1", **said | {"compile": ""}).stack.fused
    assert not variant("fsdp-1", **said | {"compile": "", "gpu": "a100-80g"}).stack.fused
    fork = BARE | {"notes": "Megatron-DeepSpeed", "date": "2024-06", "precision": "bf16"}
    assert variant("core-8", **fork | {"gpu": "gaudi2"}).stack.name == "megatron-core"
    assert variant("core-8", **fork | {"gpu": "mi250x"}).stack.name == "megatron-flash"


def test_what_is_not_stated_of_compiling_is_not_that_nothing_was() -> None:
    said = BARE | {"compile": "", "gpu": "h200"}
    unsaid, none = (
        variant("fsdp-1", **said | {"notes": f"torchtitan; {words}"}).stack
        for words in ("compile not stated", "not compiled")
    )
    assert unsaid.fused and not none.fused
    layout = {"zero_stage": "0", "dp_replicate": "4", "dp_shard": "1", "tp": "2", "n_gpus": "8", "compile": "false"}
    assert variant("fsdp-1", **BARE | layout).stack.name == "torchtitan", "whoever says so has blocks of PyTorch"


def test_fp4_of_pytorch_is_no_faster_than_its_fp8() -> None:
    work = [
        variant(base, **BARE | {"source": source, "gpu": "gb200", "precision": "nvfp4"}).workload
        for base, source in (("fsdp-1", "torchtitan"), ("core-8", "Megatron-Bridge"))
    ]
    assert [one.compute for one in work] == ["fp8", "fp4"]


def test_gradients_of_weights_in_16_bits_are_reduced_in_16_bits() -> None:
    rows = [variant("fsdp-1", **BARE | {"source": "torchtitan", "precision": kind}) for kind in ("bf16 pure", "bf16")]
    assert [row.plan.communication.reduce_dtype for row in rows] == ["bf16", None]


def test_full_cuda_graphs_hold_the_whole_step() -> None:
    for said, host in (("HybridEP, full CUDA graphs", 0.0), ("full CG", 0.0), ("partial CUDA graphs", None)):
        row = variant("core-8", **BARE | {"source": "Megatron-Core", "notes": said})
        assert (row.stack.block_host == 0.0) is (host == 0.0), said


def test_a_feed_forward_four_times_as_wide_has_no_gate() -> None:
    sizes = {"model": "mystery", "n_params": "", "n_layers": "8", "d_model": "1024", "n_heads": "8", "vocab": "32000"}
    assert variant("fsdp-1", **BARE | sizes | {"d_ff": "4096"}).spec.ffn == "plain"
    assert variant("fsdp-1", **BARE | sizes | {"d_ff": "2816"}).spec.ffn == "gated"


def test_recompute_of_frameworks_on_xla() -> None:
    said = BARE | {"activation_checkpoint": "", "source": "MaxText", "gpu": "h100"}
    assert variant("core-8", **said | {"tp": "1", "pp": "1"}).plan.recompute.mode == "blocks"
    piped = variant("core-8", **said | {"tp": "4", "pp": "2", "dp_replicate": "1", "n_gpus": "8"})
    assert piped.plan.recompute.mode != "blocks", "as few as fit, where stages hold few micro-batches"
    prime = variant(
        "fsdp-1", **said | {"source": "torchprime", "gpu": "tpu-v6e", "interconnect": "", "notes": "PyTorch/XLA"}
    )
    assert prime.plan.recompute.mode == "blocks"


def test_deepspeed_sharded_the_parameters_of_megatrons_models_in_2021() -> None:
    said = {"source": "Megatron-LM", "notes": "DeepSpeed ZeRO-3 with Megatron-LM", "zero_stage": "3"}
    said |= {"tp": "4", "pp": "1", "dp_replicate": "1", "dp_shard": "2", "n_gpus": "8"}
    found = [variant("core-8", **BARE | said | {"date": date}).stack.name for date in ("2021-05", "2025-05")]
    assert found[0] == "deepspeed" and found[1].startswith("megatron"), found


def test_attention_is_counted_as_the_code_of_the_date_counts_it() -> None:
    """Longer where all of attention is counted: more operations in the same TFLOP/s."""
    said = BARE | {"tokens_per_s_per_gpu": "", "step_time_s": "", "tflops_per_gpu": "400", "seq_len": "8192"}
    for base, source, last, first in (
        ("core-8", "Megatron-LM", "2024-12", "2025-04"),
        ("core-8", "NeMo", "2025-08", "2025-09"),
        ("core-8", "MaxText", "2025-07", "2025-08"),
        ("fsdp-1", "verl FSDP", "2025-12", "2026-02"),
    ):
        full, half = (variant(base, **said | {"source": source, "date": date}).step_time for date in (last, first))
        assert full and half and full > 1.02 * half, source


def test_tflops_that_count_recompute_are_those_of_four_passes() -> None:
    said = BARE | {
        "tokens_per_s_per_gpu": "",
        "step_time_s": "",
        "tflops_per_gpu": "100",
        "activation_checkpoint": "full",
    }
    with_, without = (
        variant("fsdp-1", **said | {"notes": words}).step_time for words in ("TFLOPs count recompute", "")
    )
    assert with_ and without and 1.3 < with_ / without < 1.34


def test_deepspeed_gathered_each_tensor_by_itself_before_2022() -> None:
    said = BARE | {"source": "DeepSpeed", "zero_stage": "3"}
    shares = [variant("fsdp-1", **said | {"date": date}).stack.network for date in ("2021-05", "2022-06")]
    assert shares[0] < 0.5 * shares[1]
    assert variant("fsdp-1", **said | {"date": "2021-05", "zero_stage": "2"}).stack.network == shares[1]


def test_what_a_source_leaves_to_its_rules_is_not_said() -> None:
    said = BARE | {
        "activation_checkpoint": "",
        "source": "JAX",
        "gpu": "tpu-v5p",
        "interconnect": "",
        "micro_batch": "8",
    }
    row = variant("fsdp-1", **said | {"notes": "recompute by its rules, not printed beside it"})
    assert row.infers_recompute, row.assumed


def test_trainers_on_jax_accumulate_no_gradients_unless_told() -> None:
    said = BARE | {"micro_batch": "", "global_batch": "64", "n_gpus": "8", "dp_replicate": "1", "dp_shard": "8"}
    said |= {"gpu": "tpu-v5p", "interconnect": "", "activation_checkpoint": ""}
    for source, micro in (("MaxText", 1), ("MaxText, gradient accumulation 4", 4)):
        row = variant("fsdp-1", **said | {"source": "MaxText", "notes": source})
        assert row.plan.batch.micro_batches == micro, row.assumed
    tight = variant("fsdp-1", **said | {"source": "MaxText", "gpu": "tpu-v5e", "global_batch": "512"})
    assert tight.plan.recompute.mode == "blocks" and tight.plan.batch.micro_batches == 1


def test_transformer_engine_multiplies_fp32_in_tf32() -> None:
    kinds = [variant(base, precision="fp32").workload.compute for base in ("core-8", "fsdp-1")]
    assert kinds == ["tf32", ""] or kinds == ["tf32", None], kinds


def test_what_fits_only_recomputed_runs_with_whole_blocks_where_that_is_the_one_switch() -> None:
    said = BARE | {"activation_checkpoint": "", "compile": "", "date": "2024-02"}
    for notes, mode in (("NeMo", "ops"), ("DeepSpeed", "blocks"), ("PyTorch FSDP1", "blocks")):
        assert variant("fsdp-1", **said | {"notes": notes}).plan.recompute.mode == mode, notes


def test_loops_of_plain_pytorch_had_no_fused_attention_before_its_version_2() -> None:
    said = BARE | {"notes": "a loop of its own on PyTorch", "precision": "fp16", "compile": "n"}
    found = [variant("fsdp-1", **said | {"date": date}).stack.attention for date in ("2022-06", "2023-01", "2023-09")]
    assert found[:2] == ["unfused"] * 2 and found[2] != "unfused"
    kernels = variant("fsdp-1", **said | {"date": "2022-06", "notes": "a loop of its own with apex"})
    assert kernels.stack.attention == "fused-softmax"


def test_a_compiled_loop_of_its_own_compiles_its_loss() -> None:
    said = BARE | {"notes": "a loop of its own on PyTorch", "n_gpus": "1", "dp_shard": "1", "dp_replicate": "1"}
    said |= {"global_batch": "2", "zero_stage": "", "peak_mem_gib": ""}
    found = [variant("fsdp-1", **said | {"compile": compiled}).stack for compiled in ("y", "n")]
    assert [stack.name for stack in found] == ["eager"] * 2
    assert found[0].logit_bytes == 8.0 < found[1].logit_bytes


@pytest.mark.parametrize(
    ("notes", "times"),
    [
        ("torchtitan", UNEVEN),
        ("torchtitan; balanced routing", 1.0),
        ("torchtitan; a CUDA graph of the whole step", 1.0),
        ("Megatron-Core", 1.0),
        ("Megatron-Core; real router", UNEVEN),
        ("Megatron-Core; real router; capacity factor 1", 1.0),
    ],
)
def test_routers_that_are_not_forced_to_balance_load_a_rank_more(notes: str, times: float) -> None:
    mixture = BARE | {"model": "Mixtral 8x7B", "ep": "8", "n_params": "", "notes": notes}
    blank = dict.fromkeys(("n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "vocab"), "")
    assert variant("fsdp-1", **mixture | blank).workload.imbalance == times
    assert variant("fsdp-1", **mixture | blank | {"ep": ""}).workload.imbalance == 1.0


def test_products_that_tp_overlaps_are_a_switch_of_megatron_core() -> None:
    def hidden(notes: str, **cells: str) -> float:
        return variant("core-8", **BARE | {"notes": notes} | cells).stack.overlap_tensor

    usual, more = (load_stack(name).overlap_tensor for name in ("megatron-core", "megatron-bridge"))
    assert hidden("Megatron-Core") == hidden("Megatron-Core; no tp overlap") == usual < more
    assert hidden("Megatron-Core; tp_comm_overlap") == more
    assert hidden("Megatron-Core", source="NVIDIA/Megatron-LM README table") == more
    two, alone = {"tp": "2", "dp_replicate": "32"}, "Megatron-Bridge; no sequence parallelism"
    assert hidden("Megatron-Bridge", **two) == hidden(alone) == more, "user buffers split what sequences are split for"
    assert hidden(alone, **two) == usual


def test_megatron_core_adds_gradients_up_in_the_type_that_is_said() -> None:
    def width(name: str, notes: str) -> float:
        return variant("core-8", **BARE | {"notes": f"{name}; {notes}"}).stack.grad_bytes

    usual = {name: width(name, "") for name in ("Megatron-Core", "Megatron-Bridge")}
    assert all(width(name, "gradients in fp32") == 4 for name in usual)
    assert all(width(name, "grads reduced in bf16") == 2 for name in usual)
    assert all(width(name, "masters in fp32") == usual[name] for name in usual)


def test_megatron_bridge_sends_a_token_once_per_node_unless_its_dispatcher_is_said() -> None:
    def once(notes: str) -> bool:
        return variant("core-8", **BARE | {"date": "2026-01", "notes": f"Megatron-Bridge; {notes}"}).stack.once_per_node

    assert (
        once("") and once("flex dispatcher") and not once("alltoall dispatcher") and not once("dispatch by all-to-all")
    )


@pytest.mark.parametrize(
    ("cells", "hides"),
    [
        ({"notes": "AXLearn on JAX", "date": "2024-10"}, False),
        ({"notes": "AXLearn on JAX", "date": "2025-10"}, True),
        ({"notes": "AXLearn on JAX", "date": "2024-10", "gpu": "tpu-v5p"}, True),
        ({"notes": "MaxText", "date": "2024-10"}, True),
        ({"notes": "NVIDIA's t5x on JAX", "date": "2023-06"}, False),
    ],
)
def test_jax_on_gpus_hid_nothing_before_its_scheduler_was_on(cells: dict[str, str], hides: bool) -> None:
    assert (variant("fsdp-1", **BARE | {"model": "Llama 3.1 8B"} | cells).stack.overlap_data > 0) is hides


def test_feed_forwards_that_a_row_calls_gated_are_so_however_wide_they_are() -> None:
    sizes = {"model": "Llama-style 969M", "n_params": "", "n_layers": "36", "d_model": "1280", "n_heads": "20"}
    sizes |= {"n_kv_heads": "20", "d_ff": "5120", "vocab": "10000"}
    said = (variant("fsdp-1", **BARE | sizes | {"notes": note}) for note in ("", "gated feed-forwards", "no SwiGLU"))
    assert [row.spec.ffn for row in said] == ["plain", "gated", "plain"]


def test_what_a_row_measured_of_the_links_in_its_node_stands_for_their_kind() -> None:
    wires = {"n_gpus": "2", "gpus_per_node": "2", "dp_replicate": "", "dp_shard": "2", "gpu": "rtx3090-24g"}
    rates = [
        variant("fsdp-1", **BARE | wires | {"interconnect": said}).cluster.local.bandwidth
        for said in ("PCIe 4", "PCIe without P2P", "PCIe without P2P, all-reduces reach 3.3 GB/s")
    ]
    assert rates == [20e9, 20e9, 3.3e9]


def test_gradients_that_wait_for_the_backward_pass_hide_behind_nothing() -> None:
    few = dict.fromkeys(("dp_shard", "tp", "pp", "cp"), "1") | {"dp_replicate": "8", "n_gpus": "8", "zero_stage": "0"}
    notes = (
        "",
        "gradients all-reduced one by one behind the backward pass",
        "gradients are reduced after the backward pass",
    )
    hides = [variant("fsdp-1", **BARE | few | {"notes": f"DDP; {note}"}).stack.overlap_data for note in notes]
    assert hides[0] > 0.0 == hides[1] == hides[2]
