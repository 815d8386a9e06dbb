"""A saver that ends, or whose disk fails, at every file-system call: always the old checkpoint or the new one."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from shardwise.checkpoint.directory import Directory
from shardwise.checkpoint.files import LOCAL, LocalFiles
from shardwise.checkpoint.reading import Reader
from shardwise.checkpoint.store import Store
from shardwise.errors import CheckpointError
from shardwise.parallel.mesh import Mesh, open_mesh
from shardwise.testing.world import World
from shardwise.train.kept.lock import RunLock
from shardwise.train.optimizers import adamw
from tests.checkpoints import entries
from tests.parity.placing import LAYOUTS, State, place

T = TypeVar("T")
READS = ("open", "read", "listdir")
SCENES = ("new", "next", "again")
"""The first save; a second one, after which the first goes; a second one of the same step."""


class Counted(LocalFiles):
    """Does something in place of, or in the middle of, the n-th call that changes the disk."""

    def __init__(self, at: int, act: Callable[[str, Callable[[], Any]], None]) -> None:
        self.at, self.act, self.count = at, act, 0

    def call(self, name: str, path: Path, act: Callable[[], T]) -> T:
        if name not in READS:
            self.count += 1
            if self.count == self.at:
                self.act(name, act)
        return act()


def end(_: str, __: Callable[[], Any]) -> None:
    os._exit(9)


def end_after_half(name: str, act: Callable[[], Any]) -> None:
    """A write of which half arrived; anything else arrived whole."""
    if name == "write":
        assert isinstance(act, partial)  # os.write(descriptor, piece)
        descriptor, piece = act.args
        os.write(descriptor, piece[: len(piece) // 2])
    else:
        act()
    os._exit(9)


def state_at(mesh: Mesh, step: int) -> State:
    placed = place("one", mesh)
    state = State(placed, adamw(placed, 0.01))
    state.run(step)
    return state


def prepared(path: Path, mesh: Mesh, scene: str) -> tuple[State, Store]:
    """What is about to be saved, and a store that holds what was saved before."""
    shutil.rmtree(path, ignore_errors=True)
    state = state_at(mesh, 1)
    store = Store(path, keep=1)
    if scene != "new":
        store.save(state)
        state.run(1)
    if scene == "again":
        state.step = 1
    return state, store


def resumed(path: Path, mesh: Mesh) -> dict[str, torch.Tensor] | None:
    state = state_at(mesh, 0)
    found = Store(path).load_latest(state)
    return state.whole() if found is not None else None


def equal(a: dict[str, torch.Tensor] | None, b: dict[str, torch.Tensor] | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def points(path: str, scene: str, half: bool) -> list[str]:
    """For each point: `old` or `new`, as a fresh process finds it; then the next save must work."""
    outcomes: list[str] = []
    with open_mesh(LAYOUTS["one"]) as mesh:
        for at in range(1, 200):
            where = Path(path) / f"store{at}"  # this process holds those before, and would end where another begins
            state, store = prepared(where, mesh, scene)
            old, new = resumed(where, mesh), state.whole()
            store._directory.files = Counted(at, end_after_half if half else end)
            child = os.fork()
            if child == 0:
                RunLock.join(where / "lock", print)  # the parent may hold the store
                store.save(state)
                os._exit(0)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert status in (0, 9), status
            found = resumed(where, mesh)
            assert equal(found, old) or equal(found, new), (scene, at)
            outcomes.append("new" if equal(found, new) else "old")
            listing = Directory(where, LOCAL).listing()
            assert not listing.damaged
            for checkpoint, _ in listing.complete:
                with Reader(checkpoint) as reader:
                    reader.verify()
            again = Store(where, keep=1)
            if found is not None:
                again.load_latest(state_at(mesh, 0))
            state.step = 5
            again.save(state)
            assert entries(where) == ["latest", "step-00000005", "store.json"], (
                scene,
                at,
                os.listdir(where),
            )
            if status == 0:
                return outcomes
    raise AssertionError("it never came to an end")


@pytest.mark.parametrize(("scene", "half"), [*((scene, False) for scene in SCENES), ("next", True), ("again", True)])
def test_a_saver_that_ends_at_any_call_leaves_the_old_or_the_new(
    world: World, tmp_path: Path, scene: str, half: bool
) -> None:
    [outcomes] = world(1, points, str(tmp_path), scene, half)
    text = " ".join(outcomes)
    assert re.fullmatch(r"(old )+(new ?)+", text + " "), text  # it changes once
    assert len(outcomes) > 15


CODES = (errno.EIO, errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.ESTALE)


def failures(path: str, scene: str) -> int:
    """Every call fails once, in turn: the save says so or is complete, and the next one works."""
    where, count = Path(path) / "store", 0
    with open_mesh(LAYOUTS["one"]) as mesh:
        for at in range(1, 200):
            state, store = prepared(where, mesh, scene)
            old, new = resumed(where, mesh), state.whole()
            code = CODES[at % len(CODES)]

            def fail(name: str, _: Callable[[], Any], code: int = code) -> None:
                raise OSError(code, os.strerror(code), name)

            store._directory.files = files = Counted(at, fail)
            try:
                with warnings.catch_warnings(record=True) as told:  # the save is complete, and `latest` is the old one
                    warnings.simplefilter("always")
                    store.save(state)
                assert equal(resumed(where, mesh), new)
                count += any(os.strerror(code) in str(each.message) for each in told)
            except CheckpointError as error:
                count += 1
                assert os.strerror(code) in str(error), error
                found = resumed(where, mesh)
                assert equal(found, old) or equal(found, new)
            store._directory.files = LOCAL
            state.step = 5
            store.save(state)
            assert entries(where) == ["latest", "step-00000005", "store.json"], (at, os.listdir(where))
            if files.count < at:
                return count
    raise AssertionError("it never came to an end")


@pytest.mark.parametrize("scene", SCENES)
def test_a_disk_that_fails_at_any_call_is_said_and_harms_nothing(world: World, tmp_path: Path, scene: str) -> None:
    [count] = world(1, failures, str(tmp_path), scene)
    assert count > 15


SAVER = """
import sys
from pathlib import Path
from shardwise.parallel.mesh import open_mesh
from tests.failure.test_store_points import LAYOUTS, Store, state_at
with open_mesh(LAYOUTS["one"]) as mesh:
    state, store = state_at(mesh, 0), Store(sys.argv[1], keep=1)
    store.load_latest(state)
    state.run(1)
    Path(sys.argv[1], "ready").touch()
    store.save(state)
"""


def open_and_resume(path: str) -> int:
    with open_mesh(LAYOUTS["one"]) as mesh:
        state = state_at(mesh, 0)
        found = Store(path).load_latest(state)
        assert found is not None
        assert equal(state.whole(), state_at(mesh, found.step).whole())
        return found.step


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
@pytest.mark.parametrize(  # test_store_syscalls.py kills at more of them, and on both ranks
    "call",
    ["rename", *(pytest.param(c, marks=pytest.mark.soak) for c in ("fsync", "unlink,unlinkat", "mkdir", "rmdir"))],
)
def test_sigkill_at_system_calls(world: World, tmp_path: Path, call: str) -> None:
    """The kernel's own view: killed on entry to the n-th such call, in every thread of the saver."""
    where = tmp_path / "store"
    world(1, first_save, str(where))
    root = Path(__file__).parents[2]
    for when in range(1, 40):
        before = world(1, open_and_resume, str(where))[0]
        command = ["strace", "-f", "-o", "/dev/null", "-e", f"inject={call}:signal=KILL:when={when}"]
        done = subprocess.run(
            [*command, sys.executable, "-c", SAVER, str(where)], cwd=root, capture_output=True, timeout=120
        )
        after = world(1, open_and_resume, str(where))[0]
        assert after in (before, before + 1)
        if done.returncode == 0:
            assert when > 1
            return
    raise AssertionError("it was killed every time")


def first_save(path: str) -> None:
    with open_mesh(LAYOUTS["one"]) as mesh:
        Store(path, keep=1).save(state_at(mesh, 1))
