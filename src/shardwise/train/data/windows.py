"""How the rows of a step are divided over data ranks and micro-batches: arithmetic only, the same on every rank.

A *window* is what one step consumes. Its rows are divided over the data ranks, and each rank's rows over its
micro-batches. Every rank has the same number of micro-batches in a window, because each one may end in a
collective; a micro-batch without rows carries copies of a real row and is flagged to weigh zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import torch

from shardwise.errors import UsageError
from shardwise.parallel.inputs import as_dict, divide_rows
from shardwise.train.torch_private import as_tree_node


class DataRank(Protocol):
    """Rank and size of the data axes."""

    @property
    def rank(self) -> int:
        """This rank's place among the replicas."""
        ...

    @property
    def size(self) -> int:
        """Number of replicas that see different samples."""
        ...


class DataMesh(Protocol):
    """What the loader needs of a mesh; `shardwise.Mesh` has it all."""

    @property
    def batch(self) -> DataRank:
        """Rank and size of the data axes, the same for all tp and pp ranks of a replica."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the counts of streams are summed."""
        ...

    def size(self, axis: str) -> int:
        """Degree of an axis."""
        ...

    def all_reduce_sum(self, tensor: torch.Tensor, *axes: str) -> torch.Tensor:
        """The sum over the ranks of these axes."""
        ...


Sizes = tuple[int, ...]
"""Rows of each micro-batch of one rank; 0 for padding."""


@dataclass(frozen=True, kw_only=True)
class WindowSpec:
    """The division of a step that plan and mesh ask for, as one rank sees it."""

    global_size: int
    """Rows of a full window over all ranks."""
    micro_batches: int
    rank: int
    ranks: int
    equal_rows: bool
    """Under a pipeline: the micro-batches that run together must have the same number of rows."""
    split: bool = False
    """In evaluation: rows that do not fall into equal micro-batches become two windows."""

    @property
    def max_rows(self) -> int:
        """The most rows that a micro-batch of a full window has: what memory was planned for."""
        return shares(shares(self.global_size, self.ranks)[0], self.micro_batches)[0]


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One micro-batch: rows `start` to `stop` of this rank's rows, or padding of `rows` copies of a real row."""

    start: int
    stop: int
    rows: int
    zero: bool


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A window as one rank sees it."""

    offset: int
    """Rows of the window that belong to ranks before this one."""
    rows: int
    """Rows of this rank."""
    num_rows: int
    """Rows of all ranks."""
    chunks: tuple[Chunk, ...]
    weights_zero: tuple[bool, ...]
    """Which micro-batches are padding."""
    row_counts: tuple[int, ...]
    """Real rows of each micro-batch; 0 for padding."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """What one step consumes on this rank.

    `micro_batches[i]` weighs nothing when `weights_zero[i]`: the step multiplies its loss and its weight by 0.
    All ranks have the same number of micro-batches: the plan's. Under a pipeline all those of a rank have equal
    rows, for which a training step that does not divide takes a multiple of the plan's number.
    """

    step: int
    """Index of the window, from 0."""
    micro_batches: list[Any]
    weights_zero: tuple[bool, ...]
    rows: tuple[int, ...]
    """Real rows of each micro-batch; 0 for padding."""
    num_rows: int
    """Rows over all ranks and micro-batches, known without communication."""
    positions: range
    """Where this rank's rows stand in the endless run of epochs."""
    indices: list[int] = field(repr=False)
    """The samples at these positions; for a stream, the positions themselves."""

    def __post_init__(self) -> None:
        """Its list of micro-batches knows all else of it."""
        rest = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "micro_batches"}
        object.__setattr__(self, "micro_batches", _joined(self.micro_batches, rest))

    @property
    def sample_ids(self) -> tuple[tuple[int, int], ...]:
        """(position, sample index) of each of this rank's rows, in order; padding is not among them."""
        return tuple(zip(self.positions, self.indices, strict=True))


class MicroBatches(list[Any]):
    """Those of a window. A step given these alone finds the window again, and with it which of them are padding."""

    window: Mapping[str, Any] | None = None
    """All else of the window; not the window itself, which would keep tensors until cycles are collected."""


def _joined(micro_batches: Any, window: Mapping[str, Any] | None) -> MicroBatches:
    made = MicroBatches(micro_batches)
    made.window = window
    return made


as_tree_node(MicroBatches, lambda value: (list(value), value.window), _joined)


def window_of(batch: Any) -> Any:
    """The window whose list of micro-batches this is; anything else is itself.

    Raises:
        UsageError: the list has lost or gained micro-batches since.
    """
    if not isinstance(batch, MicroBatches) or batch.window is None:
        return batch
    if len(batch) != len(batch.window["weights_zero"]):
        raise UsageError(
            f"a step was given a window's list of micro-batches, changed from {len(batch.window['weights_zero'])} to "
            f"{len(batch)}: which of them are padding is not known; needed: the window, or a list of your own of the "
            "batches with rows"
        )
    return Window(micro_batches=batch, **batch.window)


def micro_batches_of(batch: Any, count: int) -> tuple[list[Any], tuple[bool, ...]]:
    """What a step or an evaluation is given, as micro-batches, and which of them are padding.

    Args:
        batch: a window, a list of micro-batches, or one batch of rows: a tensor, a dict, a tuple, or a list of tensors.
        count: how many one batch of rows is cut into.

    Raises:
        UsageError: an empty list.
        ModelError: see `divide_rows`.
    """
    if isinstance(batch, Window):
        return list(batch.micro_batches), tuple(batch.weights_zero)
    if isinstance(batch, list) and not batch:
        raise UsageError("a step was given an empty list; needed: a batch with rows, or at least one micro-batch")
    if isinstance(batch, list) and not isinstance(batch[0], torch.Tensor):
        return [as_dict(micro) for micro in batch], (False,) * len(batch)
    return divide_rows(as_dict(batch), count)


def shares(total: int, parts: int) -> tuple[int, ...]:
    """`total` divided over `parts` as evenly as can be; the first ones get one more.

    >>> shares(8, 3)
    (3, 3, 2)
    """
    base, more = divmod(total, parts)
    return (base + 1,) * more + (base,) * (parts - more)


def divide(rows: Sequence[int], spec: WindowSpec) -> list[Layout]:
    """The window in which rank d has `rows[d]` rows, as `spec.rank` sees it.

    One layout; with `spec.split`, where equal micro-batches need it, two that follow one another.
    """
    zeros = [0] * len(rows)
    if not spec.equal_rows:
        return [_layout([shares(own, spec.micro_batches) for own in rows], rows, spec, used=zeros)]
    if not spec.split:
        return [_layout(_equal_sizes(rows, spec), rows, spec, used=zeros)]
    layouts: list[Layout] = []
    used = zeros
    for group in _equal_groups(rows, spec):
        layouts.append(_layout(group, rows, spec, used=used))
        used = [before + sum(sizes) for before, sizes in zip(used, group, strict=True)]
    return layouts


def _layout(sizes: Sequence[Sizes], rows: Sequence[int], spec: WindowSpec, *, used: Sequence[int]) -> Layout:
    """The chunks of this rank from the sizes of every rank's micro-batches; `used` rows went into layouts before."""
    own = sizes[spec.rank]
    padding = max(1, *own) if spec.equal_rows else 1  # a pipeline needs the padding in the shape of its neighbours
    chunks: list[Chunk] = []
    start = 0
    for size in own:
        chunks.append(Chunk(start=start, stop=start + size, rows=size or padding, zero=size == 0))
        start += size
    return Layout(
        offset=sum(rows[: spec.rank]) + used[spec.rank],
        rows=start,
        num_rows=sum(sum(of_rank) for of_rank in sizes),
        chunks=tuple(chunks),
        weights_zero=tuple(size == 0 for size in own),
        row_counts=tuple(own),
    )


def _equal_sizes(rows: Sequence[int], spec: WindowSpec) -> list[Sizes]:
    """Micro-batch sizes of a training step under a pipeline: on each rank, all real ones equal.

    As many micro-batches as the plan says, or the least multiple of that for which each rank's rows fall into
    equal parts of at most `max_rows`; parts of one row always do.
    """
    count = spec.micro_batches
    while not all(_equal_part(own, count, spec.max_rows) for own in set(rows)):
        count += spec.micro_batches
    parts = [_equal_part(own, count, spec.max_rows) for own in rows]
    return [(part,) * (own // part) + (0,) * (count - own // part) for own, part in zip(rows, parts, strict=True)]


def _equal_groups(rows: Sequence[int], spec: WindowSpec) -> list[list[Sizes]]:
    """The same for evaluation, where the rows need not be one step: one or two windows of the plan's micro-batches.

    Two where one does not do: as many equal parts as fit, and what is left row by row.
    """
    count = spec.micro_batches
    if all(_equal_part(own, count, spec.max_rows) for own in set(rows)):
        return [_equal_sizes(rows, spec)]
    first: list[Sizes] = []
    second: list[Sizes] = []
    for own in rows:
        part = max(1, own // count)
        taken = min(count, own // part)
        left = own - taken * part
        first.append((part,) * taken + (0,) * (count - taken))
        second.append((1,) * left + (0,) * (count - left))
    return [first, second]


def _equal_part(own: int, count: int, cap: int) -> int:
    """The least part that divides `own` into at most `count` parts and is at most `cap`; 0 when there is none."""
    for part in range(max(1, -(-own // count)), cap + 1):
        if own % part == 0:
            return part
    return 0


class ReadAhead:
    """Windows that a loader has handed out, and which of them was trained on last.

    A loop of a script's own may take windows before it trains on them, as one that moves the next batch to the device
    meanwhile. Who goes on has to read them again.
    """

    def __init__(self) -> None:
        """None yet."""
        self._rows: dict[int, tuple[int, int]] = {}
        self.trained: tuple[int, int] | None = None
        """Step and position after the window that was trained on last; None: nobody says which it was."""

    def add(self, window: Window, position: int) -> None:
        """This one was handed out; its rows begin at a position."""
        self._rows[window.step] = (position, position + window.num_rows)
        if len(self._rows) > _MOST_AHEAD:
            del self._rows[next(iter(self._rows))]

    def rows_of(self, window: Window) -> tuple[int, int] | None:
        """Positions of a window over all ranks, its first, and after its last; None: it was not handed out here."""
        return self._rows.get(window.step)

    def trains(self, batch: object) -> None:
        """A step trains on this. Where it is no window, it is not known what was trained on."""
        self.trained = None
        if isinstance(batch, Window) and (rows := self.rows_of(batch)) is not None:
            self.trained = (batch.step + 1, rows[1])
            self._rows = {step: kept for step, kept in self._rows.items() if step >= batch.step}


_MOST_AHEAD = 1024
"""Of those that were handed out before, it is not known any more where they stood."""
