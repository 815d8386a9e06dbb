"""`RunLock`: one directory, one run. No torch.

The lock is the newest file of `<run>/lock/`, named by its generation. It is made by `link(2)`, which fails where the
name exists and never shows half a file; generations only grow, so of all who see a dead owner exactly one makes the
next file. Nothing is locked in the kernel: it works on every file system that has hard links, over hosts too.

    0000003.json   {"owner": "ann", "host": "node7", "pids": [4711, 4720], "started": "2026-03-01T12:00:00+00:00", ...}
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

from shardwise.errors import ExitCode, LockedError, UsageError
from shardwise.records import say
from shardwise.train.kept.owner import Owner, is_here, runs, this_process

BEAT_S = 5.0
"""How often an owner touches its file."""
STALE_S = 60.0
"""An owner of another host whose file is older is dead. Ages are told by the file system's clock, never by a host's.
One that is dated so far into the future is watched for as long."""


class RunLock:
    """Holds a run's directory while it is open. Made by `RunLock.take`, or `RunLock.join` in a rank of its owner.

    Args:
        folder: `<run>/lock`.
        generation: number of the file.
        owner: what it says.
        on_lost: called by the heartbeat with a text when another run has taken over: training must not go on.

    >>> with RunLock.take(Path("runs/a/lock"), print) as lock:  # doctest: +SKIP
    ...     lock.taken_over  # the dead owner before, or None
    """

    def __init__(self, folder: Path, generation: int, owner: Owner, on_lost: Callable[[str], None]) -> None:
        """See the class."""
        self.folder, self.generation, self.owner = folder, generation, owner
        self.taken_over: Owner | None = None
        """The dead owner before."""
        self._is_owner = True
        self._path = _path(folder, generation)
        self._on_lost = on_lost
        self._end = threading.Event()
        self._beat = threading.Thread(target=self._keep_alive, name="shardwise-lock", daemon=True)

    @classmethod
    def take(
        cls,
        folder: Path,
        on_lost: Callable[[str], None],
        *,
        stale_s: float = STALE_S,
        job: str = "",
        at_exit: Callable[[Callable[[], None]], object] = lambda release: None,
    ) -> RunLock:
        """Become the owner of a directory; or join it, where it is a process of the caller's own `job`.

        `at_exit` is given what releases the lock before there is one: a Ctrl-C in between would leave it.

        Raises:
            LockedError: somebody who lives holds it, or won it at this moment.
            UsageError: the directory cannot be written.

        Cost: a few milliseconds; afterwards a touch of one file every 5 s.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            newest = _newest(folder)
            before = _read(folder, newest) if newest else None
            if before is not None and not before.released and not _is_dead(before, _path(folder, newest), stale_s):
                if job and before.job == job and (joined := cls.join(folder, on_lost)) is not None:
                    at_exit(joined.release)
                    return joined
                raise _refusal(folder, before)
            lock = cls(folder, newest + 1, Owner.here(job), on_lost)
            at_exit(lock.release)
            if not _create(lock._path, lock.owner) or _newest(folder) > lock.generation:
                # the second: whoever made our number anew after it was cleaned away is not the newest
                raise _refusal(folder, _read(folder, _newest(folder)))
            lock.taken_over = None if before is None or before.released else before
            for old in _generations(folder):
                if old < lock.generation:
                    _path(folder, old).unlink(missing_ok=True)
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            raise UsageError(
                f"cannot lock {folder.parent}: {error.strerror or error}{where}; needed: a directory that this user "
                "can write, on a file system with hard links; choose another --out or --checkpoints"
            ) from error
        return lock

    @classmethod
    def await_free(cls, folder: Path, *, stale_s: float = STALE_S, job: str = "") -> None:
        """Return when nobody holds a directory, or only processes of the caller's own `job`.

        An owner on another host is watched until its file is touched (it lives) or stale (it is dead), so that a job
        which begins again on another node waits in place of failing.

        Raises:
            LockedError: at once where the owner is on this host, else within `BEAT_S`.
        """
        seen: tuple[int, float] | None = None
        while True:
            newest = _newest(folder)
            owner = _read(folder, newest) if newest else None
            if owner is None or owner.released or (job and owner.job == job):
                return
            path = _path(folder, newest)
            try:
                if _is_dead(owner, path, stale_s):
                    return
                touched = (newest, path.stat().st_mtime)
            except FileNotFoundError:  # it has just changed hands
                continue
            if is_here(owner) or (seen is not None and touched != seen):
                raise _refusal(folder, owner)
            seen = touched
            time.sleep(min(1.0, stale_s / 10))

    @classmethod
    def held_here(cls, folder: Path) -> RunLock | None:
        """The lock of a directory that this process is one of the holders of; None: it is none of them."""
        newest = _newest(folder)
        owner = _read(folder, newest) if newest else None
        if owner is None or owner.released or not is_here(owner) or this_process() not in owner.pids:
            return None
        lock = cls(folder, newest, owner, print)
        lock._is_owner = False
        return lock

    @classmethod
    def is_held_here(cls, folder: Path) -> bool:
        """Whether this process is one of those that hold a directory."""
        return cls.held_here(folder) is not None

    @classmethod
    def join(cls, folder: Path, on_lost: Callable[[str], None]) -> RunLock | None:
        """Add this process, which the owner started, to those that must be gone before the directory is free.

        None where nobody holds the directory: the program was not started by `shardwise train`. A process that cannot
        be added is not waited for, which is said: no reason to end a run that goes on.
        """
        newest = _newest(folder)
        owner = _read(folder, newest) if newest else None
        if owner is None or owner.released:
            return None
        first, *others = owner.pids
        # the dead would be as many as there are recoveries
        alive = [each for each in others if not is_here(owner) or runs(*each)]
        joined = Owner(**{**asdict(owner), "pids": (first, *alive, this_process())})
        try:
            _write(_path(folder, newest), joined, in_place=True)
        except OSError as error:
            say(f"shardwise: {folder} does not name process {os.getpid()}: {error.strerror or error}; the run goes on")
        lock = cls(folder, newest, joined, on_lost)
        lock._is_owner = False
        return lock

    def release(self) -> None:
        """Leave the directory to others. The file stays: its number must not be given again."""
        self._end.set()
        if self._beat.ident is not None:
            self._beat.join()
        with suppress(OSError, LockedError):  # the directory may have been removed meanwhile
            if self._is_owner and self.is_held:
                _write(self._path, Owner(**{**asdict(self.owner), "released": True}))

    @property
    def is_held(self) -> bool:
        """Whether the newest file is the owner's own. A directory that was removed may be another run's by now."""
        newest = _newest(self.folder)
        found = _read(self.folder, newest) if newest == self.generation else None
        return found is not None and found.is_run_of(self.owner)

    def keep(self, *, anew: bool = False) -> str:
        """Hold the directory still, as its heartbeat does. A file that is gone is made again, `anew` its place too.

        Returns which run is in the way; empty: the directory is this run's.
        """
        if self.is_held:
            os.utime(self._path)
            return ""
        newest = _newest(self.folder)
        other = _read(self.folder, newest) if newest else None
        if other is None and (anew or (self._is_owner and self.folder.parent.exists())):
            self.folder.mkdir(parents=True, exist_ok=True)
            if _create(self._path, self.owner) and _newest(self.folder) == self.generation:
                say(
                    f"shardwise: {self.folder} was removed while this run uses it; it is made anew, and the run goes on"
                )
                return ""
            other = _read(self.folder, _newest(self.folder))
        if other is None or (newest <= self.generation and other.is_run_of(self.owner)):
            return ""
        return f"{self.folder.parent} was taken over by {other}"

    def _keep_alive(self) -> None:
        while not self._end.wait(BEAT_S):
            with suppress(OSError, LockedError):
                if lost := self.keep():
                    self._on_lost(lost)
                    return

    def start(self) -> Self:
        """Begin to touch the file."""
        self._beat.start()
        return self

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.release()


def end_at_once(text: str) -> None:
    """What a run does that was taken over: it ends without saving, since the directory is another's."""
    say(f"shardwise: {text}; this run ends without saving")
    os._exit(ExitCode.LOCKED)


def _refusal(folder: Path, owner: Owner | None) -> LockedError:
    return LockedError(
        f"cannot start in {folder.parent}: it is in use by {owner or 'a run that has just begun'}; needed: one run per "
        "directory; wait for it, end it, or choose another --out or --checkpoints"
    )


def _is_dead(owner: Owner, path: Path, stale_s: float) -> bool:
    if is_here(owner):
        return not any(runs(pid, began) for pid, began in owner.pids)
    age = _age_s(path)
    return age > stale_s or (age < -stale_s and not _is_touched(path, stale_s))


def _is_touched(path: Path, within_s: float) -> bool:
    """Whether a file is, while it is watched: one of a date to come, whose age says nothing (a clock was wrong)."""
    end = time.monotonic() + within_s
    with suppress(FileNotFoundError):  # it has just changed hands
        before = path.stat().st_mtime
        while time.monotonic() < end:
            time.sleep(min(1.0, within_s / 10))
            if path.stat().st_mtime != before:
                return True
        return False
    return True


def _age_s(path: Path) -> float:
    """Seconds since a file was touched, by the clock that touched it: a host's own may be wrong."""
    probe = path.with_name(f"now-{uuid4().hex}")
    probe.touch()
    now = probe.stat().st_mtime
    probe.unlink()
    return now - path.stat().st_mtime


def _create(path: Path, owner: Owner) -> bool:
    """Make a lock file whole; False where it exists."""
    part = path.with_name(f"part-{uuid4().hex}")
    try:
        part.write_text(json.dumps(asdict(owner)), encoding="utf-8")
        path.hardlink_to(part)
        return True
    except FileExistsError:
        return False
    finally:
        part.unlink(missing_ok=True)


def _write(path: Path, owner: Owner, *, in_place: bool = False) -> None:
    """Replace a lock file; `in_place`: over what is there, where a full disk has no room for another one."""
    part, text = path.with_name(f"part-{uuid4().hex}"), json.dumps(asdict(owner))
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        if not in_place:
            raise
        with path.open("r+b", buffering=0) as file:  # one write: a reader finds the old owner, or the new one
            file.write(text.encode().ljust(path.stat().st_size))


def _path(folder: Path, generation: int) -> Path:
    return folder / f"{generation:07}.json"


def _generations(folder: Path) -> Iterator[int]:
    """Those that have a file; what else lies there, as `0000001 (copy).json`, is none."""
    return (int(path.stem) for path in folder.glob("*.json") if re.fullmatch("[0-9]{7,18}", path.stem, re.ASCII))


def _newest(folder: Path) -> int:
    """The greatest generation; 0: there is none."""
    return max(_generations(folder), default=0)


def _read(folder: Path, generation: int) -> Owner | None:
    """Who a file names; None: it is gone, since a newer one was made."""
    try:
        found: dict[str, Any] = json.loads(_path(folder, generation).read_text(encoding="utf-8"))
        pids = tuple((int(pid), float(began)) for pid, began in found.pop("pids"))
        return Owner(pids=pids, **found)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise LockedError(
            f"{_path(folder, generation)} is no lock of Shardwise ({error}), so it cannot be told who uses "
            f"{folder.parent}; needed: the file as it was written; remove it when no run is going on there"
        ) from error
