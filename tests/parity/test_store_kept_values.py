"""What optimizers keep beside the state of parameters, or make late; what a save outlives, and what is in its way."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint.agree import Peers, late_told
from shardwise.checkpoint.files import LocalFiles
from shardwise.errors import CheckpointError, DataError, ModelError
from shardwise.launch.forked import WorldError
from shardwise.parallel import together
from shardwise.parallel.mesh import _finish
from shardwise.testing import World

ROWS = [(torch.randn(8, generator=torch.Generator().manual_seed(i)), torch.ones(1)) for i in range(64)]


def loss_fn(output: torch.Tensor, batch: Any) -> sw.Loss:
    return sw.mean_over((output - batch[1]).square())


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


class Base(torch.optim.Optimizer):
    """Steps that get smaller or larger by what it remembers."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            factor = self.remember(group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad * self.of(parameter), alpha=-group["lr"] * factor)

    def remember(self, group: dict[str, Any]) -> float:
        return 1.0

    def of(self, parameter: torch.Tensor) -> float:
        return 1.0


class Counts(Base):  # under a text, in place of a parameter
    def remember(self, group: dict[str, Any]) -> float:
        self.state["k"] = self.state.get("k", 0) + 1
        return 1 / self.state["k"]


class KeepsTensor(Base):
    def remember(self, group: dict[str, Any]) -> float:
        group["t"] = group.get("t", torch.zeros(2, dtype=torch.bfloat16)) + 1
        return 1 / float(group["t"][0])


class KeepsDict(Base):
    def remember(self, group: dict[str, Any]) -> float:
        group.setdefault("d", {"k": [0]})["k"][0] += 1
        return 1 / float(group["d"]["k"][0])


class KeepsTuples(Base):
    def remember(self, group: dict[str, Any]) -> float:
        group["d"] = {"pair": (group.get("d", {"pair": (0,)})["pair"][0] + 1, np.float64(2.0))}
        group["n"] = np.float64(group.get("n", 0.0) + 1)
        return float(1 / (group["d"]["pair"][0] + group["n"]))


class LowersItsRate(Base):
    def remember(self, group: dict[str, Any]) -> float:
        group["lr"] *= 0.8
        group["eff_lr"] = group.get("eff_lr", 1.0) * 0.9
        return float(group["eff_lr"])


class SlowWeights(Base):  # made in the second step
    def of(self, parameter: torch.Tensor) -> float:
        state = self.state[parameter]
        state["n"] = state.get("n", 0) + 1
        if state["n"] == 2:
            state["slow"] = parameter.detach().clone()
        if state["n"] >= 2:
            state["slow"].lerp_(parameter, 0.5)
            return 1 + 0.01 * float(state["slow"].float().abs().sum() > 0)
        return 1.0


class LateMean(Base):  # None until it is made
    def of(self, parameter: torch.Tensor) -> float:
        state = self.state[parameter]
        if not state:
            state["mean"], state["n"] = None, 0
        state["n"] += 1
        if state["n"] > 1:
            state["mean"] = torch.zeros_like(parameter) if state["mean"] is None else state["mean"] + 1
        return 1.0 if state["mean"] is None else 0.5


OPTIMIZERS = (Counts, KeepsTensor, KeepsDict, KeepsTuples, LowersItsRate, SlowWeights, LateMean)


def started(mesh: sw.Mesh, plan: sw.Plan, kind: Callable[..., Any], seed: int = 5) -> sw.TrainState:
    placed = sw.apply(net, plan, mesh, seed=1)
    return sw.TrainState(placed, kind(placed.parameters()), sw.loader(ROWS, plan.batch, mesh, global_size=8, seed=seed))


def go(state: sw.TrainState, until: int) -> list[float]:
    return [m.loss for m in sw.steps(state, loss_fn, until=until)]


def resumed(words: str, path: str) -> None:
    plan = sw.Plan.parse(words)
    with sw.open_mesh(plan) as mesh:
        for kind in OPTIMIZERS:
            whole = go(started(mesh, plan, kind), 6)
            state, store = started(mesh, plan, kind), sw.Store(f"{path}/{kind.__name__}")
            go(state, 3)
            store.save(state)
            again = started(mesh, plan, kind)
            loaded = store.load_latest(again)
            assert loaded is not None and not loaded.changes, kind.__name__
            assert go(again, 6) == whole[3:], kind.__name__


@pytest.mark.share(2)
@pytest.mark.parametrize("words", ["dp1", "fsdp2"])
def test_what_an_optimizer_keeps_anywhere_goes_on(world: World, tmp_path: Path, words: str) -> None:
    world(sw.Plan.parse(words).world, resumed, words, str(tmp_path))


def test_a_rate_that_a_scheduler_of_torch_lowered_goes_on(tmp_path: Path) -> None:
    def run(state: sw.TrainState, until: int) -> list[float]:
        schedule, losses = torch.optim.lr_scheduler.ExponentialLR(state.optimizer.torch, 0.7), []
        for m in sw.steps(state, loss_fn, until=until):
            schedule.step()
            losses.append(m.loss)
        return losses

    plan = sw.Plan()
    with sw.open_mesh(plan) as mesh:
        whole = run(started(mesh, plan, torch.optim.SGD), 6)
        state, store = started(mesh, plan, torch.optim.SGD), sw.Store(tmp_path / "s")
        run(state, 3)
        store.save(state)
        again = started(mesh, plan, torch.optim.SGD)
        store.load_latest(again)
        assert run(again, 6) == whole[3:]


@pytest.mark.parametrize(
    ("value", "key", "says"),
    [(object(), "k", "is no parameter, is a object"), (1, 7, "state under 7"), (torch.zeros(99999), "k", "bytes")],
)
def test_what_no_checkpoint_can_hold_is_refused_by_name(value: object, key: object, says: str) -> None:
    plan = sw.Plan()
    with sw.open_mesh(plan) as mesh:
        state = started(mesh, plan, Base)
        cast(dict[object, object], state.optimizer.torch.state)[key] = value
        with pytest.raises(ModelError, match=says):
            state.scalars()


class KeepsSet(Base):
    def of(self, parameter: torch.Tensor) -> float:
        self.state[parameter].setdefault("l", [set()])[0].add(1)
        return 1.0


def test_state_that_cannot_be_stored_is_told_at_the_first_step(tmp_path: Path) -> None:
    plan = sw.Plan()
    with sw.open_mesh(plan) as mesh:
        state = started(mesh, plan, KeepsSet)
        with pytest.warns(UserWarning, match="no checkpoint will hold this run: KeepsSet: state 'l.0' of '0.weight'"):
            go(state, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            go(state, 2)
        with pytest.raises(ModelError, match="only tensors and numbers"):
            sw.Store(tmp_path / "s").save(state)


def test_another_optimizer_is_still_refused(tmp_path: Path) -> None:
    plan = sw.Plan()
    with sw.open_mesh(plan) as mesh:
        state, store = started(mesh, plan, torch.optim.AdamW), sw.Store(tmp_path / "s")
        go(state, 2)
        store.save(state)
        for other in (Base, torch.optim.SGD):
            with pytest.raises(CheckpointError, match="not in this run"):
                store.load_latest(started(mesh, plan, other))


def test_parameters_without_state_here_are_not_called_frozen(tmp_path: Path) -> None:
    """They may be trained by another optimizer than at the save, one of several."""
    plan = sw.Plan()
    with sw.open_mesh(plan) as mesh:
        states = []
        for bias in (sw.adamw, sw.sgd):
            placed = sw.apply(lambda: nn.Linear(4, 1), plan, mesh)
            optimizer = sw.several(placed, {"bias": partial(bias, lr=0.1), "*": partial(sw.adamw, lr=0.1)})
            states.append(sw.TrainState(placed, optimizer))
        sw.make_step(states[0], lambda output, _: sw.mean_over(output.square()))(torch.ones(2, 4))
        store = sw.Store(tmp_path / "s")
        store.save(states[0])
        words = r"state of bias \(1 parameters\), of which this run keeps none; .* by the same optimizers"
        with pytest.raises(CheckpointError, match=words):
            store.load_latest(states[1])


def test_a_refused_load_changes_nothing(tmp_path: Path) -> None:
    plan = sw.Plan()
    with sw.open_mesh(plan) as mesh:
        state, store = started(mesh, plan, KeepsTensor), sw.Store(tmp_path / "s")
        go(state, 3)
        store.save(state)
        other = started(mesh, plan, KeepsTensor, seed=6)
        before = other.scalars()
        with pytest.raises(CheckpointError, match="weights_only=True"):
            store.load_latest(other)
        assert other.scalars() == before and other.step == 0


def leaving(how: str, path: str) -> None:
    plan = sw.Plan.parse("dp2")
    with sw.open_mesh(plan) as mesh:
        state, store = started(mesh, plan, torch.optim.SGD), sw.Store(path)
        go(state, 2)
        store.save_async(state)
        if how == "exit":
            sys.exit(0)
        if how == "raise":
            raise DataError("no rows left")


@pytest.mark.parametrize("how", ["exit", "raise", "return"])
def test_a_save_that_has_begun_is_complete_however_the_block_is_left(world: World, tmp_path: Path, how: str) -> None:
    if how == "return":
        world(2, leaving, how, str(tmp_path / "s"))
    else:
        with pytest.raises(WorldError, match="no rows left" if how == "raise" else "SystemExit"):
            world(2, leaving, how, str(tmp_path / "s"))
    (found,) = sw.Store(tmp_path / "s")._directory.listing().complete
    assert found[1].step == 2


def test_a_store_is_held_until_its_last_save_is_complete(tmp_path: Path) -> None:
    plan, order = sw.Plan(), list[str]()
    with sw.open_mesh(plan) as mesh:
        state, store = started(mesh, plan, torch.optim.SGD), sw.Store(tmp_path / "s")
        go(state, 1)
        store.save_async(state)
        names = [getattr(finish, "func", finish).__name__ for finish in mesh.at_exit]
        assert names.index("release") < names.index("_end"), "the last is done first"
        mesh.at_exit.insert(0, lambda: order.append("all"))
        mesh.at_exit.append(lambda: 1 / 0)  # what fails keeps nothing else from its end
        with pytest.raises(ZeroDivisionError):
            _finish(mesh, None)
        mesh.at_exit.pop()
    assert order == ["all", "all"]


def test_a_save_that_fails_at_the_end_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    plan, words = (
        sw.Plan(),
        r"checkpoint\.save.*step 1 was not saved; .* what was saved before is untouched",
    )  # nothing was
    with pytest.warns(UserWarning, match=words), sw.open_mesh(plan) as mesh:
        state = started(mesh, plan, torch.optim.SGD)
        go(state, 1)
        monkeypatch.setattr(LocalFiles, "write", full)
        monkeypatch.setattr(LocalFiles, "stream", full)
        sw.Store(tmp_path / "s").save_async(state)


def test_directories_in_a_checkpoint_go_with_it(tmp_path: Path) -> None:
    plan = sw.Plan()
    with sw.open_mesh(plan) as mesh:
        state, store = started(mesh, plan, torch.optim.SGD), sw.Store(tmp_path / "s", keep=1)
        for step in (1, 2):
            go(state, step)
            path = store.save(state).path
            (path / ".ipynb_checkpoints" / "deep").mkdir(parents=True)
            (path / ".ipynb_checkpoints" / "deep" / "file").write_text("x")
            (path / "link").symlink_to(tmp_path)
    assert [p.name for p in (tmp_path / "s").glob("step-*")] == ["step-00000002"] and tmp_path.is_dir()


def test_what_cannot_be_removed_stands_in_nobodys_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remove = LocalFiles.remove

    def refused(files: LocalFiles, path: Path) -> None:
        if path.name == ".nfs01":
            raise OSError(16, "Device or resource busy", str(path))
        remove(files, path)

    monkeypatch.setattr(LocalFiles, "remove", refused)
    plan = sw.Plan()
    with sw.open_mesh(plan) as mesh:
        state, store = started(mesh, plan, torch.optim.SGD), sw.Store(tmp_path / "s", keep=1)
        go(state, 1)
        (store.save(state).path / ".nfs01").write_text("")
        go(state, 2)
        with pytest.warns(UserWarning, match="step 2 was saved; an older checkpoint.*could not be removed"):
            saved = store.save(state)
        assert "Device or resource busy" in saved.left
        go(state, 3)
        assert not store.save(state).left  # and the leftover is no checkpoint that should go
        go(state, 4)
        store.save_async(state)
        store.wait()
        assert not store.take_findings()
        assert store.load_latest(state) is not None and state.step == 4


def test_who_waits_for_ranks_that_do_not_come_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "LATE_S", 0.05)
    said: list[str] = []
    monkeypatch.setattr(warnings, "warn", lambda text, **_: said.append(text))
    with late_told("saving step 3", Peers(0, 2)), late_told("saving step 4", Peers(0, 1)):
        threading.Event().wait(0.5)
    with late_told("saving step 5", Peers(0, 2)):
        pass
    threading.Event().wait(0.2)
    (text,) = said
    assert text.startswith("saving step 3: rank 0 has waited 0.05 s for the other ranks; every rank must call it")
