"""Which elements of a whole tensor a rank's part of it are, told by its shape and the axes that split it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwise.errors import ModelError
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.randomness.counter import Elements, strides
from shardwise.parallel.randomness.sites import Site
from shardwise.plan.plan import Plan
from shardwise.plan.ranks.sequence import divide, num_pieces


@dataclass(frozen=True, kw_only=True)
class Shares:
    """This rank's share of the dims that `tp` and `cp` split. `tp` splits evenly, `cp` the sequence only."""

    tp: int
    tp_rank: int
    cp: int
    cp_rank: int
    plan: Plan

    @classmethod
    def of(cls, plan: Plan, mesh: Mesh) -> Shares:
        """Read off the mesh."""
        return cls(
            tp=mesh.size("tp"), tp_rank=mesh.index("tp"), cp=mesh.size("cp"), cp_rank=mesh.index("cp"), plan=plan
        )

    @property
    def whole(self) -> bool:
        """Tensors are split by rows alone."""
        return self.tp == self.cp == 1

    def parts(self, size: int, is_sequence: bool, device: torch.device) -> dict[str, torch.Tensor]:
        """Axes -> the places of a dim of `size` that are here, int64 in the local order.

        Args:
            size: of the whole dim.
            is_sequence: whether `cp` may divide it; then `tp` divides what `cp` leaves, if anything.
            device: of the result.
        """
        places = torch.arange(size, device=device)
        found, own, axes = {"": places}, places, ""
        if is_sequence and self.cp > 1 and size >= num_pieces(self.cp, self.plan.context.balance):
            ranges = divide(size, self.cp, self.plan.context.balance).ranges[self.cp_rank]
            found["cp"] = own = torch.cat([places[start:end] for start, end in ranges])
            axes = "cp "
        if self.tp > 1 and len(own) % self.tp == 0:
            found[f"{axes}tp"] = own.chunk(self.tp)[self.tp_rank]
        return found


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of a micro-batch: their numbers in the data, and how many tokens the whole sequence has."""

    numbers: Sequence[int]
    tokens: int | None = None


def samples_of(counts: list[int], samples: Sequence[int]) -> list[int]:
    """How many numbers of rows each micro-batch has: its samples, of which each may be several rows (views).

    Args:
        counts: rows of each micro-batch; 0 for padding.
        samples: of each micro-batch of a loader, padding among them or left out; none: rows are what is numbered.

    Raises:
        ModelError: rows that are no multiple of the samples: which are missing, nobody knows.
    """
    own = list(samples) if len(samples) == len(counts) else [number for number in samples if number]
    if len(own) != len(counts):  # not a loader's, or cut again
        return counts
    for rows, number in zip(counts, own, strict=True):
        if number and rows % number:
            raise ModelError(
                f"found {rows} rows of {number} samples in a micro-batch of a model that draws random numbers, which "
                "are keyed by the sample of a row; needed as many rows of each: let collate keep a bad sample and give "
                "it no weight in the loss, leave it out of the data set, or use dropout 0"
            )
    return own


def elements_of(
    site: Site | None, local: tuple[int, ...], rows: Rows, shares: Shares | None, device: torch.device
) -> Elements:
    """Where the numbers of each element of a local tensor are: by its row and its places along the other dims.

    Each dim has a stride of its own, whatever the sizes of the others: where batches are padded to their longest row,
    a row's own tokens have the same numbers in any company.

    Args:
        site: the draw in one process; None: it is not known.
        local: shape on this rank.
        rows: of the micro-batch.
        shares: of the axes; None: this rank has the whole of every tensor of the step, and what is not clear about a
            site does not matter.
        device: of the result.

    Raises:
        ModelError: the shape is not what rows and axes make of the whole one; the text begins with what was found.
    """
    if site is None or (site.unclear and shares is None):
        return Elements.row_major(local, device)
    if site.unclear or len(site.shape) != len(local):
        why = site.unclear or f"its shape is {local} here and {site.shape} in one process"
        raise ModelError(f"found a tensor whose rows cannot be told: {why}; draw one whose first dim is the rows")
    whole, here = list(site.shape), list(local)
    count = len(rows.numbers)
    if site.row_dim is not None:
        whole[site.row_dim], rest = site.per_row, here[site.row_dim] % count if count else here[site.row_dim]
        here[site.row_dim] = here[site.row_dim] // count if count else site.per_row  # each of no rows
        if rest:
            raise ModelError(
                f"found {local[site.row_dim]} elements along dim {site.row_dim} for {count} rows, needed a multiple; "
                "draw a tensor whose first dim is the rows"
            )
    if shares is None or shares.whole:  # a later batch may have other sizes than the one that was traced
        along = [torch.arange(size, device=device) for size in here]
    else:
        along = _places(whole, here, shares, rows.tokens if site.row_dim is not None else None, device)
    *others, of_rows = strides(len(along) + 1)
    along = [places * stride for places, stride in zip(along, reversed(others), strict=True)]
    if site.row_dim is not None:
        numbers = torch.tensor(list(rows.numbers), dtype=torch.int64, device=device) * of_rows
        along[site.row_dim] = (numbers[:, None] + along[site.row_dim]).flatten()
    return Elements(local, tuple(along))


def _places(
    whole: list[int], here: list[int], shares: Shares, tokens: int | None, device: torch.device
) -> list[torch.Tensor]:
    """For each dim, which of its places are here; each axis splits at most one dim."""
    along: list[torch.Tensor] = []
    split_by: list[str] = []
    # several dims of the sequence's length: which of them `cp` divides, and which `tp`, cannot be told
    several = shares.cp > 1 and shares.tp > 1 and sum(size == tokens for size in whole) > 1
    for dim, (size, own) in enumerate(zip(whole, here, strict=True)):
        parts = shares.parts(size, size == tokens, device)
        fits = [axes for axes, places in parts.items() if len(places) == own]
        if len(fits) != 1 or set(fits[0].split()) & set(split_by) or (several and size == tokens and own != size):
            axes = " ".join(f"{axis}{n}" for axis, n in (("cp", shares.cp), ("tp", shares.tp)) if n > 1)
            raise ModelError(
                f"found {tuple(here)} for each row, of {tuple(whole)} in one process, needed a share that {axes} "
                f"explains in one way (dim {dim} is not one); draw where the tensor is whole"
            )
        split_by += fits[0].split()
        along.append(parts[fits[0]])
    return along
