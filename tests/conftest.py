"""The warm gloo world for tests that need processes; `pytest tests/pure` runs without torch."""

from __future__ import annotations

import gc
import os
from collections import Counter
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
    cases = Counter[str]()
    for item in items:
        is_left = item.get_closest_marker("soak") is not None
        share = item.get_closest_marker("share")
        if share is not None and not is_left:
            function = item.nodeid.partition("[")[0]
            is_left = cases[function] % share.args[0] > 0
            cases[function] += 1
        if is_left:
            item.add_marker(pytest.mark.skip(reason="`make soak` runs it"))
