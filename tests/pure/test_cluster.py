"""Clusters as data: presets, files, and what is refused."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.cli.options.planning import question
from shardwise.errors import ConfigError, UsageError
from shardwise.hardware.cluster import Cluster, Link, cluster_from, device_names, load_cluster
from shardwise.hardware.presets import device_named
from shardwise.records import as_dict

MINE = """name = "mine"
nodes = 2
per_node = 8
[device]
name = "X100"
memory = 80e9
bandwidth = 3350e9
rates = { fp32 = 67e12, bf16 = 989e12 }
[local]
bandwidth = 450e9
latency = 12e-6
[network]
bandwidth = 45e9
latency = 14e-6
"""


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


@pytest.mark.parametrize("text", ["A100-SXM4-80GB:8", "a100-80:8", "a100_80gb:8", "NVIDIA-A100-80GB:8"])
def test_usual_spellings_of_a_device(text: str) -> None:
    assert load_cluster(text).device == load_cluster("a100-80g:8").device


def test_each_preset_is_spelled_as_it_is() -> None:
    assert [device_named(name.upper()) for name in device_names()] == device_names()


def test_unknown_device_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'h100'"):
        load_cluster("h1000:8")


def test_a_size_that_nobody_said_is_assumed(tmp_path: Path) -> None:
    """`h100` was eight devices, and nothing said so."""
    said = "per_node: assumed, 8 in one node (give h100:8)"
    assert load_cluster("h100").origins == load_cluster("h100@eth100").origins == (said,)
    assert load_cluster("h100:8").origins == load_cluster("h100:8x2").origins == ()
    (file := tmp_path / "ours.toml").write_text('preset = "h100"')
    assert said in load_cluster(file).origins
    file.write_text('preset = "h100"\nper_node = 6')
    assert not any(line.startswith("per_node") for line in load_cluster(file).origins)
    assert said in question("llama-1b", "h100", seq=128, batch=8, tokens=None).assumed


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


@pytest.mark.parametrize(
    ("header", "key", "name"),
    [
        ("[device.rates]", "bf16", "device.rates.bf16"),
        ("[device.curve]", "best", "device.curve.best"),
        ("[device.attention]", "flash2", "device.attention.flash2"),
        ("[device]", "bandwidth", "device.bandwidth"),
        ("[network]", "latency", "network.latency"),
        ("[loading]", "rows", "loading.rows"),
    ],
)
def test_a_number_below_a_header_is_found(header: str, key: str, name: str, tmp_path: Path) -> None:
    """In files as `Cluster.save` writes them, where each table has a header of its own."""
    file = tmp_path / "mine.toml"
    load_cluster("h100:8x2").save(file)
    lines = file.read_text().splitlines()
    at = next(n for n in range(lines.index(header), len(lines)) if lines[n].startswith(f"{key} ="))
    for wrong, says in (("-7.0", f"{name}: found -7"), ('"x"', f"{name}: found str 'x', needed a number")):
        lines[at] = f"{key} = {wrong}"
        file.write_text("\n".join(lines))
        with pytest.raises(ConfigError, match=f"mine.toml, line {at + 1}: {says}"):
            load_cluster(file)


@pytest.mark.parametrize(
    ("right", "wrong", "says"),
    [
        ("bf16 = 989e12", "bf16 = 989", r"line 8: device.rates.bf16: found 989, needed FLOP/s .*TFLOP/s: write 989e12"),
        ("bf16 = 989e12", "bf16 = 989000", r"looks like GFLOP/s: write 989000e9"),
        ("bf16 = 989e12", "bf16 = 0", r"between 1e8 and 1e17; a device without a bf16 unit computes in fp32"),
        ("bf16 = 989e12", "bf16 = 989e12, fp8 = 1979", r"device.rates.fp8: .*or 0; 1979 looks like TFLOP/s"),
        ("fp32 = 67e12", "fp32 = -1", r"device.rates.fp32: found -1, needed FLOP/s between"),
        ("memory = 80e9", "memory = nan", r"line 6: device.memory: found nan, needed bytes between 1e8 and 1e14"),
        ("memory = 80e9", f"memory = 1{400 * '0'}", r"device.memory: found inf"),
        ("memory = 80e9", "memory = 80", r"looks like GB: write 80e9"),
        ("memory = 80e9", "memory = 81559", r"looks like MB: write 81559e6"),
        ("memory = 80e9", "memory = 80e9\nstream = 80", r"device.stream: .*looks like per cent: write 80e-2"),
        ("memory = 80e9", "memory = 80e9\ncurve.best = inf", r"device.curve.best: found inf"),
        ("bandwidth = 3350e9", "bandwidth = 3350", r"device.bandwidth: .*bytes per second .*GB/s: write 3350e9"),
        ("bandwidth = 3350e9", "bandwidth = 3.35", r"looks like TB/s: write 3.35e12"),
        ("bandwidth = 45e9", "bandwidth = 400", r"line 13: network.* GB/s: write 400e9, or Gbit/s: write 50e9"),
        (
            "latency = 14e-6",
            "latency = 14e-6\nwires = 7",
            r"network.wires: found 7, needed whole wires between 0 and 0",
        ),
        ("latency = 14e-6", "latency = 5", r"network.latency: .*seconds .*looks like microseconds: write 5e-6"),
        ("nodes = 2", "nodes = 2\nhost_memory = nan", "host_memory: found nan"),
        ("nodes = 2", "nodes = 2\ndomain = -8", "domain: found -8"),
        ("nodes = 2", "nodes = 0", "nodes: found 0"),
        ("nodes = 2", "", r"nodes: missing; needed a number in whole nodes, as 16"),
        ("memory = 80e9", "", r"line 4: device.memory: missing; needed a number in bytes, as 80e9"),
        (", bf16 = 989e12", "", r"line 8: device.rates.bf16: missing; needed a number in FLOP/s, as 989e12"),
        ("[network]\nbandwidth = 45e9\nlatency = 14e-6", "", "network: missing; needed a table of bandwidth, latency"),
    ],
)
def test_a_number_in_another_unit_and_a_missing_one_are_refused(
    right: str, wrong: str, says: str, tmp_path: Path
) -> None:
    file = tmp_path / "mine.toml"
    assert right in MINE
    file.write_text(MINE.replace(right, wrong, 1))
    with pytest.raises(ConfigError, match=says):
        load_cluster(file)


def test_a_file_that_could_not_be_written_again_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    for wrong, says in (
        (MINE.replace('name = "mine"', 'name = "a\\nb"', 1), "line 1: name: found .*, needed a name in one line"),
        (MINE.replace('name = "mine"', 'name = ""', 1), "name: found '', needed a name in one line"),
        ("format = true\n" + MINE, "format: found True"),
        ("origins = [1]\n" + MINE, r"origins: found list \[1\], needed"),  # as it is in the file
    ):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match=says):
            load_cluster(file)
    odd = load_cluster("h100").with_(name="a\nb")  # made in python
    odd.save(file)
    assert "name" in tomllib.loads(file.read_text())


def test_a_file_is_read_and_what_it_leaves_out_is_assumed(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(MINE.replace("nodes = 2", 'nodes = 2\norigins = ["device.stream: table, h100"]'))
    mine = load_cluster(file)
    assert {mine.device.origin, mine.local.origin, mine.network.origin} == {"read"}
    assert mine.origins[0] == "device.stream: table, h100"
    assert {line.split(":")[0] for line in mine.origins[1:]} == {
        "domain", "host_bandwidth", "device.context", "device.curve", "device.low_best", "device.attention",
        *(f"device.rates.{name}" for name in ("tf32", "fp16", "fp8", "fp4")),
    }  # fmt: skip
    assert "device.curve: assumed, best=0.8, units=108, depth=384, unaligned=1" in mine.origins
    mine.save(file)
    assert load_cluster(file) == mine
    file.write_text(MINE.replace("latency = 14e-6", 'latency = 14e-6\norigin = "measured"'))
    assert load_cluster(file).network.origin == "measured"


def test_a_file_may_begin_with_a_preset(tmp_path: Path) -> None:
    (file := tmp_path / "ours.toml").write_text('preset = "h100:8x2@eth100"')
    known = load_cluster("h100:8x2@eth100")
    assert load_cluster(file).with_(origins=()) == known
    file.write_text('preset = "h100:8x2@eth100"\nnodes = 4\n[network]\nbandwidth = 20e9\n[device.rates]\nbf16 = 800e12')
    ours = load_cluster(file)
    assert (ours.name, ours.nodes, ours.network.bandwidth) == ("h100:8x2@eth100, changed", 4, 20e9)
    assert (ours.network.latency, ours.local, ours.device.memory) == (
        known.network.latency, known.local, known.device.memory,
    )  # fmt: skip
    assert ours.device.rates == replace(known.device.rates, bf16=800e12)
    assert (ours.network.origin, ours.local.origin, ours.device.origin) == ("read", "table", "read")
    assert {"network.latency: table, h100:8x2@eth100", "device.rates.fp8: table, h100:8x2@eth100"} <= {*ours.origins}
    ours.save(tmp_path / "again.toml")
    assert load_cluster(tmp_path / "again.toml") == ours
    for text, says in (
        ('preset = "h101:8"', "line 1: preset: cluster 'h101:8': unknown; did you mean 'h100'"),
        ("preset = 8", "preset: found 8, needed the name of a preset"),
        ('preset = "h100:8"\nmemory = 60e9', "line 2: memory: unknown key"),
        ('preset = "h100:8"\nlocal = 3', "local: found"),
        ('preset = "h100:8"\n[device]\nmemory = 60', "60 looks like GB"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=re.escape(says)):
            load_cluster(file)


def test_a_measured_share_may_be_above_one() -> None:
    data = as_dict(load_cluster("cpu:2"))
    data["device"]["attention"]["flash2"] = 3.0
    with pytest.raises(ConfigError, match=r"device.attention.flash2: found 3, needed fractions of 1"):
        cluster_from(data)
    data["device"]["origin"] = "measured"
    assert cluster_from(data).device.attention.flash2 == 3.0


def test_impossible_numbers_are_refused() -> None:
    link = Link(bandwidth=1e9, latency=1e-6)
    device = load_cluster("cpu").device
    with pytest.raises(ConfigError, match="link: bandwidth: found 0.0, needed more than 0"):
        Link(bandwidth=0.0, latency=0.0)
    with pytest.raises(ConfigError, match="latency: found nan, needed at least 0"):
        Link(bandwidth=1e9, latency=float("nan"))
    for name in ("memory", "bandwidth", "context", "stream", "price"):
        with pytest.raises(ConfigError, match=f"device cpu: {name}: found inf"):
            replace(device, **{name: float("inf")})
    data = as_dict(load_cluster("h100:8"))
    data["device"]["context"] = data["device"]["memory"] * 1.1
    with pytest.raises(ConfigError, match=r"device.context: found .* needed less than memory"):
        cluster_from(data)
    with pytest.raises(ConfigError, match="rates: bf16: found 0"):
        replace(device.rates, bf16=0)
    with pytest.raises(ConfigError, match="nodes"):
        Cluster(name="none", device=device, nodes=0, per_node=1, local=link, network=link)


def test_a_dtype_that_the_device_lacks_is_refused() -> None:
    rates = load_cluster("a100-80g").device.rates
    with pytest.raises(UsageError, match="fp8"):
        rates.of("fp8")
    assert rates.of("fp64") == rates.fp32 / 2


def test_a_word_names_the_links() -> None:
    usual, slow = load_cluster("h100:8x16"), load_cluster("h100:8x16@eth100")
    assert (slow.name, slow.world, slow.local) == ("h100:8x16@eth100", 128, usual.local)
    assert slow.network == load_cluster("l4").network != usual.network
    both = load_cluster("h100@pcie5/ib200")
    assert (both.world, both.local.bandwidth, both.network) == (8, 40e9, load_cluster("a100-80g").network)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("h100:8x2@ib40", "unknown link 'ib40'; did you mean 'ib400'"),
        ("h100:8x2@pcie5/ib400/eth100", "found 3 links, needed @network, or @local/network"),
        ("a100:8x2", r"unknown; did you mean 'a100-40g' or 'a100-80g' or 'a100-64g'\? A preset is written"),
        ("h100:8x-1", "found the size '8x-1', needed devices per node and nodes, .* h100:8x16"),
        ("h100:8x2x2", "found the size '8x2x2'"),
        ("h100:\uff18", "found the size"),
        ("h100:" + "9" * 5000, "needed devices per node and nodes, of at most nine digits"),
    ],
)
def test_a_wrong_word_is_told_what_it_may_be(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        load_cluster(text)


@pytest.mark.parametrize(
    ("domain", "says"),
    [
        (3, r"line 4: domain: found 3, which neither divides the 8 devices of a node"),
        (12, "neither divides"),
        (5000, "found 5000, and 2 nodes of 8 have 16 devices; needed at most those"),
        (4, ""),
        (16, ""),
        (0, ""),
    ],
)
def test_a_domain_is_part_of_a_node_or_some_nodes(domain: int, says: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(MINE.replace("per_node = 8", f"per_node = 8\ndomain = {domain}", 1))
    if says:
        with pytest.raises(ConfigError, match=says):
            load_cluster(file)
    else:
        assert load_cluster(file).domain == (domain or 8)


def test_part_of_a_rack_keeps_its_domain_in_a_file(tmp_path: Path) -> None:
    load_cluster("gb200:4x2").save(tmp_path / "c.toml")
    assert load_cluster(tmp_path / "c.toml").domain == 72
