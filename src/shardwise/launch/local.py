"""`run_local`: the ranks of a job on this machine, ended by one policy. No torch.

- The first failure (by time, echoes of lost connections last) is the one reported; the others end within seconds.
- A rank that ends with 0 before the others is named when they lose it, and after a minute if they only wait.
- A first Ctrl-C, SIGTERM or SIGUSR1 is passed to the ranks, which finish their step and save; a second one, or the end
  of the grace period, kills them.

They are forked from a server that has imported torch once (Linux, several ranks), and meet in a store that it opens;
or they are programs of their own (`programs.py`), with the same policy.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shardwise.errors import ExitCode, LaunchError
from shardwise.launch.echo import is_echo
from shardwise.launch.forking.forks import POLL_S, Forks, environments
from shardwise.launch.forking.server import Server
from shardwise.launch.job import ADDRESS, Job
from shardwise.launch.stopping import STOP_SIGNALS, Stopping, catching
from shardwise.records import say

_CODES = {signal.SIGINT: ExitCode.INTERRUPTED, signal.SIGUSR1: ExitCode.PREEMPTED}
_ASKED = (ExitCode.INTERRUPTED, ExitCode.PREEMPTED, ExitCode.TERMINATED)
_AGREED = (ExitCode.NON_FINITE, ExitCode.SPIKE)
"""With which `steps` ends all ranks after the same step, each as soon as it has left the loop."""
_IN_VAIN = re.compile(r"Timed out waiting (\d+)ms for")
"""Of a rank that waited for one that is there and does not come (gloo; NCCL ends the process)."""
SETTLE_S = 2.0
"""After an echo of another rank's end, and nothing else: how long that has to be seen. It may take Python apart."""
LEFT_S = 60.0
"""After a rank has ended with 0: how long the others may run before it is said, for they may wait for it."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The first rank that failed and what it said."""

    rank: int
    message: str
    exit_code: ExitCode
    traceback: str = ""
    """Empty for an error that Shardwise raised on purpose, and where a rank or a data worker was killed."""
    halving: Mapping[str, Any] | None = None
    """What the rank asks for that ran out of memory; see `OutOfMemoryError`."""
    killed: bool = False
    """A data worker of it was: as if the rank had been."""

    @property
    def is_echo(self) -> bool:
        """Whether it says no more than that another rank is gone."""
        return bool(self.traceback) and is_echo(self.message)

    def traced_to(self, running: Collection[int]) -> Failure:
        """Of a rank that waited in vain: whom it waited for, the ranks that still ran when it gave up; else itself."""
        waited, ranks = _IN_VAIN.search(self.message), sorted(running)
        if waited is None or not ranks:
            return self
        others = f", as did {' '.join(map(str, ranks[1:]))}" if ranks[1:] else ""
        return Failure(
            rank=ranks[0],
            message=(
                f"rank {self.rank} waited {float(waited[1]) / 1000:g} s in a collective for one that did not come, and "
                f"this one still ran then{others}: busy, stuck or stopped; look at its output and, while it hangs, at "
                "its stack (`py-spy dump --pid`); open_mesh(timeout_s=...) is how long ranks wait"
            ),
            exit_code=self.exit_code,
        )

    def __str__(self) -> str:
        text = f"rank {self.rank} failed: {self.message}"
        return f"{self.traceback.rstrip()}\n\n{text}" if self.traceback else text


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a job ended."""

    exit_code: ExitCode
    failure: Failure | None = None


class Ranks(Protocol):
    """Processes that run, one per rank."""

    def codes(self, wait_s: float) -> dict[int, int]:
        """Exit codes of those that have ended, after at most so long; negative: the signal, as `subprocess` says it."""
        ...

    def send(self, number: signal.Signals) -> None:
        """Signal those that run; only SIGKILL goes to their children too: data workers must outlive a save."""
        ...


def run_local(job: Job, server: Server, stopping: Stopping | None = None) -> Outcome:
    """Fork a job's ranks on this machine, and wait until all have ended. Linux only.

    Cost: importing torch in the server, once; a poll every 50 ms. Must be called from the main thread (signals). Output
    of the ranks goes to this process's own streams.

    Args:
        job: what they run.
        server: where they are forked: `server_for(job)`; without one see `shardwise.launch.programs.run_programs`.
        stopping: of a caller that is `catching` signals already.

    Raises:
        LaunchError: the port is in use, or the server is gone.

    Example:
        >>> job = Job(target="train.py", args=("dp2",), nproc=2)  # doctest: +SKIP
        >>> with server_for(job) as server:  # doctest: +SKIP
        ...     run_local(job, server).exit_code
        <ExitCode.OK: 0>
    """
    check_port(job)
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        files = {rank: Path(folder, f"error-{rank}.json") for rank in range(job.nproc)}
        with catching(stopping) as stopping:
            ranks = _Forked(job, server, files)
            while not ranks.are_there:
                if stopping.first is not None:  # the server still imports: nobody has begun, and nothing is to be saved
                    os.kill(server.pid, signal.SIGKILL)
                    return outcome_of({}, files, stopping)
                ranks.codes(POLL_S)
            return wait_for(job, ranks, files, stopping)


def check_port(job: Job) -> None:
    """Refuse a port that is in use: asked first, for torch's own error is a page of C++ frames.

    Raises:
        LaunchError: it is.
    """
    if not job.port:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ADDRESS, job.port))
        except OSError as error:
            raise LaunchError(
                f"cannot open the rendezvous on {ADDRESS}:{job.port}: {error.strerror or error}; "
                f"choose another port, or leave --port out and a free one is taken"
            ) from None


class _Forked:
    """Ranks that the fork server forks."""

    def __init__(self, job: Job, server: Server, files: Mapping[int, Path]) -> None:
        self._forks, self._codes = Forks(server), dict[int, int]()
        self._forks.start(1, job, environments(job, job.port), files, opens=True)

    @property
    def are_there(self) -> bool:
        """Whether the store was opened in which they meet: from then on they are forked."""
        return 1 in self._forks.ports

    def codes(self, wait_s: float) -> dict[int, int]:
        self._codes |= {rank: code for _, rank, code in self._forks.poll(wait_s)}
        return self._codes

    def send(self, number: signal.Signals) -> None:
        self._forks.signal(1, number)


def wait_for(job: Job, ranks: Ranks, files: dict[int, Path], stopping: Stopping) -> Outcome:
    """How a job ended, once all of its ranks have."""
    deadline: float | None = None
    failed_at: float | None = None
    told, forwarded, leavers = frozenset[int](), 0, Leavers()
    while True:
        codes = ranks.codes(POLL_S)
        if len(codes) == job.nproc:
            return outcome_of(codes, files, stopping, told)
        if stopping.count > forwarded:
            forwarded = stopping.count
            ranks.send(stopping.forward)
        if stopping.first and job.signal_grace_s and time.monotonic() - stopping.at > job.signal_grace_s:
            stopping.is_late = True
            ranks.send(signal.SIGKILL)
        if codes and deadline is None and stopping.first is not None:
            deadline = time.monotonic() + job.stop_grace_s
        if any(codes.values()) and not told and stopping.first is None:
            failed_at = failed_at or time.monotonic()
            if time.monotonic() - failed_at >= patience_s(job, codes, files):
                codes = ranks.codes(POLL_S)  # a rank that fails by itself at the same time gets to say why
                told, deadline = frozenset(files) - codes.keys(), time.monotonic() + job.grace_s
                ranks.send(signal.SIGTERM)
        elif stopping.first is None:
            leavers.look(codes, files)
        if deadline is not None and time.monotonic() > deadline:
            ranks.send(signal.SIGKILL)


def patience_s(job: Job, codes: Mapping[int, int], files: Mapping[int, Path]) -> float:
    """How long the others go on when some rank has ended badly, before they are told to end."""
    if all(code in _AGREED and not files[rank].exists() for rank, code in codes.items() if code != 0):
        return job.stop_grace_s  # they are about to end with it, too
    bad = {code for code in codes.values() if code != 0}
    if len(bad) == 1 and bad <= set(ExitCode) and not any(files[rank].exists() for rank in codes):
        return SETTLE_S  # all may be about to end with it: `sys.exit` of a script
    failure = first_failure(codes, files)
    return SETTLE_S if failure is not None and failure.is_echo else 0.0


class Leavers:
    """Says that some ranks have ended with 0 and the others have not, when that lasts. Nobody is ended for it."""

    def __init__(self) -> None:
        """All are there."""
        self._count, self._due = 0, math.inf

    def look(self, codes: Mapping[int, int], ranks: Iterable[int]) -> None:
        """Called often.

        Args:
            codes: exit codes of those that have ended.
            ranks: all.
        """
        if len(codes) != self._count:
            self._count, self._due = len(codes), time.monotonic() + LEFT_S
        if not codes or any(codes.values()) or time.monotonic() < self._due:
            return
        self._due = math.inf
        ended, run = (" ".join(map(str, sorted(of))) for of in (codes, set(ranks) - codes.keys()))
        say(
            f"shardwise: of the ranks {ended} ended with status 0, and {run} still run {LEFT_S:g} s later; if these "
            "wait for those, end the job with Ctrl-C, and let all ranks leave the script at the same place"
        )


def outcome_of(
    codes: Mapping[int, int], files: Mapping[int, Path], stopping: Stopping, told: frozenset[int] = frozenset()
) -> Outcome:
    """How a job ended.

    Args:
        codes: exit codes of its ranks.
        files: the errors that they left.
        stopping: the signals that came.
        told: ranks that ran on when another one had ended, and were told to end: their codes say nothing.
    """
    if stopping.killed and -signal.SIGKILL in codes.values():
        return Outcome(exit_code=ExitCode.KILLED)
    codes = {rank: code for rank, code in codes.items() if rank not in told}
    failure = first_failure(codes, files)
    if failure is not None and failure.is_echo and stopping.first is None:  # of a rank that somebody else ended
        ended = ((r, c) for r, c in codes.items() if (-c in STOP_SIGNALS or c in _ASKED) and not files[r].exists())
        failure = next((_died(rank, code) for rank, code in ended), failure)
    if failure is not None and stopping.first is None:
        failure = failure.traced_to(told)
    by_signal = _CODES.get(stopping.first or signal.SIGTERM, ExitCode.TERMINATED)
    asked = {code for code in codes.values() if code in _ASKED}
    if failure is not None and not (stopping.first and (failure.message == _LEFT or is_echo(failure.message))):
        return Outcome(exit_code=failure.exit_code, failure=failure)
    if stopping.first is not None:  # whoever ends in order does so after all have saved
        died = any(code < 0 and -code not in STOP_SIGNALS for code in codes.values())
        is_lost = died and not asked and ExitCode.OK not in codes.values()
        return Outcome(exit_code=ExitCode.KILLED if is_lost else by_signal)
    if asked:  # a scheduler signalled the ranks and not this process
        return Outcome(exit_code=ExitCode(min(asked)))
    same, agreed = set(codes.values()), set(_AGREED if told else ExitCode)
    if len(same) == 1 and same <= agreed and not any(files[rank].exists() for rank in codes):
        return Outcome(exit_code=ExitCode(same.pop()))  # all ranks ended in agreement: `steps` on a bad gradient
    dead = _silent_deaths(codes, files) or [(rank, code) for rank, code in codes.items() if code != 0]
    if not dead:
        return Outcome(exit_code=ExitCode.OK)
    return Outcome(exit_code=ExitCode.RANK_FAILED, failure=_died(*dead[0]))


def _died(rank: int, code: int) -> Failure:
    return Failure(rank=rank, message=death(code), exit_code=ExitCode.RANK_FAILED)


def _silent_deaths(codes: Mapping[int, int], files: Mapping[int, Path]) -> list[tuple[int, int]]:
    """Ranks that were killed or called `exit`, and said nothing; not those that were told to end."""
    expected = (0, -signal.SIGTERM, -signal.SIGUSR1, *_ASKED)
    return [(rank, code) for rank, code in codes.items() if code not in expected and not files[rank].exists()]


def first_failure(codes: Mapping[int, int], files: Mapping[int, Path]) -> Failure | None:
    """The earliest record that is no echo of another rank's death; a rank that went silently comes before echoes."""
    records = sorted(_records(files), key=lambda record: float(record["time_s"]))
    causes = [record for record in records if record["known"] or not is_echo(record["message"])]
    if not causes and _silent_deaths(codes, files):
        return None
    if not records:
        return None
    left = next((rank for rank, code in codes.items() if code == 0), None)
    if not causes and left is not None:
        return Failure(rank=left, message=_LEFT, exit_code=ExitCode.RANK_FAILED)
    record = (causes or records)[0]
    message = record["message"] if record["known"] else f"{record['type']}: {record['message']}"
    if left is not None and record["exit_code"] == ExitCode.LAUNCH:  # who waited for it in vain to join
        message += f" (rank {left} had ended with status 0 before)"
    return Failure(
        rank=record["rank"],
        message=message,
        exit_code=ExitCode(record["exit_code"]),
        traceback="" if record["known"] else record["traceback"],
        halving=record["halving"],
        killed=record.get("killed", False),
    )


def _records(files: Mapping[int, Path]) -> Iterator[dict[str, Any]]:
    for path in files.values():
        if path.exists():
            yield json.loads(path.read_text(encoding="utf-8"))


_CRASHES = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL")
_CRASHED = " (a crash in native code: the rank's output has its Python frames)"
_LEFT = (
    "the script ended with status 0 while the others were still training; every rank must make as many steps: give "
    "each as many batches (sw.loader does), and let all leave a loop together"
)


def death(code: int) -> str:
    """What an exit code that is not 0 says, in words."""
    if code >= 0:
        return f"the script ended with status {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = {"SIGKILL": " (often the kernel, out of memory: see `dmesg`)", **dict.fromkeys(_CRASHES, _CRASHED)}
    return f"the process was killed by {name}{hint.get(name, '')}"
