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
    def update(self, data: memoryview, /) -> None: ...

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
