"""Checkpoints that were made to harm: refused by name, nothing run, memory bounded. Damage: test_store_damages.py."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import pickle
import random
import re
import shutil
import time
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwise.checkpoint.format import DamagedError
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.reading import Reader
from shardwise.checkpoint.shardfile import parse_header
from shardwise.errors import CheckpointError
from tests.checkpoints import SPLITS, write_checkpoint

SOAK = int(os.environ.get("SHARDWISE_SOAK") or 0)
MUTATIONS = 2_000_000 if SOAK else 20_000
FILES = ("manifest.json", "rank-00000.safetensors", "rank-00001.safetensors")


def check(path: Path) -> None:
    with Reader(path) as reader:
        reader.verify()


def signed(data: dict[str, Any] | str) -> bytes:
    """A manifest with a digest that agrees: what only a person who means it writes."""
    text = data if isinstance(data, str) else json.dumps({k: v for k, v in data.items() if k != "sha256"})
    body = text.encode()[:-1]
    return body + b',"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


@pytest.fixture(scope="module")
def whole_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("whole"), *SPLITS)


def test_what_changed_is_named_by_tensor_offset_and_rank(whole_one: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(whole_one, tmp_path / "step-00000007"))
    path = copy / "rank-00001.safetensors"
    data = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    data[header + 3] ^= 4
    path.write_bytes(data)
    with pytest.raises(DamagedError) as caught:
        check(copy)
    assert re.search(rf"rank-00001.safetensors: offset {header} to \d+, tensor model\.w\[4:6,0:5\]", str(caught.value))
    assert "written by rank 1" in str(caught.value)


# ---------------------------------------------------------------- hostile files

ODD: tuple[Any, ...] = (
    None, True, -1, 2**63, 2**4000, 1e308, "", "../../../etc/passwd", "__import__('os').system('true')", [], [[]], {},
    {"a": {"b": []}}, "\x00", "x" * 100_000, float("inf"),
)  # fmt: skip
FREE = {"plan_fields", "versions", "config", "scalars", "mesh", "plan", "created", "device", "metric", "probe"}
"""Fields whose content is text, a number or an object of any kind, and is only shown."""


def replaced(*path: Any, value: Any) -> Callable[[Path], None]:
    """One value of the manifest, which is signed again."""

    def act(checkpoint: Path) -> None:
        data = json.loads((checkpoint / "manifest.json").read_bytes())
        inner = data
        for step in path[:-1]:
            inner = inner[step]
        inner[path[-1]] = value
        (checkpoint / "manifest.json").write_bytes(signed(data))

    return act


def header(change: Callable[[dict[str, Any], int], Any], length: int | None = None) -> Callable[[Path], None]:
    """The header of a data file, with a seal and a manifest that agree."""

    def act(checkpoint: Path) -> None:
        path = checkpoint / "rank-00000.safetensors"
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        found = json.loads(data[8 : 8 + size])
        text = change(found, len(data) - 8 - size)
        encoded = text if isinstance(text, bytes) else json.dumps(found if text is None else text).encode()
        head = (len(encoded) if length is None else length).to_bytes(8, "little") + encoded
        path.write_bytes(head + data[8 + size :])
        manifest = json.loads((checkpoint / "manifest.json").read_bytes())
        manifest["files"][0]["size_bytes"] = path.stat().st_size
        manifest["files"][0]["seal"] = hashlib.sha256(head + data[-16:]).hexdigest()
        (checkpoint / "manifest.json").write_bytes(signed(manifest))

    return act


class Bomb:
    marker: str = ""

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


def written(name: str, content: Callable[[Path], bytes]) -> Callable[[Path], None]:
    return lambda checkpoint: void((checkpoint / name).write_bytes(content(checkpoint)))


def void(_: object) -> None:
    return None


def pickled(checkpoint: Path) -> bytes:
    bomb = Bomb()
    bomb.marker = str(checkpoint / "marker")
    return pickle.dumps(bomb)


def zipped(checkpoint: Path) -> bytes:
    path = checkpoint.parent / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", pickled(checkpoint))
        file.writestr("archive/data/0", bytes(10_000_000))
    return path.read_bytes()


def linked(name: str, target: str) -> Callable[[Path], None]:
    def act(checkpoint: Path) -> None:
        kept = checkpoint.parent / "kept"
        shutil.move(checkpoint / name, kept)
        os.symlink(target or kept, checkpoint / name)

    return act


def special(name: str, make: Callable[[Path], None]) -> Callable[[Path], None]:
    def act(checkpoint: Path) -> None:
        (checkpoint / name).unlink()
        make(checkpoint / name)

    return act


def entry(name: str, **changes: Any) -> Callable[[dict[str, Any], int], None]:
    return lambda found, _: found[name].update(changes)


def hostile() -> Iterator[tuple[str, Callable[[Path], None]]]:
    fields = ("format", "schema", "run", "save", "step", "sequence", "world", "files", "tensors")
    for field in fields:
        for value in ODD:
            if (field in ("step", "sequence", "world") and value is True) or not (value == [] and field == "files"):
                yield f"manifest {field} {str(value)[:20]!r}", replaced(field, value=value)
    for value in (
        "../rank-00000.safetensors",
        "/etc/passwd",
        "rank-00001.safetensors",
        "rank-00000.safetensors\x00",
        ".",
    ):
        yield f"file named {value!r}", replaced("files", 0, "name", value=value)
    for value in (-1, 10**13, 2**62, 1.5, "8", None):
        yield f"file of {value} bytes", replaced("files", 0, "size_bytes", value=value)
    w = ("tensors", "model.w")
    for key, value in [
        ("shape", [10**13, 5]), ("shape", [-6, 5]), ("shape", [6] * 40), ("shape", [6, 5.0]), ("shape", "6,5"),
        ("dtype", "object"), ("dtype", "float1024"), ("dtype", None), ("checksum", "0" * 16), ("checksum", "g" * 16),
        ("pieces", []), ("pieces", None), ("pieces", [[0, [0, 0], [6, 5], 0]]), ("pieces", [[9, [0, 0], [6, 5], 0]]),
        ("pieces", [[0, [0, 0], [4, 5], 2**61], [1, [4, 0], [2, 5], 0]]), ("pieces", [[0, [0, 0], [4, 5], 0]] * 2),
        ("pieces", [[0, [0, 0], [3, 5], 0], [0, [0, 0], [3, 5], 0]]), ("pieces", [[0, [0], [30], 0]]),
        ("pieces", [[0, [5, 0], [6, 5], 0]]), ("pieces", [[0, [0, 0], [0, 5], 0]]), ("pieces", [{}]),
    ]:  # fmt: skip
        yield f"tensor {key} {str(value)[:40]}", replaced(*w, key, value=value)
    for name in ("../w", "w/../../x", "", "w w", "w\n", "__class__.__init__;", "é", "x" * 9999):
        yield f"tensor named {name[:20]!r}", replaced("tensors", name, value={})
    yield "unknown field", replaced("__reduce__", value="os.system")
    for size in (0, 2, 2**31, 2**40, 2**62, 2**64 - 1):
        yield f"header of {size} bytes", header(lambda found, _: None, length=size)
    yield "header claims 10 TB", header(entry("model.w[0:4,0:5]", shape=[10**13], data_offsets=[0, 4 * 10**13]))
    yield "header with a hole", header(entry("model.ids", data_offsets=[8, 40]))
    yield "header overlaps", header(entry("model.ids", data_offsets=[0, 31]))
    yield "header type", header(entry("model.ids", dtype="PICKLE"))
    yield "header shape", header(entry("model.ids", shape=[2, 2, 2]))
    yield "header negative", header(entry("model.ids", shape=[-2, -2]))
    yield "header extra key", header(entry("model.ids", __reduce__="x"))
    yield "header without a tensor", header(lambda found, _: void(found.pop("model.ids")))
    yield "header without a table", header(lambda found, _: void(found.pop("shardwise.digests")))
    yield "header table", header(entry("shardwise.digests", shape=[16, 1]))
    yield "header metadata", header(lambda found, _: void(found.pop("__metadata__")))
    for key in ("run", "save", "step", "rank", "format"):
        yield f"header {key}", header(lambda found, _, k=key: found["__metadata__"].update({k: "0" * 32}))  # type: ignore[misc]
        yield f"header {key} gone", header(lambda found, _, k=key: void(found["__metadata__"].pop(k)))  # type: ignore[misc]
    yield "header list", header(lambda found, _: [1, 2])
    yield "header deep", header(lambda found, _: b"[" * 100_000)
    yield "header twice", header(lambda found, _: json.dumps(found).encode()[:-1] + b',"model.ids":{}}')
    yield "header bytes", header(lambda found, _: b"\xff\xfe" * 50)
    yield "header huge number", header(lambda found, _: b'{"a":' + b"9" * 100_000 + b"}")
    yield "manifest deep", written("manifest.json", lambda _: signed('{"a":' + "[" * 50_000 + "]" * 50_000 + "}"))
    yield "manifest deep object", written("manifest.json", lambda _: b'{"a":' * 50_000)
    yield "manifest huge number", written("manifest.json", lambda _: b'{"schema":' + b"9" * 10_000 + b"}")
    yield "manifest twice", written("manifest.json", lambda _: signed('{"step":1,"step":2}'))
    yield "manifest list", written("manifest.json", lambda _: b"[]")
    yield "manifest empty", written("manifest.json", lambda _: b"")
    yield (
        "manifest without digest",
        written("manifest.json", lambda c: Path(c / "manifest.json").read_bytes()[:-78] + b"}"),
    )
    for name in FILES:
        yield f"{name} pickle", written(name, pickled)
        yield f"{name} zip", written(name, zipped)
        yield f"{name} link", linked(name, "")
        yield f"{name} link out", linked(name, "/etc/passwd")
        yield f"{name} link to itself", linked(name, name)
        yield f"{name} fifo", special(name, os.mkfifo)
        yield f"{name} directory", special(name, os.mkdir)
        yield f"{name} device", linked(name, "/dev/zero")
    for name in (".metadata", "data.pkl", "__init__.py", "pytorch_model.bin", "__0_0.distcp", "sitecustomize.py"):
        yield f"extra {name}", written(name, pickled)


HOSTILE = list(hostile())


def test_hostile_checkpoints_are_refused(whole_one: Path, tmp_path: Path) -> None:
    assert len(HOSTILE) >= 100
    tracemalloc.start()
    for i, (name, act) in enumerate(HOSTILE):
        copy = tmp_path / str(i) / "step-00000007"
        shutil.copytree(whole_one, copy)
        act(copy)
        tracemalloc.reset_peak()
        start = time.perf_counter()
        try:
            check(copy)
        except CheckpointError as error:
            assert str(copy) in str(error), (name, error)
        except BaseException as error:
            raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
        else:
            raise AssertionError(f"{name}: accepted")
        assert tracemalloc.get_traced_memory()[1] < 32 * 2**20 and time.perf_counter() - start < 5.0, name
        assert not (copy / "marker").exists()
        shutil.rmtree(copy.parent)
    tracemalloc.stop()


STORE = Path(__file__).parents[2] / "src" / "shardwise" / "checkpoint"
FORBIDDEN = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "yaml", "importlib", "runpy", "subprocess", "ctypes"}
CALLS = {"eval", "exec", "compile", "__import__"}


def test_the_store_can_run_nothing() -> None:
    for file in sorted(STORE.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & FORBIDDEN, file
            assert not any(name.startswith("torch.distributed.checkpoint") for name in names), file
            if isinstance(node, ast.Call):
                assert not (isinstance(node.func, ast.Name) and node.func.id in CALLS), file
                assert ast.unparse(node.func) not in ("torch.load", "np.load", "os.system"), file


# ---------------------------------------------------------------- fuzz


def mutated(data: bytes, draw: random.Random) -> bytes:
    found = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 5))):
        at = draw.randrange(len(found))
        match draw.randrange(6):
            case 0:
                found[at] ^= 1 << draw.randrange(8)
            case 1:
                del found[at : at + draw.randrange(1, 20)]
            case 2:
                other = draw.randrange(len(found))
                found[at:at] = found[other : other + draw.randrange(1, 40)]
            case 3:
                found[at:at] = draw.choice(
                    (b"-", b"9" * 30, b"null", b"{}", b"[]", b'"', b"1e999", b",", b"0.5", b"true")
                )
            case 4:
                found[at] = draw.randrange(256)
            case _:
                digits = [i for i, byte in enumerate(found) if 48 <= byte < 58]
                found[draw.choice(digits)] = draw.randrange(48, 58)
        if not found:
            return b" "
    return bytes(found)


def test_mutated_manifests_and_headers_end_in_an_error_or_in_a_manifest(whole_one: Path) -> None:
    draw = random.Random(3)
    manifest = (whole_one / "manifest.json").read_bytes()
    data = (whole_one / "rank-00000.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    refused = 0
    for i in range(MUTATIONS):
        try:
            if i % 2:
                parse_header(mutated(data[8 : 8 + size], draw), len(data) - 8 - size, "here")
            elif i % 4:
                Manifest.decode(signed(mutated(manifest[:-78] + b"}", draw).decode("utf-8", "replace")), "here")
            else:
                Manifest.decode(mutated(manifest, draw), "here")
        except CheckpointError:
            refused += 1
    assert refused > 0.7 * MUTATIONS
