"""`catching`: the signals that ask a launcher to stop, counted from before torch is imported. No torch."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Those that ask a launcher, or a rank, to end."""
SAME_SIGNAL_S = 1.0
"""A signal that follows within this time is the first one again: a scheduler signals launcher and ranks alike, some of
them twice (srun passes on what SLURM also sends), and the launcher passes its own on."""


RUN_ID = "shardwise"
"""TORCHELASTIC_RUN_ID of the ranks that a launcher of ours has started."""


def is_minded(env: Mapping[str, str]) -> bool:
    """Whether a launcher of ours counts the signals for this rank: it ends it at once where a second one is meant.

    >>> is_minded({"TORCHELASTIC_RUN_ID": "shardwise"}), is_minded({})
    (True, False)
    """
    return env.get("TORCHELASTIC_RUN_ID") == RUN_ID


@dataclass
class Stopping:
    """Signals that a launcher has got so far. The handler only notes them: another one may come while it runs."""

    came: list[tuple[float, signal.Signals]] = field(default_factory=list)
    """When each came, and which; in no order."""
    told: int = 0
    """How many the same job's launcher on another host has counted."""
    is_late: bool = False
    """The time to end in order is over."""

    @property
    def first(self) -> signal.Signals | None:
        """What was asked for; None: nothing yet."""
        return min(self.came)[1] if self.came else None

    @property
    def at(self) -> float:
        """When the first one came, by the monotonic clock; 0: none has."""
        return min(self.came)[0] if self.came else 0.0

    @property
    def count(self) -> int:
        """How many were meant: the first one come again is not, but for a second Ctrl-C, however soon it comes."""
        if not self.came:
            return 0
        (at, first), *later = sorted(self.came)
        meant = [number == signal.SIGINT == first or then - at > SAME_SIGNAL_S for then, number in later]
        return max(self.told, 1 + sum(meant))

    @property
    def killed(self) -> bool:
        """Ranks were ended before they had saved."""
        return self.is_late or self.count > 1

    @property
    def forward(self) -> signal.Signals:
        """What the ranks get of it."""
        again = self.count > 1
        return signal.SIGKILL if again else signal.SIGTERM if self.first in (None, signal.SIGHUP) else self.first

    def hear(self, first: signal.Signals, count: int) -> None:
        """Count signals of the same job's launcher on another host; what was sent to all hosts counts once."""
        if not self.came:
            self.came.append((time.monotonic(), first))
        self.told = max(self.told, count)

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal."""
        self.came.append((time.monotonic(), signal.Signals(number)))


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


def no_longer() -> None:
    """This process is about to end as it was asked to: a signal that is sent twice takes its exit code no more."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
