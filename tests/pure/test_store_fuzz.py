"""Valid checkpoints with bytes changed at random, millions of them in soak: a `CheckpointError` or what was stored.

Every second case is signed and sealed again, so that what is read goes as deep as the change lets it. A failure says
its seed and number; `SHARDWISE_FUZZ=seed:number` runs that case alone.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np

from shardwise.checkpoint.files import LocalFiles
from shardwise.checkpoint.format import whole
from shardwise.checkpoint.reading import Reader
from shardwise.errors import CheckpointError
from tests.checkpoints import SPLITS, write_checkpoint
from tests.damages import FILES
from tests.little_memory import in_little_memory

T = TypeVar("T")
SOAK = bool(os.environ.get("SHARDWISE_SOAK"))
COUNT, SEED = (2_000_000 if SOAK else 8_000), 5
ROOM = 96 * 2**20
"""Address space that all cases together may add; the files are of a few KiB."""
PATH = Path("/in-memory/step-00000007")
WORDS = (
    b"-", b"9" * 30, b"9" * 400, b"null", b"{}", b"[]", b"[" * 1200, b'"', b"1e999", b"NaN", b"Infinity", b",", b"0.5",
    b"true", b"\\ud800", b"\\u0000", b"\x1b[2J", b"\xff", b"/../", b"4294967296", b"9223372036854775808", b"-1",
    b'"__metadata__":{}', b'"shape":[0,72057594037927936,72057594037927936],',
)  # fmt: skip
Contents = dict[str, bytes]


class InMemory(LocalFiles):
    """A directory that is a dict."""

    def __init__(self) -> None:
        self.held: Contents = {}

    def call(self, name: str, path: Path, act: Callable[[], T]) -> T:
        raise AssertionError(f"{name} of {path}: the reader left the directory")

    def open(self, path: Path) -> int:
        if path.parent != PATH or path.name not in self.held:
            raise FileNotFoundError(2, os.strerror(2), str(path))
        return -2 - list(self.held).index(path.name)

    def _data(self, descriptor: int) -> bytes:
        return list(self.held.values())[-2 - descriptor]

    def size(self, descriptor: int) -> int:
        return len(self._data(descriptor))

    def read(self, descriptor: int, path: Path, start: int, count: int) -> bytes:
        return self.held[path.name][start : start + count]

    def read_into(self, descriptor: int, path: Path, start: int, target: memoryview) -> int:
        got = self.read(descriptor, path, start, len(target))
        target[: len(got)] = got
        return len(got)

    def names(self, path: Path) -> list[str]:
        return list(self.held)

    def forget(self, descriptor: int) -> None: ...

    def release(self, descriptor: int) -> None: ...


def mutated(data: bytes, draw: random.Random) -> bytes:
    """A few changes of bytes, words, digits and their order."""
    found = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        at = draw.randrange(len(found) or 1)
        match draw.randrange(8):
            case 0:
                found[at : at + 1] = bytes([draw.randrange(256)])
            case 1:
                del found[at : at + draw.randrange(1, 20)]
            case 2:
                other = draw.randrange(len(found) or 1)
                found[at:at] = found[other : other + draw.randrange(1, 40)]
            case 3 | 4:
                found[at:at] = draw.choice(WORDS)
            case 5:
                found[at : at + draw.randrange(1, 12)] = draw.choice(WORDS)
            case _:
                digits = [i for i, byte in enumerate(found) if 48 <= byte < 58]
                if digits:
                    found[draw.choice(digits)] = draw.randrange(48, 58)
    return bytes(found)


def signed(body: bytes) -> bytes:
    return body + b',"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


def case(valid: Contents, draw: random.Random) -> tuple[Contents, bool]:
    """One changed checkpoint, and whether its digests were made to agree."""
    held, name, agrees = dict(valid), draw.choice(FILES), draw.random() < 0.5
    if name == "manifest.json":
        held[name] = signed(mutated(valid[name][:-78], draw)) if agrees else mutated(valid[name], draw)
        return held, agrees
    data = valid[name]
    size = int.from_bytes(data[:8], "little")
    head, rest = data[8 : 8 + size], data[8 + size :]
    if not agrees:
        held[name] = mutated(data[:8], draw)[:8] + head + rest if draw.random() < 0.1 else mutated(data, draw)
        return held, False
    head = mutated(head, draw)
    held[name] = len(head).to_bytes(8, "little") + head + rest
    seal = hashlib.sha256(held[name][: 8 + len(head)] + rest[-16:]).hexdigest().encode()
    body = valid["manifest.json"][:-78]
    for old, new in zip(listed(valid, name), (str(len(held[name])).encode(), seal), strict=True):
        body = body.replace(old, new)
    held["manifest.json"] = signed(body)
    return held, True


def listed(valid: Contents, name: str) -> Iterator[bytes]:
    """Size and seal of a file, as the manifest spells them."""
    _, after = valid["manifest.json"].split(name.encode() + b'","size_bytes":')
    yield after.split(b",")[0]
    yield after.split(b'"seal":"')[1][:64]


def outcome(files: InMemory) -> str:
    """Read everything: `refused`, or `read`, when all of it was."""
    try:
        with Reader(PATH, files=files) as reader:
            reader.verify()
            for name, entry in reader.manifest.tensors.items():
                if whole(entry.shape).num_elements < 2**16:
                    size = {"float64": 8, "int64": 8, "bfloat16": 2}.get(entry.dtype, 4)
                    reader.read(name, whole(entry.shape), np.zeros(entry.shape, dtype=f"u{size}"))
    except CheckpointError as error:
        assert str(PATH) in str(error) and len(str(error)) < 4000 and str(error).isprintable(), error
        return "refused"
    return "read"


def test_any_change_of_bytes_ends_in_an_error_or_in_what_was_stored(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, *SPLITS)
    valid = {name: (checkpoint / name).read_bytes() for name in FILES}
    seed, _, number = (os.environ.get("SHARDWISE_FUZZ") or f"{SEED}:").partition(":")
    numbers = [int(number)] if number else range(COUNT)
    files = InMemory()

    def work() -> None:
        seen: Counter[str] = Counter()
        for i in numbers:
            files.held, agrees = case(valid, random.Random(f"{seed}:{i}"))
            try:
                found = outcome(files)
                assert found == "refused" or agrees or files.held == valid, "a change went unnoticed"
            except BaseException as error:
                raise AssertionError(f"SHARDWISE_FUZZ={seed}:{i}: {type(error).__name__}: {error}") from error
            seen[found] += 1
        assert number or 0 < seen["read"] < 0.5 * len(numbers) < seen["refused"], seen

    in_little_memory(work, ROOM)
