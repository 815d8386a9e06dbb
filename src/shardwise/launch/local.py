"""`run_local`: the ranks of a job on this machine, ended by one policy.

Several ranks are forked from a server that has imported torch once (Linux); others are programs of their own, started
and closed by torch elastic's process contexts. Its agent is not used: on a signal it ends ranks within its own time
limit and exits with 1, and on a failure it waits 30 s for ranks that hang. Here:

- the first failure (by time, echoes of lost connections last) is the one reported; the others end within seconds;
- a first Ctrl-C, SIGTERM or SIGUSR1 is passed to the ranks, which finish their step and save; a second one, or the
  end of the grace period, kills them.

The rendezvous store lives in this process, on a port that it holds from the start: no race for a free port.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, and not in its type stubs
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from shardwise.errors import ExitCode, LaunchError
from shardwise.launch.forks import POLL_S, Forks, environments
from shardwise.launch.job import ADDRESS, Job
from shardwise.launch.server import Server
from shardwise.launch.stopping import STOP_SIGNALS, Stopping, catching

_CODES = {signal.SIGINT: ExitCode.INTERRUPTED, signal.SIGUSR1: ExitCode.PREEMPTED}
_ASKED = (ExitCode.INTERRUPTED, ExitCode.PREEMPTED, ExitCode.TERMINATED)
_ECHO = re.compile(r"onnection (?:was )?(?:closed|reset)|roken pipe|gloo/transport|remote (?:process|peer)|Abort", re.I)
"""Texts of a rank that lost a peer: true, but not the cause."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The first rank that failed and what it said."""

    rank: int
    message: str
    exit_code: ExitCode
    traceback: str = ""
    """Empty for an error that Shardwise raised on purpose, and for a rank that was killed."""
    halving: Mapping[str, Any] | None = None
    """What the rank asks for that ran out of memory; see `OutOfMemoryError`."""

    def __str__(self) -> str:
        text = f"rank {self.rank} failed: {self.message}"
        return f"{self.traceback.rstrip()}\n\n{text}" if self.traceback else text


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a job ended."""

    exit_code: ExitCode
    failure: Failure | None = None


class _Ranks(Protocol):
    """Processes that run, one per rank."""

    def codes(self, wait_s: float) -> dict[int, int]:
        """Exit codes of those that have ended, after at most so long; negative: the signal, as `subprocess` says it."""
        ...

    def send(self, number: signal.Signals) -> None:
        """Signal those that run; only SIGKILL goes to their children too: data workers must outlive a save."""
        ...


def run_local(job: Job, server: Server | None = None, stopping: Stopping | None = None) -> Outcome:
    """Run a job's ranks on this machine until all have ended.

    Cost: importing torch here and in the server, or in each rank (one to three seconds of a core), a poll every 50 ms.
    Must be called from the main thread (signals). Output of the ranks goes to this process's own streams.

    Args:
        job: what they run.
        server: where they are forked (`server_for(job)`); None: each one is started as any program is.
        stopping: of a caller that is `catching` signals already.

    Raises:
        LaunchError: the port is in use, or processes cannot be started.

    Example:
        >>> run_local(Job(target="train.py", args=("dp2",), nproc=2)).exit_code  # doctest: +SKIP
        <ExitCode.OK: 0>
    """
    store = _host_store(job)
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        files = {rank: Path(folder, f"error-{rank}.json") for rank in range(job.nproc)}
        with catching(stopping) as stopping:
            if stopping.first is not None:
                return outcome_of({}, files, stopping)
            if server is not None:
                codes = _wait(job, _Forked(job, server, store.port, files), stopping)
            else:
                with _quiet_elastic(), _started(job, store.port, files, folder) as programs:
                    codes = _wait(job, programs, stopping)
        return outcome_of(codes, files, stopping)


class _Forked:
    """Ranks that the fork server forks."""

    def __init__(self, job: Job, server: Server, port: int, files: Mapping[int, Path]) -> None:
        self._forks, self._codes = Forks(server), dict[int, int]()
        self._forks.start(1, job, environments(job, port), files)

    def codes(self, wait_s: float) -> dict[int, int]:
        self._codes |= {rank: code for _, rank, code in self._forks.poll(wait_s)}
        return self._codes

    def send(self, number: signal.Signals) -> None:
        self._forks.signal(1, number)


class _Programs:
    """Ranks that are programs of their own."""

    def __init__(self, context: SubprocessContext) -> None:
        self._processes = {rank: handler.proc for rank, handler in context.subprocess_handlers.items()}

    def codes(self, wait_s: float) -> dict[int, int]:
        time.sleep(wait_s)
        return {rank: code for rank, process in self._processes.items() if (code := process.poll()) is not None}

    def send(self, number: signal.Signals) -> None:
        for process in self._processes.values():
            if process.returncode is not None:
                continue
            with suppress(ProcessLookupError, PermissionError):
                if number == signal.SIGKILL:
                    os.killpg(process.pid, number)  # elastic made each rank the leader of a group
                else:
                    os.kill(process.pid, number)


def _host_store(job: Job) -> TCPStore:
    if job.port:
        # Asked first: torch's own error is a page of C++ frames, and its store may share a port with another one.
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((ADDRESS, job.port))
            except OSError as error:
                raise LaunchError(
                    f"cannot open the rendezvous on {ADDRESS}:{job.port}: {error.strerror or error}; "
                    f"choose another port, or leave --port out and a free one is taken"
                ) from None
    try:
        return TCPStore(ADDRESS, job.port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    except RuntimeError as error:
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


def _wait(job: Job, ranks: _Ranks, stopping: Stopping) -> dict[int, int]:
    """Exit code of every rank."""
    deadline: float | None = None
    told, forwarded = False, 0
    while True:
        codes = ranks.codes(POLL_S)
        if len(codes) == job.nproc:
            return codes
        if stopping.count > forwarded:
            forwarded = stopping.count
            ranks.send(stopping.forward)
        if stopping.first and job.signal_grace_s and time.monotonic() - stopping.at > job.signal_grace_s:
            stopping.killed = True
            ranks.send(signal.SIGKILL)
        if codes and deadline is None and stopping.first is not None:
            deadline = time.monotonic() + job.stop_grace_s
        if any(code != 0 for code in codes.values()) and not told and stopping.first is None:
            told, deadline = True, time.monotonic() + job.grace_s
            codes = ranks.codes(POLL_S)  # a rank that fails by itself at the same time says why; give it the chance
            ranks.send(signal.SIGTERM)
        if deadline is not None and time.monotonic() > deadline:
            ranks.send(signal.SIGKILL)


def outcome_of(codes: dict[int, int], files: dict[int, Path], stopping: Stopping) -> Outcome:
    """How a job ended, from its ranks' exit codes, the errors that they left, and the signals that came."""
    failure = first_failure(codes, files)
    by_signal = _CODES.get(stopping.first or signal.SIGTERM, ExitCode.TERMINATED)
    asked = {code for code in codes.values() if code in _ASKED}
    if stopping.killed and -signal.SIGKILL in codes.values():
        return Outcome(exit_code=ExitCode.KILLED)
    if failure is not None and not (stopping.first and _ECHO.search(failure.message)):
        return Outcome(exit_code=failure.exit_code, failure=failure)
    if stopping.first is not None:
        return Outcome(exit_code=by_signal)
    if asked:  # a scheduler signalled the ranks and not this process
        return Outcome(exit_code=ExitCode(min(asked)))
    same = set(codes.values())
    if len(same) == 1 and same <= set(ExitCode) and not any(path.exists() for path in files.values()):
        return Outcome(exit_code=ExitCode(same.pop()))  # all ranks ended in agreement: `steps` on a bad gradient
    dead = _silent_deaths(codes, files) or [(rank, code) for rank, code in codes.items() if code != 0]
    if not dead:
        return Outcome(exit_code=ExitCode.OK)
    failure = Failure(rank=dead[0][0], message=death(dead[0][1]), exit_code=ExitCode.RANK_FAILED)
    return Outcome(exit_code=failure.exit_code, failure=failure)


def _silent_deaths(codes: dict[int, int], files: dict[int, Path]) -> list[tuple[int, int]]:
    """Ranks that were killed or called `exit`, and said nothing; not those that were told to end."""
    expected = (0, -signal.SIGTERM, -signal.SIGUSR1, *_ASKED)
    return [(rank, code) for rank, code in codes.items() if code not in expected and not files[rank].exists()]


def first_failure(codes: dict[int, int], files: dict[int, Path]) -> Failure | None:
    """The earliest record that is no echo of another rank's death; a rank that died silently comes before echoes."""
    records = sorted(_records(files), key=lambda record: float(record["time_s"]))
    causes = [record for record in records if record["known"] or not _ECHO.search(record["message"])]
    if not causes and _silent_deaths(codes, files):
        return None
    if not records:
        return None
    record = (causes or records)[0]
    return Failure(
        rank=record["rank"],
        message=record["message"] if record["known"] else f"{record['type']}: {record['message']}",
        exit_code=ExitCode(record["exit_code"]),
        traceback="" if record["known"] else record["traceback"],
        halving=record["halving"],
    )


def _records(files: dict[int, Path]) -> Iterator[dict[str, Any]]:
    for path in files.values():
        if path.exists():
            yield json.loads(path.read_text(encoding="utf-8"))


def is_echo(message: str) -> bool:
    """Whether an error says no more than that another rank is gone."""
    return bool(_ECHO.search(message))


def death(code: int) -> str:
    """What an exit code that is not 0 says, in words."""
    if code >= 0:
        return f"the script ended with status {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = {"SIGKILL": " (often the kernel, out of memory: see `dmesg`)", "SIGSEGV": " (a crash in native code)"}
    return f"the process was killed by {name}{hint.get(name, '')}"


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
