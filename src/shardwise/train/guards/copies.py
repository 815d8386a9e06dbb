"""`Copies`: of a tensor that ranks should hold alike and do not, which copies are right, and what is said of it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from shardwise.train.exchange import listed

Ends = tuple[int, int]
"""Least and greatest rank of those that hold the same: with the axes' sizes they tell the set."""


class Copies(NamedTuple):
    """A tensor that its holders do not hold alike.

    The ranks of one tp index are a *column*: replicas of the data axes, which get the same summed gradients. So
    a wrong value makes the gradients of its column other ones, alike on all of the column: only the column where
    the fault is differs within. Where `tp` replicates a tensor, and each rank makes its gradient for itself, the
    other columns then differ from that one, in tensors that have no fault.
    """

    ends: Ends
    name: str
    sums: Mapping[int, int | None]
    """Rank -> checksum; None: it has no such tensor."""

    def _columns(self, tp: int) -> dict[int, dict[int, int | None]]:
        columns: dict[int, dict[int, int | None]] = defaultdict(dict)
        for rank, found in self.sums.items():
            columns[rank % tp][rank] = found  # tp is the innermost axis
        return columns

    def unlike(self, tp: int) -> set[int]:
        """The columns within which it differs."""
        return {column for column, sums in self._columns(tp).items() if len(set(sums.values())) > 1}

    def right(self, tp: int, suspects: Collection[int]) -> int | None:
        """What more than half hold, else what the columns say; None: nobody knows.

        Columns in which nothing differs are right, if they agree. Where there is a fault in each column, all have been
        trained with one: any will do, and the first is taken, by what all of it hold, else by what most of it do.

        Args:
            tp: size of the axis.
            suspects: columns within which this or another tensor differs.

        >>> Copies((0, 5), "bias", {0: 7, 1: 8, 2: 7, 3: 8, 4: 7, 5: 9}).right(2, {1})
        7
        >>> Copies((0, 3), "bias", {0: 7, 1: 8, 2: 9, 3: 8}).right(2, {0, 1})
        8
        >>> Copies((0, 1), "bias", {0: 7, 1: 8}).right(2, set()) is None
        True
        """
        if None in self.sums.values():
            return None
        if (found := _majority(self.sums)) is not None or not suspects:
            return found
        columns = self._columns(tp)
        if others := {found for column, sums in columns.items() if column not in suspects for found in sums.values()}:
            return others.pop() if len(others) == 1 else None
        whole = [columns[column] for column in sorted(columns.keys() - self.unlike(tp))]
        most = [_majority(sums) for sums in (*whole, *columns.values())]
        return next((found for found in most if found is not None), None)

    def faulty(self, tp: int, right: int | None) -> set[int]:
        """The ranks that have neither what is right nor what most of their column have; empty: it differs within none.

        >>> Copies((0, 5), "bias", {0: 7, 1: 8, 2: 7, 3: 8, 4: 7, 5: 9}).faulty(2, 7)
        {5}
        """
        columns = [sums for column, sums in self._columns(tp).items() if column in self.unlike(tp)]
        return {rank for sums in columns for rank, found in sums.items() if found not in (right, _majority(sums))}


def _majority(sums: Mapping[int, int | None]) -> int | None:
    (common, count), *_ = Counter(sums.values()).most_common(1)
    return common if count * 2 > len(sums) else None


def told(step: int, different: Sequence[Copies]) -> str:
    """Who differs: of the first tensor, and those that the same ranks hold."""
    ends, _, sums = different[0]
    names = [copies.name for copies in different if copies.ends == ends]
    found, what = _majority(sums), "no such tensor" if None in sums.values() else "other bits"
    # without a majority the least rank is as good a suspect as any: all are named
    wrong = sorted(rank for rank, own in sums.items() if found is None or own != found)
    return (
        f"step {step}: {', '.join(names[:3])} ({len(names)} tensors) must be equal on ranks {listed(sorted(sums))}: "
        f"found {what} on rank {listed(wrong)}"
    )


def alike(sums: Mapping[int, int | None]) -> str:
    """Which ranks agree with one another, where there is no majority; empty: none do.

    >>> alike({0: 7, 1: 8, 2: 7, 3: 9})
    ' (alike: 0, 2)'
    """
    holders: dict[int | None, list[int]] = defaultdict(list)
    for rank, found in sorted(sums.items()):
        holders[found].append(rank)
    several = [listed(ranks) for ranks in holders.values() if len(ranks) > 1]
    return f" (alike: {'; '.join(several)})" if several else ""
