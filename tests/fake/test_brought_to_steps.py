"""What scripts of other libraries hand to optimizers, states, stores and steps: trained right, or refused by name."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

import shardwise as sw
from shardwise.errors import ModelError, UsageError
from shardwise.testing import fake_world

PLAN, ROWS = sw.Plan(), 8


class Named(UserDict):
    """A batch as collators of transformers give it."""


class Samples:
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Tensor:
        return torch.arange(4.0) + index


def loss_fn(output: Tensor, _: Any) -> sw.Loss:
    return sw.mean_over(output.square())


def placed_on(mesh: sw.Mesh) -> sw.Placed:
    return sw.apply(lambda: nn.Linear(4, 2), PLAN, mesh, seed=1)


def stepped(mesh: sw.Mesh, result: Callable[[Tensor, Any], Any], batch: Any = None) -> float:
    placed = placed_on(mesh)
    step = sw.make_step(sw.TrainState(placed, sw.sgd(placed, lr=0.1)), result)
    return step(torch.ones(2, 4) if batch is None else batch).loss


def torchs(mesh: sw.Mesh) -> tuple[sw.Placed, torch.optim.Optimizer, StepLR]:
    optimizer = torch.optim.SGD((placed := placed_on(mesh)).parameters(), lr=0.1)
    return placed, optimizer, StepLR(optimizer, 1)


def a_scheduler_as_batches(mesh: sw.Mesh) -> None:
    sw.TrainState(*torchs(mesh))


def a_scheduler_as_schedule(mesh: sw.Mesh) -> None:
    placed, optimizer, scheduler = torchs(mesh)
    sw.TrainState(placed, optimizer, schedule=scheduler)


def steps_without_epochs(mesh: sw.Mesh) -> None:
    placed = placed_on(mesh)
    data = sw.loader(Samples(), 4, mesh)
    next(sw.steps(sw.TrainState(placed, sw.sgd(placed, lr=0.1), data), loss_fn, until=data.num_steps))


def a_module_that_is_loaded(mesh: sw.Mesh) -> None:
    sw.Store("nothing").load_latest(placed_on(mesh))


def two_that_set_rates(mesh: sw.Mesh) -> None:
    placed, optimizer, scheduler = torchs(mesh)
    step = sw.make_step(sw.TrainState(placed, optimizer, schedule=sw.warmup_cosine(2, 8)), loss_fn)
    for _ in range(2):
        step(torch.ones(2, 4))
        scheduler.step()


REFUSED: dict[str, tuple[Callable[[sw.Mesh], Any], str]] = {
    "parameters": (
        lambda mesh: sw.adamw(placed_on(mesh).parameters(), 0.1),
        "what apply.. gave: found generator, needed",
    ),
    "module": (lambda mesh: sw.lion(placed_on(mesh).module, 0.1), "found Linear, needed `adamw.placed, lr="),
    "batches": (a_scheduler_as_batches, "batches of type StepLR.*state.keep.scheduler=scheduler"),
    "schedule": (a_scheduler_as_schedule, "schedule: found StepLR; needed a function from the step"),
    "both": (two_that_set_rates, "found the learning rate 0.*needed 0.05, which the schedule had set"),
    "factors": (lambda mesh: sw.Losses(loss_fn, weights={"main": 0.5}), "weights of 'main': found 0.5.*factors="),
    "until": (steps_without_epochs, "until: found None.*where it is given `epochs=`"),
    "save": (
        lambda mesh: sw.Store("nothing").save(placed_on(mesh).module),
        "saves and loads a TrainState: found Linear",
    ),
    "load": (a_module_that_is_loaded, "saves and loads a TrainState: found Placed"),
    "detached": (lambda mesh: stepped(mesh, lambda y, _: y.detach().mean()), "no gradient: found one from which"),
    "none": (lambda mesh: stepped(mesh, loss_fn, []), "was given an empty list"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run, said = REFUSED[case]
    with sw.open_mesh(PLAN) as mesh, pytest.raises(UsageError, match=said):
        run(mesh)
    assert not list(tmp_path.iterdir())


def test_mappings_of_other_classes_are_batches() -> None:
    def collated(samples: list[Tensor]) -> Named:
        return Named(input=torch.stack(samples), labels=torch.ones(len(samples)))

    with sw.open_mesh(PLAN) as mesh:
        (plain,) = sw.loader(Samples(), ROWS, mesh, epochs=1, collate=collated)
        assert type(plain.micro_batches[0]) is dict
        rows = {"input": torch.ones(2, 4), "labels": torch.ones(2)}
        assert (
            stepped(mesh, loss_fn, Named(rows)) == stepped(mesh, loss_fn, [Named(rows)]) == stepped(mesh, loss_fn, rows)
        )


def test_autocast_around_a_loop_sees_each_update() -> None:
    """Torch keeps the casts of weights until its context ends: a loop inside of it would go on with the first ones."""

    def losses(*, around: bool) -> list[float]:
        with sw.open_mesh(PLAN) as mesh:
            placed = placed_on(mesh)
            step = sw.make_step(sw.TrainState(placed, sw.sgd(placed, lr=0.1)), loss_fn)
            cast = torch.autocast("cpu", torch.bfloat16)
            if around:
                with cast:
                    return [step(torch.ones(2, 4)).loss for _ in range(3)]
            found = []
            for _ in range(3):
                with cast:
                    found.append(step(torch.ones(2, 4)).loss)
            return found

    assert losses(around=True) == losses(around=False)
    assert losses(around=True)[2] < losses(around=True)[1] < losses(around=True)[0]


def net() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(2)))


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ("fsdp2", "found a whole tensor for 0.0.weight, of which each rank has a part"),
        ("pp2 / 1f1b mb2 / blocks=*", "found 1.0.bias, of another stage"),
        ("dp1", ""),
    ],
)
def test_weights_that_are_loaded_after_apply(plan: str, said: str) -> None:
    parsed, whole = sw.Plan.parse(plan), net().state_dict()
    with fake_world(parsed.world), sw.open_mesh(parsed, device="cpu") as mesh:
        placed = sw.apply(net, parsed, mesh)
        if said:
            with pytest.raises(
                ModelError, match=rf"\[module.loaded\] load_state_dict after apply: {said}.*load before it"
            ):
                placed.module.load_state_dict(whole)
        else:
            placed.module.load_state_dict(whole)
            assert torch.equal(placed.module[1][0].weight, whole["1.0.weight"])
        placed.module.load_state_dict(placed.module.state_dict())  # its own
        with pytest.raises(ModelError, match="assign=True, which puts other parameters in place"):
            placed.module.load_state_dict(placed.module.state_dict(), assign=True)
