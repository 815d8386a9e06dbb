"""The few file-system calls that a store makes, in one place: a test fails any of them, or ends the process at any.

No link is followed in the last component of a path; what is opened is a regular file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self, TypeVar

from shardwise.checkpoint.format import DamagedError
from shardwise.errors import CheckpointError
from shardwise.records import looking

T = TypeVar("T")
Identity = tuple[int, int, int, int]
ALIGNED = 4096
"""Bytes: what is written around the page cache begins and ends at multiples of it, in memory and in the file."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """What cannot be looked at below it is a `DamagedError`: see `records.looking`. Not what `lacking` tells."""
    with looking(str(path), DamagedError), lacking(path):
        yield


@contextmanager
def lacking(path: Path) -> Iterator[None]:
    """What this process has too little of is a `CheckpointError` below it: no file is damaged by that."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise
        raise CheckpointError(f"{path}: {error.strerror}; let this process have more (`ulimit -n`)") from error


class Closing(ABC):
    """A `with` statement closes it at its end."""

    @abstractmethod
    def close(self) -> None:
        """Close what is open."""

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()


class Files(Protocol):
    """What a store and its readers call; `LocalFiles` says what each does, `RemoteFiles` the same for a URL."""

    piece: int
    """Bytes of whole blocks that are read and checked at a time."""

    def make_parents(self, path: Path) -> None:
        """Make a directory and what is above it, where missing."""
        ...

    def make_directory(self, path: Path) -> None:
        """Make a directory for a save, where there are directories."""
        ...

    def create(self, path: Path, size: int = 0) -> int:
        """Begin a new file of `size` bytes, where that is known."""
        ...

    def write(self, descriptor: int, path: Path, data: memoryview) -> None:
        """Write all of it at the end."""
        ...

    def stream(self, descriptor: int, path: Path, data: memoryview) -> None:
        """Write all of it at the end; it begins its way to the disk at once."""
        ...

    def sync(self, descriptor: int, path: Path) -> None:
        """What was written is kept when this returns."""
        ...

    def close(self, descriptor: int, path: Path) -> None:
        """Close a file that was created."""
        ...

    def open(self, path: Path) -> int:
        """Open a file for reading."""
        ...

    def size(self, descriptor: int) -> int:
        """Bytes of an open file."""
        ...

    def read(self, descriptor: int, path: Path, start: int, count: int) -> bytes:
        """Bytes from a place; fewer at the end of the file."""
        ...

    def read_into(self, descriptor: int, path: Path, start: int, target: memoryview) -> int:
        """Fill a buffer with bytes from a place; how many there were."""
        ...

    def release(self, descriptor: int) -> None:
        """Close a file that was opened for reading."""
        ...

    def forget(self, descriptor: int) -> None:
        """Drop what is cached of an open file."""
        ...

    def remove(self, path: Path) -> None:
        """Remove a file."""
        ...

    def remove_tree(self, path: Path) -> None:
        """Remove a directory and its files."""
        ...

    def identity(self, path: Path) -> Identity | None:
        """Equal only for a file that nobody wrote to; None: it is not there."""
        ...

    def names(self, path: Path) -> list[str]:
        """What a directory holds, sorted; nothing when it is not there."""
        ...

    def kind(self, path: Path) -> Literal["missing", "file", "directory"]:
        """What is there."""
        ...

    def is_directory(self, path: Path) -> bool:
        """A directory, and no link to one."""
        ...

    def is_file(self, path: Path) -> bool:
        """A file, and no link to one."""
        ...

    def write_whole(self, path: Path, data: bytes) -> None:
        """Write a new small file, kept when this returns."""
        ...


def read_whole(files: Files, path: Path, most: int) -> bytes:
    """A small file.

    Raises:
        OSError: as `open`; or it is larger than `most` bytes.
    """
    descriptor = files.open(path)
    try:
        size = files.size(descriptor)
        if size > most:
            raise OSError(errno.EFBIG, f"{size} bytes, at most {most} are allowed", str(path))
        return files.read(descriptor, path, 0, size)
    finally:
        files.release(descriptor)


class LocalFiles:
    """A file system that all ranks see. Every method is one call that may fail with `OSError`.

    What only looks at a path raises a `DamagedError` in its place, and what `lacking` tells is a `CheckpointError`, as
    every failure of `RemoteFiles` is.

    >>> LocalFiles().names(Path("/nowhere"))
    []
    """

    piece = 512 * 1024  # what is read is checked in the cache of a core

    def call(self, name: str, path: Path, act: Callable[[], T]) -> T:
        """Every call goes through here: its name, what it is about, and the call itself."""
        return act()

    def make_directory(self, path: Path) -> None:
        """Make a new directory; it must not exist."""
        self.call("mkdir", path, lambda: path.mkdir())

    def make_parents(self, path: Path) -> None:
        """Make a directory and what is above it, where missing."""
        self.call("makedirs", path, lambda: path.mkdir(parents=True, exist_ok=True))

    def create(self, path: Path, size: int = 0) -> int:
        """Open a new file for writing, of `size` bytes where that is known; it must not exist."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return self.call("create", path, lambda: os.open(path, flags, 0o644))

    def write(self, descriptor: int, path: Path, data: memoryview) -> None:
        """Write all of it at the end."""
        while data:
            written = self.call("write", path, partial(os.write, descriptor, data))
            data = data[written:]

    def stream(self, descriptor: int, path: Path, data: memoryview) -> None:
        """Write all of it at the end, around the page cache: no copy, and nothing else is driven out of it.

        Where the file system can, and address, place in the file and length are multiples of `ALIGNED`. What remains
        goes through the cache, and the kernel is asked to begin writing it to the disk.
        """
        data = data[self._write_around(descriptor, path, data[: len(data) - len(data) % ALIGNED]) :]
        if data:
            self.write(descriptor, path, data)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # what is dirty stays cached

    def _write_around(self, descriptor: int, path: Path, data: memoryview) -> int:
        """How many of the bytes could be written so."""
        done = 0
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, getattr(os, "O_DIRECT", 0))
            while done < len(data):
                done += self.call("write", path, partial(os.write, descriptor, data[done:]))
        except OSError as error:
            if error.errno != errno.EINVAL:  # not here, or not from this address
                raise
        finally:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, 0)
        return done

    def sync(self, descriptor: int, path: Path) -> None:
        """Flush a file to the disk."""
        self.call("fsync", path, lambda: os.fsync(descriptor))

    def close(self, descriptor: int, path: Path) -> None:
        """Close a file that was created or opened here."""
        self.call("close", path, lambda: os.close(descriptor))

    def open(self, path: Path) -> int:
        """Open a regular file for reading; a link, a device or a directory is an error."""

        def act() -> int:
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError as error:  # of a link the system says "Too many levels"
                if error.errno == errno.ELOOP and os.path.islink(path):
                    raise OSError(errno.ELOOP, "it is a link, and links are not followed", str(path)) from None
                raise
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.close(descriptor)
                raise OSError(errno.EINVAL, "not a regular file", str(path))
            return descriptor

        with lacking(path):
            return self.call("open", path, act)

    def size(self, descriptor: int) -> int:
        """Bytes of an open file."""
        return os.fstat(descriptor).st_size

    def read(self, descriptor: int, path: Path, start: int, count: int) -> bytes:
        """Bytes from a place; fewer at the end of the file."""
        parts: list[bytes] = []
        while count > 0:
            got = self.call("read", path, partial(os.pread, descriptor, count, start))
            if not got:
                break
            parts.append(got)
            start, count = start + len(got), count - len(got)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_into(self, descriptor: int, path: Path, start: int, target: memoryview) -> int:
        """Fill a buffer with bytes from a place; how many there were: fewer at the end of the file.

        New memory for every read would cost more than the read: its pages are cleared one by one.
        """
        count = 0
        while count < len(target):
            got = self.call("read", path, partial(os.preadv, descriptor, [target[count:]], start + count))
            if not got:
                break
            count += got
        return count

    def release(self, descriptor: int) -> None:
        """Close a file that was opened for reading: nothing is lost when that fails."""
        os.close(descriptor)

    def forget(self, descriptor: int) -> None:
        """Ask the kernel to drop what it caches of a file, so that it is next read from the disk."""
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def rename(self, path: Path, target: Path) -> None:
        """Rename within one file system."""
        self.call("rename", path, lambda: os.rename(path, target))

    def remove_tree(self, path: Path) -> None:
        """Remove a directory and all in it, each with a call of its own; a link is removed, and not followed."""
        for name in self.names(path):
            if self.is_directory(path / name):
                self.remove_tree(path / name)
            else:
                self.remove(path / name)
        self.call("rmdir", path, lambda: os.rmdir(path))

    def remove(self, path: Path) -> None:
        """Remove a file."""
        self.call("unlink", path, lambda: os.unlink(path))

    def sync_directory(self, path: Path) -> None:
        """Flush a directory's entries to the disk: without it a rename may be lost with the power."""

        def act() -> None:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

        self.call("fsync directory", path, act)

    def identity(self, path: Path) -> Identity | None:
        """Device, inode, size and time of change: equal only for a file that nobody wrote to; None: it is not there."""
        try:
            at = os.lstat(path)
        except OSError:
            return None
        return at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns

    def names(self, path: Path) -> list[str]:
        """What a directory holds, sorted; nothing when it is not there.

        Raises:
            DamagedError: it may not be listed.
        """
        with reading(path):
            try:
                return sorted(self.call("listdir", path, lambda: os.listdir(path)))
            except (FileNotFoundError, NotADirectoryError):
                return []

    def kind(self, path: Path) -> Literal["missing", "file", "directory"]:
        """What is there, at the end of links.

        Raises:
            DamagedError: it may not be looked at.
        """
        mode = self._mode(path, os.stat)
        return "missing" if not mode else "directory" if stat.S_ISDIR(mode) else "file"

    def is_there(self, path: Path) -> bool:
        """Anything, a link too.

        Raises:
            DamagedError: it may not be looked at.
        """
        return self._mode(path, os.lstat) != 0

    def is_directory(self, path: Path) -> bool:
        """A directory, and no link to one.

        Raises:
            DamagedError: it may not be looked at.
        """
        return stat.S_ISDIR(self._mode(path, os.lstat))

    def is_file(self, path: Path) -> bool:
        """A regular file, and no link to one.

        Raises:
            DamagedError: it may not be looked at.
        """
        return stat.S_ISREG(self._mode(path, os.lstat))

    def _mode(self, path: Path, look: Callable[[Path], os.stat_result]) -> int:
        """What is there, in the bits of the system; 0: nothing."""
        with reading(path):
            try:
                return look(path).st_mode
            except (FileNotFoundError, NotADirectoryError):
                return 0

    def write_whole(self, path: Path, data: bytes) -> None:
        """Write a new small file and flush it."""
        descriptor = self.create(path)
        try:
            self.write(descriptor, path, memoryview(data))
            self.sync(descriptor, path)
        finally:
            self.close(descriptor, path)


LOCAL = LocalFiles()
