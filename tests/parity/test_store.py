"""Saved under one layout, loaded under another; what does not fit is refused before anything changes."""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from shardwise.checkpoint.directory import Directory
from shardwise.checkpoint.files import LOCAL
from shardwise.checkpoint.store import Store
from shardwise.errors import CheckpointError, UsageError
from shardwise.models.decoder import Decoder, DecoderConfig
from shardwise.parallel.compose import apply
from shardwise.parallel.mesh import Mesh, open_mesh
from shardwise.plan.plan import Plan
from shardwise.testing.world import World
from shardwise.train.loss import token_cross_entropy
from shardwise.train.lr import warmup_cosine
from shardwise.train.optimizers import OPTIMIZERS, adamw, sgd
from shardwise.train.state import TrainState
from shardwise.train.step import make_step
from tests.parity.placing import LAYOUTS, State, full, place


def make(layout: str, mesh: Mesh, kind: str = "adamw", **options: Any) -> State:
    placed = place(layout, mesh, **options)
    return State(placed, OPTIMIZERS[kind](placed, 0.01))


def train_and_save(layout: str, path: str, kind: str) -> dict[str, Tensor]:
    """Three steps, a save, one step more: the tensors at the save, and at the end under `end.`."""
    with open_mesh(LAYOUTS[layout]) as mesh:
        state = make(layout, mesh, kind)
        state.run(3)
        Store(path).save(state)
        saved = state.whole()
        state.run(1)
        return saved | {f"end.{name}": tensor for name, tensor in state.whole().items()}


def load_and_go_on(layout: str, path: str, kind: str) -> dict[str, Tensor]:
    with open_mesh(LAYOUTS[layout]) as mesh:
        state = make(layout, mesh, kind)
        loaded = Store(path).load_latest(state)
        assert loaded is not None and loaded.step == state.step == 3 and not loaded.skipped
        count = len(loaded.manifest.tensors)
        assert loaded.proof.line == f"resume proof: {count}/{count} tensors, checksums ok"
        there = state.whole()
        state.run(1)
        return there | {f"end.{name}": tensor for name, tensor in state.whole().items()}


def union(results: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of all ranks; those that several ranks hold are equal."""
    merged: dict[str, Tensor] = {}
    for result in results:
        for name, tensor in result.items():
            assert torch.equal(merged.setdefault(name, tensor), tensor), name
    return merged


PAIRS = [
    ("fsdp4", "fsdp4"), ("fsdp4", "fsdp2"), ("fsdp4", "dp2"), ("fsdp4", "tp2"), ("fsdp4", "one"), ("one", "fsdp4"),
    ("fsdp2tp2", "fsdp2tp2"), ("fsdp2tp2", "one"), ("fsdp2tp2", "pp2"), ("hsdp2x2", "fsdp2tp2"), ("pp2", "fsdp4"),
    ("fsdp2", "pp2fsdp2"), ("pp2fsdp2", "tp2"), ("pp2fsdp2", "pp2"),
]  # fmt: skip


@pytest.mark.share(4)
@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_any_layout_loads_into_any_other(world: World, tmp_path: Path, before: str, after: str) -> None:
    saved = union(world(LAYOUTS[before].world, train_and_save, before, str(tmp_path), "adamw"))
    loaded = union(world(LAYOUTS[after].world, load_and_go_on, after, str(tmp_path), "adamw"))
    assert saved.keys() == loaded.keys()
    for name, tensor in saved.items():
        if not name.startswith("end."):
            assert torch.equal(loaded[name], tensor), name  # not a bit lost on the way
        elif before == after:
            assert torch.equal(loaded[name], tensor), name  # and the run goes on as if it had not stopped
        else:
            torch.testing.assert_close(loaded[name], tensor, rtol=1e-6, atol=1e-7)


@pytest.mark.share(4)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimizers_state_moves(world: World, tmp_path: Path, kind: str) -> None:
    saved = union(world(2, train_and_save, "fsdp2", str(tmp_path), kind))
    loaded = union(world(2, load_and_go_on, "tp2", str(tmp_path), kind))
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items() if not name.startswith("end."))


def untrained(path: str) -> int:
    """A checkpoint of step 0 has no optimizer state; loading it leaves none."""
    with open_mesh(LAYOUTS["fsdp2"]) as mesh:
        Store(path).save(make("fsdp2", mesh))
        state = make("fsdp2", mesh)
        state.run(2)
        Store(path).load_latest(state)
        return len(state.optimizer.state_tensors())


def test_a_run_that_has_not_stepped(world: World, tmp_path: Path) -> None:
    assert world(2, untrained, str(tmp_path)) == [0, 0]


def keep_two(path: str) -> list[list[str]]:
    with open_mesh(LAYOUTS["fsdp2"]) as mesh:
        state, store, seen = make("fsdp2", mesh), Store(path, keep=2), []
        for _ in range(4):
            state.run(1)
            handle = store.save(state)
            assert handle.wait().path == store.latest()
            mesh.barrier()
            seen.append([p.name for p in store.checkpoints()])
        store.load(state, Path(path) / "step-00000003")  # back to an older step: the newest save stays the newest
        store.save(state)
        mesh.barrier()
        seen.append([p.name for p in store.checkpoints()])
        return seen


def test_pruning_keeps_the_newest_saves(world: World, tmp_path: Path) -> None:
    one, two, three, four = (f"step-0000000{i}" for i in (1, 2, 3, 4))
    for seen in world(2, keep_two, str(tmp_path)):
        assert seen == [[one], [two, one], [three, two], [four, three], [three, four]]
    assert (tmp_path / "latest").read_text() == f"{three}\n"
    assert sorted(os.listdir(tmp_path)) == ["latest", "lock", three, four, "store.json"]


def manifest_of(path: str) -> None:
    with open_mesh(LAYOUTS["fsdp2tp2"]) as mesh:
        state = make("fsdp2tp2", mesh)
        state.run(1)
        Store(path).save(state)


def test_the_manifest_says_what_is_there(world: World, tmp_path: Path) -> None:
    world(4, manifest_of, str(tmp_path))
    directory = tmp_path / "step-00000001"
    manifest = json.loads((directory / "manifest.json").read_text())
    assert manifest["plan"] == str(LAYOUTS["fsdp2tp2"])
    assert manifest["mesh"] == {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 2}
    assert manifest["scalars"] == {"step": 1}
    for name in ("model.up.weight", "optim.up.weight.exp_avg"):
        entry = manifest["tensors"][name]
        assert (entry["shape"], entry["dtype"]) == ([7, 6], "float32")
        assert sum(rows * columns for _, _, (rows, columns), _ in entry["pieces"]) == 42
    files = [entry["name"] for entry in manifest["files"]]
    assert files == [f"rank-0000{rank}.safetensors" for rank in range(4)]
    assert sorted(os.listdir(directory)) == sorted([*files, "manifest.json"])
    for name in files:  # a foreign reader of the layout reads the parts
        with safe_open(directory / name, "pt") as file:
            assert set(file.keys()) and all(file.get_tensor(key) is not None for key in file.keys())  # noqa: SIM118


def load_wrong(path: str, what: str) -> tuple[str, bool]:
    """The error, and whether the state is as it was."""
    with open_mesh(LAYOUTS["fsdp2"]) as mesh:
        state = make("fsdp2", mesh, wide=9 if what == "shape" else 7)
        if what == "optimizer":
            state.optimizer = sgd(state.placed, 0.1, momentum=0.9)
        if what == "type":
            state = make("fsdp2", mesh, dtype=torch.float64)
        if what == "missing":
            state.placed.module.register_parameter("added", torch.nn.Parameter(torch.ones(3)))
            state.optimizer = adamw(state.placed, 0.01)
        if what == "renamed":
            state.placed.module.cubes = state.placed.module.cube
            del state.placed.module.cube
            state.optimizer = adamw(state.placed, 0.01)
        if what == "compiled":
            inner = torch.nn.ParameterDict({"_orig_mod": state.placed.module.cube})
            del state.placed.module.cube
            state.placed.module.cube = inner
            state.optimizer = adamw(state.placed, 0.01)
        if what == "extra":
            del state.placed.module.cube
            state.optimizer = adamw(state.placed, 0.01)
        before = state.whole()
        with pytest.raises(CheckpointError) as caught:
            Store(path).load_latest(state)
        after = state.whole()
        same = before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
        return str(caught.value), same and state.step == 0


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("shape", "model.up.weight"),
        ("type", "float64"),
        ("optimizer", "optim.cube.momentum_buffer"),
        (
            "missing",
            "are not in this run []; it has less than this run; of another model, `shardwise ckpt export` it",
        ),
        ("optimizer", "; only the optimizer is another one: weights_only=True begins with the weights and a new one;"),
        ("compiled", "; their names differ by what torch.compile(module) puts in; module.compile() does not"),
        ("renamed", "model.cubes: did you mean 'model.cube'?; load"),
        ("extra", "model.cube"),
    ],
)
def test_another_model_is_refused_and_nothing_changes(world: World, tmp_path: Path, what: str, named: str) -> None:
    world(2, train_and_save, "fsdp2", str(tmp_path), "adamw")
    for message, untouched in world(2, load_wrong, str(tmp_path), what):
        assert named in message
        assert untouched


def other_run(path: str) -> str:
    with open_mesh(LAYOUTS["fsdp2"]) as mesh:
        state = make("fsdp2", mesh)
        state.run(1)
        with pytest.raises(CheckpointError) as caught:
            Store(path).save(state)
        Store(path).load_latest(state)
        return str(caught.value)


def test_a_directory_of_another_run_is_not_written_into(world: World, tmp_path: Path) -> None:
    world(2, train_and_save, "fsdp2", str(tmp_path), "adamw")
    for message in world(2, other_run, str(tmp_path)):
        assert "holds another run, at step 3" in message


def load_with_a_stranger(path: str) -> tuple[int, str, str]:
    """What is loaded where a newer checkpoint of another run was copied in; and what where that is all there is."""
    with open_mesh(LAYOUTS["fsdp2"]) as mesh:
        state, alone = make("fsdp2", mesh), Path(path) / "alone"
        with pytest.warns(UserWarning, match="loaded in place of step-00000005") if mesh.rank == 0 else nullcontext():
            loaded = Store(f"{path}/own").load_latest(state)
        assert loaded is not None
        with pytest.raises(CheckpointError) as caught:
            Store(alone).load_latest(state)
        return loaded.step, loaded.skipped[0].reason, str(caught.value)


def test_a_checkpoint_of_another_run_is_named_and_not_gone_on_from(world: World, tmp_path: Path) -> None:
    """Its maths may be another, and the run's record knows nothing of it."""
    world(2, train_and_save, "fsdp2", str(tmp_path / "own"), "adamw")
    world(2, save_later, str(tmp_path / "other"))
    shutil.copytree(tmp_path / "other" / "step-00000005", tmp_path / "own" / "step-00000005")
    shutil.copytree(tmp_path / "other", tmp_path / "alone")
    shutil.copy(tmp_path / "own" / "store.json", tmp_path / "alone")
    for step, reason, alone in world(2, load_with_a_stranger, str(tmp_path)):
        assert step == 3
        assert all("step-00000005: is of the run" in text and "--resume" in text for text in (reason, alone))


def save_later(path: str) -> None:
    with open_mesh(LAYOUTS["fsdp2"]) as mesh:
        state = make("fsdp2", mesh)
        state.run(5)
        store = Store(path)
        for _ in range(2):  # a larger sequence than that of the other store
            store.save(state)


def test_the_mark_of_a_run_that_saved_nothing_gives_way_to_that_of_the_one_that_does(tmp_path: Path) -> None:
    """A first start that died in its first save leaves `store.json`; the ranks of the next have another run's id."""
    directory = Directory(tmp_path / "store", LOCAL)
    directory.begin(1, "a" * 32)
    directory.begin(1, "b" * 32)
    assert directory.run_id() == "b" * 32


def test_a_place_that_cannot_be_looked_at_is_not_taken_for_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save took it so, and said that the directory was not empty."""
    directory = Directory(tmp_path / "store", LOCAL)
    partial = directory.begin(1, "a" * 32)
    final = tmp_path / "store" / "step-00000001"
    final.mkdir()
    look = os.lstat

    def failing(path: Path) -> os.stat_result:
        if path == final:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return look(path)

    monkeypatch.setattr(os, "lstat", failing)
    with pytest.raises(CheckpointError, match="step-00000001: cannot be read .Input/output error"):
        directory._publish(partial, 1)


def save_two(path: str) -> list[str]:
    """What is said of a second state of a script in the store of the first one; it may go on from the first."""
    with open_mesh(LAYOUTS["dp2"]) as mesh:
        generator, critic = (TrainState(placed, adamw(placed, 0.1)) for placed in (place("dp2", mesh) for _ in "ab"))
        store = Store(path)
        store.save(generator)
        with pytest.raises(UsageError, match="a store for each state") as caught:
            store.save_async(critic)
        Store(f"{path}/critic").save(critic)
        store.save(generator)
        store.load_latest(critic)
        critic.step += 1
        store.save(critic)
        return [str(caught.value), *(checkpoint.name for checkpoint in store.checkpoints())]


def test_another_state_does_not_replace_the_checkpoints_of_the_first(world: World, tmp_path: Path) -> None:
    """At each step the second one took the place of the first, and what was loaded later was the second."""
    for said, *names in world(2, save_two, str(tmp_path)):
        assert str(tmp_path) in said and names == ["step-00000001", "step-00000000"]


def disagree(path: str) -> str:
    with open_mesh(LAYOUTS["dp2"]) as mesh:
        state = make("dp2", mesh)
        state.step = 5 + mesh.rank
        with pytest.raises(CheckpointError) as caught:
            Store(path).save(state)
        return str(caught.value)


def test_ranks_at_different_steps_do_not_save(world: World, tmp_path: Path) -> None:
    assert all("ranks disagree on 'step'" in message for message in world(2, disagree, str(tmp_path)))
    assert not list(tmp_path.glob("step-*"))


def test_paths_that_cannot_be_a_store(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(CheckpointError, match="it is a file"):
        Store(file)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "model.safetensors").write_text("")
    with pytest.raises(CheckpointError, match="model.safetensors"):
        Store(tmp_path / "theirs")
    with pytest.raises(UsageError, match="keep"):
        Store(tmp_path / "new", keep=0)
    assert Store(tmp_path / "new").latest() is None


def train_state(plan: str, path: str, batches: int) -> dict[str, Tensor]:
    """Load what is there, train to a number of steps through the real step, save."""
    with open_mesh(Plan.parse(plan)) as mesh:
        config = DecoderConfig(
            vocab_size=32, dim=16, num_layers=4, num_heads=2, num_kv_heads=2, ffn_dim=32, max_seq_len=8
        )
        draw = torch.Generator().manual_seed(1)
        ids = torch.randint(0, 32, (batches, 8, 9), generator=draw)
        rows = slice(8 // mesh.batch.size * mesh.batch.rank, 8 // mesh.batch.size * (mesh.batch.rank + 1))
        sample = {"input_ids": ids[0, :2, :-1], "labels": ids[0, :2, 1:]}
        placed = apply(functools.partial(Decoder, config), Plan.parse(plan), mesh, seed=3, sample=sample)
        state = TrainState(placed, adamw(placed, 1e-2), schedule=warmup_cosine(2, 10))
        target = Store(path)
        target.load_latest(state)
        step = make_step(state, lambda out, batch: token_cross_entropy(out, batch["labels"]), clip=1.0)
        while state.step < batches:
            window = ids[state.step, rows]
            step({"input_ids": window[:, :-1], "labels": window[:, 1:]})
        target.save(state)
        return {name: full(tensor) for name, tensor in state.tensors().items()}


@pytest.mark.share(4)
@pytest.mark.parametrize("after", ["fsdp2", "pp2 / mb2", "tp2", "fsdp2 tp2"])
def test_a_real_run_goes_on_under_another_plan(world: World, tmp_path: Path, after: str) -> None:
    world(2, train_state, "fsdp2", str(tmp_path / "cut"), 2)
    cut = union_close(world(Plan.parse(after).world, train_state, after, str(tmp_path / "cut"), 4))
    whole = union_close(world(2, train_state, "fsdp2", str(tmp_path / "whole"), 4))
    assert cut.keys() == whole.keys()
    for name, tensor in whole.items():
        if after == "fsdp2":
            assert torch.equal(cut[name], tensor), name
        else:
            torch.testing.assert_close(cut[name], tensor, rtol=1e-4, atol=1e-5)


def union_close(results: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor for result in results for name, tensor in result.items()}
