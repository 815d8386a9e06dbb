"""Where the elements of a foreign tensor are, and how they are read: a box at a time, in bounded memory."""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shardwise.checkpoint.files import reading
from shardwise.checkpoint.foreign.dtypes import cast_bytes, num_finite
from shardwise.checkpoint.foreign.opened import OpenFiles
from shardwise.checkpoint.format import DTYPES, Box, cut, whole
from shardwise.checkpoint.reading import SLAB_BYTES, Reader
from shardwise.errors import CheckpointError

Bytes = NDArray[np.uint8]


class Source(Protocol):
    """A tensor that lies somewhere."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Global."""
        ...

    @property
    def dtype(self) -> str:
        """Its name in torch."""
        ...

    def read(self, box: Box) -> Bytes:
        """The bytes of a box that `cut` gives: elements that follow each other in row-major order."""
        ...


def num_bytes(source: Source) -> int:
    """Of the whole tensor."""
    return whole(source.shape).num_elements * DTYPES[source.dtype].size


def slabs(source: Source) -> Iterator[tuple[Box, Bytes]]:
    """A tensor's boxes in row-major order, at most 4 MiB each in the widest type, with their bytes."""
    if whole(source.shape).num_elements:
        for box in cut(whole(source.shape), SLAB_BYTES // 8):
            yield box, source.read(box)


def first_of(box: Box, shape: Sequence[int]) -> int:
    """Number of a box's first element in row-major order."""
    return int(np.ravel_multi_index(box.offsets, tuple(shape))) if box.offsets else 0


def _follows(box: Box, shape: Sequence[int]) -> bool:
    """Whether the elements of a box follow each other."""
    inner = True
    for size, most in zip(reversed(box.sizes), reversed(shape), strict=True):
        if not inner and size != 1:
            return False
        inner = inner and size == most
    return True


@dataclass(frozen=True, eq=False)
class View:
    """A strided view of bytes in a file, as a pickle or a header describes it."""

    files: OpenFiles
    path: Path
    storage: tuple[int, int, int | None]
    """Where the storage starts in the file, its bytes, its CRC-32 where the file has one."""
    dtype: str
    offset: int
    """In elements, as the strides."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: str = ""
    """That it was on when it was saved, as `cuda:1`, where the file says it."""

    @property
    def is_contiguous(self) -> bool:
        """In row-major order."""
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != step:
                return False
            step *= size
        return True

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for two views of the same elements: tied parameters."""
        steps = tuple(step for n, step in zip(self.shape, self.stride, strict=True) if n != 1)  # of one: never taken
        return self.path, self.storage, self.offset, self.shape, steps, self.dtype

    def read(self, box: Box) -> Bytes:
        """The bytes of a box.

        Raises:
            CheckpointError: the file is shorter by now, or its bytes are not those that its CRC-32 is of.
        """
        start, count, crc = self.storage
        if crc is not None:
            self.files.check_crc(self.path, start, count, crc)
        size = DTYPES[self.dtype].size
        if self.is_contiguous and _follows(box, self.shape):
            begin = start + size * (self.offset + first_of(box, self.shape))
            return np.frombuffer(self.files.read(self.path, begin, box.num_elements * size), dtype=np.uint8)
        return self._gathered(box, size)

    def _gathered(self, box: Box, size: int) -> Bytes:
        """Elements that do not follow each other, through a map of the storage."""
        start, count, _ = self.storage
        below = start % mmap.ALLOCATIONGRANULARITY
        descriptor = self.files.descriptor(self.path)
        with reading(self.path):
            mapping = mmap.mmap(descriptor, below + count, offset=start - below, access=mmap.ACCESS_READ)
        with mapping as mapped:
            held = np.frombuffer(mapped, dtype=np.uint8, offset=below)[self.offset * size :]
            kind = np.dtype(f"u{size}")
            flat = held[: len(held) // size * size].view(kind)
            strides = tuple(step * size for step in self.stride)
            tensor = np.lib.stride_tricks.as_strided(flat, self.shape, strides, writeable=False)
            found = np.array(tensor[box.slices(whole(self.shape))], order="C").reshape(-1).view(np.uint8)
            del tensor, flat, held  # the map cannot be closed while they look into it
        return found


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor of a checkpoint of our own."""

    reader: Reader
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Global."""
        return self.reader.manifest.tensors[self.name].shape

    @property
    def dtype(self) -> str:
        """Its name in torch."""
        return self.reader.manifest.tensors[self.name].dtype

    def read(self, box: Box) -> Bytes:
        """The bytes of a box, checked."""
        data = np.empty(box.sizes, dtype=f"u{DTYPES[self.dtype].size}")
        self.reader.read(self.name, box, data)
        return data.reshape(-1).view(np.uint8)


@dataclass(frozen=True, eq=False)
class Pieces:
    """A tensor in rectangular parts, each of which is a source."""

    shape: tuple[int, ...]
    dtype: str
    parts: tuple[tuple[Box, Source], ...]

    def read(self, box: Box) -> Bytes:
        """The bytes of a box, from every part that meets it."""
        target = np.empty(box.sizes, dtype=f"u{DTYPES[self.dtype].size}")
        for place, source in self.parts:
            shared = place.overlap(box)
            if shared is not None:
                offsets = tuple(a - b for a, b in zip(shared.offsets, place.offsets, strict=True))
                data = source.read(Box(offsets, shared.sizes)).view(target.dtype).reshape(shared.sizes)
                target[shared.slices(box)] = data
        return target.reshape(-1).view(np.uint8)


@dataclass(frozen=True)
class Run:
    """Consecutive elements of a flattened tensor: where they start in it, and in a flat view of a file; how many."""

    start: int
    view: View
    at: int
    count: int


@dataclass(frozen=True, eq=False)
class Runs:
    """A tensor whose row-major elements lie in several flat buffers, one run after the other without holes."""

    shape: tuple[int, ...]
    dtype: str
    runs: tuple[Run, ...]

    def read(self, box: Box) -> Bytes:
        """The bytes of a box, from every run that it crosses."""
        start, left = first_of(box, self.shape), box.num_elements
        found = []
        index = bisect_right([run.start for run in self.runs], start) - 1
        while left:
            run = self.runs[index]
            inside = start - run.start
            count = min(left, run.count - inside)
            if count:
                found.append(run.view.read(Box((run.at + inside,), (count,))))
            start, left, index = start + count, left - count, index + 1
        return found[0] if len(found) == 1 else np.concatenate(found) if found else np.empty(0, dtype=np.uint8)


@dataclass(frozen=True, eq=False)
class Cast:
    """A source in another type, converted as it is read."""

    source: Source
    dtype: str
    name: str
    overflowed: dict[Box, int] = field(default_factory=dict)
    """How many elements of the boxes that were read were finite and are not in the new type; only where some were."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the source."""
        return self.source.shape

    def read(self, box: Box) -> Bytes:
        """Converted bytes, rounded to nearest even where the type is narrower; floats above its range are infinite.

        Raises:
            CheckpointError: an integer that the type cannot hold.
        """
        data = self.source.read(box)
        found = cast_bytes(data, self.source.dtype, self.dtype, self.name)
        overflowed = num_finite(data, self.source.dtype) - num_finite(found, self.dtype)
        if overflowed:
            self.overflowed[box] = overflowed
        return found


@dataclass(frozen=True, eq=False)
class Constant:
    """A number: a tensor without dims."""

    data: bytes
    dtype: str
    shape: tuple[int, ...] = ()

    def read(self, box: Box) -> Bytes:
        """Its bytes."""
        return np.frombuffer(self.data, dtype=np.uint8)


def number(value: float, dtype: str) -> Constant:
    """A plain number as a tensor without dims."""
    return Constant(np.asarray(value, dtype=dtype).tobytes(), dtype)


def flat(value: object, where: str) -> View:
    """A view that is one row of elements.

    Raises:
        CheckpointError: it is anything else.
    """
    if isinstance(value, View) and len(value.shape) == 1 and value.is_contiguous:
        return value
    shape = value.shape if isinstance(value, View) else type(value).__name__
    raise CheckpointError(
        f"{where}: found {shape}, needed one flat tensor, as the library writes it; save the checkpoint again"
    )
