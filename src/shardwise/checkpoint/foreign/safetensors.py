"""Hugging Face's safetensors files, single or with an index: headers checked whole, data read in place."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.checkpoint.foreign.beside import ASIDE, is_state_file
from shardwise.checkpoint.foreign.opened import OpenFiles
from shardwise.checkpoint.foreign.state import Foreign
from shardwise.checkpoint.foreign.views import Source, View, num_bytes
from shardwise.checkpoint.format import Fields, parse_json, row_major
from shardwise.checkpoint.header import MAX_HEADER, entry_of, without_holes
from shardwise.checkpoint.shardfile import TABLE
from shardwise.errors import CheckpointError
from shardwise.findings import shown

INDEX_SUFFIX = ".index.json"
MAX_INDEX = 256 * 1024 * 1024
SUFFIX = ".safetensors"
STEP = "shardwise_step"
"""In the header of what we export."""
_NUMBER = re.compile(r"[0-9]{1,18}")
_SHARDING = "DCP_SHARDING_INFO"
_PART = re.compile(r"shard-\d+-model-\d+-of-\d+\.")
_IS_PART = re.compile(r"-\d+-of-((?!0*1\.)\d+)\.")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")


def read_safetensors(files: OpenFiles, path: Path) -> Foreign:
    """One file, or a directory with one, or with an index and what it lists.

    Raises:
        CheckpointError: nothing there, torn, a header that does not agree with itself, or an index of other files.
    """
    shards, listed = ([path], None) if path.is_file() else shards_of(files, path, SUFFIX)
    weights: dict[str, Source] = {}
    steps: set[int] = set()
    marked: dict[Path, Any] = {}
    for shard in shards:
        views, metadata = header(files, shard)
        marked |= {shard: metadata[_SHARDING]} if _SHARDING in metadata else {}
        steps.add(_step(metadata))
        for name, view in views.items():
            if name in weights:
                raise CheckpointError(
                    f"{shard}: {name} is there again, found first in another shard; needed once: copy the files again"
                )
            weights[name] = view
    if listed is not None:
        check_index(path, listed, list(weights))
    _check_whole(files, marked, weights)
    notes = [f"the step, which is 0 here: files are of several ({shown(sorted(steps))})"] if len(steps) > 1 else []
    step = steps.pop() if len(steps) == 1 else 0
    return Foreign(kind="safetensors", weights=weights, step=step, notes=notes, files=len(shards))


def _step(metadata: Mapping[str, Any]) -> int:
    """The step that our export wrote down; 0: the file says none."""
    text = str(metadata.get(STEP, ""))
    return int(text) if _NUMBER.fullmatch(text) else 0


def _check_whole(files: OpenFiles, marked: Mapping[Path, Any], weights: Mapping[str, Source]) -> None:
    """DCP's writer of these files says where each tensor begins, and never where the whole one ends.

    That all are whole is known where they begin at 0, and the index, which is written where one rank saves everything,
    counts the bytes that are there: it counts those of every rank.

    Args:
        files: they stay open.
        marked: what each file by that writer says of its tensors.
        weights: of all files.

    Raises:
        CheckpointError: they may be parts.
    """
    for path, text in marked.items():
        places = parse_json(str(text).encode(), f"{path}: {_SHARDING}").values()
        offsets = [place.get("saved_offsets") if isinstance(place, dict) else None for place in places]
        if not all(isinstance(at, list) and not any(at) for at in offsets):
            raise sliced(path)
    for path in list(marked)[:1]:
        indexes = [name for name in files.names(path.parent) if name.endswith(SUFFIX + INDEX_SUFFIX)]
        fields = _fields(files, path.parent / indexes[0]) if len(indexes) == 1 else None
        if fields is None or fields.mapping("metadata").get("total_size") != sum(map(num_bytes, weights.values())):
            raise sliced(path)


def sliced(path: Path) -> CheckpointError:
    """The error for files that ranks wrote of their own parts."""
    return CheckpointError(
        f"{path}: found one rank's parts of the tensors, written by DCP's HuggingFaceStorageWriter; needed whole "
        "tensors: consolidate them with torch (enable_consolidation=True), or save with dcp.save alone"
    )


def ours(path: Path) -> CheckpointError:
    """The error for what Shardwise wrote, whose names and parts are not those of a model."""
    return CheckpointError(
        f"{path}: found a checkpoint of Shardwise's own, needed one of another library; `shardwise ckpt export` writes "
        "it as files that others read, and a run begins with it as it is"
    )


def check_index(path: Path, listed: dict[str, str], found: list[str]) -> None:
    """Compare an index with the tensors of its files.

    Raises:
        CheckpointError: they do not agree.
    """
    differ = sorted(set(listed) ^ set(found))
    if differ:
        where = "not in the files" if differ[0] in listed else "not in the index"
        raise CheckpointError(
            f"{path}: {len(differ)} tensors differ between the index and its files ({shown(differ)}: {where}); needed "
            "the files that belong to this index: copy them again"
        )


def shards_of(files: OpenFiles, path: Path, suffix: str) -> tuple[list[Path], dict[str, str] | None]:
    """The files of a directory, and what its index says of each tensor; None: it has no index.

    Raises:
        CheckpointError: no such file, several without an index, or an index with names that are no files beside it.
    """
    there = files.names(path)
    indexes = [name for name in there if name.endswith(suffix + INDEX_SUFFIX)]
    singles = [n for n in there if n.endswith(suffix) and not n.startswith(ASIDE) and not is_state_file(n)]
    if len(indexes) == 1:
        listed = _index(files, path / indexes[0])
        for name in set(listed.values()):
            if not _FILE.fullmatch(name) or not name.endswith(suffix):
                raise CheckpointError(
                    f"{path / indexes[0]}: found the file name {name[:80]!r}, needed one of a file beside it that ends "
                    f"in {suffix}; copy the index again"
                )
        files.need(path, listed.values(), path / indexes[0])
        families = {tuple(_IS_PART.split(name)) for name in listed.values() if _IS_PART.search(name)}
        if left := [
            name for name in singles if name not in listed.values() and tuple(_IS_PART.split(name)) in families
        ]:
            raise CheckpointError(
                f"{path / indexes[0]}: lists {len({*listed.values()})} files, and not {shown(left)}, by the name part "
                "of the same model; needed the index that lists them all: copy it again, or take out what is of another"
            )
        return [path / name for name in sorted(set(listed.values()))], listed
    if suffix == SUFFIX and not indexes and (parts := [name for name in singles if _PART.match(name)]):
        raise sliced(path / parts[0])
    if not indexes and (parts := [name for name in singles if _IS_PART.search(name)]):
        raise CheckpointError(
            f"{path}: found {shown(parts)}, by the name part of a model, and no index; needed *{suffix}{INDEX_SUFFIX} "
            "and all that it lists: copy them again, or give the file if it is all that is meant"
        )
    if len(indexes) > 1 or len(singles) != 1:
        raise CheckpointError(
            f"{path}: found {len(singles)} files that end in {suffix} and {len(indexes)} indexes, needed one file, or "
            "one index and its files; give the file that is meant"
        )
    return [path / singles[0]], None


def _fields(files: OpenFiles, path: Path) -> Fields:
    size = files.size(path)
    if size > MAX_INDEX:
        raise CheckpointError(f"{path}: {size} bytes, needed at most {MAX_INDEX}; this is no index: copy it again")
    return Fields(parse_json(files.read(path, 0, size), str(path)), str(path))


def _index(files: OpenFiles, path: Path) -> dict[str, str]:
    fields = _fields(files, path)
    listed = fields.mapping("weight_map")
    if not all(isinstance(name, str) for name in listed.values()):
        raise fields.wrong("weight_map", listed, "names of files")
    return listed


def header(files: OpenFiles, path: Path) -> tuple[dict[str, View], dict[str, Any]]:
    """Every tensor of a safetensors file, in the order of the header; and what it says of itself.

    Raises:
        CheckpointError: it is cut short, or its header is not whole: holes, overlaps, sizes that do not agree.
    """
    size = files.size(path)
    length = int.from_bytes(files.read(path, 0, 8), "little") if size >= 8 else -1
    if not 2 <= length <= min(size - 8, MAX_HEADER):
        found = f"a header of {length} bytes in a file of {size}" if size >= 8 else f"{size} bytes"
        raise CheckpointError(
            f"{path}: found {found}; needed a whole safetensors file: it was cut short or is of another kind: copy it "
            "again"
        )
    table = parse_json(files.read(path, 8, length), f"{path}: header")
    metadata = table.pop("__metadata__", None)
    if TABLE in table:
        raise ours(path)
    entries = [entry_of(name, item, str(path)) for name, item in table.items()]
    data = 8 + length
    without_holes(entries, size - data, str(path))
    views = {
        name: View(files, path, (data + start, stop - start, None), dtype, 0, shape, row_major(shape))
        for name, dtype, shape, start, stop in entries
    }
    return views, metadata if isinstance(metadata, dict) else {}
