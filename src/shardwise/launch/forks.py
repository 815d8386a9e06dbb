"""`Forks`: what a launcher says to its fork server, and hears from it (`nursery.py`)."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.errors import LaunchError
from shardwise.launch.job import ADDRESS, Job, rank_environment
from shardwise.launch.server import Server
from shardwise.launch.variables import variables

POLL_S = 0.05


def environments(job: Job, port: int) -> list[dict[str, str]]:
    """The variables of every rank of a job, whose rendezvous is on this port of this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    keep = {name: value for name, value in variables().items() if name == "OMP_NUM_THREADS"}
    return [{**rank_environment(job, rank, ADDRESS, port, cores), **keep} for rank in range(job.nproc)]


class Forks:
    """Sets of ranks, by number: started, ordered, signalled and waited for."""

    def __init__(self, server: Server) -> None:
        """See the class."""
        self.server = server
        self._received = b""

    def start(
        self,
        number: int,
        job: Job,
        environments: list[dict[str, str]],
        files: Mapping[int, Path],
        outliving: Mapping[str, Any] | None = None,
    ) -> None:
        """Fork a set of ranks.

        Args:
            number: of the set; a new one.
            job: what they run.
            environments: of each rank.
            files: where each rank leaves its error.
            outliving: what ranks need whose state outlives them.
        """
        # what stands after `python -m shardwise.launch.entry`; the fork server is the ranks' parent
        argv = [job.command((rank, path), self.server.pid)[3:] for rank, path in files.items()]
        self._send("start", number, argv=argv, env=environments, outliving=outliving)

    def order(self, number: int, order: Mapping[str, Any]) -> None:
        """Tell a set that waits what to go on with."""
        self._send("order", number, order=order)

    def signal(self, number: int, kind: signal.Signals) -> None:
        """Send a signal to all ranks of a set; SIGKILL to their children too."""
        self._send("signal", number, signal=int(kind))

    def poll(self, wait_s: float = POLL_S) -> list[tuple[int, int, int]]:
        """Who has ended since: number of the set, rank, exit code (negative: the signal).

        Raises:
            LaunchError: the server is gone.
        """
        line: socket.socket = self.server.line
        if not select.select([line], [], [], wait_s)[0]:
            return []
        piece = line.recv(1 << 16)
        if not piece:
            raise LaunchError(_SERVER_GONE)
        *lines, self._received = (self._received + piece).split(b"\n")
        return [tuple(json.loads(text)["ended"]) for text in lines]

    def _send(self, kind: str, number: int, **rest: Any) -> None:
        try:
            self.server.line.sendall(json.dumps({"do": kind, "world": number, **rest}).encode() + b"\n")
        except OSError:
            raise LaunchError(_SERVER_GONE) from None


_SERVER_GONE = (
    "the process that ranks are forked from has ended, so none can be started or waited for, and the ranks end after "
    "their step; look above for its error and at `dmesg` for the kernel's; start again: the job loads its last "
    "checkpoint"
)
