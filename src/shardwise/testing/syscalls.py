"""`Traced`: forked processes whose system calls fail, wait or kill them where a test says so, through `strace`.

The kernel's own view of a crash: what a Python-level hook would not see (a call that a library makes) is a point too.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import socket
import subprocess
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

FILE_CALLS = (
    "open", "openat", "creat", "write", "writev", "pwrite64", "pwritev", "pread64", "fsync", "fdatasync", "close",
    "rename", "renameat", "renameat2", "unlink", "unlinkat", "mkdir", "mkdirat", "rmdir", "ftruncate", "fallocate",
    "getdents64", "stat", "lstat", "fstat", "newfstatat", "statx", "fadvise64", "sync_file_range", "copy_file_range",
)  # fmt: skip
"""System calls on files and directories, of any architecture. `read` is left out: the processes wait in one."""


Prepared = Callable[[], Callable[[], int]]
"""Called in the forked process before it is traced; gives what is run while it is."""


def why_not() -> str:
    """Why this machine cannot inject faults into system calls; empty: it can."""
    if shutil.which("strace") is None:
        return "needs strace"
    try:
        Traced([lambda: lambda: 0], 0, ["trace=none"]).wait()
    except OSError as error:
        return f"needs the right to trace processes: {error}"
    return ""


class Traced:
    """Processes forked from this one, each running a function; system calls of one of them are tampered with.

    Args:
        works: one function per process, which prepares and gives what is to be traced; its result is the exit code.
        victim: which of them is traced.
        options: for `strace -e`: `inject=fsync:error=EIO:when=3`, `inject=rename:signal=KILL:when=1`.
        log: where every traced call is written; None: nowhere.

    Raises:
        OSError: strace cannot attach.

    >>> Traced([lambda: save], 0, ["inject=fsync:signal=KILL:when=1"]).wait()  # doctest: +SKIP
    [-9]
    """

    def __init__(self, works: Sequence[Prepared], victim: int, options: Sequence[str], log: Path | None = None) -> None:
        """Fork, wait until all are prepared, attach, and let all of them go."""
        self._children = [_Child(work) for work in works]
        try:
            for child in self._children:
                child.wait_until_prepared()
            self._tracer = _attach(self._children[victim].pid, *options, log=log)
        except OSError:
            for child in self._children:
                os.kill(child.pid, signal.SIGKILL)
                os.waitpid(child.pid, 0)
            raise
        finally:
            for child in self._children:
                child.go()

    def detach(self) -> None:
        """Tamper no more; the process goes on."""
        self._tracer.terminate()
        self._end_tracer()

    def wait(self) -> list[int]:
        """How each ended: an exit code, or minus the number of a signal."""
        codes = [os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1]) for child in self._children]
        self._end_tracer()
        return codes

    def _end_tracer(self) -> None:
        if self._tracer.stderr is not None and not self._tracer.stderr.closed:
            self._tracer.communicate()


def counted(log: Path) -> dict[str, int]:
    """How often each file call stands in a log of `Traced`, of the thread that made the first one.

    Other threads are left out: an injection counts by thread.
    """
    rows = [match.groups() for line in log.read_text().splitlines() if (match := re.match(r"(\d+) +(\w+)\(", line))]
    ours = [(owner, call) for owner, call in rows if call in FILE_CALLS]
    return dict(sorted(Counter(call for owner, call in ours if owner == ours[0][0]).items()))


class _Child:
    """A forked process that says when it is prepared, and waits for a byte."""

    def __init__(self, work: Prepared) -> None:
        self._here, there = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            code = 255
            try:
                self._here.close()
                run = work()
                there.send(b"x")
                there.recv(1)
                code = run()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        there.close()

    def wait_until_prepared(self) -> None:
        self._here.settimeout(60)
        if not self._here.recv(1):
            raise OSError("a process ended before it was prepared")

    def go(self) -> None:
        with suppress(OSError):  # it is gone
            self._here.send(b"x")
        self._here.close()


def _attach(pid: int, *options: str, log: Path | None = None) -> subprocess.Popen[bytes]:
    words = [word for option in options for word in ("-e", option)]
    command = ["strace", "-f", "-o", str(log or "/dev/null"), *words, "-p", str(pid)]
    tracer = subprocess.Popen(command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
    said = _first_line(tracer.stderr) if tracer.stderr is not None else ""
    if "attached" not in said:
        tracer.kill()
        tracer.communicate()
        raise OSError(f"strace said {said.strip()!r}, needed that it is attached")
    return tracer


def _first_line(stream: IO[bytes]) -> str:
    ready, _, _ = select.select([stream], [], [], 20)
    return os.read(stream.fileno(), 4096).decode(errors="replace") if ready else "nothing for 20 s"
