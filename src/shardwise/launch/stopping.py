"""`catching`: the signals that ask a launcher to stop, counted from before torch is imported. No torch."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Those that ask a launcher, or a rank, to end."""


@dataclass
class Stopping:
    """Signals that a launcher has got so far; the handler only counts."""

    first: signal.Signals | None = None
    at: float = 0.0
    """When it came."""
    count: int = 0
    killed: bool = False
    """Ranks were ended before they had saved."""

    @property
    def forward(self) -> signal.Signals:
        """What the ranks get of it."""
        again = self.count > 1
        return signal.SIGKILL if again else signal.SIGTERM if self.first in (None, signal.SIGHUP) else self.first

    def hear(self, first: signal.Signals, count: int) -> None:
        """Count signals of the same job's launcher on another host; what was sent to all hosts counts once."""
        while self.count < count:
            self.on_signal(first, None)

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal."""
        self.count += 1
        if self.first is None:
            self.first, self.at = signal.Signals(number), time.monotonic()
        self.killed = self.killed or self.count > 1


@contextmanager
def catching(stopping: Stopping | None = None) -> Iterator[Stopping]:
    """Within it the signals that ask a launcher to stop are counted, and do nothing else.

    Args:
        stopping: that of a caller who catches them already; None: a new one.
    """
    if stopping is not None:
        yield stopping
        return
    stopping = Stopping()
    previous = {number: signal.signal(number, stopping.on_signal) for number in STOP_SIGNALS}
    try:
        yield stopping
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
