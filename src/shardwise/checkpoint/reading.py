"""`Reader`: one checkpoint, read in bounded memory by one process: boxes of tensors, and the check of everything."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.checkpoint.checksum import MASK, contribution, word_box, words_of
from shardwise.checkpoint.digests import BLOCK
from shardwise.checkpoint.files import LOCAL, Closing, Files
from shardwise.checkpoint.format import DTYPES, Box, DamagedError, Piece, cut, piece_key, whole
from shardwise.checkpoint.manifest import FILE, Manifest
from shardwise.checkpoint.shardfile import Seen, ShardFile, ignore

SLAB_BYTES = 4 * 1024 * 1024
MAX_OPEN = 64
"""Files open at a time: a process may have 1024 by default, and a checkpoint has one of every rank that saved it."""


class Reader(Closing):
    """A checkpoint whose manifest is checked; files are opened, and checked, when they are needed.

    Args:
        path: directory of the checkpoint.
        manifest: of it, when it was read already.
        files: where from.

    Raises:
        DamagedError: the manifest cannot be read, or a file is there that it does not list.

    >>> with Reader(Path("runs/a/checkpoints/step-00000500")) as reader:  # doctest: +SKIP
    ...     reader.verify()
    """

    def __init__(self, path: Path, manifest: Manifest | None = None, files: Files = LOCAL) -> None:
        """See the class."""
        self.path, self._files = path, files
        self.manifest = manifest if manifest is not None else Manifest.read(path, files)
        self._open: dict[int, ShardFile] = {}

    def check_directory(self) -> None:
        """Every listed file is there, and no other.

        Raises:
            DamagedError: naming one that is missing or too many.
        """
        there = set(self._files.names(self.path))
        listed = {FILE, *(entry.name for entry in self.manifest.files)}
        for name in sorted(listed - there):
            raise DamagedError(f"{self.path / name}: it is missing, the manifest lists it; choose another checkpoint")
        for name in sorted(there - listed):
            shown = f"{self.path}/{name if name.isprintable() else ascii(name)}"
            raise DamagedError(
                f"{shown}: it is there, and the manifest does not list it; remove it if it is known to be "
                "harmless, or choose another checkpoint"
            )

    def file(self, index: int) -> ShardFile:
        """An open file of the checkpoint; what the manifest says of its parts is compared with its header.

        Raises:
            DamagedError: as `ShardFile`.
        """
        if index not in self._open:
            manifest = self.manifest
            opened = ShardFile(self._files, self.path, manifest.files[index], manifest.identity(index))
            self._open[index] = opened
            held = {entry.key: entry for entry in opened.entries}
            if len(held) != len(self._parts[index]):
                raise opened.damaged(f"holds {len(held)} parts of tensors, the manifest says {len(self._parts[index])}")
            for name, piece in self._parts[index]:
                tensor = manifest.tensors[name]
                entry = held.get(piece_key(name, piece.box, tensor.shape))
                said = (tensor.dtype, piece.box.sizes, piece.start)
                if entry is None or (entry.dtype, entry.sizes, entry.start) != said:
                    raise opened.damaged(f"{name}{piece.box} is not in its header as the manifest says")
        self._open[index] = self._open.pop(index)  # the most recent one is the last
        for least_recent in islice(reversed(self._open.values()), MAX_OPEN, MAX_OPEN + 1):
            least_recent.close()  # until it is read again
        return self._open[index]

    def read(self, name: str, wanted: Box, target: Any, seen: Seen = ignore) -> None:
        """Fill an array of unsigned integers with a box of a tensor.

        Args:
            name: of the tensor.
            wanted: which elements.
            target: with the sizes of `wanted` and the element size of the type.
            seen: is called with the bytes, in order, while they are in the processor's cache, where the box is a stored
                part and the target contiguous.

        Cost: reads the blocks in which the wanted elements lie, and for a cut inside short rows the rows.

        Raises:
            DamagedError: naming file, tensor and offset; what is in the array then is not to be used.
        """
        entry = self.manifest.tensors[name]
        for piece in sorted(entry.pieces, key=lambda p: (p.file, p.start)):
            shared = piece.box.overlap(wanted)
            if shared is not None:
                inside = target[shared.slices(wanted)] if shared.sizes else target
                copy_box(self.file(piece.file), (piece.box, piece.start), shared, entry.dtype, inside, seen)

    def place(self, name: str, wanted: Box) -> tuple[int, int]:
        """File and start of the first stored part that holds some of a box: reading in this order reads forwards."""
        pieces = self.manifest.tensors[name].pieces
        return min(((p.file, p.start) for p in pieces if p.box.overlap(wanted) is not None), default=(0, 0))

    def slabs(self, name: str) -> Iterator[tuple[Box, NDArray[np.uint8]]]:
        """A tensor's boxes in order, at most 4 MiB each, with their bytes."""
        entry = self.manifest.tensors[name]
        size = DTYPES[entry.dtype].size
        for box in cut(whole(entry.shape), SLAB_BYTES // size):
            data = np.empty(box.sizes, dtype=f"u{size}")
            self.read(name, box, data)
            yield box, data.reshape(-1).view(np.uint8)

    def checksum(self, name: str) -> int:
        """The checksum of a stored tensor as it is read now."""
        dtype = self.manifest.tensors[name].dtype
        parts = (contribution(words_of(data, box.sizes, dtype), word_box(box, dtype)) for box, data in self.slabs(name))
        return sum(parts) & MASK

    def verify(self) -> int:
        """Check every bit: files, headers, blocks, checksums. The number of bytes that were read.

        Cost: reads all data once, at the speed of the checksum; memory of 4 MiB and the largest header.

        Raises:
            DamagedError: the first thing that is wrong, by file, tensor and offset.
        """
        self.check_directory()
        total = 0
        found = dict.fromkeys(self.manifest.tensors, 0)
        for index, entry in enumerate(self.manifest.files):
            self._add_sums(self.file(index), index, found)
            total += entry.size_bytes
            self._close(index)
        for name, tensor in self.manifest.tensors.items():
            if found[name] != tensor.checksum:
                raise DamagedError(
                    f"{self.path}: {name}: checksum {found[name]:016x}, the manifest says "
                    f"{tensor.checksum:016x}: it changed before it was written; choose another checkpoint"
                )
        return total

    @cached_property
    def _parts(self) -> list[list[tuple[str, Piece]]]:
        """For each file, the parts that the manifest says it holds, in the order of their bytes."""
        parts: list[list[tuple[str, Piece]]] = [[] for _ in self.manifest.files]
        for name, tensor in self.manifest.tensors.items():
            for piece in tensor.pieces:
                parts[piece.file].append((name, piece))
        return [sorted(found, key=lambda part: part[1].start) for found in parts]

    def _add_sums(self, file: ShardFile, index: int, found: dict[str, int]) -> None:
        for name, piece in self._parts[index]:
            dtype = self.manifest.tensors[name].dtype
            size = DTYPES[dtype].size
            at = piece.start
            for box in cut(piece.box, SLAB_BYTES // size):
                data = np.frombuffer(file.read(at, at + box.num_elements * size), dtype=np.uint8)
                at += box.num_elements * size
                value = contribution(words_of(data, box.sizes, dtype), word_box(box, dtype))
                found[name] = (found[name] + value) & MASK

    def _close(self, index: int) -> None:
        self._open.pop(index).close()

    def close(self) -> None:
        """Close all files."""
        for index in list(self._open):
            self._close(index)


def copy_box(
    file: ShardFile, piece: tuple[Box, int], wanted: Box, dtype: str, target: Any, seen: Seen = ignore
) -> None:
    """Read the elements that a stored part and a wanted box share, in slabs of bounded size.

    What lies in one run of bytes in the file and in the target is read straight into it.

    Args:
        file: that holds the part.
        piece: the part's box, and the start of its bytes in the data.
        wanted: a box inside the part.
        dtype: torch's name of the type.
        target: array of unsigned integers of the type's size, with the sizes of `wanted`; written.
        seen: as for `Reader.read`.
    """
    box, start = piece
    size = DTYPES[dtype].size
    kind = np.dtype(f"u{size}") if size <= 8 else np.dtype("V16")
    if not box.sizes:
        number = file.read(start, start + size)
        target[...] = np.frombuffer(number, dtype=kind)[0]
        seen(number, None)
        return
    if wanted == box and target.flags.c_contiguous:
        file.read_into(start, memoryview(target.reshape(-1)).cast("B"), seen)
        return
    for slab in _slabs(box, wanted, size):
        lead = [a - b for a, b in zip(slab.offsets, box.offsets, strict=True)]
        begin = start + size * int(np.ravel_multi_index(lead, box.sizes))
        shared = slab.overlap(wanted)
        assert shared is not None
        inside = target[shared.slices(wanted)]
        if shared == slab and inside.flags.c_contiguous:
            file.read_into(begin, memoryview(inside.reshape(-1)).cast("B"))
            continue
        held = np.frombuffer(file.read(begin, begin + slab.num_elements * size), dtype=kind).reshape(slab.sizes)
        inside[...] = held[shared.slices(slab)]


def _slabs(box: Box, wanted: Box, size: int) -> Iterator[Box]:
    """Parts of `box` that lie in one run of bytes each, and cover `wanted`: whole rows, unless these are long."""
    offsets, sizes, dim = list(wanted.offsets), list(wanted.sizes), 0
    rest = int(np.prod(box.sizes[1:], dtype=np.int64)) * size
    while dim + 1 < len(sizes) and (
        rest > SLAB_BYTES or (rest > 4 * BLOCK and tuple(sizes[dim + 1 :]) != box.sizes[dim + 1 :])
    ):
        dim += 1
        rest = rest // max(1, box.sizes[dim])
    step = max(1, SLAB_BYTES // max(1, rest))
    for lead in np.ndindex(*sizes[:dim]):
        first = tuple(o + i for o, i in zip(offsets[:dim], lead, strict=True))
        for at in range(0, sizes[dim], step):
            count = min(step, sizes[dim] - at)
            tail_offsets, tail_sizes = box.offsets[dim + 1 :], box.sizes[dim + 1 :]
            yield Box((*first, offsets[dim] + at, *tail_offsets), (*((1,) * dim), count, *tail_sizes))
