"""What a script draws itself, in its loss and its loop, goes on after a load; what nobody keeps is told."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint.agree import Peers
from shardwise.checkpoint.drawn import gathered, stored
from shardwise.checkpoint.scalars import agreed
from shardwise.errors import CheckpointError, UsageError
from shardwise.testing import World

ROWS = [torch.full((4,), float(i)) for i in range(16)]


def noisy(output: Any, batch: torch.Tensor) -> Any:
    """As of a diffusion model: what is to be said is drawn here."""
    scale = random.gauss(1, 0.1) + np.random.randn()
    return sw.mean_over((output - batch - scale * torch.randn_like(output)).square())


def losses(path: str, until: int, seed: int) -> list[float]:
    """The losses of the steps up to `until`, from those in the store on; each rank draws other numbers."""
    plan = sw.Plan.parse("dp2")
    with sw.open_mesh(plan) as mesh:
        for draw in (random.seed, np.random.seed, torch.manual_seed):
            draw(seed + mesh.rank)
        placed = sw.apply(lambda: nn.Linear(4, 4), plan, mesh, seed=1)
        state = sw.TrainState(placed, sw.adamw(placed, lr=0.01), sw.loader(ROWS, 8, mesh, seed=2))
        store = sw.Store(path, probe=sw.Probe(ROWS[:2], noisy))
        store.load_latest(state)
        found = []
        for m in sw.steps(state, noisy, until=until):
            if mesh.rank == 0:
                random.random()  # one rank alone may draw: the others' need not be kept
            found.append(m.loss)
        store.save(state)
    return found


def both(folder: str) -> tuple[list[float], list[float]]:
    """Steps in one go, and with a stop: another process has generators at another place."""
    return losses(f"{folder}/a", 6, 0), losses(f"{folder}/b", 3, 0) + losses(f"{folder}/b", 6, 9)


def test_a_scripts_own_draws_go_on_after_a_load(world: World, tmp_path: Path) -> None:
    straight, stopped = world(2, both, str(tmp_path))[0]
    assert stopped == straight


def test_generators_that_do_not_move_are_not_stored_and_those_of_other_numbers_of_ranks_are_shared_out() -> None:
    with sw.open_mesh(sw.Plan()) as mesh:
        placed = sw.apply(lambda: nn.Linear(4, 4), sw.Plan(), mesh)
        state = sw.TrainState(placed, sw.adamw(placed, lr=0.1))
        assert state.generators.moved() == {}
        torch.rand(1)
        assert state.generators.moved().keys() == {"torch"}
        with pytest.raises(UsageError, match="cannot be copied or pickled.*store.load"):
            copy.deepcopy(state)
    with pytest.warns(UserWarning, match=r"generators \(numpy, torch\).*more than 512 ranks no checkpoint holds them"):
        assert gathered(Peers(0, 513), {}, [{"torch": b"1"}, *[{"numpy": b"2"}] * 512]) == {}
    alone = gathered(Peers(0, 1), {"torch": b"a"}, [{"torch": b"digest"}])
    assert [stored(alone, rank, Path()) for rank in (0, 1)] == [{"torch": b"a"}] * 2
    several = {"generators": {"torch": alone["generators"]["torch"] | {"ranks": [-1, 0, -1]}}}
    assert [len(stored(several, rank, Path())) for rank in range(5)] == [0, 1, 0, 0, 1]
    for wrong in ([], {"torch": 3}, {"torch": {"ranks": [], "states": []}}, {"torch": {"ranks": [0], "states": ["?"]}}):
        with pytest.raises(CheckpointError, match=r"scalars.generators: .*, needed states of generators"):
            stored({"generators": wrong}, 0, Path("step-00000001"))


def test_a_probe_of_a_loss_that_draws_is_compared_under_its_own_plan_alone(tmp_path: Path) -> None:
    said = []
    for words in ("dp1", "dp1 / mb2", "dp1"):
        with sw.open_mesh(plan := sw.Plan.parse(words)) as mesh:
            placed = sw.apply(lambda: nn.Linear(4, 4), plan, mesh, seed=1)
            state = sw.TrainState(placed, sw.adamw(placed, lr=0.01))
            store = sw.Store(tmp_path, probe=sw.Probe(ROWS[:2], noisy))
            torch.rand(7)
            loaded = store.load_latest(state)
            said += [loaded.proof.line.partition("ok, ")[2]] if loaded else [store.save(state).path.name]
    assert said[1].startswith("probe not compared: its loss draws at random") and said[2].startswith("probe loss ")


def test_what_no_save_takes_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    with sw.open_mesh(sw.Plan()) as mesh:
        model = nn.ModuleDict({"a/b": nn.Linear(4, 4)})
        model.forward = lambda x: model["a/b"](x)
        placed = sw.apply(model, sw.Plan(), mesh)
        state = sw.TrainState(placed, sw.adamw(placed, lr=0.1), sw.loader(ROWS, 4, mesh))
        store = sw.Store(tmp_path / "store")
        with pytest.raises(CheckpointError, match=r"the name 'model.a/b.weight'.*rename the parameter"):
            store.load_latest(state)
        with pytest.raises(CheckpointError, match=r"the name 'model.a/b.weight'.*rename the parameter"):
            next(sw.steps(state, noisy, until=1, store=store))


def test_a_state_without_batches_is_told_that_nobody_knows_where_its_data_is(tmp_path: Path) -> None:
    with sw.open_mesh(sw.Plan()) as mesh:
        placed = sw.apply(lambda: nn.Linear(4, 4), sw.Plan(), mesh)
        step = sw.make_step(state := sw.TrainState(placed, sw.adamw(placed, lr=0.1)), noisy)
        step(torch.stack(ROWS))
        path = sw.Store(tmp_path).save(state).path
        with pytest.warns(UserWarning, match="holds no position in the data.*must go on with the samples of step 2"):
            sw.Store(tmp_path).load(sw.TrainState(placed, sw.adamw(placed, lr=0.1)), path)
        batches = sw.loader(ROWS, 8, mesh)
        changed = "data: batches of the script's own, at no position -> a loader, at its position"
        with pytest.warns(UserWarning, match=changed):
            found = sw.Store(tmp_path).load(sw.TrainState(placed, sw.adamw(placed, lr=0.1), batches), path)
        assert found.changes == (changed,)
        batches = torch.utils.data.DataLoader(ROWS)
        batches.state_dict, batches.load_state_dict = dict, lambda _: None
        with pytest.raises(UsageError, match="batches of type DataLoader, which is no iterator"):
            next(sw.steps(sw.TrainState(placed, sw.adamw(placed, lr=0.1), batches), noisy, until=1))


def test_windows_that_a_loop_has_read_ahead_are_read_again(tmp_path: Path) -> None:
    with sw.open_mesh(sw.Plan()) as mesh:
        placed = sw.apply(lambda: nn.Linear(4, 4), sw.Plan(), mesh)

        def trained(until: int, ahead: int = 0) -> list[Any]:
            state = sw.TrainState(placed, sw.adamw(placed, lr=0.1), data := sw.loader(ROWS, 4, mesh, seed=2))
            store, step, found = sw.Store(tmp_path), sw.make_step(state, noisy), []
            store.load_latest(state)
            waiting = [next(data) for _ in range(ahead)]
            while state.step < until:
                waiting.append(next(data))
                step(waiting[0])
                found.append(waiting.pop(0).indices)
            store.save(state)
            step(torch.stack(ROWS))  # no window: what was trained on is not known, and all that were taken count
            assert data.state_dict()["step"] == until + ahead
            return found

        seen = trained(3, ahead=2) + trained(5, ahead=1) + trained(7)
        assert seen == [window.indices for window, _ in zip(sw.loader(ROWS, 4, mesh, seed=2), range(7), strict=False)]


class OfRank:
    """Batches of a script's own, which are at another place on each rank."""

    def __init__(self, rank: int) -> None:
        self.generator = torch.Generator().manual_seed(rank)

    def __next__(self) -> torch.Tensor:
        return torch.rand(4, 4, generator=self.generator)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


def with_own(path: str, words: str, *stops: int) -> list[float]:
    plan, found = sw.Plan.parse(words), []
    with sw.open_mesh(plan) as mesh:
        for until in stops:
            placed = sw.apply(lambda: nn.Linear(4, 4), plan, mesh, seed=1)
            state = sw.TrainState(placed, sw.adamw(placed, lr=0.01), OfRank(mesh.rank))
            store = sw.Store(path)
            store.load_latest(state)
            found += [m.loss for m in sw.steps(state, lambda y, x: sw.mean_over((y - x).square()), until=until)]
            store.save(state)
    return found


def test_batches_of_a_scripts_own_may_be_elsewhere_on_each_rank(world: World, tmp_path: Path) -> None:
    straight, stopped = (world(2, with_own, str(tmp_path / str(n)), "dp2", *range(n, 7, n))[0] for n in (6, 3))
    assert stopped == straight
    with pytest.raises(CheckpointError, match="found 2 places in the data, one for each rank that .*, and 1 ranks"):
        with_own(str(tmp_path / "6"), "dp1", 9)
    loader = {"step": 1, "data": {"kind": "map", "global_size": 8, "position": 8}}
    with pytest.raises(CheckpointError, match="ranks disagree on 'data': .*'position': 8") as told:
        agreed([loader, loader | {"data": {**loader["data"], "position": 0, "long": "x" * 9999}}], [0, 0])
    assert len(str(told.value)) < 600
