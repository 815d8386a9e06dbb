from __future__ import annotations

import math
import pickle

import pytest

from shardwise.errors import UsageError
from shardwise.train.lr import LrSchedule, constant, warmup_cosine, warmup_linear, warmup_stable_decay

ALL = [constant(5), warmup_cosine(5, 40), warmup_linear(5, 40, 0.2), warmup_stable_decay(5, 40, 10)]


@pytest.mark.parametrize("schedule", ALL)
def test_warmup_is_a_line_that_starts_above_zero(schedule: LrSchedule) -> None:
    assert [schedule(step) for step in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


@pytest.mark.parametrize("schedule", ALL)
def test_is_a_picklable_frozen_value(schedule: LrSchedule) -> None:
    again = pickle.loads(pickle.dumps(schedule))
    assert again == schedule
    assert LrSchedule(**schedule.to_dict()) == schedule
    assert [again(step) for step in range(60)] == [schedule(step) for step in range(60)]
    with pytest.raises(AttributeError):
        schedule.warmup = 3  # type: ignore[misc]


@pytest.mark.parametrize("schedule", ALL[1:])
def test_falls_to_its_floor_and_stays(schedule: LrSchedule) -> None:
    after = [schedule(step) for step in range(5, 41)]
    assert after == sorted(after, reverse=True)
    assert schedule(40) == schedule(41) == schedule(10**9) == schedule.floor


def test_shapes_by_hand() -> None:
    assert warmup_cosine(0, 8, floor=0.2)(2) == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2)
    assert warmup_linear(2, 10)(6) == pytest.approx(0.5)
    assert [warmup_stable_decay(2, 10, 4)(s) for s in (2, 6, 7, 9)] == pytest.approx([1, 1, 0.75, 0.25])
    assert constant()(0) == 1.0


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: constant(-1), "warmup=-1"),
        (lambda: warmup_cosine(10, 10), "total=10"),
        (lambda: warmup_cosine(1, 10, floor=1.5), "floor=1.5"),
        (lambda: warmup_linear(1, 10, floor=math.nan), "floor=nan"),
        (lambda: warmup_linear(0.5, 10), "warmup=0.5"),  # type: ignore[arg-type]
        (lambda: warmup_stable_decay(5, 10, 6), "decay=6"),
        (lambda: warmup_stable_decay(5, 10, 0), "decay=0"),
    ],
)
def test_dials_that_mean_nothing_are_refused(make: object, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        make()  # type: ignore[operator]
