"""When a run saves."""

from __future__ import annotations

import math

import pytest

from shardwise.checkpoint.cadence import Cadence, Every, best_interval
from shardwise.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "found"),
    [(7, Every(steps=7)), ("0", Every(steps=0)), ("12", Every(steps=12)), ("1.5m", Every(seconds=90.0)),
     ("30s", Every(seconds=30.0)), ("2h", Every(seconds=7200.0)), ("auto", Every(auto=True))],
)  # fmt: skip
def test_parse(text: str | int, found: Every) -> None:
    assert Every.parse(text) == found


@pytest.mark.parametrize("text", ["", "m", "-1", "1d", "10 m", "0m", "Auto", "1e3s", "\u0661m"])
def test_what_is_no_cadence(text: str) -> None:
    with pytest.raises(ConfigError, match="checkpoint_every"):
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


def run(every: Every, step_s: float, steps: int, world: int = 2, **options: float) -> tuple[list[int], Cadence]:
    now = [0.0]
    cadence = Cadence(every, world=world, share=lambda x: x, clock=lambda: now[0], **options)  # type: ignore[arg-type]
    saves = []
    for step in range(1, steps + 1):
        now[0] += step_s
        if cadence.is_due(step):
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
    gap = few[2] - few[1]
    assert math.isclose(gap * 0.5, best_interval(0.03, 25_000 * 3600), rel_tol=0.02)
