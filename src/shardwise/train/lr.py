"""Learning-rate schedules: pure functions of the step, as frozen, picklable values.

A schedule maps a step, counted from 0, to a factor of the base learning rate. Nothing is kept between calls, so
a resumed run continues on the curve by its step alone.

>>> schedule = warmup_cosine(10, 100)
>>> schedule(0), schedule(9), schedule(100)
(0.1, 1.0, 0.1)
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from shardwise.errors import UsageError
from shardwise.train.settings import ScheduleSettings

Shape = Literal["constant", "cosine", "stable-decay", "linear"]


@dataclass(frozen=True, kw_only=True)
class LrSchedule:
    """A warm-up line, then a shape that ends at `floor`. Made by the functions of this module.

    Step `s < warmup` gives `(s + 1) / warmup`: the first step already moves, step `warmup - 1` is at the full rate.
    From step `total` on the factor stays at `floor`.
    """

    shape: Shape
    warmup: int = 0
    total: int | None = None
    decay: int | None = None
    """Steps of the last part of `stable-decay`."""
    floor: float = 0.0

    def __call__(self, step: int) -> float:
        """Factor of the base learning rate at a step, counted from 0."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.total is None:
            return 1.0
        begin = self.total - self.decay if self.decay is not None else self.warmup
        if step <= begin:
            return 1.0
        if step >= self.total:
            return self.floor
        done = (step - begin) / (self.total - begin)
        left = 0.5 * (1 + math.cos(math.pi * done)) if self.shape == "cosine" else 1 - done
        return self.floor + (1 - self.floor) * left

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON."""
        return asdict(self)


def constant(warmup: int = 0) -> LrSchedule:
    """The full rate after a warm-up line of `warmup` steps.

    Raises:
        UsageError: a negative warm-up.

    >>> [constant(4)(step) for step in (0, 1, 3, 1000)]
    [0.25, 0.5, 1.0, 1.0]
    """
    return _checked("constant", LrSchedule(shape="constant", warmup=warmup))


def warmup_cosine(warmup: int, total: int, floor: float = 0.1) -> LrSchedule:
    """Warm-up, then half a cosine from 1 to `floor` at step `total` (Loshchilov and Hutter, arXiv 1608.03983).

    Raises:
        UsageError: `warmup` is not in [0, total), or `floor` not in [0, 1].

    >>> round(warmup_cosine(0, 100, floor=0.0)(50), 12)
    0.5
    """
    return _checked("warmup_cosine", LrSchedule(shape="cosine", warmup=warmup, total=total, floor=floor))


def warmup_linear(warmup: int, total: int, floor: float = 0.0) -> LrSchedule:
    """Warm-up, then a line from 1 to `floor` at step `total`.

    Raises:
        UsageError: `warmup` is not in [0, total), or `floor` not in [0, 1].

    >>> warmup_linear(0, 100)(75)
    0.25
    """
    return _checked("warmup_linear", LrSchedule(shape="linear", warmup=warmup, total=total, floor=floor))


def warmup_stable_decay(warmup: int, total: int, decay: int, floor: float = 0.0) -> LrSchedule:
    """Warm-up, the full rate, then a line to `floor` over the last `decay` steps (Hu et al., arXiv 2404.06395).

    Raises:
        UsageError: `warmup + decay` exceeds `total`, `decay` is below 1, or `floor` is not in [0, 1].

    >>> schedule = warmup_stable_decay(10, 100, decay=20)
    >>> schedule(80), schedule(90), schedule(100)
    (1.0, 0.5, 0.0)
    """
    schedule = LrSchedule(shape="stable-decay", warmup=warmup, total=total, decay=decay, floor=floor)
    return _checked("warmup_stable_decay", schedule)


def make_schedule(settings: ScheduleSettings, total: int) -> LrSchedule:
    """The learning rate's factor over a run of `total` steps."""
    warmup = settings.warmup or 0
    if settings.name == "constant":
        return constant(warmup)
    if settings.name == "cosine":
        return warmup_cosine(warmup, total, settings.final)
    if settings.name == "linear":
        return warmup_linear(warmup, total, settings.final)
    return warmup_stable_decay(warmup, total, max(1, round(settings.decay * total)), settings.final)


def _checked(name: str, schedule: LrSchedule) -> LrSchedule:
    counts = {"warmup": schedule.warmup, "total": schedule.total, "decay": schedule.decay}
    for dial, value in counts.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise UsageError(f"{name}: {dial}={value!r}; it must be a whole number of steps")
    if schedule.warmup < 0:
        raise UsageError(f"{name}: warmup={schedule.warmup}; it must be 0 or more steps")
    if schedule.total is not None and schedule.total <= schedule.warmup:
        raise UsageError(
            f"{name}: total={schedule.total} with warmup={schedule.warmup}; the total counts the warm-up steps and "
            f"must exceed them: raise total or lower warmup"
        )
    if schedule.decay is not None and schedule.total is not None:
        room = schedule.total - schedule.warmup
        if not 1 <= schedule.decay <= room:
            raise UsageError(f"{name}: decay={schedule.decay}; it must be 1 to total - warmup = {room} steps")
    if not 0 <= schedule.floor <= 1:
        raise UsageError(f"{name}: floor={schedule.floor}; it is a factor of the base rate, in [0, 1]")
    return schedule
