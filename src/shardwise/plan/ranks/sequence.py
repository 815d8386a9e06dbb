"""Which tokens of a sequence each rank of the `cp` axis holds. Plain numbers: needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from shardwise.plan.plan import BalanceKind

Range = tuple[int, int]
"""Tokens from the first number up to, not including, the second."""


@dataclass(frozen=True)
class Layout:
    """The division of one sequence over the ranks of an axis; each rank's ranges are in order.

    >>> divide(8, 2, "zigzag").ranges
    (((0, 2), (6, 8)), ((2, 4), (4, 6)))
    """

    length: int
    ranges: tuple[tuple[Range, ...], ...]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Tokens on each rank."""
        return tuple(sum(end - start for start, end in ranges) for ranges in self.ranges)

    @cached_property
    def order(self) -> tuple[tuple[int, int, int], ...]:
        """The sequence from its beginning: (rank, first, end) of each range, counted within that rank's tokens."""
        found = []
        for rank, ranges in enumerate(self.ranges):
            done = 0
            for start, end in ranges:
                found.append((start, rank, done, done + end - start))
                done += end - start
        return tuple((rank, first, end) for _, rank, first, end in sorted(found))


@lru_cache(maxsize=256)
def divide(length: int, ranks: int, balance: BalanceKind) -> Layout:
    """The layout of a sequence of `length` tokens.

    `zigzag`: `2 x ranks` pieces, as even as they can be, the longer ones first; rank r holds pieces r and
    `2 x ranks - 1 - r`. Under a causal mask every rank then has the same work. `contiguous`: one piece per rank.

    >>> divide(5, 2, "contiguous").ranges
    (((0, 3),), ((3, 5),))
    """
    pieces = num_pieces(ranks, balance)
    share, extra = divmod(length, pieces)
    ends = [0]
    for i in range(pieces):
        ends.append(ends[-1] + share + (i < extra))
    ranges = list(zip(ends, ends[1:], strict=False))
    if balance == "contiguous":
        return Layout(length, tuple((own,) for own in ranges))
    return Layout(length, tuple((ranges[r], ranges[pieces - 1 - r]) for r in range(ranks)))


def num_pieces(ranks: int, balance: BalanceKind) -> int:
    """Into how many pieces a sequence is cut: the least length that can be divided."""
    return ranks if balance == "contiguous" else 2 * ranks
