"""`run_local`: the ranks of a job on this machine, started by torch elastic, ended by one policy.

Torch elastic's process contexts start, redirect and close the ranks. Its agent is not used: on a signal it ends
ranks within its own time limit and exits with 1, and on a failure it waits 30 s for ranks that hang. Here:

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
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, and not in its type stubs
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from shardwise.errors import ExitCode, LaunchError
from shardwise.launch.job import Job, rank_environment
from shardwise.launch.variables import variables

ADDRESS = "127.0.0.1"
_POLL_S = 0.05
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_CODES = {signal.SIGINT: ExitCode.INTERRUPTED, signal.SIGUSR1: ExitCode.PREEMPTED}
_ASKED = (ExitCode.INTERRUPTED, ExitCode.PREEMPTED, ExitCode.TERMINATED)
_ECHO = re.compile(r"onnection (?:was )?(?:closed|reset)|roken pipe|gloo/transport|remote (?:process|peer)|Abort", re.I)
"""Texts of a rank that lost a peer: true, but not the cause."""
_Process = subprocess.Popen[Any]


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


@dataclass
class Stopping:
    """Signals that a launcher has got so far; the handler only counts and forwards."""

    first: signal.Signals | None = None
    at: float = 0.0
    """When it came."""
    count: int = 0
    killed: bool = False
    """Ranks were ended before they had saved."""
    processes: list[_Process] = field(default_factory=list)

    @property
    def forward(self) -> signal.Signals:
        """What the ranks get of it."""
        again = self.count > 1
        return signal.SIGKILL if again else signal.SIGTERM if self.first in (None, signal.SIGHUP) else self.first

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal."""
        self.count += 1
        if self.first is None:
            self.first, self.at = signal.Signals(number), time.monotonic()
        self.killed = self.killed or self.count > 1
        _send(self.processes, self.forward)


def run_local(job: Job) -> Outcome:
    """Run a job's ranks on this machine until all have ended.

    Cost: importing torch here and in each rank (about a second), a poll every 50 ms. Must be called from the main
    thread (signals). Output of the ranks goes to this process's own streams.

    Raises:
        LaunchError: the port is in use, or processes cannot be started.

    Example:
        >>> run_local(Job(target="train.py", args=("dp2",), nproc=2)).exit_code  # doctest: +SKIP
        <ExitCode.OK: 0>
    """
    store = _host_store(job)
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        files = {rank: Path(folder, f"error-{rank}.json") for rank in range(job.nproc)}
        stopping = Stopping()
        with catching(stopping), _quiet_elastic():
            context = _start(job, store.port, files, folder, stopping)
            try:
                codes = _wait(job, context, stopping)
            finally:
                context.close(signal.SIGKILL, timeout=2)
        return outcome_of(codes, files, stopping)


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


def _start(job: Job, port: int, files: dict[int, Path], folder: str, stopping: Stopping) -> SubprocessContext:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    keep = {name: value for name, value in variables().items() if name == "OMP_NUM_THREADS"}
    envs = {rank: {**rank_environment(job, rank, ADDRESS, port, cores), **keep} for rank in files}
    previous = {number: signal.getsignal(number) for number in (*_STOP_SIGNALS, signal.SIGQUIT)}
    # Elastic installs handlers that raise: held back until ours are in place again, or ranks started so far would
    # be lost. The ranks inherit the mask; our entry point opens it.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        context = start_processes(
            name="shardwise",
            entrypoint=sys.executable,
            args={rank: job.command(reporting=(rank, path))[1:] for rank, path in files.items()},
            envs=envs,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        assert isinstance(context, SubprocessContext)
        stopping.processes.extend(handler.proc for handler in context.subprocess_handlers.values())
    except OSError as error:
        raise LaunchError(f"cannot start {job.nproc} processes of {sys.executable}: {error}") from error
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
    return context


def _wait(job: Job, context: SubprocessContext, stopping: Stopping) -> dict[int, int]:
    """Exit code of every rank; negative: the signal that ended it, as `subprocess` says it."""
    processes = {rank: handler.proc for rank, handler in context.subprocess_handlers.items()}
    deadline: float | None = None
    told = False
    while True:
        codes = {rank: code for rank, process in processes.items() if (code := process.poll()) is not None}
        if len(codes) == len(processes):
            return codes
        if stopping.first and job.signal_grace_s and time.monotonic() - stopping.at > job.signal_grace_s:
            stopping.killed = True
            _send(processes.values(), signal.SIGKILL)
        if codes and deadline is None and stopping.first is not None:
            deadline = time.monotonic() + job.stop_grace_s
        if any(code != 0 for code in codes.values()) and not told and stopping.first is None:
            told, deadline = True, time.monotonic() + job.grace_s
            time.sleep(_POLL_S)  # a rank that fails by itself at the same time says why; give it the chance
            _send(processes.values(), signal.SIGTERM)
        if deadline is not None and time.monotonic() > deadline:
            _send(processes.values(), signal.SIGKILL)
        time.sleep(_POLL_S)


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


def _send(processes: Iterable[_Process], number: signal.Signals) -> None:
    """Signal the ranks that run; only SIGKILL goes to their children too: data workers must outlive a save."""
    for process in processes:
        if process.returncode is not None:
            continue
        with suppress(ProcessLookupError, PermissionError):
            if number == signal.SIGKILL:
                os.killpg(process.pid, number)  # elastic made each rank the leader of a group
            else:
                os.kill(process.pid, number)


@contextmanager
def catching(stopping: Stopping) -> Iterator[None]:
    """Within it the signals that ask a launcher to stop go to `stopping`."""
    previous = {number: signal.signal(number, stopping.on_signal) for number in _STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


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
