"""`shardwise probe` as it is typed: a file that the planner reads, and none where it was refused or interrupted."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwise.errors import ExitCode
from shardwise.hardware.cluster import load_cluster

SHARDWISE = [sys.executable, "-m", "shardwise"]


def call(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*SHARDWISE, *words], capture_output=True, text=True, cwd=folder, timeout=300)


def test_probe_writes_a_cluster_that_the_planner_reads(tmp_path: Path) -> None:
    ran = call(tmp_path, "probe", "--world", "2", "--seconds", "3", "--json")
    assert ran.returncode == 0, ran.stderr
    answer = json.loads(ran.stdout)
    cluster = load_cluster(tmp_path / "cluster.toml")
    assert (cluster.world, cluster.nodes) == (2, 1)
    assert (cluster.device.origin, cluster.local.origin, cluster.network.origin) == ("measured", "measured", "table")
    assert cluster.device.rates.fp32 == answer["cluster"]["device"]["rates"]["fp32"] > 1e9
    assert 1e8 < cluster.device.bandwidth < 1e13
    assert 1e6 < cluster.local.bandwidth < 1e12
    assert 1e-7 < cluster.local.latency < 0.1
    assert answer["seconds"] < 60
    estimated = call(
        tmp_path, "estimate", "dp2", "--model", "bytes-3m", "--cluster", "cluster.toml", "--seq", "256",
        "--global-batch", "8", "--json",
    )  # fmt: skip
    assert estimated.returncode == 0, estimated.stderr
    assert json.loads(estimated.stdout)["time"]["total"] > 0


def test_detect_is_a_cluster_for_plan(tmp_path: Path) -> None:
    ran = call(tmp_path, "plan", "bytes-3m", "detect", "--seq", "128", "--global-batch", "8", "--json")
    assert ran.returncode == 0, ran.stderr
    answer = json.loads(ran.stdout)
    assert answer["cluster"].endswith("found")
    assert any("assumed" in line or "table" in line for line in answer["assumed"])


@pytest.mark.parametrize("words", [["--out", "cluster.yaml"], ["--out", "none/cluster.toml"], ["--seconds", "0"]])
def test_bad_words_are_refused_before_anything_is_measured(tmp_path: Path, words: list[str]) -> None:
    ran = call(tmp_path, "probe", *words)
    assert ran.returncode == ExitCode.USAGE
    assert not list(tmp_path.iterdir())


def test_a_world_that_is_not_the_launchers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    ran = call(tmp_path, "probe", "--world", "3")
    assert (ran.returncode, "torchrun with 2 ranks" in ran.stderr) == (ExitCode.USAGE, True)


@pytest.mark.soak
def test_plan_for_the_machine_as_it_is_measured_now(tmp_path: Path) -> None:
    start = time.monotonic()
    ran = call(tmp_path, "plan", "bytes-3m", "probe", "--seq", "128", "--global-batch", "8", "--json")
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["cluster"].endswith("measured")
    assert time.monotonic() - start < 60


@pytest.mark.soak
def test_the_whole_measurement_takes_less_than_a_minute(tmp_path: Path) -> None:
    start = time.monotonic()
    ran = call(tmp_path, "probe")
    assert ran.returncode == 0, ran.stderr
    assert "written: cluster.toml" in ran.stdout and "preset cpu" in ran.stdout
    assert time.monotonic() - start < 60


def test_ctrl_c_leaves_no_file(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*SHARDWISE, "probe", "--world", "2", "--seconds", "60"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 60
    while not children.read_text().strip() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1.0)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the whole group
    _, error = process.communicate(timeout=60)
    assert process.returncode == ExitCode.INTERRUPTED, error
    assert "Traceback" not in error
    assert not list(tmp_path.iterdir())


def test_ranks_of_a_job_measure_the_links_between_nodes(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [*SHARDWISE, "probe", "--seconds", "3", "--json"],
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | {
                "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1",
            },
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=120) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], outputs
    assert outputs[1][0] == ""  # one rank speaks
    cluster = load_cluster(tmp_path / "cluster.toml")
    assert (cluster.nodes, cluster.per_node, cluster.network.origin) == (2, 1, "measured")
