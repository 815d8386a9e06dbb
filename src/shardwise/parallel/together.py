"""What every rank must call, apart from the messages of a step: one that is alone says so, and waits not for ever."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from shardwise.errors import ShardwiseError, UsageError
from shardwise.parallel.mesh import Mesh

LATE_S = 30.0
"""Seconds that a rank waits for others before it says so."""
_PATIENCE = 0.9
"""Of the time limit of a mesh: who waits here for ranks that are in a step says so before these give up on it."""


def patience_s(mesh: Mesh) -> float:
    """How long ranks that meet beside a step wait for each other."""
    return _PATIENCE * mesh.timeout_s


def group_apart(mesh: Mesh, *key: str) -> dist.ProcessGroup:
    """All ranks in a gloo group of its own: others may be in the messages of a step. Every rank calls it.

    Args:
        mesh: keeps it.
        key: the same one gives the same group.
    """
    if key not in mesh.groups:
        mesh.groups[key] = dist.new_group(backend="gloo", timeout=timedelta(seconds=patience_s(mesh)))
    return mesh.groups[key]


@contextmanager
def late_told(doing: str, rank: int, others: int, wait_s: float, error: type[ShardwiseError]) -> Iterator[None]:
    """A warning where the other ranks do not come within `LATE_S`: some script has one rank call it alone.

    Args:
        doing: what every rank must call, for the messages.
        rank: this one.
        others: how many there are beside it.
        wait_s: how long ranks wait for each other within.
        error: what is raised.

    Raises:
        ShardwiseError: of the type `error`: they have not come when the time limit of the mesh is nearly over.
    """

    def tell() -> None:
        with suppress(Warning):
            warnings.warn(
                f"{doing}: rank {rank} has waited {LATE_S:g} s for the other ranks; every rank must call it "
                "(no `if rank == 0`: each has its part in it)",
                stacklevel=2,
            )

    timer = threading.Timer(LATE_S, tell)
    timer.daemon = True
    if others:
        timer.start()
    start = time.monotonic()
    try:
        yield
    except RuntimeError as ended:
        waited = time.monotonic() - start
        if waited < _PATIENCE * wait_s:  # one that ended, and not one that did not come
            raise
        raise error(
            f"{doing}: rank {rank} has waited {waited:.0f} s for the other ranks, and not all of them came; "
            "every rank must call it, behind the same step (no `if rank == 0`, no `break` that only some ranks take)"
        ) from ended
    finally:
        timer.cancel()


def come_together(doing: str, mesh: Mesh) -> None:
    """Wait until every rank has called something.

    Messages of one that is alone would be taken for those of the others' step: gloo ends the process, or numbers of one
    become another's.

    Args:
        doing: what every rank must call, for the messages.
        mesh: of all of them.

    Raises:
        UsageError: not all have come when the time limit of the mesh is nearly over.

    Cost: a barrier; at the first one a group.
    """
    if mesh.world == 1 or dist.get_backend() == "fake":
        return
    mesh.check_open(doing)
    with late_told(doing, mesh.rank, mesh.world - 1, patience_s(mesh), UsageError):
        dist.barrier(group=group_apart(mesh, "calls"))


def how_many(mesh: Mesh, *, is_here: bool) -> int:
    """On how many ranks something is there. Every rank calls it, between two `come_together`.

    Cost: an all-reduce of one number, on the host.
    """
    if mesh.world == 1 or dist.get_backend() == "fake":
        return mesh.world * is_here
    count = torch.tensor(int(is_here))
    dist.all_reduce(count, group=group_apart(mesh, "calls"))
    return int(count)
