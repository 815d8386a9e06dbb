"""What `make bench` makes of its measurements, and that its page still has the place for them."""

from __future__ import annotations

import pytest

from overhead import PAGE, Lap, markdown, pair, paste

MACHINE = {"date": "d", "cores": 2, "cpu": "c", "load_before": 0.1, "python": "p", "torch": "t"}


def laps(*seconds: float) -> list[Lap]:
    return [Lap(s, s / 2) for s in seconds]


def test_differences_are_taken_within_a_round() -> None:
    row = pair(laps(1.0, 10.0, 2.0), laps(1.1, 11.0, 2.2))  # the second round was slow for both
    assert row["ratio"] == pytest.approx(1.1)
    assert row["difference_us"] == pytest.approx(2e5)
    assert row["cpu_difference_us"] == pytest.approx(1e5)


@pytest.mark.parametrize(("ours", "met"), [(1.01, "yes"), (1.03, "**no**")])
def test_the_page_says_whether_the_target_is_met(ours: float, met: str) -> None:
    steps = [{"model": "small", "against": "torch DDP", "again_us": 0.0} | pair(laps(1.0), laps(ours))]
    assert markdown({"machine": MACHINE, "steps": steps, "start": None}).endswith(f"| {met} |")


def test_the_page_has_its_markers_and_keeps_the_rest() -> None:
    page = PAGE.read_text(encoding="utf-8")
    pasted = paste(page, "NEW")
    assert "NEW" in pasted and paste(pasted, "NEW") == pasted
    assert pasted.splitlines()[0] == page.splitlines()[0] and pasted.splitlines()[-1] == page.splitlines()[-1]


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(SystemExit, match="markers"):
        paste("no markers", "NEW")
