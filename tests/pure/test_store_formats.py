"""Files of every format that was ever written: kept as test data, read bit by bit, their damages found and named."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import xxhash

from shardwise.checkpoint.compare import verify
from shardwise.checkpoint.digests import BLOCK, DIGEST, DIGESTS, FORMAT
from shardwise.checkpoint.files import ALIGNED
from shardwise.checkpoint.format import Box, DamagedError, whole
from shardwise.checkpoint.reading import Reader
from shardwise.errors import CheckpointError
from tests.checkpoints import write_checkpoint

KEPT = Path(__file__).parents[1] / "data" / "checkpoints"
TENSORS = {
    "model.w": np.arange(70_000, dtype=np.uint32).reshape(70, 1000),
    "model.b": np.arange(4, dtype=np.uint16),
}
"""What each kept checkpoint holds: more than a block in the file of rank 0, less than one in that of rank 1."""


def keep() -> None:
    """Make one, for a new format."""
    path = KEPT / FORMAT.replace("shardwise ", "format-")
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    make(path)


def make(path: Path) -> None:
    parts = {"model.w": [(0, Box((0, 0), (67, 1000))), (1, Box((67, 0), (3, 1000)))], "model.b": [(0, Box((0,), (4,)))]}
    write_checkpoint(path, TENSORS, parts, {"model.w": "float32", "model.b": "bfloat16"})


@pytest.fixture(params=sorted(DIGESTS), ids=lambda name: name.replace(" ", "-"))
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """A format, and a copy of the checkpoint that was written in it."""
    source = KEPT / request.param.replace("shardwise ", "format-") / "step-00000007"
    return request.param, Path(shutil.copytree(source, tmp_path / source.name))


def edited(path: Path, at: int, change: bytes) -> None:
    data = bytearray(path.read_bytes())
    assert data[at : at + len(change)] != change
    data[at : at + len(change)] = change
    path.write_bytes(data)


def read(path: Path) -> None:
    """All tensors, whole and by a box that begins inside a block."""
    with Reader(path) as reader:
        for name, expected in TENSORS.items():
            box = whole(expected.shape)
            for wanted in (box, Box((1, *box.offsets[1:]), (2, *box.sizes[1:]))):
                target = np.zeros(wanted.sizes, dtype=expected.dtype)
                reader.read(name, wanted, target)
                assert (target == expected[wanted.slices(box)]).all()


def test_every_format_is_read(kept: tuple[str, Path]) -> None:
    name, path = kept
    for file in path.glob("*.safetensors"):
        assert f'"format":"{name}"'.encode() in file.read_bytes()
    verify(path)
    read(path)


def test_new_files_are_written_as_the_kept_ones(tmp_path: Path) -> None:
    make(tmp_path)
    for file in (KEPT / FORMAT.replace("shardwise ", "format-")).rglob("*.safetensors"):
        new, old = ((at / file.name).read_bytes() for at in (tmp_path / "step-00000007", file.parent))
        starts = [8 + int.from_bytes(data[:8], "little") for data in (new, old)]
        assert new[starts[0] :] == old[starts[1] :] and starts[0] % ALIGNED == 0
        assert new[8 : starts[0]].rstrip() == old[8 : starts[1]].rstrip()  # which end with spaces


def test_every_block_is_checked(kept: tuple[str, Path]) -> None:
    name, path = kept
    file = path / "rank-00000.safetensors"
    whole_file = file.read_bytes()
    start = 8 + int.from_bytes(whole_file[:8], "little")
    table = len(whole_file) - 2 * DIGESTS[name].size
    for at in (0, BLOCK - 1, BLOCK, BLOCK + 1, table - start - 1):
        edited(file, start + at, bytes([whole_file[start + at] ^ 1]))
        begin = at // BLOCK * BLOCK
        named = (
            rf"rank-00000\.safetensors: offset {start + begin} to {start + min(begin + BLOCK, table - start)}, tensor"
        )
        for work in (verify, read):
            with pytest.raises(CheckpointError, match=named):
                work(path)
        file.write_bytes(whole_file)
    verify(path)
    for at in (table, len(whole_file) - 1):  # the table itself
        edited(file, at, bytes([whole_file[at] ^ 128]))
        with pytest.raises(DamagedError, match="header or table of digests changed"):
            read(path)
        file.write_bytes(whole_file)


def test_a_file_does_not_pass_for_one_of_another_format(kept: tuple[str, Path]) -> None:
    """With a seal that agrees, as only a person writes it."""
    name, path = kept
    file = path / "rank-00000.safetensors"
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    for other in ({*DIGESTS} - {name}) | {"shardwise 1", "shardwise 4", "shardwise 33"}:
        header = json.loads(data[8:start])
        header["__metadata__"]["format"] = other
        text = json.dumps(header, separators=(",", ":")).encode()
        head = len(text).to_bytes(8, "little") + text
        file.write_bytes(head + data[start:])
        manifest = json.loads((path / "manifest.json").read_bytes())
        del manifest["sha256"]
        manifest["files"][0]["size_bytes"] = file.stat().st_size
        manifest["files"][0]["seal"] = hashlib.sha256(head + data[-2 * DIGESTS[name].size :]).hexdigest()
        body = json.dumps(manifest, separators=(",", ":")).encode()[:-1]
        (path / "manifest.json").write_bytes(
            body + b',"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'
        )
        needed = r"has shape \(2, " if other in DIGESTS else "format: found .* needed 'shardwise 2' or 'shardwise 3'"
        with pytest.raises(DamagedError, match=needed):
            read(path)


def test_digests_never_change() -> None:
    """These numbers stand in files; the first is that of the XXH3 reference for no bytes."""
    block = memoryview(bytes(range(256)) * 1024)
    assert DIGESTS["shardwise 3"].of(b"").digest().hex() == "99aa06d3014798d86001c324468d497f"
    assert DIGESTS["shardwise 3"].of(block).digest() == xxhash.xxh3_128_digest(block)
    assert DIGESTS["shardwise 3"].of(block).digest().hex() == "63637e9b9c5891c0f34cc5c9153c3287"
    assert DIGESTS["shardwise 2"].of(block).digest() == hashlib.sha256(block).digest()
    for digest in DIGESTS.values():
        assert len(digest.of(b"").digest()) == digest.size
    assert DIGEST is DIGESTS[FORMAT]
