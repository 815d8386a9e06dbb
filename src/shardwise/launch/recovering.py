"""`run_recovering`: run a job's ranks, and go on when some of them die."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from shardwise.errors import LaunchError
from shardwise.launch.elastic import Fleet
from shardwise.launch.job import Job
from shardwise.launch.local import Outcome, outcome_of
from shardwise.launch.meeting import Asked, gather, join, meeting_place
from shardwise.launch.node import Here
from shardwise.launch.recovery import Recovering
from shardwise.launch.server import can_fork, fork_server
from shardwise.launch.stopping import Stopping, catching
from shardwise.launch.supervisor import Supervisor
from shardwise.launch.there import follow
from shardwise.launch.variables import variables
from shardwise.launch.warm import TRAINING
from shardwise.launch.worlds import Worlds
from shardwise.train.outliving import Memory


def run_recovering(job: Job, policy: Recovering, stopping: Stopping | None = None) -> Outcome:
    """Run a job's ranks until all have ended, and go on when some of them die.

    On several hosts it is called on each, and runs the ranks of that host; the first one decides for all.

    Cost: memory of two copies of the state, in all; with `policy.standby` a second set of processes, idle after its
    start; per step a copy of the state, divided among the ranks. Must be called from the main thread (signals).

    Args:
        job: what the ranks run.
        policy: when it goes on.
        stopping: of a caller that is `catching` signals already.

    Raises:
        LaunchError: not on Linux, or the fork server cannot be started or has died; a host is lost; under
            `policy.elastic` fewer processes than its least.

    Example:
        >>> job = Job(target="train.py", args=("dp2",), nproc=2)  # doctest: +SKIP
        >>> run_recovering(job, Recovering()).exit_code  # doctest: +SKIP
        <ExitCode.OK: 0>
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
            tempfile.TemporaryDirectory(prefix="shardwise-") as name,
            fork_server(TRAINING, memory.files) as server,
            catching(stopping) as stopping,
        ):
            here, folder = Here(server, memory), Path(name)
            if job.nodes.count == 1:
                return Supervisor(policy, fleet, Worlds([here], folder), stopping).run()
            try:
                store = meeting_place(job, stopping)
                if job.nodes.index:
                    return follow(job, here, join(job, store, stopping), folder, stopping)
                worlds = Worlds([here, *gather(job, store, stopping)], folder)
            except Asked:
                return outcome_of({}, {}, stopping)
            return _lead(Supervisor(policy, fleet, worlds, stopping))
    finally:
        memory.close()


def _lead(supervisor: Supervisor) -> Outcome:
    """Run the job, and tell the other hosts how it ended."""
    try:
        outcome = supervisor.run()
    except LaunchError as error:
        supervisor.worlds.kill()  # what they are doing cannot be finished
        supervisor.worlds.end(error.exit_code, str(error))
        raise
    supervisor.worlds.end(outcome.exit_code)
    return outcome
