"""Doing something on every rank so that all of them succeed, or all raise the same `CheckpointError`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from shardwise.checkpoint.manifest import DamagedError
from shardwise.errors import CheckpointError
from shardwise.parallel.mesh import Mesh

T = TypeVar("T")


def together(mesh: Mesh, doing: str, work: Callable[[], T]) -> T:
    """Run `work` on every rank; if any rank failed, all raise what the lowest failed rank found.

    Args:
        mesh: of all ranks that take part.
        doing: what failed, for the message.
        work: called once on each rank.

    Raises:
        CheckpointError: naming the rank and its reason; a `DamagedError` when every failure is one.
    """
    result: list[T] = []
    failure: tuple[bool, str] | None = None
    cause: BaseException | None = None
    try:
        result.append(work())
    except CheckpointException as error:  # torch's: a BaseException that names the failed ranks itself
        rank, (inner, _) = min(error.failures.items())
        failure, cause = (False, f"rank {rank}: {_reason(inner)}"), error
    except Exception as error:
        failure, cause = (isinstance(error, DamagedError), f"rank {mesh.rank}: {_reason(error)}"), error
    failures = [f for f in gather(mesh, failure) if f is not None]
    if failures:
        kind = DamagedError if all(damaged for damaged, _ in failures) else CheckpointError
        raise kind(f"{doing}: {failures[0][1]}") from cause
    return result[0]


def on_first(mesh: Mesh, doing: str, work: Callable[[], T]) -> T:
    """Run `work` on rank 0 and give its result to all; if it failed, all raise.

    Raises:
        CheckpointError: as `together`.
    """
    return gather(mesh, together(mesh, doing, lambda: work() if mesh.is_first else None))[0]  # type: ignore[return-value]


def gather(mesh: Mesh, value: T) -> list[T]:
    """The value of every rank, by rank."""
    if mesh.world == 1:
        return [value]
    values: list[Any] = [None] * mesh.world
    dist.all_gather_object(values, value)
    return values


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}".splitlines()[0]
