"""Which elements of each tensor are on which rank, and which rank stores which of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.format import DTYPES, MAX_DIMS, Box, check_name
from shardwise.checkpoint.shardfile import Part
from shardwise.checkpoint.torch_private import indices_here, local_of
from shardwise.errors import CheckpointError


class Held(NamedTuple):
    """A box of a tensor that this rank holds, and where it lies in the local tensor."""

    part: Part
    local: Box

    def of(self, tensor: Tensor) -> Tensor:
        """The elements, as a view of the local tensor."""
        found = local_of(tensor)
        where = self.within(found)
        return found if where is None else found[where]

    def within(self, local: Tensor) -> tuple[slice, ...] | None:
        """Where the elements lie in the local tensor; None: they are all of it."""
        whole = self.local.sizes == tuple(local.shape)
        return None if whole else self.local.slices(_at_zero(self.local))


def held_by(tensors: Mapping[str, Tensor]) -> list[Held]:
    """The boxes that this rank holds of its tensors; empty shards have none.

    Raises:
        CheckpointError: a tensor on meta, a partial sum, or a name, type, layout or dims that cannot be stored.
    """
    found: list[Held] = []
    cuts: dict[Any, list[tuple[Box, Box]]] = {}  # tensors that are cut alike, as of equal layers, have the same boxes
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise CheckpointError(
                f"{name}: found the type {dtype}, which cannot be stored; needed one of {', '.join(DTYPES)}"
            )
        if tensor.is_meta:
            raise CheckpointError(
                f"{name}: found a tensor without values (device meta), needed its values; give it some before a "
                "save (module.to_empty, or a constructor that fills it), or keep it out (persistent=False)"
            )
        if tensor.layout is not torch.strided or tensor.is_conj():
            kind = "a conjugate's view" if tensor.is_conj() else f"the layout {tensor.layout}"
            raise CheckpointError(
                f"{name}: found {kind}, needed dense numbers; keep it as .to_dense() or .resolve_conj()"
            )
        shape = tuple(tensor.shape)
        if len(shape) > MAX_DIMS:
            raise CheckpointError(f"{name}: found {len(shape)} dims, needed at most {MAX_DIMS}; keep it in fewer")
        places = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else ()
        if (alike := (shape, local_of(tensor).shape, *places)) not in cuts:
            cuts[alike] = _boxes(name, tensor)
        found += [Held(Part(check_name(name, "store"), dtype, shape, box), local) for box, local in cuts[alike]]
    return found


def _boxes(name: str, tensor: Tensor) -> list[tuple[Box, Box]]:
    """(place in the whole tensor, place in the local one) of each rectangular part that is here."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        box = Box((0,) * len(shape), shape)
        return [(box, box)] if box.num_elements else []
    if any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError(f"{name}: found a partial sum ({tensor.placements}), needed shards or copies; reduce it")
    runs = [_runs(indices) for indices in indices_here(tensor)]
    sizes = tuple(sum(run[2] for run in dim) for dim in runs)
    local = tuple(local_of(tensor).shape)
    if sizes != local:
        raise CheckpointError(
            f"{name}: found a shard of shape {local}, needed {sizes}: what {tensor.placements} give of {shape}"
        )
    return [
        (
            Box(tuple(run[0] for run in chosen), tuple(run[2] for run in chosen)),
            Box(tuple(run[1] for run in chosen), tuple(run[2] for run in chosen)),
        )
        for chosen in product(*runs)
    ]


def _runs(indices: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first index, its place, how many) of each run of consecutive indices.

    >>> _runs([0, 1, 4, 5])
    [(0, 0, 2), (4, 2, 2)]
    """
    if isinstance(indices, range):
        return [(indices.start, 0, len(indices))] if len(indices) else []
    runs: list[tuple[int, int, int]] = []
    for place, index in enumerate(indices):
        if runs and runs[-1][0] + runs[-1][2] == index:
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((index, place, 1))
    return runs


def _at_zero(box: Box) -> Box:
    return Box((0,) * len(box.sizes), box.sizes)


def signature(tensors: Mapping[str, Tensor]) -> tuple[Any, ...]:
    """What decides `held_by`: equal as long as names, shapes, types and placements are."""
    return tuple(
        (name, t.dtype, t.shape, (t.placements, id(t.device_mesh)) if isinstance(t, DTensor) else None)
        for name, t in tensors.items()
    )


def owners(held: Sequence[Sequence[Part]]) -> list[set[int]]:
    """For each rank, the numbers of those of its parts that it stores: each part once, bytes spread evenly.

    Args:
        held: every rank's parts, by rank.

    Raises:
        CheckpointError: ranks differ on a tensor's shape or type, or hold boxes that overlap in part.

    >>> w = Part("w", "float32", (4,), Box((0,), (4,)))
    >>> owners([[w], [w]])
    [{0}, set()]
    """
    holders: dict[tuple[str, Box], list[tuple[int, int]]] = {}
    kinds: dict[str, tuple[int, Part]] = {}
    for rank, parts in enumerate(held):
        for i, part in enumerate(parts):
            first, known = kinds.setdefault(part.name, (rank, part))
            if (known.shape, known.dtype) != (part.shape, part.dtype):
                raise CheckpointError(
                    f"{part.name}: {part.shape} {part.dtype} on rank {rank}, {known.shape} {known.dtype} on rank "
                    f"{first}; a name must mean one tensor on all ranks"
                )
            holders.setdefault((part.name, part.box), []).append((rank, i))
    load, chosen = [0] * len(held), [set[int]() for _ in held]
    for (name, box), places in sorted(holders.items(), key=lambda item: len(item[1])):
        rank, i = min(places, key=lambda place: (load[place[0]], place[0]))
        load[rank] += box.num_elements * DTYPES[kinds[name][1].dtype].size
        chosen[rank].add(i)
    return chosen


def numpy_bytes(tensor: Tensor) -> Any:
    """The bytes of a tensor on the CPU, flat; no copy when it is contiguous there."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy()
