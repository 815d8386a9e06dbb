"""Streams over a real process group: the ends are agreed, and a rank whose stream differs stops all of them.

And what a data set with a length draws at random: it follows from seed and position, whoever reads the sample.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from shardwise.parallel.mesh import open_mesh
from shardwise.plan.plan import Axes, Plan
from shardwise.testing.world import World, WorldError
from shardwise.train.batches import loader


class Counting(IterableDataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))


def read(axes: Axes, sizes: list[int], sharded: bool) -> tuple[int, list[int]]:
    """(number of windows, the samples that weigh something) of this rank."""
    with open_mesh(Plan(axes=axes)) as mesh:
        stream = Counting(sizes[mesh.batch.rank])
        windows = list(loader(stream, 4, mesh, epochs=1, sharded=sharded))
    return len(windows), [
        int(value)
        for window in windows
        for batch, zero in zip(window.micro_batches, window.weights_zero, strict=True)
        if not zero
        for value in batch
    ]


def test_one_stream_on_all_ranks(world: World) -> None:
    results = world(4, read, Axes(dp_replicate=2, dp_shard=2), [13] * 4, False)
    assert {count for count, _ in results} == {4}
    assert sorted(value for _, values in results for value in values) == list(range(13))


def test_tensor_parallel_ranks_read_the_same(world: World) -> None:
    results = world(4, read, Axes(dp_replicate=2, tp=2), [13] * 2, False)
    assert results[0] == results[1] != results[2] == results[3]
    assert sorted(results[0][1] + results[2][1]) == list(range(13))


def test_shares_of_uneven_length_end_together(world: World) -> None:
    results = world(2, read, Axes(dp_shard=2), [3, 9], True)
    assert results == [(5, [0, 1, 2]), (5, list(range(9)))]


def test_negative_control_streams_that_differ_stop_every_rank(world: World) -> None:
    with pytest.raises(WorldError, match=r"rank 0:[\s\S]*streams differ[\s\S]*rank 1:[\s\S]*streams differ"):
        world(2, read, Axes(dp_shard=2), [8, 9], False)


class Augmented:
    """Ten samples: (number, what each generator gave)."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)


class Together(Augmented):
    def get_batch(self, indices: list[int]) -> torch.Tensor:
        return torch.stack([self[index] for index in indices])


def mixed(samples: list[torch.Tensor]) -> torch.Tensor:
    """A batch that draws itself, as mixup does."""
    batch = torch.stack(samples)
    batch[:, 1:] += torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()])
    return batch


def drawn(text: str, workers: int, start: int, stop: int, how: str = "") -> dict[int, list[float]]:
    """Position -> the sample there, of this rank's rows in some windows of four; the run was resumed at the first."""
    with open_mesh(Plan.parse(text)) as mesh:
        data, collate = Together() if how == "together" else Augmented(), mixed if how == "mixed" else None
        batches = loader(data, 4, mesh, seed=5, workers=workers, collate=collate)
        batches.load_state_dict({**batches.state_dict(), "step": start, "position": 4 * start})
        for generator in (random.seed, np.random.seed, torch.manual_seed):
            generator(start)  # the process's own, which another run has in another state
        before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
        found: dict[int, list[float]] = {}
        for _ in range(start, stop):
            window = next(batches)
            found |= dict(zip(window.positions, torch.cat(window.micro_batches).tolist(), strict=True))
        after = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
        assert before == after
        return found


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_sample_is_augmented_alike_after_a_resume_and_by_any_worker(world: World, workers: int) -> None:
    [truth] = world(1, drawn, "dp1", 0, 0, 5)
    assert len(truth) == 20 and len({tuple(drawn) for _, *drawn in truth.values()}) == 20  # each epoch has its own
    resumed = world(2, drawn, "dp2", workers, 2, 5)
    assert resumed[0] | resumed[1] == {position: truth[position] for position in range(8, 20)}


@pytest.mark.parametrize("how", ["together", "mixed"])
def test_rows_that_are_read_or_mixed_together_are_augmented_alike_after_a_resume(world: World, how: str) -> None:
    [truth] = world(1, drawn, "dp1", 0, 0, 5, how)
    for workers in (0, 2):
        [resumed] = world(1, drawn, "dp1", workers, 2, 5, how)
        assert resumed == {position: truth[position] for position in range(8, 20)}


def shown(number: int) -> None:
    info: Any = get_worker_info()
    info.dataset.told = type(info.dataset).__name__


class Telling(Augmented):
    told = ""

    def __getitem__(self, index: int) -> int:
        return len(self.told)


def test_worker_init_finds_the_users_own_data_set() -> None:
    with open_mesh(Plan()) as mesh:
        batches = loader(Telling(), 4, mesh, workers=1, worker_init=shown)
        assert next(batches).micro_batches[0].tolist() == [len("Telling")] * 4
