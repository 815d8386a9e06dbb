"""A store's directory, as one process sees it: names, atomic commit, pointer, pruning. Rank 0 alone writes here.

store.json                        says that this directory is a store
latest                            name of the newest checkpoint
step-00000500/                    a complete checkpoint: manifest.json and data files
step-00000600.partial-1f2e3d4c/   a save that is going on, or that crashed: never read, removed by the next save
step-00000500.old-5a6b7c8d/       the checkpoint that a second save of the same step is about to replace
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardwise.checkpoint.manifest import DamagedError, Manifest
from shardwise.errors import CheckpointError

MARKER = "store.json"
POINTER = "latest"
_NAME = re.compile(r"step-(\d{8,})(?:\.(partial|old)-[0-9a-f]{8})?")
_FOREIGN = (".metadata", "*.distcp", "*.safetensors", "*.pt", "*.pth", "*.ckpt", "pytorch_model*")


@dataclass(frozen=True)
class Skipped:
    """A checkpoint that cannot be used, and why."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Listing:
    """Complete checkpoints, newest first, and those whose manifest cannot be read."""

    complete: tuple[tuple[Path, Manifest], ...]
    damaged: tuple[Skipped, ...]


def check_is_store(path: Path) -> None:
    """Refuse a path that exists and is no store: a file, or a directory with other programs' checkpoints.

    Raises:
        CheckpointError: saying what is there.
    """
    if not path.exists():
        return
    if not path.is_dir():
        raise CheckpointError(f"store {path}: it is a file; a store is a directory: choose another path")
    if (path / MARKER).is_file():
        return
    foreign = [entry.name for pattern in _FOREIGN for entry in path.glob(pattern)]
    foreign += [entry.name for _, kind, entry in _entries(path) if kind == ""]
    if foreign:
        raise CheckpointError(
            f"store {path}: it holds {foreign[0]!r} but no {MARKER}, so it is not a store of this library; "
            "choose an empty or new directory"
        )


def begin(path: Path, step: int) -> Path:
    """Make the store if needed, clear what crashed saves left, and make the directory of a new save.

    Raises:
        CheckpointError: no store, or not writable.
    """
    check_is_store(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not (path / MARKER).exists():
            replace_text(path / MARKER, json.dumps({"format": "shardwise-store", "schema": 1}) + "\n")
        clean(path)
        partial = path / f"{name_of(step)}.partial-{uuid.uuid4().hex[:8]}"
        partial.mkdir()
    except OSError as error:
        raise CheckpointError(
            f"store {path}: cannot write ({error.strerror or error}: {error.filename}); "
            "make it writable or choose another path"
        ) from error
    return partial


def clean(path: Path) -> None:
    """Remove what crashed saves left; put back a checkpoint whose replacement did not arrive."""
    for step, kind, entry in _entries(path):
        if kind == "partial" or (kind == "old" and (path / name_of(step)).exists()):
            shutil.rmtree(entry)
        elif kind == "old":
            entry.rename(path / name_of(step))


def commit(partial: Path, step: int) -> Path:
    """Give a written directory its final name, in one rename, and point `latest` at it."""
    path = partial.parent
    final, old = path / name_of(step), None
    sync_directory(partial)
    if final.exists():
        old = path / f"{name_of(step)}.old-{uuid.uuid4().hex[:8]}"
        final.rename(old)
    partial.rename(final)
    sync_directory(path)
    replace_text(path / POINTER, final.name + "\n")
    if old is not None:
        shutil.rmtree(old)
    return final


def prune(path: Path, keep: int) -> None:
    """Remove all complete checkpoints but the `keep` newest; damaged ones are left for people to look at."""
    for directory, _ in listing(path).complete[keep:]:
        # renamed first: a crash in the middle of a removal must not leave half a checkpoint under a good name
        doomed = directory.rename(path / f"{directory.name}.partial-{uuid.uuid4().hex[:8]}")
        shutil.rmtree(doomed)


def listing(path: Path) -> Listing:
    """What a store holds, ordered by save (not by step: a run may have gone back).

    Raises:
        CheckpointError: the path is no store.
    """
    check_is_store(path)
    complete: list[tuple[Path, Manifest]] = []
    damaged: list[Skipped] = []
    for step, kind, entry in _entries(path):
        if kind == "partial" or (kind == "old" and (path / name_of(step)).exists()):
            continue
        try:
            complete.append((entry, Manifest.read(entry)))
        except DamagedError as error:
            damaged.append(Skipped(entry, str(error)))
    complete.sort(key=lambda pair: pair[1].sequence, reverse=True)
    return Listing(tuple(complete), tuple(damaged))


def name_of(step: int) -> str:
    """`step-00000500`."""
    return f"step-{step:08d}"


def replace_text(path: Path, text: str) -> None:
    """Replace a small file in one rename, flushed to the disk."""
    fresh = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    with fresh.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Flush a directory's entries to the disk: without it a rename may be lost with the power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _entries(path: Path) -> Iterator[tuple[int, str, Path]]:
    """(step, "" or "partial" or "old", path) of every directory that a save made."""
    if not path.is_dir():
        return
    for entry in sorted(path.iterdir()):
        match = _NAME.fullmatch(entry.name)
        if match and entry.is_dir():
            yield int(match[1]), match[2] or "", entry
