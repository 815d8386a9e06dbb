"""`--recover` on several hosts: a launcher starts one process on each, which starts and supervises its ranks."""

from __future__ import annotations

import socket

from shardwise.errors import UsageError
from shardwise.launch.environment import LOCAL_INIT, Launch, master_place
from shardwise.launch.job import Nodes
from shardwise.launch.variables import variables


def supervised(launch: Launch) -> Nodes:
    """Which host this process supervises.

    Args:
        launch: who has started it.

    Raises:
        UsageError: the launcher has started the ranks themselves.
    """
    if launch.local_world != 1:
        raise UsageError(
            f"--recover: found {launch.local_world} processes that {launch.launcher} started on this host, needed one, "
            "which starts the host's ranks and keeps their state: whoever recovers must be able to fork; start one "
            "process per host (torchrun --nproc-per-node=1, srun --ntasks-per-node=1, mpirun --map-by ppr:1:node) of "
            "`shardwise run --recover --nproc RANKS_PER_HOST`; or leave --recover out: the launcher's own restart goes "
            "on from the last checkpoint"
        )
    init, has_store = master_place(variables()) if launch.init == "env://" else (launch.init, False)
    if launch.world == 1 or init == LOCAL_INIT:
        return Nodes()
    address = init.removeprefix("tcp://").rpartition(":")[0] if init.startswith("tcp://") else socket.gethostname()
    return Nodes(index=launch.rank, count=launch.world, address=address, init=init, has_store=has_store)


def ranks_per_host(nodes: Nodes, world: int) -> int:
    """How many ranks each host starts.

    Raises:
        UsageError: the world cannot be divided.
    """
    if world % nodes.count:
        raise UsageError(
            f"--recover: found a plan of {world} processes for {nodes.count} hosts, needed as many on each; give a "
            f"plan of {world + -world % nodes.count}, or another number of hosts"
        )
    return world // nodes.count
