"""What disks, copies and people do to the files of a checkpoint, drawn from a seed: `damage` does one of it.

Every kind is a function of the checkpoint's directory that changes at least one byte or name, and returns the names
that an error may give to what is wrong.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

DATA = ("rank-00000.safetensors", "rank-00001.safetensors")
FILES = ("manifest.json", *DATA)


class Damage(NamedTuple):
    """What was done."""

    kind: str
    files: tuple[str, ...]
    """One of them must be named."""
    tensor: str = ""
    """The part of a tensor in which the first changed byte lies, when it lies in one."""
    offset: int = -1
    """Of that byte in the file."""


Act = Callable[["Case"], tuple[str, ...]]


class Case(NamedTuple):
    """A checkpoint that may be damaged, one that is of another save, and the source of randomness."""

    path: Path
    other: Path
    draw: random.Random

    def edit(self, name: str, change: Callable[[bytearray], None]) -> tuple[str, ...]:
        """Change the bytes of a file, really."""
        before = (self.path / name).read_bytes()
        data = bytearray(before)
        change(data)
        if data == before:
            data[0] ^= 1
        (self.path / name).write_bytes(data)
        return (name,)

    def any(self) -> str:
        return self.draw.choice(FILES)


def torn(case: Case) -> tuple[str, ...]:
    """The length arrived, the end of the content did not."""

    def change(data: bytearray) -> None:
        at = case.draw.randrange(len(data))
        data[at:] = bytes(len(data) - at)

    return case.edit(case.any(), change)


def truncated(case: Case) -> tuple[str, ...]:
    return case.edit(case.any(), lambda data: data.__delitem__(slice(case.draw.randrange(len(data)), None)))


def grown(case: Case) -> tuple[str, ...]:
    return case.edit(case.any(), lambda data: data.extend(case.draw.randbytes(case.draw.choice((1, 8, 4096)))))


def flipped(case: Case) -> tuple[str, ...]:
    def change(data: bytearray) -> None:
        for _ in range(case.draw.choice((1, 1, 1, 2, 64))):
            data[case.draw.randrange(len(data))] ^= 1 << case.draw.randrange(8)

    return case.edit(case.any(), change)


def zeroed(case: Case) -> tuple[str, ...]:
    def change(data: bytearray) -> None:
        size = case.draw.choice((16, 512, 4096))
        at = case.draw.randrange(len(data)) // size * size
        data[at : at + size] = bytes(len(data[at : at + size]))

    return case.edit(case.any(), change)


def blocks_swapped(case: Case) -> tuple[str, ...]:
    def change(data: bytearray) -> None:
        size = min(case.draw.choice((8, 512, 4096)), len(data) // 3)
        a, b = (case.draw.randrange(len(data) // size) * size for _ in range(2))
        if abs(a - b) >= size and max(a, b) + size <= len(data):
            data[a : a + size], data[b : b + size] = data[b : b + size], data[a : a + size]

    return case.edit(case.any(), change)


def block_of_another_file(case: Case) -> tuple[str, ...]:
    """A block that the disk wrote to the wrong place."""
    source = (case.draw.choice((case.path, case.other)) / case.any()).read_bytes()

    def change(data: bytearray) -> None:
        at = case.draw.randrange(max(1, min(len(data), len(source)) - 64))
        data[at : at + 64] = source[at : at + 64][: len(data) - at]

    return case.edit(case.any(), change)


def files_swapped(case: Case) -> tuple[str, ...]:
    a, b = (case.path / name for name in DATA)
    kept = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(kept)
    return DATA


def missing(case: Case) -> tuple[str, ...]:
    name = case.any()
    (case.path / name).unlink()
    return (name,)


def emptied(case: Case) -> tuple[str, ...]:
    name = case.any()
    (case.path / name).write_bytes(b"")
    return (name,)


def extra(case: Case) -> tuple[str, ...]:
    odd = ("rank-00002.safetensors", ".metadata", "x.pkl", "manifest.json.bak", "manifest.json~", ".nfs0001", "core")
    name = case.draw.choice(odd)
    (case.path / name).write_bytes(case.draw.randbytes(case.draw.choice((0, 9))))
    return (name,)


def renamed(case: Case) -> tuple[str, ...]:
    name = case.any()
    target = case.draw.choice((name + ".bak", name.upper(), "rank-00002.safetensors", "rank-0001.safetensors"))
    (case.path / name).rename(case.path / target)
    return (name, target)


def linked(case: Case) -> tuple[str, ...]:
    """A file that is elsewhere now: its owner may change it at any time."""
    name = case.any()
    (case.path / name).unlink()
    (case.path / name).symlink_to(case.other / name)
    return (name,)


def of_another_save(case: Case) -> tuple[str, ...]:
    """A file of another save of the same run: the old half beside the new one."""
    name = case.any()
    shutil.copy(case.other / name, case.path / name)
    return DATA if name == "manifest.json" else (name,)  # a whole manifest: it is the data that does not fit


def header_edited(case: Case) -> tuple[str, ...]:
    """A header that says something else and is well-formed, as long as it was."""
    name = case.draw.choice(DATA)

    def change(data: bytearray) -> None:
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        keys = [key for key in header if key != "__metadata__"]
        key, other = case.draw.choice(keys), case.draw.choice(keys)
        match case.draw.randrange(6):
            case 0:
                header[key]["data_offsets"] = header[other]["data_offsets"]
            case 1:
                header[key], header[other] = header[other], header[key]
            case 2:
                header[key]["dtype"] = case.draw.choice(("I32", "F16", "U8", "BF16"))
            case 3:
                header[key]["shape"] = header[key]["shape"][::-1] or [1]
            case 4:
                header["__metadata__"][case.draw.choice(("run", "save", "step", "rank"))] = "1" * 32
            case _:
                header[key + "x"] = header.pop(key)
        text = json.dumps(header, separators=(",", ":")).encode()
        data[: 8 + size] = len(text).to_bytes(8, "little") + text

    return case.edit(name, change)


def manifest_edited(case: Case) -> tuple[str, ...]:
    """Somebody corrected a number."""

    def change(data: bytearray) -> None:
        found: dict[str, Any] = json.loads(data)
        name = case.draw.choice(list(found["tensors"]))
        match case.draw.randrange(6):
            case 0:
                found["step"] += 1
            case 1:
                found["schema"] = case.draw.choice((1, 3))
            case 2:
                found["tensors"][name]["checksum"] = "0" * 16
            case 3:
                found["tensors"].pop(name)
            case 4:
                found["scalars"]["step"] = 10**6
            case _:
                found["files"].reverse()
        data[:] = json.dumps(found).encode()

    return case.edit("manifest.json", change)


KINDS: tuple[Act, ...] = (
    torn, truncated, grown, flipped, flipped, flipped, zeroed, blocks_swapped, block_of_another_file, files_swapped,
    missing, emptied, extra, renamed, linked, of_another_save, header_edited, manifest_edited,
)  # fmt: skip


def damage(case: Case, kept: dict[str, bytes]) -> Damage:
    """Do one kind of damage to a checkpoint whose files had this content."""
    act = case.draw.choice(KINDS)
    files = act(case)
    tensor, offset = "", -1
    if act.__name__ not in ("files_swapped", "of_another_save", "header_edited", "linked") and files[0] in DATA[:2]:
        tensor, offset = _where(case.path / files[0], kept[files[0]])
    return Damage(act.__name__, files, tensor, offset)


def _where(path: Path, before: bytes) -> tuple[str, int]:
    """The part that holds the first changed byte, if sizes, header and table of digests are as they were."""
    after = path.read_bytes() if path.is_file() else b""
    size = int.from_bytes(before[:8], "little")
    header = json.loads(before[8 : 8 + size])
    table = header["shardwise.digests"]["data_offsets"][0] + 8 + size
    if len(after) != len(before) or after[: 8 + size] != before[: 8 + size] or after[table:] != before[table:]:
        return "", -1
    at = int(np.flatnonzero(np.frombuffer(after, np.uint8) != np.frombuffer(before, np.uint8))[0])
    for key, entry in header.items():
        if key != "__metadata__" and entry["data_offsets"][0] <= at - 8 - size < entry["data_offsets"][1]:
            return key, at
    return "", -1


def restore(path: Path, kept: dict[str, bytes]) -> None:
    """The checkpoint as it was."""
    for name in os.listdir(path):
        if name not in kept or (path / name).is_symlink():
            (path / name).unlink()
    for name, data in kept.items():
        if not (path / name).exists() or (path / name).read_bytes() != data:
            (path / name).write_bytes(data)
