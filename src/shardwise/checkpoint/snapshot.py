"""`HostCopy`: what a rank stores of a state, copied into memory of the host that is used again by the next save."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from shardwise.checkpoint.agree import Peers
from shardwise.checkpoint.checksum import MASK, contribution, word_box, words_of
from shardwise.checkpoint.layout import Held, held_by, numpy_bytes, owners, signature
from shardwise.checkpoint.shardfile import Part, arrange
from shardwise.checkpoint.torch_private import version_of
from shardwise.parallel.host_memory import host_memory

LATER = ("optim.", "ema.")
"""Names of what nothing changes before the next step of an optimizer: copied beside the forward and backward pass."""


class _Copy(NamedTuple):
    name: str
    source: Tensor
    target: Tensor
    version: int


class HostCopy:
    """The layout of a state over the ranks, found once, and the buffer for this rank's part of it.

    Of a save beside training the optimizer's state is copied by the thread that writes, and the next step of any torch
    optimizer waits until it has. Whoever changes that state by other means makes the save fail, not lie, as long as
    autograd counts the change: one through `.data` or numpy it does not see.

    Memory: the bytes that this rank stores, kept between saves.
    """

    def __init__(self) -> None:
        """Nothing is laid out."""
        self.arranged: list[tuple[Part, int]] = []
        """This rank's parts in the order of its file, with their places in `data`."""
        self.parts: list[list[Part]] = []
        """Every rank's stored parts, by rank."""
        self.shapes: dict[str, tuple[tuple[int, ...], str]] = {}
        """Shape and type of every tensor of all ranks."""
        self._signature: tuple[Any, ...] | None = None
        self._held: list[Held] = []
        self._targets: list[Tensor] = []
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._size = 0
        self._left: list[_Copy] = []
        self._arrived = threading.Event()
        self._hook: RemovableHandle | None = None
        self.held_up_s = 0.0
        """How long optimizers waited for the last copy."""

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether the layout is that of these tensors."""
        return self._signature == signature(tensors)

    def lay_out(self, peers: Peers, tensors: Mapping[str, Tensor], doing: str) -> None:
        """Find who stores what; every rank calls it.

        Raises:
            CheckpointError: a tensor cannot be stored, or ranks differ on one.
        """
        held = peers.together(doing, lambda: held_by(tensors))
        kinds = {name: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()}
        everyone = peers.gather(([item.part for item in held], kinds))
        chosen = peers.together(doing, lambda: owners([parts for parts, _ in everyone]))
        self.parts = [[parts[i] for i in sorted(mine)] for (parts, _), mine in zip(everyone, chosen, strict=True)]
        self.shapes = {name: kind for _, theirs in everyone for name, kind in theirs.items()}
        self.arranged = arrange(self.parts[peers.rank])
        by_part = {(item.part.name, item.part.box): item for item in held}
        self._held = [by_part[part.name, part.box] for part, _ in self.arranged]
        self._size = sum(part.num_bytes for part, _ in self.arranged)
        self._targets = []
        self._signature = signature(tensors)

    def take(self, tensors: Mapping[str, Tensor], *, beside: bool = False) -> None:
        """Copy this rank's parts; what is on an accelerator is there when this returns.

        Args:
            tensors: the state.
            beside: leave the optimizer's state on the CPU to `finish`, which must be called in another thread.

        Cost: one copy of the bytes that this rank stores; the first one also gets the memory.
        """
        self.release()
        self._left, self.held_up_s = [], 0.0
        if not self._targets:
            on_accelerator = any(not tensor.is_cpu for tensor in tensors.values())
            if self._buffer.numel() < self._size:
                self._buffer = host_memory(self._size, pinned=on_accelerator)
            for part, start in self.arranged:
                dtype = getattr(torch, part.dtype)
                data = self._buffer[start : start + part.num_bytes]
                self._targets.append(data.view(dtype).view(part.box.sizes))
        with torch.no_grad():
            for held, target in zip(self._held, self._targets, strict=True):
                name, source = held.part.name, held.of(tensors[held.part.name])
                if beside and source.is_cpu and name.startswith(LATER):
                    self._left.append(_Copy(name, source, target, version_of(source)))
                else:
                    _copy(source, target)
        if any(not tensor.is_cpu for tensor in tensors.values()):
            torch.accelerator.synchronize()
        if self._left:
            self._arrived.clear()
            self._hook = register_optimizer_step_pre_hook(self._hold_up)

    def finish(self) -> str:
        """Copy what `take` left; what is wrong with it, if anything."""
        try:
            with torch.no_grad():
                for item in self._left:
                    _copy(item.source, item.target)
            changed = [item.name for item in self._left if version_of(item.source) != item.version]
        finally:
            self._left = []
            self._arrived.set()
        if not changed:
            return ""
        return (
            f"copying {changed[0]} to host memory: it changed meanwhile, and not by a step of a torch optimizer "
            f"({len(changed)} tensors); needed the same until Saving.wait returns or an optimizer steps: save with "
            "Store.save"
        )

    def release(self) -> None:
        """Let optimizers step without asking; by the thread in which they do, when nothing is left to copy."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _hold_up(self, *_: Any) -> None:
        if not self._arrived.is_set():
            start = time.perf_counter()
            self._arrived.wait()
            self.held_up_s += time.perf_counter() - start

    @property
    def data(self) -> memoryview:
        """The bytes of all parts, as arranged."""
        found: Any = self._buffer.numpy()
        return memoryview(found)[: self._size]

    def checksums(self) -> dict[str, int]:
        """What this rank's parts add to each tensor's checksum."""
        found: dict[str, int] = {}
        data = self._buffer.numpy()
        for part, start in self.arranged:
            words = words_of(data[start : start + part.num_bytes], part.box.sizes, part.dtype)
            value = contribution(words, word_box(part.box, part.dtype))
            found[part.name] = (found.get(part.name, 0) + value) & MASK
        return found


def _copy(source: Tensor, target: Tensor) -> None:
    if source.is_cpu and source.is_contiguous():  # numpy's is a memcpy that goes around the caches
        np.copyto(numpy_bytes(target), numpy_bytes(source))
    else:
        target.copy_(source, non_blocking=True)
