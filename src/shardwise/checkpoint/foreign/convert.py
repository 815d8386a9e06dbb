"""`convert`: a foreign checkpoint as a store with one checkpoint, read on one process in bounded memory."""

from __future__ import annotations

import os
import platform
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from shardwise.checkpoint.compare import find
from shardwise.checkpoint.directory import MARKER, Directory
from shardwise.checkpoint.files import LOCAL, reading
from shardwise.checkpoint.foreign.beside import (
    COMMON,
    META,
    METADATA,
    SUFFIXES,
    checkpoints_in,
    is_dcp,
    is_weights_file,
    model_in,
    models_in,
    states_in,
)
from shardwise.checkpoint.foreign.dcp import read_dcp
from shardwise.checkpoint.foreign.deepspeed import read_deepspeed
from shardwise.checkpoint.foreign.deepspeed_files import is_deepspeed
from shardwise.checkpoint.foreign.dtypes import FLOATS
from shardwise.checkpoint.foreign.names import read_rules, rename
from shardwise.checkpoint.foreign.opened import OpenFiles
from shardwise.checkpoint.foreign.optimizers import Beside, add_beside
from shardwise.checkpoint.foreign.parts import check_folders, check_lone, narrow_norms
from shardwise.checkpoint.foreign.safetensors import ours, read_safetensors
from shardwise.checkpoint.foreign.signs import check_whole
from shardwise.checkpoint.foreign.state import Foreign, without_elements
from shardwise.checkpoint.foreign.torch_files import add_meta, read_torch
from shardwise.checkpoint.foreign.views import Cast, Source
from shardwise.checkpoint.foreign.writing import check_room, overflow_notes, replacing, total_bytes, write_streamed
from shardwise.checkpoint.format import Piece, check_name, whole
from shardwise.checkpoint.manifest import FILE, Manifest, TensorEntry
from shardwise.checkpoint.reading import Reader
from shardwise.checkpoint.shardfile import FileEntry, Identity, file_name
from shardwise.errors import CheckpointError, UsageError
from shardwise.findings import nearest, shown
from shardwise.plan.plan import AXES, Plan
from shardwise.version import __version__

Kind = Literal["auto", "safetensors", "torch", "dcp", "deepspeed", "fsdp", "lightning"]
MODEL, OPTIM, MASTER = "model.", "optim.", ".master"
SPARE_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a checkpoint is converted."""

    kind: Kind = "auto"
    rename: Path | None = None
    """A file of rules."""
    like: Path | None = None
    """A checkpoint of the model that the result is for: names, shapes and types must be, or are made, those of it."""
    dtype: str | None = None
    """Of floating-point weights; None: as they are, or as `like` has them."""
    optimizer: bool = True
    in_order: bool = False
    overwrite: bool = False
    unsafe: bool = False


@dataclass(frozen=True, kw_only=True)
class Converted:
    """A conversion that is complete."""

    path: Path
    """The store."""
    kind: str
    step: int
    num_weights: int
    num_parameters_with_state: int
    size_bytes: int
    notes: tuple[str, ...]
    """What was left out or changed, and why."""


def convert(source: Path, target: Path, options: Options) -> Converted:
    """Read a foreign checkpoint and write a store that holds it; the store exists only when it is complete.

    Args:
        source: a file or a directory of another library.
        target: a path that does not exist.
        options: see there.

    Cost: reads each byte once (twice where the file has CRC-32s), writes it once, reads it back; memory of a few MiB,
    and of the largest tensor where one does not lie in order. Pickles are read by another process, see `sandbox.py`.

    Raises:
        CheckpointError: what is wrong with the source, or the disk; nothing is left at the target.
        UsageError: the target is there already; options or rules that cannot be.

    >>> convert(Path("hub/llama"), Path("llama"), Options())  # doctest: +SKIP
    """
    with reading(source):
        source = Path(os.path.realpath(source))  # what the user names may be a link; what is inside may not
    with OpenFiles(scratch_in=target.parent) as files, replacing(target, options.overwrite, source) as partial:
        found = read_foreign(files, source, options)
        rename(found, read_rules(options.rename) if options.rename is not None else [])
        if not found.weights:
            raise CheckpointError(
                f"{source}: found no weights, needed at least one tensor; name what holds the model's"
            )
        if empty := without_elements(found.weights):
            found.notes.append(f"elements of weights that have none here, as ZeRO 3 leaves a module: {shown(empty)}")
        sources = _sources(found, options)
        _check_claims(files, source, sources)
        check_room(target.parent, total_bytes(sources), f"convert {source}")
        size = _write(partial, sources, found)
    return Converted(
        path=target,
        kind=found.kind,
        step=found.step,
        num_weights=len(found.weights),
        num_parameters_with_state=len(found.optimizer),
        size_bytes=size,
        notes=tuple(found.notes),
    )


def read_foreign(files: OpenFiles, source: Path, options: Options) -> Foreign:
    """What a path holds, read as what it is or is said to be.

    Raises:
        CheckpointError: it is not there, or is of no known kind.
    """
    with reading(source):
        there = source.exists()
    if not there:
        raise CheckpointError(f"{source}: found nothing there, needed a checkpoint of another library; check the path")
    _check_foreign(files, source)
    kind = _kind(files, source) if options.kind == "auto" else options.kind
    if kind in ("fsdp", "lightning") and (is_dcp(files, source) or models_in(files, source)):
        kind = "dcp"
    elif kind == "lightning" and source.is_dir() and is_deepspeed(files, source):
        kind = "deepspeed"  # Lightning's strategy of the name
    kind = "torch" if kind == "fsdp" else kind
    code = any(map(Path.is_file, states_in(files, source)))
    code = code or (kind == "dcp" and bool({META, COMMON} & {*files.names(source)}))
    if options.unsafe and kind in ("dcp", "safetensors") and not code:
        raise UsageError(f"{source}: --unsafe-pickle with a checkpoint of {kind}, which needs no code; leave it out")
    if kind == "deepspeed":
        return read_deepspeed(files, source, options.unsafe, options.optimizer, options.in_order)
    found = _read(files, source, kind, options)
    found.notes += check_lone(files, source) if source.is_file() else []
    found.notes += filter(None, [narrow_norms(found.weights)])
    if kind in ("safetensors", "torch"):
        sandboxed = replace(options, unsafe=False)  # leave to run code is for the file that was given
        found.notes += check_whole(files, source, found.weights, lambda p: _read(files, p, kind, sandboxed).weights)
    how = Beside(optimizer=options.optimizer, in_order=options.in_order, unsafe=options.unsafe)
    add_beside(files, source, found, how)
    return found


def _read(files: OpenFiles, source: Path, kind: Kind, options: Options) -> Foreign:
    """The weights, and what else their files hold."""
    if kind == "safetensors":
        return read_safetensors(files, source)
    if kind == "dcp":
        folder = model_in(files, source)
        found = read_dcp(files, folder, options.in_order)
        add_meta(files, folder, found, options.unsafe)
    else:
        found = read_torch(files, source, options.in_order, options.unsafe, options.optimizer)
    found.kind = "lightning" if options.kind == "lightning" else found.kind
    return found


def _check_foreign(files: OpenFiles, source: Path) -> None:
    names = set(files.names(source)) if source.is_dir() else set()
    run = "checkpoints" in names and MARKER in files.names(source / "checkpoints")
    if run or MARKER in names or {FILE, file_name(0)} <= names:
        raise ours(source)


def _kind(files: OpenFiles, source: Path) -> Kind:
    if source.is_file():
        return "safetensors" if source.suffix == ".safetensors" else "torch"
    names = files.names(source)
    if METADATA in names:
        return "dcp"
    if any(name.endswith(".safetensors") for name in names):
        return "safetensors"
    if is_deepspeed(files, source):
        return "deepspeed"
    if models_in(files, source) and not any(is_weights_file(name) for name in names):
        return "dcp"
    if any(name.endswith(SUFFIXES) for name in names):
        return "torch"
    inside = checkpoints_in(files, source)
    check_folders(source, inside)
    if inside:
        what = f"{len(inside)} checkpoints, in" if len(inside) > 1 else "a checkpoint in"
        raise CheckpointError(
            f"{source}: found {what} {shown(inside)}; needed the directory of one model; give "
            f"{source / inside[0]}{', or another of them' if len(inside) > 1 else ''}"
        )
    raise CheckpointError(
        f"{source}: found {shown(names) or 'nothing'}; needed *.safetensors, a file of torch.save, {METADATA} of DCP, "
        "or DeepSpeed's `latest`; give the directory that holds them, or --from"
    )


def _sources(found: Foreign, options: Options) -> dict[str, Source]:
    """Every tensor of the checkpoint to be, by its logical name, in its type."""
    if not options.optimizer and found.optimizer:
        found.optimizer = {}
        found.notes.append("the optimizer's state: as --no-optimizer says")
    strange = [name for name in found.optimizer if name not in found.weights]
    if strange:
        found.optimizer = {}
        found.notes.append(f"the optimizer's state: it is of parameters that are left out: {shown(strange)}")
    scaled = [name for name, source in found.weights.items() if source.dtype.startswith("float8")]
    if options.dtype is not None and scaled:
        found.notes.append(f"--dtype of float8, whose numbers mean nothing without their scales: {shown(scaled)}")
    sources = {MODEL + name: _typed(s, options.dtype, name) for name, s in found.weights.items()}
    sources |= {f"{OPTIM}{n}.{key}": s for n, states in found.optimizer.items() for key, s in states.items()}
    if options.like is not None:
        with reading(options.like):
            like = find(options.like).manifest()
        sources = _made_like(sources, found, like, options.like)
    for name in sources:
        _check_storable(name)
    return sources


def _check_storable(name: str) -> None:
    """A foreign model may have names that a store cannot: here a rule changes them, not the model.

    Raises:
        CheckpointError: naming the weight as rules do.
    """
    try:
        check_name(name, "convert")
    except CheckpointError as error:
        own = name.removeprefix(MODEL)
        raise CheckpointError(f'{error}, or give rules with --rename, as {own[:80]!r} = "a.name.of.yours"') from None


def _typed(source: Source, dtype: str | None, name: str) -> Source:
    if dtype is None or source.dtype not in FLOATS or source.dtype == dtype:
        return source
    return Cast(source, dtype, name)


def _made_like(sources: dict[str, Source], found: Foreign, like: Manifest, path: Path) -> dict[str, Source]:
    """The sources in the names, shapes and types of another checkpoint of the model.

    Raises:
        CheckpointError: weights that are missing, left over, or of another shape.
    """
    wanted = {name: entry for name, entry in like.tensors.items() if name.startswith(MODEL)}
    weights = {name: source for name, source in sources.items() if name.startswith(MODEL)}
    missing, extra = [n for n in wanted if n not in weights], [n for n in weights if n not in wanted]
    if missing or extra:
        hint = nearest(missing[0], extra or list(weights)) if missing else f"left over: {shown(extra)}"
        raise CheckpointError(
            f"convert: {len(missing)} weights of {path} are not in the source ({shown(missing)}), {len(extra)} of the "
            f"source are not in it ({shown(extra)}); {hint}; needed the same model: give rules with --rename, where "
            "an empty name leaves a tensor out"
        )
    state = {name: entry for name, entry in like.tensors.items() if name.startswith(OPTIM)}
    masters = {name: entry for name, entry in state.items() if name.endswith(MASTER)}
    have = {name for name in sources if name.startswith(OPTIM)} | (masters.keys() if found.optimizer else set())
    if state and have and have != set(state):
        found.optimizer = {}
        found.notes.append(f"the optimizer's state: that of {path} has other keys: {shown(sorted(have ^ set(state)))}")
    taken = wanted | masters | (state if found.optimizer else {})  # a weight in 16 bits may be here in 32
    fresh = {}
    for name, entry in taken.items():
        weight = MODEL + name.removeprefix(OPTIM).removesuffix(MASTER)
        source = sources[name] if name in sources else weights[weight]
        if source.shape != entry.shape:
            raise CheckpointError(
                f"convert: {name}: found shape {source.shape}, needed {entry.shape} as {path} has it; give rules with "
                "--rename, or another --like"
            )
        fresh[name] = source if source.dtype == entry.dtype else Cast(source, entry.dtype, name)
    kept = {} if state or not found.optimizer else {n: s for n, s in sources.items() if n.startswith(OPTIM)}
    return fresh | kept


def _check_claims(files: OpenFiles, source: Path, sources: Mapping[str, Source]) -> None:
    """Tensors that claim far more bytes than their files have are a bomb: views that repeat few bytes many times."""
    there = files.total_bytes + sum(files.size(path) for path in files.unnamed)
    claimed = total_bytes(sources)
    if claimed > 8 * there + SPARE_BYTES:
        raise CheckpointError(
            f"{source}: found tensors of {claimed} bytes in files of {there}; needed tensors whose elements are "
            "stored: save them with .contiguous()"
        )


def _write(root: Path, sources: Mapping[str, Source], found: Foreign) -> int:
    directory = Directory(root, LOCAL)
    run, save = uuid.uuid4().hex, uuid.uuid4().hex
    partial = directory.begin(found.step, run)
    entry, sums, starts = write_streamed(LOCAL, partial, Identity(run=run, save=save, step=found.step, rank=0), sources)
    found.notes += overflow_notes(sources)
    tensors = {
        name: TensorEntry(
            source.shape,
            source.dtype,
            sums[name],
            (Piece(0, whole(source.shape), starts[name]),) if name in starts else (),
        )
        for name, source in sorted(sources.items())
    }
    manifest = _manifest(run, save, found, entry, tensors)
    Manifest.decode(manifest.encode(), "the manifest")  # what cannot be read is not committed
    final = directory.commit(partial, manifest)
    directory.point(final)
    with Reader(final, manifest) as reader:
        return reader.verify()


def _manifest(run: str, save: str, found: Foreign, entry: FileEntry, tensors: Mapping[str, TensorEntry]) -> Manifest:
    plan = Plan()
    scalars: dict[str, Any] = {
        "step": found.step, "skipped": 0, "weight": 0.0, "data": None, "ema_updates": None, "loss_scale": None,
        "base_lr": [], "plan": str(plan),
        "imported": {"from": found.kind, "optimizer": bool(found.optimizer), "notes": found.notes[:20]},
    }  # fmt: skip
    if found.ties:
        scalars["ties"] = found.ties
    return Manifest(
        run=run,
        save=save,
        step=found.step,
        sequence=1,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        plan=str(plan),
        plan_fields={},
        mesh=dict.fromkeys(AXES, 1),
        world=1,
        device="cpu",
        versions={"shardwise": __version__, "python": platform.python_version()},
        config={},
        scalars=scalars,
        metric=None,
        probe=None,
        files=(entry,),
        tensors=tensors,
    )
