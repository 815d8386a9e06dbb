"""Requests to stop: SIGINT (Ctrl-C), SIGTERM, and SIGUSR1, which batch systems send as a warning before the end.

A request is a number that rides in the sums of a step, so that all ranks end after the same one whichever was told.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

from shardwise.errors import ExitCode
from shardwise.launch.stopping import SAME_SIGNAL_S, handling

STOP_SIGINT = 1
STOP_SIGUSR1 = 100_000
STOP_SIGTERM = 10_000_000_000
"""Requests are summed over the world; these three stay apart in any sum of up to 99,999 ranks."""
STOPS = {signal.SIGINT: STOP_SIGINT, signal.SIGTERM: STOP_SIGTERM, signal.SIGUSR1: STOP_SIGUSR1}
EXIT_CODES = {"SIGINT": ExitCode.INTERRUPTED, "SIGTERM": ExitCode.TERMINATED, "SIGUSR1": ExitCode.PREEMPTED}


class Stoppable(Protocol):
    """What is asked to stop: a `TrainStep`."""

    stop_requested: int


def stop_name(total: float) -> str | None:
    """The strongest request in a sum of requests.

    >>> stop_name(3 * STOP_SIGINT), stop_name(STOP_SIGINT + 2 * STOP_SIGUSR1), stop_name(0)
    ('SIGINT', 'SIGUSR1', None)
    """
    if total >= STOP_SIGTERM:
        return "SIGTERM"
    if total >= STOP_SIGUSR1:
        return "SIGUSR1"
    return "SIGINT" if total else None


@contextmanager
def listening(step: Stoppable) -> Iterator[None]:
    """The first signal asks the step to stop; a second one acts as if nobody listened: the process ends at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked: list[float] = []

    def ask(number: int, frame: FrameType | None) -> None:
        if asked and time.monotonic() - asked[0] > SAME_SIGNAL_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        asked.append(time.monotonic())
        step.stop_requested = STOPS[signal.Signals(number)]

    with handling(STOPS, ask):
        yield
