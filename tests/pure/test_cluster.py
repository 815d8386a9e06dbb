"""Clusters as data: presets, files, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.errors import ConfigError, UsageError
from shardwise.hardware.cluster import Cluster, Link, device_names, load_cluster


@pytest.mark.parametrize("name", device_names())
def test_every_preset_loads_and_survives_a_file(name: str, tmp_path: Path) -> None:
    cluster = load_cluster(f"{name}:4x2")
    assert (cluster.world, cluster.per_node, cluster.nodes) == (8, 4, 2)
    assert cluster.device.memory > 1e9 and cluster.device.rates.of("bf16") > 0
    file = tmp_path / "cluster.toml"
    cluster.save(file)
    assert load_cluster(file) == cluster


def test_sizes_of_a_preset() -> None:
    assert load_cluster("h100").world == 8
    assert load_cluster("h100:4").world == 4
    assert load_cluster("gb200:4x18").domain == 72


def test_unknown_device_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'h100'"):
        load_cluster("h1000:8")


@pytest.mark.parametrize("text", ["h100:0", "h100:8x0"])
def test_a_size_of_zero_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="at least one"):
        load_cluster(text)


def test_a_file_of_mixed_nodes_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mixed.json"
    file.write_text('{"format": 1, "name": "mixed", "nodes": [4, 8]}')
    with pytest.raises(ConfigError, match="one kind of device"):
        load_cluster(file)


def test_a_file_with_a_wrong_key_names_it_and_its_line(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    load_cluster("cpu:2").save(file)
    file.write_text(file.read_text().replace("per_node", "per_nodes", 1))
    with pytest.raises(ConfigError, match=r"line \d+.*per_nodes.*per_node"):
        load_cluster(file)


def test_impossible_numbers_are_refused() -> None:
    link = Link(bandwidth=1e9, latency=1e-6)
    device = load_cluster("cpu").device
    with pytest.raises(ConfigError, match="bandwidth above 0"):
        Link(bandwidth=0.0, latency=0.0)
    with pytest.raises(ConfigError, match="nodes"):
        Cluster(name="none", device=device, nodes=0, per_node=1, local=link, network=link)


def test_a_dtype_that_the_device_lacks_is_refused() -> None:
    rates = load_cluster("a100-80g").device.rates
    with pytest.raises(UsageError, match="fp8"):
        rates.of("fp8")
    assert rates.of("fp64") == rates.fp32 / 2
