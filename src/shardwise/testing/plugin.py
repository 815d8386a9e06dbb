"""The pytest plugin: `world`, a warm forked gloo world, and `verify`, which compares runs in it with one process.

Enable it with `pytest_plugins = ["shardwise.testing.plugin"]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from shardwise.diagnose.prove import Target, make_subject
from shardwise.diagnose.verify import Options, Report, Verifier
from shardwise.plan.plan import Plan
from shardwise.testing.world import World
from shardwise.train.step import LossFn


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


@pytest.fixture(scope="session")
def verify(world: World, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Report]:
    """What `shardwise.verify` does, in the warm world; a test asserts that its report is `proven`.

    One process is run once per target, however many plans it is compared with.
    """
    known: dict[Any, Verifier] = {}

    def run(
        target: Target,
        plan: str | Plan,
        *,
        words: Sequence[str] = (),
        batch: Any = None,
        loss_fn: LossFn | None = None,
        options: Options | None = None,
    ) -> Report:
        written = Path(target).stat().st_mtime_ns if not callable(target) and Path(target).is_file() else 0
        key = (target, written, tuple(words), id(batch), loss_fn, options)
        if key not in known:
            subject = make_subject(target, tuple(words), batch, loss_fn)
            known[key] = Verifier(subject, world, tmp_path_factory.mktemp("verify"), options)
        return known[key].verify(plan if isinstance(plan, Plan) else Plan.load(plan))

    return run


_WORLD: pytest.StashKey[World] = pytest.StashKey()
