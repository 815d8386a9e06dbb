"""`Killer`: SIGKILLs at random instants to random ranks of a job that recovers, the same for the same seed."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import psutil


@dataclass
class Killer:
    """Kills ranks of one job.

    Args:
        pid: the supervisor: the process of `shardwise run --recover`.
        seed: decides victims and pauses.
        mean_pause_s: between two blows; pauses are exponential, so many blows fall into a recovery.
        double: share of the blows that hit two ranks at once.
        standbys: share that hit a process that stands by.

    >>> killer = Killer(process.pid, seed=7)  # doctest: +SKIP
    >>> killer.run(200)  # doctest: +SKIP
    """

    pid: int
    seed: int
    mean_pause_s: float = 1.0
    double: float = 0.1
    standbys: float = 0.1
    blows: list[tuple[float, tuple[str, ...]]] = field(default_factory=list)
    """Time of the monotonic clock, and who was hit: `rank 3`, `standby 0`."""

    def __post_init__(self) -> None:
        """A later `run` goes on with the draws of the one before."""
        self._draw = random.Random(self.seed)

    @property
    def kills(self) -> int:
        """Processes that were hit."""
        return sum(len(hit) for _, hit in self.blows)

    def run(self, count: int, *, while_true: Callable[[], bool] = lambda: True) -> int:
        """Strike until so many blows have fallen, the job has ended, or `while_true` says no; how many fell."""
        draw = self._draw
        while len(self.blows) < count and while_true():
            time.sleep(draw.expovariate(1 / self.mean_pause_s))
            who = "standby " if draw.random() < self.standbys else "rank "
            number = 2 if draw.random() < self.double else 1
            places = [draw.random() for _ in range(number)]
            if not psutil.pid_exists(self.pid):
                break
            # A dying rank and the one in its place may have the same name for an instant: by name, then by id.
            found = sorted((name, p.pid, p) for name, p in processes_below(self.pid, who))
            victims = {int(place * len(found)): found[int(place * len(found))] for place in places if found}
            hit = []
            for name, _, process in victims.values():
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
                    hit.append(name)
            if hit:
                self.blows.append((time.monotonic(), tuple(hit)))
        return len(self.blows)


def processes_below(pid: int, begins: str) -> list[tuple[str, psutil.Process]]:
    """Those that a process started, directly or not, whose name begins so, with their names: `rank 3`, `standby 0`.

    A job starts and ends processes at any time: one that ends while they are looked at is none of them.
    """
    found = list[tuple[str, psutil.Process]]()
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                found.append((child.name(), child))
    return [(name, child) for name, child in found if name.startswith(begins)]
