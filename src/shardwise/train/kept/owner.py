"""`Owner`: who holds a run's directory, and whether its processes are there. No torch."""

from __future__ import annotations

import getpass
import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Who holds a run's directory."""

    owner: str
    host: str
    place: str
    """Boot and pid namespace: what a pid of that host means here."""
    pids: tuple[tuple[int, float], ...]
    """Processes that may write there, each with the time when it began: a pid comes back, the pair does not."""
    started: str
    """UTC, ISO 8601."""
    released: bool = False
    job: str = ""
    """Of which its processes are, where several sets of them take turns."""

    @classmethod
    def here(cls, job: str = "") -> Owner:
        """This process."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(owner=_user(), host=platform.node(), place=_place(), pids=(this_process(),), started=now, job=job)

    def is_run_of(self, other: Owner) -> bool:
        """Whether both are one run: begun by one process."""
        return (self.host, self.place, self.pids[0]) == (other.host, other.place, other.pids[0])

    def __str__(self) -> str:
        return f"{self.owner} on {self.host}, pid {self.pids[0][0]}, since {self.started}"


def is_here(owner: Owner) -> bool:
    """Whether its pids are processes of this host."""
    return owner.host == platform.node() and owner.place == _place()


def runs(pid: int, began: float) -> bool:
    """Whether the process of a pid that began then is there."""
    try:
        return bool(_began(pid) == began and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:  # it is there, and somebody else's
        return True


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return str(os.getuid())


def this_process() -> tuple[int, float]:
    """Its pid, and when it began."""
    return os.getpid(), _began(os.getpid())


def _began(pid: int) -> float:
    """When a process began, in seconds since the boot where the system says so: psutil adds what the clock makes of it.

    A clock that is set moves every such time, and a run that lives would look dead.
    """
    with suppress(OSError):
        words = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return int(words[19]) / os.sysconf("SC_CLK_TCK")
    return float(psutil.Process(pid).create_time())


def _place() -> str:
    """What must be equal for a pid to mean the same process: the boot, and the namespace that a container has."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    return str(int(psutil.boot_time()))
