"""Doing something on every rank so that all of them succeed, or all raise the same `CheckpointError`."""

from __future__ import annotations

import errno
import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist

from shardwise.checkpoint.format import DamagedError
from shardwise.checkpoint.torch_private import set_timeout
from shardwise.errors import CheckpointError
from shardwise.parallel import together
from shardwise.parallel.mesh import Mesh

T = TypeVar("T")
U = TypeVar("U")
WRITING_S = 1800.0
"""Seconds that ranks wait at least for others that write, beside training."""


@dataclass(frozen=True)
class Peers:
    """The ranks that do something together, over the group of the run or over one of their own."""

    rank: int
    world: int
    group: dist.ProcessGroup | None = None
    """None: that of the world."""
    patience_s: float = math.inf
    """How long ranks that meet wait for each other."""

    @classmethod
    def of(cls, mesh: Mesh) -> Peers:
        """All ranks of a mesh.

        Raises:
            UsageError: the mesh is closed.
        """
        mesh.check_open("checkpoints")
        return cls(mesh.rank, mesh.world, patience_s=together.patience_s(mesh))

    @classmethod
    def apart(cls, mesh: Mesh, place: Path) -> Peers:
        """The same ranks on a gloo group of their own: others may be in the messages of a step when one saves alone.

        All stores at a place have the same one, as their saves take turns: a script may make a store for each save.
        Every rank calls it.
        """
        peers = cls.of(mesh)
        return (
            peers if peers.world == 1 else replace(peers, group=together.group_apart(mesh, "checkpoints", str(place)))
        )

    def gather(self, value: T) -> list[T]:
        """The value of every rank, by rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.group)
        return values

    def meet(self, value: T) -> list[T]:
        """`gather` in a group apart, where some may not come; later they may wait longer there: files are written."""
        if self.group is not None:
            set_timeout(self.group, self.patience_s)
        values = self.gather(value)
        if self.group is not None:
            set_timeout(self.group, max(self.patience_s, WRITING_S))
        return values

    def warn(self, text: str) -> None:
        """On rank 0 a `UserWarning`; `-W error` does not end a run that can go on."""
        if self.rank == 0:
            with suppress(Warning):
                warnings.warn(text, stacklevel=5)

    def together(self, doing: str, work: Callable[[], T]) -> T:
        """Run `work` on every rank; if any rank failed, all raise what the lowest failed rank found.

        Args:
            doing: what failed, for the message.
            work: called once on each rank.

        Raises:
            CheckpointError: naming the rank and its reason; a `DamagedError` when every failure is one.
        """
        return self.meeting(doing, lambda: (work(), None))[0]

    def on_first(self, doing: str, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 and give its result to all; if it failed, all raise.

        Raises:
            CheckpointError: as `together`.
        """
        return cast(T, self.from_all(doing, lambda: work() if self.rank == 0 else None)[0])  # others give None

    def from_all(self, doing: str, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank and give all results to all, by rank; if any failed, all raise.

        Raises:
            CheckpointError: as `together`.
        """
        return self.meeting(doing, lambda: (None, work()))[1]

    def meeting(self, doing: str, work: Callable[[], tuple[T, U]]) -> tuple[T, list[U]]:
        """Run `work` on every rank: its first result stays here, its second is told to all, by rank; one gather.

        Raises:
            CheckpointError: as `together`.
        """
        own, says, failure, cause = cast(T, None), cast(U, None), None, None
        try:
            own, says = work()
        except Exception as error:  # whatever it is: the other ranks wait for this one's word
            failure, cause = (isinstance(error, DamagedError), f"rank {self.rank}: {reason(error)}"), error
        told = self.gather((failure, says))
        failures = [found for found, _ in told if found is not None]
        if failures:
            kind = DamagedError if all(damaged for damaged, _ in failures) else CheckpointError
            raise kind(f"{doing}: {failures[0][1]}") from cause
        everyones = [value for _, value in told]
        everyones[self.rank] = says
        return own, everyones


def reason(error: BaseException) -> str:
    """What an error says, and what to do about it."""
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        where = " -> ".join(str(name) for name in (error.filename, error.filename2) if name)  # the second: of a rename
        found = f"{error.strerror} ({where})" if where else error.strerror
        return found + to_do(error)
    return f"{type(error).__name__}: {error}".splitlines()[0]


def to_do(error: OSError) -> str:
    """What helps against an error of the disk, behind a semicolon; empty where nobody knows."""
    return _TO_DO.get(error.errno or 0, "")


_TO_DO = {
    errno.ENOSPC: "; free some space there",
    errno.EDQUOT: "; free some space there, or have the quota raised",
    errno.EROFS: "; choose a directory that can be written to",
    errno.EACCES: "; have this user write there, or choose another directory",
}


def late_told(doing: str, peers: Peers) -> AbstractContextManager[None]:
    """Within it ranks wait for each other: see `together.late_told`.

    Raises:
        CheckpointError: within it, they have not come when the time limit of the mesh is nearly over.
    """
    return together.late_told(doing, peers.rank, peers.world - 1, peers.patience_s, CheckpointError)
