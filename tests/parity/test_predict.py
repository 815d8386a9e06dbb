"""`predict`: results of every row, once, in the order of the data set, on every rank, under every plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

import shardwise as sw
from shardwise.errors import UsageError
from shardwise.testing import World

ROWS = 23  # divides by no number of ranks and micro-batches


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(torch.relu(self.up(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, input: Tensor) -> Tensor:
        for block in self.blocks:
            input = block(input)
        return self.head(input)


def gpt() -> nn.Module:
    return sw.GPT(sw.GPTConfig(vocab_size=16, dim=8, num_layers=1, num_heads=2, max_seq_len=8))


RULES = {"blocks.*.up": "column", "blocks.*.down": "row", "head": "column-gather"}


def dataset() -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [
        {"input": torch.randn(8, generator=draw, dtype=torch.float64), "name": torch.tensor(100 + i)}
        for i in range(ROWS)
    ]


def predicted(text: str, batches: str = "windows") -> tuple[list[int], Tensor, Tensor, bool]:
    """Names and scores as they come, those of the module in one process, and whether it trains again."""
    plan = sw.Plan.parse(text)
    with sw.open_mesh(plan, device="cpu") as mesh:
        placed = sw.apply(Net, plan, mesh, seed=2, rules=RULES if plan.axes.tp > 1 else None)
        windows: Any = sw.eval_batches(dataset(), plan.batch, mesh, global_size=8)
        if batches == "own":
            mine = dataset()[: ROWS - ROWS % mesh.batch.size][mesh.batch.rank :: mesh.batch.size]
            windows = [torch.utils.data.default_collate(mine[i : i + 4]) for i in range(0, len(mine), 4)]
        scores = sw.predict(placed, lambda y, b: {"scores": y, "of": [b["name"]]}, windows)
        is_training = placed.module.training
    alone = sw.init_model(Net, seed=2, dtype=torch.float64).eval()
    whole = alone(torch.stack([row["input"] for row in dataset()])).detach()
    return scores["of"][0].tolist(), scores["scores"], whole, is_training


@pytest.mark.parametrize("text", ["dp1", "dp3 / mb2", "fsdp2 / mb2", "pp2 / 1f1b mb2", "dp2 tp2 / mb3"])
def test_each_row_once_in_the_order_of_the_data(world: World, text: str) -> None:
    plan = f"{text} fp64" if "/" in text else f"{text} / fp64"
    for names, scores, whole, is_training in world(sw.Plan.parse(plan).world, predicted, plan):
        assert names == list(range(100, 100 + ROWS)) and is_training
        torch.testing.assert_close(scores, whole, rtol=0, atol=1e-12)


def test_batches_of_a_scripts_own_come_batch_by_batch_and_rank_by_rank(world: World) -> None:
    for names, scores, whole, _ in world(2, predicted, "dp2 / mb3 fp64", "own"):
        mine = [list(range(100 + rank, 122, 2)) for rank in range(2)]
        assert names == [name for i in range(0, 11, 4) for one in mine for name in one[i : i + 4]]
        torch.testing.assert_close(scores, whole[[name - 100 for name in names]], rtol=0, atol=1e-12)


class Stream(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(dataset())


def of_a_stream(text: str) -> list[int]:
    plan = sw.Plan.parse(text)
    with sw.open_mesh(plan, device="cpu") as mesh:
        placed = sw.apply(Net, plan, mesh, seed=2)
        windows = sw.eval_batches(Stream(), plan.batch, mesh, global_size=8)
        return sw.predict(placed, lambda y, b: b["name"], windows).tolist()


@pytest.mark.parametrize("text", ["dp3 / mb2", "dp2 pp2 / 1f1b mb2"])
def test_rows_of_a_stream_come_in_its_order_though_ranks_read_every_nth(world: World, text: str) -> None:
    for names in world(sw.Plan.parse(text).world, of_a_stream, f"{text} fp64"):
        assert names == list(range(100, 100 + ROWS))


def refused(text: str, what: str) -> str:
    plan = sw.Plan.parse(text)
    functions: dict[str, Any] = {
        "mean": lambda y, b: y.mean(),
        "rows": lambda y, b: y[:1],
        "number": lambda y, b: {"right": 3},
        "nothing": lambda y, b: (),
        "widths": lambda y, b: y[:, : 1 + int(b["name"][0]) % 2],
    }
    with sw.open_mesh(plan, device="cpu") as mesh:
        placed = sw.apply(gpt if plan.axes.cp > 1 else Net, plan, mesh, seed=2)
        windows: Any = sw.eval_batches(dataset(), plan.batch, mesh, global_size=5)
        windows = dataset()[0] if what == "batch" else windows
        if what in ("sampler", "batch sampler"):
            by_rank = DistributedSampler(dataset(), num_replicas=mesh.batch.size, rank=mesh.batch.rank)
            own = BatchSampler(by_rank, 4, drop_last=False)
            as_given: Any = {"sampler": by_rank} if what == "sampler" else {"batch_sampler": own}
            windows = DataLoader(dataset(), **as_given)
        with pytest.raises(UsageError) as caught:
            sw.predict(placed, functions.get(what, lambda y, b: y), windows)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("mean", "a tensor of shape () for a micro-batch of 5 rows"),
        ("rows", "a tensor of shape (1, 4) for a micro-batch of 5 rows"),
        ("number", "gave int for"),
        ("nothing", "an empty tuple"),
        ("widths", "rows of shapes (1,), (2,)"),
        ("batch", "predict(): found one batch (dict)"),
    ],
)
def test_what_is_no_result_per_row(world: World, what: str, said: str) -> None:
    (found,) = world(1, refused, "dp1 / fp64", what)
    assert said in found


def test_parts_of_rows_and_results_that_differ_between_ranks(world: World) -> None:
    assert all("needed a plan without cp" in said for said in world(2, refused, "cp2 / fp64", "rows"))
    assert all("rows of shapes (1,), (2,)" in said for said in world(2, refused, "dp2 / fp64", "widths"))


@pytest.mark.parametrize("what", ["sampler", "batch sampler"])
def test_a_sampler_that_repeats_samples(world: World, what: str) -> None:
    for said in world(2, refused, "dp2 / fp64", what):
        assert "a DistributedSampler over 23 samples, which gives 12 to each of 2 ranks, and so repeats 1," in said


def nothing(text: str) -> Any:
    plan = sw.Plan.parse(text)
    with sw.open_mesh(plan, device="cpu") as mesh:
        return sw.predict(sw.apply(Net, plan, mesh), lambda y, b: y, [])


def test_no_batches(world: World) -> None:
    assert world(2, nothing, "dp2") == [None, None]
