"""`Cadence`: at which steps a run saves: every N, every so many minutes, or where saving and losing work cost least."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from shardwise.errors import ConfigError

DEVICE_HOURS_PER_FAILURE = 50_000.0
"""What is assumed before a run has failures of its own: 419 unexpected interruptions of 16,384 GPUs in 54 days (The
Llama 3 Herd of Models, 2024, section 3.3.4) are one per 50,676 device-hours."""
_MINUTES = re.compile(r"([0-9]+(?:\.[0-9]+)?)(s|m|h)")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_FIRST_PLAN = 3
"""Steps before the first interval is planned, or `auto` makes its first save: these are slower than the rest."""
_LONGEST_S = 100 * 366 * 86400.0
_MOST_STEPS = 2**62
"""More is a slip of the pen: no run is so long."""


@dataclass(frozen=True)
class Every:
    """What `--checkpoint-every` asks for: one of the three."""

    steps: int | None = None
    seconds: float | None = None
    auto: bool = False

    @classmethod
    def parse(cls, text: str | int | None) -> Every:
        """`500`, `10m` (also `30s`, `2h`), `auto`, `0` or None for never.

        Raises:
            ConfigError: anything else; more than 100 years, or 2**62 steps.

        >>> Every.parse("10m").seconds
        600.0
        """
        if text == "auto":
            return cls(auto=True)
        text = 0 if text is None else text
        if isinstance(text, str) and text.isascii() and text.isdecimal() and len(text) < 20:
            text = int(text)
        if isinstance(text, int):
            if 0 <= text <= _MOST_STEPS:
                return cls(steps=text)
        elif match := _MINUTES.fullmatch(text):
            seconds = float(match[1]) * _SECONDS[match[2]]
            if 0 < seconds <= _LONGEST_S:
                return cls(seconds=seconds)
        raise ConfigError(
            f"checkpoint_every: found {text!r:.40}, needed a number of steps (500; 0: only at the end), a time "
            "(10m, 30s, 2h; at most 100 years) or auto; correct it"
        )


def best_interval(cost_s: float, between_failures_s: float) -> float:
    """Seconds of training between two saves that lose least: sqrt(2 C M) - C, and M when C is above M / 2.

    Young, A first order approximation to the optimum checkpoint interval (CACM 1974), with the correction of Daly, A
    higher order estimate of the optimum checkpoint interval (FGCS 2006).

    Args:
        cost_s: what a save takes from training.
        between_failures_s: mean time between failures.

    >>> round(best_interval(1.0, 7200.0))
    119
    """
    if cost_s >= between_failures_s / 2:
        return between_failures_s
    return math.sqrt(2 * cost_s * between_failures_s) - cost_s


@dataclass
class Cadence:
    """Says at each step whether to save. Rank 0 turns times into steps, and tells all ranks at the same steps.

    What a save costs is not known before one was made: `auto` makes its first one after the first steps of each start,
    and plans from what that took; as it also gets the memory for all saves, it no longer counts when there is another.

    Args:
        every: what was asked for.
        world: ranks, for the rate of failures.
        share: gives all ranks the number of rank 0; a collective.
        failures: interruptions that this run's record knows of.
        hours: that the run's record covers.

    >>> cadence = Cadence(Every(steps=10), world=1, share=lambda value: value)
    >>> [step for step in range(1, 31) if cadence.is_due(step)]
    [10, 20, 30]
    """

    every: Every
    world: int
    share: Callable[[float], float]
    failures: int = 0
    hours: float = 0.0
    clock: Callable[[], float] = time.monotonic
    reason: str = ""
    """Why the next save is when it is; empty until it is planned."""
    news: str = ""
    """Which step that is and why, at the first step that knows, and where `auto` first plans from a measured save."""
    _due: int | None = None
    _plan_at: int | None = None
    _from: tuple[int, float] | None = None
    _cost_s: float = 0.0
    _busy_s: float = 0.0
    _saved_at: int = field(default=0)
    _saves: int = 0
    _told: str = ""

    def is_due(self, step: int) -> bool:
        """Whether to save after this step; called once for each step, on every rank."""
        if self.every.steps is not None:
            return self.every.steps > 0 and step % self.every.steps == 0
        self.news = ""
        if self._from is None:
            self._from, self._saved_at = (step, self.clock()), step
            if self.every.auto:
                self._due = step + _FIRST_PLAN
                self._tell("early", "the first of this start, early, to measure what a save costs")
            else:
                self._plan_at = step + _FIRST_PLAN
        if step == self._plan_at:
            self._plan(step)
        return self._due is not None and step >= self._due

    def saved(self, step: int, *, stalled_s: float, busy_s: float) -> None:
        """A save was made: what it took from training, and how long it took in the background."""
        self._cost_s = stalled_s if self._saves < 2 else max(self._cost_s, stalled_s)
        self._busy_s, self._saves = max(self._busy_s, busy_s), self._saves + 1
        self._saved_at, self._due = step, None
        self._from, self._plan_at = (step, self.clock()), step + 1 if self.every.steps is None else None

    def _plan(self, step: int) -> None:
        """Turn the interval into a step; half-way there, look again at how long steps take."""
        assert self._from is not None
        begun, at = self._from
        step_s = max((self.clock() - at) / max(1, step - begun), 1e-6)
        seconds, why = self._interval()
        steps = int(self.share(float(max(1, round(seconds / step_s)))))
        self._due = max(step, self._saved_at + steps)
        left = self._due - step
        self._plan_at = step + left // 2 if left >= 2 else None
        self._tell("planned", f"{why}, {step_s:.3g} s a step")

    def _tell(self, kind: str, why: str) -> None:
        self.reason = why
        self.news, self._told = ("" if kind == self._told else f"next checkpoint at step {self._due}: {why}"), kind

    def _interval(self) -> tuple[float, str]:
        if self.every.seconds is not None:
            return self.every.seconds, f"every {self.every.seconds:g} s"
        prior = DEVICE_HOURS_PER_FAILURE / self.world
        between_s = 3600 * (prior + self.hours) / (1 + self.failures)
        best = best_interval(self._cost_s, between_s)
        seconds = max(best, 2 * self._busy_s)
        return seconds, (
            f"sqrt(2 C M) - C = {best:.3g} s with C = {self._cost_s:.3g} s a save and one failure in "
            f"M = {between_s / 3600:.3g} h "
            f"({self.failures} seen in {self.hours:.3g} h, {DEVICE_HOURS_PER_FAILURE:,.0f} device-hours each before)"
            + (f", and twice the {self._busy_s:.3g} s of a save" if seconds > best else "")
        )
