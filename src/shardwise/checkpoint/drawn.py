"""The generators of a script in checkpoints: of Python, NumPy and torch, those that moved since the state was made.

They lie in the manifest's scalars: of each kind the states that differ, and which of them each rank had. A rank of
another number of ranks goes on with those of rank r modulo the number at the save.
"""

from __future__ import annotations

import zlib
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.agree import Peers
from shardwise.checkpoint.format import DamagedError
from shardwise.checkpoint.saveable import Drawing
from shardwise.parallel.randomness.generators import MOST_BYTES, restore

KEY = "generators"
MOST_RANKS = 512
"""With generators that differ: some 8 kB each. Of more ranks they are not stored."""

States = Mapping[str, bytes]


def moved(state: object) -> States:
    """Of the generators that this rank's script has drawn from their states."""
    return state.generators.moved() if isinstance(state, Drawing) else {}


def digests(states: States) -> dict[str, bytes]:
    """By which ranks find out whether they have the same."""
    return {kind: blake2b(state, digest_size=16).digest() for kind, state in states.items()}


def gathered(peers: Peers, mine: States, told: Sequence[Mapping[str, bytes]]) -> dict[str, Any]:
    """What a manifest holds of the generators of all ranks; every rank calls it.

    Args:
        peers: the ranks.
        mine: what `moved` gave.
        told: what `digests` gave on every rank.
    """
    if not any(told):
        return {}
    if any(each != told[0] for each in told) and len(told) > MOST_RANKS:
        kinds = sorted({kind for each in told for kind in each})
        peers.warn(
            f"found generators ({', '.join(kinds)}) that the script has drawn from, and that differ between ranks: of "
            f"more than {MOST_RANKS} ranks no checkpoint holds them, and after a load their draws begin anew; draw in "
            "the model's forward or in the data set, or seed a generator by the step"
        )
        return {}
    everyones = [mine] * len(told) if all(each == told[0] for each in told) else peers.gather(mine)
    kinds = sorted({kind for states in everyones for kind in states})
    found = {}
    for kind in kinds:
        different = dict.fromkeys(states[kind] for states in everyones if kind in states)
        places = {state: place for place, state in enumerate(different)}
        found[kind] = {
            "ranks": [places.get(states.get(kind, b""), -1) for states in everyones],
            "states": [b64encode(zlib.compress(state)).decode() for state in different],
        }
    return {KEY: found}


def stored(scalars: Mapping[str, Any], rank: int, where: Path) -> dict[str, bytes]:
    """The states that a rank goes on with, of a manifest's scalars.

    Raises:
        DamagedError: they are none; `where` begins the message.
    """
    found = {}
    try:
        for kind, held in scalars.get(KEY, {}).items():
            if (place := held["ranks"][rank % len(held["ranks"])]) >= 0:
                text = b64decode(held["states"][place], validate=True)
                found[str(kind)] = zlib.decompressobj().decompress(text, MOST_BYTES)
    except (AttributeError, LookupError, TypeError, ValueError, ZeroDivisionError, zlib.error) as error:
        raise DamagedError(f"{where}: scalars.{KEY}: {error}, needed states of generators; it is damaged") from error
    return found


def go_on(states: States, where: Path, device: torch.device) -> None:
    """Draw what would have been drawn next at the save.

    Raises:
        DamagedError: they are the states of no generators.
    """
    try:
        restore(states, device)
    except (ValueError, TypeError, RuntimeError) as error:
        raise DamagedError(f"{where}: scalars.{KEY}: {error}, needed states of generators; it is damaged") from error
