"""Blocks whose forward writes buffers, computed again in the backward pass: as where they are computed once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise.errors import ModelError
from tests.parity import grid

WIDTH, ROWS, STEPS = 6, 8, 3


class Writing(nn.Module):
    """Counts, moves a centre that it uses, puts another buffer in the place of one, and has a batch norm."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("centre", torch.zeros(WIDTH))
        self.register_buffer("level", torch.zeros(WIDTH))
        self.register_buffer("seldom", torch.zeros(()))
        self.late = late

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) - self.centre
        if self.training:
            with torch.no_grad():
                if self.late and self.count == 1:
                    self.seldom.add_(1)
                self.count.add_(1)
                self.centre.mul_(0.9).add_(y.mean(0), alpha=0.1)
                self.level = self.level * 0.5 + y.std(0)
        return x + self.norm(torch.tanh(y) * (1 + self.level))


class Net(nn.Module):
    def __init__(self, late: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Writing(late) for _ in range(4))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.spectral_norm
        self.layers = nn.ModuleList(nn.Sequential(norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Counting(nn.Module):
    """Its weight grows with the calls that an attribute counts, which is made in the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.temperature = nn.Linear(WIDTH, WIDTH), 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        self.temperature *= 0.9
        return x + self.temperature * torch.tanh(self.linear(x) / self.calls)


class Warmed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Counting() for _ in range(4))


def run(text: str, kind: type[nn.Module] = Net, **words: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Loss and gradient norm of each step; parameters and buffers of this rank behind them."""
    plan = sw.Plan.parse(f"{text} / fp64")
    with sw.open_mesh(plan) as mesh:
        draw = torch.Generator().manual_seed(1)
        rows = torch.randn(STEPS, ROWS, WIDTH, generator=draw, dtype=torch.float64)
        placed = sw.apply(lambda: kind(**words), plan, mesh, seed=0, sample=rows[0, :2])
        step = sw.make_step(sw.TrainState(placed, sw.adamw(placed, lr=1e-2)), lambda y, _: sw.mean_over(y.square()))
        said = [step(batch.chunk(mesh.batch.size)[mesh.batch.rank]) for batch in rows]
        found = {name: grid.whole(tensor) for name, tensor in placed.named_parameters().items()}
        found |= {name: buffer.clone() for name, buffer in placed.named_buffers().items()}
        return [number for metrics in said for number in (metrics.loss, metrics.grad_norm)], found


@pytest.mark.share(3)
@pytest.mark.parametrize(
    ("plan", "like"),
    [
        ("mb2 / recompute=blocks", "mb2"),
        ("recompute=ops", "dp1"),
        ("recompute=every2", "dp1"),
        ("pp2 / 1f1b mb2 / recompute=blocks", "mb2"),
        ("pp2 / zero-bubble-v mb2 / recompute=blocks", "mb2"),
        ("recompute=blocks / offload=activations", "dp1"),
    ],
)
def test_what_forward_writes_is_written_once(world: Any, plan: str, like: str) -> None:
    [(expected, state)] = world(1, run, like)
    for numbers, found in world(sw.Plan.parse(plan).world, run, plan):
        assert numbers == pytest.approx(expected, rel=1e-12)
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, state[name], rtol=1e-11, atol=1e-13, msg=name)
    assert state["layers.0.count"] == STEPS * (2 if "mb2" in like else 1)


@pytest.mark.parametrize(
    ("plan", "like"),
    [("recompute=blocks", "dp1"), ("mb2 / recompute=ops", "mb2"), ("pp2 / 1f1b mb2 / recompute=blocks", "mb2")],
)
def test_numbers_that_a_module_counts_are_counted_once(world: Any, plan: str, like: str) -> None:
    """The second forward counted on: a block whose course depends on it computed other gradients, without a word."""
    [(expected, state)] = world(1, run, like, Warmed)
    for numbers, found in world(sw.Plan.parse(plan).world, run, plan, Warmed):
        assert numbers == pytest.approx(expected, rel=1e-12)
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, state[name], rtol=1e-11, atol=1e-13, msg=name)


class Derived(Net):
    """Blocks in a transform of `torch.func`; or blocks that make one."""

    def __init__(self, inside: bool, transform: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Gradient() if inside else nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.transform = transform

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            match self.transform:
                case "vjp":
                    x = torch.func.vjp(layer, x)[0]
                case "vmap":
                    x = torch.vmap(layer)(x)
                case _:
                    x = layer(x)
        return self.head(x)


class Gradient(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.grad(lambda y: super(Gradient, self).forward(y).square().sum())(x)


@pytest.mark.parametrize(
    ("inside", "transform", "where"),
    [(False, "vjp", "is called within"), (False, "vmap", "is called within"), (True, "", "calls")],
)
def test_transforms_of_recomputed_blocks_are_refused(inside: bool, transform: str, where: str) -> None:
    run("dp1", Derived, inside=inside, transform=transform)
    with pytest.raises(ModelError, match=rf"\[module.transformed\] recompute: layers.0 {where} a transform"):
        run("dp1 / recompute=blocks", Derived, inside=inside, transform=transform)


def test_vectors_of_a_spectral_norm_move_once(world: Any) -> None:
    [(expected, state)], [(numbers, found)] = (
        world(1, run, text, Spectral) for text in ("dp1", "recompute=blocks")
    )  # fmt: skip
    assert numbers == expected and all(torch.equal(found[name], state[name]) for name in state)


class _Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func is torch.ops.aten.convolution.default
        return func(*args, **(kwargs or {}))


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(("plan", "calls"), [("recompute=blocks", 8), ("recompute=ops", 4)])
def test_results_of_convolutions_are_kept_where_operators_are_chosen(plan: str, calls: int) -> None:
    with sw.open_mesh(sw.Plan.parse(plan)) as mesh:
        placed = sw.apply(Pictures, sw.Plan.parse(plan), mesh)
        with _Calls() as mode:
            placed.module(torch.ones(1, 2, 4, 4)).sum().backward()
    assert mode.number == calls


def test_a_buffer_that_is_written_late_is_refused(world: Any) -> None:
    with pytest.raises(ModelError, match=r"forward of layers.0 has written its buffer layers.0.seldom, .*first run"):
        run("recompute=blocks", late=True)
