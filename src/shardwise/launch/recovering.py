"""`run_recovering`: run a job's ranks on this machine, and go on when some of them die. No torch."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import LaunchError
from shardwise.launch.elastic.slots import Fleet
from shardwise.launch.forking.server import can_fork, fork_server
from shardwise.launch.job import Job
from shardwise.launch.local import Outcome
from shardwise.launch.nodes.node import Here, Node
from shardwise.launch.nodes.worlds import Worlds
from shardwise.launch.recovery import Recovering
from shardwise.launch.stopping import Stopping, catching
from shardwise.launch.supervisor import Supervisor
from shardwise.launch.variables import variables
from shardwise.launch.warm import TRAINING
from shardwise.train.kept.outliving import Memory


@dataclass(frozen=True, kw_only=True)
class Own:
    """What a launcher has of a job on its own host."""

    policy: Recovering
    fleet: Fleet
    here: Here
    folder: Path
    """Where ranks leave their errors."""
    stopping: Stopping

    def supervisor(self, *others: Node) -> Supervisor:
        """Who runs the job, on other hosts too."""
        return Supervisor(self.policy, self.fleet, Worlds([self.here, *others], self.folder), self.stopping)


_QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Ranks that outlive another one lose connections to it; of each torch would print a page of its native frames."""


@contextmanager
def own_host(job: Job, policy: Recovering, stopping: Stopping | None = None) -> Iterator[Own]:
    """Memory that outlives ranks, and the server that forks them; at the end both are gone. Errors: `run_recovering`.

    Args:
        job: what the ranks run.
        policy: when it goes on.
        stopping: of a caller that is `catching` signals already.
    """
    if not can_fork():
        raise LaunchError(
            f"--recover on {sys.platform}: found no memfd_create and pidfd_open, needed Linux 5.3 or newer; start "
            "without --recover: the job then goes on from its last checkpoint when it is started again"
        )
    fleet = Fleet(job, policy.elastic, variables())
    memory = Memory.create(range(job.ranks.start, job.ranks.start + fleet.most))
    try:
        with (
            tempfile.TemporaryDirectory(prefix="shardwise-") as folder,
            fork_server(TRAINING, memory.files, _QUIET) as server,
            catching(stopping) as stopping,
        ):
            here = Here(server, memory)
            yield Own(policy=policy, fleet=fleet, here=here, folder=Path(folder), stopping=stopping)
    finally:
        memory.close()


def run_recovering(job: Job, policy: Recovering, stopping: Stopping | None = None) -> Outcome:
    """Run a job's ranks on this machine until all have ended, and go on when some of them die.

    Cost: memory of two copies of the state, in all; with `policy.standby` a second set of processes, idle after its
    start; per step a copy of the state, divided among the ranks. Must be called from the main thread (signals).

    Args:
        job: what the ranks run; on several hosts see `shardwise.launch.hosts.run_on_hosts`.
        policy: when it goes on.
        stopping: of a caller that is `catching` signals already.

    Raises:
        LaunchError: not on Linux, or the fork server cannot be started or has died; under `policy.elastic` fewer
            processes than its least.

    Example:
        >>> job = Job(target="train.py", args=("dp2",), nproc=2)  # doctest: +SKIP
        >>> run_recovering(job, Recovering()).exit_code  # doctest: +SKIP
        <ExitCode.OK: 0>
    """
    with own_host(job, policy, stopping) as own:
        return own.supervisor().run()
