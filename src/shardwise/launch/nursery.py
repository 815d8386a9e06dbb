"""The warm fork server of a supervisor: `python -m shardwise.launch.nursery SOCKET`. It imports torch once.

A process of its own, for it must stay what its ranks are forked from: one thread, no accelerator opened. It starts
sets of ranks ("worlds"), passes orders and signals on, and says who has ended. Every message is a line of JSON:

    {"do": "start", "world": 1, "argv": [[...], ...], "env": [{...}, ...], "job": "...", "memory": {...},
     "standby": false, "halvings": 0}
    {"do": "order", "world": 1, "order": {...}}            {"do": "signal", "world": 1, "signal": 9}
    {"ended": [1, rank, exit code]}                         # from here; negative: the signal, as `subprocess` says it

When the supervisor is gone the ranks get SIGTERM (they finish the step, save and end), and seconds later SIGKILL.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing as mp
import os
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise.launch.entry import main as enter
from shardwise.launch.environment import RECOVER
from shardwise.launch.forked import WARM
from shardwise.launch.variables import set_variables
from shardwise.train.outliving import Memory, Place, call_process

MODULES = (
    *WARM,
    *(f"shardwise.{name}" for name in ("parallel.compose", "launch.resuming", "parallel.pipeline", "parallel.tensor")),
    *(f"shardwise.train.{name}" for name in ("build", "metrics", "picture", "probe", "progress", "sampling")),
)
GRACE_S = 20.0
"""After the supervisor's death: seconds for the step and the save."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_fork = mp.get_context("fork")


@dataclass(frozen=True)
class _Rank:
    """A process that was forked here."""

    world: int
    rank: int
    process: mp.process.BaseProcess
    watch: int
    """Becomes readable when the process ends (`pidfd_open`)."""

    @property
    def pid(self) -> int:
        return int(self.process.pid or 0)


class Nursery:
    """Forks, and waits for, the ranks."""

    def __init__(self, line: socket.socket) -> None:
        self.line = line
        self.ranks: list[_Rank] = []
        self.orders: dict[int, list[int]] = {}
        """World -> the pipes on which its ranks wait for what to do."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(line, selectors.EVENT_READ)
        self._received = b""

    def serve(self) -> None:
        """Work until the supervisor is gone, and end what is left."""
        while True:
            ready = {key.fd for key, _ in self._selector.select()}
            self.reap(ready)
            if self.line.fileno() in ready and not self._receive():
                break
        self._send_signal(None, signal.SIGTERM)
        end = time.monotonic() + GRACE_S
        while self.ranks and (left := end - time.monotonic()) > 0:
            self.reap({key.fd for key, _ in self._selector.select(left) if key.fd != self.line.fileno()})
            if self.line.fileno() in self._selector.get_map():
                self._selector.unregister(self.line)
        self._send_signal(None, signal.SIGKILL)

    def reap(self, ready: set[int]) -> None:
        """Say which ranks have ended, with what they had started themselves: data workers."""
        for rank in [rank for rank in self.ranks if rank.watch in ready]:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.pid, signal.SIGKILL)
            rank.process.join()
            self._selector.unregister(rank.watch)
            os.close(rank.watch)
            self.ranks.remove(rank)
            if not any(other.world == rank.world for other in self.ranks):
                self._close_orders(rank.world)
            with suppress(OSError):  # nobody listens any more
                self.line.sendall(
                    json.dumps({"ended": [rank.world, rank.rank, rank.process.exitcode]}).encode() + b"\n"
                )

    def _receive(self) -> bool:
        """Do what came in; False at the end."""
        try:
            piece = self.line.recv(1 << 16)
        except OSError:
            return False
        *lines, self._received = (self._received + piece).split(b"\n")
        for line in lines:
            self._do(json.loads(line))
        return bool(piece)

    def _do(self, message: dict[str, Any]) -> None:
        kind, world = message["do"], int(message["world"])
        if kind == "start":
            self._start(world, message)
        elif kind == "order":
            text = json.dumps(message["order"]).encode() + b"\n"
            for pipe in self.orders.get(world, []):
                with suppress(BrokenPipeError):  # that rank has died: said by `ended`
                    os.write(pipe, text)
            self._close_orders(world)
        else:
            self._send_signal(world, signal.Signals(message["signal"]))

    def _close_orders(self, world: int) -> None:
        for pipe in self.orders.pop(world, []):
            os.close(pipe)

    def _start(self, world: int, message: dict[str, Any]) -> None:
        slots = tuple((first, second) for first, second in message["memory"]["slots"])
        memory = Memory(board=message["memory"]["board"], slots=slots)
        self.orders[world] = []
        for rank, (argv, env) in enumerate(zip(message["argv"], message["env"], strict=True)):
            read, write = os.pipe()
            self.orders[world].append(write)
            place = Place(
                job=message["job"],
                rank=rank,
                world=world,
                order=read,
                memory=memory,
                streams=(1, 2) if message["standby"] else None,
                halvings=message["halvings"],
            )
            process = _fork.Process(target=self._become, args=(place, argv, env), name=f"rank {rank}")
            process.start()
            with suppress(PermissionError, ProcessLookupError):  # it does the same; whoever is first
                os.setpgid(int(process.pid or 0), int(process.pid or 0))
            os.close(read)
            watch = os.pidfd_open(int(process.pid or 0))
            self._selector.register(watch, selectors.EVENT_READ)
            self.ranks.append(_Rank(world, rank, process, watch))

    def _become(self, place: Place, argv: list[str], env: dict[str, str]) -> None:
        """In the new process: a rank. Ends by SystemExit, after which multiprocessing runs the exit handlers."""
        os.setpgid(0, 0)  # SIGKILL goes to the whole group: to data workers too
        for number in _SIGNALS:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        self._selector.close()
        self.line.close()
        for pipe in (pipe for pipes in self.orders.values() for pipe in pipes):
            os.close(pipe)
        call_process(f"{'standby' if place.streams is not None else 'rank'} {place.rank}")
        if place.streams is not None:
            place = _silenced(place)
        set_variables(env | {RECOVER: place.dump()})
        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
        sys.exit(enter(argv))

    def _send_signal(self, world: int | None, number: signal.Signals) -> None:
        for rank in self.ranks:
            if world in (None, rank.world):
                with suppress(ProcessLookupError, PermissionError):
                    if number == signal.SIGKILL:
                        os.killpg(rank.pid, number)
                    else:
                        os.kill(rank.pid, number)


def _silenced(place: Place) -> Place:
    """What a standby prints before it is called was printed by the rank that it stands by for."""
    sys.stdout.flush()
    sys.stderr.flush()
    streams = (os.dup(1), os.dup(2))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    return replace(place, streams=streams)


def main(argv: list[str]) -> None:
    """Serve one supervisor.

    Args:
        argv: number of the socket that leads to it.
    """
    for number in _SIGNALS:  # a terminal's Ctrl-C reaches this process too; the supervisor decides what it means
        signal.signal(number, signal.SIG_IGN)
    for name in MODULES:
        importlib.import_module(name)
    Nursery(socket.socket(fileno=int(argv[0]))).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
