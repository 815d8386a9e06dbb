"""The files of a DeepSpeed checkpoint: which tag, which ranks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from shardwise.checkpoint.foreign.beside import is_weights_file
from shardwise.checkpoint.foreign.opened import OpenFiles
from shardwise.errors import CheckpointError
from shardwise.findings import shown

MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
OPTIM = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")  # older ones without the last _
OTHER = re.compile(r"layer_\d+.*|expert_.*|.*expp_rank_.*")
_LATEST, _LATEST_UNIVERSAL = "latest", "latest_universal"
UNIVERSAL = "zero"
"""The directory of a universal checkpoint that has one for each parameter."""
_PLAIN = "mp_rank_00_model_states.pt"
"""Of stage 0 the one file there is."""
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")


def is_deepspeed(files: OpenFiles, path: Path) -> bool:
    """Whether a directory is one of DeepSpeed's, or holds a tag of one.

    Raises:
        CheckpointError: `latest` names a directory that is not there, and nothing else there can be meant.
    """
    try:
        folder = tagged(files, path)
    except CheckpointError:
        if any(is_weights_file(name) for name in files.names(path)):
            return False  # the file `latest` is another tool's
        raise
    names = files.names(folder)
    if any(OPTIM.fullmatch(name) for name in names):
        return True
    models = [match for name in names if (match := MODEL.fullmatch(name))]
    if models and (models[0][1] or files.is_directory(folder / UNIVERSAL)):
        return True  # parts of ranks, or a universal checkpoint
    return folder != path and _PLAIN in names and not any(is_weights_file(name) for name in files.names(path))


def tagged(files: OpenFiles, path: Path) -> Path:
    """The directory with the ranks' files: this one, that of its tag, or where Lightning keeps it.

    Raises:
        CheckpointError: `latest` names none, or one that is not there.
    """
    names = files.names(path)
    latest = next((name for name in (_LATEST, _LATEST_UNIVERSAL) if name in names), None)
    if latest and not any(OPTIM.fullmatch(name) for name in names):
        file = path / latest
        tag = files.read(file, 0, min(files.size(file), 256)).decode("utf-8", "replace").strip()
        if not _TAG.fullmatch(tag):
            raise CheckpointError(
                f"{file}: found {tag[:80]!r}, needed the name of a directory beside it, as global_step100; give that "
                "directory"
            )
        if not files.names(path / tag):
            there = shown([name for name in names if files.is_directory(path / name)])
            raise CheckpointError(
                f"{file}: found the tag {tag!r}, and nothing in {path / tag}, where its files would be (there are "
                f"{there or 'no directories'}); needed that directory: copy it, or give that of another tag"
            )
        return path / tag
    if names == ["checkpoint"] or ("checkpoint" in names and files.is_directory(path / "checkpoint")):
        return path / "checkpoint"  # Lightning keeps it there
    return path


def ranked(folder: Path, names: Sequence[str], pattern: re.Pattern[str]) -> list[Path]:
    """The files of a kind, by rank.

    Raises:
        CheckpointError: a rank is missing, or one is of model parallelism.
    """
    found: dict[int, str] = {}
    for name in names:
        match = pattern.fullmatch(name)
        if match and int(match[2]) > 0:
            raise CheckpointError(
                f"{folder / name}: a part of model parallelism (mp_rank {int(match[2])}); needed ZeRO over "
                "data-parallel ranks alone; merge it with DeepSpeed's own tools first"
            )
        if match:
            found[int(match[1] or 0)] = name
    lacking = sorted(set(range(max(found, default=-1) + 1)) - set(found))
    if lacking:
        raise CheckpointError(
            f"{folder}: found ranks {shown(sorted(found))}, and rank {lacking[0]} is missing; needed all: copy its file"
        )
    return [folder / found[rank] for rank in sorted(found)]
