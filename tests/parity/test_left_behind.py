"""What a look at a loss, a warning of one rank, and a step without an update leave behind: nothing."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.parallel.looks.reach import Reach
from shardwise.parallel.looks.writes import Writes
from shardwise.testing import World


class WarmedUp:
    """Counts its calls, and weighs the loss by them: the backward pass reads the count."""

    def __init__(self, kind: str) -> None:
        self.kind, self.calls = kind, torch.zeros(())

    def __call__(self, output: torch.Tensor, _: Any) -> sw.Loss:
        calls = self.calls.data if self.kind == "data" else self.calls
        calls.add_(1)
        return sw.mean_over(
            (output * self.calls.clone() if self.kind == "data" else output * self.calls).square().sum(1)
        )


def trained(text: str, kind: str) -> tuple[list[float], float]:
    plan = sw.Plan.parse(f"{text} / fp64")
    with sw.open_mesh(plan) as mesh, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of micro-batches, that it counts them
        placed = sw.apply(lambda: nn.Linear(4, 3), plan, mesh, seed=1)
        loss = WarmedUp(kind)
        step = sw.make_step(sw.TrainState(placed, sw.sgd(placed, lr=0.01)), loss)
        rows = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        own = rows.tensor_split(mesh.batch.size)[mesh.batch.rank]
        return [step(own).loss for _ in range(3)], float(loss.calls)


@pytest.mark.parametrize("kind", ["in place", "data"])
def test_what_a_loss_has_counted_and_its_backward_pass_reads_stays(world: World, kind: str) -> None:
    """In place it ended in torch's words; through `.data`, of which torch counts no write, the look's calls counted."""
    [(alone, calls)] = world(1, trained, "dp1", kind)
    assert calls == 3
    assert world(2, trained, "dp2", kind) == [(pytest.approx(alone, rel=1e-12), 3)] * 2
    assert world(1, trained, "dp1 / mb2", kind)[0][1] == 6


def test_what_was_written_and_its_count_are_put_back() -> None:
    kept = {
        "plain": torch.tensor([1.0, torch.nan]),
        "through data": torch.arange(3),
        "complex": torch.ones(2, dtype=torch.complex64).conj(),
        "float8": torch.ones(2).to(torch.float8_e4m3fn),
        "columns": torch.arange(6.0).view(2, 3).t(),
        "empty": torch.empty(0, 2),
    }
    before = {name: tensor.clone() for name, tensor in kept.items()}
    x = torch.ones(2, requires_grad=True)
    graph = x * kept["plain"][:1]
    with (writes := Writes(2**20)):
        kept["plain"].zero_()
        kept["through data"].data.add_(1)
        kept["columns"].data.mul_(2)
    assert kept["through data"].tolist() == [1, 2, 3]
    writes.put_back()
    graph.sum().backward()
    assert all(torch.equal(kept[name].nan_to_num(), before[name].nan_to_num()) for name in before if name != "float8")
    assert kept["float8"].float().tolist() == [1, 1] and x.grad is not None and x.grad.tolist() == [1, 1]


class Sentinel(type):
    """Of a value that is its own class, as libraries mark states."""


DONE: Any = Sentinel("DONE", (Sentinel,), {})
DONE.__class__ = DONE


def test_a_value_that_is_its_own_class_is_looked_at_like_any() -> None:
    assert type(DONE) is DONE and not Reach(lambda: DONE).opaque


def strict(kind: str) -> list[float]:
    """Two steps under `-W error` of what one rank alone warns of."""
    with sw.open_mesh(plan := sw.Plan.parse("dp2 / fp64")) as mesh, warnings.catch_warnings():
        placed = sw.apply(lambda: nn.Linear(4, 3), plan, mesh, seed=1)
        scale = nn.Linear(3, 1).double()  # of the loss function alone: in no sum over ranks

        def loss_fn(output: torch.Tensor, _: Any) -> torch.Tensor:
            return (scale(output) if kind == "held" else output).square().mean()

        step = sw.make_step(sw.TrainState(placed, sw.sgd(placed, lr=0.01)), loss_fn)
        rows = torch.randn(5 if kind == "rows" else 6, 4, dtype=torch.float64).tensor_split(2)[mesh.batch.rank]
        warnings.simplefilter("error")
        return [step(rows).loss for _ in range(2)]


@pytest.mark.parametrize("kind", ["held", "rows"])
def test_a_warning_of_one_rank_as_an_error_leaves_no_other_waiting(world: World, kind: str) -> None:
    assert len(world(2, strict, kind)[0]) == 2


class Growing(nn.Module):
    """Puts a longer buffer in the place of its own in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = torch.cat([self.seen, x.detach().mean().reshape(1).float()])
        return self.last(x)


def test_a_buffer_that_has_grown_in_a_step_without_an_update_is_what_it_was() -> None:
    """The step ended in an error of shapes; of one element it kept the new length, with the old value in each place."""
    with sw.open_mesh(plan := sw.Plan.parse("dp1 / fp32")) as mesh, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        placed = sw.apply(Growing, plan, mesh, seed=1)
        step = sw.make_step(
            sw.TrainState(placed, sw.sgd(placed, lr=0.01)), lambda output, _: sw.mean_over(output.square().sum(1))
        )
        found = []
        for value in (torch.nan, 1.0, torch.nan, 2.0):
            step(torch.full((2, 4), value))
            found.append(placed.named_buffers()["seen"].tolist())
        assert found == [[0], [0, 1], [0, 1], [0, 1, 2]]
