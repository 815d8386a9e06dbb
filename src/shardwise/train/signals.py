"""Requests to stop: SIGINT (Ctrl-C), SIGTERM, SIGHUP of a closed terminal, and SIGUSR1, a batch system's warning.

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
from shardwise.launch.stopping import SAME_SIGNAL_S, handling, is_minded
from shardwise.launch.variables import variables

STOP_SIGINT = 1
STOP_SIGUSR1 = 100_000
STOP_SIGTERM = 10_000_000_000
"""Requests are summed over the world; these three stay apart in any sum of up to 99,999 ranks."""
STOPS = {
    signal.SIGINT: STOP_SIGINT,
    signal.SIGTERM: STOP_SIGTERM,
    signal.SIGHUP: STOP_SIGTERM,
    signal.SIGUSR1: STOP_SIGUSR1,
}
EXIT_CODES = {"SIGINT": ExitCode.INTERRUPTED, "SIGTERM": ExitCode.TERMINATED, "SIGUSR1": ExitCode.PREEMPTED}


class Stoppable(Protocol):
    """What is asked to stop: a `TrainStep`, or who makes steps and more."""

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


class _Asking:
    """A handler: the first signal is a request, a second one acts as if nobody listened.

    A rank of a launcher of ours leaves that to it: what the launcher passes on may come late where cores are busy.
    """

    def __init__(self, step: Stoppable, around: _Asking | None) -> None:
        self.step, self.around = step, around
        self._since: float | None = None
        if around is not None and around.step.stop_requested:  # it came before the loop began
            step.stop_requested = around.step.stop_requested

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        if now - self._since > SAME_SIGNAL_S and not is_minded(variables()):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.step.stop_requested = STOPS[signal.Signals(number)]
        if self.around is not None:
            self.around(number, frame)


@contextmanager
def listening(step: Stoppable) -> Iterator[None]:
    """The first signal asks the step to stop; a second one acts as if nobody listened: the process ends at once.

    Within another `listening` both are asked: who goes on when the inner one is over still knows.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    around = signal.getsignal(signal.SIGTERM)
    with handling(STOPS, _Asking(step, around if isinstance(around, _Asking) else None)):
        yield
