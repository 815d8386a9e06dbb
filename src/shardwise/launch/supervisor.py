"""`run_recovering`: the ranks of a job on this machine, which goes on when some of them die.

After each step every rank copies its part of the state into memory that this process holds (`train/mirror.py`). When a
rank dies the others are ended too: what they were doing cannot be finished, and groups, wrappers and kernels of an
abandoned step cannot be trusted. Their state is not lost: a new set of processes takes the newest copy that all had
made, and tries the step again with the same samples and randomness. To be fast the new set stands by: it was forked
while the old one trained, has run the script up to its first step, with process groups of its own, and waits.

Nothing here is for several nodes: the memory is that of one host.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, and not in its type stubs

from shardwise.errors import ExitCode, LaunchError
from shardwise.launch.job import Job, rank_environment
from shardwise.launch.local import (
    ADDRESS,
    Failure,
    Outcome,
    Stopping,
    catching,
    death,
    first_failure,
    is_echo,
    outcome_of,
)
from shardwise.launch.recovery import Bounds, Recovering, Recovery
from shardwise.launch.variables import variables
from shardwise.train.outliving import Board, Header, Memory, Slot

_POLL_S = 0.05
_SETTLE_S = 0.3
"""After an error that may be the echo of another rank's death: how long that one has to be told."""
_STANDBYS = 3
"""Sets that stood by and failed in a row, before it is given up."""


@dataclass
class _World:
    """One set of processes, a process per rank."""

    number: int
    store: TCPStore
    files: dict[int, Path]
    """Where each rank leaves its error."""
    stands_by: bool
    codes: dict[int, int] = field(default_factory=dict)
    """Exit codes of the ranks that have ended, in order of time."""

    @property
    def has_ended(self) -> bool:
        return len(self.codes) == len(self.files)

    @property
    def has_failed(self) -> bool:
        return any(self.codes.values())


@dataclass(frozen=True)
class _Pending:
    """A recovery that goes on."""

    since_ns: int
    rank: int
    cause: str
    step: int
    standby: bool


class Supervisor:
    """Runs worlds through a fork server; made by `run_recovering`."""

    def __init__(self, job: Job, policy: Recovering, line: socket.socket, memory: Memory) -> None:
        self.job, self.policy, self.line, self.memory = job, policy, line, memory
        self.stopping = Stopping()
        self.id = uuid.uuid4().hex
        self._bounds = Bounds(policy)
        self._board = Board(memory.board)
        self._worlds: dict[int, _World] = {}
        self._started = 0
        self._standby: _World | None = None
        self._standbys_failed = 0
        self._pending: _Pending | None = None
        self._received = b""
        self._server_pid = 0

    def run(self, folder: Path, server_pid: int) -> Outcome:
        """Until the job has ended."""
        self._server_pid = server_pid
        active = self._start(folder, stands_by=False)
        self._order(active, None)
        while True:
            self._poll()
            self._tell(active)
            if self.stopping.first is not None or (active.has_ended and not active.has_failed):
                return self._end(active)
            if active.has_failed:
                since_ns = time.monotonic_ns()
                failure, killed = self._cause(active)
                if failure is None or self.stopping.first is not None:
                    return self._end(active)
                newest = self._bury(active)
                refused = self._bounds.refuse(failure, copies=newest.count if newest else 0, killed=killed)
                if refused is not None:
                    return Outcome(exit_code=refused.exit_code, failure=refused)
                active = self._recover(folder, failure, newest, since_ns)
            self._stand_by(folder, active)

    def _start(self, folder: Path, *, stands_by: bool) -> _World:
        """Fork a world; it waits for an order where its state is complete."""
        self._started += 1
        job, number, here = self.job, self._started, folder / f"world-{self._started}"
        here.mkdir()
        store = TCPStore(ADDRESS, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        files = {rank: here / f"error-{rank}.json" for rank in range(job.nproc)}
        cores = len(os.sched_getaffinity(0))
        keep = {name: value for name, value in variables().items() if name == "OMP_NUM_THREADS"}
        keep["TORCHELASTIC_RESTART_COUNT"] = str(self._bounds.total)
        envs = [{**rank_environment(job, rank, ADDRESS, store.port, cores), **keep} for rank in files]
        # what stands after `python -m shardwise.launch.entry`; the fork server is the ranks' parent
        words = [job.command(reporting=(rank, path), launcher_pid=self._server_pid)[3:] for rank, path in files.items()]
        memory = asdict(self.memory)
        self._send("start", number, argv=words, env=envs, job=self.id, memory=memory, standby=stands_by)
        world = self._worlds[number] = _World(number, store, files, stands_by)
        return world

    def _order(self, world: _World, newest: Header | None) -> None:
        self._send("order", world.number, order={"count": newest.count if newest else 0})

    def _send(self, kind: str, world: int, **rest: Any) -> None:
        try:
            self.line.sendall(json.dumps({"do": kind, "world": world, **rest}).encode() + b"\n")
        except OSError:
            raise LaunchError(_SERVER_GONE) from None

    def _signal(self, world: _World, number: signal.Signals) -> None:
        if not world.has_ended:
            self._send("signal", world.number, signal=int(number))

    def _poll(self, wait_s: float = _POLL_S) -> None:
        """Take what the fork server says."""
        if not select.select([self.line], [], [], wait_s)[0]:
            return
        piece = self.line.recv(1 << 16)
        if not piece:
            raise LaunchError(_SERVER_GONE)
        *lines, self._received = (self._received + piece).split(b"\n")
        for line in lines:
            number, rank, code = json.loads(line)["ended"]
            self._worlds[number].codes[rank] = code

    def _wait(self, world: _World, seconds: float) -> bool:
        """Until all of its ranks have ended; False: not in time."""
        end = time.monotonic() + seconds
        while not world.has_ended and (left := end - time.monotonic()) > 0:
            self._poll(min(left, _POLL_S))
        return world.has_ended

    def _cause(self, world: _World) -> tuple[Failure | None, bool]:
        """The first failure, and whether a process was killed; None for what recovery does not help against.

        Errors that Shardwise raises on purpose, and `sys.exit` with a status, would come again.
        """
        end = time.monotonic() + _SETTLE_S
        while True:
            killed = next(((rank, code) for rank, code in world.codes.items() if code < 0), None)
            if killed is not None:
                text = death(killed[1])
                return Failure(rank=killed[0], message=text, exit_code=ExitCode.RANK_FAILED), True
            failure = first_failure(world.codes, world.files)
            if failure is not None and failure.traceback and not is_echo(failure.message):
                return failure, False
            if time.monotonic() > end:
                return (failure if failure is not None and failure.traceback else None), False
            self._poll(0.02)

    def _bury(self, world: _World) -> Header | None:
        """End what is left of a world; the newest copy of the state that all of its ranks had made."""
        self._signal(world, signal.SIGKILL)
        while not self._wait(world, 10):
            self._signal(world, signal.SIGKILL)
        del self._worlds[world.number]
        return self.memory.newest()

    def _recover(self, folder: Path, failure: Failure, newest: Header | None, since_ns: int) -> _World:
        world, self._standby = self._standby, None
        if world is not None and world.codes:
            self._signal(world, signal.SIGKILL)
            world = None
        standby = world is not None
        world = world or self._start(folder, stands_by=False)
        self._order(world, newest)
        if self._pending is not None:
            since_ns = self._pending.since_ns  # another one died before the last recovery was complete
        step = newest.step if newest else 0
        self._pending = _Pending(since_ns, failure.rank, failure.message, step, standby)
        return world

    def _trains(self, world: _World) -> list[int] | None:
        """Since when each rank of a world trains, in ns; None: not all do."""
        found = [self._board.read(rank) for rank in world.files]
        return [since for _, _, since in found] if all(trains == world.number for _, trains, _ in found) else None

    def _tell(self, active: _World) -> None:
        """Report a recovery when it is complete."""
        if self._pending is None or (since := self._trains(active)) is None:
            return
        pending, self._pending = self._pending, None
        self.policy.tell(
            Recovery(
                number=self._bounds.total,
                rank=pending.rank,
                cause=pending.cause,
                step=pending.step,
                standby=pending.standby,
                seconds=(max(since) - pending.since_ns) / 1e9,
            )
        )

    def _stand_by(self, folder: Path, active: _World) -> None:
        """Have a second world ready once the first one trains; a failing one is replaced, a few times."""
        if self._standby is not None and self._standby.codes:
            self._signal(self._standby, signal.SIGKILL)
            self._standby = None
            self._standbys_failed += 1
        wanted = self.policy.standby and self._standby is None and self._standbys_failed < _STANDBYS
        if not wanted or self._pending is not None or self._trains(active) is None:
            return
        if max(Slot(file).header().count for file in self.memory.slots[0]) > 0:
            self._standby = self._start(folder, stands_by=True)

    def _end(self, active: _World) -> Outcome:
        """No recovery from here on: the ranks end in order, or within the time that the job gives them."""
        if self._standby is not None:
            self._signal(self._standby, signal.SIGKILL)
        job, stopping = self.job, self.stopping
        if stopping.first is None:
            self._signal(active, signal.SIGTERM)
            self._wait(active, job.grace_s)
        forwarded = 0
        first_end: float | None = None
        while not active.has_ended:
            if stopping.count > forwarded:
                forwarded = stopping.count
                self._signal(active, stopping.forward)
            if active.codes and first_end is None:
                first_end = time.monotonic()
            late = first_end is not None and time.monotonic() - first_end > job.stop_grace_s
            past = stopping.first is not None and time.monotonic() - stopping.at > (job.signal_grace_s or math.inf)
            if stopping.first is None or late or past:
                stopping.killed = stopping.killed or past
                self._signal(active, signal.SIGKILL)
            self._poll()
        return outcome_of(active.codes, active.files, stopping)


_SERVER_GONE = (
    "the fork server of --recover has ended, so no process can be started or waited for, and the ranks end after their "
    "step; look above for its error and at `dmesg` for the kernel's; start again: the job loads its last checkpoint"
)


def run_recovering(job: Job, policy: Recovering) -> Outcome:
    """Run a job's ranks on this machine until all have ended, and go on when some of them die.

    Cost: memory of two copies of the state, in all; with `policy.standby` a second set of processes, idle after its
    start; per step a copy of the state, divided among the ranks. Must be called from the main thread (signals).

    Raises:
        LaunchError: not on Linux, or the fork server cannot be started or has died.

    Example:
        >>> job = Job(target="train.py", args=("dp2",), nproc=2)  # doctest: +SKIP
        >>> run_recovering(job, Recovering()).exit_code  # doctest: +SKIP
        <ExitCode.OK: 0>
    """
    if not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
        raise LaunchError(
            f"--recover on {sys.platform}: found no memfd_create and pidfd_open, needed Linux 5.3 or newer; start "
            "without --recover: the job then goes on from its last checkpoint when it is started again"
        )
    memory = Memory.create(job.nproc)
    try:
        with tempfile.TemporaryDirectory(prefix="shardwise-") as folder, _server(memory) as (line, pid):
            supervisor = Supervisor(job, policy, line, memory)
            with catching(supervisor.stopping):
                return supervisor.run(Path(folder), pid)
    finally:
        memory.close()


@contextmanager
def _server(memory: Memory) -> Iterator[tuple[socket.socket, int]]:
    """The fork server, and the line to it; closing the line ends it and what it has started."""
    here, there = socket.socketpair()
    command = [sys.executable, "-m", "shardwise.launch.nursery", str(there.fileno())]
    process = subprocess.Popen(command, pass_fds=(there.fileno(), *memory.files))
    there.close()
    try:
        yield here, process.pid
    finally:
        here.close()
        process.wait()
