"""Checkpoints at a URL: `RemotePath` names an object, `RemoteFiles` reads and writes it through `fsspec`.

An object store has no rename, no directory and no flush: an object is there, whole, once its upload is acknowledged.
What a commit is without them says `objects.py`.
"""

from __future__ import annotations

import errno
import os
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path, PosixPath
from typing import Any, Literal, NamedTuple, Self, TypeVar

from shardwise.checkpoint.files import LOCAL, Files, Identity, LocalFiles
from shardwise.errors import CheckpointError, UsageError
from shardwise.extras import optional_module
from shardwise.findings import nearest

T = TypeVar("T")
EXTRA = "pip install 'shardwise[remote]'"
_URL = re.compile(r"([a-z][a-z0-9+.\-]+):(/+)(.*)", re.DOTALL)
_PART = re.compile(r"[A-Za-z0-9_.=+@,~%:\-]+")
_LOCAL_SCHEMES = ("file", "local")
_BUCKETS = frozenset(["s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "oss", "r2", "tos"])
"""Schemes whose directories are prefixes of names: there is none to make."""
_PART_BYTES, _MOST_PARTS = 16 * 1024 * 1024, 9_000
"""Of one upload: S3 takes at most 10,000 parts, so that a larger file has larger ones."""
_AHEAD, _AHEAD_FROM = 16 * 1024 * 1024, 256 * 1024
"""At most so many bytes are asked for in one request; smaller reads than the second are of headers."""
_HINTS = {"s3": " (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_DEFAULT_REGION, or ~/.aws)"}


class RemotePath(PosixPath):
    """A URL that is put together and taken apart like a path; no call of the operating system takes it.

    >>> RemotePath("s3://bucket/run") / "latest"
    RemotePath('s3://bucket/run/latest')
    """

    def __str__(self) -> str:
        """The URL, with both slashes."""
        scheme, *rest = self.parts
        return f"{scheme}//{'/'.join(rest)}"

    def __fspath__(self) -> str:
        """There is no such file.

        Raises:
            TypeError: always.
        """
        raise TypeError(f"{self} is no file of this machine; read it through fsspec.open(str(path))")

    def resolve(self, strict: bool = False) -> Self:
        """Itself: there are no links."""
        return self

    @property
    def scheme(self) -> str:
        """`s3`."""
        return self.parts[0].removesuffix(":")


def located(path: str | os.PathLike[str]) -> Path:
    """A path, or a `RemotePath` where a URL is given; `file://` is the path it names.

    Raises:
        CheckpointError: a URL that is chained, holds a password, or names no place that a store can have; a path with a
            NUL in it.
        UsageError: neither a path nor a text, or an empty one.

    >>> located("file:///tmp/a"), located("memory://a/b")
    (PosixPath('/tmp/a'), RemotePath('memory://a/b'))
    """
    if isinstance(path, RemotePath):
        return path
    if not isinstance(path, str | os.PathLike):
        raise UsageError(f"found {type(path).__name__} {str(path)[:60]}, needed a path or a URL, as a text; give one")
    text = os.fspath(path)
    if not text:
        raise UsageError("found an empty text, needed a path or a URL; give one, `.` for the working directory")
    if "\0" in text:
        raise CheckpointError(f"{text!r}: found a NUL in it, needed a path or a URL, which have none; correct it")
    match = _URL.fullmatch(text)
    if match is None or (isinstance(path, str) and len(match[2]) < 2):  # `Path` leaves one slash of two
        if "://" in text:
            raise CheckpointError(f"{text}: found no URL of one scheme, needed s3://bucket/run or a path; correct it")
        return Path(os.path.expanduser(path))
    scheme, slashes, rest = match[1], match[2], match[3]
    parts = [part for part in rest.split("/") if part]
    if re.match(r"[^/]*:[^/]*@", rest):
        raise CheckpointError(
            f"{scheme}://: found a password before {rest.partition('@')[2].partition('/')[0]!r}, which logs would "
            "show; needed a URL without; give it by the environment or the configuration of fsspec"
        )
    if scheme in _LOCAL_SCHEMES:
        if len(slashes) == 2:
            raise CheckpointError(f"{text}: found a host or a relative path, needed {scheme}:///path; add the slash")
        return Path("/" + rest)
    if not parts or "::" in rest or not all(_PART.fullmatch(part) and part.strip(".") for part in parts):
        raise CheckpointError(
            f"{text}: found a URL without a place, with `..`, `::`, or a character that patterns use; needed "
            f"{scheme}://bucket/names/of/letters/and/digits; choose another place"
        )
    return RemotePath(f"{scheme}://{'/'.join(parts)}")


def standing(path: str | os.PathLike[str]) -> Path:
    """The same, which stays where it is when the working directory changes."""
    found = located(path)
    return found if isinstance(found, RemotePath) else found.absolute()


def files_for(path: Path, known: Files = LOCAL) -> Files:
    """What reads a path: `known` where it can.

    Raises:
        CheckpointError: as `RemoteFiles`.
    """
    if not isinstance(path, RemotePath):
        return known if isinstance(known, LocalFiles) else LOCAL
    return known if isinstance(known, RemoteFiles) and known.holds(path) else RemoteFiles(path)


@dataclass
class _Open:
    """An object that is read or written."""

    size: int
    end: int = -1
    """Of the last read: one that goes on there reads ahead."""
    writer: Any = None
    whole: bool = False
    """Its upload was acknowledged."""


class _Ahead(NamedTuple):
    """Bytes that were read, and where they lie: one buffer for all open objects, so that memory is bounded."""

    descriptor: int
    start: int
    data: bytes


class RemoteFiles:
    """The files below one URL, as `LocalFiles` are those of a path; `descriptor` is a number of its own.

    A missing object is a `FileNotFoundError`. Whatever else goes wrong is no damage of a checkpoint but a matter of
    network, rights or configuration, so every call may raise a `CheckpointError`, which no reader takes for damage.

    Args:
        root: what is read and written lies below it.

    Raises:
        CheckpointError: the library for its scheme is missing, or there is none.

    >>> RemoteFiles(RemotePath("memory://nowhere")).names(RemotePath("memory://nowhere"))
    []
    """

    piece = 4 * 1024 * 1024  # requests take longer than checks

    def __init__(self, root: RemotePath) -> None:
        """Connect to nothing yet."""
        self.root = root
        self._open: dict[int, _Open] = {}
        self._numbers = count()
        self._ahead = _Ahead(-1, 0, b"")
        self._fsspec, self._fs, self._base = _file_system(root)

    def holds(self, path: RemotePath) -> bool:
        """Whether a path lies below the root."""
        return path.parts[: len(self.root.parts)] == self.root.parts

    def call(self, name: str, path: Path, act: Callable[[str], T]) -> T:
        """Every call goes through here: its name, what it is about, and the call itself, given the name in `fsspec`.

        Raises:
            FileNotFoundError: no such object.
            CheckpointError: anything else, in the words of the library.
        """
        key = self._key(path)
        try:
            return act(key)
        except FileNotFoundError as error:
            if "bucket does not exist" not in str(error):
                raise FileNotFoundError(errno.ENOENT, "no such object", str(path)) from None
            failure: Exception = error
        except Exception as error:  # every library has errors of its own; their traces are long and not ours
            failure = error
        what = f"{type(failure).__name__}: {failure}".splitlines()[0][:300]
        scheme = self.root.scheme
        raise CheckpointError(
            f"{path}: {name} failed: found {what}; needed a place that exists, a server that answers and the right to "
            f"list, read, write and remove there; check the URL, the network and the credentials of {scheme}"
            f"{_HINTS.get(scheme, '')}"
        ) from None

    def _key(self, path: Path) -> str:
        """The name that `fsspec` gives it; never one outside the root."""
        inside = path.parts[len(self.root.parts) :]
        if path.parts[: len(self.root.parts)] != self.root.parts or ".." in inside:
            raise CheckpointError(f"{path}: found a path outside {self.root}, needed one below it; do not go on")
        return "/".join([self._base, *inside])

    def make_parents(self, path: Path) -> None:
        """Make a directory and what is above it, where the file system has directories."""
        if self.root.scheme not in _BUCKETS:
            self.call("makedirs", path, lambda key: self._fs.makedirs(key, exist_ok=True))

    make_directory = make_parents

    def create(self, path: Path, size: int = 0) -> int:
        """Begin an upload of `size` bytes; the object is there after `sync`, and not before on an object store."""
        part = max(_PART_BYTES, -(-size // _MOST_PARTS))
        writer = self.call("create", path, lambda key: self._fs.open(key, "wb", block_size=part))
        return self._add(_Open(size, writer=writer))

    def _add(self, opened: _Open) -> int:
        number = next(self._numbers)
        self._open[number] = opened
        return number

    def write(self, descriptor: int, path: Path, data: memoryview) -> None:
        """Write all of it at the end. Memory: about three parts of the upload, of 16 MiB for a file below 140 GiB."""
        writer = self._open[descriptor].writer
        self.call("write", path, lambda _: writer.write(data))

    stream = write
    """Parts are sent as they fill."""

    def sync(self, descriptor: int, path: Path) -> None:
        """End the upload: the object is there, whole, when this returns."""
        opened = self._open[descriptor]
        self.call("end of the upload", path, lambda _: opened.writer.close())
        opened.whole = True

    def close(self, descriptor: int, path: Path) -> None:
        """Forget an object that was created here; an upload that did not end is abandoned."""
        opened = self._open.pop(descriptor)
        if opened.whole:
            return
        discard = getattr(opened.writer, "discard", None)
        if discard is not None:
            self.call("abandon", path, lambda _: discard())
        if isinstance(opened.writer, self._fsspec.spec.AbstractBufferedFile):
            opened.writer.closed = True  # else its finalizer would end the upload
        else:
            self.call("close", path, lambda _: opened.writer.close())

    def open(self, path: Path) -> int:
        """Look at an object that will be read; a directory is an error."""
        info = self.call("open", path, self._fs.info)
        if info["type"] != "file":
            raise OSError(errno.EINVAL, "not a file", str(path))
        return self._add(_Open(int(info["size"] or 0)))

    def size(self, descriptor: int) -> int:
        """Bytes of an open object."""
        return self._open[descriptor].size

    def read(self, descriptor: int, path: Path, start: int, count: int) -> bytes:
        """Bytes from a place, and no others; fewer at the end of the object."""
        return bytes(self._range(descriptor, path, start, count))

    def read_into(self, descriptor: int, path: Path, start: int, target: memoryview) -> int:
        """Fill a buffer with bytes from a place; how many there were: fewer at the end of the object."""
        got = self._range(descriptor, path, start, len(target))
        target[: len(got)] = got
        return len(got)

    def _range(self, descriptor: int, path: Path, start: int, count: int) -> memoryview:
        """One request for a range; where a read begins at the end of the last one, the next three are asked for too."""
        opened = self._open[descriptor]
        stop = min(start + count, opened.size)
        if stop <= start:
            return memoryview(b"")
        held = self._ahead
        if not (held.descriptor == descriptor and held.start <= start and stop <= held.start + len(held.data)):
            end = stop
            if start == opened.end and count >= _AHEAD_FROM:
                end = max(stop, min(start + min(4 * count, _AHEAD), opened.size))
            data = self.call("read", path, lambda key: self._fs.cat_file(key, start=start, end=end))
            if len(data) > end - start:
                raise CheckpointError(
                    f"{path}: found {len(data)} bytes, needed the {end - start} from {start} on that were asked for; "
                    "the server does not serve ranges: choose one that does"
                )
            held = self._ahead = _Ahead(descriptor, start, data)
        opened.end = stop
        return memoryview(held.data)[start - held.start : stop - held.start]

    def release(self, descriptor: int) -> None:
        """Forget an object that was opened for reading."""
        self._open.pop(descriptor, None)
        if self._ahead.descriptor == descriptor:
            self._ahead = _Ahead(-1, 0, b"")

    def forget(self, descriptor: int) -> None:
        """Nothing is cached but what was read ahead."""
        self._ahead = _Ahead(-1, 0, b"")

    def remove(self, path: Path) -> None:
        """Remove an object."""
        self.call("remove", path, self._fs.rm_file)

    def remove_tree(self, path: Path) -> None:
        """Remove all objects below a path."""
        self.call("remove", path, lambda key: self._fs.rm(key, recursive=True))

    def identity(self, path: Path) -> Identity | None:
        """Equal only for an object that nobody wrote to, as its entity tag says; None: it is not there."""
        try:
            tag = self.call("look at", path, self._fs.checksum)
        except FileNotFoundError:
            return None
        return zlib.crc32(str(path).encode()), int(tag), 0, 0

    def kind(self, path: Path) -> Literal["missing", "file", "directory"]:
        """What is there."""
        try:
            info = self.call("look at", path, self._fs.info)
        except FileNotFoundError:
            return "missing"
        return "file" if info["type"] == "file" else "directory"

    def is_directory(self, path: Path) -> bool:
        """There are objects below it."""
        return self.kind(path) == "directory"

    def is_file(self, path: Path) -> bool:
        """An object."""
        return self.kind(path) == "file"

    def listed(self, path: Path) -> dict[str, int | None]:
        """The names below a path, sorted, with their sizes, None for those that have names below them; one request."""
        key = self._key(path)
        try:
            found = self.call("list", path, lambda key: self._fs.ls(key, detail=True))
        except FileNotFoundError:
            return {}
        names = {item["name"].rstrip("/").rpartition("/")[2]: item for item in found if item["name"].rstrip("/") != key}
        return {
            name: int(item["size"] or 0) if item["type"] == "file" else None for name, item in sorted(names.items())
        }

    def names(self, path: Path) -> list[str]:
        """What is below a path, sorted; nothing when it is not there."""
        return list(self.listed(path))

    def write_whole(self, path: Path, data: bytes) -> None:
        """Put a small object in one request: readers see the old one or the new one."""
        self.call("put", path, lambda key: self._fs.pipe_file(key, data))


def _file_system(root: RemotePath) -> tuple[Any, Any, str]:
    """`fsspec`, its file system for a URL, and the name that the root has there."""
    library, fsspec = root.scheme, optional_module("fsspec", extra="remote", need=f"checkpoints at {root}")
    try:
        # listings of its own would show a store as it was; one instance of a process would be shared with others
        fs, base = fsspec.core.url_to_fs(str(root), use_listings_cache=False, skip_instance_cache=True)
    except ImportError as error:
        other = "" if library == "s3" else f", then what {library} needs"
        raise CheckpointError(
            f"{root}: the library for {library} is not installed ({error}); needed for checkpoints at a URL; "
            f"run: {EXTRA}{other}"
        ) from None
    except ValueError as error:
        known = sorted(fsspec.available_protocols())
        raise CheckpointError(
            f"{root}: found the scheme {library!r} ({error}); needed one that fsspec knows; {nearest(library, known)}"
        ) from None
    except Exception as error:  # of the library for this scheme
        raise CheckpointError(
            f"{root}: cannot be opened: found {type(error).__name__}: {error}; needed a configuration that "
            f"{library} takes; check the URL and the environment"
        ) from None
    return fsspec, fs, base.rstrip("/")
