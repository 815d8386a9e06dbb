"""`--recover` over several hosts, played by launchers on this one: each has its own ranks, memory and fork server."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed import HashStore

from shardwise.cli.options.nodes import ranks_per_host
from shardwise.errors import ExitCode, LaunchError, UsageError
from shardwise.launch.forking.lines import Line
from shardwise.launch.job import Job, Nodes
from shardwise.launch.nodes import meeting
from shardwise.launch.stopping import Stopping
from shardwise.testing.killer import Killer, processes_below
from shardwise.testing.world import World
from tests.failure import recovering
from tests.failure.test_recovery import SCRIPT, events_of, finish, last_step, log_of, wait_for_new_step, wait_for_steps

HOSTS = 2
CONF = "join_timeout=60,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def place_of(host: int, port: int, hosts: int = HOSTS) -> dict[str, str]:
    """What a launcher says to the one process that it starts on a host."""
    names = {"MASTER_ADDR": "127.0.0.1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": str(hosts)}
    return {**os.environ, **names, "MASTER_PORT": str(port), "RANK": str(host), "PACE_S": "0.02"}


def start_host(host: int, port: int, *words: str, hosts: int = HOSTS, **env: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "shardwise", *words]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=place_of(host, port, hosts) | env)


def start_run(out: Path, plan: str, hosts: int = HOSTS, **env: str) -> list[subprocess.Popen[str]]:
    """`env` are variables of the last host."""
    out.mkdir(exist_ok=True)
    words = ("run", "--recover", "--events", str(out / "events"), str(SCRIPT), plan, "--", str(out), "1000000")
    port = free_port()
    return [start_host(host, port, *words, hosts=hosts, **(env if host == hosts - 1 else {})) for host in range(hosts)]


AHEAD_S = 3600
WRONG_CLOCK = f"""
import datetime, os, time
open(f"{{__file__}}.{{os.getpid()}}", "w").close()
def ahead(clock, by):
    return lambda: clock() + by
class Ahead(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return super().now(tz) + datetime.timedelta(seconds={AHEAD_S})
time.time, time.time_ns = ahead(time.time, {AHEAD_S}), ahead(time.time_ns, {AHEAD_S} * 10**9)
datetime.datetime = Ahead
"""


def wrong_clock(folder: Path) -> dict[str, str]:
    """Variables under which every Python program has a clock that is an hour ahead, from its first line on."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(WRONG_CLOCK)
    env = {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}
    ask = "import datetime, time; print(min(time.time(), time.time_ns() / 1e9, datetime.datetime.now().timestamp()))"
    said = subprocess.run([sys.executable, "-c", ask], env=os.environ | env, capture_output=True, text=True, check=True)
    assert float(said.stdout) > time.time() + AHEAD_S - 60
    return env


def ranks_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return [rank for _, rank in processes_below(process.pid, "rank ")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "blows", "count"),
    [
        ("dp2 fsdp2", 3, 2),  # a host has all parts of the state, and the other one too: each keeps its own
        pytest.param("fsdp4", 40, 2, marks=pytest.mark.soak),
        pytest.param("fsdp4", 40, 4, marks=pytest.mark.soak),
        pytest.param("dp4", 40, 2, marks=pytest.mark.soak),
        pytest.param("dp2 tp2", 40, 2, marks=pytest.mark.soak),
        pytest.param("dp2 tp2", 40, 4, marks=pytest.mark.soak),
        pytest.param("pp2 fsdp2 / 1f1b mb2", 40, 2, marks=pytest.mark.soak),
    ],
)
def test_kills_on_all_hosts_change_no_bit(world: World, tmp_path: Path, plan: str, blows: int, count: int) -> None:
    """Nor does the clock of the last host, which is wrong: no host is compared by the time that it thinks it is."""
    here, there = tmp_path / "undisturbed", tmp_path / "killed"
    here.mkdir()
    hosts = start_run(there, plan, count, **wrong_clock(tmp_path / "clock"))
    wait_for_steps(hosts[0], there, 2)
    (forks,) = psutil.Process(hosts[-1].pid).children()  # and so the ranks, which are forked from it
    assert {hosts[-1].pid, forks.pid} <= {int(path.suffix[1:]) for path in (tmp_path / "clock").glob("*.py.*")}
    names = [f"rank {rank}" for rank in range(4)]
    each = len(names) // count
    assert [sorted(c.name() for c in ranks_of(host)) for host in hosts] == [
        names[host * each : (host + 1) * each] for host in range(count)
    ]
    killers = [Killer(host.pid, seed=7 + host.pid % 2, mean_pause_s=0.3) for host in hosts]
    draw = random.Random(7)
    while sum(len(killer.blows) for killer in killers) < blows:
        killer = draw.choice(killers)
        killer.run(len(killer.blows) + draw.randint(1, 3), while_true=lambda: hosts[0].poll() is None)
        wait_for_new_step(hosts[0], there)
    hosts[1].send_signal(signal.SIGTERM)  # whichever host is asked to end
    ended = [finish(host) for host in hosts]
    assert [code for code, _ in ended] == [ExitCode.TERMINATED] * count, ended
    assert "recovery 1: rank " in ended[0][1] and not any(err for _, err in ended[1:])  # the first host speaks for all
    last = last_step(there)
    world(4, recovering.main, plan, str(here), last, timeout_s=60 + last)
    assert sorted(set(log_of(there)), key=lambda line: int(line.split()[0])) == log_of(here)
    for rank in range(4):
        assert (there / f"digest-{rank}").read_text() == (here / f"digest-{rank}").read_text()


@pytest.mark.soak  # in every run: the same, by a network that is cut
def test_a_host_that_is_gone_ends_the_job_on_all(tmp_path: Path) -> None:
    hosts = start_run(tmp_path, "fsdp4")
    wait_for_steps(hosts[0], tmp_path, 2)
    here = ranks_of(hosts[0])
    hosts[1].kill()
    code, err = finish(hosts[0], 40)
    assert code == ExitCode.LAUNCH, err
    assert "node 1 (127.0.0.1, ranks 2 to 3) is lost: its connection has ended" in err
    assert "the job goes on from its last checkpoint" in err
    finish(hosts[1])
    assert not psutil.wait_procs(here, timeout=5)[1]


@pytest.mark.soak  # in every run: the same, by a network that is cut
def test_a_silent_host_ends_the_job_on_all(tmp_path: Path) -> None:
    """Nobody trains on alone: neither those that hear nothing, nor the one that was not heard."""
    hosts = start_run(tmp_path, "fsdp4")
    wait_for_steps(hosts[0], tmp_path, 2)
    everyone = [rank for host in hosts for rank in ranks_of(host)]
    hosts[1].send_signal(signal.SIGSTOP)
    code, err = finish(hosts[0], 40)
    assert code == ExitCode.LAUNCH and "nothing was heard of it for 15 s" in err, err
    hosts[1].send_signal(signal.SIGCONT)
    code, err = finish(hosts[1])
    assert code == ExitCode.LAUNCH, err
    assert "node 1: the first host has ended the job: node 1 (127.0.0.1" in err
    assert not psutil.wait_procs(everyone, timeout=25)[1]


@pytest.mark.soak  # in every run: what it is made of, above and below
# a program of the system, which pip cannot bring; .ci/run installs it
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun: apt-get install openmpi-bin")
def test_mpirun_starts_supervisors_that_recover(tmp_path: Path) -> None:
    """Its two processes are on one host; each is told that it is the only one there, as on hosts of their own."""
    alone = 'export OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=1; exec "$@"'
    mpirun = ["mpirun", "-n", "2", "--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
    mpirun += ["-x", "MASTER_ADDR=127.0.0.1", "-x", f"MASTER_PORT={free_port()}", "sh", "-c", alone, "sh"]
    run = [sys.executable, "-m", "shardwise", "run", "--recover", "--events", str(tmp_path / "events"), str(SCRIPT)]
    process = subprocess.Popen(
        [*mpirun, *run, "dp2 fsdp2", "--", str(tmp_path), "1000000"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PACE_S": "0.05"},
    )
    wait_for_steps(process, tmp_path, 4)
    for number in range(1, 4):
        ranks = sorted(ranks_of(process), key=lambda rank: rank.name())
        assert len(ranks) == 4
        ranks[number].kill()
        wait_for_new_step(process, tmp_path)
        assert len(events_of(tmp_path)) == number
    everyone = ranks_of(process)
    process.send_signal(signal.SIGTERM)
    _, err = finish(process)
    assert "recovery 3: rank 3" in err, err
    assert not psutil.wait_procs(everyone, timeout=5)[1]


@pytest.mark.soak  # in every run: what it is made of, above and below
def test_torchrun_starts_supervisors_that_recover_and_starts_them_again(tmp_path: Path) -> None:
    port = free_port()
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=5"]
    agent += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=x", f"--rdzv-conf={CONF}"]
    run = ["-m", "shardwise", "run", "--recover", "--events", str(tmp_path / "events"), str(SCRIPT), "dp4"]
    env = {**os.environ, "PACE_S": "0.05", "OMP_NUM_THREADS": "1"}
    command = [*agent, *run, "--", str(tmp_path), "1000000"]
    agents = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) for _ in range(HOSTS)]
    wait_for_steps(agents[0], tmp_path, 8)
    ranks_of(agents[1])[0].kill()
    wait_for_new_step(agents[0], tmp_path)
    assert len(events_of(tmp_path)) == 1
    before = len(log_of(tmp_path))
    psutil.Process(agents[1].pid).children()[0].kill()  # a host's supervisor: its copies are gone with it
    wait_for_steps(agents[0], tmp_path, before + 8)
    for process in agents:
        process.send_signal(signal.SIGTERM)
    for process in agents:
        finish(process)
    steps = [int(line.split()[0]) for line in log_of(tmp_path)]
    (again,) = (now for last, now in itertools.pairwise(steps) if now < last)
    assert again % 5 == 1 and steps[-1] >= again + 8  # after the newest checkpoint


@pytest.mark.soak  # in every run: the same supervisors under the run verb, and the train verb on one host
def test_the_train_verb_recovers_over_hosts(tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "a"
    text.write_text("".join(f"line {i}: {i * i} is the square of {i}\n" for i in range(400)))
    sizes = "--model tiny --layers 2 --dim 32 --heads 2 --ffn 48 --seq 32 --batch 4 --plan fsdp2 --steps 60 --no-sample"
    words = [
        "train",
        "--recover",
        "--data",
        str(text),
        *sizes.split(),
        "--eval-every",
        "0",
        "--json",
        "--out",
        str(out),
    ]
    port, metrics = free_port(), out / "metrics.jsonl"
    hosts = [start_host(host, port, *words) for host in range(HOSTS)]
    end = time.monotonic() + 100
    while not metrics.exists() or metrics.read_text().count("grad_norm") < 4:
        assert hosts[0].poll() is None and time.monotonic() < end, [finish(host, 5) for host in hosts]
        time.sleep(0.01)
    ranks_of(hosts[1])[0].kill()
    ended = [finish(host) for host in hosts]
    assert [code for code, _ in ended] == [ExitCode.OK] * HOSTS, ended
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert max(row["step"] for row in rows) == 60
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    (event,) = [event for event in events if event["event"] == "recovery"]
    assert event["rank"] == 1 and event["step"] >= 3


@pytest.mark.soak  # in every run: the one below
def test_hosts_that_do_not_run_the_same_end_with_its_code(tmp_path: Path) -> None:
    port = free_port()
    hosts = [
        start_host(host, port, "run", "--recover", str(SCRIPT), "dp2", "--", str(tmp_path), steps)
        for host, steps in enumerate(("5", "6"))
    ]
    for code, err in (finish(host) for host in hosts):
        assert code == ExitCode.LAUNCH
        assert "node 1" in err and "'6'], needed ['dp2'" in err and "the same command" in err


def test_what_cannot_be_divided_over_hosts_is_refused() -> None:
    with pytest.raises(UsageError, match="a plan of 3 processes for 2 hosts, needed as many on each; give a plan of 4"):
        ranks_per_host(Nodes(count=2), 3)
    port = free_port()
    code, err = finish(start_host(0, port, "run", "--recover", "--elastic", "1:4", str(SCRIPT), "dp4"))
    assert code == ExitCode.USAGE and "found 2 hosts and no --nproc" in err
    code, err = finish(start_host(0, port, "train", "--recover", "--elastic", "1:4", "--plan", "dp4"))
    assert code == ExitCode.USAGE and "needed one: how many processes a host has" in err


def job_of(host: int) -> Job:
    return Job(target=str(SCRIPT), args=("dp4",), nproc=2, nodes=Nodes(index=host, count=HOSTS, init="tcp://x:1"))


def test_hosts_that_do_not_run_the_same_refuse() -> None:
    store, other = HashStore(), replace(job_of(1), args=("dp4", "6"))
    refused: list[str] = []

    def join() -> None:
        with pytest.raises(LaunchError, match="the same command") as caught:
            meeting.join(other, store, Stopping())
        refused.append(str(caught.value))

    joins = threading.Thread(target=join)
    joins.start()
    with pytest.raises(LaunchError, match=r"node 1 .*'6'\], needed \['dp4'\].*the same command"):
        meeting.gather(job_of(0), store, Stopping())
    joins.join()
    assert "'6'], needed ['dp4']" in refused[0]


def test_hosts_meet_though_the_store_has_the_place_of_a_start_before() -> None:
    store, found = HashStore(), list[Line]()
    store.set("shardwise/supervisors", json.dumps({"host": "127.0.0.1", "port": free_port(), "word": "ab"}))
    joins = threading.Thread(target=lambda: found.append(meeting.join(job_of(1), store, Stopping())))
    joins.start()
    time.sleep(0.3)
    (there,) = meeting.gather(job_of(0), store, Stopping())
    joins.join()
    assert (there.index, there.ranks, there.name) == (1, range(2, 4), "127.0.0.1")
    there.order(3, None)
    assert found[0].first() == {"do": "order", "world": 3, "copy": None}
    there.socket.close()
    found[0].socket.close()


def test_who_does_not_know_the_word_is_sent_away() -> None:
    store, found = HashStore(), list[Any]()
    gathers = threading.Thread(target=lambda: found.extend(meeting.gather(job_of(0), store, Stopping())))
    gathers.start()
    place = json.loads(store.get("shardwise/supervisors"))
    for said in (b'{"word": "guess", "node": 1}\n', b'{"node": 1}\n', b"[1]\n", b"GET / HTTP/1.1\r\n\r\n", b""):
        with socket.create_connection((place["host"], place["port"]), timeout=5) as connection:
            connection.sendall(said)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(100) == b""
    assert not found
    line = meeting.join(job_of(1), store, Stopping())
    gathers.join()
    assert [there.index for there in found] == [1] and not line.has_kept
    found[0].socket.close()
    line.socket.close()


def test_a_host_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "MEET_S", 0.5)
    with pytest.raises(LaunchError, match="found 1 of 2 hosts, without node 1; waited 0.5 s"):
        meeting.gather(job_of(0), HashStore(), Stopping())
    with pytest.raises(LaunchError, match="node 1: found no supervisor of the first host"):
        meeting.join(job_of(1), HashStore(), Stopping())
    place = f"tcp://127.0.0.1:{free_port()}"
    last = replace(job_of(1), nodes=replace(job_of(1).nodes, init=place))
    with pytest.raises(LaunchError, match=r"node 1: cannot meet at 127.0.0.1:\d+ \(.*Connection refused\)"):
        meeting.meeting_place(last, Stopping())
    asked = Stopping()
    asked.on_signal(signal.SIGTERM, None)
    for wait in (meeting.gather, meeting.join):
        with pytest.raises(meeting.Asked):
            wait(job_of(0), HashStore(), asked)


def test_a_port_that_is_in_use_is_said_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        first = replace(job_of(0), nodes=Nodes(count=HOSTS, init=f"tcp://127.0.0.1:{other.getsockname()[1]}"))
        with pytest.raises(LaunchError, match="node 0 cannot open 127.0.0.1:.*give another MASTER_PORT"):
            meeting.meeting_place(first, Stopping())


def test_what_all_hosts_are_sent_counts_once() -> None:
    stopping = Stopping()
    stopping.on_signal(signal.SIGTERM, None)
    stopping.hear(signal.SIGTERM, 1)
    assert (stopping.count, stopping.killed) == (1, False)
    stopping.hear(signal.SIGTERM, 2)
    assert (stopping.count, stopping.killed, stopping.forward) == (2, True, signal.SIGKILL)


def can_have_networks() -> bool:
    """Whether network namespaces can be made here."""
    probe = ["ip", "netns", "exec", "shardwise-probe", "true"]
    try:
        made = subprocess.run(["ip", "netns", "add", "shardwise-probe"], capture_output=True).returncode == 0
        return made and subprocess.run(probe, capture_output=True).returncode == 0
    except OSError:
        return False
    finally:
        if shutil.which("ip"):
            subprocess.run(["ip", "netns", "del", "shardwise-probe"], capture_output=True)


@pytest.fixture
def networks() -> Iterator[list[str]]:
    """Two hosts' networks, joined by a wire: 10.79.0.1 and 10.79.0.2."""
    if not can_have_networks():
        pytest.skip("needs network namespaces: root and `ip`")
    names = [f"shardwise-{os.getpid()}-{host}" for host in range(HOSTS)]
    words = [f"netns add {name}" for name in names]
    words += [f"-n {names[0]} link add eth0 type veth peer name eth0 netns {names[1]}"]
    for host, name in enumerate(names):
        words += [f"-n {name} addr add 10.79.0.{host + 1}/24 dev eth0"]
        words += [f"-n {name} link set {device} up" for device in ("eth0", "lo")]
    try:
        for line in words:
            subprocess.run(["ip", *line.split()], check=True)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def test_hosts_recover_over_a_network_and_end_when_it_is_cut(networks: list[str], tmp_path: Path) -> None:
    run = ["shardwise", "run", "--recover", "--events", str(tmp_path / "events"), str(SCRIPT), "fsdp4"]
    hosts = []
    for host, name in enumerate(networks):
        command = ["ip", "netns", "exec", name, sys.executable, "-m", *run, "--", str(tmp_path), "1000000"]
        env = place_of(host, 29500) | {"MASTER_ADDR": "10.79.0.1", "GLOO_SOCKET_IFNAME": "eth0"}
        hosts.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env))
    wait_for_steps(hosts[0], tmp_path, 3)
    ranks_of(hosts[1])[0].kill()
    wait_for_new_step(hosts[0], tmp_path)
    (event,) = events_of(tmp_path)
    assert event["rank"] == 2 and event["step"] >= 1
    everyone = [rank for host in hosts for rank in ranks_of(host)]
    subprocess.run(["ip", "-n", networks[1], "link", "set", "eth0", "down"], check=True)
    for host, said in zip(hosts, ("node 1 (10.79.0.2, ranks 2 to 3) is lost", "(10.79.0.1) is lost"), strict=True):
        code, err = finish(host, 40)
        assert code == ExitCode.LAUNCH and f"{said}: nothing was heard of it for 15 s" in err, err
    assert not psutil.wait_procs(everyone, timeout=25)[1]
