"""`OpenFiles`: the files of a foreign checkpoint, opened once and read in place."""

from __future__ import annotations

import os
import tempfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from shardwise.checkpoint.files import LOCAL, Closing, LocalFiles
from shardwise.errors import CheckpointError

MAX_OPEN = 256
"""Files at a time: a directory of DCP may have one for each tensor."""
_CHUNK = 4 * 1024 * 1024


@dataclass
class OpenFiles(Closing):
    """Files that are open for reading, the last used ones; no link is followed and each is a regular file."""

    files: LocalFiles = LOCAL
    opened: dict[Path, int] = field(default_factory=dict)
    """In the order of their last use."""
    known: dict[Path, tuple[int, int, int]] = field(default_factory=dict)
    """Device, number and bytes of every file that was opened: it must be the same one when it is opened again."""
    unnamed: dict[Path, int] = field(default_factory=dict)
    """What `--unsafe-pickle` writes tensors to: files without a name on the disk."""
    checked: set[tuple[Path, int]] = field(default_factory=set)
    """Storages whose CRC-32 was compared."""
    scratch_in: Path = Path(".")
    """Directory with room for the tensors of one file, for `--unsafe-pickle`."""

    def descriptor(self, path: Path) -> int:
        """Of an open file.

        Raises:
            CheckpointError: it is not there, is a link, or is no regular file.
        """
        if path in self.unnamed:
            return self.unnamed[path]
        if path in self.opened:
            self.opened[path] = self.opened.pop(path)
            return self.opened[path]
        while len(self.opened) >= MAX_OPEN:
            os.close(self.opened.pop(next(iter(self.opened))))
        try:
            self.opened[path] = self.files.open(path)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{path}: found nothing there, needed a regular file: copy all files of the checkpoint again, or give "
                "the right path"
            ) from error
        except OSError as error:
            raise CheckpointError(
                f"{path}: cannot be opened ({error.strerror}); needed a regular file, links are not followed: copy "
                "the checkpoint with what its links mean (`cp -rL`), or give the right path"
            ) from error
        found = os.fstat(self.opened[path])
        seen = found.st_dev, found.st_ino, found.st_size
        if self.known.setdefault(path, seen) != seen:
            raise CheckpointError(
                f"{path}: found another file than before, needed the same one: leave it while it is read"
            )
        return self.opened[path]

    def names(self, path: Path) -> list[str]:
        """What a directory holds, sorted; nothing when it is not there.

        Raises:
            CheckpointError: it may not be listed.
        """
        return self.files.names(path)

    def need(self, folder: Path, names: Iterable[str], index: Path) -> None:
        """Check that files are there, before one after the other is opened.

        Args:
            folder: where they lie.
            names: of them.
            index: the file that names them.

        Raises:
            CheckpointError: some are not.
        """
        lacking = sorted(set(names) - set(self.names(folder)))
        if lacking:
            raise CheckpointError(
                f"{folder / lacking[0]}: found nothing there, needed a file, which {index.name} names ({len(lacking)} "
                "that it names are missing); copy them, or the whole checkpoint again"
            )

    def is_directory(self, path: Path) -> bool:
        """A directory, and no link to one.

        Raises:
            CheckpointError: it may not be looked at.
        """
        return self.files.is_directory(path)

    def scratch(self) -> tuple[Path, int]:
        """An empty file without a name: what it is called here, and its descriptor."""
        path = Path(f"(unpickled {len(self.unnamed)})")
        with tempfile.TemporaryFile(dir=self.scratch_in) as file:
            self.unnamed[path] = os.dup(file.fileno())
        return path, self.unnamed[path]

    @property
    def total_bytes(self) -> int:
        """Of every file that was opened."""
        return sum(size for _, _, size in self.known.values())

    def size(self, path: Path) -> int:
        """Bytes of a file."""
        return self.files.size(self.descriptor(path))

    def read(self, path: Path, start: int, count: int) -> bytes:
        """Exactly these bytes.

        Raises:
            CheckpointError: the file is shorter by now, or the disk fails.
        """
        descriptor = self.descriptor(path)
        try:
            data = self.files.read(descriptor, path, start, count)
        except OSError as error:
            raise CheckpointError(
                f"{path}: cannot be read at offset {start} ({error.strerror}), needed {count} bytes; copy the file "
                "again"
            ) from error
        if len(data) != count:
            raise CheckpointError(
                f"{path}: ends at offset {start + len(data)}, needed {start + count}; it was cut short: copy it again"
            )
        return data

    def check_crc(self, path: Path, start: int, count: int, crc: int) -> None:
        """Compare a storage with the CRC-32 that its file has for it, once.

        Raises:
            CheckpointError: its bytes changed after they were written.
        """
        if (path, start) in self.checked:
            return
        value = 0
        for at in range(0, count, _CHUNK):
            value = zlib.crc32(self.read(path, start + at, min(_CHUNK, count - at)), value)
        if value != crc:
            raise CheckpointError(
                f"{path}: offset {start} to {start + count}: CRC-32 {value:08x}, needed {crc:08x} as the file says; "
                "its bytes changed after they were written: copy it again"
            )
        self.checked.add((path, start))

    def close(self) -> None:
        """Close all."""
        for descriptor in (*self.opened.values(), *self.unnamed.values()):
            os.close(descriptor)
        self.opened.clear()
        self.unnamed.clear()
