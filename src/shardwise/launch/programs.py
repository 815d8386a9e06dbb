"""`run_programs`: ranks that are programs of their own, started and closed by torch elastic's process contexts.

Its agent is not used: on a signal it ends ranks within its own time limit and exits with 1, and on a failure it waits
30 s for ranks that hang. The rendezvous store lives in this process, on a port that it holds from the start: no race
for a free port.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, and not in its type stubs
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from shardwise.errors import LaunchError
from shardwise.launch.forking.forks import environments
from shardwise.launch.forking.keeper import open_store
from shardwise.launch.job import ADDRESS, Job
from shardwise.launch.local import Outcome, check_port, outcome_of, wait_for
from shardwise.launch.stopping import STOP_SIGNALS, Stopping, catching


def run_programs(job: Job, stopping: Stopping | None = None) -> Outcome:
    """Start a job's ranks on this machine, and wait until all have ended; by the policy of `run_local`.

    Cost: importing torch here and in each rank (one to three seconds of a core), a poll every 50 ms. Must be called
    from the main thread (signals). Output of the ranks goes to this process's own streams.

    Args:
        job: what they run.
        stopping: of a caller that is `catching` signals already.

    Raises:
        LaunchError: the port is in use, or processes cannot be started.

    Example:
        >>> run_programs(Job(target="train.py", args=("dp2",), nproc=2)).exit_code  # doctest: +SKIP
        <ExitCode.OK: 0>
    """
    store = _store(job)
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        files = {rank: Path(folder, f"error-{rank}.json") for rank in range(job.nproc)}
        with catching(stopping) as stopping:
            if stopping.first is not None:
                return outcome_of({}, files, stopping)
            with _quiet_elastic(), _started(job, store.port, files, folder) as programs:
                return wait_for(job, programs, files, stopping)


class _Programs:
    """Ranks that are programs of their own."""

    def __init__(self, context: SubprocessContext) -> None:
        self._processes = {rank: handler.proc for rank, handler in context.subprocess_handlers.items()}
        self._codes = dict[int, int]()
        """In order of time."""

    def codes(self, wait_s: float) -> dict[int, int]:
        time.sleep(wait_s)
        for rank, process in self._processes.items():
            if rank not in self._codes and (code := process.poll()) is not None:
                self._codes[rank] = code
        return self._codes

    def send(self, number: signal.Signals) -> None:
        for process in self._processes.values():
            if process.returncode is not None:
                continue
            with suppress(ProcessLookupError, PermissionError):
                if number == signal.SIGKILL:
                    os.killpg(process.pid, number)  # elastic made each rank the leader of a group
                else:
                    os.kill(process.pid, number)


def _store(job: Job) -> TCPStore:
    check_port(job)
    try:
        return open_store(ADDRESS, job.port)
    except (OSError, RuntimeError) as error:
        raise LaunchError(
            f"cannot open the rendezvous on {ADDRESS}:{job.port or 'a free port'}: {str(error).splitlines()[0]}; "
            f"choose another port"
        ) from None


@contextmanager
def _started(job: Job, port: int, files: dict[int, Path], folder: str) -> Iterator[_Programs]:
    previous = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, signal.SIGQUIT)}
    # Elastic installs handlers that raise: held back until ours are in place again, or ranks started so far would
    # be lost. The ranks inherit the mask; our entry point opens it.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        context = start_processes(
            name="shardwise",
            entrypoint=sys.executable,
            args={rank: job.command(reporting=(rank, path))[1:] for rank, path in files.items()},
            envs=dict(enumerate(environments(job, port))),
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        assert isinstance(context, SubprocessContext)
    except OSError as error:
        raise LaunchError(f"cannot start {job.nproc} processes of {sys.executable}: {error}") from error
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    try:
        yield _Programs(context)
    finally:
        context.close(signal.SIGKILL, timeout=2)


@contextmanager
def _quiet_elastic() -> Iterator[None]:
    """Elastic logs each signal that it sends as a warning on the user's terminal."""
    logger = logging.getLogger("torch.distributed.elastic")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
