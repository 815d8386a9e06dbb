"""`export`: a checkpoint of ours as the files that other libraries read; streamed, without torch."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from shardwise.checkpoint.compare import find
from shardwise.checkpoint.files import LOCAL
from shardwise.checkpoint.foreign.dtypes import FLOATS
from shardwise.checkpoint.foreign.lightning_out import lightning_tree
from shardwise.checkpoint.foreign.safetensors import STEP
from shardwise.checkpoint.foreign.torch_out import write_torch
from shardwise.checkpoint.foreign.views import Cast, Source, Stored, num_bytes, slabs
from shardwise.checkpoint.foreign.writing import check_room, overflow_notes, replacing, total_bytes
from shardwise.checkpoint.format import MODEL, OPTIM, parameter_of, whole
from shardwise.checkpoint.header import encode_header
from shardwise.checkpoint.reading import Reader
from shardwise.checkpoint.shardfile import Part, arrange, entry_at
from shardwise.errors import CheckpointError, UsageError

To = Literal["safetensors", "torch", "lightning", "dcp"]
EMA, MASTER = "ema.", ".master"
MAX_SHARD = 5 * 10**9
FILE_SUFFIXES: dict[To, tuple[str, ...]] = {
    "safetensors": (".safetensors",), "lightning": (".ckpt",), "torch": (".pt", ".pth", ".bin", ".ckpt"), "dcp": (),
}  # fmt: skip
"""Of targets that become one file, the first that has one means it; others become directories."""
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """How a checkpoint is exported."""

    to: To | None = None
    """None: what the target's suffix says; safetensors where it says nothing."""
    dtype: str | None = None
    """Of floating-point weights; None: as stored."""
    max_shard: int = MAX_SHARD
    """Bytes of a file of a directory, unless a single tensor is larger; another one than the default is an order."""
    optimizer: bool = False
    overwrite: bool = False


@dataclass(frozen=True, kw_only=True)
class Exported:
    """An export that is complete."""

    path: Path
    step: int
    num_tensors: int
    size_bytes: int
    files: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Content:
    """What is exported: weights, and by parameter the optimizer's state."""

    weights: Mapping[str, Source]
    optimizer: Mapping[str, Mapping[str, Source]]
    step: int
    notes: tuple[str, ...]

    @property
    def all(self) -> dict[str, Source]:
        """Every tensor."""
        state = {f"{OPTIM}{name}.{key}": s for name, keys in self.optimizer.items() for key, s in keys.items()}
        return {**{MODEL + name: s for name, s in self.weights.items()}, **state}

    def tree(self, optimizer: bool) -> dict[str, Any]:
        """As torch's users nest it: weights alone, or beside the optimizer's state by names, as DCP has it."""
        if not optimizer:
            return dict(self.weights)
        groups = [{"params": list(self.optimizer)}]
        state = {"state": self.optimizer, "param_groups": groups}
        return {"model": self.weights, "optimizer": state, "step": self.step}


def parse_size(text: str) -> int:
    """Bytes of `5GB`, `512MiB`, `1000`.

    Raises:
        UsageError: it is no size.

    >>> parse_size("5GB")
    5000000000
    """
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS or float(match[1]) <= 0:
        raise UsageError(f"--max-shard-size {text!r}: needed a size above 0, as 5GB, 512MiB or 1000000; write one")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def settled(target: Path, options: ExportOptions) -> ExportOptions:
    """The options with the format that is written, once nothing in them and in the target contradicts the rest.

    Raises:
        UsageError: the suffix is that of another format; what has one file is to be bounded, or to hold what it cannot.
    """
    kinds = [kind for kind, suffixes in FILE_SUFFIXES.items() if target.suffix in suffixes]
    to = options.to or (kinds[0] if kinds else "safetensors")
    if kinds and to not in kinds:
        raise UsageError(
            f"{target}: found the suffix {target.suffix} of a file of {kinds[0]}, and --to {to}; needed one "
            f"format: give --to {kinds[0]}, or another name"
        )
    if to == "lightning" and not kinds:
        raise UsageError(f"{target}: found --to lightning, which is one file, needed a name that ends in .ckpt")
    if options.optimizer and to == "safetensors":
        raise UsageError(
            "export --to safetensors --optimizer: found both, and Hugging Face's files hold weights only; needed one "
            "of the two: leave out --optimizer, or use --to torch, lightning or dcp"
        )
    if options.max_shard != MAX_SHARD and (kinds or to == "dcp" or options.optimizer):
        what = "a file for each tensor" if to == "dcp" else "one file with the optimizer's state in it"
        raise UsageError(
            f"{target}: found --max-shard-size {options.max_shard}, which bounds the files of a directory of weights, "
            f"and {'a target that is one file' if kinds else what} as --to {to}; needed one of the two: leave it out, "
            "or give a directory without --optimizer"
        )
    return replace(options, to=to)


@contextmanager
def opened(source: Path, options: ExportOptions) -> Iterator[Content]:
    """The tensors of a checkpoint, for as long as its files are open.

    Raises:
        CheckpointError: there is none, or a file of it is damaged.
    """
    found = find(source)
    with found.reader() as reader:
        reader.check_directory()
        names = list(reader.manifest.tensors)
        weights = {
            name.removeprefix(MODEL): _weight(reader, name, options.dtype) for name in names if name.startswith(MODEL)
        }
        if not weights:
            raise CheckpointError(f"{found.path}: found no weights, needed tensors under `{MODEL}`; give another one")
        notes = [f"{item.path}: newer, and damaged: {item.reason}" for item in found.damaged]
        ties = {name: first for name, first in (reader.manifest.scalars.get("ties") or {}).items() if first in weights}
        if options.to == "safetensors":
            notes += [f"{name}, which is {first}: these files hold a tied weight once" for name, first in ties.items()]
        else:
            weights |= {name: weights[first] for name, first in ties.items()}
        states: dict[str, dict[str, Source]] = {}
        for name in names if options.optimizer else ():
            if name.startswith(OPTIM):
                parameter = parameter_of(name, names)
                states.setdefault(parameter, {})[name.removeprefix(f"{OPTIM}{parameter}.")] = Stored(reader, name)
        notes += _beside(reader.manifest.scalars, options)
        if any(name.startswith(EMA) for name in names):
            notes.append("the moving average of the weights, which has no place in these files")
        if options.dtype is None and not options.optimizer and any(map(_is_master, names)):
            notes.append("the fp32 masters, of which these weights are the rounding: --dtype float32 writes them")
        if not options.optimizer and any(name.startswith(OPTIM) for name in names):
            notes.append("the optimizer's state; --optimizer takes it along" * (options.to != "safetensors"))
        if options.optimizer and not states:
            notes.append("the optimizer's state: the checkpoint has none")
        yield Content(
            weights=weights, optimizer=states, step=reader.manifest.step, notes=tuple(note for note in notes if note)
        )


def _beside(scalars: Mapping[str, Any], options: ExportOptions) -> list[str]:
    """What is no tensor, and has no place in these files."""
    notes = [f"what {name} keeps beside tensors (get_extra_state)" for name in scalars.get("extra_state") or {}]
    values = [*(scalars.get("groups") or ()), *(scalars.get("optimizer_state") or ())]
    keys = sorted({key for group in values for key in group})
    if keys and options.optimizer:
        notes.append(f"what steps changed of the optimizer's groups, or it keeps beside parameters: {', '.join(keys)}")
    return notes


def _is_master(name: str) -> bool:
    """Whether a tensor is the fp32 copy of a weight that an optimizer steps."""
    return name.startswith(OPTIM) and name.endswith(MASTER)


def _weight(reader: Reader, name: str, dtype: str | None) -> Source:
    """A weight in a type: of its fp32 master, if it has one, for it is the master's rounding."""
    source, master = Stored(reader, name), f"{OPTIM}{name.removeprefix(MODEL)}{MASTER}"
    if dtype is None or source.dtype not in FLOATS or source.dtype == dtype:
        return source
    exact = Stored(reader, master) if master in reader.manifest.tensors else source
    return exact if exact.dtype == dtype else Cast(exact, dtype, "export")


def export(source: Path, target: Path, options: ExportOptions) -> Exported:
    """Write a checkpoint's weights as safetensors or torch's files or Lightning's; they exist only when complete.

    Args:
        source: a checkpoint; a store or a run's directory stands for its newest.
        target: a path that does not exist: a file (`.safetensors`, `.pt`, `.ckpt`), or a directory that will hold one
            file, or several and their index.
        options: see there.

    Cost: reads and checks each byte once, writes it once; memory of a few MiB.

    Raises:
        CheckpointError: the checkpoint is damaged, or the disk said no; nothing is left at the target.
        UsageError: the target is there already; options that cannot be together.

    >>> export(Path("runs/a"), Path("llama"), ExportOptions(dtype="bfloat16"))  # doctest: +SKIP
    """
    options = settled(target, options)
    file = options.to is not None and target.suffix in FILE_SUFFIXES[options.to]
    with opened(source, options) as content, replacing(target, options.overwrite, source, file=file) as partial:
        check_room(target.parent, total_bytes(content.all), f"export to {target}")
        if options.to == "lightning":
            write_torch(partial, lightning_tree(content.weights, content.optimizer, content.step))
            names = [target.name]
        elif options.to == "torch":
            names = _export_torch(partial, target, content, options)
        else:
            names = _export_safetensors(partial, target, content, options)
        return finished(target, partial, content, names)


def finished(target: Path, partial: Path, content: Content, names: list[str]) -> Exported:
    """What was written."""
    paths = [partial] if partial.is_file() else [partial / name for name in names]
    return Exported(
        path=target,
        step=content.step,
        num_tensors=len(content.all),
        size_bytes=sum(path.stat().st_size for path in paths),
        files=tuple(names),
        notes=content.notes + tuple(overflow_notes(content.all)),
    )


def _export_torch(partial: Path, target: Path, content: Content, options: ExportOptions) -> list[str]:
    tree = content.tree(options.optimizer)
    if target.suffix in FILE_SUFFIXES["torch"]:
        write_torch(partial, tree)
        return [target.name]
    LOCAL.make_directory(partial)
    if options.optimizer:
        write_torch(partial / "checkpoint.pt", tree)
        return ["checkpoint.pt"]
    shards = _shards(content.weights, options.max_shard)
    names = _names(len(shards), "pytorch_model", ".bin")
    for name, shard in zip(names, shards, strict=True):
        write_torch(partial / name, shard)
    return names + _index(partial, "pytorch_model.bin", names, shards)


def _export_safetensors(partial: Path, target: Path, content: Content, options: ExportOptions) -> list[str]:
    if target.suffix in FILE_SUFFIXES["safetensors"]:
        write_safetensors(partial, content.weights, content.step)
        return [target.name]
    LOCAL.make_directory(partial)
    shards = _shards(content.weights, options.max_shard)
    names = _names(len(shards), "model", ".safetensors")
    for name, shard in zip(names, shards, strict=True):
        write_safetensors(partial / name, shard, content.step)
    return names + _index(partial, "model.safetensors", names, shards)


def _shards(weights: Mapping[str, Source], most: int) -> list[dict[str, Source]]:
    shards: list[dict[str, Source]] = [{}]
    size = 0
    for name, source in weights.items():
        count = num_bytes(source)
        if shards[-1] and size + count > most:
            shards.append({})
            size = 0
        shards[-1][name] = source
        size += count
    return shards


def _names(count: int, stem: str, suffix: str) -> list[str]:
    if count == 1:
        return [stem + suffix]
    return [f"{stem}-{number:05d}-of-{count:05d}{suffix}" for number in range(1, count + 1)]


def _index(directory: Path, name: str, names: list[str], shards: list[dict[str, Source]]) -> list[str]:
    if len(shards) == 1:
        return []
    listed = {key: file for file, shard in zip(names, shards, strict=True) for key in shard}
    total = sum(total_bytes(shard) for shard in shards)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": listed}, indent=2) + "\n"
    LOCAL.write_whole(directory / f"{name}.index.json", text.encode())
    return [f"{name}.index.json"]


def write_safetensors(path: Path, weights: Mapping[str, Source], step: int) -> None:
    """A new safetensors file, flushed to the disk; wide types first, so that every tensor is aligned.

    Raises:
        OSError: as the disk said.
    """
    arranged = arrange([Part(name, s.dtype, s.shape, whole(s.shape)) for name, s in weights.items()])
    metadata = {"format": "pt", STEP: str(step)}
    with path.open("xb") as file:
        file.write(encode_header(metadata, [entry_at(part, start) for part, start in arranged]))
        for part, _ in arranged:
            for _, data in slabs(weights[part.name]):
                file.write(data.data)
        file.flush()
        os.fsync(file.fileno())
