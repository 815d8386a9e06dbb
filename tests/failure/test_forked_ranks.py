"""Ranks that are forked from one process which has imported torch: each is what it would be if it had been started."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardwise.errors import ExitCode
from shardwise.launch.forking.lines import Line
from shardwise.launch.forking.nursery import Nursery
from shardwise.launch.stopping import SAME_SIGNAL_S
from tests.failure.test_run_verb import ONE_DIES, PATIENT, alive, finish, start

TORCH = "import torch\n"
SAYS = """
import atexit, multiprocessing, os, random, sys, __main__
import numpy, torch
import shardwise.train.kept.mirror  # all that training needs is imported before the fork: numpy.random too
import torch.distributed as dist
dist.init_process_group("gloo")
ones = torch.ones(1)
dist.all_reduce(ones)
drawn = [None, None]
dist.all_gather_object(drawn, (random.random(), numpy.random.rand()))
apart = all(len(set(numbers)) == 2 for numbers in zip(*drawn))
atexit.register(print, "ended", os.environ["RANK"])
mine = __name__ == "__main__" and __main__.__file__ == __file__ and sys.path[0] == os.path.dirname(__file__)
alone = multiprocessing.parent_process() is None and not [t for t in __import__("threading").enumerate() if t.daemon]
print(os.environ["RANK"], ones.item(), sys.argv[1:], mine, alone, apart, torch.get_num_threads(), sys.stdin.fileno())
dist.destroy_process_group()
if os.environ["RANK"] == "1":
    sys.exit("a word")
"""


@pytest.mark.share(2)
@pytest.mark.parametrize("how", ["fork", "exec"])
def test_a_rank_is_what_it_would_be_if_it_had_been_started(tmp_path: Path, how: str) -> None:
    process = start(tmp_path, SAYS, "--nproc", "2", "--", "--fast", SHARDWISE_START=how, OMP_NUM_THREADS="1")
    code, out, err = finish(process)
    assert code == ExitCode.RANK_FAILED
    assert err.splitlines() == ["a word", "shardwise: rank 1 failed: the script ended with status 1"]
    said = [f"{rank} 2.0 ['--fast'] True True True 1 0" for rank in (0, 1)]
    assert sorted(out.splitlines()) == sorted([*said, "ended 0", "ended 1"])


def test_under_nohup_a_rank_ignores_a_closed_terminal(tmp_path: Path) -> None:
    kept = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        says = TORCH + "import signal\nprint(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)"
        process = start(tmp_path, says, "--nproc", "2")
    finally:
        signal.signal(signal.SIGHUP, kept)
    code, out, err = finish(process)
    assert (code, out.split()) == (ExitCode.OK, ["True", "True"]), err


def test_how_ranks_start_is_one_of_two(tmp_path: Path) -> None:
    code, _, err = finish(start(tmp_path, TORCH, "--nproc", "2", SHARDWISE_START="spoon"))
    assert code == ExitCode.LAUNCH and "SHARDWISE_START='spoon': needed `fork`" in err


@pytest.mark.share(3)
@pytest.mark.parametrize(
    ("death", "text"),
    [
        ("os.kill(os.getpid(), 9)", "killed by SIGKILL"),
        ("raise ValueError('bad tide')", "ValueError: bad tide"),
        ("import torch.no_such_module", "No module named 'torch.no_such_module'"),
    ],
)
def test_the_rank_that_dies_is_named(tmp_path: Path, death: str, text: str) -> None:
    code, _, err = finish(start(tmp_path, TORCH + ONE_DIES.format(death=death), "--nproc", "2"))
    assert code == ExitCode.RANK_FAILED
    assert "rank 1 failed" in err.splitlines()[-1] and text in err.splitlines()[-1] and "nursery" not in err


def ranks_of(process: subprocess.Popen[str], folder: Path) -> list[int]:
    end = time.monotonic() + 60
    while not all((folder / f"ready{rank}").exists() for rank in (0, 1)):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.02)
    time.sleep(0.1)
    return [int((folder / f"ready{rank}").read_text()) for rank in (0, 1)]


LOOPBACK = {"0100007F", "0" * 24 + "01000000"}
"""127.0.0.1 and ::1, as the kernel writes them."""
GLOO = {"GLOO_SOCKET_IFNAME": "lo"}
"""Else it takes connections at the address of the host's name."""


def listening(pid: int) -> set[str]:
    """The addresses on which a process and those below it take connections."""
    process, held = psutil.Process(pid), set()
    for each in (process, *process.children(recursive=True)):
        links = list[Path]()
        with suppress(OSError):  # it has ended meanwhile
            links += Path(f"/proc/{each.pid}/fd").iterdir()
        for link in links:
            with suppress(OSError):  # closed meanwhile
                held.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in held}


@pytest.mark.share(2)
@pytest.mark.parametrize("how", ["fork", "exec"])
def test_nobody_beyond_this_machine_can_connect(tmp_path: Path, how: str) -> None:
    script = f"{TORCH}torch.distributed.init_process_group('gloo')\n" + PATIENT.format(stubborn=False)
    process = start(tmp_path, script, "--nproc", "2", "--", str(tmp_path), SHARDWISE_START=how, **GLOO)
    ranks_of(process, tmp_path)
    found = listening(process.pid)
    process.kill()
    process.communicate()
    assert found and found <= LOOPBACK


@pytest.fixture
def begun(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    script = TORCH + PATIENT.format(stubborn=getattr(request, "param", False))
    process = start(tmp_path, script, "--nproc", "2", "--", str(tmp_path))
    yield process
    process.kill()
    process.communicate()


def test_a_signal_lets_ranks_save(begun: subprocess.Popen[str], tmp_path: Path) -> None:
    ranks_of(begun, tmp_path)
    begun.send_signal(signal.SIGINT)
    code, _, err = finish(begun)
    assert code == ExitCode.INTERRUPTED and err.startswith("shardwise: ended by SIGINT (130)"), err
    assert (tmp_path / "saved0").exists() and (tmp_path / "saved1").exists()


@pytest.mark.soak  # in every run: the same of ranks that are started
@pytest.mark.parametrize("begun", [True], indirect=True)
def test_a_second_signal_ends_at_once(begun: subprocess.Popen[str], tmp_path: Path) -> None:
    ranks = ranks_of(begun, tmp_path)
    begun.send_signal(signal.SIGTERM)
    time.sleep(SAME_SIGNAL_S + 0.2)
    assert begun.poll() is None
    begun.send_signal(signal.SIGTERM)
    assert finish(begun)[0] == ExitCode.KILLED
    assert not any(alive(rank) for rank in ranks) and not (tmp_path / "saved0").exists()


def test_ranks_do_not_outlive_a_killed_launcher(begun: subprocess.Popen[str], tmp_path: Path) -> None:
    ranks = ranks_of(begun, tmp_path)
    begun.kill()
    end = time.monotonic() + 20
    while any(alive(rank) for rank in ranks) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(alive(rank) for rank in ranks)


def test_a_server_that_dies_is_an_error_with_its_code(begun: subprocess.Popen[str], tmp_path: Path) -> None:
    ranks = ranks_of(begun, tmp_path)
    (server,) = psutil.Process(begun.pid).children()
    (store,) = (child for child in server.children() if child.name() == "store")
    assert {child.pid for child in server.children()} == {*ranks, store.pid}
    server.kill()
    code, _, err = finish(begun)
    assert code == ExitCode.LAUNCH and err.startswith("shardwise: the process that ranks are forked from has ended")
    end = time.monotonic() + 20
    while any(map(alive, (*ranks, store.pid))) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(alive, (*ranks, store.pid)))


@pytest.mark.share(2)
@pytest.mark.parametrize("words", [(), ("--recover",)], ids=["plain", "recover"])
def test_ctrl_c_while_torch_is_imported(tmp_path: Path, words: tuple[str, ...]) -> None:
    """The terminal sends it to every process of the group: to the server too, which must not die of it."""
    (tmp_path / "script.py").write_text(TORCH + PATIENT.format(stubborn=False))
    command = [sys.executable, "-m", "shardwise", "run", *words, "script.py", "--nproc", "2", "--", str(tmp_path)]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True)
    end = time.monotonic() + 60
    while not any(child.name().startswith("python") for child in psutil.Process(process.pid).children()):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.005)
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == ExitCode.INTERRUPTED, err
    assert "Traceback" not in err


def told_of(monkeypatch: pytest.MonkeyPatch, folder: Path, *, standby: bool, forks: int) -> list[dict[str, Any]]:
    """What a nursery says that is to start two ranks where so many processes can be started."""
    here, there = socket.socketpair()
    nursery, fork, left = Nursery(Line(there)), os.fork, [None] * forks

    def few() -> int:
        if not left:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        left.pop()
        return fork()

    monkeypatch.setattr(os, "fork", few)
    argv = [
        ["--report", str(rank), str(folder / f"error{rank}"), str(os.getpid()), "--module", "this"] for rank in (0, 1)
    ]
    outliving = {"standby": standby, "job": "a" * 32, "halvings": 0, "memory": {"board": 0, "slots": [], "first": 0}}
    env = [{"OMP_NUM_THREADS": "1"}] * 2
    start = {"do": "start", "world": 1, "first": 0, "argv": argv, "env": env, "store": ["127.0.0.1", 0]}
    nursery._do(start | {"outliving": outliving if standby else None})
    assert not nursery.ranks and not nursery.orders and not nursery.stores
    here.settimeout(20)
    line, found = Line(here), list[dict[str, Any]]()
    while len(found) < 3:
        found += line.receive()
    here.close()
    there.close()
    return found


@pytest.mark.parametrize(("standby", "forks"), [(False, 0), (False, 1), (True, 0)])
def test_a_rank_that_cannot_be_started_has_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, standby: bool, forks: int
) -> None:
    """The process that forks them ended in a traceback, and with it the job, though it was a set to stand by."""
    store, *ended = told_of(monkeypatch, tmp_path, standby=standby, forks=forks)
    _, port, problem = store["store"]
    assert port and (problem is not None) == (forks == 0 and not standby)
    assert [message["ended"] for message in ended] == [[1, rank, ExitCode.LAUNCH] for rank in (0, 1)]
    said = json.loads((tmp_path / "error1").read_text())
    assert said["known"] and "cannot be started: " in said["message"] and os.strerror(errno.EAGAIN) in said["message"]
