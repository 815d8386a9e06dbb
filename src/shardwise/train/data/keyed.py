"""`KeyedDataset`: what a data set draws at random for a sample follows from the loader's seed and its position.

Python's, numpy's and torch's generators are seeded before each sample is read, in worker processes and without them.
So an augmentation is the same whoever reads the sample, with any number of workers, and after a resume. A stream has
them seeded once, at its start (`OwnGenerators`).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

Key = tuple[int, int]
"""A row: its position in the endless run of epochs, and its sample."""


class KeyedDataset(Dataset[Any]):
    """A data set that is read by keys, each sample with generators of its own.

    Rows that the data set reads together (`__getitems__`, `get_batch`) share those of the first, and what collates a
    micro-batch goes on with those of its last: they are the same after a resume, and under plans that cut the same
    micro-batches.

    Args:
        dataset: the user's.
        seed: the loader's.
        collate: samples to a micro-batch.
        whole: `get_batch` gives a collated micro-batch at once.

    Cost: 10 microseconds per sample (per micro-batch, where rows are read together), and without workers 130 per
    micro-batch, to put the generators back.
    """

    def __init__(self, dataset: Any, seed: int, collate: Callable[[Any], Any], *, whole: bool = False) -> None:
        """See the class."""
        self.dataset, self.seed, self.collate = dataset, seed, collate
        self._many = dataset.get_batch if whole else getattr(dataset, "__getitems__", None)

    def __getitems__(self, keys: list[Key]) -> Any:
        """A micro-batch."""
        with same_generators():
            if self._many is not None:
                return self.collate(self._read(self._many, keys))
            return self.collate([self._read(self._one, [key]) for key in keys])

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
def same_generators() -> Iterator[None]:
    """Leave the generators of the process of the step as they were; a worker has no other use for its own."""
    if get_worker_info() is not None:
        yield
        return
    before = _states()
    try:
        yield
    finally:
        _set_states(before)


class OwnGenerators:
    """Python's, numpy's and torch's generators as one reader finds them: seeded once, going on from read to read.

    Args:
        seed: the loader's.
        place: another number, other draws.

    >>> own = OwnGenerators(1, 0)
    >>> with own.inside():
    ...     first = random.random()
    >>> with own.inside():
    ...     second = random.random()
    >>> with OwnGenerators(1, 0).inside():
    ...     (first, second) == (random.random(), random.random())
    True
    """

    def __init__(self, seed: int, place: int) -> None:
        """See the class."""
        self._key = (seed, place)
        self._now: tuple[Any, ...] | None = None

    @contextmanager
    def inside(self) -> Iterator[None]:
        """What is drawn inside is drawn from them; afterwards those of the process are as they were."""
        before = _states()
        if self._now is None:
            seed_generators(*self._key)
        else:
            _set_states(self._now)
        try:
            yield
        finally:
            self._now = _states()
            _set_states(before)


def _states() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _set_states(states: tuple[Any, ...]) -> None:
    python, numbers, tensors = states
    random.setstate(python)
    np.random.set_state(numbers)
    torch.set_rng_state(tensors)


class WorkerInit:
    """The user's `worker_init`, which finds the user's data set in `get_worker_info()` and not what is around it."""

    def __init__(self, init: Callable[[int], None] | None) -> None:
        self.init = init

    def __call__(self, number: int) -> None:
        """In worker `number`."""
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)
        if self.init is not None:
            self.init(number)
