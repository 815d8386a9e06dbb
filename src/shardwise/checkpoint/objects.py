"""A store at a URL: what is promised without rename, directory and flush.

step-00000500.save-9c8d7e6f/   a save: a checkpoint from the moment that its manifest is there, and never before

Every save has names of its own, so that nothing is overwritten but the pointer and what a writer that was thought dead
still sends hits no other save. The manifest is put last, in one request, when every rank's object is there with its
size; a removal takes the manifest first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from shardwise.checkpoint.directory import NAME, Directory, StoreDirectory
from shardwise.checkpoint.files import LOCAL, Files, LocalFiles
from shardwise.checkpoint.manifest import FILE, Manifest
from shardwise.checkpoint.remote import RemoteFiles, RemotePath
from shardwise.errors import CheckpointError, UsageError


def directory_of(path: Path, files: Files = LOCAL) -> StoreDirectory:
    """The directory of a store, at a path or a URL.

    Raises:
        CheckpointError: nothing reads such a URL.
        UsageError: the file system is not one for this path.
    """
    if isinstance(path, RemotePath):
        return ObjectDirectory(path, files if isinstance(files, RemoteFiles) else RemoteFiles(path))
    if not isinstance(files, LocalFiles):
        raise UsageError(f"{path}: found {type(files).__name__} for a path, needed LocalFiles; give it, or a URL")
    return Directory(path, files)


class ObjectDirectory(StoreDirectory):
    """A store's directory at a URL.

    >>> ObjectDirectory(url := RemotePath("memory://nowhere"), RemoteFiles(url)).listing().complete
    ()
    """

    kind_of_save = "save"
    files: RemoteFiles

    def __init__(self, path: RemotePath, files: RemoteFiles) -> None:
        """Look at nothing yet."""
        super().__init__(path)
        self.files = files

    def check_shared(self, world: int) -> None:
        """See `StoreDirectory`."""
        if self.files.root.scheme == "memory" and world > 1:
            raise CheckpointError(
                f"store {self.path}: found {world} ranks, of which each sees the memory of its own process; needed one "
                "rank; choose a directory, or an object store that all ranks reach"
            )

    def check_seen(self, partial: Path, rank: int) -> None:
        """There is nothing to see before an object is written: `commit` looks for those of all ranks."""

    def commit(self, partial: Path, manifest: Manifest) -> Path:
        """As every directory, when every object that the manifest will list is there.

        Raises:
            CheckpointError: one is not, or is of another size.
        """
        there = self.files.listed(partial)
        for rank, entry in enumerate(manifest.files):
            size = there.get(entry.name)
            if size != entry.size_bytes:
                raise CheckpointError(
                    f"{partial / entry.name}: rank {rank} wrote {entry.size_bytes} bytes, found "
                    f"{'none' if size is None else size}; needed one place for all ranks; give every rank the same "
                    "endpoint, bucket and rights"
                )
        return super().commit(partial, manifest)

    def _publish(self, partial: Path, step: int) -> Path:
        return partial  # its manifest is there

    def _clean(self) -> None:
        for _, kind, entry in self._entries():
            if kind == "partial":
                self.discard(entry)

    def discard(self, partial: Path) -> None:
        """See `StoreDirectory`; one whose manifest has arrived is a checkpoint, though no answer said so."""
        if not self.files.is_file(partial / FILE):
            self.remove_all([partial])

    def remove_all(self, checkpoints: Sequence[Path]) -> None:
        """See `StoreDirectory`."""
        for checkpoint in checkpoints:
            with suppress(FileNotFoundError):
                self.files.remove(checkpoint / FILE)
            with suppress(FileNotFoundError):
                self.files.remove_tree(checkpoint)

    def replace_text(self, name: str, text: str) -> None:
        """See `StoreDirectory`."""
        self.files.write_whole(self.path / name, text.encode())

    def _entries(self) -> Iterator[tuple[int, str, Path]]:
        """As every directory; a save without manifest is partial, unless `latest` says that it had one."""
        listed, named = self.files.listed(self.path), self._pointer()
        if named not in listed and NAME.fullmatch(named) and self.files.is_directory(self.path / named):
            listed[named] = None
        for name, size in listed.items():
            match = NAME.fullmatch(name)
            if match and size is None:
                kind = match[2] or ""
                if not self.files.is_file(self.path / name / FILE) and named != name:
                    kind = "partial"
                yield int(match[1]), kind, self.path / name
