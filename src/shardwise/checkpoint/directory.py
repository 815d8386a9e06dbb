"""A store's directory, as one process sees it: names, atomic commit, pointer, retention. Rank 0 alone writes here.

store.json                        says that this directory is a store, and of which run
latest                            name of the newest checkpoint
step-00000500/                    a complete checkpoint: manifest.json and data files
step-00000600.partial-1f2e3d4c/   a save that is going on, or that crashed: never read, removed by the next save
step-00000500.old-5a6b7c8d/       what a second save of the same step replaced: removed when that one is verified
step-00000500.save-9c8d7e6f/      a save at a URL (`objects.py`), or a copy of one
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from shardwise.checkpoint.files import Files, Identity, LocalFiles, read_whole
from shardwise.checkpoint.format import DamagedError, Fields, parse_json
from shardwise.checkpoint.manifest import FILE, Manifest
from shardwise.checkpoint.retention import Retention
from shardwise.errors import CheckpointError

MARKER = "store.json"
POINTER = "latest"
NAME = re.compile(r"step-([0-9]{8,18})(?:\.(partial|old|save)-[0-9a-f]{8})?")
"""Of a directory that a save made: step, and what it is."""
_SCRATCH = re.compile(r"\.(?:store\.json|latest)\.[0-9a-f]{8}")
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
    """That which `latest` names is one of them where it is not there at all."""


class StoreDirectory(ABC):
    """A store's directory, which need not exist yet: what is in it, and when it changes.

    How a save becomes a checkpoint is that of `Directory`, where names can be changed, or of `ObjectDirectory`.
    """

    files: Files
    kind_of_save: str
    """What stands in the name of a save that is going on."""

    def __init__(self, path: Path) -> None:
        """Look at nothing yet."""
        self.path = path
        self._sequence = 0
        """The greatest of any checkpoint that was seen here."""
        self._known: dict[Identity, Manifest] = {}
        """Manifests by their files: a save needs not check again what it has checked."""

    def check_is_store(self) -> None:
        """Refuse a path that exists and is no store: a file, or a directory with other programs' checkpoints.

        Raises:
            CheckpointError: saying what is there.
        """
        path, kind = self.path, self.files.kind(self.path)
        if kind == "missing":
            return
        if kind == "file":
            raise CheckpointError(f"store {path}: it is a file; a store is a directory: choose another path")
        if self.files.is_file(path / MARKER):
            return
        names = self.files.names(path)
        if {"config.json", "checkpoints"} <= {*names}:
            raise CheckpointError(f"store {path}: it is a run's directory; its store is {path}/checkpoints: give that")
        foreign = [name for pattern in _FOREIGN for name in names if fnmatchcase(name, pattern)]
        if not foreign and self._run_of_checkpoints() is None:
            foreign = [entry.name for _, kind, entry in self._entries() if kind in ("", "save")]
        if foreign:
            raise CheckpointError(
                f"store {path}: it holds {foreign[0]!r} but no {MARKER}, and no checkpoint that is whole, so it is not "
                "a store of this library; choose an empty or new directory"
            )

    def is_store(self) -> bool:
        """Whether the path is that of checkpoints, and not of one of them."""
        if self.files.is_file(self.path / FILE):
            return False
        return self.files.is_file(self.path / MARKER) or next(self._entries(), None) is not None

    def mend(self) -> str | None:
        """Write `store.json` anew, from a checkpoint that is whole, where it is gone or unreadable; what was done."""
        if self.run_id() is not None:
            return None
        with suppress(OSError, CheckpointError):  # a place that is only read needs none
            if (run := self._run_of_checkpoints()) is not None:
                self._mark(run)
                return f"{self.path / MARKER} was missing or damaged"
        return None

    def _run_of_checkpoints(self) -> str | None:
        """The run of a checkpoint that lies here; None: there is none whose manifest can be read."""
        for _, kind, entry in self._entries():
            if kind in ("", "save"):
                with suppress(DamagedError):
                    return Manifest.read(entry, self.files).run
        return None

    def _mark(self, run: str) -> None:
        self.replace_text(MARKER, json.dumps(_marker(run)) + "\n")

    def begin(self, step: int, run: str) -> Path:
        """Make the store if needed, clear what crashed saves left, and make the directory of a new save.

        Args:
            step: of the save.
            run: id of the run, kept in `store.json`.

        Raises:
            CheckpointError: no store, or not writable.
        """
        self.check_is_store()
        try:
            self.files.make_parents(self.path)
            if self.run_id() != run:  # none, or that of a run that made no checkpoint
                self._mark(run)
            self._clean()
            partial = self.path / f"{name_of(step)}.{self.kind_of_save}-{uuid.uuid4().hex[:8]}"
            self.files.make_directory(partial)
        except OSError as error:
            raise CheckpointError(
                f"store {self.path}: cannot write ({error.strerror or error}: {error.filename2 or error.filename}); "
                "make it writable or choose another path"
            ) from error
        return partial

    def run_id(self) -> str | None:
        """The run that `store.json` names; None: there is none, or it is damaged."""
        try:
            data = parse_json(read_whole(self.files, self.path / MARKER, 4096), MARKER)
            run = Fields(data, MARKER).hex("run", 32)
            return run if data.get("sha256") in (_marker(run)["sha256"], None) else None  # older ones have none
        except (OSError, DamagedError):
            return None

    def commit(self, partial: Path, manifest: Manifest) -> Path:
        """Write the manifest beside data that is kept, and make a checkpoint of them.

        Raises:
            OSError: as the disk said; what was complete before still is.
        """
        encoded = manifest.encode()
        checked = Manifest.decode(encoded, str(partial / FILE))  # what cannot be read is not committed
        self.files.write_whole(partial / FILE, encoded)
        final = self._publish(partial, manifest.step)
        identity = self.files.identity(final / FILE)
        if identity is not None:
            self._known[identity] = checked
        return final

    def point(self, checkpoint: Path) -> None:
        """Let `latest` name it.

        Raises:
            OSError: as the disk said; it is a checkpoint all the same.
        """
        self.replace_text(POINTER, checkpoint.name + "\n")

    def next_sequence(self) -> int:
        """Above that of every checkpoint, those included that were seen before and cannot be read at the moment."""
        unreadable = len(self.listing(known=True).damaged)
        return self._sequence + unreadable + 1

    def doomed(self, retention: Retention) -> list[Path]:
        """Complete checkpoints that need not stay; damaged ones are left for people to look at."""
        current: dict[int, tuple[Path, Manifest]] = {}
        replaced: list[Path] = []
        for path, manifest in self.listing(known=True).complete:  # the newest save of a step comes first
            if ".old-" in path.name or manifest.step in current:
                replaced.append(path)
            else:
                current[manifest.step] = path, manifest
        keeps = retention.keeps([(manifest.step, manifest.metric) for _, manifest in current.values()])
        return replaced + [path for (path, _), stays in zip(current.values(), keeps, strict=True) if not stays]

    def listing(self, *, known: bool = False) -> Listing:
        """What the store holds, ordered by save (not by step: a run may have gone back).

        Args:
            known: take the word of files that are as they were when they were checked before.

        Raises:
            CheckpointError: the path is no store, or holds a checkpoint of another schema.
        """
        self.check_is_store()
        found = None
        while found is None:  # what was removed meanwhile is no damage, and what came in its place is to be found
            found = self._listed(known)
        return found

    def _listed(self, known: bool) -> Listing | None:
        """What `listing` gives; None: a checkpoint was removed while it was looked at."""
        complete: list[tuple[Path, Manifest]] = []
        damaged: list[Skipped] = []
        steps, run = set[int](), self.run_id()
        for step, kind, entry in self._entries():
            if kind == "partial":
                continue
            steps.add(step)
            try:
                manifest = self._manifest(entry, known)
                steps.add(manifest.step)
                manifest.check_place(entry, step, run)
                manifest.check_finite(entry)
                complete.append((entry, manifest))
            except DamagedError as error:
                if (step, kind, entry) not in self._entries():
                    return None
                damaged.append(Skipped(entry, str(error)))
        if not steps and any(kind != "partial" for _, kind, _ in self._entries()):
            return None
        damaged = damaged if known else [*self._lost(steps), *damaged]
        complete.sort(key=lambda pair: pair[1].sequence, reverse=True)
        self._sequence = max([self._sequence, *(manifest.sequence for _, manifest in complete)])
        there = {id(manifest) for _, manifest in complete}
        self._known = {identity: found for identity, found in self._known.items() if id(found) in there}
        return Listing(tuple(complete), tuple(damaged))

    def _lost(self, steps: set[int]) -> list[Skipped]:
        """The newest checkpoint, where it is not there: nothing here removes what `latest` names."""
        name = self._pointer()
        match = NAME.fullmatch(name)
        if match is None or int(match[1]) in steps or self.files.is_directory(self.path / name):
            return []
        found = "it is not there" if self.files.kind(self.path / name) == "missing" else "it is a link, or no directory"
        return [Skipped(self.path / name, f"{self.path / name}: {POINTER} names it, and {found}: put it back")]

    def _pointer(self) -> str:
        """What `latest` says."""
        try:
            return read_whole(self.files, self.path / POINTER, 64).decode("ascii", "replace").strip()
        except (OSError, DamagedError):
            return ""

    def _manifest(self, checkpoint: Path, known: bool) -> Manifest:
        identity = self.files.identity(checkpoint / FILE)
        if not known or identity is None or identity not in self._known:
            found = Manifest.read(checkpoint, self.files)
            if identity is None:
                return found
            self._known[identity] = found
        return self._known[identity]

    def _entries(self) -> Iterator[tuple[int, str, Path]]:
        """(step, "" or "partial" or "old", path) of all that saves made; a list may lack what `latest` names by now."""
        for name in sorted({*self.files.names(self.path), self._pointer()}):
            match = NAME.fullmatch(name)
            if match and self._may_hold_one(self.path / name):
                yield int(match[1]), match[2] or "", self.path / name

    def _may_hold_one(self, path: Path) -> bool:
        """A directory; or what cannot be looked at, of which the reader says why."""
        try:
            return self.files.is_directory(path)
        except DamagedError:
            return True

    @abstractmethod
    def _clean(self) -> None:
        """Remove what crashed saves left; the newest checkpoint stays the newest."""

    @abstractmethod
    def _publish(self, partial: Path, step: int) -> Path:
        """A save whose manifest is written becomes a checkpoint; its path."""

    @abstractmethod
    def check_seen(self, partial: Path, rank: int) -> None:
        """This rank sees what rank 0 made.

        Raises:
            CheckpointError: it does not: the store is not on a file system that all ranks share.
        """

    @abstractmethod
    def check_shared(self, world: int) -> None:
        """So many ranks can see the store at all.

        Raises:
            CheckpointError: it lies in the memory of one process.
        """

    @abstractmethod
    def discard(self, partial: Path) -> None:
        """Remove a save that is no checkpoint; the call may end at any point of it."""

    @abstractmethod
    def remove_all(self, checkpoints: Sequence[Path]) -> None:
        """Remove checkpoints; a crash in the middle never leaves half of one that passes for whole."""

    @abstractmethod
    def replace_text(self, name: str, text: str) -> None:
        """Replace a small file: readers see the old one or the new one."""


class Directory(StoreDirectory):
    """One on a file system: data is flushed, and one rename makes a save a checkpoint.

    >>> Directory(Path("/nowhere"), LocalFiles()).listing().complete
    ()
    """

    kind_of_save = "partial"
    files: LocalFiles

    def __init__(self, path: Path, files: LocalFiles) -> None:
        """Look at nothing yet."""
        super().__init__(path)
        self.files = files

    def check_seen(self, partial: Path, rank: int) -> None:
        """See `StoreDirectory`."""
        if not self.files.is_directory(partial):
            raise CheckpointError(
                f"{partial} was made by rank 0 and is not there on rank {rank}; a store must lie on a file system that "
                "all ranks share"
            )

    def check_shared(self, world: int) -> None:
        """A file system may be shared by any number: `check_seen` finds out."""

    def _clean(self) -> None:
        """Remove what crashed saves left; put back a checkpoint whose replacement did not arrive."""
        for step, kind, entry in self._entries():
            if kind == "partial":
                with suppress(OSError, DamagedError):  # what cannot go is in nobody's way: it is no checkpoint
                    self.files.remove_tree(entry)
            elif kind == "old" and not self.files.is_there(self.path / name_of(step)):
                self.files.rename(entry, self.path / name_of(step))
        for name in self.files.names(self.path):
            if _SCRATCH.fullmatch(name):
                with suppress(OSError):
                    self.files.remove(self.path / name)

    def _publish(self, partial: Path, step: int) -> Path:
        self.files.sync_directory(partial)
        final = self.path / name_of(step)
        if self.files.is_there(final):  # a checkpoint of the step; or a file or a link in the way
            self.files.rename(final, self.path / f"{final.name}.old-{uuid.uuid4().hex[:8]}")
        self.files.rename(partial, final)
        self.files.sync_directory(self.path)
        return final

    def discard(self, partial: Path) -> None:
        """See `StoreDirectory`."""
        self.files.remove_tree(partial)

    def remove_all(self, checkpoints: Sequence[Path]) -> None:
        """Remove checkpoints.

        Each is renamed first: a crash in the middle must not leave half a checkpoint under a good name.
        """
        for checkpoint in checkpoints:
            doomed = self.path / f"{checkpoint.name.partition('.')[0]}.partial-{uuid.uuid4().hex[:8]}"
            self.files.rename(checkpoint, doomed)
            self.files.remove_tree(doomed)

    def replace_text(self, name: str, text: str) -> None:
        """Replace a small file in one rename, flushed to the disk."""
        fresh = self.path / f".{name}.{uuid.uuid4().hex[:8]}"
        self.files.write_whole(fresh, text.encode())
        self.files.rename(fresh, self.path / name)
        self.files.sync_directory(self.path)


def _marker(run: str) -> dict[str, Any]:
    return {"format": "shardwise-store", "schema": 2, "run": run, "sha256": hashlib.sha256(run.encode()).hexdigest()}


def name_of(step: int) -> str:
    """`step-00000500`."""
    return f"step-{step:08d}"
