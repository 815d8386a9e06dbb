"""Files that torch.load reads, also with `weights_only` and `mmap`, written without torch and a tensor at a time.

The pickle in such a file is a few kinds of opcodes (protocol 2): here they are written down as bytes.
"""

from __future__ import annotations

import os
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from shardwise.checkpoint.foreign.allowed import STORAGES, UNTYPED
from shardwise.checkpoint.foreign.views import Source, num_bytes, slabs
from shardwise.checkpoint.format import row_major, whole

ALIGNMENT = 64
_ROOT = "archive"
_TYPES = {dtype: name for name, dtype in STORAGES.items()}
_LOCAL = 30
Storages = dict[int, tuple[int, Source]]
"""By the `id` of a source: its number, and itself."""


def write_torch(path: Path, tree: Mapping[str, Any]) -> None:
    """A new file with a tree of dicts, lists, texts, numbers, and sources as its tensors; flushed to the disk.

    Cost: reads each source once; memory of a few MiB and the pickle.

    Raises:
        OSError: as the disk said.
    """
    sources: Storages = {}
    pickled = b"\x80\x02" + _encoded(tree, sources) + b"."
    with path.open("xb") as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            for name, data in (
                ("data.pkl", pickled),
                (".format_version", b"1"),
                (".storage_alignment", str(ALIGNMENT).encode()),
                ("byteorder", b"little"),
            ):
                archive.writestr(f"{_ROOT}/{name}", data)
            for index, source in sources.values():
                _write_storage(archive, file, index, source)
            archive.writestr(f"{_ROOT}/version", b"3\n")
        file.flush()
        os.fsync(file.fileno())


def _write_storage(archive: zipfile.ZipFile, file: BinaryIO, index: int, source: Source) -> None:
    """A record whose bytes start at a multiple of 64, so that they can be mapped."""
    info = zipfile.ZipInfo(f"{_ROOT}/data/{index}")
    info.file_size = num_bytes(source)
    large = info.file_size * 1.05 > zipfile.ZIP64_LIMIT  # as zipfile decides: 20 more bytes then stand before ours
    before = file.tell() + _LOCAL + len(info.filename) + (20 if large else 0) + 4
    padding = -before % ALIGNMENT
    info.extra = b"FB" + struct.pack("<H", padding) + bytes(padding)
    with archive.open(info, "w", force_zip64=large) as record:
        for _, data in slabs(source):
            record.write(data.data)


def _encoded(value: Any, sources: Storages) -> bytes:
    if isinstance(value, Mapping):
        items = b"".join(_encoded(k, sources) + _encoded(v, sources) for k, v in value.items())
        return _global("collections", "OrderedDict") + b")R(" + items + b"u"
    if isinstance(value, list | tuple):
        items = b"".join(_encoded(item, sources) for item in value)
        return b"](" + items + b"e" if isinstance(value, list) else b"(" + items + b"t"
    if isinstance(value, str):
        data = value.encode()
        return b"X" + struct.pack("<I", len(data)) + data
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if isinstance(value, int):
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        return b"\x8a" + bytes([len(data)]) + data
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    return b"N" if value is None else _tensor(value, sources)


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _tensor(source: Source, sources: Storages) -> bytes:
    """A call of torch's own rebuilding function; v3 for types that have no storage class."""
    typed = source.dtype in _TYPES
    kind = _global("torch", _TYPES[source.dtype]) if typed else _global("torch.storage", _TYPES[UNTYPED])
    count = whole(source.shape).num_elements if typed else num_bytes(source)

    def plain(value: Any) -> bytes:
        return _encoded(value, sources)

    index, _ = sources.setdefault(id(source), (len(sources), source))  # a tied weight has one storage
    storage = b"(" + plain("storage") + kind + plain(str(index)) + plain("cpu") + plain(count) + b"tQ"
    rest = plain(0) + plain(tuple(source.shape)) + plain(row_major(source.shape)) + b"\x89" + plain({})
    last = b"" if typed else _global("torch", source.dtype)
    function = _global("torch._utils", "_rebuild_tensor_v2" if typed else "_rebuild_tensor_v3")
    return function + b"(" + storage + rest + last + b"tR"
