"""What a supervisor has the hosts of its job do: `Node`, and `Here`, the host that it runs on itself."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from shardwise.errors import ExitCode
from shardwise.launch.forking.forks import Forks, environments
from shardwise.launch.forking.server import Server
from shardwise.launch.job import Job
from shardwise.train.kept.outliving import Board, Copy, Memory

Ended = tuple[int, int, int]
"""Number of the set of ranks, rank, exit code (negative: the signal)."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """What the ranks of a set are told when they start."""

    id: str
    """Of the job: 32 hexadecimal digits."""
    port: int = 0
    """Where they meet; 0: the host that is told so opens the store."""
    standby: bool
    restarts: int
    halvings: int
    """How often micro-batches are to be halved at least."""


class Node(Protocol):
    """The ranks of a job on one host."""

    @property
    def socket(self) -> socket.socket:
        """Becomes readable when there is something to `receive`."""
        ...

    @property
    def ranks(self) -> range:
        """All that there can be here."""
        ...

    def start(self, number: int, job: Job, told: Start, files: Mapping[int, Path]) -> None:
        """Fork those of a new set.

        Args:
            number: of the set.
            job: what they run.
            told: what they are told.
            files: where each rank of the set leaves its error.
        """
        ...

    def port(self, number: int) -> int | None:
        """Where the ranks of a set meet whose store was opened here; None: it is not known yet."""
        ...

    def order(self, number: int, copy: Copy | None) -> None:
        """Let a set train from a copy of the state, or from the beginning."""
        ...

    def signal(self, number: int, kind: signal.Signals) -> None:
        """Send it to all ranks of a set."""
        ...

    def receive(self) -> list[Ended]:
        """Who has ended since."""
        ...

    def watch(self) -> None:
        """Called often: see whether the host is still there.

        Raises:
            LaunchError: it is not.
        """
        ...

    def end(self, code: ExitCode, why: str) -> None:
        """The job is over, with this exit code; why, if it was ended here."""
        ...

    def board(self, ranks: Iterable[int]) -> Mapping[int, tuple[int, int, int]]:
        """Of each rank: the set that it joined, the one that it trains in, and since when, in ns of this host."""
        ...

    def count(self, ranks: range) -> int:
        """Number of the newest copy that these ranks have made."""
        ...

    def ask(self) -> None:
        """Have it found out which copies each rank has made. None may be running."""
        ...

    def made(self) -> Mapping[int, list[Copy]] | None:
        """What was asked for; None: there is no answer yet."""
        ...

    def damaged(self) -> list[str]:
        """Which copies were left out of that answer, as they are not what was written."""
        ...

    def keep(self, copy: Copy | None) -> None:
        """Forget all other copies. No rank may be running."""
        ...


class Here:
    """The host of this process, with its fork server.

    Args:
        server: the ranks' parent.
        memory: what outlives them.
    """

    def __init__(self, server: Server, memory: Memory) -> None:
        """See the class."""
        self.memory, self.ranks = memory, memory.ranks
        self._forks, self._board = Forks(server), Board(memory.board)
        self.socket = self._forks.line.socket
        self._damaged: list[str] = []

    def start(self, number: int, job: Job, told: Start, files: Mapping[int, Path]) -> None:
        """See `Node`."""
        more = {"TORCHELASTIC_RESTART_COUNT": str(told.restarts)}
        envs = [env | more for env in environments(job, told.port)]
        outliving: dict[str, Any] = {"job": told.id, "standby": told.standby, "halvings": told.halvings}
        own = {rank: files[rank] for rank in job.ranks}
        outliving["memory"] = asdict(self.memory)
        self._forks.start(number, job, envs, own, outliving, opens=not told.port)

    def port(self, number: int) -> int | None:
        """See `Node`."""
        return self._forks.ports.get(number)

    def order(self, number: int, copy: Copy | None) -> None:
        """See `Node`."""
        self._forks.order(number, {"count": copy.count, "ranks": copy.ranks} if copy else {"count": 0})

    def signal(self, number: int, kind: signal.Signals) -> None:
        """See `Node`."""
        self._forks.signal(number, kind)

    def receive(self) -> list[Ended]:
        """See `Node`."""
        return self._forks.receive()

    def watch(self) -> None:
        """See `Node`: it is."""

    def end(self, code: ExitCode, why: str) -> None:
        """See `Node`: its supervisor knows."""

    def board(self, ranks: Iterable[int]) -> Mapping[int, tuple[int, int, int]]:
        """See `Node`."""
        return {rank: self._board.read(rank) for rank in ranks}

    def count(self, ranks: range) -> int:
        """See `Node`."""
        return self.memory.count(ranks)

    def ask(self) -> None:
        """See `Node`."""
        self._damaged = self.memory.check()

    def made(self) -> Mapping[int, list[Copy]]:
        """See `Node`."""
        return self.memory.made()

    def damaged(self) -> list[str]:
        """See `Node`."""
        return self._damaged

    def keep(self, copy: Copy | None) -> None:
        """See `Node`."""
        self.memory.keep(copy)
