"""Checksums, shard files and manifests: what is written is read back, and nothing else is."""

from __future__ import annotations

import errno
import gc
import hashlib
import itertools
import json
import math
import mmap
import os
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from shardwise.checkpoint.checksum import MASK, contribution
from shardwise.checkpoint.digests import BLOCK
from shardwise.checkpoint.files import ALIGNED, LOCAL, LocalFiles
from shardwise.checkpoint.format import DTYPES, Box, DamagedError, check_name, cut, parse_json, same, whole
from shardwise.checkpoint.manifest import Manifest, ProbeResult
from shardwise.checkpoint.reading import Reader
from shardwise.checkpoint.retention import Retention
from shardwise.checkpoint.shardfile import Part, ShardFile, arrange, write_shard_file
from shardwise.errors import CheckpointError, UsageError
from tests.checkpoints import IDENTITY, SPLITS, content, contributions, write_checkpoint


def grid(shape: tuple[int, ...], draw: random.Random) -> list[Box]:
    """A tensor cut at random places of each dim."""
    runs = []
    for n in shape:
        cuts = sorted({0, n, *(draw.randint(0, n) for _ in range(draw.randint(0, 3)))})
        runs.append(list(itertools.pairwise(cuts)) or [(0, 0)])
    return [Box(tuple(a for a, _ in run), tuple(b - a for a, b in run)) for run in itertools.product(*runs)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_checksum_is_the_same_under_any_division(dtype: str) -> None:
    draw = random.Random(dtype)
    for shape in ((), (7,), (1, 1), (70_001,), (9, 300), (5, 4, 6), (3, 1, 70, 2), (300, 1), (2, 70_000)):
        data = content("x", shape, dtype)
        total = contributions(data, whole(shape))
        for _ in range(5):
            boxes = grid(shape, draw)
            assert sum(contributions(data[box.slices(whole(shape))], box) for box in boxes) & MASK == total


def contributions_of(array: np.ndarray) -> int:
    return contribution(array, whole(array.shape))


def test_a_checksum_finds_each_single_change_and_swap() -> None:
    draw = np.random.default_rng(1)
    words = draw.integers(0, 2**32, (40, 50), dtype=np.uint32)
    words[:, 10:20] &= 0xFFFF0000  # as bf16 in fp32
    total, seen = contributions_of(words), set()
    for row, column, bit in itertools.product(range(0, 40, 7), range(50), range(32)):
        words[row, column] ^= np.uint32(1 << bit)
        seen.add(contributions_of(words))
        words[row, column] ^= np.uint32(1 << bit)
    assert total not in seen and len(seen) == 6 * 50 * 32
    for _ in range(2000):
        a, b = draw.integers(0, 2000, 2)
        flat = words.copy().reshape(-1)
        flat[[a, b]] = flat[[b, a]]
        assert (contributions_of(flat.reshape(40, 50)) == total) == (flat.reshape(40, 50) == words).all()
    assert contributions_of(words.T.copy()) != total
    assert contributions_of(np.roll(words, 1, 0)) != total and contributions_of(np.roll(words, 1, 1)) != total


def key(dim: int, index: int) -> int:
    """The documented key, in plain integers."""
    z = ((index + 1) * 0x9E3779B97F4A7C15 ^ (dim + 1) * 0xD1342543DE82EF95) & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return (z ^ z >> 31) | 1


def test_the_checksum_is_the_documented_sum_and_never_changes() -> None:
    """These numbers stand in checkpoints."""
    words = np.arange(24, dtype=np.uint32).reshape(2, 3, 4)
    by_hand = sum(int(words[i]) * key(0, i[0]) * key(1, i[1]) * key(2, i[2]) for i in np.ndindex(2, 3, 4)) & MASK
    assert contributions_of(words) == by_hand == 0x865DD595C6434E60


def test_cut_covers_a_box_in_order() -> None:
    for shape, most in [((5, 7, 3), 4), ((5, 7, 3), 21), ((5, 7, 3), 1000), ((1, 1, 9), 2), ((0, 3), 1), ((), 1)]:
        seen = np.zeros(shape, dtype=int)
        last = -1
        for box in cut(whole(shape), most):
            assert box.num_elements <= most or box.num_elements == 0
            seen[box.slices(whole(shape))] += 1
            first = int(np.ravel_multi_index(box.offsets, shape)) if seen.size and shape else 0
            assert first > last or not shape or not seen.size
            last = first
        assert (seen == 1).all()


def test_names() -> None:
    for good in ("model.layers.0.wq.weight", "optim.a-b.exp_avg", "x", "a:b", "parametrizations.w+1.original0"):
        assert check_name(good, "here") == good
    for bad in ("", ".", "a..b", "../x", "a/b", "a b", "a\n", "a[0:1]", "é", "a.", "-a", "x" * 513, None, 3, "a\x00b"):
        with pytest.raises(CheckpointError, match="here: found the name"):
            check_name(bad, "here")


@pytest.mark.parametrize("seed", range(20))
def test_any_box_is_read_from_any_division(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    shapes = {"a.w": ((6, 11), "float32"), "b": ((3, 4, 5), "bfloat16"), "c": ((), "int64"), "d": ((9,), "float64")}
    shapes |= {"e": ((0, 4), "float32"), "big": ((37, 9001), "float32"), "wide": ((2, 3_000_00), "uint8")}
    tensors = {name: content(name, *kind) for name, kind in shapes.items()}
    divided = {name: [(draw.randrange(3), box) for box in grid(a.shape, draw)] for name, a in tensors.items()}
    path = write_checkpoint(tmp_path, tensors, divided, {name: kind[1] for name, kind in shapes.items()})
    with Reader(path) as reader:
        reader.verify()
        for name, array in tensors.items():
            for box in [whole(array.shape), *draw.choices(grid(array.shape, draw), k=4)]:
                target = np.full(box.sizes, 1, dtype=array.dtype)
                reader.read(name, box, target)
                assert (target == array[box.slices(whole(array.shape))]).all()
            slabs = [data for _, data in reader.slabs(name)]
            assert b"".join(s.tobytes() for s in slabs) == array.tobytes()
            assert reader.checksum(name) == reader.manifest.tensors[name].checksum


def test_only_the_blocks_that_are_needed_are_read(tmp_path: Path) -> None:
    array = content("w", (64, 65536), "float32")  # 16 MiB, a row is a block
    path = write_checkpoint(tmp_path, {"w": array}, {"w": [(0, whole(array.shape))]}, {"w": "float32"})
    read: list[int] = []

    class Counting(type(LOCAL)):  # type: ignore[misc]
        def read_into(self, descriptor: int, path: Path, start: int, target: memoryview) -> int:
            read.append(len(target))
            return int(super().read_into(descriptor, path, start, target))

    with Reader(path, files=Counting()) as reader:
        reader.file(0)
        read.clear()
        target = np.empty((2, 65536), dtype=np.uint32)
        reader.read("w", Box((10, 0), (2, 65536)), target)
        assert sum(read) == 2 * BLOCK and (target == array[10:12]).all()
        read.clear()
        target = np.empty((64, 4), dtype=np.uint32)
        reader.read("w", Box((0, 8), (64, 4)), target)
        assert max(read) <= 4 * 1024 * 1024 and (target == array[:, 8:12]).all()


class Refusing(LocalFiles):
    """Writes around the page cache are refused, as by some file systems."""

    refuse = False

    def stream(self, descriptor: int, path: Path, data: memoryview) -> None:
        self.refuse = len(data) >= ALIGNED
        super().stream(descriptor, path, data)

    def call(self, name: str, path: Path, act: Callable[[], Any]) -> Any:
        if name == "write" and self.refuse:
            self.refuse = False
            raise OSError(errno.EINVAL, "Invalid argument", str(path))
        return super().call(name, path, act)


@pytest.mark.parametrize("files", [LOCAL, Refusing()], ids=["as it is", "refused"])
@pytest.mark.parametrize("before", [b"", b"x", bytes(4096)])
@pytest.mark.parametrize("skip", [0, 1, 4096])
def test_what_is_streamed_arrives(tmp_path: Path, files: LocalFiles, before: bytes, skip: int) -> None:
    """From any address, to any place in the file, of any length."""
    data = mmap.mmap(-1, 3 * 4096)
    data[:] = np.random.default_rng(0).bytes(len(data))
    for count in (0, 1, 4096, 4097, 2 * 4096 - skip % 4096):
        path = tmp_path / str(count)
        descriptor = files.create(path)
        files.write(descriptor, path, memoryview(before))
        part = memoryview(data)[skip : skip + count]
        files.stream(descriptor, path, part)
        files.stream(descriptor, path, part)
        files.write(descriptor, path, memoryview(b"end"))
        files.sync(descriptor, path)
        files.close(descriptor, path)
        assert path.read_bytes() == before + bytes(part) * 2 + b"end"


def test_the_file_is_safetensors(tmp_path: Path) -> None:
    array = content("w", (6, 5), "float32")
    arranged = arrange(
        [Part("w", "float32", (6, 5), Box((0, 0), (4, 5))), Part("w", "float32", (6, 5), Box((4, 0), (2, 5)))]
    )
    entry = write_shard_file(LOCAL, tmp_path, IDENTITY, arranged, memoryview(array.tobytes()))
    assert os.path.getsize(tmp_path / entry.name) == entry.size_bytes
    with safe_open(tmp_path / entry.name, "np") as file:
        assert sorted(file.keys()) == ["shardwise.digests", "w[0:4,0:5]", "w[4:6,0:5]"]
        assert (file.get_tensor("w[4:6,0:5]").view(np.uint32) == array[4:]).all()
        assert file.metadata()["run"] == IDENTITY.run
    with ShardFile(LOCAL, tmp_path, entry, IDENTITY) as file:
        file.check_all()


def test_retention() -> None:
    saves = [(900, 2.0), (800, 1.0), (700, None), (600, 1.5), (500, float("nan")), (400, 0.5)]
    assert Retention(last=2).keeps(saves) == [True, True, False, False, False, False]
    assert Retention(last=1, every=300).keeps(saves) == [True, False, False, True, False, False]
    assert Retention(last=1, best=2).keeps(saves) == [True, True, False, False, False, True]
    for wrong in ({"last": 0}, {"every": -1}, {"best": -1}):
        with pytest.raises(UsageError):
            Retention(**wrong)


def test_a_manifest_that_could_not_be_read_is_another_matter_than_an_old_or_new_one(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, *SPLITS)
    text = (path / "manifest.json").read_bytes()
    (path / "manifest.json").write_bytes(json.dumps({"schema": 1, "scalars": {}, "step": 3}).encode())
    with pytest.raises(CheckpointError, match="never released") as caught:
        Reader(path)
    assert not isinstance(caught.value, DamagedError)
    newer = text.replace(b'"schema":2', b'"schema":3')
    (path / "manifest.json").write_bytes(newer)  # a bit that flipped makes no version: the checkpoint before is tried
    with pytest.raises(DamagedError, match="SHA-256"):
        Reader(path)
    body = newer[:-78]
    (path / "manifest.json").write_bytes(body + b',"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n')
    with pytest.raises(CheckpointError, match="update shardwise") as caught:
        Reader(path)
    assert not isinstance(caught.value, DamagedError)


def test_numbers_that_json_has_no_words_for_come_back(tmp_path: Path) -> None:
    """A manifest is strict JSON, which any program reads, whatever numbers a run has."""
    nan, inf = float("nan"), float("inf")
    scalars = {"step": 7, "optimizer": {"groups": [{"d": nan, "clip": inf, "low": -inf, "betas": (0.9, 0.95)}]}}
    path = write_checkpoint(tmp_path, *SPLITS)
    made = replace(Manifest.read(path), scalars=scalars, metric=nan, probe=ProbeResult(inf, nan, "0" * 64))
    encoded = made.encode()

    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is no JSON")

    json.loads(encoded, parse_constant=refuse)
    for data in (encoded, signed(old_words(encoded))):  # manifests that were written before have Python's words
        read = Manifest.decode(data, "manifest")
        assert same(read.scalars, scalars) and not same(read.scalars, {"step": 7})
        assert read.metric is not None and math.isnan(read.metric)
        assert read.probe is not None and read.probe.loss == inf and math.isnan(read.probe.grad_norm)
    for wrong in (b'{"__float__":"1"}', b'{"__float__":[]}', b'{"__float__":"nan","a":1}'):
        assert parse_json(wrong, "x") == json.loads(wrong)
    with pytest.raises(DamagedError, match="found a JSON float"):
        parse_json(b'{"__float__":"nan"}', "x")


def old_words(encoded: bytes) -> bytes:
    words = {"nan": b"NaN", "inf": b"Infinity", "-inf": b"-Infinity"}
    return re.sub(rb'\{"__float__":"([^"]*)"\}', lambda found: words[found[1].decode()], encoded)


def signed(encoded: bytes) -> bytes:
    body = encoded[:-78]
    return body + b',"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


def test_retention_of_metrics_that_are_none() -> None:
    """Neither a missing one nor NaN is best; infinities are numbers."""
    nan, inf = float("nan"), float("inf")
    assert Retention(last=1, best=2).keeps([(5, None), (4, nan), (3, inf), (2, -inf)]) == [True, False, True, True]
    assert Retention(last=1, best=3).keeps([(3, nan), (2, None), (1, nan)]) == [True, False, False]
    # evaluated at steps 4 and 8: what was saved in between has the loss of step 4, and is not what had it
    assert Retention(last=1, best=1).keeps([(8, 2.0), (6, 1.0), (4, 1.0), (2, None)]) == [True, False, True, False]
    assert Retention(last=1, every=2).keeps([(2, None), (1, None), (0, None)]) == [True, False, True]
    for wrong in ({"last": True}, {"last": 2.0}, {"every": None}, {"best": "1"}):
        with pytest.raises(UsageError, match="no whole number"):
            Retention(**wrong)  # type: ignore[arg-type]  # a wrong type is what it shall refuse


def test_the_garbage_collector_rests_while_a_manifest_is_read_and_no_longer() -> None:
    """Of thousands of tensors it took half of the time; what is no manifest must not leave it off."""
    seen = list[bool]()

    class Looking(bytes):
        def decode(self, *_: Any) -> str:
            seen.append(gc.isenabled())
            return "{"

    with pytest.raises(DamagedError, match="no readable JSON"):
        Manifest.decode(Looking(b"{"), "manifest.json")
    assert seen == [False] and gc.isenabled()
