"""`Manifest`: what a checkpoint holds, as a JSON file beside its data. A directory without one is no checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from shardwise.errors import CheckpointError

SCHEMA = 1
FILE = "manifest.json"


class DamagedError(CheckpointError):
    """A checkpoint whose files are missing, truncated or changed: an older one may still be whole."""


@dataclass(frozen=True)
class TensorEntry:
    """Global shape and type (`float32`) of one tensor."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and SHA-256 of one data file."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint holds: written last, so that a checkpoint that has one is whole.

    `sequence` counts the saves into a store and orders its checkpoints, also after a return to an older step.
    """

    step: int
    sequence: int
    created: str
    """UTC, ISO 8601."""
    plan: str
    plan_fields: Mapping[str, Any]
    mesh: Mapping[str, int]
    world: int
    versions: Mapping[str, str]
    scalars: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]
    files: Mapping[str, FileEntry]
    schema: int = SCHEMA

    def write(self, directory: Path) -> None:
        """Write and flush `manifest.json`."""
        text = json.dumps(asdict(self), indent=1, allow_nan=True)
        with (directory / FILE).open("w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Read `manifest.json` and check that it is one.

        Raises:
            DamagedError: missing, truncated, or a field of it is.
            CheckpointError: written by a later schema.
        """
        path = directory / FILE
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            schema = data["schema"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DamagedError(
                f"{path}: no readable manifest ({type(error).__name__}: {error}); this is no complete checkpoint of a "
                "store: choose another"
            ) from error
        if schema != SCHEMA:
            raise CheckpointError(f"{path}: schema {schema!r}, this version reads {SCHEMA}; update shardwise")
        try:
            data["tensors"] = {n: TensorEntry(tuple(t["shape"]), t["dtype"]) for n, t in data["tensors"].items()}
            data["files"] = {n: FileEntry(f["size_bytes"], f["sha256"]) for n, f in data["files"].items()}
            return cls(**{field.name: data[field.name] for field in fields(cls)})
        except (KeyError, TypeError, AttributeError) as error:
            raise DamagedError(f"{path}: the manifest lacks or mangles {error}; choose another checkpoint") from error

    def check_files(self, directory: Path, names: list[str]) -> None:
        """Compare size and SHA-256 of some of the files with what was written.

        Cost: reads them, about 1 GB/s and core.

        Raises:
            DamagedError: naming the first file that is missing, truncated or changed.
        """
        for name in names:
            entry, path = self.files[name], directory / name
            try:
                size = path.stat().st_size
                if size != entry.size_bytes:
                    raise DamagedError(
                        f"{path}: {size} bytes, the manifest says {entry.size_bytes}: truncated or changed; "
                        "choose another checkpoint"
                    )
                found = file_entry(path)
            except OSError as error:
                raise DamagedError(
                    f"{path}: {error.strerror}; the manifest lists it: choose another checkpoint"
                ) from error
            if found != entry:
                raise DamagedError(
                    f"{path}: SHA-256 {found.sha256[:12]}..., the manifest says {entry.sha256[:12]}...: its content "
                    "changed after it was written; choose another checkpoint"
                )


def file_entry(path: Path) -> FileEntry:
    """Size and SHA-256 of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileEntry(file.tell(), digest)
