"""The seeded killer against processes that only sleep."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from shardwise.testing.killer import Killer, processes_below

# A process with two children whose name both is `rank 0`, as a dying rank and the one in its place are for an instant.
TWO_OF_ONE_NAME = """
import os, sys, time
for _ in range(2):
    if os.fork() == 0:
        open("/proc/self/comm", "w").write("rank 0")
        break
time.sleep(60)
"""


@pytest.mark.skipif(not Path("/proc/self/comm").exists(), reason="processes are named by Linux's /proc")
def test_two_processes_of_one_name_are_both_hit() -> None:
    with subprocess.Popen([sys.executable, "-c", TWO_OF_ONE_NAME]) as parent:
        try:
            named = psutil.Process(parent.pid)
            while sum(child.name() == "rank 0" for child in named.children()) < 2:
                assert parent.poll() is None
            # This seed draws two different places.
            killer = Killer(parent.pid, seed=2, mean_pause_s=0.01, double=1.0, standbys=0.0)
            assert killer.run(1) == 1
            assert killer.blows[0][1] == ("rank 0", "rank 0")
        finally:
            for process in [*psutil.Process(parent.pid).children(), parent]:
                process.kill()


def test_a_process_that_ends_while_it_is_looked_at_is_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does that the fork server starts to ask what it may do: it lives for a millisecond."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        listed = psutil.Process(child.pid)
        monkeypatch.setattr(psutil.Process, "children", lambda process, recursive: [listed])
        assert [found for _, found in processes_below(os.getpid(), "")] == [listed]
        child.kill()
        child.wait()
        assert processes_below(os.getpid(), "") == []
