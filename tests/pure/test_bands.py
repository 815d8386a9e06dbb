"""The errors that the planner prints of itself are those that `make accuracy` found."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import accuracy
from published import read
from published.bands import KEPT, write_bands
from published.page import percent
from published.score import predict_all, spread, times
from shardwise.plan.band import band, kind_of
from shardwise.plan.plan import Plan

SAMPLE = Path(__file__).parents[1] / "data" / "published_sample.csv"


def test_the_bands_that_the_planner_reads_are_those_of_the_page() -> None:
    written = accuracy.PAGE.read_text(encoding="utf-8")
    said = tomllib.loads(accuracy.BANDS.read_text(encoding="utf-8"))
    for kind, entry in said["kinds"].items():
        line = next(line for line in written.splitlines() if line.startswith(f"| {kind} |"))
        for what, place in (("time", 3), ("memory", 4)):
            shown = line.split("|")[place].split("/")
            found = [percent(entry.get(what, {}).get(name)) for name in ("median", "p90")]
            assert [each.strip() for each in shown[:2]] == found, kind
    assert band("time", "h100").rows == said["time"]["rows"]


@pytest.mark.parametrize("page", ["README.md", "docs/planner.md"])
def test_the_pages_say_the_figures_of_the_bands(page: str) -> None:
    text = " ".join((accuracy.PAGE.parents[1] / page).read_text(encoding="utf-8").split())
    time, memory = band("time", "h100"), band("memory", "h100")
    assert (
        f"the step time of half is within {time.median:.0%} and of nine of ten within {time.p90:.0%}".replace("%", " %")
        in text
    )
    assert f"memory within {memory.median:.0%} and {memory.p90:.0%}".replace("%", " %") in text


def test_the_bands_of_a_file_of_rows(tmp_path: Path) -> None:
    rows = read(SAMPLE)[0]
    results, _ = predict_all(rows)
    file = tmp_path / "accuracy.toml"
    write_bands(file, results)
    said = tomllib.loads(file.read_text())
    numbers = spread(times(results))
    assert said["time"] == {"rows": len(times(results)), "median": numbers["median"], "p90": numbers["p90"]}
    assert all(said["kinds"][row.kind]["time"]["rows"] > 0 for row in rows if row.step_time)
    assert sum(entry["time"] for entry in said["devices"].values()) == said["time"]["rows"]
    assert said["cpu-time"] == KEPT
    file.write_text(file.read_text().replace("median = 0.5\n", "median = 0.4\n"))
    write_bands(file, results)
    assert tomllib.loads(file.read_text())["cpu-time"]["median"] == 0.4  # of no published row: it stays


def test_kinds_of_rows_are_kinds_of_plans() -> None:
    for row in read(SAMPLE)[0]:
        assert row.kind == kind_of(row.plan, experts=row.spec.kind == "moe")
    assert kind_of(Plan.parse("hsdp2x4"), experts=False) == "zero 3"
