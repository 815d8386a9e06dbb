"""`Issued`: the collectives that ranks called, by torch's flight recorder, compared within each group.

Ranks that call different collectives are not always told. Where the bytes of both fit, gloo adds up what arrives: an
integer's to a float's, or those of another layer. The recorder keeps the last calls of a process with their number,
sizes and types (2,000 of them, `TORCH_FR_BUFFER_SIZE`), whether they are looked at or not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardwise.errors import ReplicaError
from shardwise.parallel.mesh import Mesh
from shardwise.train.exchange import by_value, digest, gathered, listed
from shardwise.train.torch_private import group_names, recorded_collectives

EQUAL = ("all_reduce", "allreduce", "broadcast", "_base", "coalesced")
"""Parts of the names of collectives in which all ranks give tensors of one size; the others may be uneven."""
UNEVEN = ("all_to_all", "alltoall")
_NONE = (-1, -1, -1)
"""A row of nothing."""


class Calls(NamedTuple):
    """The collectives of one group that this process has called since the last look."""

    first: int
    """Number of the first one, counted by the group from 1."""
    texts: list[str]

    @property
    def last(self) -> int:
        """Number of the last one."""
        return self.first + len(self.texts) - 1

    def between(self, first: int, last: int) -> list[str]:
        """Those with these numbers."""
        return self.texts[max(0, first - self.first) : max(0, last + 1 - self.first)]


class Issued:
    """What this process called; made once per run, on every rank."""

    def __init__(self, mesh: Mesh) -> None:
        """Nothing was compared yet."""
        self._mesh = mesh
        self._compared: dict[str, int] = {}
        """Group -> number of the last collective that was compared."""

    def check(self, step: int) -> None:
        """Compare what the ranks of each group have called since the last check. Every rank calls it.

        Cost: 40 us per collective since then, at most for as many as the recorder holds; three small collectives.

        Raises:
            ReplicaError: on all ranks: names the first one that differs, and who called what.
        """
        mesh, members = self._mesh, group_names()
        found = {name: calls for name, calls in self._new().items() if name in members}
        most = int(mesh.all_reduce_max(torch.tensor([len(found)], dtype=torch.int64, device=mesh.device)))
        if most == 0:
            return
        ranges: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for group, first, last in self._tell([(digest([n]), c.first, c.last) for n, c in found.items()], most):
            ranges[group].append((first, last))
        common: dict[str, list[str]] = {}
        for name, calls in found.items():
            seen = ranges[digest([name])]
            if len(seen) == len(members[name]):  # else some of its ranks have called nothing yet
                first, last = max(first for first, _ in seen), min(last for _, last in seen)
                common[name] = [f"ranks {listed(members[name])}", *calls.between(first, last)]
                self._compared[name] = last
        digests: dict[int, set[int]] = defaultdict(set)
        for group, found_there, _ in self._tell([(digest([n]), digest(texts), 0) for n, texts in common.items()], most):
            digests[group].add(found_there)
        if any(len(each) > 1 for each in digests.values()):
            raise ReplicaError(self._difference(step, common))

    def _new(self) -> dict[str, Calls]:
        """By group, what the recorder holds of it after what was compared."""
        found: dict[str, Calls] = {}
        for entry in recorded_collectives():
            name, number = entry["process_group"][0], entry["collective_seq_id"]
            calls = found.get(name)
            if calls is not None and number == calls.last:  # several in one, as NCCL counts them
                calls.texts[-1] += f" and {_text(entry)}"
            elif calls is not None and number == calls.last + 1:
                calls.texts.append(_text(entry))
            else:  # also: a new group of a name that another had
                found[name] = Calls(number, [_text(entry)])
        last = self._compared
        since = {name: max(calls.first, last.get(name, 0) + 1) for name, calls in found.items()}
        news = {name: Calls(since[name], calls.between(since[name], calls.last)) for name, calls in found.items()}
        return {name: calls for name, calls in news.items() if calls.texts}

    def _tell(self, rows: list[tuple[int, int, int]], most: int) -> Iterator[tuple[int, int, int]]:
        """The rows of all ranks; each has at most that many."""
        rows = rows + [_NONE] * (most - len(rows))
        for theirs in gathered(rows, self._mesh):
            yield from (row for a, b, c in theirs if (row := (a, b, c)) != _NONE)

    def _difference(self, step: int, common: Mapping[str, list[str]]) -> str:
        """Which call of which group differs, and who has what: the same text on every rank."""
        everyones: list[Any] = [None] * self._mesh.world
        dist.all_gather_object(everyones, {name: (self._compared[name], texts) for name, texts in common.items()})
        for name in sorted({name for theirs in everyones for name in theirs}):
            told = {rank: theirs[name] for rank, theirs in enumerate(everyones) if name in theirs}
            last, texts = next(iter(told.values()))
            for place, calls in enumerate(zip(*(theirs for _, theirs in told.values()), strict=True)):
                found = by_value(dict(zip(told, calls, strict=True)))
                if len(found) > 1:
                    number = last + 1 - len(texts) + place
                    what = f"collective {number} of the group of {texts[0]}" if place else "who is in a process group"
                    values = "; ".join(f"{value} on rank {listed(ranks)}" for value, ranks in found)
                    return (
                        f"step {step}: {what} must be the same on each of its ranks: found {values}; what these gave "
                        "is no result; needed: the same collectives in the same order; look for a branch, a size or a "
                        "type that depends on the rank"
                    )
        raise AssertionError("digests differ, and nothing else does")


def _text(entry: Mapping[str, Any]) -> str:
    """What must be alike of a call.

    >>> _text({"profiling_name": "gloo:all_reduce", "input_sizes": [[2, 3]], "input_dtypes": ["Float"]})
    'all_reduce of (2, 3) float'
    """
    kind = entry["profiling_name"].partition(":")[2].lower()
    words = [kind]
    if any(part in kind for part in EQUAL) and not any(part in kind for part in UNEVEN):
        words += ["of", ", ".join(f"({', '.join(map(str, size))})" for size in entry["input_sizes"])]
    types = entry["output_dtypes"] if kind == "scatter" else entry["input_dtypes"]  # one rank alone gives what is dealt
    return " ".join([*words, ", ".join(dict.fromkeys(types)).lower()]).strip()
