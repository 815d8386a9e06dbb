"""The dials of `shardwise.loader`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, TypedDict

from shardwise.errors import ConfigError
from shardwise.findings import nearest

Collate = Callable[[list[Any]], Any]


class LoaderKeywords(TypedDict, total=False):
    """`LoaderOptions` as keyword arguments of `loader`."""

    seed: int
    shuffle: bool | None
    epochs: int | None
    drop_last: bool
    global_size: int | None
    collate: Collate | None
    workers: int
    prefetch: int | None
    pin_memory: bool
    persistent_workers: bool
    timeout_s: float
    worker_init: Callable[[int], None] | None
    worker_context: str | None
    sharded: bool


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """How a data set is read. None of these but `seed`, `shuffle` and `sharded` changes which samples a step gets."""

    seed: int = 0
    """The order of every epoch follows from it."""
    shuffle: bool | None = None
    """None: yes for a data set with a length, no for a stream (which cannot be shuffled)."""
    epochs: int | None = None
    """Passes over the data; None: without end."""
    drop_last: bool = False
    """Leave out the last window of the last epoch when it is not full."""
    global_size: int | None = None
    """Rows of a step over all ranks, where the plan's batch does not say."""
    collate: Collate | None = None
    """List of samples -> micro-batch; None: the data set's own `get_batch(indices)`, else torch's `default_collate`."""
    workers: int = 0
    """Processes that read ahead; 0: read where the step runs."""
    prefetch: int | None = None
    """Micro-batches that each worker holds ready; None: 2."""
    pin_memory: bool = False
    """Page-locked host memory, for asynchronous copies; without an accelerator there is nothing to pin for."""
    persistent_workers: bool = False
    """Keep the workers when the loader is moved to another position."""
    timeout_s: float = 0.0
    """Seconds to wait for a worker's micro-batch; 0: for ever."""
    worker_init: Callable[[int], None] | None = None
    """Called in each worker with its number."""
    worker_context: str | None = None
    """`fork`, `spawn` or `forkserver`; None: the system's."""
    sharded: bool = False
    """Streams only: each rank's iterable gives this rank's own samples already."""

    def __post_init__(self) -> None:
        for name, least in (("workers", 0), ("epochs", 1), ("prefetch", 1), ("global_size", 1), ("timeout_s", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"loader: {name}={value}; needed: {least} or more; correct the option {name!r}")
        if self.workers == 0:
            given = [name for name in ("prefetch", "persistent_workers", "worker_context") if getattr(self, name)]
            if given:
                raise ConfigError(
                    f"loader: {', '.join(given)} without worker processes (workers=0); needed: workers=1 or more; "
                    f"set workers, or leave out {', '.join(given)}"
                )

    def changed(self, keywords: LoaderKeywords) -> LoaderOptions:
        """A copy with some options replaced.

        Raises:
            ConfigError: an option that does not exist; names the nearest.
        """
        known = [field.name for field in fields(self)]
        for name in keywords:
            if name not in known:
                raise ConfigError(f"loader: unknown option {name!r}; {nearest(name, known)}")
        return replace(self, **keywords)
