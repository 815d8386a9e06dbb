"""Objects of a script beside model and optimizer: schedulers of torch and meters go on where they were."""

from __future__ import annotations

import json
import random
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import lr_scheduler as lrs
from torch.optim.swa_utils import AveragedModel

import shardwise as sw
from shardwise.errors import CheckpointError, ModelError, UsageError
from shardwise.testing import World
from shardwise.train.kept.stateful import StatefulObjects

ROWS = [(torch.randn(8, generator=torch.Generator().manual_seed(i)), torch.ones(1)) for i in range(64)]
SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "step": lambda o: lrs.StepLR(o, 2, 0.5),
    "milestones": lambda o: lrs.MultiStepLR(o, [1, 4, 4, 5], 0.5),
    "warm-up": lambda o: lrs.LinearLR(o, 0.1, total_iters=5),
    "cosine": lambda o: lrs.CosineAnnealingLR(o, 6),
    "restarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 2, 2),
    "one-cycle": lambda o: lrs.OneCycleLR(o, 0.1, total_steps=9, cycle_momentum=False),
    "cyclic": lambda o: lrs.CyclicLR(o, 0.01, 0.1, 2, cycle_momentum=False),
    "lambda": lambda o: lrs.LambdaLR(o, lambda step: 1 / (1 + step)),
    "plateau": lambda o: lrs.ReduceLROnPlateau(o, patience=0, threshold=0.9),
    "chained": lambda o: lrs.ChainedScheduler([lrs.LinearLR(o, 0.1, total_iters=4), lrs.ExponentialLR(o, 0.9)]),
    "sequence": lambda o: lrs.SequentialLR(o, [lrs.LinearLR(o, 0.1, total_iters=3), lrs.StepLR(o, 1, 0.7)], [3]),
}


class Meter:
    """What people keep beside: of Python's and NumPy's kinds."""

    def __init__(self) -> None:
        self.held: dict[str, Any] = {
            "last": deque([0.0], maxlen=3), "seen": {0}, "pair": (1, (2.5, "a")), "by": {1: "one", (2, 3): "two"},
            "np": np.float32(0.5), "array": np.arange(3.0), "tensor": torch.ones(2), "worst": float("-inf"),
            "counts": Counter({7: 2}), "empty": {},
        }  # fmt: skip

    def count(self, loss: float) -> None:
        self.held["last"].append(loss)
        self.held["seen"].add(len(self.held["seen"]))
        self.held["array"] = self.held["array"] + 1

    def state_dict(self) -> dict[str, Any]:
        return self.held

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state.keys() == self.held.keys()
        assert all(type(state[key]) is type(old) for key, old in self.held.items()), state
        self.held = state


def made(
    mesh: sw.Mesh, make: Callable[[Optimizer], Any], named: bool = True, rate: float = 0.05
) -> tuple[sw.TrainState, Any, Meter]:
    plan = sw.Plan.parse(f"fsdp{mesh.world}" if mesh.world > 1 else "dp1")
    placed = sw.apply(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), plan, mesh, seed=1)
    optimizer = torch.optim.AdamW(placed.parameters(), lr=rate)
    scheduler, meter = make(optimizer), Meter()
    state = sw.TrainState(placed, optimizer, sw.loader(ROWS, 8, mesh, seed=3))
    if named:
        state.keep(scheduler=scheduler, meter=meter)
    return state, scheduler, meter


def loss_fn(output: torch.Tensor, batch: Any) -> sw.Loss:
    return sw.mean_over((output - batch[1]).square())


def trained(held: tuple[sw.TrainState, Any, Meter], until: int, **how: Any) -> list[tuple[float, float]]:
    state, scheduler, meter = held
    seen = []
    for metrics in sw.steps(state, loss_fn, until=until, **how):
        seen.append((metrics.loss, state.optimizer.param_groups[0]["lr"]))
        scheduler.step(metrics.loss) if isinstance(scheduler, lrs.ReduceLROnPlateau) else scheduler.step()
        meter.count(metrics.loss)
    return seen


def go_on(names: list[str], path: str) -> dict[str, bool]:
    right = {}
    with sw.open_mesh(sw.Plan.parse("fsdp2")) as mesh:
        for name in names:
            whole = trained(first := made(mesh, SCHEDULERS[name]), 8)
            store = sw.Store(f"{path}/{name}")
            trained(second := made(mesh, SCHEDULERS[name]), 3)
            store.save(second[0])
            third = made(mesh, SCHEDULERS[name])
            store.load_latest(third[0])
            again = trained(third, 8)
            alike = {key: str(value) for key, value in third[2].held.items()}
            right[name] = again == whole[3:] and alike == {key: str(value) for key, value in first[2].held.items()}
            assert len({lr for _, lr in whole}) > 1, name
    return right


def test_schedulers_of_torch_and_meters_go_on_where_they_were(world: World, tmp_path: Path) -> None:
    for found in world(2, go_on, list(SCHEDULERS), str(tmp_path)):
        assert all(found.values()), found


def differing(path: str) -> str:
    with sw.open_mesh(sw.Plan.parse("fsdp2")) as mesh:
        held = made(mesh, SCHEDULERS["step"])
        held[2].count(float(mesh.rank))
        with pytest.raises(CheckpointError) as refused:
            sw.Store(path).save(held[0])
        return str(refused.value)


def test_objects_that_differ_between_ranks_are_named(world: World, tmp_path: Path) -> None:
    for said in world(2, differing, str(tmp_path)):
        assert "ranks disagree on 'stateful'" in said


def test_a_scheduler_that_nobody_keeps_is_told_of_once(tmp_path: Path) -> None:
    with sw.open_mesh(sw.Plan()) as mesh:
        for named in (False, True):
            store, held = sw.Store(tmp_path / str(named)), made(mesh, SCHEDULERS["step"], named)
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                for until in (1, 2):
                    trained(held, until)
                    store.save(held[0])
            found = [str(each.message) for each in told if "state.keep(" in str(each.message)]
            assert len(found) == (not named), found


def test_objects_of_one_of_two_runs_are_changes(tmp_path: Path) -> None:
    with sw.open_mesh(sw.Plan()) as mesh:
        with_, without = made(mesh, SCHEDULERS["step"]), made(mesh, SCHEDULERS["step"], named=False)
        for name, saved, loaded, words in (
            ("a", with_, without, "stateful.scheduler: kept -> not there"),
            ("b", without, with_, "stateful.scheduler: not there -> begins anew"),
        ):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                store = sw.Store(tmp_path / name)
                store.save(saved[0])
                found = store.load_latest(loaded[0])
            assert found is not None and words in found.changes


@pytest.mark.parametrize(
    ("now", "rate", "wanted"),
    [
        (SCHEDULERS["step"], 0.05, ()),
        (
            lambda o: lrs.StepLR(o, 3, 0.5),
            0.05,
            ("stateful.scheduler.step_size: 2 -> 3 (the first goes on: it is part of the state)",),
        ),
        (
            SCHEDULERS["cosine"],
            0.05,
            ("stateful.scheduler: StepLR -> CosineAnnealingLR, which takes over the state of the first",),
        ),
        (
            SCHEDULERS["step"],
            0.1,
            tuple(
                f"{key}: 0.05 -> 0.1 (the first goes on: it is part of the state)"
                for key in ("base_lr", "stateful.scheduler.base_lrs")
            ),
        ),
    ],
)
def test_another_scheduler_under_its_name_is_told(
    tmp_path: Path, now: Callable[[Optimizer], Any], rate: float, wanted: tuple[str, ...]
) -> None:
    with sw.open_mesh(sw.Plan()) as mesh:
        trained(first := made(mesh, SCHEDULERS["step"]), 3)
        sw.Store(tmp_path).save(first[0])
        other = made(mesh, now, rate=rate)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = sw.Store(tmp_path).load_latest(other[0])
        assert loaded is not None and loaded.changes == wanted
        if type(other[1]) is lrs.StepLR:
            assert other[1].state_dict() == first[1].state_dict()
            assert other[0].optimizer.param_groups[0]["lr"] == first[0].optimizer.param_groups[0]["lr"]


def test_a_step_that_is_taken_back_takes_back_the_schedule_too() -> None:
    """The body of the loop runs after it once more, and what it did there is undone."""
    rows = [(row[0], row[1] if place // 8 != 6 else row[1] * 1e4) for place, row in enumerate(ROWS * 2)]
    protect = sw.Protect(policy="rewind", min_history=4, window=8, keep_every=100)

    def run(data: list[Any], make: Callable[[Optimizer], Any]) -> list[tuple[int, float]]:
        with sw.open_mesh(sw.Plan()) as mesh:
            placed = sw.apply(lambda: nn.Linear(8, 1), sw.Plan(), mesh, seed=1)
            optimizer = torch.optim.SGD(placed.parameters(), lr=0.01)
            scheduler = make(optimizer)
            state = sw.TrainState(placed, optimizer, sw.loader(data, 8, mesh, shuffle=False))
            state.keep(scheduler=scheduler)
            seen = []
            for metrics in sw.steps(state, loss_fn, until=9, options=sw.StepOptions(protect=protect)):
                seen.append((metrics.step, metrics.lr))
                scheduler.step()
                kept = state.scalars()  # as a save here would hold it
                assert kept["stateful"]["scheduler"]["last_epoch"] == kept["step"] == state.step
            return seen

    usual = dict(run(ROWS * 2, SCHEDULERS["step"]))
    seen = run(rows, SCHEDULERS["step"])
    taken_back = [place for place, (step, _) in enumerate(seen[1:]) if step <= seen[place][0]]
    assert taken_back, seen
    after = seen[taken_back[0] + 1 :]
    assert [lr for _, lr in after] == [usual[step] for step, _ in after]


class Odd:
    def __init__(self, held: Any) -> None:
        self.held = held

    def state_dict(self) -> Any:
        return self.held

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("objects", "error", "words"),
    [
        ({"a": object()}, UsageError, "a object has no state_dict and no load_state_dict"),
        ({"a": AveragedModel(nn.Linear(1, 1))}, UsageError, r"give models to apply, and .* ema=sw.Ema\(placed\)"),
        ({"a": torch.optim.SGD([torch.ones(1)])}, UsageError, "optimizers to TrainState"),
        ({"a": Odd({"x": [1, {"y": Odd(1)}]})}, ModelError, r"at \.x\[1\]\.y: found Odd"),
        ({"a": Odd({"x": torch.ones(1 << 18)})}, ModelError, "bytes as JSON"),
        ({"a": Odd({"x": torch.eye(2).to_sparse()})}, ModelError, r"at \.x: found Tensor"),
    ],
)
def test_what_no_checkpoint_can_hold_is_refused_at_the_start(objects: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        StatefulObjects().add(objects)


def test_a_name_is_taken_once() -> None:
    kept = StatefulObjects()
    kept.add({"a": Odd({})})
    with pytest.raises(UsageError, match="'a' is kept already"):
        kept.add({"a": Odd({})})


class Collected:
    """It has no example of what it will hold when it is made: a best pair that is None, dicts that are empty."""

    def __init__(self, new: dict[str, Any]) -> None:
        self.held = new

    def state_dict(self) -> dict[str, Any]:
        return self.held

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held = state


class Point(NamedTuple):
    """A pair with names."""

    x: float
    y: float


@pytest.mark.parametrize(
    ("new", "then"),
    [
        (None, (0.25, 3)),
        ([], [(1, 2.5), (2, [1.5])]),
        ({}, {"a": {1, 2}, "b": {(1, 2)}, "c": frozenset({"x"})}),
        ({}, {(1, (2, 3)): deque([1], maxlen=4), None: deque()}),
        (None, np.full((2, 2), 0.1)),
        (np.zeros(2, np.float32), np.full(2, 0.1)),  # wider than when it was made
        (torch.zeros(2), torch.full((2,), 0.1, dtype=torch.float64)),
        ({}, {"counts": Counter("aab"), "order": OrderedDict(b=1, a=2)}),
        (defaultdict(int), defaultdict(int, {"a": 2})),
        (Point(0, 0), Point(1.5, 2.5)),
        (None, random.Random(3).getstate()),
        (None, np.random.RandomState(3).get_state()),
    ],
)
def test_what_an_object_collects_comes_back_as_it_was(new: Any, then: Any) -> None:
    kept, other = StatefulObjects(), Collected({"held": new})
    kept.add({"meter": Collected({"held": then})})
    stored = json.loads(json.dumps(kept.to_json()))
    objects = StatefulObjects()
    objects.add({"meter": other})
    objects.load(stored)
    assert_alike(other.held["held"], then)


def assert_alike(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted), (found, wanted)
    if isinstance(wanted, np.ndarray | torch.Tensor):
        assert found.dtype == wanted.dtype and (found == wanted).all()
    elif isinstance(wanted, tuple | list):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_alike(one, other)
    else:
        assert found == wanted and list(found) == list(wanted) if isinstance(wanted, dict) else found == wanted
        for key in wanted if isinstance(wanted, dict) else ():
            assert_alike(found[key], wanted[key])
        assert getattr(found, "maxlen", None) == getattr(wanted, "maxlen", None)
        assert getattr(found, "default_factory", None) is getattr(wanted, "default_factory", None)


def test_kinds_are_no_settings_of_a_scheduler() -> None:
    """A checkpoint from before kinds were stored says the same of a scheduler that has a Counter."""
    objects = StatefulObjects()
    objects.add({"s": lrs.MultiStepLR(torch.optim.SGD([torch.ones(1)], lr=0.1), [2, 4])})
    assert objects.made["s"]["milestones"] == {"shardwise.pairs": [[2, 1], [4, 1]]}
    stored = objects.to_json()
    stored["s"]["milestones"] = {"shardwise.pairs": [[2, 1], [4, 1]]}
    objects.load(stored)
    assert objects.to_json()["s"]["milestones"] != stored["s"]["milestones"]


class Refusing(Odd):
    def load_state_dict(self, state: Any) -> None:
        raise KeyError("boo")


def test_an_object_that_does_not_take_its_state_is_named() -> None:
    objects = StatefulObjects()
    objects.add({"meter": Refusing({"a": 1})})
    with pytest.raises(CheckpointError, match=r"keep: 'meter': a Refusing does not take .* \(KeyError: 'boo'\)"):
        objects.load(objects.to_json())
