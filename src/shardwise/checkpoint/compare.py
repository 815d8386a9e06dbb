"""What a checkpoint holds, whether it is whole, and how two differ: by streaming, without torch and without a mesh."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from shardwise.checkpoint.directory import MARKER, Skipped
from shardwise.checkpoint.files import LOCAL, Files, read_whole
from shardwise.checkpoint.format import DTYPES, DamagedError, Fields, cut, parse_json, whole
from shardwise.checkpoint.manifest import FILE, Manifest
from shardwise.checkpoint.objects import directory_of
from shardwise.checkpoint.reading import SLAB_BYTES, Reader
from shardwise.checkpoint.remote import RemotePath, files_for, located
from shardwise.errors import CheckpointError

RECORD = "config.json"
"""Of a run, in its directory: its settings say where its checkpoints are kept."""
_RECORD_BYTES = 2**20


class Found(NamedTuple):
    """The checkpoint that a path means, and others whose manifest cannot be read: so nobody knows if they are newer."""

    path: Path
    damaged: tuple[Skipped, ...]
    files: Files

    def manifest(self) -> Manifest:
        """Of the checkpoint.

        Raises:
            CheckpointError: as `reader`.
        """
        with self.reader() as reader:
            return reader.manifest

    @contextmanager
    def reader(self) -> Iterator[Reader]:
        """Of the checkpoint.

        Raises:
            DamagedError: see `Reader`.
            CheckpointError: it went while it was read.
        """
        try:
            with Reader(self.path, files=self.files) as reader:
                yield reader
        except DamagedError as error:
            if self.files.is_file(self.path / FILE):
                raise
            raise CheckpointError(
                f"{self.path}: it was removed while it was read, as a run that saves there does with all but the "
                "newest; try again, or have it keep more (train.keep)"
            ) from error


def find(path: str | os.PathLike[str]) -> Found:
    """A checkpoint itself, or the newest of a store or of a run's directory; at a path or a URL.

    Raises:
        CheckpointError: there is none.
    """
    place = place_of(path)
    files = files_for(place)
    if files.is_file(place / FILE):
        return Found(place, (), files)
    listing = directory_of(place, files).listing()
    if not listing.complete:
        reasons = "; ".join(item.reason for item in listing.damaged) or "it is empty"
        raise CheckpointError(f"{place}: found no whole checkpoint: {reasons}; give another path")
    return Found(listing.complete[0][0], listing.damaged, files)


def place_of(path: str | os.PathLike[str]) -> Path:
    """The checkpoint, or the store, that a path or a URL stands for: itself, or that of a run's directory.

    A run's is where its record says, else in the directory itself.

    Raises:
        CheckpointError: neither is there, or the place that the record names cannot be looked at.
    """
    path = located(path)
    files = files_for(path)
    if files.is_file(path / FILE):
        return path
    if (elsewhere := kept_elsewhere(path)) is not None:
        return elsewhere
    for place in (path / "checkpoints", path):
        if directory_of(place, files).is_store():
            return place
    named = _recorded(path)
    also = f", nor a store at {named}, which its {RECORD} names" if named is not None else ""
    raise CheckpointError(
        f"{path}: found no checkpoint, store or run there{also}; needed a directory with {FILE}, {MARKER} or "
        "checkpoints/; give another path"
    )


def kept_elsewhere(path: str | os.PathLike[str]) -> Path | None:
    """The store that the record of a run's directory names (`--checkpoints`); None: it names none, or none is there.

    The record is data alone: it is read as a checkpoint's files are (no link, no more than 1 MiB), and only a store is
    taken from it, never another run.

    Raises:
        CheckpointError: the place cannot be looked at: a server that does not answer, a URL that is none.
    """
    run = located(path)
    place = _recorded(run)
    try:
        return place if place is not None and directory_of(place, files_for(place)).is_store() else None
    except (OSError, CheckpointError) as error:
        raise CheckpointError(
            f"{run / RECORD} names {place} as the place of the checkpoints, which cannot be looked at: {error}; give "
            "the path of a checkpoint, or of the directory that holds them"
        ) from error


def _recorded(run: Path) -> Path | None:
    """What the record says, if there is one that can be read.

    A relative path is one from the directory in which the run was started. That is the run's own without its `--out`,
    where this was relative too, and still is its name; else, as for a new start, that of this process.
    """
    if isinstance(run, RemotePath):  # a run's directory lies on a disk; this is a copy, or none
        return None
    where = str(run / RECORD)
    try:
        settings = Fields(parse_json(read_whole(LOCAL, run / RECORD, _RECORD_BYTES), where).get("settings"), where)
        train = Fields(settings.data.get("train"), where)
        place, out = train.text("checkpoints"), Path(train.text("out"))
    except (OSError, DamagedError):
        return None
    named, here = located(place), Path(os.path.abspath(run))
    if isinstance(named, RemotePath) or ".." in out.parts or here.parts[-len(out.parts) :] != out.parts:
        return named
    return Path(*here.parts[: -len(out.parts)]) / named


def inspect(path: Path) -> dict[str, Any]:
    """What a checkpoint holds, as JSON: everything of its manifest, with the tensors' sizes; and what was skipped.

    Raises:
        CheckpointError: there is none.
    """
    found = find(path)
    manifest = found.manifest()
    keys = ("step", "sequence", "created", "run", "plan", "mesh", "world", "device", "versions", "metric", "scalars")
    tensors = {
        name: {"dtype": t.dtype, "shape": list(t.shape), "bytes": t.num_bytes, "checksum": f"{t.checksum:016x}"}
        for name, t in manifest.tensors.items()
    }
    return {
        "path": str(found.path),
        "skipped": [{"path": str(item.path), "reason": item.reason} for item in found.damaged],
        **{key: getattr(manifest, key) for key in keys},
        "probe": asdict(manifest.probe) if manifest.probe is not None else None,
        "bytes": sum(entry.size_bytes for entry in manifest.files),
        "files": [{"name": entry.name, "bytes": entry.size_bytes} for entry in manifest.files],
        "tensors": tensors,
        "config": manifest.config,
    }


@dataclass(frozen=True)
class Verified:
    """A checkpoint in which every bit was checked."""

    path: Path
    step: int
    num_tensors: int
    num_files: int
    size_bytes: int
    seconds: float


def verify(path: Path) -> Verified:
    """Check every bit of a checkpoint, and that no newer one of its store is damaged.

    Cost: reads all of it once; memory of a few MiB and the largest header.

    Raises:
        DamagedError: naming file, tensor and offset.
        CheckpointError: there is none, or a manifest beside it cannot be read.
    """
    start = time.perf_counter()
    found = find(path)
    with found.reader() as reader:
        size = reader.verify()
        manifest = reader.manifest
    if found.damaged:
        reasons = "; ".join(item.reason for item in found.damaged)
        raise CheckpointError(f"{reasons}; {found.path} is whole")
    counts = len(manifest.tensors), len(manifest.files)
    return Verified(found.path, manifest.step, *counts, size, time.perf_counter() - start)


class Difference(NamedTuple):
    """How a tensor differs between two checkpoints."""

    name: str
    kind: Literal["only in the first", "only in the second", "shape", "type", "values"]
    detail: str


def diff(first: Path, second: Path) -> list[Difference]:
    """Tensors that are not the same in two checkpoints, bit by bit, whatever the plans; none: all are.

    Cost: reads the tensors of equal shape and type of both; memory of a few MiB.

    Raises:
        CheckpointError: one is damaged, or there is none.
    """
    return diff_found(find(first), find(second))


def diff_found(first: Found, second: Found) -> list[Difference]:
    """As `diff`, of checkpoints that were found."""
    with first.reader() as a, second.reader() as b:
        ours, theirs = a.manifest.tensors, b.manifest.tensors
        found = [Difference(name, "only in the first", "") for name in ours if name not in theirs]
        found += [Difference(name, "only in the second", "") for name in theirs if name not in ours]
        for name in ours:
            if name not in theirs:
                continue
            if ours[name].shape != theirs[name].shape:
                found.append(Difference(name, "shape", f"{ours[name].shape} and {theirs[name].shape}"))
            elif ours[name].dtype != theirs[name].dtype:
                found.append(Difference(name, "type", f"{ours[name].dtype} and {theirs[name].dtype}"))
            elif count := _differing(a, b, name):
                total = whole(ours[name].shape).num_elements
                found.append(Difference(name, "values", f"{count} of {total} elements"))
    return found


def _differing(a: Reader, b: Reader, name: str) -> int:
    """Elements whose bits differ."""
    entry = a.manifest.tensors[name]
    size, count = DTYPES[entry.dtype].size, 0
    for box in cut(whole(entry.shape), SLAB_BYTES // size):
        both = [np.empty(box.sizes, dtype=f"u{size}") for _ in range(2)]
        a.read(name, box, both[0])
        b.read(name, box, both[1])
        count += int(np.count_nonzero(both[0] != both[1]))
    return count
