"""Checkpoints that are kept as test data: every later version loads them, under any plan, bit by bit."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint.layout import numpy_bytes
from shardwise.checkpoint.store import Store
from shardwise.errors import CheckpointError
from shardwise.parallel.mesh import open_mesh
from shardwise.testing.world import World
from shardwise.train.optimizers import adamw
from shardwise.train.state import TrainState
from tests.parity.placing import LAYOUTS, State, place

KEPT = Path(__file__).parents[1] / "data" / "checkpoints"


def digests(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {name: hashlib.sha256(bytes(numpy_bytes(tensor))).hexdigest() for name, tensor in tensors.items()}


def make(path: str, layout: str) -> dict[str, str]:
    """How a kept checkpoint was made: two steps of the small model."""
    with open_mesh(LAYOUTS[layout]) as mesh:
        placed = place(layout, mesh)
        state = State(placed, adamw(placed, 0.01))
        state.run(2)
        Store(path).save(state)
        return digests(state.whole())


def keep(world: World, layout: str) -> None:
    """Make a new one, for a new schema: `keep(World(4), "fsdp2tp2")`."""
    path = KEPT / "schema-2" / layout
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    parts = world(LAYOUTS[layout].world, make, str(path / "checkpoints"), layout)
    found = {name: digest for part in parts for name, digest in part.items()}
    (path / "expected.json").write_text(json.dumps({"step": 2, "sha256": found}, indent=1) + "\n")


def load(path: str, layout: str) -> dict[str, str]:
    with open_mesh(LAYOUTS[layout]) as mesh:
        placed = place(layout, mesh)
        state = State(placed, adamw(placed, 0.01))
        loaded = Store(path).load_latest(state)
        assert loaded is not None and loaded.step == state.step == 2 and not loaded.skipped
        return digests(state.whole())


@pytest.mark.parametrize("layout", ["one", "pp2"])
@pytest.mark.parametrize("kept", sorted(KEPT.glob("schema-*/*/expected.json")), ids=lambda path: path.parent.name)
def test_kept_checkpoints_load(world: World, kept: Path, layout: str) -> None:
    expected = json.loads(kept.read_text())["sha256"]
    parts = world(LAYOUTS[layout].world, load, str(kept.parent / "checkpoints"), layout)
    found = {name: digest for part in parts for name, digest in part.items()}
    assert found == expected


def test_a_train_state_says_what_another_state_did_not_save() -> None:
    kept = KEPT / "schema-2" / "fsdp2tp2" / "checkpoints" / "step-00000002"
    with open_mesh(LAYOUTS["one"]) as mesh:
        placed = place("one", mesh)
        state = TrainState(placed, adamw(placed, 0.01))
        with pytest.raises(CheckpointError, match="found no skipped, .*of another class.*weights_only=True"):
            Store(KEPT / "nowhere").load(state, kept)
        assert state.step == 0
        loaded = Store(KEPT / "nowhere").load(state, kept, weights_only=True)
        assert loaded.proof.line == "resume proof: 9/9 tensors, checksums ok"


def pure(path: str, text: str) -> dict[str, torch.Tensor]:
    """Weights and fp32 masters of a `bf16-pure` run: as saved, where nothing lies there yet; else as another run has
    them that begins with these weights, one of which it does not train."""
    is_first = not Path(path).exists()
    plan = sw.Plan.parse(f"{text} / bf16-pure")
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(lambda: nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)), plan, mesh, seed=int(is_first))
        if not is_first:
            placed.named_parameters()["0.bias"].requires_grad_(False)
        state, store = TrainState(placed, adamw(placed, lr=1e-3)), Store(path)
        if is_first:
            sw.make_step(state, lambda y, x: sw.mean_over(y.float().square()))([torch.ones(2, 4)] * 2)
            store.save(state)
        else:
            assert store.load(state, path, weights_only=True).proof.line.startswith("resume proof: 7/7 tensors")
        found = {name: t for name, t in state.tensors().items() if "exp_avg" not in name and "step" not in name}
        return {n: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone() for n, t in found.items()}


@pytest.mark.parametrize("text", ["fsdp2", "dp2"])
def test_weights_alone_take_the_masters_that_are_stored(world: World, tmp_path: Path, text: str) -> None:
    """They began with the weights' 16 bits, though the checkpoint holds 32: another run, without a word."""
    saved = pure(str(tmp_path / "s"), "dp1")
    for found in world(2, pure, str(tmp_path / "s"), text):
        assert found.keys() == saved.keys() - {"optim.0.bias.master"}
        assert all(torch.equal(tensor, saved[name]) for name, tensor in found.items())
    weight = saved["model.0.weight"].float()
    assert not torch.equal(saved["optim.0.weight.master"], weight)
