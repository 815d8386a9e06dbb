"""The header of a safetensors file, ours and others': {"<name>": {"dtype", "shape", "data_offsets"}, ...}."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shardwise.checkpoint.format import CODES, DTYPES, DamagedError, Fields

MAX_HEADER = 100 * 1000 * 1000
"""As the safetensors format has it."""


class Entry(NamedTuple):
    """A part of a tensor in a file: its key in the header, its type and sizes, and its bytes in the data."""

    key: str
    dtype: str
    sizes: tuple[int, ...]
    start: int
    stop: int


def encode_header(metadata: Mapping[str, str], entries: Sequence[Entry], aligned: int = 8) -> bytes:
    """Length and header of a safetensors file; the data after it starts at a multiple of `aligned` bytes."""
    table: dict[str, Any] = {"__metadata__": metadata}
    for key, dtype, sizes, start, stop in entries:
        table[key] = {"dtype": DTYPES[dtype].code, "shape": list(sizes), "data_offsets": [start, stop]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % aligned)
    return len(text).to_bytes(8, "little") + text


def entry_of(key: str, item: object, where: str) -> Entry:
    """A tensor of a safetensors header, checked by itself.

    Raises:
        DamagedError: another field, a type that is not known, sizes that do not agree.
    """
    if not key.isprintable():
        raise DamagedError(
            f"{where}: found a part named {ascii(key[:80])}, needed printable text; choose another checkpoint"
        )
    fields = Fields(item, f"{where}: {key[:80]}")
    fields.only(("dtype", "shape", "data_offsets"))
    code, shape, offsets = fields.text("dtype", most=16), fields.counts("shape"), fields.counts("data_offsets")
    if code not in CODES:
        raise fields.wrong("dtype", code, f"one of {', '.join(CODES)}")
    size = DTYPES[CODES[code]].size
    for n in shape:
        size *= n
    if len(offsets) != 2 or offsets[1] - offsets[0] != size:
        raise fields.wrong("data_offsets", offsets, f"a start and a stop, {size} bytes apart as dtype and shape say")
    return Entry(key, CODES[code], shape, offsets[0], offsets[1])


def without_holes(entries: Sequence[Entry], num_bytes: int, where: str) -> list[Entry]:
    """The entries in the order of their bytes, which are all of the data's, each once.

    Raises:
        DamagedError: a hole, an overlap, or another end.
    """
    ordered, at = sorted(entries, key=lambda entry: (entry.start, entry.stop)), 0
    for entry in ordered:
        if entry.start != at:
            raise DamagedError(
                f"{where}: {entry.key[:80]} starts at byte {entry.start} of the data, needed {at}: no holes; copy the "
                "file again"
            )
        at = entry.stop
    if at != num_bytes:
        raise DamagedError(f"{where}: its parts end at byte {at} of {num_bytes}, needed all; copy the file again")
    return ordered
