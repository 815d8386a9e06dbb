"""The pytest plugin: `world`, a warm forked gloo world.

Enable it with `pytest_plugins = ["shardwise.testing.plugin"]`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

# imported before the fork, so that no worker imports them again
import torch.distributed.checkpoint  # noqa: F401
import torch.distributed.fsdp  # noqa: F401
import torch.distributed.pipelining  # noqa: F401
import torch.distributed.tensor.parallel  # noqa: F401

from shardwise.testing.world import World


def pytest_configure(config: pytest.Config) -> None:
    """Fork the pool before any test has started a thread."""
    config.stash[_WORLD] = World(8)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the pool."""
    if _WORLD in config.stash:
        config.stash[_WORLD].close()


@pytest.fixture(scope="session")
def world(pytestconfig: pytest.Config) -> Iterator[World]:
    """`world(n, function, *args)`: run a module-level function in n processes; a list of results per rank."""
    yield pytestconfig.stash[_WORLD]


_WORLD: pytest.StashKey[World] = pytest.StashKey()
