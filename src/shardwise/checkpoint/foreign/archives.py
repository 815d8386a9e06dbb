"""What torch.save writes, opened without torch: the pickle inside, and where the bytes of each storage lie in the file.

A zip whose records are stored as they are (torch >= 1.6), or pickles one after the other with the bytes behind them.
Nothing is unpacked and no name of a record is ever a path. Only the standard library, as `machine.py`.
"""

from __future__ import annotations

import io
import os
import zipfile
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple, cast

from shardwise.checkpoint.foreign.allowed import CALLS, item_size, storage_of
from shardwise.checkpoint.foreign.machine import RefusedError, Storage, run

MAX_PICKLE = 512 * 1024 * 1024
MAX_RECORDS = 2_000_000
_MAGIC = 0x1950A86A20F9469CFC6C
_LOCAL = 30
"""Bytes of a zip's local header before the name."""
_DAMAGE = (zipfile.BadZipFile, OSError, ValueError, EOFError, NotImplementedError)
"""What `zipfile` raises on a changed file: it seeks to, decodes and looks up what is written there, unchecked."""
_SCRIPT = ("constants.pkl", "code/")


class Place(NamedTuple):
    """Where a storage's bytes lie in a file, and their CRC-32 where the file has one."""

    start: int
    num_bytes: int
    crc: int | None


@dataclass
class Opened:
    """The value of a file, and the place of every storage that it mentions."""

    value: Any
    places: dict[int, Place] = field(default_factory=dict)
    """By `id` of the Storage, which `value` keeps alive."""


class Window(io.RawIOBase):
    """A part of an open file as a file of its own; the descriptor's position is never used."""

    def __init__(self, descriptor: int, start: int, count: int) -> None:
        """Bytes `start` to `start + count`, at most to the file's end."""
        self.descriptor, self.start = descriptor, start
        self.count = max(0, min(count, os.fstat(descriptor).st_size - start))
        self._at = 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move."""
        self._at = max(0, offset + (0, self._at, self.count)[whence])
        return self._at

    def tell(self) -> int:
        """Where the next read starts."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read some."""
        wanted = min(len(buffer), max(0, self.count - self._at))
        data = os.pread(self.descriptor, wanted, self.start + self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def open_torch(descriptor: int, start: int, count: int) -> Opened:
    """The value of a file of torch.save, or of a part of a file.

    Raises:
        RefusedError: it is none, is torn, is packed, or holds what is not allowed.
    """
    window = Window(descriptor, start, count)
    stream = cast(BinaryIO, io.BufferedReader(window, 1 << 16))
    head = stream.read(4)
    stream.seek(0)
    if head[:2] == b"PK":
        return _Zip(stream, window).opened()
    if head[:1] == b"\x80":
        return _legacy(stream, window)
    needed = "what torch.save writes: a zip, or a pickle"
    if not head:
        raise RefusedError("an empty file", needed, "copy it again")
    raise RefusedError(f"a file that begins with {head!r}", needed, "give --from its real kind")


def open_pickle(descriptor: int, start: int, count: int) -> Opened:
    """The value of a bare pickle without storages.

    Raises:
        RefusedError: as `run`.
    """
    window = Window(descriptor, start, count)
    _check_size(window.count)
    return Opened(run(io.BytesIO(window.read(window.count)), CALLS, _no_storage))


def _no_storage(_: Any) -> Any:
    raise RefusedError("a storage in a pickle that has none", "metadata only", "copy the file again")


def _check_size(num_bytes: int) -> None:
    if num_bytes > MAX_PICKLE:
        raise RefusedError(
            f"a pickle of {num_bytes} bytes", f"at most {MAX_PICKLE}", "save tensors, not Python objects"
        )


class _Zip:
    """A zip of torch.save, its directory checked."""

    def __init__(self, stream: BinaryIO, window: Window) -> None:
        self.window = window
        self.stream = stream
        try:
            self.zip = zipfile.ZipFile(stream)
        except _DAMAGE as error:
            raise RefusedError(
                f"a zip without a readable directory ({error}): truncated or changed", "a whole file", "copy it again"
            ) from None
        self.infos = {info.filename: info for info in self.zip.infolist()}
        self._check()
        self.root = next(iter(self.infos)).partition("/")[0]

    def _check(self) -> None:
        infos = self.zip.infolist()
        if not infos or len(infos) > MAX_RECORDS or len(self.infos) != len(infos):
            raise _bad_zip(f"{len(infos)} records, {len(infos) - len(self.infos)} of them under a name twice")
        roots = {name.partition("/")[0] for name in self.infos}
        for name in self.infos:
            parts = name.split("/")
            if len(parts) < 2 or "" in parts[:-1] or ".." in parts or "\\" in name or ":" in name or "\0" in name:
                raise _bad_zip(f"a record with the name {name[:80]!r}")
        if len(roots) != 1:
            raise _bad_zip(f"records under {len(roots)} names, {sorted(roots)[:3]}")
        # its records are packed, so it is told before they are looked at
        if any(name.partition("/")[2].startswith(_SCRIPT) for name in self.infos):
            raise RefusedError(
                "an archive of TorchScript, which is a program",
                "a state_dict",
                "torch.jit.load it where it is trusted, and save its state_dict()",
            )
        records: list[Any] = infos
        has_crc = any(info.CRC for info in infos)  # torch.serialization.set_crc32_options(False) writes 0 for all
        for info in records:
            self._check_record(info)
            info.CRC = info.CRC if has_crc else None
        ends = 0
        for info in sorted(infos, key=lambda i: i.header_offset):
            if info.header_offset < ends:
                raise _bad_zip(f"the record {info.filename[:80]!r}, which lies over the one before it")
            ends = info.header_offset + _LOCAL + info.file_size

    def _check_record(self, info: zipfile.ZipInfo) -> None:
        name = info.filename[:80]
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise _bad_zip(f"the packed record {name!r}, of {info.file_size} bytes from {info.compress_size}")
        if info.flag_bits & 1:
            raise _bad_zip(f"the encrypted record {name!r}")
        if (info.external_attr >> 16) & 0o170000 == 0o120000:
            raise _bad_zip(f"the record {name!r}, which is a link")
        if info.header_offset + _LOCAL + info.file_size > self.window.count:
            raise _bad_zip(f"the record {name!r} of {info.file_size} bytes in a file of {self.window.count}")

    def opened(self) -> Opened:
        pickled = self._bytes("data.pkl")
        order = self.infos.get(f"{self.root}/byteorder")
        if order is not None and self._bytes("byteorder") != b"little":
            raise RefusedError("a file of a big-endian machine", "little-endian", "save it again on another machine")
        storages: dict[str, Storage] = {}
        found = Opened(None)

        def load(persistent: Any) -> Storage:
            claimed = storage_of(persistent)
            known = storages.setdefault(claimed.key, claimed)
            if (known.dtype, known.numel) != (claimed.dtype, claimed.numel):
                raise _bad_zip(f"the storage {claimed.key!r}, claimed with two sizes")
            if id(known) not in found.places:
                found.places[id(known)] = self._place(known)
            return known

        found.value = run(io.BytesIO(pickled), CALLS, load)
        return found

    def _bytes(self, name: str) -> bytes:
        info = self.infos.get(f"{self.root}/{name}")
        if info is None:
            raise _bad_zip(f"no record {name!r}")
        _check_size(info.file_size)
        try:
            return self.zip.read(info)
        except _DAMAGE as error:
            raise RefusedError(
                f"the record {name!r}, which is not whole ({error})", "a whole file", "copy it again"
            ) from None

    def _place(self, storage: Storage) -> Place:
        info = self.infos.get(f"{self.root}/data/{storage.key}")
        needed = storage.numel * item_size(storage.dtype)
        if info is None or info.file_size != needed:
            there = "no record" if info is None else f"a record of {info.file_size} bytes"
            raise _bad_zip(f"{there} for the storage {storage.key!r} of {needed} bytes")
        self.stream.seek(info.header_offset)
        header = self.stream.read(_LOCAL)
        if len(header) < _LOCAL or header[:4] != b"PK\3\4":
            raise _bad_zip(f"no header before the storage {storage.key!r}")
        lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        start = info.header_offset + _LOCAL + lengths
        if start + needed > self.window.count:
            raise _bad_zip(f"the storage {storage.key!r}, which ends behind the file")
        return Place(self.window.start + start, needed, info.CRC)


def _bad_zip(what: str) -> RefusedError:
    return RefusedError(f"a zip with {what}", "one as torch.save writes it", "copy the file again, or save it again")


def _legacy(stream: BinaryIO, window: Window) -> Opened:
    """Magic, version, sizes of C types, the value, the storages' keys; then each storage: its length and its bytes."""
    if run(stream, CALLS, _no_storage) != _MAGIC:
        raise RefusedError(
            "a bare pickle, which is not what torch.save writes", "a file of torch.save", "give --from its real kind"
        )
    run(stream, CALLS, _no_storage)
    system = run(stream, CALLS, _no_storage)
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise RefusedError("a file of a big-endian machine", "little-endian", "save it again on another machine")
    storages: dict[str, Storage] = {}

    def load(persistent: Any) -> Storage:
        claimed = storage_of(persistent)
        return storages.setdefault(claimed.key, claimed)

    found = Opened(run(stream, CALLS, load))
    keys = run(stream, CALLS, _no_storage)
    if not isinstance(keys, list) or sorted(map(str, keys)) != sorted(storages):
        raise RefusedError("a list of storages that is not that of its value", "a whole file", "copy it again")
    at = stream.tell()
    for key in keys:
        storage = storages[str(key)]
        stream.seek(at)
        count, needed = stream.read(8), storage.numel * item_size(storage.dtype)
        if int.from_bytes(count, "little") != storage.numel or at + 8 + needed > window.count:
            raise RefusedError(
                f"the storage {str(key)[:40]!r} of {needed} bytes at offset {at}, which is not there: truncated",
                "a whole file",
                "copy it again",
            )
        found.places[id(storage)] = Place(window.start + at + 8, needed, None)
        at += 8 + needed
    return found
