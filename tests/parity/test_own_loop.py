"""The user's own loop, optimizer and groups around `make_step`, against plain PyTorch; and `evaluate`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import shardwise as sw
from shardwise.errors import UsageError
from shardwise.parallel.init import init_model
from tests.parity import grid, points

ROWS, STEPS, CLIP = 12, 3, 1.5
Params = dict[str, Tensor]


class Partly(points.Net):
    """A model with layers that are frozen, or that forward does not use."""

    def __init__(self, frozen: tuple[str, ...] = (), spare: bool = False) -> None:
        super().__init__()
        if spare:
            self.spare = nn.Linear(points.WIDTH, 3)
        for name in frozen:
            self.get_submodule(name).requires_grad_(False)


def windows(num_rows: int = ROWS) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The whole batch of each step."""
    data = points.Points(num_rows * STEPS)
    for start in range(0, num_rows * STEPS, num_rows):
        window = slice(start, start + num_rows)
        yield data.x[window], data.y[window], data.weight[window]


def mine(window: tuple[Tensor, ...], mesh: sw.Mesh) -> tuple[Tensor, ...]:
    return tuple(t.tensor_split(mesh.batch.size)[mesh.batch.rank] for t in window)


def one_group(named: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named.values(), lr=points.LR)


def three_groups(named: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    """Biases without decay, the last layer with a rate of its own, everything else."""
    bias = [p for n, p in named.items() if n.endswith("bias")]
    last = [p for n, p in named.items() if n == "last.weight"]
    rest = [p for n, p in named.items() if n != "last.weight" and not n.endswith("bias")]
    groups = [{"params": bias, "weight_decay": 0.0}, {"params": last, "lr": 1e-3}, {"params": rest}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=points.LR, weight_decay=0.1)


def some_sgd(named: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in named.values() if p.requires_grad], lr=0.1, momentum=0.9, nesterov=True)


def plain(
    build: Callable[[dict[str, nn.Parameter]], torch.optim.Optimizer],
    factory: Callable[[], nn.Module] = points.Net,
    clip: Callable[[Any], Any] | None = None,
) -> Params:
    """One process without Shardwise."""
    module = init_model(factory, seed=points.SEED, dtype=torch.float64)
    optimizer = build(dict(module.named_parameters()))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for x, y, _ in windows():
        (module(x) - y).square().sum(dim=1).mean().backward()
        clip(module.parameters()) if clip else nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return {n: p.detach() for n, p in module.named_parameters()}


def plain_ddp() -> Params:
    """What a DDP user writes."""
    with sw.open_mesh(sw.Plan.parse("dp2")) as mesh:
        model = DistributedDataParallel(init_model(points.Net, seed=points.SEED, dtype=torch.float64))
        optimizer = torch.optim.AdamW(model.parameters(), lr=points.LR)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for window in windows():
            x, y, _ = mine(window, mesh)
            (model(x) - y).square().sum(dim=1).mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        return {n.removeprefix("module."): p.detach() for n, p in model.named_parameters()}


def own_loop(
    text: str,
    build: Callable[[dict[str, nn.Parameter]], torch.optim.Optimizer],
    factory: Callable[[], nn.Module] = points.Net,
    options: sw.StepOptions | None = None,
) -> Params:
    """The same with `apply` and `make_step`; the optimizer and its schedule are torch's."""
    plan = sw.Plan.parse(text)
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(factory, plan, mesh, seed=points.SEED, rules=points.RULES if plan.axes.tp > 1 else None)
        optimizer = build(placed.named_parameters())
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        state = sw.TrainState(placed, optimizer)
        step = sw.make_step(state, points.a_scalar_mean, options=options or sw.StepOptions(clip_norm=CLIP))
        for number, window in enumerate(windows(), start=1):
            metrics = step(mine(window, mesh))
            schedule.step()
            assert metrics.step == number and not metrics.skipped
        return {n: grid.whole(p) for n, p in placed.named_parameters().items()}


def check(ranks: list[Params], truth: Params) -> None:
    assert set().union(*ranks) == truth.keys()
    for rank in ranks:
        for name, tensor in rank.items():
            torch.testing.assert_close(tensor, truth[name], rtol=1e-11, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}")


def test_equals_plain_ddp(world) -> None:
    check(world(2, own_loop, "dp2 / fp64", one_group), world(2, plain_ddp)[0])


PLANS = ["dp2 / mb2", "fsdp2", "fsdp2 / zero1 / mb3", "tp2", "pp2 / 1f1b mb2", "dp2 tp2"]


@pytest.mark.share(4)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("build", [one_group, three_groups])
def test_own_optimizer_and_schedule(world, plan: str, build: Any) -> None:
    ranks = world(sw.Plan.parse(plan).world, own_loop, f"{plan} / fp64", build)
    check(ranks, grid.alone(world, plain, build))


@pytest.mark.share(4)
@pytest.mark.parametrize("plan", ["dp2", "fsdp2", "tp2", "pp2 / 1f1b mb2"])
def test_clip_by_value(world, plan: str) -> None:
    options = sw.StepOptions(clip_value=0.1)
    ranks = world(2, own_loop, f"{plan} / fp64", one_group, points.Net, options)
    clip = functools.partial(nn.utils.clip_grad_value_, clip_value=0.1)
    truth = grid.alone(world, plain, one_group, points.Net, clip)
    check(ranks, truth)
    with pytest.raises(AssertionError):  # the value was one that clips
        check(ranks, grid.alone(world, plain, one_group))


FROZEN = functools.partial(Partly, ("first", "layers.1", "layers.3"))


@pytest.mark.share(4)
@pytest.mark.parametrize("plan", ["dp2", "fsdp2", "fsdp2 / zero1 / mb2", "tp2", "pp2 / 1f1b mb2"])
def test_frozen_parameters(world, plan: str) -> None:
    ranks = world(2, own_loop, f"{plan} / fp64", some_sgd, FROZEN)
    check(ranks, world(1, plain, some_sgd, FROZEN)[0])
    start = init_model(points.Net, seed=points.SEED, dtype=torch.float64)
    for name, parameter in start.named_parameters():
        for rank in ranks:
            frozen = name.startswith(("first", "layers.1", "layers.3"))
            assert name not in rank or torch.equal(rank[name], parameter) == frozen, name


SPARE = functools.partial(Partly, (), True)


@pytest.mark.share(2)
@pytest.mark.parametrize("plan", ["dp2 / find-unused", "dp2 / find-unused / mb2", "fsdp2", "fsdp2 / zero1 / mb2"])
def test_parameter_that_forward_does_not_use(world, plan: str) -> None:
    check(world(2, own_loop, f"{plan} / fp64", one_group, SPARE), world(1, plain, one_group, SPARE)[0])


# evaluation

HELD_OUT = 13


def own_batches(mesh: sw.Mesh) -> list[Any]:
    """The held-out rows as a script's own batches: one that is cut into micro-batches, and a list of one of a row."""
    data = points.Points(HELD_OUT)
    mine = slice(mesh.batch.rank, 12, mesh.batch.size)
    last = data[12:] if mesh.batch.rank == 0 else data[:0]
    return [data[mine], [last]]


def evaluated(text: str, during: bool) -> tuple[list[tuple[float, float]], Params]:
    """Two steps with an evaluation around each, or without any."""
    case, sums = points.Case(steps=2), []
    with points.placed_state(text, case) as state:
        loop = sw.steps(state, points.weighted, until=case.steps)
        for _ in range(case.steps):
            if during:
                total = sw.evaluate(state.placed, points.weighted, state.batches.evaluation(points.Points(HELD_OUT)))
                sums.append((float(total.sum), float(total.weight)))
                own = sw.evaluate(state.placed, points.weighted, own_batches(state.mesh))
                torch.testing.assert_close((float(own.sum), float(own.weight)), sums[-1], rtol=1e-12, atol=0)
                with pytest.raises(UsageError, match=r"one batch \(tuple\)"):
                    sw.evaluate(state.placed, points.weighted, points.Points(1)[:1])
            next(loop)
        assert all(part.run.training for part in state.placed.parts)
        return sums, {n: grid.whole(p) for n, p in state.placed.named_parameters().items()}


def evaluated_plainly() -> list[tuple[float, float]]:
    """One process, the held-out set in one forward."""
    module, held_out, sums = init_model(points.Net, seed=points.SEED, dtype=torch.float64), points.Points(HELD_OUT), []
    optimizer, data = torch.optim.AdamW(module.parameters(), lr=points.LR), points.Points(40)
    with sw.open_mesh(sw.Plan()) as mesh:
        for window in (next(batches) for batches in [sw.loader(data, 8, mesh, seed=points.SEED)] for _ in range(2)):
            with torch.no_grad():
                total, weight = points.weighted(module(held_out.x), [held_out.x, held_out.y, held_out.weight])
            sums.append((float(total), float(weight)))
            rows = [t[window.indices] for t in (data.x, data.y, data.weight)]
            total, weight = points.weighted(module(rows[0]), rows)
            (total / weight).backward()
            optimizer.step()
            optimizer.zero_grad()
    return sums


@pytest.mark.share(6)
@pytest.mark.parametrize("plan", ["dp1 / mb3", "dp4", "dp4 / mb2", "fsdp2", "fsdp4 / mb3", "tp2", "pp2 / 1f1b mb4"])
def test_evaluate_is_exact_and_leaves_training_alone(world, plan: str) -> None:
    size = sw.Plan.parse(plan).world
    truth = grid.alone(world, evaluated_plainly)
    without = world(size, evaluated, f"{plan} / fp64", False)
    for (sums, params), (_, untouched) in zip(world(size, evaluated, f"{plan} / fp64", True), without, strict=True):
        torch.testing.assert_close(sums, truth, rtol=1e-12, atol=0)
        assert all(torch.equal(params[name], untouched[name]) for name in untouched)
