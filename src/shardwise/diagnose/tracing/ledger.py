"""`Ledger`: every byte of tensor memory and every collective of whatever runs inside it.

Accounting is by storage: bytes count from the operation that makes a storage (or first uses it) until the storage
dies or shrinks, whatever views of it there are. It sees real tensors and those without memory alike, so a traced
step and a real one are counted by the same code.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardwise.diagnose.tracing.torch_private import OperationMode, group_named, group_of, is_plain, storage_key
from shardwise.model.nested import leaves
from shardwise.parallel.mesh import Mesh
from shardwise.plan.plan import AXES

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
"""Phases of a step. The update is all that follows the last backward pass: norm, clipping, optimizer. A phase may be
divided: what is before `:` in its name says which it is a part of."""

KINDS = ("parameters", "gradients", "optimizer", "activations", "gathered", "rest")
"""What memory is held for. `gathered`: what collectives gave or take; `rest`: inputs, buffers of the model, and what a
phase makes and needs for a moment."""

COLLECTIVES = {
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "allgather": "all-gather",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "all_to_all": "all-to-all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send",
    "recv": "recv",
    "barrier": "barrier",
}
"""Beginnings of torch's names of collectives."""


class Collective(NamedTuple):
    """A collective that a rank takes part in."""

    kind: str
    """A value of `COLLECTIVES`."""
    axis: str
    """The axis of the mesh, several joined by `+`, or `rank`, where the group is this process alone."""
    num_bytes: int
    """The larger of what it takes from this rank and what it gives it: the whole result of an all-gather, the whole
    input of a reduce-scatter."""


@dataclass(eq=False, slots=True)
class Piece:
    """A storage that lives, or did."""

    ref: weakref.ref[torch.UntypedStorage]
    num_bytes: int
    born: str
    kind: str = ""


class Peak(NamedTuple):
    """The largest sum of live bytes of a phase, and what they were."""

    num_bytes: int
    held: tuple[tuple[Piece, int], ...]

    def by_kind(self) -> dict[str, int]:
        """Bytes by `KINDS`, which sum to the peak. Asked after the step, when it is known what became of each."""
        sums = dict.fromkeys(KINDS, 0)
        for piece, num_bytes in self.held:
            sums[piece.kind or ("activations" if piece.born == FORWARD else "rest")] += num_bytes
        return sums


class Ledger(OperationMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Counts while it is entered. See `trace_step`.

    >>> with Ledger() as ledger:
    ...     ledger.begin()
    ...     kept = torch.ones(256) + torch.ones(256)
    >>> ledger.peaks["update"].num_bytes
    3072
    """

    def __init__(self, axis_of: Callable[[dist.ProcessGroup], str] | None = None) -> None:
        """`axis_of` gives the name of a group's axis; without it a group goes by its own name."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self.axis_of = axis_of or (lambda group: group.group_name)
        self.live: dict[int, Piece] = {}
        self.total = 0
        self.phase: Callable[[], str] = lambda: UPDATE
        self.peaks: dict[str, Peak] = {}
        self.collectives: Counter[Collective] = Counter()
        self.patience_s = 0.0
        """How long to wait for others to let go of memory, before more than ever is taken to be held."""
        self._last = UPDATE

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on memory and count it; one on distributed tensors comes again as those of its parts."""
        if not all(is_plain(kind) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        self._turn_to(self.phase())
        result = self.execute(func, args, kwargs)
        self.count(func, args, kwargs, result)
        return result

    def execute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation."""
        return func(*args, **kwargs)

    def begin(self) -> None:
        """A step starts: forget the peaks and collectives of the one before."""
        self.peaks, self.collectives = {}, Counter()
        self._last = UPDATE
        self._measure()

    def mark(self, kind: str, tensors: Iterable[torch.Tensor]) -> None:
        """Say what the storages of some tensors (of the local part of distributed ones) hold."""
        for tensor in tensors:
            self._see(tensor.to_local() if isinstance(tensor, DTensor) else tensor).kind = kind

    def count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Account for an operation that was run: storages that are new, or have another size, and collectives."""
        collective = func.namespace in ("c10d", "_c10d_functional")
        # a number among the arguments may be one of C++'s own, with a storage that nobody allocated
        given = [tensor for tensor in tensors_in((args, kwargs)) if tensor.dim() or self._knows(tensor)]
        for tensor in (*given, *tensors_in(result)):
            piece = self._see(tensor)
            if (collective or func.namespace == "fsdp") and not piece.kind and whole(piece.born) != BACKWARD:
                piece.kind = "gathered"
        if collective:
            self._communicated(func, args, kwargs, result)
        if self.total > self._peak():
            if self.patience_s:  # a back-end's own threads let go of a message a moment after it has arrived
                time.sleep(self.patience_s)
            self._measure()

    def settle(self) -> None:
        """A backward pass is over: what it made and left are gradients."""
        for piece in self.live.values():
            if whole(piece.born) == BACKWARD and not piece.kind:
                piece.kind = "gradients"

    def _turn_to(self, phase: str) -> None:
        if phase != self._last:
            if whole(self._last) == BACKWARD and whole(phase) != BACKWARD:
                self.settle()
            self._last = phase
            if self.patience_s:  # what a thread still holds of the phase before is not this one's
                time.sleep(10 * self.patience_s)
            self._measure()

    def _peak(self) -> int:
        peak = self.peaks.get(self._last)
        return -1 if peak is None else peak.num_bytes

    def _measure(self) -> None:
        """Look at every storage, as some have shrunk with no operation on them, and keep what is the most so far."""
        for piece in list(self.live.values()):
            storage = piece.ref()
            if storage is not None:
                self._resize(piece, storage.nbytes())
        if self.total > self._peak():
            held = tuple((piece, piece.num_bytes) for piece in self.live.values() if piece.num_bytes)
            self.peaks[self._last] = Peak(self.total, held)

    def _knows(self, tensor: torch.Tensor) -> bool:
        return storage_key(tensor.untyped_storage()) in self.live

    def _see(self, tensor: torch.Tensor) -> Piece:
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        piece = self.live.get(key)
        if piece is None:
            piece = Piece(weakref.ref(storage, partial(self._dead, key)), 0, self._last)
            self.live[key] = piece
        self._resize(piece, storage.nbytes())
        return piece

    def _resize(self, piece: Piece, num_bytes: int) -> None:
        self.total += num_bytes - piece.num_bytes
        piece.num_bytes = num_bytes

    def _dead(self, key: int, ref: object) -> None:
        piece = self.live.pop(key)
        self.total -= piece.num_bytes

    def _communicated(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = func._opname
        start = max((start for start in COLLECTIVES if name.lstrip("_").startswith(start)), key=len, default=None)
        if start is None:
            return  # waiting for one is none
        kind = COLLECTIVES[start]
        groups = [found for value in (*args, *kwargs.values()) if (found := group_of(value)) is not None]
        if func.namespace == "_c10d_functional":
            groups = [group_named([value for value in (*args, *kwargs.values()) if isinstance(value, str)][-1])]
        size = max(sum(tensor.nbytes for tensor in tensors_in(side)) for side in (*args[:2], result))
        self.collectives[Collective(kind, self.axis_of(groups[0]), size)] += 1


def whole(phase: str) -> str:
    """The phase that a part belongs to."""
    return phase.partition(":")[0]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors that have memory (or are said to) in nested containers."""
    return (leaf for _, leaf in leaves(value) if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta")


def axis_names(mesh: Mesh) -> Callable[[dist.ProcessGroup], str]:
    """The axis, or the axes joined by `+`, along which the ranks of a group lie; or of which they are a part."""
    known: dict[frozenset[int], str] = {frozenset((mesh.rank,)): "rank"}
    views = [(mesh.device_mesh, AXES)]
    if mesh.expert_mesh is not None:
        views.append((mesh.expert_mesh, ("pp", "dp_replicate", "expert_shard", "ep")))
    for view, names in views:
        ranks, here = view.mesh, view.get_coordinate()
        assert here is not None
        for count in range(1, len(names) + 1):
            for chosen in itertools.combinations(range(len(names)), count):
                if all(ranks.size(axis) > 1 for axis in chosen):
                    index = tuple(slice(None) if axis in chosen else here[axis] for axis in range(len(names)))
                    known.setdefault(frozenset(ranks[index].flatten().tolist()), "+".join(names[a] for a in chosen))

    def name(group: dist.ProcessGroup) -> str:
        ranks = frozenset(dist.get_process_group_ranks(group))
        if ranks in known:
            return known[ranks]
        wider = min((each for each in known if ranks < each), key=len, default=None)
        return "other" if wider is None else f"part of {known[wider]}"

    return name
