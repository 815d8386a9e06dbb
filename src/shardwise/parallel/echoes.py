"""What a rank that lost a peer says of the cause: what the rank that failed, or left, first has put into the store."""

from __future__ import annotations

from contextlib import suppress

import torch.distributed as dist

from shardwise.launch.echo import is_echo
from shardwise.parallel.mesh_torch_private import default_store

_KEY = "shardwise/cause"
_LEFT = "shardwise/left"
_LONGEST = 500


def forget_causes() -> None:
    """Begin anew: an error of ranks that met here before, and that somebody caught, is none of these ranks'."""
    if dist.get_backend() != "fake":
        with suppress(Exception):  # a store that cannot delete has not been used before
            default_store().delete_key(_KEY)
        with suppress(Exception):
            default_store().delete_key(_LEFT)


def share_leave(rank: int, world: int) -> None:
    """Say where other ranks find it that this one closes its connections without an error; the first one is kept."""
    if world == 1:
        return
    with suppress(Exception):  # as below
        if dist.get_backend() != "fake" and not (store := default_store()).check([_LEFT]):
            store.set(_LEFT, str(rank))


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
        if not cause and store.check([_LEFT]):
            cause = (
                f"rank {store.get(_LEFT).decode()} had come to the end of its open_mesh block, without an error; every "
                "rank must make as many steps: let all leave a loop together, and give each as many batches"
            )
        error.add_note(f"This rank lost another one. What ended that: {cause or 'its own message says it, look there'}")
