"""The warm gloo world for tests that need processes; `pytest tests/pure` runs without torch."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
PURE = ROOT / "pure"
TURNS = 3
# Two tests run side by side on two cores: a process with a thread per core spends its time waiting for its own threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    paths = [Path(config.invocation_params.dir, argument.split("::")[0]).resolve() for argument in config.args]
    if not all(path.is_relative_to(PURE) for path in paths):
        config.pluginmanager.import_plugin("shardwise.testing.plugin")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What the imports leave stays to the end: to walk it again and again takes a quarter of the suite's time."""
    gc.disable()
    try:
        collected = yield
    finally:
        gc.enable()
    gc.collect()
    gc.freeze()
    return collected


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`make soak` runs what would take too long for every change: `soak`, and the rest of each `share`.

    `make test` runs a third of the long tests, which third the commit decides; `pytest` by itself runs them all.
    """
    if os.environ.get("SHARDWISE_SOAK"):
        return
    for item in items:
        if item.get_closest_marker("soak") or not is_in_share(item):
            item.add_marker(pytest.mark.skip(reason="`make soak` runs it"))
    if commit := os.environ.get("SHARDWISE_TURN"):
        wait_for_turn(items, int(commit, 16) % TURNS)


def wait_for_turn(items: list[pytest.Item], turn: int) -> None:
    """Leave the long tests of other turns out."""
    lines = (ROOT / "long.txt").read_text(encoding="utf-8").splitlines()
    turns = {line: place % TURNS for place, line in enumerate(line for line in lines if not line.startswith("#"))}
    for item in items:
        own = turns.get(item.nodeid.removeprefix("tests/"), turn)
        if own != turn:
            item.add_marker(pytest.mark.skip(reason=f"`make test SHARDWISE_TURN={own}` runs it, and `make soak`"))


def is_in_share(item: pytest.Item) -> bool:
    """Whether a case runs at every change: of several tables the diagonals, so that all values of each are there."""
    share = item.get_closest_marker("share")
    if share is None or not isinstance(item, pytest.Function):
        return True
    number, place = next(iter(item.callspec.indices.values())), 0  # of the case, in the product of all tables
    for table in reversed([*item.iter_markers("parametrize")]):  # the outermost changes first
        number, row = divmod(number, len(table.args[1]))
        place += row
    return bool(place % share.args[0] == 0)
