"""Every module of tests is imported where workers are forked from, with all that it imports."""

from __future__ import annotations

import pytest

from shardwise.testing import World


@pytest.fixture(scope="module", autouse=True)
def warm(world: World, request: pytest.FixtureRequest) -> None:
    world.preload(request.module.__name__)
