"""A small regression for tests of the step: a model, data as (x, y) tuples, one plan's run and plain PyTorch's.

`Case` says what is trained; `run` gives a `grid.Trace` under a plan, `reference` the same in one process without
Shardwise's training code: `grid.differences` compares them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.parallel.init import init_model
from tests.parity import grid

WIDTH, SEED, LR = 8, 3, 1e-2
RULES = {
    "first": "replicate",
    "layers.*.up": "column",
    "layers.*.down": "row",
    "last": "replicate",
}
"""How the tp axis splits `Net`."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """x (rows, 5) -> (rows, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class Points:
    """Samples (x, y, weight); `bad` names one whose x is NaN."""

    def __init__(self, num: int, bad: int | None = None) -> None:
        draw = torch.Generator().manual_seed(13)
        self.x = torch.randn(num, 5, generator=draw, dtype=torch.float64)
        self.y = torch.randn(num, 3, generator=draw, dtype=torch.float64)
        self.weight = torch.rand(num, generator=draw, dtype=torch.float64)
        if bad is not None:
            self.x[bad] = torch.nan

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: Any) -> tuple[Tensor, Tensor, Tensor]:
        return self.x[index], self.y[index], self.weight[index]


# loss functions: (output, [x, y, weight]) -> what a user may return


def per_row(output: Tensor, batch: list[Tensor]) -> Tensor:
    return (output - batch[1]).square().sum(dim=1)


def weighted(output: Tensor, batch: list[Tensor]) -> sw.Loss:
    return sw.Loss((per_row(output, batch) * batch[2]).sum(), batch[2].sum())


def a_pair(output: Tensor, batch: list[Tensor]) -> tuple[Tensor, float]:
    return (per_row(output, batch) * batch[2]).sum(), float(batch[2].sum())


def a_mean_over(output: Tensor, batch: list[Tensor]) -> sw.Loss:
    return sw.mean_over(per_row(output, batch), batch[2] > 0.5)


def a_scalar_mean(output: Tensor, batch: list[Tensor]) -> Tensor:
    return per_row(output, batch).mean()


LOSSES: dict[str, Callable[[Tensor, list[Tensor]], Any]] = {
    f.__name__: f for f in (weighted, a_pair, a_mean_over, a_scalar_mean)
}
WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "weighted": lambda w: w,
    "a_pair": lambda w: w,
    "a_mean_over": lambda w: (w > 0.5).double(),
    "a_scalar_mean": torch.ones_like,
}
"""What each loss function means: the weight of a row."""


@dataclass(frozen=True)
class Case:
    rows: int = 40
    global_batch: int = 8
    steps: int = 3
    epochs: int | None = None
    loss: str = "weighted"
    clip: float | None = 2.0


def reference(case: Case) -> grid.Trace:
    """Plain PyTorch in one process, whole batches."""
    module, trace, data = init_model(Net, seed=SEED, dtype=torch.float64), grid.Trace(), Points(case.rows)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR)
    with sw.open_mesh(sw.Plan()) as mesh:
        order = sw.loader(data, case.global_batch, mesh, seed=SEED, epochs=case.epochs)
        for window, _ in zip(order, range(case.steps), strict=False):
            x, y, w = data.x[window.indices], data.y[window.indices], WEIGHTS[case.loss](data.weight[window.indices])
            loss = ((module(x) - y).square().sum(dim=1) * w).sum() / w.sum()
            loss.backward()
            trace.norms.append(nn.utils.clip_grad_norm_(module.parameters(), case.clip or torch.inf).item())
            trace.losses.append(loss.item())
            trace.grads.append({n: p.grad.clone() for n, p in module.named_parameters()})
            optimizer.step()
            optimizer.zero_grad()
    trace.params = {n: p.detach().clone() for n, p in module.named_parameters()}
    return trace


def run(text: str, case: Case) -> tuple[grid.Trace, list[str]]:
    """The same under a plan; also what this rank warned of."""
    trace = grid.Trace()
    with placed_state(text, case) as state, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        grid.spy_on_gradients(state, trace)
        for metrics in sw.steps(state, LOSSES[case.loss], until=case.steps, clip=case.clip):
            trace.losses.append(metrics.loss)
            trace.norms.append(metrics.grad_norm)
        trace.params = {n: grid.whole(p) for n, p in state.placed.named_parameters().items()}
    said = [str(w.message) for w in caught if issubclass(w.category, UserWarning)]
    return trace, [text for text in said if "weigh" in text]


@contextmanager
def placed_state(text: str, case: Case, data: Any = None, **options: Any) -> Iterator[sw.TrainState]:
    """A fresh state under a plan; `options` go to the loader."""
    plan = sw.Plan.parse(text)
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(Net, plan, mesh, seed=SEED, rules=RULES if plan.axes.tp > 1 else None)
        source = data if data is not None else Points(case.rows)
        batches = sw.loader(source, grid.batch(plan, case.global_batch), mesh, seed=SEED, epochs=case.epochs, **options)
        yield sw.TrainState(placed, sw.adamw(placed, lr=LR), batches)


def check(world: Any, text: str, case: Case, tolerance: float = 1e-11) -> list[list[str]]:
    """A plan against one process; returns what each rank warned of."""
    text = f"{text} / fp64"
    results = world(sw.Plan.parse(text).world, run, text, case)
    worst = grid.differences([trace for trace, _ in results], grid.alone(world, reference, case))
    assert max(worst.values()) <= tolerance, worst
    return [said for _, said in results]
