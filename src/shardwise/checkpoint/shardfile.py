"""One rank's file of a checkpoint, in the safetensors layout: header length, JSON header, bytes; then digests.

    8 bytes      length of the header, little-endian
    header       {"__metadata__": {...}, "<tensor>[4:7,0:6]": {"dtype", "shape", "data_offsets"}, ...}
    data         the parts of tensors, one after the other, without holes
    digests      of each block of 256 KiB of the data, as a U8 tensor of shape (blocks, bytes of a digest)

Which digests they are is said by the format in the header (`digests.py`). The manifest holds the file's size and its
*seal*, the SHA-256 of header and table. So a reader that needs a few bytes checks the blocks they lie in and no others,
and what is wrong is named by tensor and offset.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from shardwise.checkpoint.digests import BLOCK, DIGEST, DIGESTS, FORMAT, BlockDigests, Digest, table_size
from shardwise.checkpoint.files import ALIGNED, Closing, Files
from shardwise.checkpoint.format import DTYPES, Box, DamagedError, Fields, parse_json, piece_key, uncollected
from shardwise.checkpoint.header import MAX_HEADER, Entry, encode_header, entry_of, without_holes
from shardwise.findings import shown

TABLE = "shardwise.digests"
Seen = Callable[[memoryview, bytes | None], None]
"""Takes bytes, and the digests (`DIGEST`) of their blocks where they are known."""
_WRITE = 4 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Which save a file belongs to; stands in its header, so that files of several saves cannot be mixed."""

    run: str
    """32 hexadecimal digits: one per store."""
    save: str
    """32 hexadecimal digits: one per save."""
    step: int
    rank: int


@dataclass(frozen=True)
class FileEntry:
    """What the manifest holds of a file."""

    name: str
    size_bytes: int
    seal: str


class Part(NamedTuple):
    """What a rank stores of a tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box

    @property
    def num_bytes(self) -> int:
        """Of the elements."""
        return self.box.num_elements * DTYPES[self.dtype].size


def ignore(_: memoryview, __: bytes | None) -> None:
    """Nobody wants to see what is read."""


def file_name(rank: int) -> str:
    """`rank-00003.safetensors`."""
    return f"rank-{rank:05d}.safetensors"


def arrange(parts: Sequence[Part]) -> list[tuple[Part, int]]:
    """The parts in the order of the file, each with the start of its bytes in the data; wide types first."""
    ordered = sorted(parts, key=lambda part: (-DTYPES[part.dtype].size, part.name, part.box))
    starts, at = [], 0
    for part in ordered:
        starts.append((part, at))
        at += part.num_bytes
    return starts


def write_shard_file(
    files: Files, directory: Path, identity: Identity, arranged: Sequence[tuple[Part, int]], data: memoryview
) -> FileEntry:
    """Write and flush a rank's file; digests are taken of what is about to be written, while the disk works.

    Args:
        files: where to.
        directory: of the checkpoint.
        identity: for the header.
        arranged: from `arrange`.
        data: the bytes of all parts, as arranged.

    Raises:
        OSError: as the disk said.
    """
    header, digests = header_bytes(identity, arranged, len(data)), BlockDigests()
    path, size = directory / file_name(identity.rank), len(header) + len(data) + table_size(len(data))
    descriptor = files.create(path, size)
    try:
        files.write(descriptor, path, memoryview(header))
        for start in range(0, len(data), _WRITE):
            part = data[start : start + _WRITE]
            digests.add(part)
            files.stream(descriptor, path, part)
        table = digests.table()
        files.write(descriptor, path, memoryview(table))
        files.sync(descriptor, path)
    finally:
        files.close(descriptor, path)
    return FileEntry(path.name, size, seal_of(header, table))


def seal_of(*parts: bytes) -> str:
    """What the manifest holds of a file's header and table of digests, given in the order in which they lie there."""
    seal = hashlib.sha256()
    for part in parts:
        seal.update(part)
    return seal.hexdigest()


def header_bytes(identity: Identity, arranged: Sequence[tuple[Part, int]], size: int) -> bytes:
    """Length and header of a new file of `size` bytes of data."""
    metadata = {"format": FORMAT, "run": identity.run, "save": identity.save}
    metadata |= {"step": str(identity.step), "rank": str(identity.rank)}
    stop = size + table_size(size)
    table = Entry(TABLE, "uint8", ((stop - size) // DIGEST.size, DIGEST.size), size, stop)
    return encode_header(metadata, [*(entry_at(part, start) for part, start in arranged), table], ALIGNED)


def entry_at(part: Part, start: int) -> Entry:
    """A part as the header has it, with its bytes from `start` on."""
    key = piece_key(part.name, part.box, part.shape)
    return Entry(key, part.dtype, part.box.sizes, start, start + part.num_bytes)


class Header(NamedTuple):
    """What the header of a file says."""

    identity: Identity
    entries: list[Entry]
    """In the order of their bytes."""
    num_bytes: int
    """Of the data before the table of digests."""
    digest: Digest
    """What the table holds."""


@uncollected()
def parse_header(text: bytes, num_bytes: int, where: str) -> Header:
    """A file's header, checked.

    Args:
        text: the JSON, without the length before it.
        num_bytes: of the file after the header.
        where: begins the text of errors.

    Raises:
        DamagedError: anything in it is not as this module writes it: holes, overlaps, sizes that do not agree.
    """
    found = parse_json(text, where)
    meta = Fields(found.pop("__metadata__", None), f"{where}: __metadata__")
    meta.only(("format", "run", "save", "step", "rank"))
    digest = DIGESTS.get(meta.text("format"))
    if digest is None:
        raise meta.wrong("format", meta.text("format"), " or ".join(map(repr, DIGESTS)))
    step, rank = meta.text("step", most=20), meta.text("rank", most=10)
    if not (step.isascii() and step.isdigit() and rank.isascii() and rank.isdigit()):
        raise meta.wrong("step, rank", (step, rank), "integers")
    identity = Identity(run=meta.hex("run", 32), save=meta.hex("save", 32), step=int(step), rank=int(rank))
    entries = without_holes([entry_of(key, item, where) for key, item in found.items()], num_bytes, where)
    if not entries or entries[-1].key != TABLE:
        raise DamagedError(f"{where}: found {entries[-1].key[:80] if entries else 'no part'} last, needed {TABLE}")
    table = entries.pop()
    blocks = -(-table.start // BLOCK)
    if table.sizes != (blocks, digest.size) or table.dtype != "uint8":
        raise DamagedError(f"{where}: {TABLE} has shape {table.sizes}, needed {(blocks, digest.size)}")
    return Header(identity, entries, table.start, digest)


class ShardFile(Closing):
    """A file that is open for reading; header and seal are checked, blocks when they are read.

    Args:
        files: where from.
        directory: of the checkpoint.
        entry: what the manifest says.
        identity: what the header must say.

    Raises:
        DamagedError: missing, a link, of another size, torn, or of another save.
    """

    def __init__(self, files: Files, directory: Path, entry: FileEntry, identity: Identity) -> None:
        """See the class."""
        self.path = directory / entry.name
        self._files, self._rank = files, identity.rank
        self._last = (0, 0)
        """First and last block in the buffer."""
        self._buffer = bytearray()
        self._descriptor = -1
        try:
            self._check(entry, identity)
        except BaseException:
            self.close()
            raise

    def _open(self) -> int:
        try:
            return self._files.open(self.path)
        except OSError as error:
            raise DamagedError(
                f"{self.path}: {error.strerror}; the manifest lists it (rank {self._rank}); choose another checkpoint"
            ) from error

    def _check(self, entry: FileEntry, identity: Identity) -> None:
        self._descriptor = self._open()
        size = self._files.size(self._descriptor)
        if size != entry.size_bytes:
            raise self.damaged(f"{size} bytes, the manifest says {entry.size_bytes}: truncated or changed")
        start = self._get(0, 8)
        length = int.from_bytes(start, "little")
        if not 2 <= length <= min(size - 8, MAX_HEADER):
            raise self.damaged(f"a header of {length} bytes at offset 0, in a file of {size}")
        text = self._get(8, length)
        self._data = 8 + length
        header = parse_header(text, size - self._data, f"{self.path}: header (written by rank {self._rank})")
        self.entries, self.num_bytes, self._digest = header.entries, header.num_bytes, header.digest
        self._table = self._get(self._data + self.num_bytes, size - self._data - self.num_bytes)
        found = header.identity
        if found != identity:
            kind = "run" if found.run != identity.run else "save"
            raise self.damaged(
                f"belongs to another {kind} (step {found.step}, rank {found.rank}), needed step {identity.step}, rank "
                f"{identity.rank}"
            )
        if seal_of(start, text, self._table) != entry.seal:
            raise self.damaged("its header or table of digests changed after it was written (offset 0, or the end)")

    def _get(self, start: int, count: int) -> bytes:
        try:
            got = self._files.read(self._descriptor, self.path, start, count)
        except OSError as error:
            raise self.damaged(f"cannot be read at offset {start}: {error.strerror}") from error
        self._check_count(start, len(got), count)
        return got

    def _fill(self, start: int, target: memoryview) -> None:
        if self._descriptor < 0:
            self._descriptor = self._open()  # blocks are compared with the table that was read at first
        try:
            count = self._files.read_into(self._descriptor, self.path, start, target)
        except OSError as error:
            place = self._place(start - self._data, start - self._data + len(target))
            raise self.damaged(f"{place}: cannot be read: {error.strerror}") from error
        self._check_count(start, count, len(target))

    def _check_count(self, start: int, got: int, needed: int) -> None:
        if got != needed:
            raise self.damaged(f"ends at offset {start + got}, needed {start + needed}")

    def damaged(self, what: str) -> DamagedError:
        """The error for this file."""
        return DamagedError(f"{self.path}: {what} (written by rank {self._rank}); choose another checkpoint")

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes `start` to `stop` of the data, in whose blocks not a bit changed; until the next call.

        Cost: reads and digests the blocks around them, unless the last call did.

        Raises:
            DamagedError: naming tensor and offset.
        """
        first, last = start // BLOCK, -(-stop // BLOCK)
        if not (self._last[0] <= first and last <= self._last[1]):
            begin, end = first * BLOCK, min(last * BLOCK, self.num_bytes)
            self._last = (0, 0)
            if len(self._buffer) < end - begin:
                self._buffer = bytearray(end - begin)
            self._fill_blocks(first, memoryview(self._buffer)[: end - begin])
            self._last = (first, last)
        base = self._last[0] * BLOCK
        return memoryview(self._buffer)[start - base : stop - base]

    def read_into(self, start: int, target: memoryview, seen: Seen = ignore) -> None:
        """Fill a buffer with the bytes of the data from `start` on, blocks that lie in it whole without a copy.

        `seen` is called with the bytes, in order, while they are in the processor's cache: with whole blocks apart.

        Cost: as `read`.

        Raises:
            DamagedError: as `read`; what is in the buffer then may be damaged.
        """
        stop = start + len(target)
        first, last = -(-start // BLOCK), -(-stop // BLOCK) if stop == self.num_bytes else stop // BLOCK
        before, after = (first * BLOCK - start, min(last * BLOCK, stop) - start) if last > first else 2 * (len(target),)
        self._copy(start, target[:before], seen)
        self._fill_blocks(first, target[before:after], seen)
        self._copy(start + after, target[after:], seen)

    def _copy(self, start: int, target: memoryview, seen: Seen) -> None:
        if target:
            target[:] = self.read(start, start + len(target))
            seen(target, None)

    def _fill_blocks(self, first: int, target: memoryview, seen: Seen = ignore) -> None:
        """Read blocks from one on, and check them where they are: as many at a time as the processor's cache holds."""
        of, size = self._digest
        for begin in range(0, len(target), self._files.piece):
            part = target[begin : begin + self._files.piece]
            self._fill(self._data + first * BLOCK + begin, part)
            start = first + begin // BLOCK
            for block, at in enumerate(range(0, len(part), BLOCK), start):
                if of(part[at : at + BLOCK]).digest() != self._table[block * size : (block + 1) * size]:
                    raise self._changed(block)
            digests = self._table[start * size : (block + 1) * size] if self._digest is DIGEST else None
            seen(part, digests)

    def _changed(self, block: int) -> DamagedError:
        place = self._place(block * BLOCK, min((block + 1) * BLOCK, self.num_bytes))
        return self.damaged(f"{place}: its bytes changed after they were written")

    def _place(self, begin: int, end: int) -> str:
        """Bytes of the data, for a message."""
        inside = [entry.key for entry in self.entries if entry.start < end and begin < entry.stop]
        return f"offset {self._data + begin} to {self._data + end}, tensor {shown(inside, 8)}"

    def check_all(self) -> None:
        """Read and check every block, from the disk where the kernel agrees.

        Raises:
            DamagedError: as `read`.
        """
        if self._descriptor >= 0:
            self._files.forget(self._descriptor)
        for start in range(0, self.num_bytes, _WRITE):
            self.read(start, min(start + _WRITE, self.num_bytes))

    def close(self) -> None:
        """Close it, and drop what was read last; a later read opens it again."""
        self._last, self._buffer = (0, 0), bytearray()
        if self._descriptor >= 0:
            self._files.release(self._descriptor)
            self._descriptor = -1
