"""`Progress`: what rank zero shows while a run goes on: a bar on a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from shardwise.records import say

PLAIN_LINES = 20
"""Lines that a whole run prints where there is no terminal."""


@dataclass(frozen=True, kw_only=True)
class Sight:
    """One look at a run."""

    step: int
    loss: float
    tokens_per_s: float
    memory_bytes: int
    mfu: float | None = None
    """Share of the device's peak rate that the model's own arithmetic uses; None where no peak is known."""

    def text(self) -> str:
        """One line without step and time: `loss 1.870  5,120 tok/s  0.41 GB`."""
        mfu = f"  MFU {self.mfu:.0%}" if self.mfu is not None else ""
        return f"loss {self.loss:.3f}  {self.tokens_per_s:,.0f} tok/s{mfu}  {self.memory_bytes / 1e9:.2f} GB"


class Progress(Protocol):
    """Shows steps and notes."""

    def show(self, sight: Sight) -> None:
        """A step is done."""
        ...

    def note(self, text: str) -> None:
        """A line that stays: an evaluation, a checkpoint."""
        ...


class Silent:
    """Shows nothing: every rank but zero, and `--json`."""

    def show(self, sight: Sight) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""


class Bar:
    """A bar with notes above it."""

    def __init__(self, bar: RichProgress, task: TaskID) -> None:
        self._bar, self._task = bar, task

    def show(self, sight: Sight) -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=sight.step, text=sight.text())

    def note(self, text: str) -> None:
        """Print above the bar."""
        self._bar.console.print(text, markup=False, highlight=False)


@dataclass
class Lines:
    """About twenty lines per run."""

    console: Console
    start: int
    total: int
    begun: float = field(default_factory=time.monotonic)

    def show(self, sight: Sight) -> None:
        """Print every twentieth of the run, the first step and the last."""
        every = max(1, self.total // PLAIN_LINES)
        done = sight.step - self.start
        if sight.step % every == 0 or done == 1 or sight.step == self.total:
            left_s = (time.monotonic() - self.begun) / max(done, 1) * (self.total - sight.step)
            self.note(f"step {sight.step}/{self.total}  {sight.text()}  {duration(left_s)} left")

    def note(self, text: str) -> None:
        """Print."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """Hours, minutes and seconds.

    >>> duration(3725), duration(61), duration(3)
    ('1:02:05', '1:01', '0:03')
    """
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class _Lasting:
    """What `lasting` gives."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._is_lost = file, False

    def write(self, text: str) -> int:
        """Letters that the stream has no bytes for are escaped."""
        encoding = self._file.encoding or "utf-8"
        self._try(lambda: self._file.write(text.encode(encoding, "backslashreplace").decode(encoding)))
        return len(text)

    def flush(self) -> None:
        """As the stream's."""
        self._try(self._file.flush)

    def _try(self, work: Callable[[], object]) -> None:
        if self._is_lost:
            return
        try:
            work()
        except (OSError, ValueError) as error:  # the second: closed
            self._is_lost = True
            with suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self._file.fileno())  # for what is still in its buffer, too
            say(f"shardwise: standard output: {error}; nothing more is shown there, and the run goes on")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def lasting(file: TextIO | None) -> TextIO | None:
    """Standard output for who goes on without it: when it cannot be written, nothing more is, and that is said."""
    return None if file is None else cast(TextIO, _Lasting(file))


@contextmanager
def open_progress(start: int, total: int, *, quiet: bool) -> Iterator[Progress]:
    """The display of this process for the steps `start + 1 .. total`."""
    if quiet:
        yield Silent()
        return
    console = Console(file=lasting(sys.stdout))
    if not console.is_terminal:
        yield Lines(console, start, total)
        return
    columns = (BarColumn(24), MofNCompleteColumn(), TextColumn("{task.fields[text]}"), TimeRemainingColumn())
    with RichProgress(*columns, console=console) as bar:
        yield Bar(bar, bar.add_task("train", total=total, completed=start, text="starting"))
