"""`Holder`: one store, one run. Rank 0 of a script holds its store, as `shardwise train` holds its directory.

`unwritable`: what would keep a rank from saving there.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from shardwise.checkpoint.agree import to_do
from shardwise.checkpoint.remote import RemotePath
from shardwise.errors import LockedError, UsageError
from shardwise.findings import Finding
from shardwise.launch.environment import recovering_job
from shardwise.launch.variables import variables
from shardwise.parallel.mesh import Mesh
from shardwise.train.kept.lock import RunLock, end_at_once


class Held(NamedTuple):
    """What rank 0 found, for all ranks."""

    refusal: str = ""
    """Why this run must not write here; empty: it may."""
    note: str = ""
    """Why the place could not be locked."""

    def check(self) -> list[Finding]:
        """What there is to say of it.

        Raises:
            LockedError: another run holds the store.
        """
        if self.refusal:
            raise LockedError(self.refusal)
        what = f"{self.note}; nothing keeps another run from writing there"
        return [Finding(id="checkpoint.lock", severity="warning", what=what)] if self.note else []


class Holder:
    """Sees to it that a store is one run's: a run goes on from it when nobody holds it, and holds it once it saves."""

    def __init__(self, store: Path) -> None:
        """Look at nothing yet."""
        self._store = store
        self._mesh: Mesh | None = None
        self._lock: RunLock | None = None
        """Held until `_mesh` is closed; or, of a process that a launcher has started, the launcher's."""
        self._noted = False
        self._job = recovering_job(variables()) or ""

    def look(self, mesh: Mesh) -> Held:
        """On rank 0, before a run goes on from what is there: whether another run holds the store."""
        return self._on_first(mesh, lambda: RunLock.await_free(self._folder, job=self._job))

    def take(self, mesh: Mesh) -> Held:
        """Hold the store from now on, on rank 0, until the mesh is closed; other ranks do nothing."""

        def act() -> None:
            RunLock.await_free(self._folder, job=self._job)
            at_exit = mesh.at_exit.append
            self._lock = RunLock.take(self._folder, end_at_once, job=self._job, at_exit=at_exit).start()
            self._mesh = mesh

        if self._lock is not None and mesh is self._mesh:  # its directory may have been removed since
            with suppress(OSError):
                if lost := self._lock.keep(anew=True):
                    return Held(refusal=f"{lost}; needed: one run per directory; choose another for one of them")
        return self._on_first(mesh, act)

    @property
    def _folder(self) -> Path:
        return self._store / "lock"

    def _on_first(self, mesh: Mesh, act: Callable[[], None]) -> Held:
        """Do it where another run may be in the way: not where this process holds the store, or has joined who does.

        An object store has nothing that can be locked, and where this user cannot write no lock is needed.
        """
        if mesh.rank != 0 or mesh is self._mesh or isinstance(self._store, RemotePath):
            return Held()
        try:
            place = next(parent for parent in (self._store, *self._store.parents) if parent.exists())
            if not os.access(place, os.W_OK):
                return Held()
            if (joined := RunLock.held_here(self._folder)) is not None:
                self._lock, self._mesh = joined, mesh
            else:
                act()
        except LockedError as error:
            with suppress(LockedError):  # a file that is no lock
                if RunLock.is_held_here(self._folder):  # by another store of this process
                    return Held()
            return Held(refusal=f"{error}; to read a checkpoint beside that run: Store.load(state, path)")
        except (UsageError, OSError) as error:  # it is tried again, and not said again
            note, self._noted = "" if self._noted else f"{self._store}: {error}", True
            return Held(note=note)
        return Held()


def unwritable(store: Path, num_bytes: int) -> str:
    """Why a save of so many bytes would fail now, on this rank; empty: nothing is known, as of an object store.

    Cost: a file without a name, flushed: nothing is left.
    """
    if isinstance(store, RemotePath):
        return ""
    place = store
    try:
        place = next(parent for parent in (store, *store.parents) if parent.exists())
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
            free = shutil.disk_usage(place).free
    except OSError as error:
        return f"{error.strerror or error} ({place}){to_do(error)}"
    if free < num_bytes:
        return f"{free} bytes are free in {place}, and a checkpoint takes {num_bytes}; free some space there"
    return ""
