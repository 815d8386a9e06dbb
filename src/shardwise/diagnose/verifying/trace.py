"""`Trace`: what all ranks of a recorded run left on disk, put together again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.plan.plan import AXES


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """One rank's records; tensors are read when they are asked for."""

    rank: int
    record: dict[str, Any]
    path: Path

    def index(self, axis: str) -> int:
        """Its coordinate on an axis."""
        return int(self.record["index"][axis])

    @property
    def data_index(self) -> int:
        """Which share of the samples it has."""
        return self.index("dp_replicate") * int(self.record["axes"]["dp_shard"]) + self.index("dp_shard")

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Numbers of each step: loss, weight, grad_norm, lr, rows, sizes, draws, modules."""
        return list(self.record["steps"])

    @property
    def tensors(self) -> dict[str, dict[str, Any]]:
        """Index of its tensors by `kind/step/name`."""
        return dict(self.record["tensors"])

    def tensor(self, key: str) -> torch.Tensor:
        """A tensor that this rank owns."""
        entry = self.record["tensors"][key]
        dtype = getattr(torch, entry["dtype"])
        count = int(np.prod(entry["shape"], dtype=np.int64)) * dtype.itemsize
        data = np.fromfile(self.path.with_suffix(".bin"), dtype=np.uint8, count=count, offset=entry["at"])
        return torch.from_numpy(data).view(dtype).view(entry["shape"])


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A recorded run."""

    ranks: Sequence[RankTrace]
    rows_tell: bool = True
    """Whether what stands in a row says which sample it is: not in a batch that cannot be cut by its rows."""

    @property
    def first(self) -> RankTrace:
        """Rank 0."""
        return self.ranks[0]

    @property
    def num_steps(self) -> int:
        """Steps that every rank recorded."""
        return min(len(rank.steps) for rank in self.ranks)

    def size(self, axis: str) -> int:
        """Ranks along an axis."""
        return int(self.first.record["axes"][axis])

    @cached_property
    def owners(self) -> dict[str, list[RankTrace]]:
        """Tensor -> the ranks that hold the whole of it on disk: one, or one per stage that has a copy."""
        found: dict[str, list[RankTrace]] = {}
        for rank in self.ranks:
            for key, entry in rank.tensors.items():
                if "at" in entry:
                    found.setdefault(key, []).append(rank)
        return found

    def names(self, kind: str, step: int) -> list[str]:
        """Names of the tensors of a kind (`param`, `grad`, `buffer`, `optim`) after a step."""
        head = f"{kind}/{step}/"
        return [key.removeprefix(head) for key in self.owners if key.startswith(head)]

    def tensor(self, key: str) -> torch.Tensor:
        """A tensor, from the first rank that owns it."""
        return self.owners[key][0].tensor(key)

    def copies_that_differ(self, tolerance: float) -> Iterator[tuple[str, float, list[int]]]:
        """(tensor, relative difference, ranks) where a rank's copy is not the owner's; bit-equal ones are passed."""
        for key, owners in self.owners.items():
            if key.startswith("out/"):
                continue
            truth = owners[0].tensors[key]
            ranks, worst = [], 0.0
            for rank in self.ranks:
                entry = rank.tensors.get(key)
                if entry is None or entry["digest"] == truth["digest"]:
                    continue
                scale = max(abs(truth["sums"][0]), 1e-300)
                off = max(abs(a - b) for a, b in zip(entry["sums"], truth["sums"], strict=True)) / scale
                if not off <= tolerance:
                    ranks.append(rank.rank)
                    worst = max(worst, off)
            if ranks:
                yield key, worst, ranks

    def rows(self, step: int) -> list[list[str]]:
        """Names of the rows of each data rank in a step (from 1)."""
        return [list(numbers["rows"]) if self.rows_tell else [] for numbers in self._by_data_rank(step)]

    def forms(self, step: int) -> dict[str, list[str]]:
        """Name of a row of a step -> its forms, see `row_forms`."""
        numbers = self._by_data_rank(step)
        return {name: forms for each in numbers for name, forms in zip(each["rows"], each["forms"], strict=True)}

    def _by_data_rank(self, step: int) -> list[dict[str, Any]]:
        seen: dict[int, dict[str, Any]] = {}
        for rank in self.ranks:
            seen.setdefault(rank.data_index, rank.steps[step - 1])
        return [seen[index] for index in sorted(seen)]

    def prints(self, name: str, step: int) -> dict[tuple[int, ...], torch.Tensor]:
        """Fingerprints of a module by rank: coordinates along `AXES` -> (rows, 4)."""
        key = f"out/{step}/{name}"
        return {
            tuple(rank.index(axis) for axis in AXES): rank.tensor(key) for rank in self.ranks if key in rank.tensors
        }


def read_trace(directory: Path, world: int) -> Trace | None:
    """What a run left; None where a rank recorded no step."""
    ranks = []
    for number in range(world):
        path = directory / f"rank{number}.json"
        if not path.exists():
            return None
        record = json.loads(path.read_text(encoding="utf-8"))
        if not record["steps"]:
            return None
        ranks.append(RankTrace(rank=number, record=record, path=path))
    return Trace(ranks=tuple(ranks))
