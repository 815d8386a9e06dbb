"""Stores, plans and configurations made to harm: one process with little memory reads them all, and runs nothing.

What stands inside one checkpoint's files is in test_checkpoint_hostile.py; its artefacts go through this process too.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import time
import uuid
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwise.checkpoint.compare import diff, inspect, verify
from shardwise.checkpoint.directory import Directory
from shardwise.checkpoint.files import LOCAL
from shardwise.checkpoint.format import DamagedError
from shardwise.checkpoint.manifest import MAX_FILE, Manifest
from shardwise.cli.main import main
from shardwise.cli.options.config import read_configuration
from shardwise.errors import CheckpointError, ExitCode, ShardwiseError
from shardwise.hardware.cluster import load_cluster
from shardwise.model.rules_file import load_rules
from shardwise.plan.plan import Plan
from tests.checkpoints import SPLITS, content, write_checkpoint
from tests.little_memory import in_little_memory
from tests.pure.test_checkpoint_hostile import HOSTILE, entry, header, replaced, signed

ROOM = 160 * 2**20
"""Address space that the reading process may add."""
Act = Callable[[Path], Any]


class Bomb:
    """Touches a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def zipped(path: Path) -> bytes:
    whole = path / "bomb.zip"
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", pickle.dumps(Bomb(path / "marker")))
        file.writestr("archive/data/0", bytes(10_000_000))
    data = whole.read_bytes()
    whole.unlink()
    return data


TEXTS: dict[str, Callable[[Path], bytes]] = {
    "empty": lambda path: b"",
    "pickle": lambda path: pickle.dumps(Bomb(path / "marker")),
    "pickle protocol 0": lambda path: pickle.dumps(Bomb(path / "marker"), protocol=0),
    "zip": zipped,
    "zeros": lambda path: bytes(100_000),
    "not UTF-8": lambda path: b"\xff\xfe{}" * 10,
    "deep lists": lambda path: b'{"a":' + b"[" * 100_000,
    "deep objects": lambda path: b'{"a":' * 100_000,
    "closed lists": lambda path: b'{"run":' + b"[" * 900 + b"]" * 900 + b"}",
    "deep TOML": lambda path: b"a = " + b"[" * 50_000 + b"]" * 50_000,
    "deep TOML keys": lambda path: b"a." * 50_000 + b"b = 1",
    "deep TOML tables": lambda path: b"[" + b"a." * 50_000 + b"b]\nc = 1",
    "deep inline tables": lambda path: b"a = " + b"{ a = " * 20_000,
    "huge number": lambda path: b'{"run":' + b"9" * 100_000 + b"}",
    "huge TOML number": lambda path: b"seed = " + b"9" * 100_000,
    "big number": lambda path: b'{"zero":' + b"9" * 4000 + b', "learning_rate":' + b"9" * 4000 + b"}",
    "big TOML number": lambda path: b"zero = " + b"9" * 4000 + b"\n[optim]\nlearning_rate = " + b"9" * 4000,
    "not a number": lambda path: b'{"run":NaN,"zero":Infinity,"seed":-Infinity}',
    "TOML inf": lambda path: b"zero = inf\nseed = nan\n",
    "keys twice": lambda path: b'{"format":1,"format":2}',
    "TOML keys twice": lambda path: b"a = 1\na = 2\n",
    "a list": lambda path: b"[1, 2]",
    "half a surrogate": lambda path: b'{"run":"\\ud800","\\udfff":1}',
    "escapes": lambda path: b'{"run":"\\u001b[2J\\u0000","[/x]":1}',
    "code": lambda path: b"__import__('os').mkdir('marker')",
    "YAML": lambda path: b"a: !!python/object/apply:os.mkdir [marker]",
    "a path": lambda path: b"../../../../etc/passwd\n",
    "a script": lambda path: b"#!/bin/sh\nmkdir marker\n",
    "long line": lambda path: b'{"run":"' + b"x" * 2_000_000 + b'"}',
    "unknown": lambda path: b'{"__class__":{"__init__":{"__globals__":1}}}',
}


def no_file(path: Path) -> None:
    path.unlink(missing_ok=True)


def places(name: str) -> Iterator[tuple[str, Act]]:
    """Every content, and everything that is no file, in one place of a store."""
    for what, text in TEXTS.items():
        yield f"{name}: {what}", lambda s, text=text: (s / name).write_bytes(text(s))
    for target in ("/etc/passwd", "/dev/zero", "/nowhere", name, "..", "step-00000007"):
        yield f"{name}: link to {target}", lambda s, t=target: (no_file(s / name), os.symlink(t, s / name))
    yield f"{name}: FIFO", lambda s: (no_file(s / name), os.mkfifo(s / name))
    yield f"{name}: directory", lambda s: (no_file(s / name), os.mkdir(s / name))


def entries() -> Iterator[tuple[str, Act]]:
    """Things beside a whole checkpoint under names that a store gives."""
    for name in (
        "step-00000009",
        "step-00000009.old-00000000",
        "step-00000009.partial-00000000",
        "step-00000007.old-0a0b0c0d",
    ):
        yield f"{name}: file", lambda s, n=name: (s / n).write_bytes(b"x")
        yield f"{name}: FIFO", lambda s, n=name: os.mkfifo(s / n)
        yield f"{name}: empty", lambda s, n=name: os.mkdir(s / n)
        yield f"{name}: copy", lambda s, n=name: shutil.copytree(s / "step-00000007", s / n)
        for target in ("step-00000007", "/", "/etc", name, "../outside", "/dev"):
            yield f"{name}: link to {target}", lambda s, n=name, t=target: os.symlink(t, s / n)
        yield f"{name}: holds a directory", lambda s, n=name: os.makedirs(s / n / "below" / "below")
        yield f"{name}: holds links", lambda s, n=name: holds_links(s / n)
    for name in (
        "step-99999999999999999999",
        "step-0000000١",
        "step-00000009\n",
        "step-\x1b[2J",
        "step-00000009.partial-XYZ",
        b"step-\xff",
    ):
        yield f"{name!r}", lambda s, n=name: os.mkdir(os.path.join(os.fsencode(s), os.fsencode(n)))
    yield "many crashed saves", lambda s: [os.mkdir(s / f"step-00000009.partial-{i:08x}") for i in range(500)]


def holds_links(path: Path) -> None:
    path.mkdir()
    (path / "manifest.json").symlink_to(path.parent / "step-00000007" / "manifest.json")
    (path / "out").symlink_to(path.parent.parent / "outside")
    (path / "file").symlink_to(path.parent.parent / "outside" / "kept")


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def cut_along(count: int, dims: int) -> Act:
    """So many parts of one tensor, each divided along so many dims, of which two overlap and two are not there."""

    def act(checkpoint: Path) -> None:
        data = json.loads((checkpoint / "manifest.json").read_bytes())
        pieces = [[0, [0] * (dims - 1) + [i], [1] * dims, 4 * i] for i in range(count)]
        pieces[count // 2] = pieces[count // 3]
        data["tensors"]["model.w"] |= {"shape": [1] * (dims - 1) + [count], "pieces": pieces}
        (checkpoint / "manifest.json").write_bytes(signed(data))

    return act


def sparse(size: int) -> Act:
    """A file that is as long as it claims, and takes no place on the disk."""

    def act(checkpoint: Path) -> None:
        os.truncate(checkpoint / "rank-00000.safetensors", size)
        replaced("files", 0, "size_bytes", value=size)(checkpoint)

    return act


def sparse_header(size: int) -> Act:
    def act(checkpoint: Path) -> None:
        sparse(size)(checkpoint)
        with (checkpoint / "rank-00000.safetensors").open("r+b") as file:
            file.write((size - 8).to_bytes(8, "little"))

    return act


def named(name: str | bytes) -> Act:
    def act(checkpoint: Path) -> None:
        with open(os.path.join(os.fsencode(checkpoint), os.fsencode(name)), "wb") as file:
            file.write(b"x")

    return act


def grid_with(*pieces: list[Any]) -> Act:
    """Parts of the 6 x 5 `model.w` that have as many elements as it, and are not it."""
    return replaced("tensors", "model.w", "pieces", value=list(pieces))


def checkpoints() -> Iterator[tuple[str, Act]]:
    """What one checkpoint's files say, beside what test_checkpoint_hostile.py has."""
    for value in (2**4000, -(2**4000), 10**400, True, "1", [], float("nan")):
        if value == value:
            yield f"metric {str(value)[:9]}", replaced("metric", value=value)
        yield f"probe {str(value)[:9]}", replaced("probe", value={"loss": value, "grad_norm": 1.0, "rows": "0" * 63})
        yield f"sizes {str(value)[:9]}", replaced("files", 0, "size_bytes", value=value)
    for field in ("config", "scalars", "plan_fields", "versions", "mesh"):
        for depth in (70, 500, 900):
            yield f"{field} {depth} deep", replaced(field, value={"step": 7, "a": nested(depth)})
        yield f"{field} a list", replaced(field, value=[1])
    for field in ("plan", "created", "device"):
        for text in ("\x1b[2J", "\ud800", "a\nb", "\u202e", "x" * 5000):
            yield f"{field} {text[:5]!r}", replaced(field, value=text)
    yield "another step in scalars", replaced("scalars", "step", value=8)
    yield "no step in scalars", replaced("scalars", value={})
    yield "negative mesh", replaced("mesh", value={"dp_shard": -1})
    yield "2^56 x 2^56 of nothing", replaced("tensors", "model.w", value={
        "shape": [0, 2**56, 2**56, 2**56], "dtype": "float64", "checksum": "0" * 16, "pieces": []})  # fmt: skip
    yield "2^56 x 2^56", replaced("tensors", "model.w", "shape", value=[2**56] * 16)
    yield "a pinwheel with a hole", grid_with([0, [0, 0], [2, 3], 0], [0, [0, 3], [3, 2], 0], [0, [3, 2], [3, 3], 0],
                                              [0, [2, 0], [4, 2], 0], [0, [2, 2], [1, 1], 0])  # fmt: skip
    yield "an overlap that fills a hole", grid_with([0, [0, 0], [3, 5], 0], [0, [2, 0], [3, 5], 0])
    yield "a part in two dims", grid_with([0, [0, 0], [6, 5], 0], [0, [0, 0], [0, 5], 0])
    for count, dims in ((20_000, 2), (20_000, 1), (1_000, 6), (1_000, 16)):
        yield f"{count} overlapping parts in {dims} dims", cut_along(count, dims)
    for size in (10**13, MAX_FILE + 1, MAX_FILE, 2**33):
        yield f"a sparse file of {size} bytes", sparse(size)
        yield f"a sparse file with a header of {size} bytes", sparse_header(size)
    for name in ("\x1b[2J", "a\nb", b"\xff\xfe", "rank-00000.safetensors ", "MANIFEST.json", "manifest.json\n"):
        yield f"extra {name!r}", named(name)
    yield "rank of an odd digit", header(lambda found, _: found["__metadata__"].update({"rank": "٠"}))
    yield "escape in a key", header(lambda found, _: found.update({"\x1b[2J\ud800": found.pop("model.ids")}))
    for key, value in (
        ("shape", [2**56] * 16),
        ("shape", nested(500)),
        ("data_offsets", [0, 2**62]),
        ("data_offsets", [-32, 0]),
        ("dtype", "\x1b"),
    ):
        yield f"header {key} {str(value)[:9]}", header(entry("model.ids", **{key: value}))


def doors(checkpoint: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    yield "verify", lambda: verify(checkpoint)
    yield "inspect", lambda: json.dumps(inspect(checkpoint))
    yield "diff", lambda: diff(checkpoint, checkpoint)


def open_all(checkpoint: Path) -> list[str]:
    """What each door says; `accepted` where it finds nothing wrong."""
    said = []
    for name, door in doors(checkpoint):
        start = time.process_time()
        try:
            door()
            said.append("accepted")
        except CheckpointError as error:
            said.append(str(error))
            assert str(checkpoint) in said[-1], (name, error)
            assert said[-1].isprintable(), (name, error)
        assert time.process_time() - start < 5.0, name
    return said


def test_every_checkpoint_that_was_made_to_harm_is_refused_at_every_door(tmp_path: Path) -> None:
    cases = [*HOSTILE, *checkpoints()]
    whole_one = write_checkpoint(tmp_path, *SPLITS)

    def work() -> None:
        for i, (name, act) in enumerate(cases):
            copy = tmp_path / f"case{i}" / "step-00000007"
            shutil.copytree(whole_one, copy)
            act(copy)
            try:
                verified, inspected, _ = open_all(copy)
                assert verified != "accepted", inspected
            except BaseException as error:
                raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
            assert not list(copy.parent.rglob("marker")), name
            shutil.rmtree(copy.parent)

    in_little_memory(work, ROOM)
    assert len(cases) > 300


def test_a_store_with_anything_in_any_place_is_read_or_refused_and_nothing_outside_is_touched(tmp_path: Path) -> None:
    cases = [*places("store.json"), *places("latest"), *entries()]
    whole_one = write_checkpoint(tmp_path, *SPLITS)
    run = uuid.uuid4().hex

    def work() -> None:
        for i, (name, act) in enumerate(cases):
            root = tmp_path / f"case{i}"
            shutil.copytree(whole_one, root / "store" / "step-00000007")
            (root / "store" / "store.json").write_text("{}")
            (root / "outside").mkdir()
            (root / "outside" / "kept").write_bytes(b"kept")
            act(root / "store")
            try:
                one(root / "store")
            except BaseException as error:
                raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
            assert (root / "outside" / "kept").read_bytes() == b"kept" and os.listdir(root / "outside") == ["kept"]
            assert not list(root.rglob("marker")), name
            shutil.rmtree(root)

    def one(store: Path) -> None:
        try:
            listing = Directory(store, LOCAL).listing()
            assert [manifest.step for _, manifest in listing.complete][-1] == 7
            assert all(item.reason for item in listing.damaged)
        except CheckpointError as error:
            assert "store.json" in str(error)
        open_all(store)
        try:
            directory = Directory(store, LOCAL)
            partial = directory.begin(10, directory.run_id() or run)
            manifest = Manifest.read(store / "step-00000007")
            assert partial.parent == store and manifest.step == 7
        except CheckpointError as error:
            assert str(store) in str(error)

    in_little_memory(work, ROOM)
    assert len(cases) > 100


def test_plans_clusters_rules_and_configurations_made_to_harm_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    readers: list[Callable[[Path], object]] = [
        Plan.load, load_cluster, load_rules, read_configuration,
    ]  # fmt: skip

    def one(path: Path, what: str) -> None:
        for reader in readers:
            start = time.process_time()
            try:
                found = reader(path)
                assert (what, reader) == ("empty", read_configuration), (what, path.suffix, reader, found)
            except ShardwiseError as error:
                assert path.name in str(error), (what, reader, error)
            except Exception as error:
                raise AssertionError(f"{what}, {path.suffix}, {reader}: {type(error).__name__}: {error}") from error
            assert time.process_time() - start < 5.0, (what, reader)

    def work() -> None:
        for suffix in (".toml", ".json"):
            path = tmp_path / f"hostile{suffix}"
            for what, text in TEXTS.items():
                path.write_bytes(text(tmp_path))
                one(path, what)
                path.unlink()
            for what, make in (
                ("FIFO", os.mkfifo), ("directory", os.mkdir), ("/dev/zero", lambda p: os.symlink("/dev/zero", p)),
                ("itself", lambda p: os.symlink(p, p)), ("10 TB", lambda p: (p.touch(), os.truncate(p, 10**13))),
            ):  # fmt: skip
                make(path)
                one(path, what)
                path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()

    in_little_memory(work, ROOM)
    assert not (tmp_path / "marker").exists()


def test_the_command_shows_odd_checkpoints_and_ends_with_a_documented_code(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Words of markup, of the terminal and of other scripts are content to show, or are refused."""
    cases = [
        (f"config {value!r:.20}", replaced("config", value={"a": value}))
        for value in ("[/x]", "\x1b[2J", "\ud800", nested(50))
    ]
    cases += [
        (f"plan {text!r}", replaced("plan", value=text))
        for text in ("[/x]", "[red]fsdp2[/red]", "[link=x]y", "\x1b[2J", "é")
    ]
    cases += [(f"device {text!r}", replaced("device", value=text)) for text in ("[/x]", "\ud800", "ß")]
    cases += [case for i, case in enumerate(checkpoints()) if i % 9 == 0]
    tensors, divided, dtypes = SPLITS
    for i, (name, act) in enumerate(cases):
        (root := tmp_path / str(i)).mkdir()
        checkpoint = write_checkpoint(root, tensors, divided, dtypes)
        act(checkpoint)
        for words in (["inspect"], ["inspect", "--json"], ["verify"], ["verify", "--json"]):
            with pytest.raises(SystemExit) as ended:
                main(["ckpt", *words, str(checkpoint)])
            assert ended.value.code in (0, ExitCode.CHECKPOINT), (name, words, ended.value.code)
            out, err = capfd.readouterr()
            assert "\x1b[2J" not in out + err and "Traceback" not in err, (name, words)
        shutil.rmtree(root)


def test_negative_control_a_plain_tensor_divided_in_any_way_is_accepted(tmp_path: Path) -> None:
    """What a mesh would not do and the format allows: a pinwheel, which no cut along a dim divides."""
    from shardwise.checkpoint.format import Box

    array = content("w", (3, 3), "float32")
    boxes = [Box((0, 0), (1, 2)), Box((0, 2), (2, 1)), Box((2, 1), (1, 2)), Box((1, 0), (2, 1)), Box((1, 1), (1, 1))]
    path = write_checkpoint(
        tmp_path, {"w": array}, {"w": [(i % 2, box) for i, box in enumerate(boxes)]}, {"w": "float32"}
    )
    assert open_all(path) == ["accepted"] * 3
    replaced("tensors", "w", "pieces", 4, 1, value=[0, 0])(path)
    with pytest.raises(DamagedError, match="a hole or an overlap at"):
        verify(path)
