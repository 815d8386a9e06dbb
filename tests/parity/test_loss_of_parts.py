"""Loss functions that are others on a part: of the tokens (`cp`), or of the logits (`loss-parallel`)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise.errors import ModelError
from shardwise.testing import World

VOCAB, TOKENS = 16, 8


def model() -> torch.nn.Module:
    return sw.GPT(sw.GPTConfig(vocab_size=VOCAB, dim=8, num_layers=1, num_heads=2, max_seq_len=TOKENS))


def shifted(logits: Tensor, batch: dict[str, Tensor]) -> sw.Loss:
    return sw.token_cross_entropy(logits[:, :-1], batch["labels"][:, 1:])


def chances(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The logarithm of each row's chance."""
    return logits.log_softmax(-1).gather(-1, batch["labels"][..., None])[..., 0].sum(1)


def preferred(logits: Tensor, batch: dict[str, Tensor]) -> sw.Loss:
    return sw.mean_over(torch.nn.functional.softplus(-chances(logits, batch)))


def summed(logits: Tensor, batch: dict[str, Tensor]) -> sw.Loss:
    return sw.Loss(-chances(logits, batch).sum(), batch["labels"].numel())


def by_torch(logits: Any, batch: dict[str, Tensor]) -> sw.Loss:
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    return sw.mean_over(losses)


def whole(logits: Any, batch: dict[str, Tensor]) -> sw.Loss:
    return by_torch(logits.full_tensor() if hasattr(logits, "full_tensor") else logits, batch)


def told(text: str, loss_fn: Callable[..., sw.Loss]) -> tuple[float, list[str]]:
    """The loss of a second step, and what was said: warnings, or an error and its notes."""
    plan = sw.Plan.parse(f"{text} / fp64")
    with sw.open_mesh(plan) as mesh, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = sw.make_step(sw.TrainState(placed := sw.apply(model, plan, mesh), sw.sgd(placed, lr=0.1)), loss_fn)
        ids = torch.randint(VOCAB, (4, TOKENS), generator=torch.Generator().manual_seed(1))
        try:
            loss = [step({"input_ids": ids, "labels": ids.flip(1)}).loss for _ in range(2)][-1]
        except (ModelError, RuntimeError) as error:
            return 0.0, [str(error), *getattr(error, "__notes__", [])]
        return loss, [str(warning.message) for warning in caught if "per token" in str(warning.message)]


def test_a_loss_that_shifts_labels_is_refused_where_ranks_have_some_tokens(world: World) -> None:
    """The last token of each piece has its label on another rank: another loss, without a word."""
    for _, said in world(2, told, "cp2", shifted):
        assert (
            "[module.mixes-tokens] the loss function takes a part of the sequence, of which this rank has 4" in said[0]
        )


@pytest.mark.parametrize("loss_fn", [preferred, summed])
def test_sums_over_a_rows_tokens_are_remarked_once(world: World, loss_fn: Any) -> None:
    (alone, _) = world(1, told, "dp1", loss_fn)[0]
    first, second = world(2, told, "cp2", loss_fn)
    assert len(first[1]) == 1 and "sum along the sequence, of one number per token" in first[1][0] and not second[1]
    assert (first[0] == pytest.approx(alone, rel=1e-12)) == (loss_fn is summed)


def test_a_loss_of_torchs_own_on_split_logits_is_told_what_they_are(world: World) -> None:
    for _, said in world(2, told, "tp2 / loss-parallel", by_torch):
        assert "mixed torch.Tensor and DTensor" in said[0] and "output.full_tensor()" in said[1]
        assert "given a tensor (4, 8, 16), split over ranks as (Shard(dim=2),), as the output" in said[1]
    (alone, _) = world(1, told, "dp1", whole)[0]
    assert world(2, told, "tp2 / loss-parallel", whole) == [(pytest.approx(alone, rel=1e-12), [])] * 2


class Classes(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def weighted(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return torch.nn.functional.cross_entropy(output, batch[1], weight=torch.tensor([1.0, 2.0, 9.0]))


def ignoring(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return torch.nn.CrossEntropyLoss(ignore_index=2)(output, batch[1])


def alike(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return torch.nn.functional.cross_entropy(output, batch[1])


def divided(output: Tensor, batch: tuple[Tensor, Tensor]) -> sw.Loss:
    return sw.token_cross_entropy(output, batch[1], ignore_index=2)


def balanced(output: Tensor, batch: tuple[Tensor, Tensor]) -> sw.Loss:
    """A factor between two losses by the gradients of a weight, from the second step on."""
    one, other = output.square().mean(1), output.abs().mean(1)
    if CALLS:
        (weight,) = [node.variable for node in leaves_of(output) if node.variable.dim() == 2]
        norms = [torch.autograd.grad(loss.sum(), weight, retain_graph=True)[0].norm() for loss in (one, other)]
        other = other * (norms[0] / norms[1])
    CALLS.append(1)
    return sw.mean_over(one + other)


CALLS: list[int] = []


def leaves_of(output: Any) -> list[Any]:
    nodes = [node for node, _ in output.grad_fn.next_functions if node is not None]
    return [leaf for node in nodes for leaf in ([node] if hasattr(node, "variable") else leaves_of_node(node))]


def leaves_of_node(node: Any) -> list[Any]:
    return [each for each, _ in node.next_functions if hasattr(each, "variable")]


def remarked(text: str, loss_fn: Callable[..., Any]) -> list[str]:
    plan = sw.Plan.parse(text)
    with sw.open_mesh(plan) as mesh, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        placed = sw.apply(Classes, plan, mesh)
        step = sw.make_step(sw.TrainState(placed, sw.sgd(placed, lr=0.1)), loss_fn)
        for _ in range(18):  # one call of 17 is looked at
            part = slice(mesh.batch.rank, None, mesh.batch.size)
            step((torch.arange(16.0).view(4, 4)[part], torch.tensor([0, 1, 2, 2])[part]))
        return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("loss_fn", "said"),
    [
        (weighted, "with weights of classes"),
        (ignoring, "over 1 labels of 2, which ignores others"),
        (alike, ""),
        (divided, ""),
    ],
)
def test_means_over_something_else_than_rows_are_remarked(world: World, loss_fn: Any, said: str) -> None:
    """Ranks whose labels weigh differently made another mean of them than one process, without a word."""
    assert remarked("dp1", loss_fn) == []
    for rank, found in enumerate(world(2, remarked, "dp2", loss_fn)):
        assert len(found) == bool(said)
        assert not said or found[0].startswith(f"rank {rank}: the loss function returned a mean") and said in found[0]


def test_a_gradient_of_a_weight_in_a_loss_is_remarked(world: World) -> None:
    """Each part balanced its losses by its own rows, without a word."""
    assert world(1, remarked, "dp1", balanced) == [[]]
    first, second = world(2, remarked, "dp2", balanced)
    assert len(first) == 1 and "takes the gradient of a weight (torch.autograd.grad)" in first[0] and not second
