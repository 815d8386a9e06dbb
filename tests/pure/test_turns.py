"""Which long tests run at a change: `tests/long.txt`, a third of them by turns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import ROOT, TURNS, wait_for_turn

LONG = [line for line in (ROOT / "long.txt").read_text(encoding="utf-8").splitlines() if not line.startswith("#")]


def test_every_line_is_a_test_that_is_there() -> None:
    assert len(set(LONG)) == len(LONG)
    for line in LONG:
        file, name = line.split("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert f"def {name.split('[')[0]}(" in text, f"tests/long.txt: {line} is no test; mend or drop the line"


class Item(SimpleNamespace):
    def add_marker(self, mark: Any) -> None:
        self.marks.append(mark)


@pytest.mark.parametrize("turn", range(TURNS))
def test_each_runs_at_one_turn_and_the_others_at_all(turn: int) -> None:
    items: list[Any] = [Item(nodeid=f"tests/{line}", marks=[]) for line in [*LONG, "pure/test_x.py::test_short"]]
    wait_for_turn(items, turn)
    runs = [item for item in items if not item.marks]
    assert runs[-1] is items[-1] and runs[:-1] == items[:-1][turn::TURNS]
    told = {mark.kwargs["reason"] for item in items for mark in item.marks}
    assert told == {f"`make test SHARDWISE_TURN={own}` runs it, and `make soak`" for own in range(TURNS) if own != turn}
