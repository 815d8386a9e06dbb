"""Twelve plans times twelve: what one saved, another loads and saves again, and not a bit differs.

Every twelfth pair at each change, so that each plan saves for one and loads from one; all in `make soak`.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shardwise.checkpoint.compare import diff
from shardwise.checkpoint.store import Store
from shardwise.errors import CheckpointError
from shardwise.models.decoder import Decoder, DecoderConfig
from shardwise.parallel.compose import apply
from shardwise.parallel.mesh import Mesh, open_mesh
from shardwise.plan.plan import Plan
from shardwise.testing.world import World
from shardwise.train.ema import Ema
from shardwise.train.loss import Loss, token_cross_entropy
from shardwise.train.optimizers import adamw
from shardwise.train.probe import Probe
from shardwise.train.state import TrainState
from shardwise.train.step import make_step

PLANS = (
    "dp1", "dp2", "fsdp2", "fsdp3", "fsdp4", "dp2 fsdp2", "tp2", "fsdp2 tp2", "pp2 / mb2", "pp2 fsdp2 / mb2",
    "pp2 tp2 / mb2", "dp2 fsdp2 tp2",
)  # fmt: skip
PROBED = "fsdp2 tp2"
APART = 1 if os.environ.get("SHARDWISE_SOAK") else 12
CONFIG = DecoderConfig(
    vocab_size=32, dim=16, num_layers=4, num_heads=2, num_kv_heads=2, ffn_dim=32, max_seq_len=8, tie_embeddings=True
)
ROWS = 24


def loss_fn(output: Tensor, batch: dict[str, Tensor]) -> Loss:
    return token_cross_entropy(output, batch["labels"])


def rows() -> dict[str, Tensor]:
    ids = torch.randint(0, 32, (ROWS, 9), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}


def make(mesh: Mesh, plan: str) -> TrainState:
    sample = {name: value[:2] for name, value in rows().items()}
    placed = apply(functools.partial(Decoder, CONFIG), Plan.parse(plan), mesh, seed=3, sample=sample)
    return TrainState(placed, adamw(placed, 1e-2), ema=Ema(placed, 0.9), seed=5)


def probe() -> Probe:
    whole = rows()
    return Probe([{name: value[i] for name, value in whole.items()} for i in range(4)], loss_fn)


def save(plan: str, path: str) -> None:
    with open_mesh(Plan.parse(plan)) as mesh:
        state = make(mesh, plan)
        step, share = make_step(state, loss_fn, clip=1.0), ROWS // mesh.batch.size
        mine = slice(share * mesh.batch.rank, share * (mesh.batch.rank + 1))
        for _ in range(2):
            step({name: value[mine] for name, value in rows().items()})
        Store(path, probe=probe()).save(state)


def load_and_save(plan: str, path: str, befores: tuple[str, ...]) -> list[str]:
    lines = []
    with open_mesh(Plan.parse(plan)) as mesh:
        state = make(mesh, plan)
        make_step(state, loss_fn)  # a run that goes on has one before it loads
        for i, before in enumerate(befores):
            for tensor in state.tensors().values():
                tensor.zero_()
            store = Store(Path(path) / f"from {before}".replace(" / ", " "), probe=probe())
            loaded = store.load_latest(state)
            assert loaded is not None and loaded.step == state.step == 2 and state.ema is not None
            assert state.ema.updates == 2
            lines.append(loaded.proof.line)
            Store(Path(path) / f"{plan} again {i}".replace(" / ", " "), keep=1).save(state)
    return lines


@pytest.fixture(scope="module")
def saved(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("matrix")
    for plan in PLANS:
        world(Plan.parse(plan).world, save, plan, str(path / f"from {plan}".replace(" / ", " ")))
    return path


@pytest.mark.share(2)
@pytest.mark.parametrize("after", PLANS)
def test_what_any_plan_saved_any_plan_loads_and_saves_again(world: World, saved: Path, after: str) -> None:
    befores = PLANS[PLANS.index(after) % APART :: APART]
    lines = world(Plan.parse(after).world, load_and_save, after, str(saved), befores, timeout_s=120)[0]
    for i, (before, line) in enumerate(zip(befores, lines, strict=True)):
        assert "checksums ok, probe loss" in line and "probe gradient norm" in line
        assert (" = " in line) or before != after
        assert ("~" in line) <= (before != after)
        again = saved / f"{after} again {i}".replace(" / ", " ")
        assert not diff(saved / f"from {before}".replace(" / ", " "), again), (before, after)


def other_code(plan: str, path: str) -> str:
    """The model's code changed since the save: tensors fit, and the numbers do not."""
    with open_mesh(Plan.parse(plan)) as mesh:
        state = make(mesh, plan)

        def other(output: Tensor, batch: dict[str, Tensor]) -> Loss:
            return loss_fn(output * 1.001, batch)

        changed = Probe(probe().rows, other)
        with pytest.raises(CheckpointError) as caught:
            Store(path, probe=changed).load_latest(state)
        few = Probe(probe().rows[:1], loss_fn)
        loaded = Store(path, probe=few).load_latest(state)
        assert (
            loaded is not None and loaded.proof.other_rows and "probe loss" not in loaded.proof.line
        )  # proves nothing
        return str(caught.value)


def test_a_probe_finds_what_tensors_do_not_show(world: World, saved: Path) -> None:
    for said in world(4, other_code, PROBED, str(saved / f"from {PROBED}")):
        assert "the probe's loss was" in said and "changed since the save" in said


def untouched(plan: str, path: str) -> bool:
    with open_mesh(Plan.parse(plan)) as mesh:
        state = make(mesh, plan)
        assert Store(path).load_latest(state)
        torch.manual_seed(9)
        before = {name: tensor.clone() for name, tensor in state.tensors().items()}
        scalars, draw = state.scalars(), torch.get_rng_state()
        first, second = (probe().measure(state) for _ in range(2))
        same = all(torch.equal(tensor.to_local() if hasattr(tensor, "to_local") else tensor,
                               before[name].to_local() if hasattr(before[name], "to_local") else before[name])
                   for name, tensor in state.tensors().items())  # fmt: skip
        no_grad = all(p.grad is None for p in state.placed.parameters())
        return (
            first == second
            and same
            and no_grad
            and state.scalars() == scalars
            and torch.equal(draw, torch.get_rng_state())
        )


def test_a_probe_changes_nothing(world: World, saved: Path) -> None:
    assert world(4, untouched, PROBED, str(saved / f"from {PROBED}")) == [True] * 4
