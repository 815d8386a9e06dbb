"""Digests of the blocks of a rank's file: what they are in each format, and the table of them.

They find accidents: docs/decisions/0015-digests-of-blocks-against-accidents.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple, Protocol

import xxhash

BLOCK = 256 * 1024
"""Bytes of data with a digest of their own."""


class _Hash(Protocol):
    def update(self, data: memoryview | bytes, /) -> None: ...

    def digest(self) -> bytes: ...


class Digest(NamedTuple):
    """What the table of a file holds of each block."""

    of: Callable[..., _Hash]
    """Begins one, of the bytes given, if any."""
    size: int
    """Bytes."""


DIGESTS = {"shardwise 2": Digest(hashlib.sha256, 32), "shardwise 3": Digest(xxhash.xxh3_128, 16)}
"""By the format that a file's header names. None is ever removed: older files are read for ever."""
FORMAT = "shardwise 3"
"""Of new files."""
DIGEST = DIGESTS[FORMAT]


def table_size(num_bytes: int) -> int:
    """Bytes of the table of a new file with so many bytes of data."""
    return -(-num_bytes // BLOCK) * DIGEST.size


class BlockDigests:
    """The table of a new file, of data that is added in parts.

    >>> whole, parts = BlockDigests(), BlockDigests()
    >>> whole.add(memoryview(bytes(BLOCK + 3)))
    >>> parts.add(memoryview(bytes(BLOCK - 1)))
    >>> parts.add(memoryview(bytes(4)))
    >>> whole.table() == parts.table(), len(parts.table())
    (True, 32)
    """

    def __init__(self) -> None:
        """Of no data."""
        self._done: list[bytes] = []
        self._current, self._filled = DIGEST.of(), 0

    def add(self, data: memoryview) -> None:
        """The bytes that follow."""
        while data:
            part = data[: BLOCK - self._filled]
            self._current.update(part)
            self._filled += len(part)
            data = data[len(part) :]
            if self._filled == BLOCK:
                self._close()

    def _close(self) -> None:
        self._done.append(self._current.digest())
        self._current, self._filled = DIGEST.of(), 0

    def table(self) -> bytes:
        """Of all blocks; nothing is added afterwards."""
        if self._filled:
            self._close()
        return b"".join(self._done)


class PartDigest:
    """The digest of a part of a file, made of those of the blocks that lie in it, and of what is before and after them.

    Whoever reads the part has those of its blocks: they need not be taken again.

    >>> data = memoryview(bytes(5 + 2 * BLOCK + 3))
    >>> read = PartDigest()
    >>> for cut in (data[:5], data[5 : 5 + BLOCK], data[5 + BLOCK : 5 + 2 * BLOCK], data[5 + 2 * BLOCK :]):
    ...     read.add(cut)
    >>> read.is_of(data), read.is_of(data[:-1])
    (True, False)
    """

    def __init__(self) -> None:
        """Of no bytes."""
        self._first, self._digests = 0, DIGEST.of()

    def add(self, data: memoryview, digests: bytes | None = None) -> None:
        """The bytes that follow, and the digests of their blocks where they are known."""
        self._first = self._first or min(len(data), BLOCK)
        if digests is None:
            digests = b"".join(DIGEST.of(data[at : at + BLOCK]).digest() for at in range(0, len(data), BLOCK))
        self._digests.update(digests)

    def is_of(self, data: memoryview) -> bool:
        """Whether other bytes have this digest. Cost: a pass over them."""
        other = PartDigest()
        for cut in filter(None, (data[: self._first], data[self._first :])):
            other.add(cut)
        return other._digests.digest() == self._digests.digest()
