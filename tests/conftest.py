"""The warm gloo world for tests that need processes; `pytest tests/pure` runs without torch."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator
from pathlib import Path

import pytest

PURE = Path(__file__).parent / "pure"
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
    """`make soak` runs what would take too long for every change: `soak`, and the rest of each `share`."""
    if os.environ.get("SHARDWISE_SOAK"):
        return
    for item in items:
        if item.get_closest_marker("soak") or not is_in_share(item):
            item.add_marker(pytest.mark.skip(reason="`make soak` runs it"))


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
