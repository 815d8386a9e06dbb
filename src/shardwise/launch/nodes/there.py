"""A job's other hosts: `There`, as the first host's supervisor sees one, and `follow`, what the other one does.

The first host decides; the others do what `Node` says and tell what happens, a line of JSON each:

    {"do": "start", "world": 1, "told": {...}}     {"do": "order", "world": 1, "copy": [count, ranks, step]}
    {"do": "signal", "world": 1, "signal": 9}      {"do": "made"}      {"do": "keep", "copy": null}
    {"do": "end", "code": 0, "why": ""}            {"do": "alive"}     # nothing else to say

    {"ended": [world, rank, exit code, error]}     {"made": {rank: [[count, ranks, step]]}, "damaged": ["what"]}
    {"board": {rank: [joined, trains]}, "count": 3}     {"asked": [signal, how often]}     {"lost": "why"}

Commands and files are each host's own: nothing that comes over the network is run or opened. Whoever hears nothing of
the other for `SILENT_S` ends its ranks at once: their collectives cannot be finished, and nobody trains on alone.
"""

from __future__ import annotations

import select
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

from shardwise.errors import ExitCode, LaunchError
from shardwise.launch.forking.lines import Line
from shardwise.launch.job import Job
from shardwise.launch.local import Outcome
from shardwise.launch.nodes.node import Ended, Here, Start
from shardwise.launch.stopping import Stopping
from shardwise.train.kept.outliving import Copy

SILENT_S = 15.0
"""A host that says nothing for so long is lost."""
_BEAT_S = 1.0
"""How often it says something."""
_POLL_S = 0.02


class There:
    """Another host, at the end of a connection.

    Args:
        index: of the host.
        name: address, for errors.
        line: to its supervisor.
        ranks: those that run there.
        stopping: gets the signals that come there.
    """

    def __init__(self, index: int, name: str, line: Line, ranks: range, stopping: Stopping) -> None:
        """See the class."""
        self.index, self.name, self.ranks, self.stopping = index, name, ranks, stopping
        self._line, self.socket = line, line.socket
        self._files: dict[int, Mapping[int, Path]] = {}
        self._board: dict[int, tuple[int, int, int]] = {}
        self._count = 0
        self._made: dict[int, list[Copy]] | None = None
        self._damaged: list[str] = []
        self._heard = self._spoke = time.monotonic()

    def start(self, number: int, job: Job, told: Start, files: Mapping[int, Path]) -> None:
        """See `Node`. What runs there is that host's own job."""
        self._files[number] = files
        self._send(do="start", world=number, told=asdict(told))

    def port(self, number: int) -> int | None:
        """See `Node`: stores are opened by the first host."""
        return None

    def order(self, number: int, copy: Copy | None) -> None:
        """See `Node`."""
        self._send(do="order", world=number, copy=_words(copy))

    def signal(self, number: int, kind: signal.Signals) -> None:
        """See `Node`."""
        self._send(do="signal", world=number, signal=int(kind))

    def receive(self) -> list[Ended]:
        """See `Node`.

        Raises:
            LaunchError: the connection has ended, or the host says that it must end.
        """
        try:
            messages = self._line.receive()
        except (OSError, EOFError, ValueError) as error:
            raise self._lost(f"its connection has ended ({error or 'closed there'})") from None
        self._heard = time.monotonic()
        try:
            return [ended for message in messages for ended in self._take(message)]
        except (LookupError, TypeError, ValueError) as error:
            raise self._lost(f"it said what is not understood here ({type(error).__name__}: {error})") from None

    def watch(self) -> None:
        """See `Node`."""
        now = time.monotonic()
        if now - self._heard > SILENT_S:
            raise self._lost(f"nothing was heard of it for {SILENT_S:g} s")
        if now - self._spoke > _BEAT_S:
            self._send(do="alive")

    def board(self, ranks: Iterable[int]) -> Mapping[int, tuple[int, int, int]]:
        """See `Node`; `since` is when it was heard here."""
        return {rank: self._board.get(rank, (0, 0, 0)) for rank in ranks}

    def count(self, ranks: range) -> int:
        """See `Node`."""
        return self._count

    def ask(self) -> None:
        """See `Node`."""
        self._made = None
        self._send(do="made")

    def made(self) -> Mapping[int, list[Copy]] | None:
        """See `Node`."""
        return self._made

    def damaged(self) -> list[str]:
        """See `Node`."""
        return self._damaged

    def keep(self, copy: Copy | None) -> None:
        """See `Node`."""
        self._count = copy.count if copy is not None else 0
        self._send(do="keep", copy=_words(copy))

    def end(self, code: ExitCode, why: str) -> None:
        """See `Node`: the supervisor there exits with this code, if it can still be reached."""
        with suppress(LaunchError):
            self._send(do="end", code=int(code), why=why)

    def _take(self, message: dict[str, Any]) -> list[Ended]:
        if "ended" in message:
            number, rank, code, error = message["ended"]
            if error is not None:
                self._files[number][rank].write_text(error, encoding="utf-8")
            return [(number, rank, code)]
        if "board" in message:
            for rank, (joined, trains) in ((int(rank), words) for rank, words in message["board"].items()):
                _, before, since = self._board.get(rank, (0, 0, 0))
                self._board[rank] = (joined, trains, since if trains == before else time.monotonic_ns())
            self._count = int(message["count"])
        elif "made" in message:
            self._made = {int(rank): [Copy(*copy) for copy in copies] for rank, copies in message["made"].items()}
            self._damaged = [str(text) for text in message["damaged"]]
        elif "asked" in message:
            self.stopping.hear(signal.Signals(message["asked"][0]), int(message["asked"][1]))
        elif "lost" in message:
            raise self._lost(str(message["lost"]))
        return []

    def _send(self, **message: Any) -> None:
        self._spoke = time.monotonic()
        try:
            self._line.send(message)
        except OSError as error:
            raise self._lost(f"its connection has ended ({error})") from None

    def _lost(self, why: str) -> LaunchError:
        ranks = f"ranks {self.ranks.start} to {self.ranks.stop - 1}"
        return LaunchError(
            f"node {self.index} ({self.name}, {ranks}) is lost: {why}; needed every host, for its part of the state "
            "is nowhere else; the ranks of all hosts are ended; start again: the job goes on from its last checkpoint "
            "(torchrun does so with --max-restarts, and with fewer hosts where --nnodes and --elastic allow them)"
        )


def _words(copy: Copy | None) -> tuple[int, ...] | None:
    return astuple(copy) if copy is not None else None


class _Following:
    """What the supervisor of another host than the first one keeps in mind."""

    def __init__(self, job: Job, here: Here, line: Line, folder: Path) -> None:
        self.job, self.here, self.line, self.folder = job, here, line, folder
        self.files: dict[int, dict[int, Path]] = {}
        self.heard = self.spoke = time.monotonic()
        self.told: dict[str, Any] = {}
        self.asked = 0

    def do(self, message: dict[str, Any]) -> ExitCode | None:
        """Do what the first host says; the exit code at the end."""
        kind, here = message["do"], self.here
        copy = Copy(*message["copy"]) if message.get("copy") is not None else None
        if kind == "start":
            number = int(message["world"])
            self.files[number] = {rank: self.folder / f"error-{number}-{rank}.json" for rank in self.job.ranks}
            here.start(number, self.job, Start(**message["told"]), self.files[number])
        elif kind == "order":
            here.order(int(message["world"]), copy)
        elif kind == "signal":
            here.signal(int(message["world"]), signal.Signals(message["signal"]))
        elif kind == "made":
            here.ask()
            made = {rank: [astuple(copy) for copy in copies] for rank, copies in here.made().items()}
            self.say(made=made, damaged=here.damaged())
        elif kind == "keep":
            here.keep(copy)
        elif kind == "end":
            self.kill()
            if message["why"]:
                raise LaunchError(f"node {self.job.nodes.index}: the first host has ended the job: {message['why']}")
            return ExitCode(message["code"])
        return None

    def kill(self) -> None:
        """End all ranks."""
        for number in self.files:
            self.here.signal(number, signal.SIGKILL)

    def tell(self, ended: list[Ended], stopping: Stopping) -> None:
        """Say what has happened here, if anything has, or that this host is still there."""
        for number, rank, code in ended:
            path = self.files[number][rank]
            error = path.read_text(encoding="utf-8") if path.exists() else None
            self.say(ended=[number, rank, code, error])
        if stopping.first is not None and stopping.count > self.asked:
            self.asked = stopping.count
            self.say(asked=[int(stopping.first), stopping.count])
        board = {rank: [joined, trains] for rank, (joined, trains, _) in self.here.board(self.job.ranks).items()}
        told = {"board": board, "count": self.here.count(self.job.ranks)}
        if told != self.told or time.monotonic() - self.spoke > _BEAT_S:
            self.told = told
            self.say(**told)

    def say(self, **message: Any) -> None:
        self.spoke = time.monotonic()
        self.line.send(message)


def follow(job: Job, here: Here, line: Line, folder: Path, stopping: Stopping) -> Outcome:
    """Run this host's ranks as the first host says, until the job has ended.

    Args:
        job: what this host's ranks run.
        here: its fork server and memory.
        line: to the first host's supervisor.
        folder: where ranks leave their errors.
        stopping: signals that have come here; the first host hears of them.

    Raises:
        LaunchError: the first host is gone, cannot be reached, or has ended the job; or the fork server has died.
    """
    following = _Following(job, here, line, folder)
    try:
        while True:
            ready = select.select([line.socket, here.socket], [], [], 0 if line.has_kept else _POLL_S)[0]
            if line.has_kept or line.socket in ready:
                for message in line.receive():
                    code = following.do(message)
                    if code is not None:
                        return Outcome(exit_code=code)
                following.heard = time.monotonic()
            elif time.monotonic() - following.heard > SILENT_S:
                raise EOFError(f"nothing was heard of it for {SILENT_S:g} s")
            following.tell(here.receive() if here.socket in ready else [], stopping)
    except LaunchError as error:
        with suppress(OSError):
            following.say(lost=str(error))
        raise
    except (OSError, EOFError, ValueError) as error:
        following.kill()
        raise LaunchError(
            f"node {job.nodes.index}: the first host of the job ({job.nodes.address}) is lost: "
            f"{error or 'it has closed its connection'}; the ranks of this host are ended: none trains on alone; look "
            "there for the cause, and start again: the job goes on from its last checkpoint"
        ) from None
