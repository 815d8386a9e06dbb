"""`RunDir`: the directory of a run, what lies where in it, and the checks before it is used. No torch.

runs/<date>-<name>/  plan.toml  config.toml  config.json  environment.json  metrics.jsonl  loss.png  sample.txt
                     events.jsonl  checkpoints/  lock/  starting/
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from shardwise.errors import CheckpointError, UsageError
from shardwise.journal import add_record, end_line, read_events, read_metrics
from shardwise.plan.plan import Plan
from shardwise.records import looking, say
from shardwise.version import __version__

RECORDED = ("torch", "numpy", "pydantic", "pillow", "psutil", "rich", "tokenizers", "pyarrow", "tensorboard")
COMPLETE = "saved_s"
"""In `metrics`: how long a save took that is complete."""
_COMPLETE = re.compile(r"step-[0-9]{8,18}(\.save-[0-9a-f]{8})?")
"""Name of a complete checkpoint; the second kind is of a URL."""


@dataclass(frozen=True)
class RunDir:
    """A run's directory.

    >>> RunDir(Path("runs/a")).metrics.name
    'metrics.jsonl'
    """

    path: Path

    @property
    def plan(self) -> Path:
        """The plan that was used."""
        return self.path / "plan.toml"

    @property
    def config_toml(self) -> Path:
        """The resolved configuration, with the origin of each value as a comment; `shardwise train` reads it."""
        return self.path / "config.toml"

    @property
    def config_json(self) -> Path:
        """The same for programs: `{settings, origins, identity}`."""
        return self.path / "config.json"

    @property
    def environment(self) -> Path:
        """Versions and facts of the machine."""
        return self.path / "environment.json"

    @property
    def metrics(self) -> Path:
        """One JSON record per step and per evaluation."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The store."""
        return self.path / "checkpoints"

    @property
    def resumes(self) -> Path:
        """One JSON record per start of the run that loaded a checkpoint: which, and the proof."""
        return self.path / "resumes.jsonl"

    @property
    def picture(self) -> Path:
        """The loss curves."""
        return self.path / "loss.png"

    @property
    def sample(self) -> Path:
        """Text of the trained model."""
        return self.path / "sample.txt"

    @property
    def summary(self) -> Path:
        """How the run ended."""
        return self.path / "summary.json"

    @property
    def events(self) -> Path:
        """One JSON record per thing that happened to the run: what was skipped, healed, taken over, changed."""
        return self.path / "events.jsonl"

    @property
    def devices(self) -> Path:
        """The slots that an elastic run may use; written by the user, read whenever it changes."""
        return self.path / "devices"

    @property
    def lock(self) -> Path:
        """Who uses the directory; see `shardwise.train.kept.lock`."""
        return self.path / "lock"

    def locks(self, checkpoints: str | None) -> tuple[Path, ...]:
        """Who uses the directory, and who the one where its checkpoints are kept.

        An object store has nothing that can be locked: two runs must not be given the same URL.
        """
        place = re.sub("^(file|local)://", "", checkpoints or str(self.checkpoints))  # such a URL is the path
        return (self.lock,) if "://" in place else (self.lock, Path(place) / "lock")

    @property
    def starting(self) -> RunDir:
        """The record of a start whose state is not loaded yet: it becomes the run's by `adopt`, or goes."""
        return RunDir(self.path / "starting")

    def adopt(self, plan: Plan) -> None:
        """Make the record of a start that has loaded its state that of the run, with the plan that it uses.

        Raises:
            UsageError: it cannot be written.
        """
        new = self.starting
        if not new.config_json.is_file():
            return
        try:
            plan.save(self.plan)
            if new.events.is_file():
                with self.events.open("a+b", buffering=0) as file:
                    end_line(file)
                    file.write(new.events.read_bytes())
            new.config_toml.replace(self.config_toml)
            new.config_json.replace(self.config_json)  # the last: by it the next start tells what changed
        except OSError as error:
            raise UsageError(
                f"cannot write the record in {self.path}: {error.strerror or error}; free space or choose another --out"
            ) from error
        self.drop_start()

    def drop_start(self) -> None:
        """Forget a start that came to nothing."""
        shutil.rmtree(self.starting.path, ignore_errors=True)

    @property
    def has_begun(self) -> bool:
        """Whether a start here has loaded its state, or begun with a new one: before that a record binds nobody."""
        return self.metrics.exists() or self.has_checkpoints

    def add_event(self, event: str, **facts: Any) -> None:
        """Append a record to `events`, with the time. One process per run calls it."""
        add_record(self.events, {"event": event, "time": datetime.now(UTC).isoformat(timespec="seconds"), **facts})

    def read_events(self, event: str) -> list[dict[str, Any]]:
        """The records of one kind; see `journal.read_events`."""
        return read_events(self.events, event) if self.events.exists() else []

    def read_metrics(self) -> list[dict[str, Any]]:
        """The records of steps and evaluations; see `journal.read_metrics`."""
        return read_metrics(self.metrics) if self.metrics.exists() else []

    @property
    def has_checkpoints(self) -> bool:
        """Whether a complete checkpoint lies in the store.

        Raises:
            CheckpointError: it may not be listed.
        """
        with looking(str(self.checkpoints), CheckpointError):
            return _newest(self.checkpoints) is not None

    def identity(self) -> dict[str, Any] | None:
        """What makes the run that lies here this run; None for a directory without one.

        Raises:
            CheckpointError: its config.json cannot be read.
        """
        try:
            loaded = json.loads(self.config_json.read_text(encoding="utf-8"))
            for table in (loaded, loaded["settings"]["train"], *loaded["settings"].values(), loaded.get("spec") or {}):
                dict(**table)  # by which a start tells what changed
            return dict(loaded["identity"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(
                f"{self.config_json} is damaged ({error}), so it cannot be told which run lies in {self.path}; "
                f"put the file back, or go on from its checkpoints in a new directory: --out NEW --resume {self.path}"
            ) from error


def check_out(run: RunDir, *, resume: str) -> None:
    """Whether a run may use a directory; creates nothing that stays.

    Args:
        run: the directory, which need not exist.
        resume: `auto`, `never`, or a path.

    Raises:
        UsageError: it is a file, cannot be written, or holds something else.
        CheckpointError: it holds a run that cannot be read.
    """
    if re.match(r"[a-z][a-z0-9+.\-]+:/", str(run.path)):  # a path has one slash of a URL's two
        url = str(run.path).replace(":/", ":///" if run.path.parts[0] in ("file:", "local:") else "://", 1)
        raise UsageError(
            f"--out {url}: found a URL, needed a directory of this machine for the run's record; give one, and "
            f"--checkpoints {url} to keep the checkpoints there"
        )
    check_writable(run.path, "--out")
    if not run.path.is_dir():
        return
    there = run.identity()
    if there is None:
        # a start that died at once leaves its locks; the slots may be listed before the first one
        with looking(f"--out {run.path}", UsageError):
            found = [*run.path.iterdir(), *(run.checkpoints.iterdir() if run.checkpoints.is_dir() else ())]
        if set(found) - {run.lock, run.devices, run.checkpoints, run.checkpoints / "lock"}:
            raise UsageError(
                f"--out {run.path} holds files, but no run (no config.json); needed: a new or empty directory, or a "
                f"run's; choose another --out"
            )
        return
    if resume == "never" and run.has_checkpoints:
        raise UsageError(
            f"--out {run.path} holds checkpoints, and --resume never would overwrite them; choose another --out, or "
            f"leave --resume out to continue"
        )


def check_not_lost(run: RunDir, place: str | None) -> None:
    """Refuse to begin again where a run has saved: called when no checkpoint of it is there.

    A run that ended before its first save was complete lost nothing, and begins again.

    Args:
        run: its record tells.
        place: what `--checkpoints` says.

    Raises:
        CheckpointError: the record says that there was a checkpoint.
    """
    saved = run.resumes.is_file() or run.summary.is_file() or bool(run.read_events("stopped"))
    if not saved and run.metrics.is_file():
        saved = f'"{COMPLETE}"'.encode() in run.metrics.read_bytes()
    if saved:
        raise CheckpointError(
            f"{run.path}: its record says that checkpoints were saved, found none in {place or run.checkpoints}; "
            "needed one to go on from; put them back, or begin again at step 1, over this record, with --resume never"
        )


def find_checkpoint(path: Path, flag: str = "--resume") -> Path:
    """What a path means to `Store.load`: a checkpoint, or the store that it is or holds, of which the newest whole one.

    Raises:
        CheckpointError: there is none.
    """
    with looking(f"{flag} {path}", CheckpointError):
        if (path / "manifest.json").is_file():
            return path
        store = next((place for place in (path / "checkpoints", path) if _newest(place) is not None), None)
        found = "no complete checkpoint lies there" if path.is_dir() else "no such directory"
        found = "a file" if path.is_file() else found
    if store is None:
        also = "auto, never, " if flag == "--resume" else ""
        raise CheckpointError(
            f"{flag} {path}: {found}; needed: {also}a run's directory, its checkpoints/ or a checkpoint (of files of "
            "another library `shardwise ckpt convert` makes one)"
        )
    return store


def _newest(store: Path) -> Path | None:
    """The checkpoint of the greatest step: a directory has that name, and a manifest, only when it is complete.

    What people or tools made of one, as `step-00000500-copy` or a link, is none: a store does not read it either.

    Raises:
        OSError: the store may not be listed.
    """
    names = os.listdir(store) if _is_there(store) and store.is_dir() else []
    found = [store / name for name in names if _COMPLETE.fullmatch(name)]
    complete = [path for path in found if os.path.exists(path / "manifest.json") and not path.is_symlink()]
    return max(complete, key=lambda path: int(path.stem[5:]), default=None)


def _is_there(path: Path) -> bool:
    """As `Path.exists`, which says no of what cannot be looked at, in some versions of Python."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def check_writable(path: Path, flag: str) -> None:
    """Whether a directory is there, or can be made, and takes files; leaves nothing behind.

    Args:
        path: the directory.
        flag: that named it, for the message.

    Raises:
        UsageError: it is a file, lies below one, or takes no files.
    """
    nearest = path
    with looking(f"{flag} {path}", UsageError):
        while not _is_there(nearest) and nearest != nearest.parent:
            nearest = nearest.parent
        is_directory = nearest.is_dir()
    if not is_directory:
        what = "is a file" if nearest == path else f"lies below {nearest}, which is a file"
        raise UsageError(f"{flag} {path} {what}; needed: a directory; choose another {flag}")
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise UsageError(
            f"{flag} {path}: cannot write in {nearest}: {error.strerror or error}; choose another {flag}"
        ) from None


def environment_facts() -> dict[str, Any]:
    """Versions and machine facts, from a fixed list: no user, host name, path or variable."""
    return {
        "shardwise": __version__,
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "system": platform.system(),
        "release": platform.release(),
        "machine": platform.machine(),
        "num_cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "packages": {name: found for name in RECORDED if (found := _version(name)) is not None},
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@contextmanager
def can_lack(path: Path) -> Iterator[None]:
    """Within it a file is written or read without which a run goes on: what is wrong with it is said, and no error."""
    try:
        yield
    except (OSError, UsageError) as error:
        say(f"shardwise: {path}: {error.__cause__ or error}; the run goes on without it")


def write_text(path: Path, text: str) -> None:
    """Write a file whole: a reader never sees half of it.

    Raises:
        UsageError: it cannot be written.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise UsageError(
            f"cannot write {path}: {error.strerror or error}; free space or choose another --out"
        ) from error
