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

from shardwise.errors import ConfigError
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


class Shuffled(IterableDataset[tuple[int, float]]):
    """A shuffle buffer as it is commonly written: order and augmentation from the generators of the process."""

    def __init__(self, listed: list[int]) -> None:
        self.listed = listed

    def __iter__(self) -> Iterator[tuple[int, float]]:
        buffer: list[int] = []
        for number in self.listed:
            buffer.append(number)
            if len(buffer) > 8:
                yield self.augmented(buffer.pop(random.randrange(8)))
        random.shuffle(buffer)
        yield from map(self.augmented, buffer)

    def augmented(self, number: int) -> tuple[int, float]:
        return number, np.random.rand() + torch.rand(()).item()


def shuffled(text: str, workers: int, start: int, stop: int, sharded: bool = False) -> dict[int, list[float]]:
    """Position -> the sample there, of this rank's rows in some windows of four; the run was resumed at the first."""
    with open_mesh(Plan.parse(text)) as mesh:
        random.seed(mesh.rank + 10 * start)  # the process's own generator is none of the stream's
        numbers = list(range(32))[mesh.batch.rank :: mesh.batch.size] if sharded else list(range(32))
        batches = loader(Shuffled(numbers), 4, mesh, seed=5, workers=workers, collate=mixed_pairs, sharded=sharded)
        batches.load_state_dict({**batches.state_dict(), "step": start, "position": 4 * start})
        found: dict[int, list[float]] = {}
        for _ in range(start, stop):
            before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
            window = next(batches)
            assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
            found |= dict(zip(window.positions, torch.cat(window.micro_batches).tolist(), strict=True))
        return found


def mixed_pairs(samples: list[tuple[int, float]]) -> torch.Tensor:
    return torch.tensor(samples, dtype=torch.float64)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_shuffled_stream_is_the_same_on_all_ranks_and_after_a_resume(world: World, workers: int) -> None:
    [truth] = world(1, shuffled, "dp1", 0, 0, 9)
    order = [number for number, _ in truth.values()]
    assert sorted(order[:-4]) == list(range(32)) != order[:-4]
    resumed = world(2, shuffled, "dp2", workers, 3, 9)
    assert resumed[0] | resumed[1] == {position: truth[position] for position in range(12, 36)}


def test_shares_of_a_stream_draw_numbers_of_their_own(world: World) -> None:
    first, second = world(2, shuffled, "dp2", 0, 0, 3, True)
    assert {drawn for _, drawn in first.values()}.isdisjoint(drawn for _, drawn in second.values())
    again = world(2, shuffled, "dp2", 1, 1, 3, True)
    for whole, part in zip((first, second), again, strict=True):
        assert {position: whole[position] for position in part} == part


def listed_apart(sharded: bool) -> int:
    with open_mesh(Plan.parse("dp2")) as mesh:
        files = [f"part-{number}" for number in range(16)]
        stream = files if mesh.rank == 0 else files[::-1]  # as two hosts list one directory
        return len(list(loader(iter(stream), 4, mesh, epochs=1, sharded=sharded, collate=list)))


def test_streams_of_another_order_stop_every_rank(world: World) -> None:
    words = r"streams differ: the first sample of window 0 is not the same"
    with pytest.raises(WorldError, match=rf"rank 0:[\s\S]*{words}[\s\S]*rank 1:[\s\S]*{words}"):
        world(2, listed_apart, False)
    assert world(2, listed_apart, True) == [8, 8]  # the control: each has its own


def test_positions_of_streams_from_before_they_had_a_seed_are_read() -> None:
    with open_mesh(Plan()) as mesh:
        batches = loader(iter(range(16)), 4, mesh, seed=3, collate=torch.tensor)
        batches.load_state_dict({**batches.state_dict(), "seed": None, "step": 1, "position": 4})
        assert next(batches).micro_batches[0].tolist() == [4, 5, 6, 7]
        with pytest.raises(ConfigError, match="another seed"):
            batches.load_state_dict({**batches.state_dict(), "seed": 4})
