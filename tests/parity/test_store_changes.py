"""A script that goes on with other settings than those of the checkpoint is told what changed."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint.manifest import Manifest
from shardwise.errors import CheckpointError, ModelError, UsageError
from shardwise.testing import World

ROWS = [(torch.randn(4, generator=torch.Generator().manual_seed(i)),) for i in range(64)]


def state_of(mesh: sw.Mesh, plan: sw.Plan, optimizer: str = "adamw", size: int = 4, **settings: Any) -> sw.TrainState:
    placed = sw.apply(lambda: nn.Linear(4, 4), plan, mesh, seed=settings.pop("seed", 1))
    schedule, ema = settings.pop("schedule", None), settings.pop("ema", None)
    made = getattr(sw, optimizer)(placed, **{"lr": 0.01, **settings})
    average = sw.Ema(placed, **ema) if ema is not None else None
    return sw.TrainState(placed, made, sw.loader(ROWS, size, mesh, seed=3), schedule=schedule, ema=average)


CASES: dict[str, list[tuple[dict[str, Any], tuple[str, ...]]]] = {
    "dp2": [
        ({}, ()),
        ({"lr": 0.5}, ("base_lr: 0.01 -> 0.5",)),
        ({"betas": (0.8, 0.999)}, ("optimizer.groups.betas[0]: 0.9 -> 0.8",)),
        (
            {"size": 8, "seed": 7},
            ("seed: 1 -> 7 (the first goes on: it is part of the state)", "data.global_size: 4 -> 8"),
        ),
        ({"schedule": lambda step: 0.5}, ("schedule: 1.0 -> 0.5 at step 0",)),
    ],
    "fsdp2": [({}, ())],
    "dp2 / bf16": [({}, ("plan.precision: fp32 -> bf16",))],
}


def saved(path: str) -> None:
    plan = sw.Plan.parse("dp2")
    with sw.open_mesh(plan) as mesh:
        sw.Store(path).save(state_of(mesh, plan))


def changes(path: str, words: str) -> list[tuple[tuple[str, ...], list[str]]]:
    """For each case what `Loaded.changes` says, and the warnings."""
    found, plan = [], sw.Plan.parse(words)
    with sw.open_mesh(plan) as mesh:
        for settings, _ in CASES[words]:
            state = state_of(mesh, plan, **settings)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                loaded = sw.Store(path).load_latest(state)
            assert loaded is not None
            found.append((loaded.changes, [str(warning.message) for warning in caught]))
    return found


def test_what_changed_is_said_on_one_rank(world: World, tmp_path: Path) -> None:
    world(2, saved, str(tmp_path))
    for words, cases in CASES.items():
        for rank, found in enumerate(world(2, changes, str(tmp_path), words)):
            for (_, wanted), (said, warned) in zip(cases, found, strict=True):
                assert said == wanted
                text = f"{tmp_path}/step-00000000: changed since it was saved: {'; '.join(wanted)}"
                assert warned == ([text] if wanted and rank == 0 else [])


def test_another_optimizer_of_the_same_state_is_said(tmp_path: Path) -> None:
    with sw.open_mesh(sw.Plan()) as mesh:
        sw.Store(tmp_path).save(state_of(mesh, sw.Plan()))
        for config, warns in (({}, True), ({"by": "its own settings"}, False)):
            loaded = None
            with pytest.warns(UserWarning, match="optimizer.name") if warns else warnings.catch_warnings():
                loaded = sw.Store(tmp_path, config=config).load_latest(state_of(mesh, sw.Plan(), "lamb"))
            assert loaded is not None and "optimizer.name: 'AdamW' -> 'Lamb'" in loaded.changes
        assert sw.Store(tmp_path).load(state_of(mesh, sw.Plan(), lr=1.0), tmp_path, weights_only=True).changes == ()


TABLE = [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4]


@pytest.mark.parametrize(
    ("before", "now", "wanted"),
    [
        (sw.warmup_cosine(10, 100), sw.warmup_cosine(10, 100), ()),
        (lambda step: step / 10, lambda step: step / 20, ("schedule: 0.6 -> 0.3 at step 6",)),
        (lambda step: 1.0, None, ()),
        (
            lambda step: [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4][step],
            lambda step: round(1 - 0.1 * step, 1),
            (),
        ),  # no row after its end
        (lambda step: 0.5 if step > 3 else 1.0, None, ("schedule: 0.5 -> 1.0 at step 6",)),
        (None, lambda step: 0.5 if step == 3 else 1.0, ("schedule: 1.0 -> 0.5 at step 3",)),
    ],
)
def test_another_schedule_is_said(tmp_path: Path, before: Any, now: Any, wanted: tuple[str, ...]) -> None:
    with sw.open_mesh(sw.Plan()) as mesh:
        state = state_of(mesh, sw.Plan(), schedule=before)
        state.step = 7
        sw.Store(tmp_path).save(state)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = sw.Store(tmp_path).load_latest(state_of(mesh, sw.Plan(), schedule=now))
        assert loaded is not None and loaded.changes == wanted


def test_other_clipping_is_said_before_the_first_step(tmp_path: Path) -> None:
    def loss(output: torch.Tensor, _: Any) -> sw.Loss:
        return sw.mean_over(output.square())

    with sw.open_mesh(sw.Plan()) as mesh:
        state = state_of(mesh, sw.Plan())
        next(sw.steps(state, loss, until=1, clip=1.0))
        sw.Store(tmp_path).save(state)
        moved = state_of(mesh, sw.Plan())
        sw.Store(tmp_path).load_latest(moved)
        sw.Store(tmp_path).save(moved)  # as a run does that is told to stop before its first step
        for clip, said in ((1.0, []), (None, ["step 2: changed since it was saved: clip_norm: 1.0 -> None"])):
            again = state_of(mesh, sw.Plan())
            sw.Store(tmp_path).load_latest(again)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in sw.steps(again, loss, until=3, clip=clip):
                    pass
                next(sw.steps(again, loss, until=4, clip=0.5))  # the script's own, and no checkpoint's
            assert [str(warning.message) for warning in caught] == said


class Frozen(nn.Sequential):
    def __init__(self, frozen: bool) -> None:
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 4))
        self[0].requires_grad_(not frozen)


def test_parameters_that_are_frozen_now_are_named(tmp_path: Path) -> None:
    with sw.open_mesh(sw.Plan()) as mesh:
        for frozen in (False, True):
            placed = sw.apply(lambda frozen=frozen: Frozen(frozen), sw.Plan(), mesh, seed=1)
            state = sw.TrainState(placed, sw.adamw(placed, lr=0.1), sw.loader(ROWS, 4, mesh, seed=3))
            if frozen:
                with pytest.raises(
                    CheckpointError, match=r"state of 0\.bias, 0\.weight \(2 parameters\), of which this run keeps none"
                ):
                    sw.Store(tmp_path).load_latest(state)
            for _ in sw.steps(state, lambda y, _: sw.mean_over(y.square()), until=2):
                pass
            if not frozen:
                sw.Store(tmp_path).save(state)


@pytest.mark.parametrize(
    ("frozen", "wanted"),
    [
        ((True, False), "frozen -> trained, with a state of the optimizer that begins anew"),
        ((False, True), "trained -> frozen"),
    ],
)
def test_parameters_that_were_frozen_are_said(tmp_path: Path, frozen: tuple[bool, bool], wanted: str) -> None:
    with sw.open_mesh(sw.Plan()) as mesh:
        states = []
        for each in frozen:
            placed = sw.apply(lambda each=each: Frozen(each), sw.Plan(), mesh, seed=1)
            states.append(sw.TrainState(placed, sw.sgd(placed, lr=0.1)))
        sw.Store(tmp_path).save(states[0])
        with pytest.warns(UserWarning, match="0.bias"):
            loaded = sw.Store(tmp_path).load_latest(states[1])
        assert loaded is not None and loaded.changes == (f"0.bias, 0.weight (2 parameters): {wanted}",)


@pytest.mark.parametrize(
    ("wanted", "now"),
    [
        ((), lambda step: 1 / (1 + step)),
        (("stateful.scheduler, its function at step 2: 0.3333333333333333 -> 1.0",), lambda step: 1.0),
        (("stateful.scheduler, its function at step 2: 0.3333333333333333 -> 3.0",), functools.partial(max, 3)),
    ],
)
def test_another_function_of_a_scheduler_is_said(tmp_path: Path, wanted: tuple[str, ...], now: Any) -> None:
    with sw.open_mesh(sw.Plan()) as mesh:
        for function in (lambda step: 1 / (1 + step), now):
            state = state_of(mesh, sw.Plan())
            scheduler = torch.optim.lr_scheduler.LambdaLR(state.optimizer.torch, function)
            state.keep(scheduler=scheduler)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # no step of the optimizer before those of the scheduler
                loaded = sw.Store(tmp_path).load_latest(state)
                scheduler.step()
                scheduler.step()
            sw.Store(tmp_path).save(state) if loaded is None else None
        assert loaded is not None and loaded.changes == wanted


def grouped(mesh: sw.Mesh, kind: str) -> sw.TrainState:
    placed = sw.apply(lambda: nn.Linear(4, 4), sw.Plan(), mesh, seed=1)
    weight, bias = placed.parameters()
    slow: dict[str, Any] = {"params": [bias], "lr": 0.01}
    groups: dict[str, list[Any]] = {
        "two": [{"params": [weight]}, slow],
        "swapped": [slow, {"params": [weight]}],
        "exchanged": [{"params": [bias]}, slow | {"params": [weight]}],
    }
    return sw.TrainState(placed, torch.optim.AdamW(groups.get(kind, [weight, bias]), lr=0.1))


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("two", ()),
        ("swapped", ("base_lr[0]: 0.1 -> 0.01", "base_lr[1]: 0.01 -> 0.1")),
        (
            "exchanged",
            (
                "weight (1 parameter): in another group of the optimizer (lr: 0.1 -> 0.01)",
                "bias (1 parameter): in another group of the optimizer (lr: 0.01 -> 0.1)",
            ),
        ),
        ("one", ("base_lr: [0.1, 0.01] -> [0.1]", "optimizer.groups: 2 -> 1")),
    ],
)
def test_other_groups_of_an_optimizer_are_said(tmp_path: Path, kind: str, wanted: tuple[str, ...]) -> None:
    """A group that is gone passed for that of another stage of a pipeline."""
    with sw.open_mesh(sw.Plan()) as mesh:
        sw.Store(tmp_path).save(grouped(mesh, "two"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = sw.Store(tmp_path).load_latest(grouped(mesh, kind))
        assert loaded is not None and loaded.changes == wanted


def test_another_average_is_said(tmp_path: Path) -> None:
    with sw.open_mesh(sw.Plan()) as mesh:
        sw.Store(tmp_path).save(state_of(mesh, sw.Plan(), ema={"decay": 0.9}))
        with pytest.warns(match="ema_decay"):
            loaded = sw.Store(tmp_path).load_latest(state_of(mesh, sw.Plan(), ema={"decay": 0.5, "warmup": True}))
        assert loaded is not None and loaded.changes == ("ema_decay: 0.9 -> 0.5", "ema_warmup: False -> True")


def normed(mesh: sw.Mesh, words: str) -> sw.TrainState:
    plan = sw.Plan.parse(words)
    placed = sw.apply(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), plan, mesh, seed=1)
    return sw.TrainState(placed, sw.sgd(placed, lr=0.1), sw.loader(ROWS, plan.batch, mesh, global_size=4, seed=3))


def test_batch_norm_over_other_micro_batches_is_said(tmp_path: Path) -> None:
    with sw.open_mesh(sw.Plan()) as mesh:
        sw.Store(tmp_path).save(normed(mesh, "dp1"))
        for words, wanted in (("dp1", ()), ("dp1 / mb2", ("batch_norm.micro_batches: 1 -> 2",))):
            with pytest.warns(match="batch_norm") if wanted else warnings.catch_warnings():
                loaded = sw.Store(tmp_path).load_latest(normed(mesh, words))
            assert loaded is not None and loaded.changes == wanted


def test_a_run_goes_on_in_each_of_its_stores(tmp_path: Path) -> None:
    """The last steps and the best: loaded from one, saved to both; and nowhere that is further, or another's."""
    with sw.open_mesh(sw.Plan()) as mesh:
        state = state_of(mesh, sw.Plan())
        for step, names in ((2, ["last", "best"]), (3, ["last"]), (5, ["further"])):
            state.step = step
            for name in names:
                sw.Store(tmp_path / name).save(state)
        sw.Store(tmp_path / "other").save(state_of(mesh, sw.Plan()))
        again = state_of(mesh, sw.Plan())
        assert sw.Store(tmp_path / "last").load_latest(again) is not None
        again.step = 4
        for name in ("best", "last"):
            sw.Store(tmp_path / name).save(again)
        for name in ("further", "other"):
            with pytest.raises(CheckpointError, match="holds another run"):
                sw.Store(tmp_path / name).save(again)


def test_a_second_save_of_a_state_keeps_its_metric(tmp_path: Path) -> None:
    """A loop that is told to stop saves once more, and knows no metric: the best one was the best no longer."""
    with sw.open_mesh(sw.Plan()) as mesh:
        state, store = state_of(mesh, sw.Plan()), sw.Store(tmp_path, keep=sw.Retention(last=1, best=1))
        for step, metric in ((1, 0.5), (2, 0.9), (3, None)):
            state.step = step
            store.save(state, metric=metric)
            if step == 1:
                sw.Store(tmp_path, keep=store.retention).load_latest(state)
                store.save(state)
        assert [(path.name, Manifest.read(path).metric) for path in store.checkpoints()] == [
            ("step-00000003", None), ("step-00000001", 0.5)
        ]  # fmt: skip
        store.save(state, metric=0.1)
        with torch.no_grad():
            next(state.placed.parameters()).add_(1)  # another state of that step
        store.save(state)
        assert Manifest.read(tmp_path / "step-00000003").metric is None


def test_batches_that_cannot_say_where_they_are_are_refused() -> None:
    with sw.open_mesh(sw.Plan()) as mesh:
        placed = sw.apply(lambda: nn.Linear(4, 4), sw.Plan(), mesh)
        with pytest.raises(UsageError, match="batches of type list, which cannot say where it is"):
            sw.TrainState(placed, sw.adamw(placed, lr=0.1), [1, 2])


class Drawing:
    """Batches of a script's own, which tell where their generator is; `more` is what else they tell."""

    def __init__(self, more: Any = None) -> None:
        self.generator, self.seen, self.more = torch.Generator().manual_seed(7), np.zeros(2, dtype=np.int32), more

    def __next__(self) -> torch.Tensor:
        self.seen += 1
        return torch.rand(4, 4, generator=self.generator)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state(), "seen": self.seen, "more": self.more}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        self.seen = state["seen"]


def test_batches_of_ones_own_tell_tensors_and_arrays_and_nothing_that_no_file_holds(tmp_path: Path) -> None:
    with sw.open_mesh(sw.Plan()) as mesh:
        placed = sw.apply(lambda: nn.Linear(4, 4), sw.Plan(), mesh)
        one, other = Drawing(), Drawing()
        next(one)
        sw.Store(tmp_path).save(sw.TrainState(placed, sw.adamw(placed, lr=0.1), one))
        assert sw.Store(tmp_path).load_latest(sw.TrainState(placed, sw.adamw(placed, lr=0.1), other)) is not None
        assert other.seen.dtype == np.int32 and other.seen.tolist() == [1, 1]
        assert torch.equal(next(other), next(one))
        sw.TrainState(placed, sw.adamw(placed, lr=0.1), Drawing(list(range(100_000)))).scalars()  # an order of samples
        with pytest.raises(ModelError, match=r"batches: a checkpoint cannot hold its state at \.more: found Linear"):
            sw.Store(tmp_path).save(sw.TrainState(placed, sw.adamw(placed, lr=0.1), Drawing(nn.Linear(1, 1))))
