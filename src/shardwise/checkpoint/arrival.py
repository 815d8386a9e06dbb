"""What is read into fresh tensors and checked where it lies, and how a state is known to hold it afterwards."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardwise.checkpoint.digests import BLOCK, PartDigest
from shardwise.checkpoint.format import DTYPES, Box
from shardwise.checkpoint.layout import held_by, numpy_bytes
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.reading import Reader
from shardwise.checkpoint.shardfile import ignore
from shardwise.checkpoint.torch_private import version_of
from shardwise.parallel.host_memory import host_memory, in_huge_pages

_PLACES = 4
"""Of a part at which eight bytes, so whole numbers, are its sample: each place is a miss of the processor's caches."""


class Arrival(NamedTuple):
    """A stored part that was read whole, after the digests of its blocks had agreed in place."""

    piece: int
    """Which of the tensor's stored parts, in the order of the manifest."""
    digest: PartDigest
    sample: bytes
    place: Tensor
    """Where it was read to; kept, so that no other tensor comes to lie there."""
    counts: tuple[int, int]
    """Changes in place that autograd had counted, of the tensor and of its shard."""

    @classmethod
    def of(cls, tensor: Tensor, place: Tensor, piece: int, digest: PartDigest) -> Arrival:
        """Of a tensor whose part `place` has just been read."""
        sample = _sample(place) if place.nbytes > BLOCK else b""
        return cls(piece, digest, sample, place, (version_of(tensor), version_of(place)))

    def is_in(self, tensor: Tensor, part: Tensor) -> bool:
        """Whether a part of a live tensor is what arrived.

        It is where it is the very memory in which the digests agreed, autograd counts no change of it, and a sample of
        its bytes is as it was; else, and where it is small, where its digest is equal.

        Cost: none to speak of for memory that was taken over, a pass of digests for what was copied.
        """
        here = (part.data_ptr(), part.shape, part.stride(), (version_of(tensor), version_of(part)))
        then = (self.place.data_ptr(), self.place.shape, self.place.stride(), self.counts)
        if here == then and part.nbytes > BLOCK:
            return _sample(part) == self.sample
        return self.digest.is_of(memoryview(numpy_bytes(part)))


def _sample(part: Tensor) -> bytes:
    words = numpy_bytes(part)[: part.nbytes // 8 * 8].view("u8")
    return bytes(words[:: len(words) // _PLACES])


Arrivals = dict[tuple[str, Box], Arrival]


def as_stored(manifest: Manifest, template: Mapping[str, Tensor]) -> set[str]:
    """Names of those tensors of which every part that is here is a stored one, and is read in place."""
    found = set(template) & set(manifest.tensors)
    for item in held_by(template):
        name, target = item.part.name, item.of(template[item.part.name])
        pieces = manifest.tensors[name].pieces if name in found else ()
        if not (_in_place(target) and any(piece.box == item.part.box for piece in pieces)):
            found.discard(name)
    return found


def _in_place(tensor: Tensor) -> bool:
    return tensor.is_cpu and tensor.is_contiguous()


def _room(targets: list[Tensor]) -> Tensor:
    """Memory of the host for the largest that is not read in place: one after the other is."""
    others = [target for target in targets if not _in_place(target)]
    pinned = any(not target.is_cpu for target in others)
    return host_memory(max((target.nbytes for target in others), default=0), pinned=pinned)


def fill(reader: Reader, template: Mapping[str, Tensor], whole: Container[str]) -> Arrivals:
    """Read this rank's elements into its tensors, and nothing else.

    The tensors are fresh ones, and no part of the state yet: bytes are read into them, and checked there.

    Args:
        reader: of the checkpoint.
        template: this rank's tensors.
        whole: names of those that are `as_stored` on every rank; what is returned are their parts.

    Cost: reads the blocks in which they lie, once, and takes digests; memory of a few MiB, and of the largest part that
    cannot be read in place: it is not on the CPU, or not contiguous.

    Raises:
        DamagedError: naming file, tensor and offset.
    """
    arrived = Arrivals()
    with torch.no_grad():
        held = held_by(template)
        held.sort(key=lambda item: reader.place(item.part.name, item.part.box))
        room = _room([item.of(template[item.part.name]) for item in held])
        for item in held:
            tensor, part = template[item.part.name], item.part
            target, size = item.of(tensor), DTYPES[part.dtype].size
            if direct := _in_place(target):
                in_huge_pages(place := target)
            else:
                place = room[: part.num_bytes].view(target.dtype).view(part.box.sizes)
            data: Any = place.reshape(-1).view(torch.uint8).numpy().view(np.dtype(f"u{size}"))
            read = PartDigest() if part.name in whole else None
            reader.read(part.name, part.box, data.reshape(part.box.sizes), read.add if read else ignore)
            if not direct:
                target.copy_(place)
            if read is not None:
                piece = [stored.box for stored in reader.manifest.tensors[part.name].pieces].index(part.box)
                arrived[part.name, part.box] = Arrival.of(tensor, target, piece, read)
    return arrived
