"""Saving beside training: what is saved is the state at the call, one at a time; a failure is a finding."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from shardwise.checkpoint import snapshot
from shardwise.checkpoint.files import LocalFiles
from shardwise.checkpoint.store import Store
from shardwise.errors import CheckpointError
from shardwise.parallel.mesh import Mesh, open_mesh
from shardwise.testing.world import World
from shardwise.train.optimizers import adamw
from tests.parity.placing import LAYOUTS, State, place

T = TypeVar("T")


class Slow(LocalFiles):
    """Flushing takes a while."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def call(self, name: str, path: Path, act: Callable[[], T]) -> T:
        if name == "fsync":
            time.sleep(self.seconds)
        return act()


class Broken(LocalFiles):
    """Nothing more can be written once it broke."""

    broken = False

    def call(self, name: str, path: Path, act: Callable[[], T]) -> T:
        if self.broken and name == "write":
            raise OSError(28, os.strerror(28), str(path))
        return act()


def beside(path: str, layout: str) -> tuple[list[int], list[float], float]:
    """Three saves in the background while training, and its collectives, go on."""
    with open_mesh(LAYOUTS[layout]) as mesh:
        placed = place(layout, mesh)
        state = State(placed, adamw(placed, 0.01))
        store, truth, waits = Store(path, keep=5, files=Slow(0.15)), {}, []
        start = time.perf_counter()
        for _ in range(3):
            state.run(1)
            truth[state.step] = state.whole()
            saving = store.save_async(state)
            waits.append(saving.waited_s)
            assert not saving.has_ended
            state.run(1)
            mesh.all_reduce_sum(torch.ones(3))
        assert not store.take_findings()
        took = time.perf_counter() - start
        done = saving.wait()
        assert done.path == store.latest() and done.seconds > 0.15
        another = place(layout, mesh)
        fresh = State(another, adamw(another, 0.01))
        for step, whole in truth.items():
            store.load(fresh, Path(path) / f"step-{step:08d}")
            assert all(torch.equal(tensor, whole[name]) for name, tensor in fresh.whole().items())
        return sorted(truth), waits, took


def test_a_save_beside_training_holds_the_state_at_the_call(world: World, tmp_path: Path) -> None:
    for layout in ("fsdp2tp2", "pp2"):
        for steps, waits, _ in world(LAYOUTS[layout].world, beside, str(tmp_path / layout), layout):
            assert steps == [1, 3, 5]
            assert waits[0] < 0.1 < waits[1]  # the second waited for the first: never two at once


def all_have(mesh: Mesh, found: list[str]) -> bool:
    return bool(mesh.all_reduce_min(torch.tensor(float(len(found)))))


def test_a_failure_that_nobody_asks_for_is_said_by_the_next_save(tmp_path: Path) -> None:
    with open_mesh(LAYOUTS["one"]) as mesh:
        placed = place("one", mesh)
        state, files = State(placed, adamw(placed, 0.01)), Broken()
        store = Store(tmp_path, files=files)
        files.broken = True
        with pytest.raises(CheckpointError):
            store.save_async(state).wait()
        files.broken = False
        with pytest.warns(UserWarning, match="step 0 was not saved.*before the next save is due") as said:
            store.save_async(state).wait()
            store.save(state)
        assert len(said) == 1  # once
        assert [finding.id for finding in store.take_findings()] == ["checkpoint.save"] and not store.take_findings()


def failing(path: str) -> tuple[int, list[str], str]:
    with open_mesh(LAYOUTS["fsdp2"]) as mesh:
        placed = place("fsdp2", mesh)
        state = State(placed, adamw(placed, 0.01))
        files = Broken()
        store = Store(path, keep=5, files=files)
        state.run(1)
        store.save_async(state)
        store.wait()
        files.broken = mesh.rank == 1
        state.run(1)
        store.save_async(state)
        found: list[str] = []
        while not all_have(mesh, found):  # the loop's next steps
            state.run(1)
            found += [str(finding) for finding in store.take_findings()]
        failed = store.save_async(state)
        try:
            failed.wait()
        except CheckpointError as error:
            said = str(error)
        files.broken = False
        store.take_findings()
        state.run(1)
        step = store.save_async(state).wait().step
        assert not store.take_findings() and step == state.step
        mesh.barrier()
        return len(store.checkpoints()), found, said


def test_a_save_that_fails_is_a_finding_and_the_run_goes_on(world: World, tmp_path: Path) -> None:
    for count, [finding], said in world(2, failing, str(tmp_path)):
        assert count == 2
        assert "[checkpoint.save] step 2 was not saved; the run goes on" in finding
        assert "rank 1: No space left on device" in finding and "rank 1: No space left" in said
    assert not list(tmp_path.glob("*.partial-*"))


def leaves_at_once(path: str) -> None:
    with open_mesh(LAYOUTS["fsdp2"]) as mesh:
        placed = place("fsdp2", mesh)
        state = State(placed, adamw(placed, 0.01))
        state.run(1)
        Store(path, files=Slow(0.2)).save_async(state)


def test_the_mesh_is_left_when_the_save_is_complete(world: World, tmp_path: Path) -> None:
    world(2, leaves_at_once, str(tmp_path))
    assert (tmp_path / "latest").read_text() == "step-00000001\n"


def copies(path: str, where: str, late: bool) -> list[str]:
    """What is said when the copy of rank 1 alone fails; afterwards a save is made as if nothing had been."""
    with open_mesh(LAYOUTS["fsdp2"]) as mesh:
        placed = place("fsdp2", mesh)
        state = State(placed, adamw(placed, 0.01))
        state.run(1)
        store, right, said = Store(path), getattr(snapshot, where), list[str]()

        def fail(*args: Any, **more: Any) -> Any:
            if late and threading.current_thread() is threading.main_thread():
                return right(*args, **more)
            raise OSError(12, os.strerror(12))

        if mesh.rank == 1:
            setattr(snapshot, where, fail)
        try:
            store.save_async(state).wait()
        except CheckpointError as error:
            said.append(str(error))
        setattr(snapshot, where, right)
        store.wait()
        store.save(state)
        return [*said, *(str(finding.evidence) for finding in store.take_findings())]


@pytest.mark.parametrize(("where", "late"), [("host_memory", False), ("_copy", False), ("_copy", True)])
def test_a_copy_that_fails_on_one_rank_is_said_on_all(world: World, tmp_path: Path, where: str, late: bool) -> None:
    ranks = world(2, copies, str(tmp_path), where, late, timeout_s=60)
    assert ranks[0] == ranks[1] and "rank 1: " in ranks[0][0] and "Cannot allocate memory" in ranks[0][0]
    assert Store(tmp_path).latest() is not None
