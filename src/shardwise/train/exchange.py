"""What ranks tell each other when they compare: rows of numbers, digests of what is too long, ranks for a message."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.findings import shown
from shardwise.parallel.mesh import Mesh

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""What the text of an object without one of its own says of its place in memory."""


def gathered(own: Sequence[tuple[int, int, int]], mesh: Mesh) -> list[list[list[int]]]:
    """The rows of every rank, by rank; every rank has as many."""
    mine = torch.tensor(own, dtype=torch.int64, device=mesh.device)
    table = [torch.empty_like(mine) for _ in range(mesh.world)]
    dist.all_gather(table, mine)
    return [rows.tolist() for rows in table]


def digest(words: Iterable[Any]) -> int:
    """56 bits that are equal where the words are, on every host; where an object lies in memory does not count."""
    text = _ADDRESS.sub("", repr(list(words)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def by_value(told: Mapping[int, str]) -> list[tuple[str, list[int]]]:
    """The values with the ranks that have them, the commonest first.

    >>> by_value({0: "a", 1: "b", 2: "b"})
    [('b', [1, 2]), ('a', [0])]
    """
    holders: dict[str, list[int]] = defaultdict(list)
    for rank, value in told.items():
        holders[value].append(rank)
    return sorted(holders.items(), key=lambda item: -len(item[1]))


def listed(ranks: Sequence[int]) -> str:
    """Ranks for a message.

    >>> listed([0, 2])
    '0, 2'
    """
    return shown(ranks, 8)
