"""A store that is called by one rank alone, in inference mode, or when its ranks have left."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.errors import CheckpointError, UsageError
from shardwise.parallel import together
from shardwise.testing import World


def state_on(mesh: sw.Mesh, plan: sw.Plan) -> sw.TrainState:
    placed = sw.apply(lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), plan, mesh, seed=3)
    return sw.TrainState(placed, sw.adamw(placed, lr=1e-2))


def trained(state: sw.TrainState, times: int) -> list[float]:
    step = sw.make_step(state, lambda output, _: sw.Loss(output.square().sum(), len(output)))
    rows = torch.arange(16.0).view(4, 4)
    return [step(rows).loss for _ in range(times)]


def alone(path: str, fifo: str, beside: bool) -> list[str]:
    """Rank 0 saves while the other one is in a message of its own, and does not come before it has been warned of."""
    plan, said = sw.Plan.parse("dp2"), []

    def warn(text: str, *_: object, **__: object) -> None:
        said.append(str(text))
        if "for the other ranks" in said[-1]:
            Path(fifo).write_text("said")

    with sw.open_mesh(plan) as mesh, warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(together, "LATE_S", 600.0 if mesh.rank else 0.2)
        patch.setattr(warnings, "warn", warn)
        state, store, total = state_on(mesh, plan), sw.Store(path), torch.ones(3)
        save = store.save_async if beside else store.save
        if mesh.rank and beside:
            message = dist.all_reduce(total, async_op=True)
        if mesh.rank:
            Path(fifo).read_text()
        save(state)
        if beside:
            message.wait() if mesh.rank else dist.all_reduce(total)
            assert total.tolist() == [2.0] * 3
    return said


@pytest.mark.parametrize("beside", [False, True])
def test_a_rank_that_saves_alone_says_so_and_its_messages_are_apart(world: World, tmp_path: Path, beside: bool) -> None:
    os.mkfifo(tmp_path / "fifo")
    first, second = world(2, alone, str(tmp_path / "s"), str(tmp_path / "fifo"), beside)
    assert any("waited 0.2 s for the other ranks; every rank must call it" in text for text in first)
    assert not any("for the other ranks" in text for text in second)


def left(path: str, is_first: bool) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(together, "_PATIENCE", 0.02)  # 1.2 s of the mesh's limit
        return left_alone(path, is_first)


def left_alone(path: str, is_first: bool) -> str:
    """Rank 1 leaves the loop and saves, the other one trains on; what ends that."""
    plan = sw.Plan.parse("dp2")
    with pytest.raises((CheckpointError, RuntimeError)) as caught, sw.open_mesh(plan, timeout_s=60) as mesh:
        state, store = state_on(mesh, plan), sw.Store(path)
        dist.barrier()
        if not is_first:
            store.save(state)
        if mesh.rank:
            store.save(state)
        dist.all_reduce(torch.ones(3))
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("is_first", [True, False])
def test_a_rank_that_alone_leaves_the_loop_and_saves_does_not_wait_for_ever(
    world: World, tmp_path: Path, is_first: bool
) -> None:
    """The first save of a store waited half an hour, whatever the mesh's limit; others ended in gloo's words."""
    training, saving = world(2, left, str(tmp_path / "s"), is_first)
    assert training.startswith("RuntimeError")
    assert saving.startswith("CheckpointError: saving step 0 to") and re.search(
        r"has waited \d+ s for the other ranks", saving
    )


def in_inference_mode(text: str, path: str) -> None:
    plan = sw.Plan.parse(text)
    with sw.open_mesh(plan) as mesh:
        state, store = state_on(mesh, plan), sw.Store(path)
        trained(state, 2)
        with torch.inference_mode():
            store.save(state)
        expected = trained(state, 2)
        other, store = state_on(mesh, plan), sw.Store(path)
        with torch.inference_mode():
            assert store.load_latest(other) is not None
        assert trained(other, 2) == expected
        with torch.inference_mode():
            store.save_async(other)


@pytest.mark.parametrize("text", ["dp1", "fsdp2"])
def test_inference_mode_around_a_store_changes_nothing(world: World, tmp_path: Path, text: str) -> None:
    world(sw.Plan.parse(text).world, in_inference_mode, text, str(tmp_path / "s"))


def begun(state: sw.TrainState) -> None:
    state.batches = iter(())
    next(sw.steps(state, len, until=9))


def when_closed(text: str, path: str) -> list[str]:
    plan, said = sw.Plan.parse(text), []
    with sw.open_mesh(plan) as mesh:
        state, store = state_on(mesh, plan), sw.Store(path)
        trained(state, 1)
    for call in (store.save, store.save_async, store.load_latest, begun):
        try:
            call(state)
        except UsageError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("text", ["dp1", "fsdp2"])
def test_what_is_called_behind_the_block_of_its_mesh_is_refused(world: World, tmp_path: Path, text: str) -> None:
    for said in world(sw.Plan.parse(text).world, when_closed, text, str(tmp_path / "s")):
        assert len(said) == 4
        assert all("found a mesh that is closed" in message and "indentation" in message for message in said)
    assert not (tmp_path / "s").exists()


def test_one_store_on_two_meshes(world: World, tmp_path: Path) -> None:
    world(2, twice, str(tmp_path / "s"))


def twice(path: str) -> None:
    plan, store = sw.Plan.parse("dp2"), sw.Store(path)
    for _ in range(2):
        with sw.open_mesh(plan) as mesh:
            state = state_on(mesh, plan)
            store.load_latest(state)
            trained(state, 1)
            store.save(state)
            trained(state, 1)
            store.save_async(state)
            for _ in range(3):  # one for each save: they share a group, and none is kept with its copy
                sw.Store(path).save_async(state)
            assert [key[1] for key in mesh.groups if key[0] == "checkpoints"] == [path] and len(mesh.at_exit) <= 2
    assert len(store.checkpoints()) == 3 and store.checkpoints()[0].name.endswith("4")
