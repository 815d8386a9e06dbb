"""A save that dies, a disk that fills, files that rot: the previous checkpoint stays whole and is what loads."""

from __future__ import annotations

import os
import random
import resource
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.checkpoint import saving
from shardwise.checkpoint.directory import Directory
from shardwise.checkpoint.files import LOCAL, LocalFiles
from shardwise.checkpoint.reading import Reader
from shardwise.checkpoint.store import Store
from shardwise.errors import CheckpointError
from shardwise.parallel.mesh import Mesh, open_mesh
from shardwise.testing.world import World, WorldError
from shardwise.train.optimizers import adamw
from tests.checkpoints import entries
from tests.damages import FILES, Case, damage, restore
from tests.disks import disk
from tests.parity.placing import LAYOUTS, State, place

PLAN = LAYOUTS["fsdp2"]


def make(mesh: Mesh, layout: str = "fsdp2", **options: Any) -> State:
    placed = place(layout, mesh, **options)
    return State(placed, adamw(placed, 0.01))


def save_twice(path: str) -> list[torch.Tensor]:
    """Checkpoints of steps 1 and 2; the tensors at step 2."""
    with open_mesh(PLAN) as mesh:
        state = make(mesh)
        for _ in range(2):
            state.run(1)
            Store(path).save(state) if state.step == 1 else again(path, state)
        return list(state.whole().values())


def again(path: str, state: State) -> None:
    other, own = Store(path), make(state.mesh)
    other.load_latest(own)
    other.save(state)


def resume(path: str) -> tuple[int, list[torch.Tensor], list[str]]:
    with open_mesh(PLAN) as mesh, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = make(mesh)
        loaded = Store(path).load_latest(state)
        assert loaded is not None
        said = [item.reason for item in loaded.skipped]
        assert mesh.rank > 0 or bool(said) == any("in place of" in str(w.message) for w in caught)
        return state.step, list(state.whole().values()), said


def die_in_save(path: str, where: str) -> None:
    """Save step 3, with rank 1 (before the data) or rank 0 (later) killed at a point of it."""
    with open_mesh(PLAN) as mesh:
        state, target = make(mesh), Store(path)
        target.load_latest(state)
        state.run(1)

        def die(*_: object, **__: object) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)

        if where == "data" and mesh.rank == 1:
            saving.write_shard_file = die
        elif where == "manifest" and mesh.rank == 0:
            LocalFiles.write_whole = die  # type: ignore[method-assign]
        elif where == "rename" and mesh.rank == 0:
            LocalFiles.rename = die  # type: ignore[method-assign]
        target.save(state)


@pytest.mark.parametrize("where", ["data", "manifest", "rename"])
def test_a_rank_killed_in_a_save_leaves_the_old_checkpoint(world: World, tmp_path: Path, where: str) -> None:
    saved = world(2, save_twice, str(tmp_path))[0]
    with pytest.raises(WorldError, match="died|Connection|closed"):
        world(2, die_in_save, str(tmp_path), where)
    assert list(tmp_path.glob("step-00000003.partial-*"))
    for step, tensors, said in world(2, resume, str(tmp_path)):
        assert step == 2 and not said
        assert all(torch.equal(a, b) for a, b in zip(tensors, saved, strict=True))
    world(2, save_after_load, str(tmp_path))
    assert not list(tmp_path.glob("*.partial-*"))
    assert (tmp_path / "latest").read_text() == "step-00000003\n"


def save_after_load(path: str) -> None:
    with open_mesh(PLAN) as mesh:
        state, target = make(mesh), Store(path)
        target.load_latest(state)
        state.run(1)
        target.save(state)


def saved_until_killed(path: str) -> list[int]:
    """Five processes that save without a pause, each killed at another moment; what is whole after each."""
    steps = []
    for attempt in range(5):
        child = os.fork()
        if child == 0:
            with open_mesh(LAYOUTS["one"]) as mesh:
                state, target = make(mesh, "one"), Store(path, keep=2)
                target.load_latest(state)
                while True:
                    state.run(1)
                    target.save(state)
        while attempt == 0 and not list(Path(path).glob("latest")):
            time.sleep(0.01)
        time.sleep(0.35 + 0.037 * attempt)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = Directory(Path(path), LOCAL).listing()
        assert found.complete and not found.damaged
        for checkpoint, _ in found.complete:
            with Reader(checkpoint) as reader:
                reader.verify()
        steps.append(found.complete[0][1].step)
    return steps


def test_kill_at_any_moment_leaves_whole_checkpoints_only(world: World, tmp_path: Path) -> None:
    [steps] = world(1, saved_until_killed, str(tmp_path))
    assert steps == sorted(steps) and steps[-1] > steps[0]


def save_onto_a_full_disk(path: str, limit_rank: int) -> str:
    """Save step 3 where a rank can write but a little; the error on this rank."""
    with open_mesh(PLAN) as mesh:
        state, target = make(mesh, wide=20_000), Store(path)
        state.run(1)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if mesh.rank == limit_rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        try:
            with pytest.raises(CheckpointError) as caught:
                target.save(state)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        return str(caught.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_that_cannot_write_fails_all_and_cleans_up(world: World, tmp_path: Path, rank: int) -> None:
    for message in world(2, save_onto_a_full_disk, str(tmp_path), rank):
        assert f"saving step 1 to {tmp_path}: rank {rank}:" in message
    assert entries(tmp_path) == ["store.json"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB."""
    with disk(tmp_path, "1m") as path:
        yield path


def test_a_full_disk_says_so_and_keeps_the_old_checkpoint(world: World, small_disk: Path) -> None:
    world(2, save_twice, str(small_disk))
    for message in world(2, fill, str(small_disk)):
        assert "No space left" in message
    assert {step for step, _, _ in world(2, resume, str(small_disk))} == {2}


def fill(path: str) -> str:
    with open_mesh(PLAN) as mesh:
        state, target = make(mesh), Store(path)
        target.load_latest(state)
        big = make(mesh, wide=100_000)
        big.run(1)
        with pytest.raises(CheckpointError) as caught:
            target.save(big)
        return str(caught.value)


def random_damages(path: str, count: int) -> list[str]:
    """Each random damage of the newest checkpoint is named, and the one before it is loaded, on both ranks."""
    root, said = Path(path), []
    with open_mesh(PLAN) as mesh, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state, target, truth = make(mesh), Store(root), {}
        for _ in range(2):
            state.run(1)
            target.save(state)
            truth[state.step] = state.whole()
        newest, other = root / "step-00000002", root.parent / "other" / "step-00000003"
        state.run(1)
        Store(other.parent).save(state)
        kept = {name: (newest / name).read_bytes() for name in FILES}
        for i in range(count):
            mesh.barrier()
            done = damage(Case(newest, other, random.Random(i)), kept) if mesh.is_first else None
            mesh.barrier()
            loaded = target.load_latest(state)
            assert loaded is not None and loaded.step == state.step == 1, (i, done)
            assert all(torch.equal(tensor, truth[1][name]) for name, tensor in state.whole().items()), (i, done)
            [skipped] = loaded.skipped
            if done is not None:
                named = (f"/{name}" in skipped.reason for name in done.files)
                assert any(named) or "it was renamed" in skipped.reason, (i, done, skipped.reason)
                restore(newest, kept)
            said.append(skipped.reason)
        mesh.barrier()
        loaded = target.load_latest(state)
        assert loaded is not None and loaded.step == 2 and not loaded.skipped
    return said


def test_random_damage_is_named_and_the_checkpoint_before_loads(world: World, tmp_path: Path) -> None:
    count = 2000 if os.environ.get("SHARDWISE_SOAK") else 50
    for said in world(2, random_damages, str(tmp_path / "store"), count, timeout_s=900):
        assert len(set(said)) > 20


def load_damaged(path: str) -> str:
    with open_mesh(PLAN) as mesh:
        state = make(mesh)
        before = state.whole()
        with pytest.raises(CheckpointError) as caught:
            Store(path).load_latest(state)
        assert all(torch.equal(tensor, before[name]) for name, tensor in state.whole().items())
        return str(caught.value)


def test_a_store_without_a_whole_checkpoint_is_an_error_and_no_fresh_start(world: World, tmp_path: Path) -> None:
    world(2, save_twice, str(tmp_path))
    for step in (1, 2):
        path = tmp_path / f"step-0000000{step}" / "rank-00000.safetensors"
        data = bytearray(path.read_bytes())
        data[-60] ^= 1
        path.write_bytes(data)
    for message in world(2, load_damaged, str(tmp_path)):
        assert "none of the 2 checkpoints is whole" in message


def unwritable(path: str) -> str:
    with open_mesh(PLAN) as mesh:
        with pytest.raises(CheckpointError) as caught:
            Store(Path(path) / "below").save(make(mesh))
        return str(caught.value)


def test_a_path_that_cannot_be_made(world: World, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for message in world(2, unwritable, str(tmp_path / "file")):
        assert "cannot write (Not a directory" in message


def load_by_path(path: str, checkpoint: str) -> str:
    with open_mesh(LAYOUTS["one"]) as mesh:
        with pytest.raises(CheckpointError) as caught:
            Store(path).load(make(mesh, "one"), checkpoint)
        return str(caught.value)


def test_a_path_that_is_no_checkpoint(world: World, tmp_path: Path) -> None:
    [message] = world(1, load_by_path, str(tmp_path), str(tmp_path))
    assert f"{tmp_path}/manifest.json: no readable manifest" in message and "`shardwise ckpt convert`" in message
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    [message] = world(1, load_by_path, str(tmp_path), str(tmp_path / "run"))
    assert message.endswith(f"of a run give the store, {tmp_path}/run/checkpoints")
