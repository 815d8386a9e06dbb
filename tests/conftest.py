"""The warm gloo world for tests that need processes; `pytest tests/pure` runs without torch."""

from __future__ import annotations

from pathlib import Path

import pytest

PURE = Path(__file__).parent / "pure"


def pytest_configure(config: pytest.Config) -> None:
    paths = [Path(config.invocation_params.dir, argument.split("::")[0]).resolve() for argument in config.args]
    if not all(path.is_relative_to(PURE) for path in paths):
        config.pluginmanager.import_plugin("shardwise.testing.plugin")
