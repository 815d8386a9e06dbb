"""`Manifest`: what a checkpoint holds, as a JSON file beside its data. A directory without one is no checkpoint.

It is written last and ends with the SHA-256 of all before it, so a manifest that is read is the one that was written.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from shardwise.checkpoint.files import LOCAL, Files, read_whole
from shardwise.checkpoint.format import (
    DTYPES,
    MAX_ELEMENTS,
    Box,
    DamagedError,
    Fields,
    Piece,
    check_name,
    json_of,
    parse_json,
    uncollected,
)
from shardwise.checkpoint.format import whole as whole_box
from shardwise.checkpoint.shardfile import FileEntry, Identity, file_name
from shardwise.errors import CheckpointError

SCHEMA = 2
FILE = "manifest.json"
MAX_BYTES = 2**30
MAX_FILE = 2**40
"""Bytes of one rank's file: its table of digests, at most 1/8192 of it, is held in memory."""
MAX_CUTS = 6
"""Dims along which one tensor is divided: a mesh has fewer axes."""
FORMAT = "shardwise-checkpoint"
NOT_FINITE = "not_finite"
"""Among the scalars, of a state without updates for what is not finite: a weight of which this is true."""
_TAIL = re.compile(rb',"sha256":"([0-9a-f]{64})"}\n')
_TAIL_BYTES = 78
_KEYS = (
    "format", "schema", "run", "save", "step", "sequence", "created", "plan", "plan_fields", "mesh", "world", "device",
    "versions", "config", "scalars", "metric", "probe", "files", "tensors", "sha256",
)  # fmt: skip


@dataclass(frozen=True)
class TensorEntry:
    """Global shape, type (`float32`), checksum (see `checksum.py`) and stored parts of one tensor."""

    shape: tuple[int, ...]
    dtype: str
    checksum: int
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        """Of the whole tensor."""
        return whole_box(self.shape).num_elements * DTYPES[self.dtype].size


@dataclass(frozen=True)
class ProbeResult:
    """Loss and gradient norm of a probe's rows at the saved state, and a digest of what it was taken on."""

    loss: float
    grad_norm: float
    rows: str
    """64 hexadecimal digits."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint holds: written last, so that a checkpoint that has one is whole.

    `sequence` counts the saves into a store and orders its checkpoints, also after a return to an older step.
    """

    run: str
    save: str
    step: int
    sequence: int
    created: str
    """UTC, ISO 8601."""
    plan: str
    plan_fields: Mapping[str, Any]
    mesh: Mapping[str, int]
    world: int
    device: str
    versions: Mapping[str, str]
    config: Mapping[str, Any]
    """The run's resolved configuration; empty where the program gave none."""
    scalars: Mapping[str, Any]
    metric: float | None
    """What `best` retention compares; smaller is better."""
    probe: ProbeResult | None
    files: tuple[FileEntry, ...]
    tensors: Mapping[str, TensorEntry]

    def identity(self, file: int) -> Identity:
        """What the header of a file must say."""
        return Identity(run=self.run, save=self.save, step=self.step, rank=file)

    def check_finite(self, checkpoint: Path) -> None:
        """No step of the run was left out, when it was saved, for what is in the weights themselves.

        Raises:
            DamagedError: one was: so would be every step that goes on from here.
        """
        if name := self.scalars.get(NOT_FINITE):
            raise DamagedError(
                f"{checkpoint}: the weight {name} holds NaN or infinity, with which no loss is finite; go on from a "
                "checkpoint before it (or load this one by its own path, to look at it)"
            )

    def check_place(self, checkpoint: Path, step: int, run: str | None) -> None:
        """It is where its save put it: in a store of its run, under the name of its step.

        Raises:
            DamagedError: it was renamed or copied. `step` is that of the name, `run` that of the store if it says one.
        """
        if self.step != step:
            raise DamagedError(
                f"{checkpoint}: holds step {self.step}, needed step {step} as its name says: it was renamed or copied; "
                f"give it the name step-{self.step:08d}, or take it out of the store"
            )
        if run not in (None, self.run):
            raise DamagedError(
                f"{checkpoint}: is of the run {self.run}, needed one of {run} as store.json says: it was copied from "
                "another store; take it out of this one, and let a run begin with it by its own path (--resume)"
            )

    def encode(self) -> bytes:
        """The file's bytes."""
        plain = {key: getattr(self, key) for key in _KEYS if key not in ("format", "schema", "tensors", "sha256")}
        data = {"format": FORMAT, "schema": SCHEMA} | plain
        data["probe"] = asdict(self.probe) if self.probe is not None else None
        data["files"] = [asdict(entry) for entry in self.files]
        data["tensors"] = {name: _tensor_json(entry) for name, entry in self.tensors.items()}
        body = json_of(data).encode()[:-1]
        return body + b',"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'

    @classmethod
    def read(cls, directory: Path, files: Files = LOCAL) -> Manifest:
        """Read `manifest.json` and check it whole.

        Raises:
            DamagedError: missing, torn, changed, or a field of it cannot be.
            CheckpointError: written by another version's schema.
        """
        path = directory / FILE
        try:
            data = read_whole(files, path, MAX_BYTES)
        except OSError as error:
            raise DamagedError(
                f"{path}: no readable manifest ({error.strerror}); this is no complete checkpoint of a store: "
                f"{_instead_of(directory, files)}"
            ) from error
        return cls.decode(data, str(path))

    @classmethod
    @uncollected()
    def decode(cls, data: bytes, where: str) -> Manifest:
        """A manifest's bytes, checked.

        Raises:
            DamagedError, CheckpointError: as `read`.
        """
        tail = _TAIL.fullmatch(data[-_TAIL_BYTES:])
        agrees = tail is not None and hashlib.sha256(data[:-_TAIL_BYTES]).hexdigest().encode() == tail[1]
        fields = Fields(parse_json(data, where), where)
        if fields.data.get("schema") == 1 and "scalars" in fields.data and "sha256" not in fields.data:
            raise CheckpointError(
                f"{where}: schema 1, written through torch.distributed.checkpoint by a version that was never "
                f"released; this version reads {SCHEMA}; train again, or load it with the version that wrote it"
            )
        if agrees and fields.data.get("format") == FORMAT and fields.count("schema") > SCHEMA:
            raise CheckpointError(
                f"{where}: schema {fields.data['schema']}, this version reads up to {SCHEMA}; update shardwise"
            )
        if not agrees:
            raise DamagedError(
                f"{where}: its SHA-256 is not that of its content: torn or changed after it was written; choose "
                "another checkpoint"
            )
        return _checked(fields)


def _checked(fields: Fields) -> Manifest:
    fields.only(_KEYS)
    if fields.text("format") != FORMAT or fields.count("schema") != SCHEMA:
        raise fields.wrong("format, schema", (fields.text("format"), fields.data["schema"]), f"{FORMAT}, {SCHEMA}")
    entries = tuple(_file(fields, i, item) for i, item in enumerate(fields.sequence("files")))
    tensors = {
        _name(fields, name): _tensor(Fields(item, f"{fields.where}: {name}"), len(entries))
        for name, item in fields.mapping("tensors").items()
    }
    mesh, step, scalars = fields.free("mesh"), fields.count("step"), fields.free("scalars")
    if scalars.get("step") != step:
        raise fields.wrong("scalars: step", scalars.get("step"), f"{step}, the step of the checkpoint")
    if not all(type(size) is int and size > 0 for size in mesh.values()):
        raise fields.wrong("mesh", mesh, "sizes of axes")
    return Manifest(
        run=fields.hex("run", 32),
        save=fields.hex("save", 32),
        step=step,
        sequence=fields.count("sequence"),
        created=fields.text("created", most=64),
        plan=fields.text("plan"),
        plan_fields=fields.free("plan_fields"),
        mesh=mesh,
        world=fields.count("world"),
        device=fields.text("device", most=64),
        versions=fields.free("versions"),
        config=fields.free("config"),
        scalars=scalars,
        metric=fields.number("metric"),
        probe=_probe(fields),
        files=entries,
        tensors=tensors,
    )


def _name(fields: Fields, name: str) -> str:
    try:
        return check_name(name, fields.where)
    except CheckpointError as error:
        raise DamagedError(str(error)) from None


def _file(fields: Fields, index: int, item: object) -> FileEntry:
    inner = Fields(item, f"{fields.where}: files[{index}]")
    inner.only(("name", "size_bytes", "seal"))
    if inner.text("name", most=64) != file_name(index):
        raise inner.wrong("name", inner.data["name"], file_name(index))
    return FileEntry(file_name(index), inner.count("size_bytes", most=MAX_FILE), inner.hex("seal", 64))


def _probe(fields: Fields) -> ProbeResult | None:
    if fields.data.get("probe") is None:
        return None
    inner = Fields(fields.data["probe"], f"{fields.where}: probe")
    inner.only(("loss", "grad_norm", "rows"))
    loss, norm = inner.number("loss"), inner.number("grad_norm")
    if loss is None or norm is None:
        raise inner.wrong("loss, grad_norm", (loss, norm), "numbers")
    return ProbeResult(loss, norm, inner.hex("rows", 64))


def _instead_of(directory: Path, files: Files) -> str:
    """What to give in place of a directory that has no manifest."""
    with suppress(OSError, CheckpointError):
        if files.is_directory(store := directory / "checkpoints"):
            return f"of a run give the store, {store}"
    if directory.name.startswith("step-"):
        return "choose another"
    return "choose another (of files of another library `shardwise ckpt convert` makes one)"


def _tensor_json(entry: TensorEntry) -> dict[str, Any]:
    pieces = [[p.file, list(p.box.offsets), list(p.box.sizes), p.start] for p in entry.pieces]
    return {"dtype": entry.dtype, "shape": list(entry.shape), "checksum": f"{entry.checksum:016x}", "pieces": pieces}


def _tensor(fields: Fields, num_files: int) -> TensorEntry:
    """One tensor's entry; its parts must lie inside it, apart from each other, and make it up."""
    fields.only(("dtype", "shape", "checksum", "pieces"))
    dtype, shape = fields.text("dtype", most=32), fields.counts("shape")
    if dtype not in DTYPES:
        raise fields.wrong("dtype", dtype, f"one of {', '.join(DTYPES)}")
    if math.prod(max(1, n) for n in shape) > MAX_ELEMENTS:
        raise fields.wrong("shape", shape, "at most 2^56 elements")
    pieces = []
    for item in fields.sequence("pieces"):
        if not isinstance(item, list) or len(item) != 4:
            raise fields.wrong("pieces", item, "[file, offsets, sizes, start]")
        file, offsets, sizes, start = item
        if type(file) is not int or not 0 <= file < num_files or type(start) is not int or not 0 <= start < 2**62:
            raise fields.wrong("pieces", item, f"a file from 0 to {num_files - 1} and a start")
        box = Box(fields.as_counts("offsets", offsets), fields.as_counts("sizes", sizes))
        if not (len(box.offsets) == len(box.sizes) == len(shape)) or any(
            n < 1 or a + n > most for a, n, most in zip(box.offsets, box.sizes, shape, strict=True)
        ):
            raise fields.wrong("pieces", item, f"a box inside {shape}")
        pieces.append(Piece(file, box, start))
    _check_tiles(fields, shape, [piece.box for piece in pieces])
    return TensorEntry(shape, dtype, int(fields.hex("checksum", 16), 16), tuple(pieces))


def _check_tiles(fields: Fields, shape: tuple[int, ...], boxes: list[Box]) -> None:
    """The boxes make up the tensor, each element once.

    The indicator of a box is the sum of its corners, each with the sign of how many of its coordinates are upper ones,
    and no other function is. So boxes make up the whole exactly when their signed corners add up to its own: linear
    in the number of boxes, however they lie.
    """
    total, needed = sum(box.num_elements for box in boxes), whole_box(shape).num_elements
    if total != needed:
        raise fields.wrong("pieces", f"{total} elements", f"the {needed} of shape {shape}")
    if not total or boxes == [whole_box(shape)]:
        return
    cut = [dim for dim, n in enumerate(shape) if any(box.sizes[dim] != n for box in boxes)]
    if len(cut) > MAX_CUTS:
        raise fields.wrong("pieces", f"a tensor divided along {len(cut)} dims", f"at most {MAX_CUTS}")
    corners: Counter[tuple[int, ...]] = Counter()
    for upper in product((0, 1), repeat=len(cut)):
        sign = -1 if sum(upper) % 2 else 1
        corners[tuple(shape[dim] * up for dim, up in zip(cut, upper, strict=True))] -= sign
        for box in boxes:
            at = tuple(box.offsets[dim] + box.sizes[dim] * up for dim, up in zip(cut, upper, strict=True))
            corners[at] += sign
    if any(corners.values()):
        odd = min(corner for corner, count in corners.items() if count)
        raise fields.wrong("pieces", f"a hole or an overlap at {odd} of dims {cut}", "parts that make up the tensor")
