"""`KeyedWindows`: what a data set draws at random for a sample follows from the loader's seed and its position.

Python's, numpy's and torch's generators are seeded before each sample is read, in worker processes and without them.
So an augmentation is the same whoever reads the sample, with any number of workers, and after a resume.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from shardwise.train.loader_options import LoaderOptions
from shardwise.train.order import SampleOrder
from shardwise.train.samples import Rows, SampleWindows
from shardwise.train.windows import WindowSpec

Key = tuple[int, int]
"""A row: its position in the endless run of epochs, and its sample."""


class KeyedRows(Rows):
    """Rows that are asked for by position and sample."""

    def index_lists(self) -> Iterator[list[Any]]:
        """The keys of each micro-batch; padding is the window's first position again."""
        begin = self.start + self.layout.offset
        for chunk, samples in zip(self.layout.chunks, super().index_lists(), strict=True):
            positions = [self.start] * chunk.rows if chunk.zero else range(begin + chunk.start, begin + chunk.stop)
            yield list(zip(positions, samples, strict=True))


class KeyedWindows(SampleWindows):
    """The windows of a map-style data set, its randomness keyed.

    Cost beside `SampleWindows`: 10 microseconds per sample (per micro-batch, where rows are read together), and without
    workers 130 per micro-batch, to put the generators back.
    """

    def __init__(self, dataset: Any, spec: WindowSpec, order: SampleOrder, options: LoaderOptions) -> None:
        """As `SampleWindows`."""
        own = replace(options, worker_init=_WorkerInit(options.worker_init))
        super().__init__(KeyedDataset(dataset, options.seed), spec, order, own)

    def plan(self, step: int, position: int) -> Iterator[Rows]:
        """Which samples each window takes, as keys."""
        for rows in super().plan(step, position):
            yield KeyedRows(rows.step, rows.start, rows.layout, rows.own, rows.filler)


class KeyedDataset:
    """A data set that is read by keys, each sample with generators of its own.

    Rows that the data set reads together (`__getitems__`, `get_batch`) share those of the first: they are the same
    after a resume, and under plans that cut the same micro-batches.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        """See the class."""
        self.dataset, self.seed = dataset, seed
        if callable(getattr(dataset, "get_batch", None)):
            self.get_batch = self._get_batch  # only where there is one: the loader asks

    def __getitems__(self, keys: list[Key]) -> Any:
        """The samples of a micro-batch."""
        many = getattr(self.dataset, "__getitems__", None)
        with _same_generators():
            return self._read(many, keys) if many is not None else [self._read(self._one, [key]) for key in keys]

    def _get_batch(self, keys: list[Key]) -> Any:
        """A micro-batch, collated."""
        with _same_generators():
            return self._read(self.dataset.get_batch, keys)

    def _one(self, samples: list[int]) -> Any:
        return self.dataset[samples[0]]

    def _read(self, read: Callable[[list[int]], Any], keys: list[Key]) -> Any:
        if keys:
            seed_generators(self.seed, keys[0][0])
        return read([sample for _, sample in keys])


def seed_generators(seed: int, position: int) -> None:
    """Seed what a sample may draw from on the CPU: Python's, numpy's and torch's generators.

    >>> seed_generators(1, 8)
    >>> first = random.random()
    >>> seed_generators(1, 8)
    >>> random.random() == first
    True
    """
    number = int.from_bytes(hashlib.blake2b(f"{seed} {position}".encode(), digest_size=8).digest(), "little")
    random.seed(number)
    np.random.seed(number % (1 << 32))
    torch.default_generator.manual_seed(number)  # torch.manual_seed would seed the accelerator, too


@contextmanager
def _same_generators() -> Iterator[None]:
    """Leave the generators of the process of the step as they were; a worker has no other use for its own."""
    if get_worker_info() is not None:
        yield
        return
    python, numbers, tensors = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)
        torch.set_rng_state(tensors)


class _WorkerInit:
    """The user's `worker_init`, which finds the user's data set in `get_worker_info()` and not what is around it."""

    def __init__(self, init: Callable[[int], None] | None) -> None:
        self.init = init

    def __call__(self, number: int) -> None:
        info: Any = get_worker_info()
        inner = info.dataset.dataset
        object.__setattr__(info, "dataset", inner.dataset if isinstance(inner, KeyedDataset) else inner)
        if self.init is not None:
            self.init(number)
