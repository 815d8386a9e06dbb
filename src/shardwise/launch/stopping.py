"""`catching`: the signals that ask a launcher to stop, counted from before torch is imported. No torch."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Those that ask a launcher, or a rank, to end."""
SAME_SIGNAL_S = 1.0
"""A signal that follows within this time is the first one again: a scheduler signals launcher and ranks alike, some of
them twice (srun passes on what SLURM also sends), and the launcher passes its own on."""


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
        if self.first is None:
            self.first, self.at = first, time.monotonic()
        self.count = max(self.count, count)
        self.killed = self.killed or count > 1

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal; a second Ctrl-C is meant, however soon it comes."""
        again = number == signal.SIGINT == self.first
        if self.first is None or again or time.monotonic() - self.at > SAME_SIGNAL_S:
            self.hear(signal.Signals(number), self.count + 1)


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
    with handling(STOP_SIGNALS, stopping.on_signal):
        yield stopping


@contextmanager
def handling(numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Within it these signals are handled so; then as before. The main thread's alone. `nohup` stays what it is."""
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
    previous = {number: signal.signal(number, handler) for number in numbers if number not in ignored}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
