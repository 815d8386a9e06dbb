"""`Forks`: what a launcher says to its fork server, and hears from it (`nursery.py`)."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.errors import LaunchError
from shardwise.launch.forking.lines import Line
from shardwise.launch.forking.server import Server
from shardwise.launch.job import Job, rank_environment
from shardwise.launch.variables import variables

POLL_S = 0.05


def environments(job: Job, port: int) -> list[dict[str, str]]:
    """The variables of every rank of a job on this machine, whose rendezvous is on this port of the first one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    keep = {name: value for name, value in variables().items() if name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")}
    return [{**rank_environment(job, rank, port, cores), **keep} for rank in job.ranks]


class Forks:
    """Sets of ranks, by number: started, ordered, signalled and waited for."""

    def __init__(self, server: Server) -> None:
        """See the class."""
        self.server = server
        self.line = Line(server.line)
        self.ports: dict[int, int] = {}
        """Where the ranks of a set meet whose store was opened."""

    def start(
        self,
        number: int,
        job: Job,
        environments: list[dict[str, str]],
        files: Mapping[int, Path],
        outliving: Mapping[str, Any] | None = None,
        opens: bool = False,
    ) -> None:
        """Fork a set of ranks.

        Args:
            number: of the set; a new one.
            job: what they run.
            environments: of each rank.
            files: where each rank leaves its error.
            outliving: what ranks need whose state outlives them.
            opens: have the store opened in which the ranks meet, at the job's port or a free one.
        """
        # what stands after `python -m shardwise.launch.entry`; the fork server is the ranks' parent
        argv = [job.command((rank, path), self.server.pid)[3:] for rank, path in files.items()]
        store = [job.nodes.address, job.port] if opens else None
        self._send("start", number, first=min(files), argv=argv, env=environments, store=store, outliving=outliving)

    def order(self, number: int, order: Mapping[str, Any]) -> None:
        """Tell a set that waits what to go on with."""
        self._send("order", number, order=order)

    def signal(self, number: int, kind: signal.Signals) -> None:
        """Send a signal to all ranks of a set; SIGKILL to their children too."""
        self._send("signal", number, signal=int(kind))

    def poll(self, wait_s: float = POLL_S) -> list[tuple[int, int, int]]:
        """Who has ended, after at most so long: see `receive`."""
        return self.receive() if select.select([self.line.socket], [], [], wait_s)[0] else []

    def receive(self) -> list[tuple[int, int, int]]:
        """Who has ended since: number of the set, rank, exit code (negative: the signal); blocks.

        Raises:
            LaunchError: the server is gone, or the store cannot be opened.
        """
        try:
            messages = self.line.receive()
        except (OSError, EOFError):
            raise LaunchError(_SERVER_GONE) from None
        for number, port, problem in (message["store"] for message in messages if "store" in message):
            if problem is not None:
                raise LaunchError(f"cannot open the rendezvous of the ranks: {problem}; choose another port")
            self.ports[number] = port
        return [tuple(message["ended"]) for message in messages if "ended" in message]

    def _send(self, kind: str, number: int, **rest: Any) -> None:
        try:
            self.line.send({"do": kind, "world": number, **rest})
        except OSError:
            raise LaunchError(_SERVER_GONE) from None


_SERVER_GONE = (
    "the process that ranks are forked from has ended, so none can be started or waited for, and the ranks end after "
    "their step; look above for its error and at `dmesg` for the kernel's; start again: the job loads its last "
    "checkpoint"
)
