"""One process that is rank r of N: what a plan does to a model at any scale, without the machines."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from shardwise.errors import UsageError
from shardwise.testing.torch_private import forget_meshes, join_fake_group

MAX_RANKS = 16_384
"""The largest world that is tested; nothing else ends there."""


@contextmanager
def fake_world(num_ranks: int, rank: int = 0) -> Iterator[None]:
    """Pretend that this process is rank `rank` of `num_ranks`; `open_mesh` and `apply` work inside.

    Collectives return at once and communicate nothing: shapes, placements, names and the order of calls are those of
    the real world, values of anything that was received are not. Launcher's variables are ignored inside. Worlds may
    follow one another in a process, as different ranks too; a DTensor, mesh or placed module of an earlier one must
    not be used in a later one.

    Args:
        num_ranks: 1 to 16,384.
        rank: which of them this process is.

    Raises:
        UsageError: a rank outside of the world, or this process is in a process group already.

    Cost: opening a mesh takes 2 s for 16,384 ranks, 0.1 s for 512. `apply` takes as long as on a real rank, and
    grows with a sharded axis (`fsdp16384`: half a minute; `dp128 fsdp128`: less than a second), as torch cuts a
    parameter into a list of all shards. Memory is that of one real rank: its shard and one full parameter.

    >>> from shardwise import Plan, open_mesh
    >>> plan = Plan.parse("pp4 dp8 tp2 / mb4")
    >>> with fake_world(plan.world, rank=5), open_mesh(plan, device="cpu") as mesh:
    ...     mesh.index("pp"), mesh.index("dp_replicate"), mesh.index("tp")
    (0, 2, 1)
    """
    if not (1 <= num_ranks <= MAX_RANKS and 0 <= rank < num_ranks):
        raise UsageError(
            f"fake_world: found rank {rank} of {num_ranks}; needed 1 to {MAX_RANKS} ranks and 0 <= rank < that; "
            "give the plan's own size, as fake_world(plan.world, rank=0)"
        )
    if dist.is_initialized():
        raise UsageError(
            f"fake_world({num_ranks}): this process is rank {dist.get_rank()} of a {dist.get_backend()} process group "
            f"of {dist.get_world_size()} already, and a process has one default group; leave it first "
            "(torch.distributed.destroy_process_group, or the end of the other `with`)"
        )
    hook = sys.excepthook
    forget_meshes()
    join_fake_group(num_ranks, rank)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        forget_meshes()
        sys.excepthook = hook  # torch's writes "[rank5]:" before each line, for ever
