"""New files and directories that exist only when they are complete; a checkpoint written as its tensors are read."""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from shardwise.checkpoint.checksum import MASK, contribution, word_box, words_of
from shardwise.checkpoint.digests import BlockDigests
from shardwise.checkpoint.files import LOCAL, LocalFiles, reading
from shardwise.checkpoint.foreign.views import Cast, Source, num_bytes, slabs
from shardwise.checkpoint.format import whole
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.shardfile import FileEntry, Identity, Part, arrange, file_name, header_bytes, seal_of
from shardwise.errors import CheckpointError, UsageError
from shardwise.findings import shown

_STEP = r"step-[0-9]{8,18}"
_NUMBER = "(-[0-9]{5,}-of-[0-9]{5,})?"
_OURS = re.compile(
    rf"store\.json|latest|{_STEP}(/manifest\.json|/rank-00000\.safetensors)?|checkpoint\.pt|"
    rf"model{_NUMBER}\.safetensors|pytorch_model{_NUMBER}\.bin|(model\.safetensors|pytorch_model\.bin)\.index\.json|"
    r"\.metadata|__[0-9]+_[0-9]+\.distcp"
)
"""All that a conversion or an export writes into a directory; one with anything else is not replaced."""


@contextmanager
def replacing(target: Path, overwrite: bool, source: Path, *, file: bool = False) -> Iterator[Path]:
    """A path beside `target` to write to; it gets the target's name when the block ends well, and is removed if not.

    Raises:
        UsageError: the target is there, and `overwrite` is not said; or what is there, or `source`, would be lost.
        CheckpointError: the disk said no; nothing is left.
    """
    with reading(target):
        _check_apart(source, target)
    partial = target.with_name(f".{target.name}.partial-{uuid.uuid4().hex[:8]}")
    old = target.with_name(f".{target.name}.old-{uuid.uuid4().hex[:8]}")
    try:
        _check_target(target, overwrite, file)
        target.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        if partial.is_dir():
            LOCAL.sync_directory(partial)
        if target.exists():
            LOCAL.rename(target, old)
        LOCAL.rename(partial, target)
        LOCAL.sync_directory(target.parent)
    except OSError as error:
        raise CheckpointError(
            f"{target}: cannot be written ({error.strerror or error}: {error.filename or partial}); needed room and "
            "the right to write; it is as it was, or complete: make room or choose another path"
        ) from error
    finally:  # wherever a signal came: one of the two has the target's name
        with suppress(OSError):
            if old.exists():
                _remove(old) if target.exists() else old.rename(target)
        _remove(partial)


def _check_apart(source: Path, target: Path) -> None:
    """What is written replaces no part of what is read, and does not become one."""
    if target.name in ("", ".."):
        raise UsageError(
            f"{target}: found no name of its own in it, needed that of a new file or directory; give one, as "
            f"{target / 'new'}"
        )
    theirs, ours = Path(os.path.realpath(source)), Path(os.path.realpath(target))
    if theirs == ours or theirs in ours.parents or ours in theirs.parents:
        how = "itself" if theirs == ours else "around it" if theirs in ours.parents else "inside of it"
        raise UsageError(
            f"{target}: found the source {source} {how}, needed a place of its own, "
            "so that the source is not lost; give another path"
        )


def _check_target(target: Path, overwrite: bool, file: bool) -> None:
    if target.is_symlink():
        raise UsageError(
            f"{target}: found a link there, which nothing replaces; needed a new path, or one that --overwrite may "
            f"replace: give another path, or that to which it leads, {target.readlink()}"
        )
    if target.exists() and not overwrite:
        raise UsageError(
            f"{target}: found something there already; needed a new path, so that nothing is lost; give another one, "
            "or --overwrite"
        )
    if not target.exists():
        return
    if not (target.is_file() if file else target.is_dir()):
        kind = "a file" if file else "a directory"
        raise UsageError(
            f"{target}: found something there that is not {kind}, needed one for --overwrite to replace: {kind} is "
            "what would be written; give another path"
        )
    strange = [] if file else _strange(target)
    if strange:
        raise UsageError(
            f"{target}: found {shown(strange)} in it, which no conversion or export wrote; needed nothing else there, "
            "for --overwrite removes the whole directory; take that out first, or give another path"
        )


def _strange(directory: Path) -> list[str]:
    """What of a directory no conversion or export wrote: another name, a link, a checkpoint that a run saved."""
    step = re.compile(_STEP)
    strange = []
    for path in (*directory.iterdir(), *directory.glob("step-*/*")):
        name = str(path.relative_to(directory))
        of_kind = _is_converted(path) if step.fullmatch(name) else LOCAL.is_file(path)
        if not _OURS.fullmatch(name) or not of_kind:
            strange.append(name)
    return sorted(strange)


def _is_converted(checkpoint: Path) -> bool:
    """Whether a conversion wrote it; of one that is damaged nobody knows."""
    try:
        return LOCAL.is_directory(checkpoint) and "imported" in Manifest.read(checkpoint).scalars
    except CheckpointError:
        return False


def _remove(path: Path) -> None:
    """As well as it goes: what was wrong before is what counts, a disk without the right to write for instance."""
    with suppress(OSError):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def check_room(directory: Path, needed: int, what: str) -> None:
    """Refuse before anything is written when the disk cannot hold it.

    Raises:
        CheckpointError: saying how much there is.
    """
    there = next(parent for parent in (directory, *directory.absolute().parents) if parent.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise CheckpointError(
            f"{what}: found {free} bytes free in {there}, needed {needed}; make room or choose another disk"
        )


def write_streamed(
    files: LocalFiles, directory: Path, identity: Identity, sources: Mapping[str, Source]
) -> tuple[FileEntry, dict[str, int], dict[str, int]]:
    """Write and flush a checkpoint's file without ever holding a whole tensor.

    Returns:
        What the manifest holds of the file, each tensor's checksum, and where its bytes start in the data.

    Cost: reads each source once; memory of a few MiB.

    Raises:
        OSError: as the disk said.
    """
    parts = [Part(n, s.dtype, s.shape, whole(s.shape)) for n, s in sources.items() if whole(s.shape).num_elements]
    arranged = arrange(parts)
    size = sum(part.num_bytes for part in parts)
    header = header_bytes(identity, arranged, size)
    path = directory / file_name(identity.rank)
    digests, sums = BlockDigests(), dict.fromkeys(sources, 0)
    descriptor = files.create(path)
    try:
        files.write(descriptor, path, memoryview(header))
        for part, _ in arranged:
            for box, data in slabs(sources[part.name]):
                value = contribution(words_of(data, box.sizes, part.dtype), word_box(box, part.dtype))
                sums[part.name] = (sums[part.name] + value) & MASK
                view = memoryview(data.tobytes())
                digests.add(view)
                files.write(descriptor, path, view)
        table = digests.table()
        files.write(descriptor, path, memoryview(table))
        files.sync(descriptor, path)
    finally:
        files.close(descriptor, path)
    starts = {part.name: start for part, start in arranged}
    return FileEntry(path.name, len(header) + size + len(table), seal_of(header, table)), sums, starts


def total_bytes(sources: Mapping[str, Source]) -> int:
    """Of all tensors together."""
    return sum(num_bytes(source) for source in sources.values())


def overflow_notes(sources: Mapping[str, Source]) -> list[str]:
    """For each type what to say of finite elements that are infinite in it, once all sources were read."""
    counts: dict[str, dict[str, int]] = {}
    for name, source in sources.items():
        while isinstance(source, Cast):
            if source.overflowed:
                counts.setdefault(source.dtype, {})[name] = sum(source.overflowed.values())
            source = source.source
    return [
        f"the values of {sum(named.values())} elements too large for {dtype}, infinite now: in {shown(list(named))}"
        for dtype, named in counts.items()
    ]
