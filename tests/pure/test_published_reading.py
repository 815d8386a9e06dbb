"""How published rows say what is off, which ranks there are, and what their cards hold."""

from __future__ import annotations

import pytest

from published.cells import Skip
from published.rows import row_of
from shardwise.plan.plan import Offload
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


def test_the_owner_of_a_repository_is_not_what_ran() -> None:
    said = "Oneflow-Inc/DLPerf PyTorch/BERT/README.md; NVIDIA DeepLearningExamples, DDP"
    assert not variant("fsdp-1", **BARE | {"notes": said}).stack.name.startswith("megatron")
    assert variant("fsdp-1", **BARE | {"notes": "OneFlow 0.8"}).stack.name.startswith("megatron")
    said = "hpcaitech/ColossalAI-Pytorch-lightning benchmark/README.md; PyTorch Lightning, DDP"
    assert (
        variant("fsdp-1", **BARE | {"notes": said, "n_gpus": "8", "dp_replicate": "8", "dp_shard": "1"}).stack.name
        == "eager"
    )


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
