"""Matrices that several ranks hold parts of are shared out: each is brought together on one rank, and given back.

A batch has at most as many matrices as ranks share them. Along each axis that splits matrices the ranks exchange
parts, until each rank has one matrix in full; what is made of it goes back the same way. Ranks that hold the same parts
work on different batches, and broadcast what came of theirs. So a rank never holds more than one matrix, in parts of
several or whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.parallel.torch_private import strided_shard_factor
from shardwise.plan.updating import part_sizes

Shape = tuple[int, ...]


class Sharing(NamedTuple):
    """The ranks that share a matrix."""

    split: tuple[dist.ProcessGroup, ...]
    """Along each axis that splits it, in the order in which its parts are joined."""
    alike: dist.ProcessGroup | None
    """Those that hold what this rank holds: the most along one axis; None: there are none."""

    @property
    def team(self) -> int:
        """Ranks that together hold it once, each of which takes one of a batch."""
        return prod(map(dist.get_world_size, self.split))

    @property
    def num_teams(self) -> int:
        """How many of these there are."""
        return 1 if self.alike is None else dist.get_world_size(self.alike)

    @property
    def here(self) -> int:
        """Which of them is this rank's."""
        return 0 if self.alike is None else dist.get_rank(self.alike)


class Lie(NamedTuple):
    """How a matrix lies on this rank."""

    shapes: tuple[Shape, ...]
    """Before its parts are joined along each axis of `Sharing.split`, and after the last."""
    dims: tuple[int, ...]
    """That each of these axes splits."""


def sharing_of(matrix: Tensor, replicas: dist.ProcessGroup | None = None) -> Sharing:
    """Who shares a matrix; `replicas`: the ranks that hold a plain tensor alike."""
    if not isinstance(matrix, DTensor):
        return Sharing((), replicas if replicas is not None and dist.get_world_size(replicas) > 1 else None)
    mesh = matrix.device_mesh
    alike = [axis for axis, place in enumerate(matrix.placements) if place.is_replicate() and mesh.size(axis) > 1]
    most = max(alike, key=mesh.size, default=None)
    split = tuple(mesh.get_group(axis) for axis, _ in _joined(matrix))
    return Sharing(split, None if most is None else mesh.get_group(most))


def lie_of(matrix: Tensor) -> Lie:
    """How a matrix lies along the axes of its `Sharing`."""
    joined, shapes = _joined(matrix), [tuple(matrix.shape)]
    if isinstance(matrix, DTensor):
        for axis, dim in reversed(joined):
            shape = list(shapes[-1])
            shape[dim] = part_sizes(shape[dim], matrix.device_mesh.size(axis))[matrix.device_mesh.get_local_rank(axis)]
            shapes.append(tuple(shape))
    return Lie(tuple(reversed(shapes)), tuple(dim for _, dim in joined))


def bring_together(sharing: Sharing, parts: list[Tensor], lies: Sequence[Lie]) -> list[Tensor]:
    """The whole matrices of a team's batch that are this rank's: one, or none at the end of the last batch.

    Args:
        sharing: who shares each of them; all ranks of the team call it.
        parts: this rank's part of each, one at most for each rank of the team; it is emptied as they are sent.
        lies: of each.

    Cost: along each axis that splits matrices an all-to-all of the bytes of one matrix.
    """
    for level, group in enumerate(sharing.split):
        if not lies:
            return []
        shares = _shares(sharing, level)
        mine = lies[shares[dist.get_rank(group)]]
        given = [sum(map(Tensor.numel, parts[share])) for share in shares]
        sent = torch.cat([part.reshape(-1) for part in parts])
        parts.clear()
        shapes = [[_part(lie, level, len(shares), peer) for lie in mine] for peer in range(len(shares))]
        pieces = _exchange(sent, given, shapes, group)
        del sent
        parts += [torch.cat([of[i] for of in pieces], dim=lie.dims[level]) for i, lie in enumerate(mine)]
        lies = mine
    return parts


def give_back(sharing: Sharing, wholes: list[Tensor], lies: Sequence[Lie], like: Tensor) -> list[Tensor]:
    """This rank's part of every matrix of a team's batch, of what each rank has made of its own.

    Args:
        sharing: as for `bring_together`, whose inverse it is; it costs the same.
        wholes: this rank's; it is emptied as they are sent.
        lies: of each matrix of the batch.
        like: a tensor of their type, on their device.
    """
    batches = [lies]
    for level, group in enumerate(sharing.split):
        batches.append(batches[-1][_shares(sharing, level)[dist.get_rank(group)]])
    for level, group in reversed([*enumerate(sharing.split)]):
        if not batches[level]:
            continue
        shares, dims = _shares(sharing, level), [lie.dims[level] for lie in batches[level + 1]]
        count = len(shares)
        cut = [torch.split(whole, part_sizes(whole.size(d), count), d) for whole, d in zip(wholes, dims, strict=True)]
        wholes.clear()
        given = [sum(pieces[peer].numel() for pieces in cut) for peer in range(count)]
        flat = [pieces[peer].reshape(-1) for peer in range(count) for pieces in cut]
        sent = torch.cat(flat) if flat else like.new_empty(0)
        del cut, flat
        shapes = [[lie.shapes[level] for lie in batches[level][share]] for share in shares]
        wholes += [part for of in _exchange(sent, given, shapes, group) for part in of]
        del sent
    return wholes


def from_team(sharing: Sharing, team: int, own: list[Tensor], lies: Sequence[Lie], like: Tensor) -> list[Tensor]:
    """This rank's part of every matrix of one team's batch, on the ranks of all teams.

    Args:
        sharing: who shares each of them; all ranks that are alike call it.
        team: whose batch.
        own: if it is this rank's team, the parts.
        lies: of each matrix.
        like: a tensor of their type, on their device.

    Cost: a broadcast of them.
    """
    if sharing.alike is None:
        return own
    shapes = [lie.shapes[0] for lie in lies]
    flat = torch.cat([part.reshape(-1) for part in own]) if own else like.new_empty(sum(map(prod, shapes)))
    own.clear()
    if flat.numel():
        dist.broadcast(flat, group=sharing.alike, group_src=team)
    return _views(flat, shapes)


def _joined(matrix: Tensor) -> list[tuple[int, int]]:
    """Axes of its mesh that split a matrix, and the dims that they split, in the order in which parts are joined.

    Of two that split one dim, what `fully_shard` split after tensor parallelism (a strided shard) is joined before it,
    as the axes lie in the mesh; plain shards from the last axis to the first.
    """
    if not isinstance(matrix, DTensor):
        return []
    placed = [(axis, place) for axis, place in enumerate(matrix.placements) if matrix.device_mesh.size(axis) > 1]
    split = [(axis, _dim(place)) for axis, place in placed if not place.is_replicate()]
    strided = [axis for axis, place in placed if strided_shard_factor(place) is not None]
    if all(a in strided or dim != other for a, dim in split for b, other in split if a < b):
        return split
    plain = [each for each in split if each[0] not in strided]
    return [*(each for each in split if each[0] in strided), *reversed(plain)]


def _dim(place: object) -> int:
    """Of a shard: torch's strided one is no `Shard`."""
    dim = getattr(place, "dim", None)
    assert isinstance(dim, int), f"a parameter placed as {place}"
    return dim


def _shares(sharing: Sharing, level: int) -> list[slice]:
    """Which matrices of a batch go to each rank along an axis, and from there on along those after it."""
    each = prod(map(dist.get_world_size, sharing.split[level + 1 :]))
    return [slice(i * each, (i + 1) * each) for i in range(dist.get_world_size(sharing.split[level]))]


def _part(lie: Lie, level: int, count: int, peer: int) -> Shape:
    """Shape of a peer's part of a matrix along an axis."""
    shape, dim = list(lie.shapes[level + 1]), lie.dims[level]
    shape[dim] = part_sizes(shape[dim], count)[peer]
    return tuple(shape)


def _exchange(
    sent: Tensor, given: list[int], shapes: list[list[Shape]], group: dist.ProcessGroup
) -> list[list[Tensor]]:
    """Give each rank of a group its run of a flat tensor; of what each gives, the tensors."""
    taken = [sum(map(prod, of)) for of in shapes]
    received = sent.new_empty(sum(taken))
    dist.all_to_all_single(received, sent, taken, given, group)
    return [_views(run, of) for run, of in zip(torch.split(received, taken), shapes, strict=True)]


def _views(run: Tensor, shapes: list[Shape]) -> list[Tensor]:
    """Tensors that follow one another in a flat one."""
    return [piece.view(shape) for piece, shape in zip(torch.split(run, [*map(prod, shapes)]), shapes, strict=True)]
