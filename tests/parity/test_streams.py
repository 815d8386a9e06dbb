"""Streams over a real process group: the ends are agreed, and a rank whose stream differs stops all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.utils.data import IterableDataset

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
