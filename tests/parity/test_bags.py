"""Words of all rows in one tensor, with the places where each begins, are no rows that a plan can cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.errors import ModelError

LENGTHS = [3, 2, 4, 1, 5, 2, 3, 4]


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(20, 8), nn.Linear(8, 3)

    def forward(self, text: Tensor, offsets: Tensor | None = None) -> Tensor:
        result: Tensor = self.head(self.bag(text, offsets))
        return result


def loss_fn(output: Tensor, batch: dict[str, Tensor]) -> sw.Loss:
    labels = batch["labels"][: len(output)]
    return sw.Loss(F.cross_entropy(output, labels, reduction="sum"), len(labels))


def rows(lengths: list[int], *, first: str) -> dict[str, Tensor]:
    starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    text = torch.randint(20, (sum(lengths),), generator=torch.Generator().manual_seed(len(lengths)))
    columns = {"text": text, "offsets": starts, "labels": torch.arange(len(lengths)) % 3}
    return {first: columns[first]} | columns


def trained(text: str, batch: Any) -> list[float]:
    plan = sw.Plan.parse(f"{text} / fp64")
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(Bag, plan, mesh, seed=1)
        step = sw.make_step(sw.TrainState(placed, sw.sgd(placed, lr=0.1)), loss_fn)
        return [step(batch).loss for _ in range(2)]


@pytest.mark.parametrize("first", ["text", "offsets"])
@pytest.mark.parametrize("lengths", [LENGTHS, [2, 1, 1, 1, 1, 1, 1, 16]])
def test_words_of_all_rows_are_not_cut(first: str, lengths: list[int]) -> None:
    """Torch ended the step in words of its own, or each micro-batch had the bags of other words."""
    with pytest.raises(ModelError, match=r"bag \(EmbeddingBag\) takes the words of all rows.*list of micro-batches"):
        trained("dp1 / mb2", rows(lengths, first=first))


def test_micro_batches_of_a_script_are_as_they_are() -> None:
    parts = [rows(LENGTHS[:4], first="offsets"), rows(LENGTHS[4:], first="offsets")]
    whole = {key: torch.cat([part[key] for part in parts]) for key in ("text", "labels")}
    whole["offsets"] = torch.tensor([0, *LENGTHS[:-1]]).cumsum(0)
    assert trained("dp1 / mb2", parts) == pytest.approx(trained("dp1", whole), rel=1e-6)


def test_bags_of_rows_are_cut() -> None:
    batch = {"text": torch.arange(24).reshape(8, 3) % 20, "labels": torch.arange(8) % 3}
    assert trained("dp1 / mb2", batch) == pytest.approx(trained("dp1", batch), rel=1e-6)
