"""What a rank that lost a peer says of the cause: the error that the rank which failed first has left in the store."""

from __future__ import annotations

from contextlib import suppress

import torch.distributed as dist

from shardwise.launch.echo import is_echo
from shardwise.parallel.mesh_torch_private import default_store

_KEY = "shardwise/cause"
_LONGEST = 500


def forget_causes() -> None:
    """Begin anew: an error of ranks that met here before, and that somebody caught, is none of these ranks'."""
    if dist.get_backend() != "fake":
        with suppress(Exception):  # a store that cannot delete has not been used before
            default_store().delete_key(_KEY)


def share_cause(error: BaseException, rank: int, world: int) -> None:
    """Leave an error where other ranks find it; to one that is their echo, add a note of what they have left."""
    if world == 1 or not isinstance(error, Exception):
        return
    with suppress(Exception):  # who keeps the store may be gone, or the script has left the group
        if dist.get_backend() == "fake":
            return
        store = default_store()
        if not is_echo(str(error)):
            text = next(iter(str(error).splitlines()), "")[:_LONGEST]
            store.set(_KEY, f"rank {rank}: {type(error).__name__}: {text}")
            return
        # left before that rank's connections were closed: there now, or never (it was killed)
        cause = store.get(_KEY).decode() if store.check([_KEY]) else ""
        error.add_note(f"This rank lost another one. What ended that: {cause or 'its own message says it, look there'}")
