"""One save: what was copied becomes a checkpoint, here or in a thread beside the run."""

from __future__ import annotations

import platform
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch

from shardwise.checkpoint.agree import Peers, reason
from shardwise.checkpoint.checksum import MASK
from shardwise.checkpoint.directory import StoreDirectory
from shardwise.checkpoint.format import Piece, json_of
from shardwise.checkpoint.manifest import Manifest, ProbeResult, TensorEntry
from shardwise.checkpoint.retention import Retention
from shardwise.checkpoint.shardfile import (
    FileEntry,
    Identity,
    ShardFile,
    arrange,
    file_name,
    write_shard_file,
)
from shardwise.checkpoint.snapshot import HostCopy
from shardwise.errors import CheckpointError, UsageError
from shardwise.findings import Finding
from shardwise.launch.environment import recovering_job
from shardwise.launch.variables import variables
from shardwise.parallel.placed import Placed
from shardwise.plan.plan import AXES
from shardwise.version import __version__

Sums = dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Save:
    """A save that is complete."""

    path: Path
    step: int
    size_bytes: int
    seconds: float
    """From the call to the complete checkpoint."""
    left: str = ""
    """Why older checkpoints, which need not stay, are still there."""
    unnamed: str = ""
    """Why `latest` does not name it; older checkpoints stay, as that names one of them."""

    def wait(self) -> Save:
        """Itself: it is complete."""
        return self


@dataclass(kw_only=True)
class SaveJob:
    """What a save needs once the state may change again."""

    doing: str
    directory: StoreDirectory
    retention: Retention
    run: str | None
    """Id of the run; None until the first save has begun."""
    of_state: str
    """Of the run that the state belongs to, which may be in another store, too; empty: it does not say."""
    scalars: Mapping[str, Any]
    placed: Placed
    config: Mapping[str, Any]
    probe: ProbeResult | None
    metric: float | None
    processors: str
    """What the ranks compute on."""
    copy: HostCopy
    start: float
    waited_s: float = 0.0
    failure: str = ""
    """What went wrong on this rank before."""

    @property
    def step(self) -> int:
        """Of the state."""
        return int(self.scalars["step"])

    def execute(self, peers: Peers) -> Save:
        """Write, commit, verify, remove what need not stay; every rank calls it.

        Raises:
            CheckpointError: on all ranks, when any of them failed.
        """
        peers.together(self.doing, self._finish_copy)
        partial, self.run, save = peers.on_first(self.doing, self._begin)
        identity = Identity(run=self.run, save=save, step=self.step, rank=peers.rank)
        try:
            written = peers.from_all(self.doing, lambda: self._write(partial, identity))
            final, unnamed = peers.on_first(self.doing, lambda: self._commit(partial, identity, written))
        except CheckpointError:
            if peers.rank == 0:
                with suppress(OSError, CheckpointError):  # the next save removes it
                    self.directory.discard(partial)
            raise
        seconds = time.perf_counter() - self.start
        left = "" if unnamed else self._prune(peers, lambda: self._read_back(final, identity, written[peers.rank][0]))
        size = sum(entry.size_bytes for entry, _ in written)
        return Save(path=final, step=self.step, size_bytes=size, seconds=seconds, left=left, unnamed=unnamed)

    def _prune(self, peers: Peers, read_back: Callable[[], None]) -> str:
        """Remove what need not stay, once this save is read back; why it is still there: the save is complete anyway.

        Raises:
            CheckpointError: what was saved cannot be read.
        """
        try:
            doomed = peers.on_first(self.doing, lambda: self.directory.doomed(self.retention))
        except CheckpointError as error:
            return str(error)
        if doomed:
            peers.together(self.doing, read_back)
            try:
                peers.on_first(self.doing, lambda: self.directory.remove_all(doomed))
            except CheckpointError as error:
                return str(error)
        return ""

    def _finish_copy(self) -> None:
        failure = self.copy.finish() or self.failure
        if failure:
            raise CheckpointError(failure)

    def _begin(self) -> tuple[Path, str, str]:
        own = recovering_job(variables())  # what ranks that died have saved is of this run, though nobody loaded it
        if self.run is None:
            present = self.directory.listing().complete
            newest = present[0][1] if present else None
            if newest and newest.run != own and (newest.run != self.of_state or newest.step > self.step):
                raise CheckpointError(
                    f"{self.directory.path} holds another run, at step {newest.step}, which this run has not "
                    "loaded; call load_latest(state) first to continue it, or choose another directory"
                )
        run = self.run or own or self.directory.run_id() or self.of_state or uuid.uuid4().hex
        return self.directory.begin(self.step, run), run, uuid.uuid4().hex

    def _write(self, partial: Path, identity: Identity) -> tuple[FileEntry, Sums]:
        self.directory.check_seen(partial, identity.rank)
        with ThreadPoolExecutor(1, thread_name_prefix="shardwise-checksum") as pool:
            sums = pool.submit(self.copy.checksums)  # while the disk works
            entry = write_shard_file(self.directory.files, partial, identity, self.copy.arranged, self.copy.data)
            return entry, sums.result()

    def _commit(self, partial: Path, identity: Identity, written: list[tuple[FileEntry, Sums]]) -> tuple[Path, str]:
        """The checkpoint, and why `latest` does not name it, if so: who loads looks at what is there."""
        plan, mesh = self.placed.plan, self.placed.mesh
        tensors = self._tensors([sums for _, sums in written])
        manifest = Manifest(
            run=identity.run,
            save=identity.save,
            step=self.step,
            sequence=self.directory.next_sequence(),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            plan=str(plan),
            plan_fields=asdict(plan),
            mesh={axis: mesh.size(axis) for axis in AXES},
            world=mesh.world,
            device=mesh.device.type,
            versions={
                "shardwise": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
                "cpu": self.processors,
            },
            config=self.config,
            scalars=self.scalars,
            metric=self.metric if self.metric is not None else self._metric_before(identity.run, tensors),
            probe=self.probe,
            files=tuple(entry for entry, _ in written),
            tensors=tensors,
        )
        final = self.directory.commit(partial, manifest)
        try:
            self.directory.point(final)
        except (OSError, CheckpointError) as error:
            return final, reason(error)
        return final, ""

    def _metric_before(self, run: str, tensors: Mapping[str, TensorEntry]) -> float | None:
        """That of the save which this replaces, of the same step and state: `steps` saves once more when it stops."""
        for _, replaced in self.directory.listing(known=True).complete:
            if (replaced.step, replaced.run) == (self.step, run):
                sums = ({name: entry.checksum for name, entry in of.items()} for of in (replaced.tensors, tensors))
                return replaced.metric if next(sums) == next(sums) else None
        return None

    def _tensors(self, sums: list[Sums]) -> dict[str, TensorEntry]:
        pieces: dict[str, list[Piece]] = {name: [] for name in sorted(self.copy.shapes)}
        for rank, parts in enumerate(self.copy.parts):
            for part, start in arrange(parts):
                pieces[part.name].append(Piece(rank, part.box, start))
        return {
            name: TensorEntry(*self.copy.shapes[name], sum(s.get(name, 0) for s in sums) & MASK, tuple(found))
            for name, found in pieces.items()
        }

    def _read_back(self, final: Path, identity: Identity, entry: FileEntry) -> None:
        """Before an older checkpoint goes, the new one must be readable."""
        assert entry.name == file_name(identity.rank)
        with ShardFile(self.directory.files, final, entry, identity) as file:
            file.check_all()


def check_same_state(path: Path, before: str, state: Any) -> str:
    """Of which run a state is; a store holds the checkpoints of one: two at one step would replace each other.

    Args:
        path: of the store.
        before: of which run the state was that was saved or loaded there last; empty: none was.
        state: what is saved now.

    Raises:
        UsageError: it is another state.
    """
    now = str(getattr(state, "run_id", ""))
    if before not in ("", now):
        raise UsageError(
            f"store {path}: found a state that this store has neither saved nor loaded before, and the checkpoints of "
            "another one, which those of the same steps would replace; needed a store for each state, at a path of its "
            "own, as Store('a/generator') and Store('a/critic'); or load it first (load_latest) to go on with it"
        )
    return now


def number_of(metric: Any) -> float | None:
    """A metric as the manifest holds it; a tensor or a number of NumPy's may be given.

    Raises:
        UsageError: it is no number.
    """
    try:
        if isinstance(metric, bool | str | bytes):
            raise TypeError
        return None if metric is None else float(metric)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise UsageError(
            f"metric: found {type(metric).__name__} {str(metric)[:60]}, needed one number, as `float(total.sum / "
            "total.weight)`"
        ) from None


def as_json(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """A configuration that a manifest can hold.

    Raises:
        UsageError: it is no JSON.
    """
    try:
        json_of(config)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"config: found what JSON cannot hold ({error}); give strings, numbers, lists, dicts"
        ) from None
    return dict(config or {})


def left_over(save: Save) -> Finding | None:
    """What is said of a save that is complete, though not all around it could be done."""
    if save.unnamed:
        return Finding(
            id="checkpoint.latest",
            severity="warning",
            what=f"step {save.step} was saved; `latest` could not be written: who reads that finds an older one",
            evidence=save.unnamed,
            fix="see to it, for until then no older checkpoint is removed; `load_latest` looks at what is there",
        )
    if not save.left:
        return None
    return Finding(
        id="checkpoint.prune",
        severity="warning",
        what=f"step {save.step} was saved; an older checkpoint, which need not stay, could not be removed",
        evidence=save.left,
        fix="make it removable, or remove it by hand; of a directory `.partial-` in the name, and at a URL a missing "
        "manifest.json, says that it is no checkpoint any more",
    )


@dataclass(kw_only=True)
class Saving:
    """A save that goes on in the background."""

    job: SaveJob
    waited_s: float
    """How long the call waited for the save before it: back-pressure."""
    stalled_s: float
    """How long the call took, this wait included."""
    previous_s: float = 0.0
    """How long the save before it took, from its call to the complete checkpoint; 0: there was none."""
    previous_held_up_s: float = 0.0
    """How long an optimizer waited for the copy of its state in the save before it."""
    held_up_s: float = 0.0
    """The same of this save, known when the store has seen its end (`Store.wait`); part of the stall."""
    _thread: threading.Thread | None = None
    _result: list[Save] = field(default_factory=list)
    _error: list[Exception] = field(default_factory=list)

    def begin(self, peers: Peers) -> None:
        """Start the thread; it meets those of the other ranks on `peers`."""

        def work() -> None:
            try:
                self._result.append(self.job.execute(peers))
            except Exception as error:  # a finding at the next step, or the error of `wait`
                self._error.append(error)

        self._thread = threading.Thread(target=work, name="shardwise-save", daemon=True)
        self._thread.start()
        _LAST[self.job.directory.path.resolve()] = self

    @property
    def seconds(self) -> float:
        """From the call to the complete checkpoint; 0 while it goes on, and when it failed."""
        return self._result[0].seconds if self._result else 0.0

    @property
    def has_ended(self) -> bool:
        """Whether it is complete, or has failed."""
        return self._thread is not None and not self._thread.is_alive()

    def wait(self) -> Save:
        """Return when the checkpoint is complete.

        Raises:
            CheckpointError: it failed, on any rank.
        """
        self.join()
        if self._error:
            raise self._error[0]
        return self._result[0]

    def finish(self) -> Finding | None:
        """Return when it has ended; what went wrong, if anything."""
        self.join()
        if not self._error:
            return left_over(self._result[0])
        return Finding(
            id="checkpoint.save",
            severity="warning",
            what=f"step {self.job.step} was not saved; the run goes on, and what was saved before is untouched",
            evidence=str(self._error[0]),
            fix="see to it before the next save is due: make room where a disk is full",
        )

    def join(self) -> None:
        """Return when it has ended."""
        assert self._thread is not None
        self._thread.join()


_LAST: WeakValueDictionary[Path, Saving] = WeakValueDictionary()
"""Of each place the last save beside training, whichever of this process's stores makes it."""


def wait_for_others(place: Path | None = None) -> None:
    """Return when no store of this process saves to a place, or to any: who begins a save there clears it up."""
    others = list(_LAST.values()) if place is None else [_LAST.get(place.resolve())]
    for saving in filter(None, others):
        saving.join()
