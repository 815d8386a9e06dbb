"""`gather` and `join`: the supervisors of a job's hosts find each other through their launcher's rendezvous.

The first host listens on a port of its own and leaves its number, with a random word, in the launcher's store (that of
torch elastic, or one at the address that srun's or mpirun's variables give). The others connect and say who they are.
"""

from __future__ import annotations

import json
import re
import secrets
import select
import socket
import time
from datetime import timedelta
from typing import Any

from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]  # public, not in its type stubs

from shardwise.errors import LaunchError
from shardwise.launch.forking.lines import Line
from shardwise.launch.job import Job
from shardwise.launch.local import outcome_of
from shardwise.launch.nodes.there import SILENT_S, There
from shardwise.launch.stopping import Stopping
from shardwise.version import __version__

MEET_S = 300.0
"""How long hosts wait for each other."""
_KEY = "shardwise/supervisors"
_TRY_S = 5.0
_HELLO_S = 2.0
_PAUSE_S = 0.2


class Asked(Exception):
    """A signal has come before the hosts had met."""


def gather(job: Job, store: Store, stopping: Stopping) -> list[There]:
    """On the first host: wait for all others.

    Args:
        job: what this host's ranks run.
        store: from `meeting_place`.
        stopping: signals that have come.

    Raises:
        LaunchError: not all came in time, or one runs something else.
        Asked: a signal has come.
    """
    word, found = secrets.token_hex(16), dict[int, There]()
    try:
        with _listen(job.nodes.address) as listener:
            port = listener.getsockname()[1]
            store.set(_KEY, json.dumps({"host": job.nodes.address, "port": port, "word": word}))
            end = time.monotonic() + MEET_S
            while len(found) < job.nodes.count - 1:
                _refuse_late(end, stopping, _missing(job, found))
                ready = select.select([listener, *(there.socket for there in found.values())], [], [], _PAUSE_S)[0]
                for waiting in found.values():  # it must hear that this host is still there
                    if waiting.socket in ready:
                        waiting.receive()
                    waiting.watch()
                there = _admit(job, listener, word, stopping) if listener in ready else None
                if there is not None and found.setdefault(there.index, there) is not there:
                    raise LaunchError(_unlike(f"node {there.index} ({there.name})", "two hosts of that number"))
    except (LaunchError, Asked) as error:
        code = error.exit_code if isinstance(error, LaunchError) else outcome_of({}, {}, stopping).exit_code
        for there in found.values():
            there.end(code, str(error))
        raise
    return [found[index] for index in sorted(found)]


def _admit(job: Job, listener: socket.socket, word: str, stopping: Stopping) -> There | None:
    """Who has connected; None: nobody of this job."""
    connection, address = listener.accept()
    line = Line(connection)
    said = _hello(line, word)
    if said is None:
        connection.close()
        return None
    index, problem = int(said["node"]), _differs(job, said)
    if problem:
        line.send({"refused": problem})
        connection.close()
        raise LaunchError(_unlike(f"node {index} ({address[0]})", problem))
    line.send({"welcome": True})
    return There(index, address[0], line, range(index * job.nproc, (index + 1) * job.nproc), stopping)


def join(job: Job, store: Store, stopping: Stopping) -> Line:
    """On another host: the line to the first one.

    Args:
        job: what this host's ranks run.
        store: from `meeting_place`.
        stopping: signals that have come.

    Raises:
        LaunchError: it was not found in time, or runs something else.
        Asked: a signal has come.
    """
    end = time.monotonic() + MEET_S
    said: dict[str, Any] = {}
    while True:
        _refuse_late(end, stopping, f"node {job.nodes.index}: found no supervisor of the first host ({said})")
        if store.check([_KEY]):
            said = json.loads(store.get(_KEY))
            try:  # a store that outlives a start (torch elastic's) has the place of the one before for a while
                return _introduce(job, said)
            except (OSError, EOFError, ValueError):
                pass
        time.sleep(_PAUSE_S)


def meeting_place(job: Job, stopping: Stopping) -> Store:
    """The launcher's store, or one at the address that its variables give.

    Args:
        job: whose hosts meet.
        stopping: signals that have come.

    Raises:
        LaunchError: it cannot be opened or reached.
        Asked: a signal has come.
    """
    init, opens = job.nodes.init, job.nodes.index == 0 and not job.nodes.has_store
    if init.startswith("file://"):
        return FileStore(init.removeprefix("file://"), job.nodes.count)
    match = re.fullmatch(r"tcp://(.+):(\d+)", init)
    if match is None:
        raise LaunchError(f"--recover on {job.nodes.count} hosts: cannot meet at {init!r}; needed tcp://host:port")
    host, port = match[1], int(match[2])
    end, problem = time.monotonic() + MEET_S, ""
    while True:
        _refuse_late(end, stopping, f"node {job.nodes.index}: cannot meet at {host}:{port} ({problem})")
        try:
            if not opens:  # asked first: torch's own errors are pages of C++ frames
                socket.create_connection((host, port), timeout=_HELLO_S).close()
            return TCPStore(host, port, is_master=opens, wait_for_workers=False, timeout=timedelta(seconds=_TRY_S))
        except (OSError, RuntimeError) as error:
            problem = str(error).splitlines()[0]
        if opens:
            raise LaunchError(
                f"--recover: node {job.nodes.index} cannot open {host}:{port}, where the hosts shall meet: {problem}; "
                "free the port, or give another MASTER_PORT on every host"
            )
        time.sleep(_PAUSE_S)


def _introduce(job: Job, said: dict[str, Any]) -> Line:
    line = Line(socket.create_connection((said["host"], said["port"]), timeout=_TRY_S))
    try:
        line.send({"word": said["word"], "node": job.nodes.index, **_identity(job)})
        answer = line.first()
    except (OSError, EOFError, ValueError):
        line.socket.close()
        raise
    if "refused" in answer:
        line.socket.close()
        raise LaunchError(_unlike(f"node {job.nodes.index}", answer["refused"]))
    line.socket.settimeout(SILENT_S)
    return line


def _identity(job: Job) -> dict[str, Any]:
    """What must be the same on all hosts."""
    return {
        "version": __version__,
        "hosts": job.nodes.count,
        "processes per host": job.nproc,
        "target": job.target.rpartition("/")[2],
        "arguments": list(job.args),
    }


def _differs(job: Job, said: dict[str, Any]) -> str:
    for name, here in _identity(job).items():
        if said.get(name) != here:
            return f"{name} {said.get(name)!r}, needed {here!r} as on the first host"
    return "" if 0 < int(said["node"]) < job.nodes.count else f"a node {said['node']} of {job.nodes.count}"


def _hello(line: Line, word: str) -> dict[str, Any] | None:
    """What a host says of itself; None of whoever does not know the word."""
    line.socket.settimeout(_HELLO_S)
    try:
        said = line.first()
        if secrets.compare_digest(str(said["word"]), word):
            line.socket.settimeout(SILENT_S)
            return said
    except (OSError, EOFError, ValueError, LookupError, TypeError):
        pass
    return None


def _listen(address: str) -> socket.socket:
    """On the address at which the other hosts look for this one; on all, where it is that of a gateway."""
    try:
        family = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((address, 0), family=family)
    except OSError:
        return socket.create_server(("", 0))


def _refuse_late(end: float, stopping: Stopping, problem: str) -> None:
    if stopping.first is not None:
        raise Asked
    if time.monotonic() > end:
        raise LaunchError(
            f"--recover: {problem}; waited {MEET_S:g} s; needed one process of `shardwise` on each host, which all "
            "reach the first one: look at their output, at MASTER_ADDR, and at firewalls between them"
        )


def _missing(job: Job, found: dict[int, There]) -> str:
    absent = sorted(set(range(1, job.nodes.count)) - set(found))
    return f"found {len(found) + 1} of {job.nodes.count} hosts, without node {', '.join(map(str, absent))}"


def _unlike(who: str, problem: str) -> str:
    return f"--recover: {who}: found {problem}; start the same command with the same Shardwise on every host"
