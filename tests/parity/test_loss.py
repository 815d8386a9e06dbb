"""Losses as sums and weights; the loss from vocabulary shards against torch's on whole logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import shardwise as sw
from shardwise.errors import ModelError, UsageError
from shardwise.parallel.compose import apply
from shardwise.parallel.mesh import open_mesh
from shardwise.plan.plan import Axes, Plan
from shardwise.testing.world import World
from shardwise.train.loop import evaluate
from shardwise.train.loss import Loss, as_loss, mean_over, token_cross_entropy
from shardwise.train.optimizers import sgd
from shardwise.train.state import TrainState
from shardwise.train.step import make_step

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-11}


def batch(vocab: int = 12, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(3, 4, vocab, generator=generator, dtype=dtype)
    labels = torch.randint(0, vocab, (3, 4), generator=generator)
    labels[0, :2] = -100
    return logits, labels


def by_definition(logits: torch.Tensor, labels: torch.Tensor, z_loss: float) -> torch.Tensor:
    total = logits.new_zeros(())
    for row, label in zip(logits.flatten(0, 1), labels.flatten(), strict=True):
        if label != -100:
            log_total = row.exp().sum().log()
            total = total + log_total - row[label] + z_loss * log_total**2
    return total


def sharded(tp: int, vocab: int, dtype: torch.dtype, z_loss: float) -> tuple[float, float, int, int]:
    """Relative differences of loss and gradient to the definition; weight; elements of the largest saved tensor."""
    with open_mesh(Plan(axes=Axes(tp=tp))) as mesh:
        logits, labels = batch(vocab, dtype)
        expected_logits = logits.clone().requires_grad_()
        expected = by_definition(expected_logits, labels, z_loss)
        (expected * 3).backward()
        whole = distribute_tensor(logits, mesh.device_mesh["tp"], (Shard(-1),)).requires_grad_()
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.append(t.numel()), t)[1], lambda t: t):
            loss = token_cross_entropy(whole, labels, z_loss=z_loss)
        # not `.grad`: there torch 2.11 keeps a whole copy of a gradient whose shards are uneven
        (gradient,) = torch.autograd.grad(loss.sum * 3, whole)
        assert isinstance(gradient, DTensor) and expected_logits.grad is not None
        assert gradient.placements[0] in (Shard(2), Shard(-1))
        difference = (gradient.full_tensor() - expected_logits.grad).norm() / expected_logits.grad.norm()
        value = float((loss.sum.detach() - expected.detach()).abs() / expected.detach())
        return value, float(difference), int(loss.weight), max(sizes)


@pytest.mark.share(2)
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("tp", "vocab"), [(2, 12), (4, 12), (4, 9)], ids=["tp2", "tp4", "uneven"])
def test_sharded_loss_equals_the_definition(
    world: World, tp: int, vocab: int, dtype: torch.dtype, z_loss: float
) -> None:
    for value, gradient, weight, largest in world(tp, sharded, tp, vocab, dtype, z_loss):
        assert value <= TOLERANCE[dtype] and gradient <= TOLERANCE[dtype] and weight == 10
        assert largest <= 12 * math.ceil(vocab / tp)  # no rank keeps the whole logits


def other_placements() -> list[float]:
    with open_mesh(Plan(axes=Axes(tp=2))) as mesh:
        logits, labels = batch()
        tp_mesh = mesh.device_mesh["tp"]
        replicated = DTensor.from_local(logits, tp_mesh, (Replicate(),))
        partial = DTensor.from_local(logits / 2, tp_mesh, (Partial(),))
        with pytest.raises(ModelError, match="sharded along dim 1, needed dim 2"):
            token_cross_entropy(DTensor.from_local(logits, tp_mesh, (Shard(1),)), labels.repeat(1, 2))
        with pytest.raises(UsageError, match="outside the vocabulary, the first is 12"):
            token_cross_entropy(distribute_tensor(logits, tp_mesh, (Shard(2),)), torch.full_like(labels, 12))
        return [float(token_cross_entropy(x, labels).sum) for x in (logits, replicated, partial)]


def test_other_placements_of_the_logits(world: World) -> None:
    for values in world(2, other_placements):
        assert values == pytest.approx([values[0]] * 3, rel=1e-12)


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_whole_logits_equal_the_definition(z_loss: float) -> None:
    logits, labels = batch()
    loss = token_cross_entropy(logits, labels, z_loss=z_loss)
    assert torch.allclose(loss.sum, by_definition(logits, labels, z_loss), rtol=1e-12)
    assert loss.weight == 10
    flat = token_cross_entropy(logits.flatten(0, 1), labels.flatten(), z_loss=z_loss)
    assert torch.equal(flat.sum, loss.sum)


def test_half_precision_is_computed_in_fp32() -> None:
    logits, labels = batch()
    half = logits.bfloat16()
    loss = token_cross_entropy(half, labels)
    assert loss.sum.dtype == torch.float32
    expected = F.cross_entropy(half.double().flatten(0, 1), labels.flatten(), reduction="sum")
    assert torch.allclose(loss.sum.double(), expected, rtol=1e-6)


def test_nothing_to_learn_from_is_zero_with_weight_zero() -> None:
    logits, labels = batch()
    logits.requires_grad_()
    for z_loss in (0.0, 0.1):
        loss = token_cross_entropy(logits, torch.full_like(labels, -100), z_loss=z_loss)
        assert loss.sum == 0 and loss.weight == 0
        (gradient,) = torch.autograd.grad(loss.sum, logits)
        assert gradient.abs().max() == 0


def test_labels_and_logits_that_do_not_fit_are_refused() -> None:
    logits, labels = batch()
    with pytest.raises(UsageError, match=r"labels are torch.int64 of shape \(3, 3\), needed .*\(3, 4\)"):
        token_cross_entropy(logits, labels[:, 1:])
    with pytest.raises(UsageError, match="labels are torch.int32"):
        token_cross_entropy(logits, labels.int())
    with pytest.raises(UsageError, match="2 label.* outside the vocabulary, the first is -1"):
        token_cross_entropy(logits, torch.where(labels == -100, -1, labels))
    with pytest.raises(UsageError, match="logits are torch.int64"):
        token_cross_entropy(labels, labels)


def test_mean_over() -> None:
    values = torch.tensor([[1.0, 2.0], [math.nan, 4.0]])
    keep = torch.tensor([[True, True], [False, True]])
    assert mean_over(values, keep) == Loss(torch.tensor(7.0), torch.tensor(3))
    assert mean_over(values[0]) == Loss(torch.tensor(3.0), torch.tensor(2))
    assert mean_over(values[0], torch.tensor([0.5, 2.0])) == Loss(torch.tensor(4.5), torch.tensor(2.5))
    assert mean_over(values[:, 1:].expand(2, 3), torch.tensor([[True], [False]])).weight == 3
    with pytest.raises(UsageError, match="broadcasts"):
        mean_over(values, torch.ones(3))
    with pytest.raises(UsageError, match=r"torch.int64, needed a floating"):
        mean_over(torch.ones(2, dtype=torch.int64))


def test_as_loss_takes_three_forms() -> None:
    assert as_loss(torch.tensor(2.0), 3) == Loss(torch.tensor(6.0), 3)
    assert as_loss((torch.tensor(2.0), 5), 3) == Loss(torch.tensor(2.0), 5)
    loss = Loss(torch.tensor([2.0]), torch.tensor([4]))
    assert as_loss(loss, 3).sum.shape == () and as_loss(loss, 3).weight == 4
    assert as_loss((torch.tensor(math.nan), 5), 3).weight == 5  # the step has a policy for that


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (torch.ones(3), r"torch.float32 of shape \(3,\), needed a floating tensor of one element"),
        (2.0, "as its result float"),
        (torch.tensor(1), "torch.int64"),
        (None, "NoneType, needed.*a model is not given `labels`"),
        ((torch.tensor(1.0),), "tuple of 1"),
        ((torch.tensor(1.0), -1), "weight -1.0"),
        ((torch.tensor(1.0), torch.tensor(math.nan)), "weight nan"),
        ((torch.tensor(1.0), math.inf), "weight inf"),
        ((torch.tensor(1.0), "3"), "as its weight str"),
        ((torch.tensor(1.0), True), "as its weight bool"),
        ((torch.tensor(1.0), torch.ones(2)), r"a tensor of shape \(2,\)"),
        ((torch.tensor(1.0), torch.tensor(1.0, requires_grad=True)), "requires a gradient"),
    ],
)
def test_as_loss_refuses(result: object, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        as_loss(result, 3)


LOGITS = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
ANSWERS = torch.arange(8) % 4


@pytest.mark.parametrize("measure", [torch.tensor(0.375), 0.375, 37.5])
@pytest.mark.parametrize("of", [F.cross_entropy, lambda x, y: F.cross_entropy(x, y) + 0.5 + x.square().mean()])
def test_a_measure_beside_a_mean_is_no_weight(measure: object, of: Callable[..., torch.Tensor]) -> None:
    """The loss was divided by the accuracy, without a word."""
    with pytest.raises(UsageError, match=r"returned a mean and (0\.375|37\.5): .*the mean alone"):
        as_loss((of(LOGITS, ANSWERS), measure), 8)


def test_weights_that_are_no_counts() -> None:
    """Weights of rows, and a tuple that is called by its name."""
    shares = torch.full((8,), 0.3)
    each = F.cross_entropy(LOGITS, ANSWERS, reduction="none")
    for loss in [
        ((each * shares).sum(), shares.sum()),
        (F.cross_entropy(LOGITS, ANSWERS) * 2.5, 2.5),
        Loss((each * shares).mean(), shares.mean()),
        (each.mean(), 1.0),
    ]:
        assert as_loss(loss, 8).weight == loss[1]


def test_negative_control_a_mean_of_means_is_not_the_mean() -> None:
    """Two ragged micro-batches: sums and weights add up to the whole; means do not."""
    logits, labels = batch()
    whole = token_cross_entropy(logits, labels)
    parts = [token_cross_entropy(logits[i], labels[i]) for i in range(3)]
    right = sum(p.sum for p in parts) / sum(p.weight for p in parts)
    wrong = sum(p.sum / p.weight for p in parts) / 3
    assert torch.allclose(right, whole.sum / whole.weight, rtol=1e-12)
    assert not torch.allclose(wrong, whole.sum / whole.weight, rtol=1e-3)


def test_a_loss_function_of_other_arguments_is_told_what_it_is_given() -> None:
    plan, rows = Plan.parse("dp1"), (torch.ones(4, 2), torch.ones(4, 2))
    with open_mesh(plan) as mesh:
        placed = apply(lambda: torch.nn.Linear(2, 2), plan, mesh)
        state = TrainState(placed, sgd(placed, lr=0.1))
        for other, said in (
            (lambda batch: batch, "too many positional arguments"),
            (lambda output, x, y: output, "missing a required argument: 'y'"),
            (None, "found None of type NoneType"),
        ):
            with pytest.raises(UsageError, match=said) as refused:
                make_step(state, other)
            assert "def loss_fn(output, batch)" in str(refused.value)

        def of_the_model(model: Any, batch: Any) -> Any:
            return (model(batch[0]) - batch[1]).square().mean()

        with pytest.raises(UsageError, match=r"given a tensor \(4, 2\) as the output, and a tuple of 2 as the micro"):
            make_step(state, of_the_model)(rows)
        with pytest.raises(UsageError, match="calls what it is given"):
            evaluate(placed, of_the_model, [rows])
        with pytest.raises(AttributeError, match="'tuple'") as plain:
            make_step(state, torch.nn.MSELoss())(rows)
        assert "MSELoss was given a tensor (4, 2)" in plain.value.__notes__[0]


def the_same_object_twice(text: str) -> tuple[float, dict[str, float]]:
    with sw.open_mesh(plan := sw.Plan.parse(text)) as mesh:
        placed = sw.apply(lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)), plan, mesh)
        weights = {"square": lambda rows: 2 * len(rows["input"])}
        losses = sw.Losses(lambda out, _: {"square": mean_over(out.square())}, weights=weights)
        m = sw.make_step(sw.TrainState(placed, sw.sgd(placed, lr=0.1)), losses)([{"input": torch.ones(2, 4)}] * 2)
    return m.loss, dict(m.losses)


def test_a_micro_batch_that_comes_twice_counts_twice_in_each_loss(world: World) -> None:
    [(loss, losses)] = world(1, the_same_object_twice, "dp1 / mb2")
    assert losses == {"square": pytest.approx(loss)}


def of_nothing(text: str) -> str:
    plan = Plan.parse(text)
    with open_mesh(plan) as mesh:
        placed = apply(lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)), plan, mesh, seed=1)
        with pytest.raises(UsageError) as found:
            evaluate(placed, lambda output, _: mean_over(output), torch.utils.data.DataLoader([], batch_size=4))
        return str(found.value)


@pytest.mark.parametrize("text", ["dp1", "dp2", "pp2 / gpipe mb2"])
def test_an_evaluation_of_no_batches(world: World, text: str) -> None:
    """It was a loss that is no number."""
    for said in world(Plan.parse(text).world, of_nothing, text):
        assert "found no batch on any rank in DataLoader" in said
