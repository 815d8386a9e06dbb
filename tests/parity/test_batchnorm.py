"""A convolutional net with batch norm on scikit-learn's digits: statistics, gradients and weights of one process."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.parallel import data
from shardwise.parallel.init import init_model
from shardwise.parallel.layers.batchnorm import _Forward as Normal
from shardwise.parallel.mesh import GRADIENT_AXES
from shardwise.parallel.padding import Padding
from shardwise.testing.world import WorldError
from shardwise.train.guards import agreement
from tests.parity import grid

SEED, LR, BATCH = 5, 1e-2, 22  # 22 rows over 4 ranks: 6, 6, 5, 5


class CNN(nn.Module):
    """Images (rows, 1, 8, 8) -> logits (rows, 10); blocks keep the number of channels, so a pipeline can cut."""

    def __init__(self, last: str = "usual") -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)) for _ in range(2)
        )
        norms = {"usual": nn.BatchNorm1d(128), "cumulative": nn.BatchNorm1d(128, momentum=None), "none": nn.Identity()}
        self.norm = norms[last]
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(F.max_pool2d(x.relu(), 2).flatten(1)))


class Digits:
    """Samples (image, label), as most data sets of torchvision give them."""

    def __init__(self, rows: slice) -> None:
        digits = load_digits()
        self.x = torch.tensor(digits.images[rows], dtype=torch.float32)[:, None] / 16
        self.y = torch.tensor(digits.target[rows])

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


def loss_fn(logits: Tensor, batch: Any) -> sw.Loss:
    return sw.token_cross_entropy(logits, batch[1])


@dataclass
class Run:
    trace: grid.Trace = field(default_factory=grid.Trace)
    buffers: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    rows: int = 200
    batch: int = BATCH
    steps: int = 3
    epochs: int | None = None
    last: str = "usual"
    """Kind of the last norm."""

    def model(self) -> nn.Module:
        return CNN(self.last)


def reference(case: Case) -> Run:
    """Plain PyTorch, one process, whole batches."""
    module, data, run = init_model(case.model, seed=SEED, dtype=torch.float64), Digits(slice(case.rows)), Run()
    optimizer = torch.optim.SGD(module.parameters(), lr=LR, momentum=0.9)
    with sw.open_mesh(sw.Plan()) as mesh:
        order = sw.loader(data, case.batch, mesh, seed=SEED, epochs=case.epochs)
        for window, _ in zip(order, range(case.steps), strict=False):
            loss = F.cross_entropy(module(data.x[window.indices].double()), data.y[window.indices])
            loss.backward()
            run.trace.losses.append(loss.item())
            run.trace.norms.append(nn.utils.clip_grad_norm_(module.parameters(), torch.inf).item())
            run.trace.grads.append({n: p.grad.clone() for n, p in module.named_parameters()})
            optimizer.step()
            optimizer.zero_grad()
    run.trace.params = {n: p.detach().clone() for n, p in module.named_parameters()}
    run.buffers = {n: b.clone() for n, b in module.named_buffers()}
    return run


def run_plan(text: str, case: Case) -> Run:
    plan, run = sw.Plan.parse(text), Run()
    with sw.open_mesh(plan) as mesh:
        sample = (torch.zeros(2, 1, 8, 8), torch.zeros(2, dtype=torch.int64))  # says which stage owns which statistics
        placed = sw.apply(case.model, plan, mesh, seed=SEED, sample=sample)
        batches = sw.loader(Digits(slice(case.rows)), grid.batch(plan, case.batch), mesh, seed=SEED, epochs=case.epochs)
        state = sw.TrainState(placed, sw.sgd(placed, lr=LR, momentum=0.9), batches)
        grid.spy_on_gradients(state, run.trace)
        for metrics in sw.steps(state, loss_fn, until=case.steps):
            run.trace.losses.append(metrics.loss)
            run.trace.norms.append(metrics.grad_norm)
        run.trace.params = {n: grid.whole(p) for n, p in placed.named_parameters().items()}
        run.buffers = {n: b.clone() for n, b in placed.named_buffers().items()}
    return run


@functools.cache
def truth(world: Any, case: Case) -> Run:
    return world(1, reference, case)[0]


def check(world: Any, plan: str, case: Case) -> None:
    ranks, right = world(sw.Plan.parse(plan).world, run_plan, f"{plan} / fp64", case), truth(world, case)
    worst = grid.differences([rank.trace for rank in ranks], right.trace)
    assert max(worst.values()) <= 1e-11, worst
    buffers: dict[str, Tensor] = {}
    for rank in ranks:
        for name, buffer in rank.buffers.items():
            torch.testing.assert_close(buffer, right.buffers[name], rtol=1e-11, atol=1e-13)
        buffers |= rank.buffers
    assert buffers.keys() == right.buffers.keys()


@pytest.mark.share(6)
@pytest.mark.parametrize(
    "plan",
    [
        *("dp1", "dp2", "dp4", "fsdp2", "fsdp4 / zero1", "dp2 fsdp2", "pp2 / gpipe mb1", "pp2 dp2 / gpipe mb1"),
        *("recompute=blocks", "dp2 / recompute=ops", "fsdp2 / recompute=blocks", "pp2 dp2 / gpipe mb1 / recompute=ops"),
    ],
)
def test_equals_one_process(world, plan: str) -> None:
    check(world, plan, Case())


def test_pure_bf16_takes_its_statistics_in_fp32_on_one_process_too(world) -> None:
    one, two = (world(ranks, run_plan, f"dp{ranks} / bf16-pure", Case())[0] for ranks in (1, 2))
    torch.testing.assert_close(one.trace.losses, two.trace.losses, rtol=0.02, atol=0.0)


def test_cumulative_average(world) -> None:
    check(world, "dp2", Case(last="cumulative"))


@pytest.mark.parametrize("plan", ["dp4", "fsdp4"])
def test_ranks_without_rows_count_in_no_statistics(world, plan: str) -> None:
    check(world, plan, Case(rows=2 * BATCH + 3, epochs=1))  # the third window has three rows for four ranks


@pytest.mark.share(4)
@pytest.mark.parametrize(
    "plan",
    [
        *("dp2 / mb2", "fsdp2 / zero1 / mb3", "dp2 fsdp2 / mb2", "pp2 dp2 / 1f1b mb2"),
        "pp2 dp2 / 1f1b mb2 / recompute=blocks",
    ],
)
def test_micro_batches_without_rows_count_in_no_statistics(world, plan: str) -> None:
    # both rows are in the first micro-batch, one on each rank; a norm of two numbers leaves nothing but rounding
    check(world, plan, Case(rows=2, batch=2, steps=2, last="none"))


def unsynchronised(text: str, case: Case) -> Run:
    pytest.MonkeyPatch().setattr(agreement._Writes, "__call__", lambda self, updated: None)  # which says it itself
    return said_unsynchronised(text, case)


def said_unsynchronised(text: str, case: Case) -> Run:
    data.synchronise_batch_norm = lambda part, group: None
    return run_plan(text, case)


def test_statistics_of_one_rank_would_be_seen(world) -> None:
    with pytest.raises(WorldError, match="running_mean must be equal on ranks 0, 1"):
        world(2, said_unsynchronised, "dp2 / fp64", Case())
    ranks = world(2, unsynchronised, "dp2 / fp64", Case())
    right = truth(world, Case())
    assert max(grid.differences([rank.trace for rank in ranks], right.trace).values()) > 1e-3
    assert not torch.allclose(ranks[0].buffers["norm.running_mean"], right.buffers["norm.running_mean"])


def accuracy(text: str) -> list[float]:
    """Right answers on held-out digits after 30 steps, as a share: counted by `evaluate`, and by hand."""
    plan = sw.Plan.parse(text)
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(CNN, plan, mesh, seed=SEED)
        batches = sw.loader(Digits(slice(1400)), grid.batch(plan, 64), mesh, seed=SEED)
        state = sw.TrainState(placed, sw.adamw(placed, lr=LR), batches)
        for _ in sw.steps(state, loss_fn, until=30, clip=1.0):
            pass
        held_out = Digits(slice(1400, None))
        right = sw.evaluate(placed, hits, batches.evaluation(held_out))
        assert right.weight == len(held_out) == 397
        placed.train(False)
        with torch.no_grad():
            by_hand = placed.parts[0].run(held_out.x).argmax(dim=1) == held_out.y
        return [float(right.sum / right.weight), float(by_hand.double().mean())]


def hits(logits: Tensor, batch: Any) -> sw.Loss:
    return sw.mean_over((logits.argmax(dim=1) == batch[1]).float())


@pytest.mark.share(4)
@pytest.mark.parametrize("plan", ["dp1", "dp2", "fsdp2", "dp2 / bf16", "fsdp2 / bf16-pure"])
def test_learns_digits(world, plan: str) -> None:
    for by_evaluate, by_hand in world(sw.Plan.parse(plan).world, accuracy, plan):
        assert by_evaluate == by_hand > 0.8


def twice(rows: int) -> list[Tensor]:
    """Gradients of a penalty on the gradient, of a norm over all ranks' rows; `rows`: of this rank, of 12 in all."""
    with sw.open_mesh(sw.Plan.parse("dp2" if rows < 12 else "dp1")) as mesh:
        torch.manual_seed(3)
        norm, x = nn.BatchNorm2d(3).double(), torch.randn(12, 3, 4, dtype=torch.float64).unsqueeze(-1)
        with torch.no_grad():
            norm.weight.copy_(torch.tensor([0.5, 2.0, -1.0]))
        start = mesh.rank * 7
        x = x[start : start + rows].clone().requires_grad_()
        group = mesh.group(*GRADIENT_AXES) if rows < 12 else None
        forward: Callable[[Tensor], Tensor] = Normal(norm, group, Padding()) if rows < 12 else norm.__call__
        (slope,) = torch.autograd.grad(forward(x).sin().sum(), x, create_graph=True)
        found = torch.autograd.grad(slope.pow(2).sum() + forward(x).pow(3).sum(), [x, norm.weight, norm.bias])
        if group is not None:
            for each in found[1:]:
                dist.all_reduce(each, group=group)
        return list(found)


def unequal() -> list[Tensor]:
    return twice(7 if int(os.environ["RANK"]) == 0 else 5)


def test_second_derivatives_go_through_the_statistics_of_all_ranks(world) -> None:
    ranks, (whole,) = world(2, unequal), world(1, twice, 12)
    torch.testing.assert_close(torch.cat([rank[0] for rank in ranks]), whole[0], rtol=1e-10, atol=1e-10)
    for found in ranks:
        torch.testing.assert_close(found[1:], whole[1:], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("affine", [True, False])
def test_it_is_torchs_norm_and_keeps_its_input_alone(kind: torch.dtype, affine: bool) -> None:
    norm, wide = nn.BatchNorm2d(5, affine=affine).to(kind), max(kind, torch.float32, key=lambda each: each.itemsize)
    like = copy.deepcopy(norm).to(wide)
    x, slope = torch.randn(6, 5, 4, 4).add(3).to(kind), torch.randn(6, 5, 4, 4).to(kind)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t):
        y = Normal(norm, None, Padding())(x.requires_grad_())
    y.backward(slope)
    other = x.detach().to(wide).requires_grad_()
    expected = like(other)
    expected.backward(slope.to(wide))
    close = functools.partial(
        torch.testing.assert_close, **({"rtol": 0.02, "atol": 0.02} if kind == torch.bfloat16 else {})
    )
    close(y, expected.to(kind))
    close(x.grad, other.grad.to(kind))
    close([t.to(wide) for t in norm.buffers()], [t.to(wide) for t in like.buffers()])
    for own, torchs in zip(norm.parameters(), like.parameters(), strict=True):
        close(own.grad, torchs.grad.to(kind))
    assert sum(kept) < x.nbytes + 1000  # and numbers per channel


def one_row_each(text: str) -> list[float]:
    """Losses where each of four ranks has a row, behind a batch norm and a dropout."""
    plan = sw.Plan.parse(text)
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(
            lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2)),
            plan, mesh, seed=SEED,
        )  # fmt: skip
        step = sw.make_step(sw.TrainState(placed, sw.sgd(placed, lr=0.1)), lambda y, x: sw.mean_over(y.square()))
        rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(SEED), dtype=torch.float64)
        own = rows.tensor_split(mesh.batch.size)[mesh.batch.rank]
        return [step(own).loss for _ in range(4)]


def test_a_row_on_each_rank_is_a_batch(world) -> None:
    [truth] = world(1, one_row_each, "dp1 / fp64")
    assert world(4, one_row_each, "dp4 / fp64") == [pytest.approx(truth, rel=1e-12)] * 4
