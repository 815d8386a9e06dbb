"""`Store`: a directory of checkpoints. A checkpoint exists only when it is complete, and loads into any plan.

Tensors are written by `torch.distributed.checkpoint` under flat names, one key per tensor, each rank its own
shards; what they are, and everything that is no tensor, stands in the manifest.
"""

from __future__ import annotations

import os
import platform
import shutil
import time
import warnings
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from shardwise.checkpoint import directory
from shardwise.checkpoint.agree import gather, on_first, together
from shardwise.checkpoint.directory import Skipped
from shardwise.checkpoint.manifest import DamagedError, FileEntry, Manifest, TensorEntry, file_entry
from shardwise.errors import CheckpointError, UsageError
from shardwise.findings import nearest
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.placed import Placed
from shardwise.plan.plan import AXES
from shardwise.version import __version__

INDEX = ".metadata"
"""The file in which torch keeps where each shard is."""


class Saveable(Protocol):
    """What a store saves and loads; `TrainState` is one."""

    @property
    def placed(self) -> Placed:
        """The placed model: its plan goes into the manifest."""
        ...

    @property
    def mesh(self) -> Mesh:
        """All ranks that take part."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """This rank's tensors by name, sharded ones as DTensors; a name has one global value over all ranks."""
        ...

    def scalars(self) -> dict[str, Any]:
        """Everything else as JSON, the same on every rank; `step` is in it."""
        ...

    def template(self, names: Collection[str]) -> dict[str, Tensor]:
        """Fresh tensors, of the names, layouts and types that a checkpoint holding `names` would load here."""
        ...

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take over the filled template."""
        ...

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        """Take over what `scalars` gave at the save."""
        ...


@dataclass(frozen=True, kw_only=True)
class Save:
    """A save that is complete. `wait` is the seam for saves that go on in the background."""

    path: Path
    step: int
    size_bytes: int
    seconds: float

    def wait(self) -> Save:
        """Return when the checkpoint is complete; at once, since saving is synchronous."""
        return self


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What was loaded, and which newer checkpoints could not be."""

    path: Path
    step: int
    manifest: Manifest
    skipped: tuple[Skipped, ...]
    seconds: float


class Store:
    """A directory of checkpoints; every rank makes one and takes part in `save` and `load`.

    Args:
        path: a directory that all ranks see; made at the first save.
        keep: complete checkpoints to keep, the newest ones.

    Raises:
        UsageError: `keep` is below 1.
        CheckpointError: the path is a file, or holds other programs' checkpoints.

    >>> store = Store("runs/a/checkpoints", keep=3)  # doctest: +SKIP
    >>> store.load_latest(state)  # None in a new run  # doctest: +SKIP
    >>> store.save(state)  # doctest: +SKIP
    """

    def __init__(self, path: str | os.PathLike[str], *, keep: int = 3) -> None:
        """See the class."""
        if keep < 1:
            raise UsageError(f"Store({str(path)!r}): keep={keep}; at least the newest checkpoint must stay: keep >= 1")
        self.path = Path(path)
        self.keep = keep
        self._is_ours = False
        directory.check_is_store(self.path)

    def checkpoints(self) -> list[Path]:
        """Complete checkpoints, newest first."""
        return [path for path, _ in directory.listing(self.path).complete]

    def latest(self) -> Path | None:
        """The newest complete checkpoint."""
        return next(iter(self.checkpoints()), None)

    def save(self, state: Saveable) -> Save:
        """Write a checkpoint; every rank takes part. On return it is complete and flushed to the disk.

        Cost: writes this rank's shards (replicas are written once), reads them back from the page cache for their
        SHA-256; a few small collectives. Older checkpoints are removed after the new one is complete.

        Raises:
            CheckpointError: on all ranks, when any of them failed; older checkpoints are untouched.
        """
        start = time.perf_counter()
        mesh, scalars, tensors = state.mesh, state.scalars(), state.tensors()
        doing = f"saving step {scalars['step']} to {self.path}"
        together(mesh, doing, lambda: self._check_same(mesh, scalars))
        partial = on_first(mesh, doing, lambda: self._begin(int(scalars["step"])))
        try:
            metadata = together(mesh, doing, lambda: _write(mesh, partial, tensors))
            files = gather(mesh, together(mesh, doing, lambda: _own_files(mesh, partial)))
            merged = {name: entry for part in files for name, entry in part.items()}
            final = on_first(mesh, doing, lambda: self._finish(state, partial, scalars, metadata, merged))
        except CheckpointError:
            if mesh.is_first:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        self._is_ours = True
        size = sum(entry.size_bytes for entry in merged.values())
        return Save(path=final, step=int(scalars["step"]), size_bytes=size, seconds=time.perf_counter() - start)

    def load_latest(self, state: Saveable) -> Loaded | None:
        """Load the newest checkpoint whose files are whole; None when the store holds none at all.

        One that is damaged is skipped with a warning, and named in the result.

        Raises:
            CheckpointError: every checkpoint is damaged, or the checkpoint is not of this model and optimizer.
        """
        mesh, doing = state.mesh, f"loading from {self.path}"
        found = on_first(mesh, doing, lambda: directory.listing(self.path))
        skipped = list(found.damaged)
        for path, _ in found.complete:
            try:
                loaded = self._load(state, path, tuple(skipped))
            except DamagedError as error:
                skipped.append(Skipped(path, str(error)))
                continue
            if skipped and mesh.is_first:
                names = ", ".join(item.path.name for item in skipped)
                warnings.warn(f"{loaded.path}: loaded in place of {names}: {skipped[-1].reason}", stacklevel=2)
            return loaded
        if skipped:
            reasons = "; ".join(item.reason for item in skipped)
            raise CheckpointError(f"{doing}: none of the {len(skipped)} checkpoints is whole: {reasons}")
        return None

    def load(self, state: Saveable, path: str | os.PathLike[str]) -> Loaded:
        """Load one checkpoint, of this store or another, into any plan of the same model and optimizer.

        Nothing reaches the state before names, shapes, types and every file's SHA-256 are checked on all ranks.
        Cost: reads each file once for its SHA-256 (shared out over the ranks), then this rank's shards; memory of
        one more copy of this rank's parameters while loading.

        Raises:
            CheckpointError: not a checkpoint, damaged, or not of this model and optimizer.
        """
        return self._load(state, Path(path), ())

    def _load(self, state: Saveable, path: Path, skipped: tuple[Skipped, ...]) -> Loaded:
        start = time.perf_counter()
        mesh, doing = state.mesh, f"loading {path}"
        manifest = on_first(mesh, doing, lambda: Manifest.read(path))
        together(mesh, doing, lambda: _check_files(mesh, manifest, path))
        template = together(mesh, doing, lambda: state.template(manifest.tensors.keys()))
        seen = gather(mesh, sum(1 << i for i, name in enumerate(manifest.tensors) if name in template))
        together(mesh, doing, lambda: _check_names(manifest, template, seen))
        together(mesh, doing, lambda: _read(mesh, path, template))
        together(mesh, doing, lambda: state.load_scalars(manifest.scalars))
        together(mesh, doing, lambda: state.load_tensors(template))
        self._is_ours = self._is_ours or path.resolve().parent == self.path.resolve()
        seconds = time.perf_counter() - start
        return Loaded(path=path, step=manifest.step, manifest=manifest, skipped=skipped, seconds=seconds)

    def _check_same(self, mesh: Mesh, scalars: Mapping[str, Any]) -> None:
        for rank, theirs in enumerate(gather(mesh, dict(scalars))):
            differ = [key for key in scalars if key not in theirs or repr(theirs[key]) != repr(scalars[key])]
            if differ:
                key = differ[0]
                raise CheckpointError(
                    f"ranks disagree on {key!r}: {scalars[key]!r} on rank {mesh.rank}, {theirs.get(key)!r} on rank "
                    f"{rank}; every rank must save the same step of the same run"
                )

    def _begin(self, step: int) -> Path:
        present = directory.listing(self.path).complete
        if present and not self._is_ours:
            raise CheckpointError(
                f"{self.path} holds another run, at step {present[0][1].step}, which this run has not loaded; "
                "call load_latest(state) first to continue it, or choose another directory"
            )
        return directory.begin(self.path, step)

    def _finish(
        self,
        state: Saveable,
        partial: Path,
        scalars: Mapping[str, Any],
        metadata: Metadata,
        files: Mapping[str, FileEntry],
    ) -> Path:
        present = directory.listing(self.path).complete
        plan = state.placed.plan
        manifest = Manifest(
            step=int(scalars["step"]),
            sequence=1 + max((entry.sequence for _, entry in present), default=0),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            plan=str(plan),
            plan_fields=asdict(plan),
            mesh={axis: state.mesh.size(axis) for axis in AXES},
            world=state.mesh.world,
            versions={"shardwise": __version__, "torch": torch.__version__, "python": platform.python_version()},
            scalars=scalars,
            tensors=_entries(metadata),
            files=files,
        )
        manifest.write(partial)
        final = directory.commit(partial, manifest.step)
        directory.prune(self.path, self.keep)
        return final


class _Writer(FileSystemWriter):
    """Raises what the disk said: torch reports a failed write as an unexpected position in its zip file."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's shards."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            raise (cause or error) from None


def _write(mesh: Mesh, partial: Path, tensors: dict[str, Tensor]) -> Metadata:
    if not partial.is_dir():
        raise CheckpointError(
            f"{partial} was made by rank 0 and is not there on rank {mesh.rank}; a store must lie on a file system "
            "that all ranks share"
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.distributed")
        result = state_dict_saver.save(dict(tensors), storage_writer=_Writer(partial), no_dist=mesh.world == 1)
    assert isinstance(result, Metadata)
    return result


def _read(mesh: Mesh, path: Path, template: dict[str, Tensor]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.distributed")
        # as a dict of its own: torch puts what it loaded back into the dict that it was given
        state_dict_loader.load(dict(template), storage_reader=FileSystemReader(path), no_dist=mesh.world == 1)


def _own_files(mesh: Mesh, partial: Path) -> dict[str, FileEntry]:
    """Size and SHA-256 of the files that this rank wrote: torch names them after the rank."""
    names = [path.name for path in partial.glob(f"__{mesh.rank}_*.distcp")]
    return {name: file_entry(partial / name) for name in [*names, *([INDEX] if mesh.is_first else [])]}


def _entries(metadata: Metadata) -> dict[str, TensorEntry]:
    entries = {}
    for name, entry in sorted(metadata.state_dict_metadata.items()):
        assert isinstance(entry, TensorStorageMetadata), name
        entries[name] = TensorEntry(tuple(entry.size), _type(entry.properties.dtype))
    return entries


def _check_files(mesh: Mesh, manifest: Manifest, path: Path) -> None:
    data = sorted(name for name in manifest.files if name != INDEX)
    if INDEX not in manifest.files:
        raise DamagedError(f"{path}: its manifest does not list {INDEX}; choose another checkpoint")
    # every rank unpickles the index, so every rank checks it first; the data files are shared out
    manifest.check_files(path, [INDEX, *data[mesh.rank :: mesh.world]])


def _check_names(manifest: Manifest, template: Mapping[str, Tensor], seen: list[int]) -> None:
    known = list(manifest.tensors)
    missing = [name for name in template if name not in manifest.tensors]
    extra = [name for i, name in enumerate(known) if not any(mask >> i & 1 for mask in seen)]
    if missing or extra:
        hint = nearest(missing[0], extra or known) if missing else "it has more than this run"
        raise CheckpointError(
            f"the checkpoint is of another model or optimizer: {len(missing)} tensors of this run are not in it "
            f"{missing[:5]}, {len(extra)} of its tensors are not in this run {extra[:5]}; {hint}; "
            "load it with the model, optimizer and precision that it was saved with"
        )
    for name, tensor in template.items():
        entry = manifest.tensors[name]
        here = TensorEntry(tuple(tensor.shape), _type(tensor.dtype))
        if here != entry:
            raise CheckpointError(
                f"{name}: shape {entry.shape} {entry.dtype} in the checkpoint, {here.shape} {here.dtype} in this run; "
                "load it with the model sizes and precision that it was saved with"
            )


def _type(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
