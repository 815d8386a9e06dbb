"""A warm world of forked processes, for `verify` and tests: torch is imported once, workers are forked in milliseconds.

A nursery process is forked before torch has started any thread; it forks the workers of each call. Fork in place
of spawn: 4 processes reach their first step in a second in place of half a minute, since none imports torch
again. Workers are not kept: DTensor caches meshes by value, and a later call would meet groups that are gone.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import multiprocessing as mp
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.errors import UsageError
from shardwise.launch.echo import is_echo
from shardwise.launch.entry import die_with_parent
from shardwise.launch.warm import WARM

_fork = mp.get_context("fork")


class WorldError(AssertionError):
    """A function failed on some rank; the message holds that rank's traceback."""


@dataclass(frozen=True)
class _Job:
    world: int
    payload: bytes
    """Pickled (function, arguments)."""
    path: tuple[str, ...]
    directory: str
    timeout_s: float
    env: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class _Preload:
    modules: tuple[str, ...]
    path: tuple[str, ...]


class World:
    """A pool of up to `size` warm processes. Fork it before the parent runs any autograd.

    >>> world = World(4)  # doctest: +SKIP
    >>> world(2, function, argument)  # one result per rank  # doctest: +SKIP
    """

    def __init__(self, size: int = 8) -> None:
        """Fork the nursery."""
        self.size = size
        for name in WARM:
            importlib.import_module(name)
        self._here, there = _fork.Pipe()
        self._nursery = _fork.Process(target=_nursery, args=(there, self._here))
        self._nursery.start()
        there.close()
        atexit.register(self._here.close)  # a script that ends by an error would wait for the pool without an end

    def __call__(
        self, num_ranks: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0, **env: str
    ) -> list[Any]:
        """Run a module-level function in `num_ranks` processes and return its results, one per rank.

        Each process has the variables of a launcher (RANK, WORLD_SIZE, ...), so `open_mesh` works inside.

        Raises:
            WorldError: a rank raised, died or did not end within `timeout_s` seconds.
            KeyboardInterrupt: Ctrl-C ended a rank, whose terminal is this process's too.
        """
        if not 1 <= num_ranks <= self.size:
            raise ValueError(f"world({num_ranks}): this pool has 1 to {self.size} processes")
        with tempfile.TemporaryDirectory(prefix="shardwise-world-") as directory:
            try:
                payload = pickle.dumps((function, args))
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise UsageError(
                    f"world: {getattr(function, '__name__', function)} goes to other processes by name, with its "
                    f"arguments, and cannot: {error}; use functions at the top level of a module, and plain data"
                ) from error
            self._here.send(_Job(num_ranks, payload, tuple(sys.path), directory, timeout_s, tuple(env.items())))
            results: list[tuple[bool, bytes]] = self._here.recv()
        failures = [f"rank {rank}:\n{data.decode()}" for rank, (ok, data) in enumerate(results) if not ok]
        failures.sort(key=lambda text: is_echo(text) and "the process died" not in text)  # the cause comes first
        if any(not ok and data.startswith(_died(-signal.SIGINT)) for ok, data in results):
            raise KeyboardInterrupt
        if failures:
            raise WorldError("\n".join(failures))
        return [pickle.loads(data) for _, data in results]

    def preload(self, *modules: str) -> None:
        """Import modules where workers are forked from, so that none of them does; e.g. `transformers`.

        A module must start no threads when it is imported.

        Raises:
            WorldError: a module cannot be imported.
        """
        self._here.send(_Preload(modules, tuple(sys.path)))
        failure: str | None = self._here.recv()
        if failure is not None:
            raise WorldError(f"preload: {failure}")

    def close(self) -> None:
        """End every process of the pool."""
        atexit.unregister(self._here.close)
        self._here.close()
        self._nursery.join(timeout=10)
        if self._nursery.is_alive():
            self._nursery.terminate()


def _nursery(parent: Connection, parents_end: Connection) -> None:
    """Fork fresh workers for each job; ends when the parent's end of the pipe closes."""
    parents_end.close()  # its copy here would keep the pipe open for ever
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            job: _Job | _Preload = parent.recv()
        except (EOFError, OSError):
            return
        if isinstance(job, _Preload):
            parent.send(_import(job))
            continue
        gc.freeze()  # a collection in a worker would write to, and so copy, every page that it shares with this process
        crew = [_start_worker(rank, job) for rank in range(job.world)]
        results = _collect(crew, job, parent)
        for process, _ in crew:  # all, before the first is waited for: the others would say that they have lost it
            process.kill()
        for process, pipe in crew:
            process.join()
            pipe.close()
        try:
            parent.send(results)
        except OSError:  # the parent was interrupted and closed its end
            return


def _import(job: _Preload) -> str | None:
    """Why a module cannot be imported; None: all are."""
    sys.path[:] = list(job.path)
    for name in job.modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever a module does when it is imported
            return f"{name}: {type(error).__name__}: {error}"
    return None


def _start_worker(rank: int, job: _Job) -> tuple[mp.process.BaseProcess, Connection]:
    here, there = _fork.Pipe(duplex=False)
    # no daemon: a data loader's workers are children of its own; the nursery ends every worker itself
    process = _fork.Process(target=_worker, args=(there, rank, job, os.getpid()), daemon=False)
    process.start()
    there.close()
    return process, here


def _collect(
    crew: list[tuple[mp.process.BaseProcess, Connection]], job: _Job, parent: Connection
) -> list[tuple[bool, bytes]]:
    """One (ok, data) per rank. After a first failure the others get 5 s: they may wait for it in a collective.

    Who asked says nothing meanwhile: what comes from there is its end, and nobody waits for results.
    """
    results: list[tuple[bool, bytes]] = [
        (False, b"no answer: hung until the time limit, or ended with the others")
    ] * len(crew)
    open_ranks = dict(enumerate(crew))
    deadline = time.monotonic() + job.timeout_s
    while open_ranks and time.monotonic() < deadline:
        pipes = {pipe: rank for rank, (_, pipe) in open_ranks.items()}
        for pipe in wait([*pipes, parent], timeout=0.5):
            assert isinstance(pipe, Connection)
            if pipe is parent:
                return results
            rank = pipes[pipe]
            process, _ = open_ranks.pop(rank)
            try:
                results[rank] = pipe.recv()
            except (EOFError, OSError):
                process.join(timeout=2)
                crash = ""
                with suppress(OSError):  # who asked has been interrupted, and has taken the directory away
                    crash = _crash(rank, job).read_text(errors="replace")
                results[rank] = (False, _died(process.exitcode) + f"\n{crash}".rstrip().encode())
            if not results[rank][0]:
                deadline = min(deadline, time.monotonic() + 5)
    return results


def _died(code: int | None) -> bytes:
    return f"the process died (exit code {code})".encode()


def _crash(rank: int, job: _Job) -> Path:
    """Where a rank leaves its threads' Python frames when native code ends it (SIGSEGV, SIGABRT, ...)."""
    return Path(job.directory, f"crash{rank}.txt")


def _worker(pipe: Connection, rank: int, job: _Job, nursery: int) -> None:
    die_with_parent(nursery, signal.SIGKILL)
    with suppress(OSError):
        faulthandler.enable(_crash(rank, job).open("w"))
    torch.set_num_threads(1)
    os.environ.update(_environment(rank, job))
    sys.path[:] = list(job.path)
    torch.manual_seed(0)
    try:
        function, args = pickle.loads(job.payload)
        answer = (True, pickle.dumps(function(*args)))
    except BaseException:  # whatever it was, the caller reports it
        answer = (False, traceback.format_exc().encode())
    if dist.is_initialized() and answer[0]:
        dist.destroy_process_group()
    pipe.send(answer)
    pipe.close()
    os._exit(0)  # no exit handlers: those are the parent's


def _environment(rank: int, job: _Job) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(job.world),
        "LOCAL_WORLD_SIZE": str(job.world),
        "SHARDWISE_INIT": f"file://{job.directory}/rendezvous",
        **dict(job.env),
    }
