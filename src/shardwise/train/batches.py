"""`loader`: the batches of a run. Which samples a step gets depends on data, seed and batch size, on nothing else.

Step s takes the rows at positions [s * B, (s + 1) * B) of the endless run of epochs, each a permutation of the
data set. They are divided contiguously over data ranks, and each rank's rows over its micro-batches: the
union is the same on 1 and on 1,024 ranks, with any number of workers, before and after a resume.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, Unpack

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset

from shardwise.errors import ConfigError, DataError, UsageError
from shardwise.plan.plan import Batch
from shardwise.train.data.loader_options import LoaderKeywords
from shardwise.train.data.loader_options import LoaderOptions as LoaderOptions
from shardwise.train.data.order import SampleOrder
from shardwise.train.data.samples import SampleWindows
from shardwise.train.data.streams import StreamWindows, check_stream
from shardwise.train.data.windows import DataMesh, ReadAhead, WindowSpec
from shardwise.train.data.windows import Window as Window


class WindowSource(Protocol):
    """Where windows come from: a data set with a length, or a stream."""

    def windows(self, step: int, position: int) -> Iterator[Window]:
        """The windows from a step on, whose first row stands at `position`."""
        ...


class Batches:
    """An iterator over the windows of a run; made by `loader` and `eval_batches`.

    `next(batches)` gives a `Window`. Its state is two numbers: the step and the position of its first row.

    >>> batches = loader(list(range(10)), 4, mesh, seed=1)  # doctest: +SKIP
    >>> window = next(batches)  # doctest: +SKIP
    >>> window.micro_batches[0].shape  # doctest: +SKIP
    torch.Size([4])
    """

    def __init__(
        self, source: WindowSource, spec: WindowSpec, mesh: DataMesh, options: LoaderOptions, order: SampleOrder | None
    ) -> None:
        self.spec = spec
        self.options = options
        self.order = order
        """The order of samples; None for a stream."""
        self._mesh = mesh
        self._source = source
        self._begin(0, 0)
        self.quarantined: list[tuple[int, int]] = []
        """Positions whose samples are not fed again, in the order in which they were left out; see `quarantine`."""
        self.accept: frozenset[str] = frozenset()
        """What may differ from a saved position: `seed`, `size`. The order is another one then."""
        self.is_other_order = False
        """Whether it is, or the samples are: then quarantine that was saved says nothing."""

    def _begin(self, step: int, position: int) -> None:
        """Be before the window of a step, whose first row stands at a position."""
        self.step = step
        """Windows handed out so far."""
        self._position = position
        regular = position == step * self.spec.global_size
        self._origin = (0, 0) if regular else (step, position)
        self._windows: Iterator[Window] | None = None
        self._is_over = False
        self.ahead = ReadAhead()
        """Windows that were handed out: a loop may train on them later."""

    def __iter__(self) -> Iterator[Window]:
        """The same iterator: a loop that is left and entered again goes on where it was. Of evaluation a pass anew.

        Raises:
            UsageError: all epochs are done, and a loop would find nothing.
        """
        if self.spec.split:
            return self._source.windows(0, 0)
        if self._is_over:
            raise UsageError(
                f"loader: its {self.options.epochs or 1} epoch(s) are over, and another loop over it would train on "
                "nothing; needed: one loop over all of them: loader(..., epochs=3), or without end (epochs=None) and "
                "steps(state, loss_fn, until=...)"
            )
        return self

    def __next__(self) -> Window:
        """The next window.

        Raises:
            StopIteration: all epochs are done.
            DataError: a stream is empty, or the ranks' streams differ.
        """
        if self._windows is None:
            self._windows = self._source.windows(self.step, self._position)
        for window in self._windows:
            if self.order is not None or not self._is_quarantined(window):
                break
            self._position += window.num_rows  # a stream cannot give another sample instead
        else:
            self._is_over = True
            raise StopIteration
        self.step = window.step + 1
        self.ahead.add(window, self._position)
        self._position += window.num_rows
        return window

    def quarantine(self, start: int, stop: int) -> None:
        """Never feed again what is fed at these positions now, in this epoch or a later one, before or after a resume.

        Other samples take their places, the same ones on every mesh; where one of those is bad, a second call leaves it
        out too. Of a stream, windows that hold such a position are passed over. Every rank calls it with the same
        positions.

        Raises:
            DataError: nothing is left to feed.
        """
        if isinstance(self._source, SampleWindows):  # a stream goes on where it is: what is to come is looked at then
            self._source.exclude(self._source.take(np.arange(start, stop, dtype=np.int64)))
            self._windows = None
        self.quarantined.append((start, stop))

    def keep_in_quarantine(self, known: Sequence[tuple[int, int]]) -> None:
        """Have what was quarantined before, in that order, and then what this run has quarantined itself.

        Raises:
            DataError: nothing is left to feed.
        """
        own = self.quarantined
        if own[: len(known)] == list(known):
            return
        self.quarantined = []
        if isinstance(self._source, SampleWindows):
            self._source.include_all()
        for rows in (*known, *(rows for rows in own if rows not in known)):
            self.quarantine(*rows)

    def state_before(self, window: Window) -> dict[str, Any]:
        """What `state_dict` gave before a window was trained on."""
        rows = self.ahead.rows_of(window)
        assert rows is not None
        return self._state(window.step, rows[0])

    def _is_quarantined(self, window: Window) -> bool:
        begin, end = self._position, self._position + window.num_rows
        return any(start < end and begin < stop for start, stop in self.quarantined)

    def check_reads_again(self, what: str) -> None:
        """Refuse what goes back in the data, where these can be read once only.

        Raises:
            UsageError: a generator, an open file or the like; `what` begins the message.
        """
        if isinstance(self._source, StreamWindows) and self._source.is_read_once:
            raise UsageError(
                f"{what} reads samples again: found {self._source.name}, which can be read once only; needed: an "
                "object whose __iter__ starts anew (an IterableDataset, a list), or workers=1"
            )

    @property
    def num_steps(self) -> int | None:
        """Windows of the whole run; None: without end, or a stream."""
        if self.order is None or self.options.epochs is None:
            return None
        assert isinstance(self._source, SampleWindows)
        step, position = self._origin
        return step + self._source.num_windows(position)

    def state_dict(self) -> dict[str, Any]:
        """Where the run is, as plain JSON values, the same on every rank: after the window that was trained on last."""
        return self._state(*(self.ahead.trained or (self.step, self._position)))

    def _state(self, step: int, position: int) -> dict[str, Any]:
        return (
            self._identity()
            | {
                "step": step,
                "position": position,
                "epoch": self.order.epoch_of(position) if self.order is not None else None,
                "global_size": self.spec.global_size,
            }
            | ({"quarantine": [list(rows) for rows in self.quarantined]} if self.quarantined else {})
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken, under this or another number of ranks, workers and rows per step.

        Costs nothing for a data set with a length; a stream reads again what was consumed.

        Raises:
            DataError: the state is of another data set, or of no loader.
            ConfigError: the state is of another seed, or of another way of reading.
        """
        missing = [key for key in ("kind", "step", "position", "size", "seed", "shuffle") if key not in state]
        if missing:
            raise DataError(
                f"loader: the saved data position lacks {', '.join(missing)}; found: {', '.join(map(str, state))}; "
                "needed: what Batches.state_dict gave; load a checkpoint that was saved with this loader"
            )
        for key, own in self._identity().items():
            unseeded = key == "seed" and state["kind"] == "stream" and state["seed"] is None
            if state.get(key) == own or unseeded:  # older positions of streams have no seed: none was in their draws
                continue
            self.is_other_order = True
            if key not in self.accept:
                kind: type[DataError] | type[ConfigError] = DataError if key in ("size", "kind") else ConfigError
                raise kind(
                    f"loader: cannot resume the data position of step {state['step']}: {_REASONS[key]}: saved {key}="
                    f"{state.get(key)!r}, now {own!r}; use the saved value, or begin anew with the weights alone: "
                    "store.load(state, path, weights_only=True)"
                )
        if "sharded" in self._identity() and self.options.sharded and state["global_size"] != self.spec.global_size:
            raise ConfigError(
                f"loader: cannot resume a sharded stream with {self.spec.global_size} rows per step, it was saved with "
                f"{state['global_size']}: how much each rank had read is not known; use {state['global_size']}"
            )
        self._begin(int(state["step"]), int(state["position"]))
        if not self.is_other_order:  # else it says nothing
            self.keep_in_quarantine([(int(start), int(stop)) for start, stop in state.get("quarantine", ())])

    @property
    def looks(self) -> tuple[int, list[int]] | None:
        """From which position on, what tells samples that ranks must have alike, each read twice; None: none was read.

        Streams compare theirs themselves.
        """
        return self._source.looks if isinstance(self._source, SampleWindows) else None

    def ids_at(self, step: int) -> NDArray[np.int64]:
        """The samples of a step over all ranks, in the order of their positions: int64, shape (rows,).

        Raises:
            ConfigError: a stream, evaluation under a pipeline, or a step before a resume with other rows per step.
        """
        begin, position = self._origin
        if self.order is None or (self.spec.split and self.spec.equal_rows) or step < begin:
            raise ConfigError(
                f"loader: which samples step {step} has cannot be told for a stream, an evaluation under a pipeline, "
                f"or before step {begin}, where the run resumed; read `window.sample_ids` of the windows themselves"
            )
        start = position + (step - begin) * self.spec.global_size
        stop = start + self.spec.global_size
        if self.options.epochs is not None:
            total = self.options.epochs * self.order.size
            stop = min(stop, start if self.options.drop_last and stop > total else total)
        return self.order.slice(start, max(start, stop))

    def evaluation(self, dataset: Any, **keywords: Unpack[LoaderKeywords]) -> Batches:
        """One exact pass over another data set with this loader's batch size and options; see `eval_batches`."""
        batch = Batch(global_size=self.spec.global_size, micro_batches=self.spec.micro_batches)
        options = replace(self.options, shuffle=None, persistent_workers=False, sharded=False)
        return eval_batches(dataset, batch, self._mesh, options=options, **keywords)

    def _identity(self) -> dict[str, Any]:
        """What a saved position must agree with."""
        if self.order is None:
            sharded = {"sharded": self.options.sharded, "ranks": self.spec.ranks if self.options.sharded else None}
            return {"kind": "stream", "size": None, "seed": self.options.seed, "shuffle": False} | sharded
        return {"kind": "map", "size": self.order.size, "seed": self.order.seed, "shuffle": self.order.shuffle}


_REASONS = {
    "kind": "a stream and a data set with a length have different positions",
    "size": "the order of another number of samples is another order",
    "seed": "another seed is another order",
    "shuffle": "shuffled and plain order differ",
    "sharded": "how the ranks share the stream differs",
    "ranks": "a stream that each rank holds a share of cannot be resumed by another number of ranks",
}


def loader(
    dataset: Any,
    batch: Batch | int,
    mesh: DataMesh,
    *,
    options: LoaderOptions | None = None,
    **keywords: Unpack[LoaderKeywords],
) -> Batches:
    """The batches of a run: the same samples in each step under every plan.

    Args:
        dataset: anything with `__len__` and `__getitem__` (`__getitems__(indices)` and `get_batch(indices)`,
            which gives a collated micro-batch, are used where they exist); or an iterable, with the
            weaker promise of `shardwise.train.data.streams`.
        batch: a plan's batch, or the rows of a step over all ranks.
        mesh: gives this rank's share; ranks along `tp`, `cp` and `pp` read the same rows.
        options: the dials; keywords replace single ones (`seed=1, workers=2`).

    Raises:
        ConfigError: an option that is unknown or out of range; a batch without a size.
        PlanError: a batch of no rows.
        DataError: the data set is empty, is no data set, or never fills a window with `drop_last`.

    >>> data = loader(dataset, plan.batch, mesh, seed=1, workers=2)  # doctest: +SKIP
    """
    return _make(dataset, batch, mesh, (options or LoaderOptions()).changed(keywords), split=False)


def eval_batches(
    dataset: Any,
    batch: Batch | int,
    mesh: DataMesh,
    *,
    options: LoaderOptions | None = None,
    **keywords: Unpack[LoaderKeywords],
) -> Batches:
    """One pass in order: nothing dropped, nothing doubled, the same number of windows on each rank.

    Arguments and errors are those of `loader`. Under a pipeline, whose micro-batches must have equal rows, the
    rows that do not divide come in a window of one-row micro-batches.

    >>> for window in eval_batches(held_out, plan.batch, mesh):  # doctest: +SKIP
    ...     evaluate(window)
    """
    chosen = (options or LoaderOptions()).changed(keywords)
    ordered = replace(chosen, shuffle=bool(chosen.shuffle), epochs=1, drop_last=False)
    return _make(dataset, batch, mesh, ordered, split=True)


def _make(dataset: Any, batch: Batch | int, mesh: DataMesh, options: LoaderOptions, *, split: bool) -> Batches:
    spec = _spec(batch, mesh, options, split)
    if _is_stream(dataset):
        check_stream(spec, options)
        return Batches(StreamWindows(dataset, spec, mesh, options), spec, mesh, options, None)
    if options.sharded:
        raise ConfigError(
            f"loader: sharded=True with a {type(dataset).__name__} that has a length; needed: an iterable that gives "
            "this rank's own samples; leave sharded out: the loader divides this data set itself"
        )
    order = SampleOrder(len(dataset), options.seed, options.shuffle is not False)
    total = None if options.epochs is None else options.epochs * order.size
    if options.drop_last and total is not None and total < spec.global_size:
        raise DataError(
            f"loader: {order.size} samples in {options.epochs} epochs never fill one step of {spec.global_size} rows, "
            "and drop_last leaves out what is not full; give more data, a smaller batch, or drop_last=False"
        )
    return Batches(SampleWindows(dataset, spec, order, options), spec, mesh, options, order)


def _spec(batch: Batch | int, mesh: DataMesh, options: LoaderOptions, split: bool) -> WindowSpec:
    given = Batch(global_size=batch) if isinstance(batch, int) else batch
    if not isinstance(given, Batch):
        raise UsageError(
            f"loader: found {type(batch).__name__}; needed the batch of a plan, plan.batch, or the rows of a step"
        )
    sizes = {size for size in (given.global_size, options.global_size) if size is not None}
    if len(sizes) != 1:
        found = "none" if not sizes else f"{given.global_size} in the batch and {options.global_size} as the option"
        raise ConfigError(
            f"loader: rows of a step over all ranks: found {found}; needed: one number; "
            "set it in the plan (batch.global_size) or as loader(..., global_size=32)"
        )
    return WindowSpec(
        global_size=sizes.pop(),
        micro_batches=given.micro_batches,
        rank=mesh.batch.rank,
        ranks=mesh.batch.size,
        equal_rows=mesh.size("pp") > 1,
        split=split,
    )


def _is_stream(dataset: Any) -> bool:
    """Whether a data set is read from front to back.

    Raises:
        DataError: it is a loader already, a dict of splits, or nothing that holds samples.
    """
    name = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise DataError(
            "loader: found a torch DataLoader, which makes batches of its own; needed: the data set inside it; give "
            "dataloader.dataset, and its workers, collate and so on as options"
        )
    if isinstance(dataset, Mapping):
        raise DataError(
            f"loader: found a {name} with the keys {', '.join(map(str, list(dataset)[:8]))}; needed: one data set; "
            "give one of them"
        )
    if not isinstance(dataset, IterableDataset) and hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return False
    if hasattr(dataset, "__iter__"):
        return True
    lacking = "it has no __len__" if hasattr(dataset, "__getitem__") else "it has neither __getitem__ nor __iter__"
    raise DataError(
        f"loader: {name} is no data set: {lacking}; needed: __len__ and __getitem__, or __iter__; add them, or wrap it"
    )
