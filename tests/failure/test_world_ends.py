"""Processes of a `World` do not outlive who asked them, nor the process that forks them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwise.launch.forked import World


def wait_long(out: str) -> None:
    """Say which process it is and which one has forked it, then wait."""
    unfinished = Path(out, f"{os.getpid()}.part")
    unfinished.write_text(str(os.getppid()))
    unfinished.rename(unfinished.with_suffix(""))
    time.sleep(300)


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("who", ["asks", "forks"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_who_asks_for_them_or_forks_them(tmp_path: Path, number: signal.Signals, who: str) -> None:
    asks = subprocess.Popen([sys.executable, "-m", "tests.failure.test_world_ends", str(tmp_path)])
    try:
        while len(ready := [path for path in tmp_path.iterdir() if not path.suffix]) < 2:
            assert asks.poll() is None
            time.sleep(0.1)
        ranks, forks = [int(path.name) for path in ready], int(ready[0].read_text())
        os.kill(asks.pid if who == "asks" else forks, number)
        until = time.monotonic() + 60
        while (left := [rank for rank in ranks if is_running(rank)]) and time.monotonic() < until:
            time.sleep(0.1)
        assert not left
    finally:
        asks.kill()
        asks.wait()


if __name__ == "__main__":
    World(2)(2, wait_long, sys.argv[1], timeout_s=300)
