"""What a machine says of itself, as a cluster: names, launchers' variables, and readings made with known constants."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from shardwise.cli.output import console
from shardwise.cli.probe import probe_json, rows_of, show
from shardwise.errors import LaunchError, UsageError
from shardwise.hardware.bench import Readings, _middle, fitted
from shardwise.hardware.cluster import Cluster, device_names, load_cluster
from shardwise.hardware.fit import Heads, Message, Product, Stream
from shardwise.hardware.local import NAMES, Found, cluster_of, discover, look, nodes_of, preset_named
from shardwise.hardware.stages import low
from shardwise.model.ops import Attention
from shardwise.plan.costs.kernels import attention_time, matmul_time, pointwise_time
from shardwise.plan.costs.links import Group, collective_time
from shardwise.plan.stack import load_stack

KNOWN = [
    ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H100 PCIe", "h100-pcie"), ("NVIDIA H200", "h200"),
    ("NVIDIA GB200", "gb200"), ("NVIDIA B200", "b200"), ("NVIDIA GH200 120GB", "gh200"), ("NVIDIA H20", "h20"),
    ("NVIDIA A100-SXM4-40GB", "a100-40g"), ("NVIDIA A100-SXM4-80GB", "a100-80g"), ("NVIDIA A100 80GB PCIe", "a100-80g"),
    ("NVIDIA A100-PCIE-40GB", "a100-40g"), ("Tesla V100-SXM2-32GB", "v100"), ("NVIDIA L4", "l4"),
    ("NVIDIA L40S", "l40s"), ("NVIDIA A10G", "a10g"), ("NVIDIA RTX A6000", "a6000"),
    ("NVIDIA H100 NVL", "h100-nvl"), ("NVIDIA L40", "l40"), ("NVIDIA A10", "a10"), ("Tesla T4", "t4"),
    ("NVIDIA GeForce RTX 3080", "rtx3080"), ("NVIDIA TITAN RTX", "titanrtx"), ("AMD Instinct MI210", "mi210"),
    ("NVIDIA GeForce RTX 4090", "rtx4090"), ("AMD Instinct MI300X", "mi300x"), ("AMD Instinct MI250X", "mi250x"),
    ("NVIDIA GeForce RTX 3060", "rtx3060"), ("NVIDIA GeForce GTX 1080 Ti", "gtx1080ti"), ("NVIDIA A16", "a16"),
    ("NVIDIA GeForce RTX 5080", "rtx5080"), ("NVIDIA GB10", "gb10"),
    ("NVIDIA GeForce RTX 4070 Ti SUPER", "rtx4070tis"), ("NVIDIA GeForce RTX 4080 SUPER", "rtx4080s"),
    ("NVIDIA GeForce RTX 4080", "rtx4080"), ("NVIDIA GeForce RTX 3080 Ti", "rtx3080ti"),
    ("NVIDIA GeForce RTX 5070 Ti", "rtx5070ti"), ("Tesla P40", "p40"),
]  # fmt: skip
UNKNOWN = [
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A100X", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA L40G",
    "NVIDIA GeForce RTX 4090 D", "NVIDIA A10M", "NVIDIA GeForce RTX 4070 Ti", "Some Accelerator", "",
]  # fmt: skip


def found(name: str = "NVIDIA H100 80GB HBM3", count: int = 8, **changes: object) -> Found:
    facts = {
        "kind": "cuda", "names": (name,) * count, "memory": (85_017_493_504,) * count, "units": 132,
        "dtypes": ("fp32", "tf32", "bf16", "fp16", "fp8"), "peers": True, "host_memory": 2 * 10**12, "cores": 192,
    }  # fmt: skip
    return Found(**{**facts, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "preset"), KNOWN)
def test_a_name_that_a_driver_reports_is_a_preset(name: str, preset: str) -> None:
    assert preset_named(name, load_cluster(preset).device.memory) == preset
    assert cluster_of(found(name)).device.rates == load_cluster(preset).device.rates


def test_every_name_leads_to_a_preset_that_is_there() -> None:
    assert {preset for _, preset in NAMES} <= set(device_names())


@pytest.mark.parametrize("name", UNKNOWN)
def test_another_name_is_refused_and_not_guessed(name: str) -> None:
    with pytest.raises(UsageError, match=r"found no preset .* needed its rates .* run `shardwise probe`"):
        cluster_of(found(name))


def test_one_name_of_three_memories() -> None:
    names = [preset_named("NVIDIA H100", memory) for memory in (68e9, 85e9, 102e9)]
    assert names == ["h100-64g", "h100", "h100-96g"]


def test_sizes_are_read_and_rates_are_of_the_table() -> None:
    cluster = cluster_of(found(count=4, nodes=3, nodes_from="read: SLURM_NNODES"))
    assert (cluster.per_node, cluster.nodes, cluster.world, cluster.domain) == (4, 3, 12, 4)
    assert (cluster.device.memory, cluster.host_memory) == (85_017_493_504, 2e12)
    assert (cluster.device.origin, cluster.local.origin) == ("table", "table")
    assert "nodes: read: SLURM_NNODES" in cluster.origins
    assert any(line.startswith("device.memory: read") for line in cluster.origins)


def test_a_fast_domain_may_be_larger_than_a_node() -> None:
    assert cluster_of(found("NVIDIA GB200", 4, nodes=18)).domain == 72


def test_the_smallest_device_counts() -> None:
    assert cluster_of(found(count=2, memory=(85 * 10**9, 80 * 10**9))).device.memory == 80e9


def test_devices_of_two_kinds_are_refused() -> None:
    with pytest.raises(UsageError, match="2 kinds .*slowest device"):
        cluster_of(found(names=("NVIDIA H100 80GB HBM3", "NVIDIA L4"), memory=(1, 1)))


def test_devices_that_cannot_read_each_other_are_not_on_nvlink() -> None:
    cluster = cluster_of(found(peers=False))
    assert cluster.local.bandwidth == load_cluster("l4").local.bandwidth
    assert cluster.local.origin == "assumed"
    assert cluster_of(found("NVIDIA A100 80GB PCIe")).local == cluster.local
    assert cluster_of(found(peers=False, count=1)).local == load_cluster("h100").local  # nobody to read


@pytest.mark.parametrize(("env", "nodes"), [
    ({}, 1),
    ({"SLURM_NNODES": "16"}, 16),
    ({"SLURM_NNODES": "4", "SLURM_NTASKS": "32"}, 4),
    ({"SLURM_JOB_NUM_NODES": "3", "SLURM_NTASKS": "6"}, 3),
    ({"SLURM_JOB_NUM_NODES": "3", "SLURM_NNODES": "2"}, 2),
    ({"RANK": "3", "WORLD_SIZE": "32", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "a",
      "MASTER_PORT": "1"}, 4),
    ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
      "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "MASTER_ADDR": "a"}, 2),
])  # fmt: skip
def test_nodes_are_read_from_the_launcher(env: dict[str, str], nodes: int) -> None:
    assert nodes_of(env)[0] == nodes
    assert nodes_of(env)[1].startswith("read" if env else "assumed")


def test_variables_that_disagree_are_refused() -> None:
    with pytest.raises(LaunchError, match="WORLD_SIZE"):
        nodes_of({"RANK": "3"})


@pytest.mark.parametrize("said", ["0", "-1", "four", "2-4", "\u00b2", "9" * 5000])
def test_a_number_of_nodes_that_is_none_is_refused_and_not_taken_as_one(said: str) -> None:
    with pytest.raises(LaunchError, match="SLURM_NNODES=.* needed the number of nodes"):
        nodes_of({"SLURM_NNODES": said})
    with pytest.raises(LaunchError, match="SLURM_JOB_NUM_NODES=.* needed the number of nodes"):
        nodes_of({"SLURM_JOB_NUM_NODES": said})
    assert nodes_of({"SLURM_NNODES": ""})[0] == 1


def test_ranks_that_are_not_as_many_on_every_node_are_refused() -> None:
    torchrun = {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    with pytest.raises(LaunchError, match="found 7 ranks, 4 of them on this node"):
        nodes_of({**torchrun, "WORLD_SIZE": "7"})


def test_a_machine_without_accelerators_is_its_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    here, cluster = look({}), discover()
    assert cluster.world == here.cores
    assert cluster.device.memory * here.cores == pytest.approx(here.host_memory, rel=1e-6)
    assert here.host_memory <= psutil.virtual_memory().total
    assert cluster.device.origin == "assumed"
    cluster.save(tmp_path / "c.toml")
    assert load_cluster(tmp_path / "c.toml") == cluster


def test_accelerators_are_read_from_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    fact = SimpleNamespace(name="NVIDIA L4", total_memory=24 * 10**9, multi_processor_count=58)
    module = SimpleNamespace(
        get_device_properties=lambda _: fact,
        can_device_access_peer=lambda *_: False,
        get_device_capability=lambda _: (8, 9),
    )
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    here = look({"SLURM_NNODES": "2"})
    assert (here.kind, here.names, here.units, here.peers) == ("cuda", ("NVIDIA L4",) * 2, 58, False)
    assert here.dtypes == ("fp32", "tf32", "bf16", "fp16", "fp8")
    assert (cluster_of(here).world, cluster_of(here).local.origin) == (4, "assumed")


# ---------------------------------------------------------------- readings of a known machine


def readings_of(cluster: Cluster, here: Found, dtypes: tuple[str, ...]) -> Readings:
    device, stack = cluster.device, load_stack("shardwise")
    sizes = (256, 1024, 4096)
    groups = {"local": Group(cluster.per_node, 1), "network": Group(cluster.nodes, cluster.per_node)}
    return Readings(
        found=here,
        nodes=cluster.nodes,
        per_node=cluster.per_node,
        products=tuple(
            Product(dtype, m, n, k, matmul_time(m, n, k, device, dtype))
            for dtype in dtypes for m in sizes for n in sizes[1:] for k in (64, *sizes)
        ),
        copies=(Stream("copy", 1e9, 1e9 / device.bandwidth),),
        streams=tuple(Stream("add", 4.0 * count, pointwise_time(count, device, 4.0)) for count in (2**24, 2**26)),
        heads=tuple(
            Heads(4, 16, 128, n, attention_time(Attention(16, 16, 128, 128), (4, n, n), 1, device, stack))
            for n in (512, 4096)
        ),
        launch=7e-6,
        product_launch=3e-5,
        biased_launch=3e-5,
        host=cluster.host_bandwidth,
        links={
            tier: tuple(
                Message(kind, size, collective_time(kind, size, group, cluster))
                for kind in ("all_reduce", "all_gather", "send") for size in (2**12, 2**20, 2**27)
            )
            for tier, group in groups.items() if group.size > 1
        },
    )  # fmt: skip


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_known_machine_is_told_back(nodes: int) -> None:
    truth = load_cluster(f"h100:8x{nodes}")
    curve = replace(truth.device.curve, best=0.55, depth=300.0)
    device = replace(truth.device, curve=curve, stream=0.6)
    truth = truth.with_(device=device, local=replace(truth.local, bandwidth=200e9), host_bandwidth=33e9)
    measured = fitted(readings_of(truth, found(), ("fp32", "tf32", "bf16", "fp16", "fp8")))
    cluster = measured.cluster
    assert (cluster.nodes, cluster.per_node, measured.nearest, cluster.launch) == (nodes, 8, "h100", 7e-6)
    assert cluster.device.curve.best == pytest.approx(0.55, rel=0.05)
    assert cluster.device.curve.depth == pytest.approx(300.0, rel=0.05)
    assert cluster.device.stream == pytest.approx(0.6, rel=0.05)
    assert cluster.device.attention.flash2 == pytest.approx(device.attention.flash2, rel=0.05)
    assert cluster.local.bandwidth == pytest.approx(200e9, rel=0.05)
    assert cluster.host_bandwidth == 33e9
    assert (cluster.device.origin, cluster.local.origin) == ("measured", "measured")
    assert cluster.network.origin == ("measured" if nodes > 1 else "table")
    assert any(line.startswith("network: table, h100") for line in cluster.origins) == (nodes == 1)
    assert max(measured.errors.values()) < 0.05


def test_what_is_shown_stands_beside_the_preset(capsys: pytest.CaptureFixture[str]) -> None:
    truth = load_cluster("h100:8x2")
    measured = fitted(readings_of(truth, found(), ("fp32", "tf32", "bf16", "fp16", "fp8")))
    ratios = {name: float(ratio) for name, _, _, ratio in rows_of(measured)}
    assert {name for name, ratio in ratios.items() if ratio != pytest.approx(1.0, abs=0.05)} == set()
    assert {"bf16 products, best reached", "fp8 products, best reached", "network latency"} <= set(ratios)
    show(console(), measured, Path("cluster.toml"))
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("preset h100", "Tflop/s", "off by (median)", "written: cluster.toml"))
    assert probe_json(measured, None)["cluster"]["nodes"] == 2


def test_one_rank_per_node_shows_the_network_alone() -> None:
    truth = load_cluster("l4:1x4")
    here = found("NVIDIA L4", 1, memory=(24 * 10**9,), units=58)
    cluster = fitted(readings_of(truth, here, ("fp32", "bf16", "fp8"))).cluster
    assert cluster.network.bandwidth == pytest.approx(truth.network.bandwidth, rel=0.05)
    assert cluster.local == cluster.network


def test_an_unknown_device_is_measured_all_the_same() -> None:
    truth = load_cluster("mi300x:4")
    here = found("Some Accelerator", 4, memory=(200 * 10**9,) * 4, units=0)
    measured = fitted(readings_of(truth, here, ("fp32", "bf16", "fp16")))
    device = measured.cluster.device
    assert device.name == "Some Accelerator" and device.rates.fp8 == 0.0
    best = truth.device.rates.bf16 * truth.device.curve.best
    assert device.rates.bf16 * device.curve.best == pytest.approx(best, rel=0.05)


def test_a_low_quantile_of_few_samples_is_none_that_was_not_seen() -> None:
    for samples in ([1.0, 100.0], [1.0, 2.0, 300.0, 400.0]):
        for parts in (4, 10):
            assert samples[0] <= low(samples, parts) <= samples[-1]


def test_ranks_give_their_median_and_some_leave_readings_out() -> None:
    ranks = [[Stream("add", 1.0, 2.0), Stream("silu", 1.0, 1.0)], [Stream("add", 1.0, 4.0)], [Stream("add", 1.0, 3.0)]]
    assert _middle(ranks) == (Stream("add", 1.0, 3.0), Stream("silu", 1.0, 1.0))
