"""`fork_server`: the process that ranks on this machine are forked from, and the line to it. No torch."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import LaunchError
from shardwise.launch.job import Job
from shardwise.launch.stopping import STOP_SIGNALS
from shardwise.launch.variables import variables
from shardwise.launch.warm import TRAINING, modules_of

START = "SHARDWISE_START"
"""How `shardwise run` starts several ranks: `fork`, from one process that has imported torch, or `exec`."""


def asked_start(env: Mapping[str, str]) -> str:
    """How ranks are to be started; `fork` unless said otherwise.

    Raises:
        LaunchError: neither `fork` nor `exec`.

    >>> asked_start({"SHARDWISE_START": "exec"}), asked_start({})
    ('exec', 'fork')
    """
    found = env.get(START) or "fork"
    if found not in ("fork", "exec"):
        raise LaunchError(
            f"{START}={found!r}: needed `fork` (ranks come from one process that has imported torch, on Linux) or "
            "`exec` (each rank is a program of its own, and imports it itself)"
        )
    return found


def can_fork() -> bool:
    """Whether ranks can be forked and waited for here: Linux 5.3 or newer, and a container that lets them."""
    if not (sys.platform.startswith("linux") and hasattr(os, "pidfd_open") and hasattr(os, "memfd_create")):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class Server:
    """A fork server (`nursery.py`) that runs."""

    line: socket.socket
    pid: int


@contextmanager
def fork_server(
    modules: Sequence[str], files: Sequence[int] = (), environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Start one, which imports modules while its caller goes on; at the end it ends, and what it has forked.

    Args:
        modules: what all ranks need.
        files: numbers of open files that ranks inherit.
        environment: what modules read when they are imported; where the caller's own says so, that stays.
    """
    here, there = socket.socketpair()
    command = [sys.executable, "-m", "shardwise.launch.forking.nursery", str(there.fileno()), *modules]
    # a Ctrl-C goes to it too, and would end it before it can ignore it: it opens what is held back here
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        process = subprocess.Popen(
            command, pass_fds=(there.fileno(), *files), env={**(environment or {}), **variables()}
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    there.close()
    try:
        yield Server(here, process.pid)
    finally:
        here.close()
        process.wait()


@contextmanager
def server_for(job: Job) -> Iterator[Server | None]:
    """The server of a job whose ranks share imports; None where each rank starts as any program does.

    That is a script that names neither torch nor Shardwise, another system than Linux, and `SHARDWISE_START=exec`. A
    single rank gains too: its imports begin before the launcher has read what to run.
    """
    modules = TRAINING if job.is_module else modules_of(Path(job.target))
    if not modules or not can_fork() or asked_start(variables()) == "exec":
        yield None
        return
    with fork_server(modules) as server:
        yield server
