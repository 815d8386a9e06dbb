"""A checkpoint of one precision in a run of another: bit by bit, under other meshes, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise.errors import CheckpointError
from shardwise.launch.rank.resuming import begin
from shardwise.testing.world import World
from tests.parity.placing import full

STEPS, ROWS, SEQ = 3, 8, 8
SIZES = sw.GPTConfig(vocab_size=18, dim=12, num_layers=2, num_heads=2, max_seq_len=SEQ)
OPTIMIZERS = {
    "adamw": lambda placed: sw.adamw(placed, 1e-2),
    "few bits": lambda placed: sw.adamw(placed, 1e-2, state_dtype="bf16-stochastic"),
    "sgd": lambda placed: sw.sgd(placed, 1e-2, momentum=0.9),
}
MASTER = ".master"


def state_of(plan: str, mesh: sw.Mesh, optimizer: str) -> sw.TrainState:
    placed = sw.apply(lambda: sw.GPT(SIZES), sw.Plan.parse(plan), mesh, seed=1)
    return sw.TrainState(placed, OPTIMIZERS[optimizer](placed), ema=sw.Ema(placed, 0.5))


def train(state: sw.TrainState, steps: int) -> None:
    """The same rows in the same steps, whatever the mesh."""
    step = sw.make_step(state, lambda logits, batch: sw.token_cross_entropy(logits, batch[1]))
    plan, mesh = state.placed.plan, state.mesh
    shards, count = plan.axes.dp_shard * plan.axes.dp_replicate, plan.batch.micro_batches
    place = mesh.index("dp_replicate") * plan.axes.dp_shard + mesh.index("dp_shard")
    for _ in range(steps):
        ids = torch.randint(SIZES.vocab_size, (ROWS, SEQ + 1), generator=torch.Generator().manual_seed(state.step))
        mine = ids.chunk(shards)[place].chunk(count)
        step([(part[:, :-1], part[:, 1:]) for part in mine])


def whole(state: sw.TrainState) -> dict[str, Tensor]:
    return {name: full(tensor) for name, tensor in state.tensors().items()}


def saved(plan: str, path: str, optimizer: str = "adamw") -> dict[str, Tensor]:
    with sw.open_mesh(sw.Plan.parse(plan)) as mesh:
        state = state_of(plan, mesh, optimizer)
        train(state, STEPS)
        sw.Store(path).save(state)
        return whole(state)


class Found(NamedTuple):
    there: dict[str, Tensor]
    """After the load."""
    line: str
    after: dict[str, Tensor]
    """After a step more."""


def loaded(plan: str, path: str, optimizer: str = "adamw", leave: bool = True, alone: bool = False) -> Found:
    with sw.open_mesh(sw.Plan.parse(plan)) as mesh:
        state = state_of(plan, mesh, optimizer)
        line = sw.Store(f"{path}-not").load(state, path, convert_state=leave, weights_only=alone).proof.line
        there = whole(state)
        if not alone:
            train(state, 1)
        return Found(there, line, whole(state))


def joined(parts: list[Any]) -> dict[str, Tensor]:
    """Of stages that hold different tensors."""
    return {name: tensor for part in parts for name, tensor in part.items()}


def wrong_in(stored: dict[str, Tensor], there: dict[str, Tensor]) -> list[str]:
    """What a state holds that is not what is stored, or the rounding of the most exact that is."""
    wrong = []
    for name, tensor in there.items():
        weight = f"model.{name.removeprefix('optim.').removesuffix(MASTER)}" if name.endswith(MASTER) else name
        master = f"optim.{weight.removeprefix('model.')}{MASTER}"
        exact = stored.get(master, stored.get(weight)) if weight.startswith("model.") else stored.get(name)
        if exact is None or not torch.equal(exact.to(tensor.dtype), tensor):
            wrong.append(name)
    return wrong


PAIRS = [
    ("fsdp2 / bf16-pure", "tp2"),
    ("tp2", "fsdp2 / bf16-pure"),
    ("pp2 / 1f1b mb2 / bf16-pure", "fsdp2 tp2 / bf16"),
    ("fsdp2 / zero1 / bf16", "pp2 / 1f1b mb2 / bf16-pure"),
    ("dp2 / fp64", "fsdp2 / bf16-pure"),
    ("fsdp2 / bf16-pure", "dp2 / fp64"),
    ("fsdp2 / fp64", "tp2"),
]


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_every_number_is_the_most_exact_one_that_is_stored(
    world: World, tmp_path: Path, before: str, after: str
) -> None:
    path = str(tmp_path / "c")
    stored = joined(world(sw.Plan.parse(before).world, saved, before, path))
    found = world(sw.Plan.parse(after).world, loaded, after, path)
    there = joined([rank.there for rank in found])
    assert wrong_in(stored, there) == []
    assert there.keys() == {n for n in stored if not n.endswith(MASTER)} | {n for n in there if n.endswith(MASTER)}
    assert " tensors, checksums ok, " in found[0].line and " weights from " in found[0].line
    if "fp64" in before:
        assert "moments from float64 to float32 (largest relative rounding 5" in found[0].line
    alone = f"dp1 / {sw.Plan.parse(after).precision}"
    (truth,) = world(1, loaded, alone, path)
    for name, tensor in joined([rank.after for rank in found]).items():
        exact = "bf16" not in alone  # what is summed in bf16 hangs on the order
        torch.testing.assert_close(
            tensor, truth.after[name], rtol=2e-5 if exact else 0.05, atol=2e-5 if exact else 0.05
        )


@pytest.mark.parametrize("optimizer", ["few bits", "sgd"])
@pytest.mark.parametrize(("before", "after"), [("fp32", "bf16-pure"), ("bf16-pure", "fp64"), ("fp64", "fp32")])
def test_with_other_states_of_an_optimizer(
    world: World, tmp_path: Path, before: str, after: str, optimizer: str
) -> None:
    path = str(tmp_path / "c")
    stored = joined(world(2, saved, f"fsdp2 / {before}", path, optimizer))
    found = joined([rank.there for rank in world(2, loaded, f"tp2 / {after}", path, optimizer)])
    assert wrong_in(stored, found) == []


def test_weights_alone_are_the_masters_where_there_are_some(world: World, tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    stored = joined(world(2, saved, "fsdp2 / bf16-pure", path))
    (found,) = world(1, loaded, "dp1", path, "sgd", True, True)
    masters = {n.removesuffix(MASTER).removeprefix("optim."): t for n, t in stored.items() if n.endswith(MASTER)}
    assert masters and all(torch.equal(found.there[f"model.{name}"], tensor) for name, tensor in masters.items())
    assert any(not torch.equal(tensor, stored[f"model.{name}"].float()) for name, tensor in masters.items())


def test_and_become_masters_as_they_are_stored(world: World, tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    stored = joined(world(2, saved, "fsdp2", path))
    for rank in world(2, loaded, "pp2 / 1f1b mb2 / bf16-pure", path, "adamw", True, True):
        assert (
            wrong_in(stored, {n: t for n, t in rank.there.items() if n.startswith("model.") or n.endswith(MASTER)})
            == []
        )
        assert "from float32 to bfloat16 with float32 masters (exact)" in rank.line


def begun(path: str) -> str:
    with sw.open_mesh(sw.Plan.parse("dp1 / bf16-pure")) as mesh:
        found = begin(sw.Store(f"{path}-new"), state_of("dp1 / bf16-pure", mesh, "adamw"), path)
        return found.proof.line if isinstance(found, sw.checkpoint.store.Loaded) else repr(found)


def test_a_new_run_begins_with_weights_of_any_precision(world: World, tmp_path: Path) -> None:
    world(1, saved, "dp1", path := str(tmp_path / "c"))
    assert "weights from float32 to bfloat16 with float32 masters (exact)" in world(1, begun, path)[0]


def refused(plan: str, path: str, optimizer: str = "adamw", leave: bool = False, alone: bool = False) -> str:
    """The error; the state must be as it was."""
    with sw.open_mesh(sw.Plan.parse(plan)) as mesh:
        state = state_of(plan, mesh, optimizer)
        before = whole(state)
        with pytest.raises(CheckpointError) as caught:
            sw.Store(f"{path}-not").load(state, path, convert_state=leave, weights_only=alone)
        after = whole(state)
        assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
        return str(caught.value)


def test_without_leave_it_is_refused_and_the_way_out_named(world: World, tmp_path: Path) -> None:
    world(1, saved, "dp1 / bf16-pure", path := str(tmp_path / "c"))
    for alone in (False, True):
        for text in world(2, refused, "tp2", path, "adamw", False, alone):
            assert "are bfloat16 with float32 masters in the checkpoint, float32 in this run" in text
            assert "give plan.precision as it was saved with" in text and "--allow plan.precision" in text


def too_large(path: str) -> None:
    with sw.open_mesh(sw.Plan.parse("dp1 / fp64")) as mesh:
        state = state_of("dp1 / fp64", mesh, "adamw")
        train(state, 1)
        next(iter(state.placed.parameters())).data[0, 0] = 1e300
        sw.Store(path).save(state)


def test_numbers_that_no_longer_fit_are_refused(world: World, tmp_path: Path) -> None:
    world(1, too_large, path := str(tmp_path / "c"))
    (text,) = world(1, refused, "dp1", path, "adamw", True)
    assert "too large for their new type" in text and "found a rounding of inf" in text
