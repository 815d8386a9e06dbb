"""Iterable data sets: windows read in the order the data comes, with the ends agreed between the ranks.

The promise is weaker than that of a data set with a length: the order is the stream's own, and resuming reads
again what was consumed. The samples of a step are the same under every number of ranks, as long as each rank's
stream gives the same samples; where they differ, every rank raises the same error. What a stream draws from Python's,
numpy's and torch's generators follows from the loader's seed, so that a shuffle buffer is the same on all ranks, and
when it is read again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from types import FunctionType
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from shardwise.errors import ConfigError, DataError
from shardwise.parallel.mesh import DATA_AXES
from shardwise.train.data.keyed import OwnGenerators, same_generators, seed_generators
from shardwise.train.data.loader_options import Collate, LoaderOptions
from shardwise.train.data.samples import CheckedCollate, own_generator
from shardwise.train.data.told import told
from shardwise.train.data.windows import DataMesh, Window, WindowSpec, divide, shares


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """What one rank read for one window."""

    own: list[Any]
    """Samples of this rank."""
    spare: list[Any]
    """One sample that was seen, for padding; empty when none ever was."""
    total: int
    """Samples of all ranks, as far as this rank can know: its own when each rank has a stream of its own."""
    first: int
    """What tells the first of them from another sample; 0 where ranks need not have the same one."""


class StreamReader(IterableDataset[Stretch]):
    """This rank's share of each window of a stream; runs in the process of the step or in one worker."""

    def __init__(
        self, dataset: Iterable[Any], spec: WindowSpec, options: LoaderOptions, start: tuple[int, int]
    ) -> None:
        self.dataset = dataset
        self.spec = spec
        self.options = options
        self.start = start  # step and position of the first window

    def __iter__(self) -> Iterator[Stretch]:
        """Stretches without end: empty ones once the stream is exhausted, since other ranks may still have rows."""
        stream = _passes(self.dataset, self.options.epochs)
        rank, ranks, wanted = self.spec.rank, self.spec.ranks, self.spec.global_size
        step, position = self.start
        generators = OwnGenerators(self.options.seed, rank if self.options.sharded else 0)
        with generators.inside():
            if self.options.sharded:
                wanted, rank, ranks = shares(wanted, ranks)[rank], 0, 1
                _skip(stream, step * wanted, may_end=True)
            else:
                _skip(stream, position, may_end=False)
        spare: list[Any] = []
        while True:
            own: list[Any] = []
            total = first = 0
            with generators.inside():
                for total, sample in enumerate(islice(stream, wanted), start=1):
                    if total == 1:
                        spare, first = [sample], told(sample) if ranks > 1 else 0
                    if (total - 1) % ranks == rank:
                        own.append(sample)
            yield Stretch(own=own, spare=spare, total=total, first=first)


class StreamWindows:
    """The windows of an iterable data set; moving to a position reads the stream again from its start."""

    def __init__(self, dataset: Iterable[Any], spec: WindowSpec, mesh: DataMesh, options: LoaderOptions) -> None:
        self._dataset, self._spec, self._mesh, self._options = dataset, spec, mesh, options
        self._collate = CheckedCollate(options.collate, options.pin_memory and torch.accelerator.is_available())
        self.name = f"a {type(dataset).__name__}"
        self.is_read_once = not options.workers and iter(dataset) is dataset and not _is_restarted(dataset)
        """Another pass would go on where the last one ended; a worker has a copy of its own for each."""
        self._is_begun = False

    def windows(self, step: int, position: int) -> Iterator[Window]:
        """The windows from a step on; see `stream_windows`.

        Raises:
            DataError: the stream was read already, and can be read once only.
        """
        if self.is_read_once and self._is_begun:
            raise DataError(
                f"loader: going to step {step} reads the stream again from its start: found {self.name}, which can be "
                "read once only; needed: an object whose __iter__ starts anew (an IterableDataset, a list)"
            )
        self._is_begun = True
        reader = StreamReader(self._dataset, self._spec, self._options, (step, position))
        return stream_windows(reader, self._mesh, self._collate, own_generator(self._options.seed))


def check_stream(spec: WindowSpec, options: LoaderOptions) -> None:
    """Refuse dials that a stream cannot have.

    Raises:
        ConfigError: names the first.
    """
    if options.shuffle:
        raise ConfigError(
            "loader: shuffle=True with an iterable data set, whose order is its own; needed: __len__ and __getitem__; "
            "shuffle inside the data set, or leave the option out"
        )
    if options.workers > 1:
        raise ConfigError(
            f"loader: workers={options.workers} with an iterable data set: each would read the whole stream; needed: "
            "0 or 1 (which reads ahead); use workers=1, or a data set with __len__ and __getitem__"
        )
    if options.persistent_workers:
        raise ConfigError(
            "loader: persistent_workers with an iterable data set, which is read again from its start when moved; "
            "needed: a data set with a length; leave persistent_workers out"
        )
    if options.sharded and spec.global_size < spec.ranks:
        raise ConfigError(
            f"loader: {spec.global_size} rows per step for {spec.ranks} data ranks with a stream each (sharded=True); "
            f"needed: at least {spec.ranks}, one from each; raise the global batch"
        )


def _is_restarted(dataset: Iterable[Any]) -> bool:
    """Whether an iterator may begin anew when it is asked for one: a class with an `__iter__` of its own."""
    return isinstance(getattr(type(dataset), "__iter__", None), FunctionType)


def stream_windows(
    reader: StreamReader, mesh: DataMesh, collate: Collate, generator: torch.Generator
) -> Iterator[Window]:
    """The windows of a stream; one tiny all-reduce each over the data axes when they are wider than 1.

    Raises:
        DataError: the stream is empty, or the ranks' streams differ.
    """
    spec, options = reader.spec, reader.options
    step, position = reader.start
    for stretch in _background(reader, generator):
        rows = _agree(stretch, spec, mesh, options, step, first=position == 0)
        num_rows = sum(rows)
        if num_rows == 0 or (options.drop_last and num_rows < spec.global_size):
            return
        begun = 0
        for layout in divide(rows, spec):
            own = stretch.own[begun : begun + layout.rows]
            base = position + spec.rank + begun * spec.ranks
            positions = range(base, base + layout.rows * spec.ranks, spec.ranks)
            filler = (stretch.own or stretch.spare)[:1]
            yield Window(
                step=step,
                micro_batches=[
                    _collated(
                        collate,
                        filler * chunk.rows if chunk.zero else own[chunk.start : chunk.stop],
                        (options.seed, base + chunk.start * spec.ranks),
                    )
                    for chunk in layout.chunks
                ],
                weights_zero=layout.weights_zero,
                rows=layout.row_counts,
                num_rows=layout.num_rows,
                positions=positions,
                indices=list(positions),
            )
            begun += layout.rows
            step += 1
        position += num_rows


def _collated(collate: Collate, samples: list[Any], key: tuple[int, int]) -> Any:
    """A micro-batch, whose draws (mixup) follow from the loader's seed and the place of its first row."""
    with same_generators():
        seed_generators(*key)
        return collate(samples)


def _agree(
    stretch: Stretch, spec: WindowSpec, mesh: DataMesh, options: LoaderOptions, step: int, *, first: bool
) -> tuple[int, ...]:
    """How many rows each data rank has for this window; every rank gets the same verdict, so none waits alone."""
    ranks = spec.ranks
    counts = [0] * (3 * ranks + 1)
    counts[spec.rank], counts[ranks + spec.rank] = len(stretch.own), stretch.total
    counts[2 * ranks + spec.rank], counts[-1] = stretch.first, int(not stretch.spare)
    if ranks > 1:
        local = torch.tensor(counts, dtype=torch.int64, device=mesh.device)
        counts = mesh.all_reduce_sum(local, *DATA_AXES).tolist()
    rows, totals, firsts = (counts[place : place + ranks] for place in (0, ranks, 2 * ranks))
    total, num_without = sum(rows), counts[-1]
    if len(set(totals)) > 1 and not options.sharded:
        raise DataError(_DIFFER.format(f"the data ranks read {totals} samples for one window"))
    if len(set(firsts)) > 1:
        raise DataError(_DIFFER.format(f"the first sample of window {step} is not the same on all data ranks"))
    if total == 0 and first:
        raise DataError(
            "loader: the iterable data set gave no sample; needed: at least one; check its source, and that it was "
            "not a generator that has been consumed before"
        )
    if total and num_without:
        raise DataError(
            f"loader: {num_without} of {ranks} data ranks have no sample at all, so there is nothing to pad with; "
            "needed: at least one sample in each rank's stream; give fewer shards, or fewer data ranks"
        )
    return tuple(rows)


_DIFFER = (
    "loader: the ranks' streams differ: {}; needed: the same samples in the same order on each rank; remove what makes "
    "it depend on the rank or on time (how a directory is listed, a generator that nobody seeds: Python's, numpy's and "
    "torch's own are seeded by the loader), or say sharded=True when each rank reads a share of its own"
)


def _background(reader: StreamReader, generator: torch.Generator) -> Iterator[Stretch]:
    """Read here, or ahead in a worker process."""
    options = reader.options
    if options.workers == 0:
        return iter(reader)
    return iter(
        DataLoader(
            reader,
            batch_size=None,
            num_workers=options.workers,
            collate_fn=_same,
            prefetch_factor=options.prefetch,
            timeout=options.timeout_s,
            worker_init_fn=options.worker_init,
            multiprocessing_context=options.worker_context,
            generator=generator,
        )
    )


def _same(value: Any) -> Any:
    return value


def _passes(dataset: Iterable[Any], epochs: int | None) -> Iterator[Any]:
    """One pass after another; ends after `epochs`, or when a pass gives nothing (a generator gives one pass only)."""
    if epochs not in (None, 1) and iter(dataset) is dataset:
        raise ConfigError(
            f"loader: epochs={epochs} over a {type(dataset).__name__}, which can be read once only; needed: an object "
            "whose __iter__ starts anew (an IterableDataset, a list), or epochs=1"
        )
    count = 0
    while epochs is None or count < epochs:
        seen = False
        for sample in dataset:
            seen = True
            yield sample
        if not seen:
            return
        count += 1


def _skip(stream: Iterator[Any], num_samples: int, *, may_end: bool) -> None:
    """Read and forget; the way a stream resumes. A rank's own share may have ended before the others'."""
    skipped = sum(1 for _ in islice(stream, num_samples))
    if skipped < num_samples and not may_end:
        raise DataError(
            f"loader: resuming needs to skip {num_samples} samples of the stream, it ended after {skipped}; "
            "needed: the stream of the run that was saved; give the same data"
        )
