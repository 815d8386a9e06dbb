"""`Worlds`: sets of ranks on this machine, started, ordered, signalled and waited for through the fork server."""

from __future__ import annotations

import signal
import time
import uuid
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, and not in its type stubs

from shardwise.launch.elastic import Team
from shardwise.launch.forks import POLL_S, Forks, environments
from shardwise.launch.job import ADDRESS
from shardwise.launch.server import Server
from shardwise.train.outliving import Board, Header, Memory


@dataclass
class World:
    """One set of processes, a process per rank."""

    number: int
    team: Team
    store: TCPStore
    files: dict[int, Path]
    """Where each rank leaves its error."""
    stands_by: bool
    codes: dict[int, int] = field(default_factory=dict)
    """Exit codes of the ranks that have ended, in order of time."""
    is_dropped: bool = False
    """Nobody asks for it any more."""

    @property
    def has_ended(self) -> bool:
        """All ranks have."""
        return len(self.codes) == len(self.files)

    @property
    def has_failed(self) -> bool:
        """Some rank has ended, and not well."""
        return any(self.codes.values())


class Worlds:
    """Those of one job.

    Args:
        server: the fork server, which is the ranks' parent.
        memory: what outlives all of them.
        folder: where ranks leave their errors.
    """

    def __init__(self, server: Server, memory: Memory, folder: Path) -> None:
        """See the class."""
        self.memory, self.folder = memory, folder
        self.id = uuid.uuid4().hex
        self._forks = Forks(server)
        self._board = Board(memory.board)
        self._worlds: dict[int, World] = {}
        self._started = 0

    def start(self, team: Team, *, stands_by: bool, restarts: int, halvings: int) -> World:
        """Fork a world; it waits for an order where its state is complete. `halvings`: of its micro-batches."""
        self._started += 1
        job, number, here = team.job, self._started, self.folder / f"world-{self._started}"
        here.mkdir()
        store = TCPStore(ADDRESS, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        files = {rank: here / f"error-{rank}.json" for rank in range(team.size)}
        told = {"TORCHELASTIC_RESTART_COUNT": str(restarts)}
        envs = [env | told for env in environments(job, store.port)]
        outliving = {"job": self.id, "memory": asdict(self.memory), "standby": stands_by, "halvings": halvings}
        self._forks.start(number, job, envs, files, outliving)
        world = self._worlds[number] = World(number, team, store, files, stands_by)
        return world

    def order(self, world: World, newest: Header | None) -> None:
        """Let a world train from the newest copy, or from the beginning."""
        self._forks.order(world.number, {"count": newest.count, "ranks": newest.ranks} if newest else {"count": 0})

    def signal(self, world: World, number: signal.Signals) -> None:
        """Send it to all ranks."""
        if not world.has_ended:
            self._forks.signal(world.number, number)

    def poll(self, wait_s: float = POLL_S) -> None:
        """Take what the fork server says."""
        for number, rank, code in self._forks.poll(wait_s):
            world = self._worlds[number]
            world.codes[rank] = code
            if world.is_dropped and world.has_ended:
                del self._worlds[number]

    def wait(self, world: World, seconds: float) -> bool:
        """Until all of its ranks have ended; False: not in time."""
        end = time.monotonic() + seconds
        while not world.has_ended and (left := end - time.monotonic()) > 0:
            self.poll(min(left, POLL_S))
        return world.has_ended

    def bury(self, world: World) -> Header | None:
        """End what is left of a world; the newest copy of the state that all ranks of a world had made."""
        self.signal(world, signal.SIGKILL)
        while not self.wait(world, 10):
            self.signal(world, signal.SIGKILL)
        del self._worlds[world.number]
        return self.memory.newest()

    def drop(self, world: World) -> None:
        """End a world that stands by, and forget it."""
        self.signal(world, signal.SIGKILL)
        world.is_dropped = True
        if world.has_ended:
            del self._worlds[world.number]

    def trains_since(self, world: World) -> list[int] | None:
        """Since when each rank of a world trains, in ns; None: not all do."""
        found = [self._board.read(rank) for rank in world.files]
        return [since for _, _, since in found] if all(trains == world.number for _, trains, _ in found) else None

    def is_ready(self, world: World) -> bool:
        """Whether all ranks of a world that stands by wait for an order."""
        return not world.codes and all(self._board.read(rank)[0] == world.number for rank in world.files)

    def copies(self, world: World) -> int:
        """Number of the newest copy of the state that all ranks have made: one more after each step."""
        return self.memory.count(world.team.size)
