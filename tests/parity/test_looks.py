"""A look at a loss, or a model, is nothing to a script: what it counts, collects, writes and prints is of its steps."""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import itertools
import logging
import random
import sys
import types
import warnings
import weakref
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.parallel.looks.reach import Reach, unseen
from shardwise.parallel.looks.writes import Writes
from shardwise.testing import World

ROWS, STEPS = 16, 3
Pair = tuple[Tensor, Tensor]
Script = tuple[Callable[..., Any], Callable[[], Any]]
"""A loss function, and how often it has been called, as the script sees it."""
COUNTED = types.ModuleType("counted")
COUNTED.__dict__.update(number=0)
exec("seen = []\ndef note():\n    global number\n    number += 1\n    seen.append(number)\n", COUNTED.__dict__)


class Net(nn.Module):
    """Does something more in its forward, if it is told to."""

    said: list[int] = []

    def __init__(self, does: str = "") -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
        self.does, self.kept, self.numbers = does, {"a": {"b": list[int]()}}, itertools.count()
        self.counted = types.SimpleNamespace(number=0)

    def forward(self, x: Tensor) -> Tensor:
        if self.does == "print":
            print("forward")
        elif self.does == "next":
            next(self.numbers)
        elif self.does == "keep":
            self.kept["a"]["b"].append(1)
            self.counted.number += 1
            Net.said.append(1)
        result: Tensor = self.layers(x)
        return result


@dataclasses.dataclass
class Meters:
    inner: dict[str, list[Any]] = dataclasses.field(default_factory=dict)


class Method:
    """With state of the object, and of its class."""

    number, history = 0, list[int]()

    def loss(self, output: Tensor, batch: Pair) -> Tensor:
        Method.number += 1
        self.history.append(1)
        return F.cross_entropy(output, batch[1])


def in_objects() -> Script:
    meters, counter, lists = Meters(), Counter[str](), defaultdict[str, list[int]](list)
    meters.inner["x"] = [Slotted()]

    def loss_fn(output: Tensor, batch: Pair) -> Tensor:
        meters.inner["x"][0].number += 1
        counter.update(["calls"])
        lists["calls"].append(1)
        return F.cross_entropy(output, batch[1])

    return loss_fn, lambda: {meters.inner["x"][0].number, counter["calls"], len(lists["calls"])}


class Slotted:
    __slots__ = ("__weakref__", "number")

    def __init__(self) -> None:
        self.number = 0


def in_methods() -> Script:
    return Method().loss, lambda: {Method.number, len(Method.history)}


def in_modules() -> Script:
    def loss_fn(output: Tensor, batch: Pair) -> Tensor:
        COUNTED.note()
        return F.cross_entropy(output, batch[1])

    return loss_fn, lambda: {COUNTED.number, len(COUNTED.seen)}


def by_decorators() -> Script:
    number, held = 0, Slotted()
    weakly = weakref.ref(held)

    def counts(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any) -> Any:
            nonlocal number
            number += 1
            return function(*args)

        return call

    @counts
    def loss_fn(other: Slotted, output: Tensor, batch: Pair) -> Tensor:
        other.number += 0
        cast(Slotted, weakly()).number += 1  # `held` is alive
        return F.cross_entropy(output, batch[1])

    return functools.partial(loss_fn, held), lambda: {number, held.number}


def in_numbers() -> Script:
    weights, plain, table, shown = np.zeros(1), array("d", [0.0]), torch.zeros(1), torch.zeros(1)
    teacher = nn.Linear(1, 1).double()
    nn.init.zeros_(teacher.weight)

    def loss_fn(output: Tensor, batch: Pair) -> Tensor:
        weights[0] += 1
        plain[0] += 1
        table.data.add_(1)
        shown.numpy()[0] += 1
        with torch.no_grad():
            teacher.weight.add_(1)
        return F.cross_entropy(output, batch[1])

    return loss_fn, lambda: {int(x) for x in (weights[0], plain[0], table, shown, teacher.weight)}


def in_generators() -> Script:
    def three() -> tuple[Any, Any, Any]:
        return torch.Generator().manual_seed(1), random.Random(1), np.random.default_rng(1)

    used, again = three(), three()

    def draw(given: tuple[Any, Any, Any]) -> tuple[float, float, float]:
        return float(torch.rand(1, generator=given[0])), given[1].random(), float(given[2].random())

    def loss_fn(output: Tensor, batch: Pair) -> Tensor:
        draw(used)
        return F.cross_entropy(output, batch[1])

    def number() -> set[int]:
        now, drawn = draw(used), [draw(again) for _ in range(100)]
        return {[each[place] for each in drawn].index(now[place]) for place in range(3)}

    return loss_fn, number


def of_iterators() -> Script:
    weights, numbers = (1.0 + i for i in range(1000)), itertools.count()

    def loss_fn(output: Tensor, batch: Pair) -> Tensor:
        for _ in weights:
            break
        return F.cross_entropy(output, batch[1]) * (1 + 0 * next(numbers))

    return loss_fn, lambda: {int(next(weights)) - 1, next(numbers)}


def of_files() -> Script:
    text, rows, printed = io.StringIO(), io.StringIO(), io.StringIO()
    writer, logged = csv.writer(rows), list[int]()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(1)

    handler = Handler()
    logger = logging.Logger("one")
    logger.addHandler(handler)

    def loss_fn(output: Tensor, batch: Pair) -> Tensor:
        text.write("x")
        writer.writerow([1])
        print("x", file=printed)
        logger.warning("x")
        return F.cross_entropy(output, batch[1])

    return loss_fn, lambda: {*map(len, (text.getvalue(), rows.getvalue().split(), printed.getvalue().split(), logged))}


def of_optimizers() -> Script:
    critic = nn.Linear(1, 1).double()
    nn.init.zeros_(critic.weight)
    optimizer, other = torch.optim.SGD(critic.parameters(), lr=1.0), nn.Linear(1, 1).double()

    def loss_fn(output: Tensor, batch: Pair) -> Tensor:
        one = torch.ones(1, 1, dtype=torch.float64)
        with torch.enable_grad():
            other(one).sum().backward()
            optimizer.zero_grad()
            critic(one).neg().sum().backward()
            optimizer.step()
        return F.cross_entropy(output, batch[1])

    return loss_fn, lambda: {round(critic.weight.item()), int(other.weight.grad or 0)}


def that_ends() -> Script:
    rows, calls = list[int](), list[int]()

    def loss_fn(output: Tensor, batch: Pair) -> Tensor:
        calls.append(1)
        rows.append(len(output))
        if len(output) != rows[0]:
            sys.exit("rows")
        return F.cross_entropy(output, batch[1])

    return loss_fn, lambda: {len(calls)}


SCRIPTS = [in_objects, in_methods, in_modules, by_decorators, in_numbers, in_generators, of_iterators, of_files,
           of_optimizers, that_ends]  # fmt: skip


def trained(text: str, model: Callable[[], nn.Module], loss_fn: Callable[..., Any]) -> tuple[list[float], Any]:
    plan = sw.Plan.parse(f"{text} / fp64")
    with sw.open_mesh(plan) as mesh, warnings.catch_warnings(action="ignore"):
        placed = sw.apply(model, plan, mesh, seed=1)
        step = sw.make_step(sw.TrainState(placed, sw.sgd(placed, lr=0.1)), loss_fn)
        x = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        mine = slice(mesh.batch.rank, None, mesh.batch.size)
        steps = [step((x[mine].clone(), torch.arange(ROWS)[mine] // 2 % 4)) for _ in range(STEPS)]
        return [number for m in steps for number in (m.loss, m.grad_norm)], placed.parts[0].root


def counted(text: str, name: str) -> tuple[list[float], set[int]]:
    loss_fn, number = globals()[name]()
    return trained(text, Net, loss_fn)[0], number()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
@pytest.mark.parametrize("text", ["dp1 / mb2", "dp2", "fsdp2 / mb2"])
def test_a_loss_is_called_once_for_a_micro_batch_as_the_script_sees_it(
    world: World, text: str, script: Callable[[], Script]
) -> None:
    """A look called it up to sixteen times more: lines were printed and written again, iterators and teachers went on,
    and `sys.exit` for a part of the rows ended training."""
    (expected, _), *_ = world(1, counted, "dp1", script.__name__)
    for found, number in world(1 if text.startswith("dp1") else 2, counted, text, script.__name__):
        assert number == {STEPS * sw.Plan.parse(text).batch.micro_batches}
        assert found == pytest.approx(expected, rel=1e-12)


def of_model(text: str, does: str) -> set[int]:
    printed = io.StringIO()
    before, sys.stdout = sys.stdout, printed
    try:
        root = trained(text, functools.partial(Net, does), lambda output, batch: F.cross_entropy(output, batch[1]))[1]
    finally:
        sys.stdout = before
    if does == "print":
        return {printed.getvalue().count("forward")}
    return {next(root.numbers)} if does == "next" else {len(root.kept["a"]["b"]), root.counted.number, len(Net.said)}


@pytest.mark.parametrize("does", ["keep", "next", "print"])
@pytest.mark.parametrize("text", ["dp1 / mb2", "dp2"])
def test_a_model_runs_once_for_a_micro_batch_as_the_script_sees_it(world: World, text: str, does: str) -> None:
    for number in world(1 if text.startswith("dp1") else 2, of_model, text, does):
        assert number == {STEPS * sw.Plan.parse(text).batch.micro_batches}


def hooked(text: str) -> int:
    """What a script's hooks see: on modules, and on all of them."""
    plan, seen = sw.Plan.parse(f"{text} / fp64"), list[int]()
    with sw.open_mesh(plan) as mesh, warnings.catch_warnings(action="ignore"):
        placed = sw.apply(Net, plan, mesh, seed=1)
        placed.module.layers.register_forward_hook(lambda *_: seen.append(1))
        of_all = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module) is Net))
        step = sw.make_step(sw.TrainState(placed, sw.sgd(placed, lr=0.1)), lambda o, b: F.cross_entropy(o, b[1]))
        for _ in range(STEPS):
            step((torch.ones(ROWS, 4, dtype=torch.float64), torch.arange(ROWS) % 4))
        of_all.remove()
    return sum(seen)


@pytest.mark.parametrize("text", ["dp1 / mb2", "dp2"])
def test_hooks_of_a_script_see_the_forwards_of_training(world: World, text: str) -> None:
    for number in world(1 if text.startswith("dp1") else 2, hooked, text):
        assert number == 2 * STEPS * sw.Plan.parse(text).batch.micro_batches


def test_what_autograd_has_kept_may_be_written_for_a_look() -> None:
    """Its version would tell the backward pass that follows that it was changed."""
    table = torch.ones(3)
    result = (torch.ones(3, requires_grad=True) * table).sum()
    writes = Writes(2**20)
    with torch.no_grad(), writes:
        table.mul_(2)
        torch.zeros(2)[0] = 1
    writes.put_back()
    result.backward()
    assert table.tolist() == [1, 1, 1] and table._version == 0


def test_what_nobody_can_copy_is_said() -> None:
    def named() -> int:
        return 1

    assert not Reach({"a": [named, Slotted(), np.ones(3)]}).opaque
    for value in (iter([1]), (i for i in range(3)), io.StringIO(), functools.lru_cache(named), csv.reader([])):
        assert Reach({"a": [value]}).opaque


def test_a_run_without_values_leaves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    kept = {"a": [1]}
    with unseen(kept):
        kept["a"].append(2)
        print("twice")
    assert kept == {"a": [1]} and not capsys.readouterr().out
