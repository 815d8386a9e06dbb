"""`Job`: which command runs in how many processes, with which variables and which policy. Data only."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shardwise.errors import UsageError
from shardwise.launch.stopping import RUN_ID

ADDRESS = "127.0.0.1"
"""Where the ranks of one machine meet."""


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The hosts of a job, each with a launcher and as many ranks as the others."""

    index: int = 0
    """Of this one."""
    count: int = 1
    address: str = ADDRESS
    """Of the first one: where all ranks meet."""
    init: str = ""
    """How the launchers find each other: `tcp://host:port` or `file:///path`; empty: there is one."""
    has_store: bool = False
    """Whether somebody has opened a store at `init`: an agent of torch elastic."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A command to run as the ranks of one world on this machine, or as those of this machine in a larger one.

    Example:
        >>> Job(target="shardwise.launch.rank.worker", args=("runs/a",), is_module=True).command()[1:]
        ('-m', 'shardwise.launch.entry', '--module', 'shardwise.launch.rank.worker', 'runs/a')
    """

    target: str
    """A script's path, or a module's dotted name when `is_module`."""
    args: tuple[str, ...] = ()
    nproc: int = 1
    """Ranks on this machine."""
    nodes: Nodes = Nodes()
    is_module: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables added to those of this process."""
    port: int = 0
    """Port of the rendezvous on 127.0.0.1; 0: a free one."""
    grace_s: float = 5.0
    """After a rank failed: seconds that the others get to end before they are killed."""
    stop_grace_s: float = 20.0
    """After Ctrl-C or SIGTERM, once a first rank has ended: seconds that the others get."""

    signal_grace_s: float | None = None
    """After a first signal: seconds for the step and the save, then all ranks are killed; None: as long as it takes."""

    def __post_init__(self) -> None:
        if self.nproc < 1:
            raise UsageError(f"a job of {self.nproc} processes cannot run; nproc must be at least 1")
        if not 0 <= self.port <= 65535:
            raise UsageError(f"port {self.port} does not exist; use 1024 to 65535, or 0 for a free one")
        if not self.is_module and not Path(self.target).is_file():
            kind = "is a directory" if Path(self.target).is_dir() else "does not exist"
            raise UsageError(f"cannot run {self.target!r}: it {kind}; give the path of a Python script")

    @property
    def world(self) -> int:
        """Ranks on all machines."""
        return self.nproc * self.nodes.count

    @property
    def ranks(self) -> range:
        """Those of this machine."""
        return range(self.nodes.index * self.nproc, (self.nodes.index + 1) * self.nproc)

    def command(self, reporting: tuple[int, Path] | None = None, launcher_pid: int | None = None) -> tuple[str, ...]:
        """What a rank executes: this interpreter, our entry point, the target and its arguments.

        Args:
            reporting: the rank, and the file where its error goes; None: it prints its error.
            launcher_pid: the process without which it ends; None: this one.
        """
        parent = str(launcher_pid or os.getpid())
        report = ("--report", str(reporting[0]), str(reporting[1]), parent) if reporting else ()
        kind = "--module" if self.is_module else "--script"
        return (sys.executable, "-m", "shardwise.launch.entry", *report, kind, self.target, *self.args)


def rank_environment(job: Job, rank: int, port: int, num_cores: int) -> dict[str, str]:
    """The variables of one rank: those that torchrun sets, so that any torch script reads them.

    `OMP_NUM_THREADS` is the machine's cores shared among the ranks, unless the caller set it. SHARDWISE_INIT is
    set to what torchrun's readers do anyway: one inherited from an outer world would send ranks there. Ranks of one
    host listen on loopback only: gloo would take the interface of the host's name.
    """
    world, local_world = str(job.world), str(job.nproc)
    names = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank - job.ranks.start),
        "ROLE_RANK": str(rank),
        "GROUP_RANK": str(job.nodes.index),
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": local_world,
        "ROLE_WORLD_SIZE": world,
        "GROUP_WORLD_SIZE": str(job.nodes.count),
        "MASTER_ADDR": job.nodes.address,
        "MASTER_PORT": str(port),
        "SHARDWISE_INIT": "env://",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": RUN_ID,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    defaults = {"OMP_NUM_THREADS": str(max(1, num_cores // job.nproc))}
    if job.nodes.count == 1 and sys.platform.startswith("linux"):
        defaults["GLOO_SOCKET_IFNAME"] = "lo"
    return {**defaults, **job.environment, **names}
