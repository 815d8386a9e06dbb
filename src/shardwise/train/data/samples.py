"""Data sets with a length: the windows of a run from sample order, window arithmetic and torch's `DataLoader`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, default_collate

from shardwise.errors import ConfigError, DataError
from shardwise.parallel.inputs import as_dict
from shardwise.train.data.keyed import Key, KeyedDataset, WorkerInit
from shardwise.train.data.loader_options import Collate, LoaderOptions
from shardwise.train.data.order import SampleOrder
from shardwise.train.data.told import told
from shardwise.train.data.windows import Layout, Window, WindowSpec, divide, shares

MICRO_BATCH_TYPES = (torch.Tensor, dict, tuple, list)
LOOKS = 3
"""Samples that ranks compare, in the first window of a process."""
BLOCK_ROWS = 4096
"""Rows whose order is computed at once: about a millisecond, and 32 KiB."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Which samples a window takes on this rank."""

    step: int
    start: int
    """Position of the window's first row over all ranks."""
    layout: Layout
    own: list[int]
    filler: int
    """A real sample, for padding."""

    def key_lists(self) -> Iterator[list[Key]]:
        """Position and sample of each row, by micro-batch; padding stands at the window's first position."""
        begin = self.start + self.layout.offset
        for chunk in self.layout.chunks:
            if chunk.zero:
                yield [(self.start, self.filler)] * chunk.rows
            else:
                positions = range(begin + chunk.start, begin + chunk.stop)
                yield list(zip(positions, self.own[chunk.start : chunk.stop], strict=True))


class CheckedCollate:
    """A collate function whose result is checked and, where asked for, pinned."""

    def __init__(self, collate: Collate | None, pin: bool = False) -> None:
        self.collate: Collate = collate if collate is not None else default_collate
        self.pin = pin

    def __call__(self, samples: list[Any]) -> Any:
        """List of samples -> micro-batch.

        Raises:
            ConfigError: the micro-batch is not a tensor, a dict with string keys, a tuple or a list.
        """
        batch = as_dict(self.collate(samples))
        named = not isinstance(batch, dict) or all(isinstance(key, str) for key in batch)
        if not isinstance(batch, MICRO_BATCH_TYPES) or not named:
            raise ConfigError(
                f"loader: the collate function gave {type(batch).__name__ if named else 'keys that are not strings'}; "
                "needed: a tensor, a dict of tensors by name, or a tuple of tensors, rows first; change `collate`"
            )
        return _pinned(batch) if self.pin else batch


class MicroBatchSampler:
    """What torch's `DataLoader` reads the micro-batches' keys from; `start` is moved when a run resumes."""

    def __init__(self, source: SampleWindows) -> None:
        self.source = source
        self.start = (0, 0)

    def __iter__(self) -> Iterator[list[Key]]:
        """One list of keys per micro-batch."""
        yield from self.source.keys_looked_at(self.start[1])
        for rows in self.source.plan(*self.start):
            yield from rows.key_lists()


class SampleWindows:
    """The windows of a map-style data set, from any step on.

    Cost without workers: index arithmetic of about 10 microseconds per step, the data set's own reading, and what
    `KeyedDataset` adds.
    """

    def __init__(self, dataset: Any, spec: WindowSpec, order: SampleOrder, options: LoaderOptions) -> None:
        self.spec = spec
        self.order = order
        self.options = options
        self.total = None if options.epochs is None else options.epochs * order.size
        whole = options.collate is None and callable(getattr(dataset, "get_batch", None))
        pin = options.pin_memory and torch.accelerator.is_available()
        collate = CheckedCollate(_same if whole else options.collate, pin and options.workers == 0)
        self._dataset = KeyedDataset(dataset, options.seed, collate, whole=whole)
        self._sampler = MicroBatchSampler(self)
        self._workers = self._make_workers(pin) if options.workers else None
        self._excluded = self._substitutes = np.empty(0, dtype=np.int64)
        self.looks: tuple[int, list[int]] | None = None
        """Where the first window began, and what tells samples of it, each read twice; None: none was read for that."""

    def exclude(self, samples: NDArray[np.int64]) -> None:
        """Feed another sample in place of each of these too.

        Sample e is replaced by the (e mod n)-th of the n that are left: different ones by different ones, as a rule.

        Raises:
            DataError: none is left.
        """
        excluded = np.union1d(self._excluded, samples)
        left = self.order.size - len(excluded)
        if left < 1:
            raise DataError(
                f"loader: all {self.order.size} samples of the data set are in quarantine; needed: one that is not; "
                "look at the run's events, at the learning rate, or at the data"
            )
        self._excluded, place = excluded, excluded % left
        before = self._excluded - np.arange(len(self._excluded))  # samples left below each excluded one
        self._substitutes = place + np.searchsorted(before, place, side="right")

    def include_all(self) -> None:
        """Feed every sample again."""
        self._excluded = self._substitutes = np.empty(0, dtype=np.int64)

    def take(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The samples at positions, those in quarantine replaced."""
        samples = self.order.take(positions)
        if not len(self._excluded):
            return samples
        at = np.searchsorted(self._excluded, samples).clip(max=len(self._excluded) - 1)
        return np.where(self._excluded[at] == samples, self._substitutes[at], samples)

    def windows(self, step: int, position: int) -> Iterator[Window]:
        """Windows from `step` on, whose first row stands at `position` of the endless run of epochs."""
        read = self._read_ahead(step, position) if self._workers is not None else None
        if keys := self.keys_looked_at(position):
            looked = [self._dataset.__getitems__(each) if read is None else next(read) for each in keys]
            self.looks = position, [told(each) for each in looked]
        for rows in self.plan(step, position):
            layout = rows.layout
            if read is None:
                micro_batches = [self._dataset.__getitems__(keys) for keys in rows.key_lists()]
            else:
                micro_batches = [next(read) for _ in layout.chunks]
            begin = rows.start + layout.offset
            yield Window(
                step=rows.step,
                micro_batches=micro_batches,
                weights_zero=layout.weights_zero,
                rows=layout.row_counts,
                num_rows=layout.num_rows,
                positions=range(begin, begin + layout.rows),
                indices=rows.own,
            )

    def keys_looked_at(self, position: int) -> list[list[Key]]:
        """Rows of the first window, the same on every rank, which each reads: in its worker, where it has some."""
        if self.looks is not None or self.spec.ranks == 1 or self.spec.split:
            return []
        places = position + (self.spec.global_size - 1) * np.arange(LOOKS, dtype=np.int64) // max(1, LOOKS - 1)
        return [[key] for key in zip(places.tolist(), self.take(places).tolist(), strict=True) for _ in range(2)]

    def num_windows(self, position: int) -> int:
        """Windows from a position to the end of the last epoch."""
        assert self.total is not None
        full, rest = divmod(max(0, self.total - position), self.spec.global_size)
        per_full = len(divide(shares(self.spec.global_size, self.spec.ranks), self.spec))
        short = 0 if rest == 0 or self.options.drop_last else len(divide(shares(rest, self.spec.ranks), self.spec))
        return full * per_full + short

    def plan(self, step: int, position: int) -> Iterator[Rows]:
        """Which samples each window takes: the order of a block of windows is computed at once."""
        size = self.spec.global_size
        full = divide(shares(size, self.spec.ranks), self.spec)
        block = max(1, BLOCK_ROWS // max(1, sum(layout.rows for layout in full)))
        numbers = count(step)
        while True:
            windows = block if self.total is None else min(block, (self.total - position) // size)
            if windows <= 0:
                break
            yield from self._block(numbers, position, windows, full)
            position += windows * size
        assert self.total is not None
        rest = self.total - position
        if rest > 0 and not self.options.drop_last:
            yield from self._block(numbers, position, 1, divide(shares(rest, self.spec.ranks), self.spec))

    def _block(self, numbers: Iterator[int], position: int, windows: int, layouts: list[Layout]) -> Iterator[Rows]:
        starts = position + self.spec.global_size * np.arange(windows, dtype=np.int64)
        first = layouts[0].offset
        num_own = sum(layout.rows for layout in layouts)
        own = self.take(starts[:, None] + np.arange(first, first + num_own)).tolist()
        fillers = [of_window[0] for of_window in own] if num_own else self.take(starts).tolist()
        for start, of_window, filler in zip(starts.tolist(), own, fillers, strict=True):
            for layout in layouts:
                begin = layout.offset - first
                mine = of_window if len(layouts) == 1 else of_window[begin : begin + layout.rows]
                yield Rows(next(numbers), start, layout, mine, filler)

    def _make_workers(self, pin: bool) -> DataLoader[Any]:
        options = self.options
        return DataLoader(
            self._dataset,
            batch_sampler=self._sampler,
            collate_fn=_same,
            num_workers=options.workers,
            pin_memory=pin,
            persistent_workers=options.persistent_workers,
            prefetch_factor=options.prefetch,
            timeout=options.timeout_s,
            worker_init_fn=WorkerInit(options.worker_init),
            multiprocessing_context=options.worker_context,
            generator=own_generator(options.seed),
        )

    def _read_ahead(self, step: int, position: int) -> Iterator[Any]:
        assert self._workers is not None
        self._sampler.start = (step, position)
        return iter(self._workers)


def own_generator(seed: int) -> torch.Generator:
    """A generator for the workers' seeds, so that reading ahead draws nothing from the model's random numbers."""
    return torch.Generator().manual_seed(seed % (1 << 63))


def _same(batch: Any) -> Any:
    return batch


def _pinned(batch: Any) -> Any:
    """A batch with its tensors in page-locked memory."""
    if isinstance(batch, torch.Tensor):
        return batch.pin_memory()
    if isinstance(batch, dict):
        return {key: _pinned(value) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        values = [_pinned(value) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch
