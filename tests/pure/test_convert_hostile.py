"""Foreign files made to harm: each is refused by name with what to do, nothing is run, nothing is left behind."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import struct
import subprocess
import sys
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwise.checkpoint.foreign import sandbox
from shardwise.checkpoint.foreign.child import answer_to
from shardwise.checkpoint.foreign.convert import Options, convert
from shardwise.checkpoint.foreign.opened import OpenFiles
from shardwise.checkpoint.foreign.safetensors import read_safetensors
from shardwise.cli.main import main
from shardwise.errors import CheckpointError

Files = dict[str, bytes | str | tuple[str, ...]]
"""Name -> content; a tuple is a link's target."""
MARKER = "ran"
MUTATIONS = 1_000_000 if os.environ.get("SHARDWISE_SOAK") else 3_000


# ---------------------------------------------------------------- pickles by hand


class Runs:
    """An instance of this, pickled, asks for a call."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


def call(module: str, name: str, *args: Any) -> bytes:
    """A pickle that calls a global, by opcodes: the global need not exist."""
    given = b"(" + b"".join(pickle.dumps(arg, 2)[2:-1] for arg in args) + b"t"
    return b"\x80\x02" + f"c{module}\n{name}\n".encode() + given + b"R."


def of_class(module: str, name: str, state: bytes) -> bytes:
    """Opcodes of an instance with a state."""
    return f"c{module}\n{name}\n".encode() + b")\x81" + state + b"b"


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def number(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def numbers(*values: int) -> bytes:
    return b"(" + b"".join(map(number, values)) + b"t"


def mapping(items: dict[bytes, bytes]) -> bytes:
    return b"}(" + b"".join(k + v for k, v in items.items()) + b"u"


def storage(numel: int, key: str = "0", kind: str = "FloatStorage") -> bytes:
    return b"(" + text("storage") + f"ctorch\n{kind}\n".encode() + text(key) + text("cpu") + number(numel) + b"tQ"


def tensor(
    shape: tuple[int, ...], stride: tuple[int, ...], *, offset: int = 0, held: bytes = storage(4), more: bytes = b""
) -> bytes:
    rest = number(offset) + numbers(*shape) + numbers(*stride) + b"\x89" + mapping({}) + more
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + held + rest + b"tR"


def state_dict(value: bytes) -> bytes:
    return b"\x80\x02" + mapping({text("w"): value}) + b"."


W = state_dict(tensor((4,), (1,)))


def zipped(
    pickled: bytes = W, data: dict[str, bytes] | None = None, *, packed: bool = False, more: Any = (), root: str = "a"
) -> bytes:
    """A file as torch.save writes it."""
    out = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(out, "w") as archive:
        warnings.simplefilter("ignore")  # a name twice
        archive.writestr(f"{root}/data.pkl", pickled, zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED)
        for key, content in ({"0": bytes(16)} if data is None else data).items():
            archive.writestr(f"{root}/data/{key}", content)
        for info, content in more:
            archive.writestr(info, content)
    return out.getvalue()


def link() -> zipfile.ZipInfo:
    info = zipfile.ZipInfo("a/data/1")
    info.external_attr = 0o120777 << 16
    return info


def patched(data: bytes, old: bytes, new: bytes, last: bool = True) -> bytes:
    at = data.rindex(old) if last else data.index(old)
    return data[:at] + new + data[at + len(new) :]


def deep(opening: bytes, closing: bytes, depth: int) -> bytes:
    return b"\x80\x02" + mapping({text("w"): opening * depth + b"N" + closing * depth}) + b"."


def laughs(levels: int) -> bytes:
    """Lists of ten times the list before."""
    body = b"](K\x01K\x02eq\x000"
    for level in range(levels):
        body += b"](" + (b"h" + bytes([level])) * 10 + b"eq" + bytes([level + 1]) + b"0"
    return b"\x80\x02" + mapping({text("w"): body + b"h" + bytes([levels])}) + b"."


def metadata(
    *, file: str = "__0_0.distcp", start: int = 0, offsets: Any = (0,), sizes: Any = (4,), count: int = 1000,
    names: tuple[str, ...] = ("w",),
) -> bytes:  # fmt: skip
    """DCP's `.metadata` of a tensor of four elements; under several names, all at one place of what was saved."""
    where = "torch.distributed.checkpoint.metadata"
    dtype = b"ctorch\nfloat32\n"
    properties = of_class(where, "TensorProperties", b"(" + dtype + b"NNNNt")
    chunk = of_class(
        where, "ChunkStorageMetadata", mapping({text("offsets"): numbers(*offsets), text("sizes"): numbers(*sizes)})
    )
    kind = of_class(where, "TensorStorageMetadata", mapping(
        {text("properties"): properties, text("size"): numbers(4), text("chunks"): b"](" + chunk + b"e"}
    ))  # fmt: skip
    index = [
        of_class(where, "MetadataIndex", mapping({text("fqn"): text(name), text("offset"): numbers(*offsets)}))
        for name in names
    ]
    info = of_class("torch.distributed.checkpoint.filesystem", "_StorageInfo", mapping(
        {text("relative_path"): text(file), text("offset"): number(start), text("length"): number(count)}
    ))  # fmt: skip
    whole = mapping(
        {
            text("state_dict_metadata"): mapping(dict.fromkeys(map(text, names), kind)),
            text("storage_data"): mapping(dict.fromkeys(index, info)),
            text("planner_data"): mapping({text(name): b"(" + text("model") + text("w") + b"t" for name in names}),
        }
    )
    return b"\x80\x02" + of_class(where, "Metadata", whole) + b"."


def header(table: Any, data: bytes = bytes(16)) -> bytes:
    body = table.encode() if isinstance(table, str) else json.dumps(table).encode()
    return len(body).to_bytes(8, "little") + body + data


def entry(*offsets: int, shape: tuple[int, ...] = (4,), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


# ---------------------------------------------------------------- the artefacts

TEN_TB = 10 * 10**12
GLOBALS: list[tuple[str, str, tuple[Any, ...]]] = [
    ("os", "system", (f"touch {MARKER}",)), ("posix", "system", (f"touch {MARKER}",)),
    ("nt", "system", (f"touch {MARKER}",)), ("builtins", "eval", (f"open('{MARKER}', 'w')",)),
    ("builtins", "exec", (f"open('{MARKER}', 'w')",)), ("__builtin__", "eval", (f"open('{MARKER}', 'w')",)),
    ("builtins", "getattr", (1, "real")), ("builtins", "__import__", ("os",)), ("builtins", "open", (MARKER, "w")),
    ("subprocess", "Popen", (["touch", MARKER],)), ("importlib", "import_module", ("os",)),
    ("pickle", "loads", (b"N.",)), ("_pickle", "loads", (b"N.",)), ("marshal", "loads", (b"N",)),
    ("types", "FunctionType", ()), ("operator", "attrgetter", ("a",)), ("functools", "partial", (1,)),
    ("torch.storage", "_load_from_bytes", (b"N.",)), ("torch", "load", (MARKER,)), ("torch.hub", "load", ("a", "b")),
    ("torch._utils", "_rebuild_device_tensor_from_numpy", (1,)), ("shardwise.cli.main", "main", ()),
    ("collections", "OrderedDict.__class__", ()), ("torch", "os", ()), ("numpy", "load", (MARKER,)),
    ("webbrowser", "open", ("x",)), ("ctypes", "CDLL", ("x",)), ("runpy", "run_path", (MARKER,)),
    ("deepspeed", "initialize", ()), ("__main__", "Model", ()),
]  # fmt: skip

PICKLES: dict[str, bytes] = {
    **{f"{module}.{name}": call(module, name, *args) for module, name, args in GLOBALS},
    "a reduce of os.system": pickle.dumps({"w": Runs(os.system, f"touch {MARKER}")}, 4),
    "a reduce of eval": pickle.dumps({"w": Runs(eval, f"open('{MARKER}', 'w')")}, 2),
    "a text that rot13 hides": call("_codecs", "encode", "bf.flfgrz", "rot13"),
    "INST": b"(S'touch ran'\nios\nsystem\n.",
    "OBJ": b"(cos\nsystem\nS'touch ran'\no.",
    "EXT1": b"\x80\x02\x82\x01.",
    "a persistent id in text": b"Pos.system\n.",
    "a persistent id that is no storage": b"\x80\x02" + text("os") + b"Q.",
    "a storage of os.system": state_dict(
        tensor((4,), (1,), held=b"(" + text("storage") + b"cos\nsystem\n" + text("0") + text("cpu") + number(4) + b"tQ")
    ),
    "a buffer from elsewhere": b"\x80\x05\x97.",
    "no end": W[:-1],
    "cut in the middle": W[: len(W) // 2],
    "nothing": b"",
    "two values": b"\x80\x02NN.",
    "a memo that was never put": b"\x80\x02h\x07.",
    "a mark that was never set": b"\x80\x02t.",
    "a text of 10 TB": b"\x80\x04\x8d" + struct.pack("<Q", TEN_TB) + b"x.",
    "bytes of 10 TB": b"\x80\x04\x8e" + struct.pack("<Q", TEN_TB) + b"x.",
    "a number of 2 GB": b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b"x.",
    "a key that is a list": b"\x80\x02}](K\x01eK\x01s.",
    "a key that is a nested tuple": b"\x80\x02}" + b"(" * 3 + b"t" * 3 + b"K\x01s.",
    "items for a number": b"\x80\x02K\x01K\x02a.",
    "a call of a text": b"\x80\x02" + text("os.system") + b")R.",
    "lists 20,000 deep": deep(b"](", b"e", 20_000),
    "tuples 20,000 deep": deep(b"(", b"t", 20_000),
    "a list that holds itself": b"\x80\x02" + mapping({text("w"): b"]q\x00h\x00a"}) + b".",
    "a billion laughs": laughs(9),
    "a view that ends behind its storage": state_dict(tensor((5,), (1,))),
    "a view that starts behind its storage": state_dict(tensor((4,), (1,), offset=1)),
    "a stride that leaves its storage": state_dict(tensor((2, 2), (3, 2))),
    "a negative stride": state_dict(tensor((4,), (-1,), offset=3)),
    "a shape with too many dims": state_dict(tensor((1,) * 40, (1,) * 40)),
    "a shape and a stride of other lengths": state_dict(tensor((2, 2), (1,))),
    "a storage of 10 TB": state_dict(tensor((TEN_TB,), (1,), held=storage(TEN_TB))),
    "a storage of 2^80 elements": state_dict(tensor((4,), (1,), held=storage(2**80))),
    "one number 10 TB wide": state_dict(tensor((TEN_TB // 4,), (0,))),
    "a view of a negative": state_dict(tensor((4,), (1,), more=mapping({text("neg"): b"\x88"}))),
    "a view of a conjugate": state_dict(tensor(
        (2,), (1,), held=storage(2, kind="ComplexFloatStorage"), more=mapping({text("conj"): b"\x88"})
    )),
    "a storage that is not there": state_dict(tensor((4,), (1,), held=storage(4, key="../../etc/passwd"))),
    "a storage of no known type": state_dict(tensor((4,), (1,), held=storage(4, kind="QInt8Storage"))),
    "a complex128 storage": state_dict(tensor((1,), (1,), held=storage(1, kind="ComplexDoubleStorage"))),
    "a storage claimed with two sizes": b"\x80\x02" + mapping(
        {text("a"): tensor((4,), (1,)), text("b"): tensor((2,), (1,), held=storage(2))}
    ) + b".",
    "no state_dict": b"\x80\x02](K\x01K\x02e.",
    "a state_dict without tensors": b"\x80\x02" + mapping({text("w"): b"K\x01"}) + b".",
    "a name with a slash": b"\x80\x02" + mapping({text("../w"): tensor((4,), (1,))}) + b".",
    "a name that is empty": b"\x80\x02" + mapping({text(""): tensor((4,), (1,))}) + b".",
}  # fmt: skip

ZIPS: dict[str, bytes] = {
    "a packed pickle": zipped(packed=True),
    "a packed bomb": zipped(state_dict(b"N") + bytes(50_000_000), packed=True),
    "a storage that is short": zipped(data={"0": bytes(15)}),
    "a storage that is long": zipped(data={"0": bytes(17)}),
    "an absolute name": zipped(more=[("/etc/passwd", b"x")]),
    "a name above": zipped(more=[("a/../../x", b"x")]),
    "a name of Windows": zipped(more=[("a/c:\\x", b"x")]),
    "a link": zipped(more=[(link(), b"/etc/passwd")]),
    "a name twice": zipped(more=[("a/data/0", bytes(16))]),
    "two roots": zipped(more=[("b/data.pkl", W)]),
    "no pickle": zipped().replace(b"data.pkl", b"data.pkx"),
    "another zip in place of the pickle": zipped(zipped()),
    "a text with an escape that there is none of": zipped(b"S'\\)'\n."),
    "TorchScript": zipped(more=[("a/constants.pkl", b"N."), ("a/code/x.py", b"")]),
    "a big-endian machine": zipped(more=[("a/byteorder", b"big")]),
    "an encrypted record": patched(zipped(), b"PK\1\2\x14\x03\x14\0\0\0", b"PK\1\2\x14\x03\x14\0\1\0"),
    "a record whose bytes changed": zipped().replace(b"_rebuild_tensor_v2", b"_rebuild_tensor_v3"),
    "a cut directory": zipped()[:-30],
    "a cut file": zipped()[: len(zipped()) // 2],
    "a directory that is far away": patched(zipped(), b"PK\5\6", b"PK\5\6" + b"\0" * 12 + b"\xff\xff\xff\x7f"),
    "no zip and no pickle": b"GGUF" + bytes(100),
    "a pickle alone": pickle.dumps({"w": 1}, 2),
    "an old file that is cut": b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}",
    "an old file with os.system": b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19." + call("os", "system", f"touch {MARKER}"),
}
for _at in (1, 2):  # records that lie over each other, and one larger than the file
    _start = zipped().index(b"PK\1\2")
    _second = zipped().index(b"PK\1\2", _start + 4)
    ZIPS["records over each other" if _at == 1 else "a record of 2 GB"] = (
        zipped()[: _second + 42] + struct.pack("<I", 1) + zipped()[_second + 46 :]
        if _at == 1
        else zipped()[: _second + 20] + struct.pack("<II", 2**31, 2**31) + zipped()[_second + 28 :]
    )

DIRECTORIES: dict[str, Files] = {
    **{f".metadata: {name}": {".metadata": data} for name, data in {
        "os.system": call("os", "system", f"touch {MARKER}"), "no Metadata": b"\x80\x02}.", "cut": metadata()[:99],
        "a file above": metadata(file="../../etc/passwd"), "an absolute file": metadata(file="/etc/passwd"),
        "a file that is not there": metadata(), "a negative place": metadata(start=-1),
    }.items()},
    "a part that is a link": {".metadata": metadata(), "__0_0.distcp": ("/etc/passwd",)},
    "two parts at one place": {".metadata": metadata(names=("v", "w")), "__0_0.distcp": zipped(
        b"\x80\x02" + tensor((4,), (1,)) + b"."
    )},
    "a part of another shape": {".metadata": metadata(sizes=(4,)), "__0_0.distcp": zipped(
        b"\x80\x02" + tensor((2,), (1,)) + b"."
    )},
    "a part that lies outside": {".metadata": metadata(offsets=(2,), sizes=(4,)), "__0_0.distcp": zipped(
        b"\x80\x02" + tensor((4,), (1,)) + b"."
    )},
    "a part that lacks elements": {".metadata": metadata(sizes=(3,)), "__0_0.distcp": zipped(
        b"\x80\x02" + tensor((3,), (1,)) + b"."
    )},
    "a part behind the file": {".metadata": metadata(start=10**12), "__0_0.distcp": zipped()},
    "a part that runs code": {".metadata": metadata(), "__0_0.distcp": zipped(call("os", "system", "touch ran"))},
    "an index with a file above": {"model.safetensors.index.json": '{"weight_map": {"w": "../x.safetensors"}}'},
    "an index with a file that is a link": {
        "model.safetensors.index.json": '{"weight_map": {"w": "x.safetensors"}}', "x.safetensors": ("/etc/passwd",),
    },
    "an index that is no JSON": {"model.safetensors.index.json": "[" * 100_000},
    "an index of other tensors": {
        "model.safetensors.index.json": '{"weight_map": {"v": "x.safetensors"}}',
        "x.safetensors": header({"w": entry(0, 16)}),
    },
    "`latest` with a way up": {"latest": "../../etc"},
    "two files without an index": {"a.safetensors": header({}), "b.safetensors": header({})},
    "nothing that is known": {"readme.txt": "hello"},
    **{f"safetensors: {name}": {"x.safetensors": data} for name, data in {
        "a header of 10 TB": TEN_TB.to_bytes(8, "little") + b"{}", "a short file": b"abc",
        "parts over each other": header({"a": entry(0, 16), "b": entry(0, 16)}),
        "a hole": header({"a": entry(4, 20)}, bytes(20)), "a name twice": header('{"a": 1, "a": 2}'),
        "a tensor behind the file": header({"a": entry(0, 4 * TEN_TB, shape=(TEN_TB,))}),
        "bytes after the last tensor": header({"a": entry(0, 16)}, bytes(17)),
        "sizes that do not agree": header({"a": entry(0, 8)}, bytes(8)),
        "another type": header({"a": entry(0, 16, dtype="X")}),
        "a negative shape": header({"a": entry(0, 16, shape=(-4,))}),
        "JSON 100,000 deep": header("[" * 100_000), "a list": header("[]"),
    }.items()},
}  # fmt: skip

ARTEFACTS: dict[str, Files] = {
    **{f"pickle: {name}": {"x.pt": zipped(data)} for name, data in PICKLES.items()},
    **{f"file: {name}": {"x.pt": data} for name, data in ZIPS.items()},
    **DIRECTORIES,
}


def lay_out(files: Files, where: Path) -> Path:
    """Write an artefact; the path that a user would give."""
    for name, content in files.items():
        if isinstance(content, tuple):
            (where / name).symlink_to(content[0])
        else:
            (where / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return where / "x.pt" if "x.pt" in files else where


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader's own code in this process: 130 processes would take a minute."""

    def ask(module: str, request: dict[str, Any], descriptors: list[int], where: str) -> dict[str, Any]:
        assert module == "child"
        answer: dict[str, Any] = json.loads(json.dumps(answer_to(request["jobs"])))
        return answer

    monkeypatch.setattr(sandbox, "ask", ask)


def test_there_are_many() -> None:
    assert len(ARTEFACTS) >= 130


@pytest.mark.parametrize("name", ARTEFACTS)
def test_refused_by_name_and_nothing_runs(
    name: str, here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    monkeypatch.chdir(tmp_path)
    path = lay_out(ARTEFACTS[name], source)
    tracemalloc.start()
    with pytest.raises(CheckpointError) as caught:
        convert(path, tmp_path / "target", Options())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    said = str(caught.value)
    assert len(said) < 1500 and "Traceback" not in said
    assert str(source) in said or "convert: " in said
    assert "needed" in said or "no readable JSON" in said or "choose another" in said, said
    assert ";" in said or ": " in said
    assert peak < 256 * 2**20
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]  # nothing ran, nothing is left
    assert not (source / MARKER).exists()


def test_a_whole_file_of_these_parts_is_read(here: None, tmp_path: Path) -> None:
    """So what is refused above is refused for what is wrong with it."""
    (tmp_path / "x.pt").write_bytes(zipped())
    assert convert(tmp_path / "x.pt", tmp_path / "a", Options()).num_weights == 1
    source = tmp_path / "dcp"
    source.mkdir()
    lay_out({".metadata": metadata(), "__0_0.distcp": zipped(b"\x80\x02" + tensor((4,), (1,)) + b".")}, source)
    assert convert(source, tmp_path / "b", Options()).num_weights == 1
    (tmp_path / "x.safetensors").write_bytes(header({"w": entry(0, 16)}))
    assert convert(tmp_path / "x.safetensors", tmp_path / "c", Options()).num_weights == 1
    (tmp_path / "y.pt").write_bytes(zipped(state_dict(tensor((4,), (1,), more=mapping({})))))
    assert convert(tmp_path / "y.pt", tmp_path / "d", Options()).num_weights == 1


def test_weights_stay_in_the_order_of_the_header(tmp_path: Path) -> None:
    """Which need not be that of their bytes."""
    (tmp_path / "x.safetensors").write_bytes(header({"z": entry(16, 32), "a": entry(0, 16)}, bytes(32)))
    with OpenFiles() as files:
        found = read_safetensors(files, tmp_path / "x.safetensors").weights
    assert list(found) == ["z", "a"]


REAL = ("pickle: a reduce of os.system", "pickle: a text of 10 TB", "pickle: a billion laughs",
        "pickle: lists 20,000 deep", "file: an old file with os.system", ".metadata: os.system")  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_in_the_process_that_users_get(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    monkeypatch.chdir(tmp_path)
    path = lay_out(ARTEFACTS[name], source)
    with pytest.raises(SystemExit) as ended:
        main(["ckpt", "convert", str(path), "target"])
    assert ended.value.code == 4 and "needed" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


@pytest.mark.filterwarnings("ignore:invalid escape sequence:DeprecationWarning")  # as in the process that users get
def test_mutated_files_end_in_a_refusal_or_in_values(tmp_path: Path) -> None:
    seeds = [("torch", zipped()), ("pickle", metadata()), ("pickle", W), ("pickle", laughs(2))]
    draw, refused = random.Random(7), 0
    with (tmp_path / "x").open("w+b") as file:
        for _ in range(MUTATIONS):
            kind, data = draw.choice(seeds)
            file.seek(0)
            file.truncate()
            file.write(mutated(data, draw))
            file.flush()
            try:
                answer = answer_to([{"file": file.fileno(), "kind": kind, "start": 0, "count": len(data) + 100}])
            except MemoryError:  # the process that users get says so
                answer = {"refused": ["memory"]}
            refused += "refused" in json.loads(json.dumps(answer))
    assert 0.5 * MUTATIONS < refused < MUTATIONS


def mutated(data: bytes, draw: random.Random) -> bytes:
    found = bytearray(data)
    for _ in range(draw.randrange(1, 5)):
        at = draw.randrange(len(found))
        kind = draw.randrange(5)
        if kind == 0:
            found[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            found[at] = draw.randrange(256)
        elif kind == 2:
            del found[at : at + draw.randrange(1, 30)]
        elif kind == 3:
            found[at:at] = found[draw.randrange(len(found)) :][: draw.randrange(1, 40)]
        else:
            found[at : at + 4] = draw.choice((b"\xff" * 4, bytes(4), b"\xff\xff\xff\x7f"))
        found = found or bytearray(b"x")
    return bytes(found)


TRIES = """
import sys; sys.path.insert(0, sys.argv[1])
import os, socket
from shardwise.checkpoint.foreign.child import limit
limit(2)
held = []
def refused(act):
    try:
        act()
    except (OSError, MemoryError):
        return True
    return False
print(refused(lambda: open("/etc/passwd")), refused(lambda: open("ran", "w")), refused(lambda: socket.socket()),
      refused(lambda: bytearray(4 * 2**30)), refused(lambda: os.pipe()))
"""


def test_the_reader_can_open_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-c", TRIES, sandbox._ROOT], capture_output=True, text=True, cwd=tmp_path, timeout=60
    )
    assert done.stdout.split() == ["True"] * 5, done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("answer", ["", "[]", "{", '{"values": []}x'])
def test_a_reader_that_answers_nonsense_is_an_error(
    answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.pt").write_bytes(zipped())
    monkeypatch.setattr(
        sandbox, "_START", f"import sys; sys.stdin.read(); print(bytes({list(answer.encode())}).decode()) # {{}}"
    )
    with pytest.raises(CheckpointError, match="what ends the process that reads it"):
        convert(tmp_path / "x.pt", tmp_path / "target", Options())


def test_a_reader_that_is_killed_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.pt").write_bytes(zipped())
    monkeypatch.setattr(sandbox, "_START", "import os; os.kill(os.getpid(), 9) # {}")
    with pytest.raises(CheckpointError, match=r"ends the process that reads it \(it was killed: by the kernel, where"):
        convert(tmp_path / "x.pt", tmp_path / "target", Options())
