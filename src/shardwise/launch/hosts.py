"""`run_on_hosts`: run a job's ranks on several hosts, and go on when some of them die. The first host decides."""

from __future__ import annotations

from shardwise.errors import LaunchError
from shardwise.launch.job import Job
from shardwise.launch.local import Outcome, outcome_of
from shardwise.launch.nodes.meeting import Asked, gather, join, meeting_place
from shardwise.launch.nodes.there import follow
from shardwise.launch.recovering import own_host
from shardwise.launch.recovery import Recovering
from shardwise.launch.stopping import Stopping
from shardwise.launch.supervisor import Supervisor


def run_on_hosts(job: Job, policy: Recovering, stopping: Stopping | None = None) -> Outcome:
    """Run the ranks of this host, one of several on each of which this is called, until all of the job have ended.

    Cost: that of `run_recovering`, for the ranks of this host; a message a second between hosts.

    Args:
        job: what the ranks run, and which host this is.
        policy: when it goes on; that of the first host counts.
        stopping: of a caller that is `catching` signals already.

    Raises:
        LaunchError: as `run_recovering`; hosts do not meet, run different things, or one of them is lost.

    Example:
        >>> nodes = Nodes(index=0, count=2, address="node0", init="tcp://node0:29500")  # doctest: +SKIP
        >>> job = Job(target="train.py", args=("fsdp16",), nproc=8, nodes=nodes)  # doctest: +SKIP
        >>> run_on_hosts(job, Recovering()).exit_code  # doctest: +SKIP
        <ExitCode.OK: 0>
    """
    with own_host(job, policy, stopping) as own:
        try:
            store = meeting_place(job, own.stopping)
            if job.nodes.index:
                return follow(job, own.here, join(job, store, own.stopping), own.folder, own.stopping)
            supervisor = own.supervisor(*gather(job, store, own.stopping))
        except Asked:
            return outcome_of({}, {}, own.stopping)
        return _lead(supervisor)


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
