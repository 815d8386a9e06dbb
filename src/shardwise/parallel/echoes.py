"""What a rank that lost a peer says of the cause: the error that the rank which failed first has left in the store."""

from __future__ import annotations

import time
from contextlib import suppress

import torch.distributed as dist

from shardwise.launch.echo import is_echo
from shardwise.parallel.mesh_torch_private import Store, default_store

_KEY = "shardwise/cause"
_WAIT_S = 1.0
"""The other rank may be writing its message."""
_PAUSE_S = 0.02
_LONGEST = 500


def forget_causes() -> None:
    """Begin anew: an error of ranks that met here before, and that somebody caught, is none of these ranks'."""
    if dist.get_backend() != "fake":
        with suppress(Exception):  # a store that cannot delete has not been used before
            default_store().delete_key(_KEY)


def share_cause(error: BaseException, rank: int, world: int) -> None:
    """Leave an error where other ranks find it; to one that is their echo, add a note of what they have left."""
    if world == 1 or not isinstance(error, Exception) or dist.get_backend() == "fake":
        return
    with suppress(Exception):  # who keeps the store may be gone
        store = default_store()
        if not is_echo(str(error)):
            text = next(iter(str(error).splitlines()), "")[:_LONGEST]
            store.set(_KEY, f"rank {rank}: {type(error).__name__}: {text}")
            return
        cause = _found(store)
        error.add_note(f"This rank lost another one. What ended that: {cause or 'its own message says it, look there'}")


def _found(store: Store) -> str:
    """What another rank has left, within a moment; empty: nothing."""
    end = time.monotonic() + _WAIT_S
    while not store.check([_KEY]):
        if time.monotonic() > end:
            return ""
        time.sleep(_PAUSE_S)
    return store.get(_KEY).decode()
