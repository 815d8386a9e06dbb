"""When a run saves."""

from __future__ import annotations

import math

import pytest

from shardwise.checkpoint.cadence import Cadence, Every, best_interval
from shardwise.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "found"),
    [(None, Every(steps=0)), (7, Every(steps=7)), ("0", Every(steps=0)), ("12", Every(steps=12)),
     ("1.5m", Every(seconds=90.0)), ("30s", Every(seconds=30.0)), ("2h", Every(seconds=7200.0)),
     ("auto", Every(auto=True))],
)  # fmt: skip
def test_parse(text: str | int | None, found: Every) -> None:
    assert Every.parse(text) == found


NONE = [
    "",
    "m",
    "-1",
    -1,
    "1d",
    "10 m",
    "0m",
    "Auto",
    "1e3s",
    "\u0661m",
    "9" * 400 + "h",
    "9" * 5000,
    10**30,
    "901000h",
]


@pytest.mark.parametrize("text", NONE)
def test_what_is_no_cadence(text: str | int) -> None:
    with pytest.raises(ConfigError, match="^checkpoint_every: found .{1,45}, needed a number of steps"):
        Every.parse(text)


def lost(interval: float, cost: float, between: float) -> float:
    """Expected time per unit of work with memoryless failures and free restarts (Daly 2006, eq. 13, R = 0)."""
    return between * (math.exp((interval + cost) / between) - 1) / interval


@pytest.mark.parametrize(("cost", "between"), [(0.03, 1e5), (1.0, 7200.0), (60.0, 86400.0), (100.0, 1000.0)])
def test_the_interval_is_the_best_one(cost: float, between: float) -> None:
    best = best_interval(cost, between)
    smallest = min(lost(best * 1.01**i, cost, between) for i in range(-300, 300))
    assert lost(best, cost, between) <= smallest * 1.01
    assert best_interval(between, between) == between


def run(
    every: Every, step_s: float, steps: int, world: int = 2, told: list[str] | None = None, **options: float
) -> tuple[list[int], Cadence]:
    now = [0.0]
    cadence = Cadence(every, world=world, share=lambda x: x, clock=lambda: now[0], **options)  # type: ignore[arg-type]
    saves = []
    for step in range(1, steps + 1):
        now[0] += step_s
        is_due = cadence.is_due(step)
        if told is not None and cadence.news:
            told.append(f"{step}: {cadence.news}")
        if is_due:
            saves.append(step)
            cadence.saved(step, stalled_s=0.03, busy_s=1.0)
    return saves, cadence


def test_minutes_become_steps() -> None:
    saves, cadence = run(Every(seconds=60.0), 0.5, 1000)
    assert saves[0] in range(118, 123)
    assert all(b - a in range(118, 123) for a, b in zip(saves, saves[1:], strict=False))
    assert "every 60 s" in cadence.reason and "0.5 s a step" in cadence.reason
    assert run(Every(seconds=0.1), 0.5, 10)[0] == [4, 5, 6, 7, 8, 9, 10]
    assert run(Every(steps=0), 0.5, 10)[0] == []


def test_auto_follows_cost_and_failures() -> None:
    few, calm = run(Every(auto=True), 0.5, 20_000)
    many, stormy = run(Every(auto=True), 0.5, 20_000, failures=99, hours=10.0)
    assert 5 < len(many) / len(few) < 15  # ten times as often: the root of a hundred
    assert "0 seen" in calm.reason and "99 seen in 10 h" in stormy.reason and "sqrt(2 C M)" in calm.reason
    assert few[0] == many[0] == 4  # to measure, before anything is assumed
    gap = few[2] - few[1]
    assert math.isclose(gap * 0.5, best_interval(0.03, 25_000 * 3600), rel_tol=0.02)


def test_the_reason_is_told_when_the_next_save_is_planned_and_nothing_is_made_up() -> None:
    told: list[str] = []
    run(Every(auto=True), 0.5, 3, told=told)  # ends before its first save
    early = "1: next checkpoint at step 4: the first of this start, early, to measure what a save costs"
    assert told == [early]
    told.clear()
    saves, _ = run(Every(auto=True), 0.5, 20_000, told=told)
    assert len(saves) > 3 and told[0] == early and len(told) == 2
    assert told[1].startswith("5: next checkpoint at step") and "with C = 0.03 s a save and one failure" in told[1]
    told.clear()
    run(Every(seconds=60.0), 0.5, 1000, told=told)
    assert told == ["4: next checkpoint at step 121: every 60 s, 0.5 s a step"]


def test_the_first_save_counts_until_there_is_another() -> None:
    _, cadence = run(Every(auto=True), 0.5, 6)
    for stalled_s, counts in ((0.02, "0.02"), (0.05, "0.05"), (0.01, "0.05")):
        cadence.saved(10, stalled_s=stalled_s, busy_s=0.1)
        assert not cadence.is_due(11) and f"with C = {counts} s a save" in cadence.reason
