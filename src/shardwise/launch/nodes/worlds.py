"""`Worlds`: sets of ranks on the hosts of a job, started, ordered, signalled and waited for."""

from __future__ import annotations

import select
import signal
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from shardwise.errors import ExitCode, LaunchError
from shardwise.launch.elastic.slots import Team
from shardwise.launch.forking.forks import POLL_S
from shardwise.launch.nodes.node import Node, Start
from shardwise.train.kept.outliving import Copy, newest


@dataclass
class World:
    """One set of processes, a process per rank."""

    number: int
    team: Team
    files: dict[int, Path]
    """Where each rank leaves its error."""
    stands_by: bool
    codes: dict[int, int] = field(default_factory=dict)
    """Exit codes of the ranks that have ended, in order of time."""
    is_dropped: bool = False
    """Nobody asks for it any more."""
    asked: int = 0
    """How many of the signals that ask the job to end were passed on to it."""
    is_stopped: bool = False
    """By `rest`: it waits without waking the processor."""

    @property
    def has_ended(self) -> bool:
        """All ranks have."""
        return len(self.codes) == len(self.files)

    @property
    def has_failed(self) -> bool:
        """Some rank has ended, and not well."""
        return any(self.codes.values())

    def on(self, node: Node) -> range:
        """Its ranks on a host."""
        return range(node.ranks.start, min(node.ranks.stop, len(self.files)))


class Worlds:
    """Those of one job.

    Args:
        nodes: the hosts, in the order of their ranks.
        folder: where ranks leave their errors.
    """

    def __init__(self, nodes: Sequence[Node], folder: Path) -> None:
        """See the class."""
        self.nodes, self.folder = nodes, folder
        self.id = uuid.uuid4().hex
        self.damaged = ""
        """Of the world that was buried last the copies that are not what was written; begins as the rest of a cause."""
        self._worlds: dict[int, World] = {}
        self._started = 0

    def start(self, team: Team, *, stands_by: bool, restarts: int, halvings: int) -> World:
        """Fork a world; it waits for an order where its state is complete. `halvings`: of its micro-batches."""
        self._started += 1
        job, number = team.job, self._started
        # no folder of its own: on a full disk none can be made, and a recovery must not need one
        files = {rank: self.folder / f"error-{number}-{rank}.json" for rank in range(team.size)}
        told = Start(id=self.id, standby=stands_by, restarts=restarts, halvings=halvings)
        world = self._worlds[number] = World(number, team, files, stands_by)
        first, *others = self.nodes
        first.start(number, job, told, files)  # it opens the store in which all meet
        for node in others:
            while not (port := first.port(number)):
                self.poll()
            node.start(number, job, replace(told, port=port), files)
        return world

    def order(self, world: World, copy: Copy | None) -> None:
        """Let a world train from a copy of the state, or from the beginning."""
        if world.is_stopped:
            self.signal(world, signal.SIGCONT)
            world.is_stopped = False
        for node in self.nodes:
            node.order(world.number, copy)

    def rest(self, world: World) -> None:
        """Stop a world that is ready until it is ordered: threads of its groups would wake a hundred times a second."""
        if not world.is_stopped and self.is_ready(world):
            self.signal(world, signal.SIGSTOP)
            world.is_stopped = True

    def signal(self, world: World, number: signal.Signals) -> None:
        """Send it to all ranks."""
        if not world.has_ended:
            for node in self.nodes:
                node.signal(world.number, number)

    def poll(self, wait_s: float = POLL_S) -> None:
        """Take what the hosts say.

        Raises:
            LaunchError: a fork server, or a host, is gone.
        """
        ready = select.select([node.socket for node in self.nodes], [], [], wait_s)[0]
        for node in self.nodes:
            for number, rank, code in node.receive() if node.socket in ready else ():
                world = self._worlds[number]
                world.codes[rank] = code
                if world.is_dropped and world.has_ended:
                    del self._worlds[number]
            node.watch()

    def wait(self, world: World, seconds: float) -> bool:
        """Until all of its ranks have ended; False: not in time."""
        end = time.monotonic() + seconds
        while not world.has_ended and (left := end - time.monotonic()) > 0:
            self.poll(min(left, POLL_S))
        return world.has_ended

    def bury(self, world: World) -> Copy | None:
        """End what is left of a world; the newest copy of the state that all ranks of a world had made."""
        self.signal(world, signal.SIGKILL)
        while not self.wait(world, 10):
            self.signal(world, signal.SIGKILL)
        del self._worlds[world.number]
        for node in self.nodes:
            node.ask()
        while any(node.made() is None for node in self.nodes):
            self.poll()
        self.damaged = "".join(f"; {what}, and is not used" for node in self.nodes for what in node.damaged())
        copy = newest({rank: copies for node in self.nodes for rank, copies in (node.made() or {}).items()})
        for node in self.nodes:
            node.keep(copy)
        return copy

    def drop(self, world: World) -> None:
        """End a world that stands by, and forget it."""
        self.signal(world, signal.SIGKILL)
        world.is_dropped = True
        if world.has_ended:
            del self._worlds[world.number]

    def kill(self) -> None:
        """End all ranks that can be reached."""
        for world in self._worlds.values():
            for node in self.nodes:
                with suppress(LaunchError):
                    node.signal(world.number, signal.SIGKILL)

    def end(self, code: ExitCode, why: str = "") -> None:
        """The job is over, with this exit code; tell the hosts, and why it was ended here."""
        for node in self.nodes:
            node.end(code, why)

    def trains_since(self, world: World) -> list[int] | None:
        """Since when each rank of a world trains, in ns; None: not all do."""
        found = [words for node in self.nodes for words in node.board(world.on(node)).values()]
        return [since for _, _, since in found] if all(trains == world.number for _, trains, _ in found) else None

    def is_ready(self, world: World) -> bool:
        """Whether all ranks of a world that stands by wait for an order."""
        boards = [node.board(world.on(node)) for node in self.nodes]
        return not world.codes and all(joined == world.number for board in boards for joined, _, _ in board.values())

    def copies(self, world: World) -> int:
        """Number of the newest copy of the state that all ranks have made: one more after each step."""
        return min(node.count(world.on(node)) for node in self.nodes)
