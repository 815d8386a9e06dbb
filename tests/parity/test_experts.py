"""Expert parallelism: every plan trains a mixture of experts as one plain-PyTorch process does.

Loss and each of its parts, norm, each gradient, each parameter, the load of each expert and its bias, two steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.parallel import expert
from shardwise.parallel.layers import dispatch
from shardwise.plan.plan import Plan
from shardwise.train import step as step_module
from shardwise.train.guards import agreement
from tests.parity import grid, moe_models

BATCH = 16
TOLERANCE = {"fp32": 1e-6, "fp64": 1e-11}


@functools.cache
def truth(world: Any, model: str, precision: str = "fp64", batch: int = BATCH) -> moe_models.Result:
    return world(1, moe_models.reference, model, precision, batch)[0]


def worst_of(ranks: list[moe_models.Result], expected: moe_models.Result) -> dict[str, float]:
    """The grid's differences, those of each part of the loss, and how many counts are wrong."""
    worst = grid.differences([rank.trace for rank in ranks], expected.trace)
    worst["parts"] = max(
        abs(mine[name] - value) / abs(value)
        for rank in ranks
        for mine, theirs in zip(rank.parts, expected.parts, strict=True)
        for name, value in theirs.items()
    )
    worst["counts"] = float(
        sum(not torch.equal(counts, expected.counts[name]) for rank in ranks for name, counts in rank.counts.items())
    )
    assert {name for rank in ranks for name in rank.counts} == set(expected.counts)
    return worst


def check(world: Any, plan: str, model: str, precision: str = "fp64", batch: int = BATCH) -> None:
    text = f"{plan} / {precision}"
    ranks = world(Plan.parse(text).world, moe_models.run_plan, text, model, batch, timeout_s=120)
    worst = worst_of(ranks, truth(world, model, precision, batch))
    assert max(worst.values()) <= TOLERANCE[precision], worst


@pytest.mark.share(4)
@pytest.mark.parametrize(
    ("plan", "model"),
    [
        ("dp1 / mb4", "bias"),
        ("dp2", "softmax"),
        ("fsdp2 ep2", "bias"),
        ("fsdp4 ep4 / zero2 / mb2", "capacity"),
        ("dp2 fsdp2 ep2 / zero1 / mb2", "softmax"),
        ("tp2", "bias"),
        ("fsdp2 tp2 ep4 / mb2 / seq", "bias"),
        ("dp2 tp2 ep2", "top1"),
        ("fsdp2 cp2 ep4", "bias"),
        ("pp2 fsdp2 ep2 / interleaved mb4", "bias-deep"),
        ("fsdp2 ep2 / recompute=blocks", "bias"),
    ],
)
def test_experts_train_as_in_one_process(world: Any, plan: str, model: str) -> None:
    check(world, plan, model)


@pytest.mark.share(4)
@pytest.mark.parametrize("plan", ["fsdp4 ep2", "tp2 ep2 / seq"])
def test_experts_in_fp32(world: Any, plan: str) -> None:
    """No gradient is farther from the exact one than the tolerance, or than that of one process where it is at it too.

    Both round, each in its own order, by some 9e-7 of a gradient: the difference of the two is on some processors over
    1e-6 of it, on others below.
    """
    exact = world(1, moe_models.reference, "softmax", "fp32", BATCH, torch.float64)[0]
    ranks = world(Plan.parse(plan).world, moe_models.run_plan, f"{plan} / fp32", "softmax", BATCH, timeout_s=120)
    worst, own = worst_of(ranks, exact), worst_of([truth(world, "softmax", "fp32")], exact)
    assert own["grad"] < 1.6e-6 and worst.pop("grad") <= max(TOLERANCE["fp32"], 1.25 * own["grad"])
    assert max(worst.values()) <= TOLERANCE["fp32"], worst


def test_padding_of_uneven_windows_counts_in_no_load(world: Any) -> None:
    check(world, "fsdp2 ep2 / mb3", "bias", batch=7)


def test_ranks_whose_experts_get_no_token_train_too(world: Any) -> None:
    loads = [counts for name, counts in truth(world, "lonely").counts.items() if name.endswith("load")]
    assert not any(load[2:4].any() for load in loads)
    check(world, "fsdp2 ep2", "lonely")


def test_choices_over_the_capacity_are_dropped(world: Any) -> None:
    loads = [counts for name, counts in truth(world, "capacity").counts.items() if name.endswith("load")]
    assert all(int(load[-1]) > 0 for load in loads)


# ---------------------------------------------------------------- negative controls


def experts_divided_by_ep() -> None:
    """The gradient of experts is averaged over the ranks whose tokens it is made of, once more."""
    right = step_module.local_gradient

    def wrong(parameter: nn.Parameter) -> torch.Tensor | None:
        grad = right(parameter)
        return grad / 2 if grad is not None and parameter.dim() == 3 else grad

    step_module.local_gradient = wrong


def balance_averaged_per_micro_batch() -> None:
    """Each micro-batch divides its auxiliary loss by its own number of tokens."""
    right = moe_models.LOSSES.function

    def wrong(output: Any, batch: Any) -> dict[str, sw.Loss]:
        terms = right(output, batch)
        return terms | {"balance": sw.Loss(terms["balance"].sum / terms["tokens"].weight, terms["balance"].weight)}

    moe_models.LOSSES.function = wrong


def counts_of_this_rank() -> None:
    """The bias follows the load that a rank sees."""
    expert.StepCounts.__call__ = lambda self, updated: [m.after_step() for m in self.modules]  # type: ignore[method-assign,assignment]


def weights_before_the_way_back() -> None:
    """Results come back in the order of experts, and are taken for those of the tokens in their own order."""
    right = torch.Tensor.index_copy

    def wrong(self: torch.Tensor, dim: int, order: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return right(self, dim, torch.arange(len(order)), source)

    dispatch.torch.Tensor.index_copy = wrong  # type: ignore[attr-defined]


def run_with(fault: Callable[[], None], plan: str) -> moe_models.Result:
    fault()
    pytest.MonkeyPatch().setattr(agreement._Writes, "__call__", lambda self, updated: None)  # which says it itself
    return moe_models.run_plan(f"{plan} / fp64", "bias", BATCH)


@pytest.mark.parametrize(
    ("fault", "seen_in"),
    [
        (experts_divided_by_ep, "grad"),
        (balance_averaged_per_micro_batch, "parts"),
        (counts_of_this_rank, "counts"),
        (weights_before_the_way_back, "loss"),
    ],
)
def test_negative_control_a_planted_fault_is_seen(world: Any, fault: Callable[[], None], seen_in: str) -> None:
    worst = worst_of(world(2, run_with, fault, "fsdp2 ep2 / mb2"), truth(world, "bias"))
    assert worst[seen_in] > 1e-6, worst


# ---------------------------------------------------------------- checkpoints, other models, refusals


def save_and_load(first: str, folder: str, then: str | None = None) -> moe_models.Result:
    """Train one step under a plan and save; or load under another and train the second step."""
    plan = sw.Plan.parse(f"{then or first} / fp64")
    trace = grid.Trace()
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(moe_models.MODELS["bias"], plan, mesh, seed=grid.SEED)
        batches = sw.loader(grid.Rows(), grid.batch(plan, BATCH), mesh, seed=grid.SEED)
        state = sw.TrainState(placed, sw.adamw(placed, lr=grid.LR), batches)
        store = sw.Store(folder)
        store.load_latest(state)
        for metrics in sw.steps(state, moe_models.LOSSES, until=2 if then else 1, clip=grid.CLIP):
            trace.losses.append(metrics.loss)
        if not then:
            store.save(state)
        trace.params = {n: grid.whole(p) for n, p in placed.named_parameters().items()}
        return moe_models.Result(trace, [], moe_models.counts(placed.module))


def test_a_run_goes_on_under_another_ep(world: Any, tmp_path: Any) -> None:
    expected = truth(world, "bias")
    world(4, save_and_load, "fsdp4 ep2", str(tmp_path))
    for rank in world(2, save_and_load, "", str(tmp_path), "tp2 ep2"):
        assert rank.trace.losses == pytest.approx(expected.trace.losses[1:], rel=1e-11)
        for name, parameter in rank.trace.params.items():
            assert torch.allclose(parameter, expected.trace.params[name], rtol=1e-9, atol=1e-11), name
        assert all(torch.equal(counts, expected.counts[name]) for name, counts in rank.counts.items())


def evaluated(text: str) -> list[float]:
    plan = sw.Plan.parse(f"{text} / fp64")
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(moe_models.MODELS["bias-deep"], plan, mesh, seed=grid.SEED)
        total = sw.evaluate(placed, moe_models.LOSSES, sw.eval_batches(grid.Rows(), grid.batch(plan, 8), mesh))
        tokens = [b for n, b in placed.named_buffers().items() if n.endswith("tokens")]
        assert not any(count.any() for count in tokens), "evaluation counts in the load"
        return [float(total.sum), float(total.weight)]


def test_evaluation_gives_the_same_mean_and_counts_no_load(world: Any) -> None:
    (expected,) = world(1, evaluated, "dp1")
    for rank in world(4, evaluated, "pp2 fsdp2 ep2 / 1f1b mb2"):
        assert rank == pytest.approx(expected, rel=1e-11)


class Bank(nn.Module):
    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return x


class Layer(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts


def model_of(kind: str) -> nn.Module:
    experts: dict[str, nn.Module] = {
        "none": nn.Linear(2, 2),
        "list": nn.ModuleList(nn.Linear(2, 2) for _ in range(4)),
        "unlike": Bank(a=(4, 2, 2), b=(2, 2, 2)),
        "three": Bank(a=(3, 2, 2)),
        "linear": nn.Linear(4, 4),
    }
    if kind == "none":
        return experts[kind]
    if kind == "capacity":
        return moe_models.MODELS["capacity"]()
    return Layer(experts[kind])


def refusal(kind: str, text: str) -> str:
    plan = sw.Plan.parse(text)
    with sw.open_mesh(plan) as mesh, pytest.raises(sw.errors.ModelError) as caught:
        sw.apply(functools.partial(model_of, kind), plan, mesh)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "plan", "says"),
    [
        ("none", "fsdp2 ep2", "no expert modules in Linear"),
        ("list", "fsdp2 ep2", "experts experts (ModuleList): found 0.weight inside of it"),
        ("unlike", "fsdp2 ep2", "stacked along one first dim"),
        ("three", "fsdp2 ep2", "ep=2 does not divide its 3 experts; use ep in [1, 3]"),
        ("linear", "fsdp2 ep2", "its forward takes (input), needed (tokens, chosen, weights)"),
        ("capacity", "tp2 / seq", "use capacity_factor=None, or a plan without cp and seq"),
    ],
)
def test_what_cannot_be_dealt_out_is_refused(world: Any, kind: str, plan: str, says: str) -> None:
    for message in world(2, refusal, kind, plan):
        assert says in message


class Counting(nn.Module):
    """Experts that count themselves by a name of their own, and are called by keyword."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.inner = nn.Parameter(torch.zeros(4, 6, 6))
        setattr(self, name, 4)
        self.name, self.expansion = name, 4  # no number of experts

    def forward(self, x: torch.Tensor, idx: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        assert self.expansion == 4
        out = torch.zeros_like(x)
        for number in range(getattr(self, self.name)):
            row, slot = (idx == number).nonzero(as_tuple=True)
            out = out.index_add(0, row, (x[row] @ self.inner[number]) * w[row, slot, None])
        return out


class Routed(nn.Module):
    def __init__(self, name: str, flat: bool = True) -> None:
        super().__init__()
        self.router, self.experts, self.flat = nn.Linear(6, 4), Counting(name), flat

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        if not self.flat:
            return x + self.experts(x[None], chosen[None], weights[None])[0]
        return x + self.experts(x, w=weights, idx=chosen)


def routed(text: str, name: str, flat: bool = True) -> list[float] | str:
    plan = sw.Plan.parse(text)
    with sw.open_mesh(plan) as mesh:
        init = functools.partial(nn.init.normal_, std=0.5)
        placed = sw.apply(
            lambda: Routed(name, flat),
            plan,
            mesh,
            init=lambda m: [init(p) for p in m.parameters(recurse=False)],
            seed=1,
        )
        step = sw.make_step(sw.TrainState(placed, sw.sgd(placed, 0.1)), lambda out, x: sw.mean_over((out - x).square()))
        rows = torch.randn(8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        try:
            return [step(rows.tensor_split(mesh.batch.size)[mesh.batch.rank]).loss for _ in range(3)]
        except sw.errors.ModelError as error:
            return str(error)


@pytest.mark.parametrize("name", ["n_exp", "num_local_experts", "num_experts"])
def test_experts_that_count_themselves_and_are_called_by_name(world: Any, name: str) -> None:
    (one,) = world(1, routed, "dp1 / fp64", name)
    assert world(2, routed, "fsdp2 ep2 / fp64", name) == [pytest.approx(one, rel=1e-12)] * 2


def test_experts_that_are_called_with_a_batch_are_refused(world: Any) -> None:
    for message in world(2, routed, "fsdp2 ep2 / fp64", "n_exp", False):
        assert "called with tensors of shapes [(1, 4, 6), (1, 4, 2), (1, 4, 2)]" in message
