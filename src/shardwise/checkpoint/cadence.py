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
"""Steps before the first interval is planned: the first ones are slower than the rest."""


@dataclass(frozen=True)
class Every:
    """What `--checkpoint-every` asks for: one of the three."""

    steps: int | None = None
    seconds: float | None = None
    auto: bool = False

    @classmethod
    def parse(cls, text: str | int) -> Every:
        """`500`, `10m` (also `30s`, `2h`), `auto`, `0` for never.

        Raises:
            ConfigError: anything else.

        >>> Every.parse("10m").seconds
        600.0
        """
        if isinstance(text, int) or (text.isascii() and text.isdecimal()):
            return cls(steps=int(text))
        if text == "auto":
            return cls(auto=True)
        match = _MINUTES.fullmatch(text)
        if match is None or float(match[1]) <= 0:
            raise ConfigError(
                f"checkpoint_every: found {text!r}, needed a number of steps (500), a time (10m, 30s, 2h) or auto"
            )
        return cls(seconds=float(match[1]) * _SECONDS[match[2]])


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
    _due: int | None = None
    _plan_at: int | None = None
    _from: tuple[int, float] | None = None
    _cost_s: float = 0.0
    _busy_s: float = 0.0
    _saved_at: int = field(default=0)

    def is_due(self, step: int) -> bool:
        """Whether to save after this step; called once for each step, on every rank."""
        if self.every.steps is not None:
            return self.every.steps > 0 and step % self.every.steps == 0
        if self._from is None:
            self._from = (step, self.clock())
            self._saved_at, self._plan_at = step, step + _FIRST_PLAN
        if step == self._plan_at:
            self._plan(step)
        return self._due is not None and step >= self._due

    def saved(self, step: int, *, stalled_s: float, busy_s: float) -> None:
        """A save was made: what it took from training, and how long it took in the background."""
        self._cost_s, self._busy_s = max(self._cost_s, stalled_s), max(self._busy_s, busy_s)
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
        self.reason = f"next checkpoint at step {self._due}: {why}, {step_s:.3g} s a step"

    def _interval(self) -> tuple[float, str]:
        if self.every.seconds is not None:
            return self.every.seconds, f"every {self.every.seconds:g} s"
        prior = DEVICE_HOURS_PER_FAILURE / self.world
        between_s = 3600 * (prior + self.hours) / (1 + self.failures)
        cost = max(self._cost_s, 1e-3)
        best = best_interval(cost, between_s)
        seconds = max(best, 2 * self._busy_s)
        return seconds, (
            f"sqrt(2 C M) - C = {best:.3g} s with C = {cost:.3g} s a save and one failure in "
            f"M = {between_s / 3600:.3g} h "
            f"({self.failures} seen in {self.hours:.3g} h, {DEVICE_HOURS_PER_FAILURE:,.0f} device-hours each before)"
            + (f", and twice the {self._busy_s:.3g} s of a save" if seconds > best else "")
        )
