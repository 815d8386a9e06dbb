"""The fork server of a job: `python -m shardwise.launch.forking.nursery SOCKET MODULE...`. It imports the modules once.

A process of its own, for it must stay what its ranks are forked from: one thread, no accelerator opened. It starts
sets of ranks ("worlds"), passes orders and signals on, and says who has ended. Every message is a line of JSON:

    {"do": "start", "world": 1, "first": 0, "argv": [[...], ...], "env": [{...}, ...], "store": null, "outliving": null}
    {"do": "order", "world": 1, "order": {...}}            {"do": "signal", "world": 1, "signal": 9}
    {"ended": [1, rank, exit code]}                         # from here; negative: the signal, as `subprocess` says it
    {"store": [1, port, problem]}

`first` is the first rank; `store` is [address, port]: where the store shall be opened in which the ranks meet, by a
process of its own; `outliving` is what ranks need whose state outlives them: {"job": "...", "memory": {...},
"standby": false, "halvings": 0}. When the launcher is gone the ranks get SIGTERM (they finish the step, save and end),
and seconds later SIGKILL.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from shardwise.errors import LaunchError
from shardwise.launch.entry import main as enter
from shardwise.launch.entry import report
from shardwise.launch.environment import RECOVER
from shardwise.launch.forking.keeper import keep_store
from shardwise.launch.forking.lines import Line
from shardwise.launch.stopping import STOP_SIGNALS
from shardwise.launch.variables import set_variables
from shardwise.train.kept.outliving import Memory, Place, call_process

GRACE_S = 20.0
"""After the launcher's death: seconds for the step and the save."""
_NOWHERE = 9
"""The port of a store that could not be opened: other hosts wait to hear of one, and nobody meets there."""
STANDBY_NICE = 10
"""How much nicer a standby is while it gets ready: a tenth of the processor's time where nobody leaves it more."""


@dataclass(frozen=True)
class _Rank:
    """A process that was forked here."""

    world: int
    rank: int
    pid: int
    watch: int
    """Becomes readable when the process ends (`pidfd_open`)."""


class Nursery:
    """Forks, and waits for, the ranks."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.ranks: list[_Rank] = []
        self.orders: dict[int, list[int]] = {}
        """World -> the pipes on which its ranks wait for what to do."""
        self.stores: dict[int, int] = {}
        """World -> the process that keeps the store in which its ranks meet."""
        self.may_raise: bool | None = None
        """Whether a priority that was lowered may be raised again; None: nobody has stood by yet."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(line.socket, selectors.EVENT_READ)

    def serve(self) -> None:
        """Work until the launcher is gone, and end what is left."""
        while True:
            ready = {key.fd for key, _ in self._selector.select()}
            self.reap(ready)
            if self.line.socket.fileno() in ready and not self._receive():
                break
        self._send_signal(None, signal.SIGTERM)
        self._send_signal(None, signal.SIGCONT)  # one that stands by is stopped
        end = time.monotonic() + GRACE_S
        while self.ranks and (left := end - time.monotonic()) > 0:
            self.reap({key.fd for key, _ in self._selector.select(left) if key.fileobj is not self.line.socket})
            if self.line.socket.fileno() in self._selector.get_map():
                self._selector.unregister(self.line.socket)
        self._send_signal(None, signal.SIGKILL)
        for world in list(self.stores):
            self._close_store(world)

    def reap(self, ready: set[int]) -> None:
        """Say which ranks have ended, with what they had started themselves: data workers."""
        for rank in [rank for rank in self.ranks if rank.watch in ready]:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.pid, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(rank.pid, 0)[1])
            self._selector.unregister(rank.watch)
            os.close(rank.watch)
            self.ranks.remove(rank)
            self._close_if_ended(rank.world)
            with suppress(OSError):  # nobody listens any more
                self.line.send({"ended": [rank.world, rank.rank, code]})

    def _close_if_ended(self, world: int) -> None:
        if not any(rank.world == world for rank in self.ranks):
            self._close_orders(world)
            self._close_store(world)

    def _receive(self) -> bool:
        """Do what came in; False at the end."""
        try:
            messages = self.line.receive()
        except (OSError, EOFError):
            return False
        for message in messages:
            self._do(message)
        return True

    def _do(self, message: dict[str, Any]) -> None:
        kind, world = message["do"], int(message["world"])
        if kind == "start":
            self._start(world, message)
            if message["outliving"] and message["outliving"]["standby"]:
                self.may_raise = may_raise_priority() if self.may_raise is None else self.may_raise
                self._set_priority(world, STANDBY_NICE)
        elif kind == "order":
            self._set_priority(world, 0)
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
        """Fork the ranks. One that cannot be has ended: without a set that was to stand by the job goes on."""
        self.orders[world] = []
        told, refused = self._open_store(world, message) if message["store"] else ({}, "")
        for rank, (argv, env) in enumerate(zip(message["argv"], message["env"], strict=True), message["first"]):
            try:
                if refused:
                    raise OSError(0, refused)
                pid, read, write = _fork()
            except OSError as error:
                why = f"it cannot be started: {error.strerror} (processes, `ulimit -u`, and what the container allows)"
                with suppress(OSError):  # nobody listens any more
                    self.line.send({"ended": [world, rank, report(LaunchError(why), argv)]})
                continue
            if not pid:
                os.close(write)
                place = _place(world, rank, read, message["outliving"]) if message["outliving"] else None
                self._become(rank, argv, env | told, place)
            self.orders[world].append(write)
            with suppress(PermissionError, ProcessLookupError):  # it does the same; whoever is first
                os.setpgid(pid, pid)
            os.close(read)
            watch = os.pidfd_open(pid)
            self._selector.register(watch, selectors.EVENT_READ)
            self.ranks.append(_Rank(world, rank, pid, watch))
        self._close_if_ended(world)

    def _set_priority(self, world: int, nicer: int) -> None:
        """Of all threads of a world's ranks and of their data workers, where it can be taken back."""
        for rank in self.ranks if self.may_raise else ():
            if rank.world == world:
                with suppress(ProcessLookupError):
                    os.setpriority(os.PRIO_PGRP, rank.pid, min(os.nice(0) + nicer, 19))

    def _open_store(self, world: int, message: dict[str, Any]) -> tuple[dict[str, str], str]:
        """Have a process open a set's store, and say where it is.

        Returns: the variable that its ranks read; and why none of them may be started, where they were to stand by.
        """
        port, problem, is_standby = 0, None, bool(message["outliving"] and message["outliving"]["standby"])
        try:
            pid, read, write = _fork()
        except OSError as error:
            problem = f"no process can be started for it: {error.strerror}"
        else:
            if not pid:
                os.close(read)
                address, wanted = message["store"]
                keep_store(address, wanted, write, os.getppid())
            os.close(write)
            self.stores[world] = pid
            with os.fdopen(read) as file:
                found = json.loads(file.readline() or '{"port": 0, "problem": "its process has ended"}')
            port, problem = found["port"], found["problem"]
        refused = f"the rendezvous of its ranks cannot be opened: {problem}" if problem and is_standby else ""
        with suppress(OSError):  # nobody listens any more
            self.line.send({"store": [world, port or _NOWHERE, None if refused else problem]})
        return {"MASTER_PORT": str(port)}, refused

    def _close_store(self, world: int) -> None:
        pid = self.stores.pop(world, None)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def _become(self, rank: int, argv: list[str], env: dict[str, str], place: Place | None) -> None:
        """In the new process: a rank. Ends by SystemExit, as a program does: exit handlers run."""
        os.setpgid(0, 0)  # SIGKILL goes to the whole group: to data workers too
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # `nohup` stays what it is
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        self._selector.close()
        self.line.socket.close()
        for pipe in (pipe for pipes in self.orders.values() for pipe in pipes):
            os.close(pipe)
        call_process(f"{'standby' if place is not None and place.streams is not None else 'rank'} {rank}")
        if place is not None:
            place = _silenced(place) if place.streams is not None else place
            env = env | {RECOVER: place.dump()}
        set_variables(env)
        if "torch" in sys.modules:  # it read its variables when it was imported
            sys.modules["torch"].set_num_threads(int(env["OMP_NUM_THREADS"]))
        if "numpy.random" in sys.modules:  # it drew its seed when it was imported: all ranks would draw the same
            sys.modules["numpy.random"].seed()
        sys.exit(enter(argv))

    def _send_signal(self, world: int | None, number: signal.Signals) -> None:
        for rank in self.ranks:
            if world in (None, rank.world):
                with suppress(ProcessLookupError, PermissionError):
                    if number == signal.SIGKILL:
                        os.killpg(rank.pid, number)
                    else:
                        os.kill(rank.pid, number)


def _fork() -> tuple[int, int, int]:
    """A new process and a pipe to it: its pid, 0 there, and the ends to read and to write.

    Raises:
        OSError: there cannot be one more.
    """
    read, write = os.pipe()
    try:
        return os.fork(), read, write
    except OSError:
        os.close(read)
        os.close(write)
        raise


def may_raise_priority() -> bool:
    """Whether the system lets a process take its priority back (`CAP_SYS_NICE`, `RLIMIT_NICE`); another one tries."""
    try:
        pid = os.fork()
    except OSError:  # there cannot be one more
        return False
    if not pid:
        code = 1
        with suppress(OSError):
            own = os.nice(0)
            os.setpriority(os.PRIO_PROCESS, 0, own + 1)
            os.setpriority(os.PRIO_PROCESS, 0, own)
            code = 0
        os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


def _place(world: int, rank: int, order: int, told: dict[str, Any]) -> Place:
    return Place(
        job=told["job"],
        rank=rank,
        world=world,
        order=order,
        memory=Memory.from_json(told["memory"]),
        streams=(1, 2) if told["standby"] else None,
        halvings=told["halvings"],
    )


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
    """Serve one launcher.

    Args:
        argv: number of the socket that leads to it, then the modules that all ranks need.
    """
    # a terminal's Ctrl-C reaches this process too; the launcher decides what it means. Held back and not ignored: a
    # rank that is just being forked keeps what comes for it until its handlers are set
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    gc.disable()  # imports leave nothing to collect, and fill the collector's lists
    for name in argv[1:]:
        with suppress(Exception):  # a rank imports it as well, and says what is wrong, with its line
            importlib.import_module(name)
    gc.enable()
    gc.freeze()  # a collection in a rank would write to, and so copy, every page that it shares with this process
    Nursery(Line(socket.socket(fileno=int(argv[0])))).serve()  # ranks leave it by SystemExit
    os._exit(0)  # nothing is to be put in order here, and taking torch apart takes a while


if __name__ == "__main__":
    main(sys.argv[1:])
