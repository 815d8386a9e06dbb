"""Replica checks: tensors that several ranks must hold alike are compared by 64-bit checksums, named and healed.

They are parameters, averages of them (`Ema`), the buffers that checkpoints hold, and the optimizer's state. Which ranks
hold the same elements of one follows from its layout: those that differ from this one only along axes over which it is
replicated. The least and the greatest of them name the set (`_holders`); a rank's tensors with the same one share a
checksum, and what is communicated is one all-gather of three numbers for each. What an optimizer keeps of a parameter
is alike where the parameter is; a check looks at one tensor of it for each parameter, the next check at the next one.

Where more than half of the holders agree, what they have is right; else `Copies` says when the columns tell.

The checksum is sum((2 * i + 1) * bits[i]) modulo 2**64 over the elements as integers: the factors are odd, so a change
of a single element changes it, and elements that are swapped do, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise.errors import ModelError, ReplicaError
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.placed import Placed
from shardwise.plan.plan import AXES
from shardwise.train.exchange import gathered
from shardwise.train.guards.copies import Copies, Ends, alike, told
from shardwise.train.guards.issued import Issued
from shardwise.train.state import TrainState
from shardwise.train.updates.optim import PREFIX
from shardwise.train.updates.update_rules import local_shard

_Layout = tuple[DeviceMesh, tuple[bool, ...]]
"""Over which ranks a parameter is spread, and along which of their axes it is whole."""
CHUNK = 1 << 18
"""Elements whose products lie in memory at once: 4 MiB."""
SMALL_CHUNK = 1 << 16
"""The same on a CPU, whose calls are quick: 1 MiB, beside models that are small."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: torch.Tensor) -> int:
    """A 64-bit checksum of a tensor's bits; see the module.

    >>> checksum(torch.tensor([1, 2])), checksum(torch.tensor([2, 1]))
    (7, 5)
    """
    flat = tensor.detach().contiguous().reshape(-1)
    size = min(8, flat.element_size())
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
        size = flat.element_size()
    bits = flat.view(_INTEGERS[size])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    chunk = SMALL_CHUNK if flat.device.type == "cpu" else CHUNK
    for start in range(0, bits.numel(), chunk):
        part = bits[start : start + chunk].to(torch.int64)
        factors = torch.arange(2 * start + 1, 2 * (start + len(part)) + 1, 2, dtype=torch.int64, device=flat.device)
        total += factors.mul_(part).sum()
    return int(total)


class Replicas:
    """What must be equal where; made once per run. Every rank makes one.

    Cost of a `check`: one pass over the parameters and over one tensor of the optimizer's state of each, one all-gather
    of three integers per kind of layout.
    """

    def __init__(self, state: TrainState) -> None:
        """See the class."""
        self._state, self._mesh, self._issued = state, state.mesh, Issued(state.mesh)
        self._equal_at = state.step
        """After which step they were equal: that of the last comparison, or the one that this process began with."""
        self._turn = 0
        """How many checks have looked at a part of the optimizer's state."""
        self._buffers = _stored_buffers(state.placed)
        self._groups: dict[Ends, list[str]] = defaultdict(list)
        """Who holds the same as this rank -> names of those tensors. What it alone holds is not here."""
        known: dict[tuple[_Layout | None, bool], Ends] = {}  # few layouts for many tensors
        for name, tensor in self._live().items():
            kind = _layout(tensor), name in self._buffers
            ends = known[kind] = known.get(kind) or _holders(kind[0], self._mesh, _STATISTICS if kind[1] else ())
            if ends[0] != ends[1]:
                self._groups[ends].append(name)
        most = torch.tensor([len(self._groups)], dtype=torch.int64, device=self._mesh.device)
        self._rows = int(self._mesh.all_reduce_max(most))

    def _live(self, *, buffers: bool = True) -> dict[str, torch.Tensor]:
        """What is compared, by name: this rank's own tensors."""
        state = self._state
        live: dict[str, torch.Tensor] = {**state.placed.named_parameters()}
        if buffers:
            live |= {name: held for name, held in state.placed.named_buffers().items() if name in self._buffers}
        return live | (state.ema.tensors() if state.ema is not None else {})

    def _held(self, *, is_trained: bool, turn: int | None = None) -> dict[Ends, dict[str, torch.Tensor]]:
        """What several ranks hold, by who does: this rank's parts.

        Args:
            is_trained: with buffers, and with what the optimizer keeps of the parameters.
            turn: which tensor of that, for each parameter; None: all.
        """
        live = self._live(buffers=is_trained)
        kept = self._kept() if is_trained else {}
        held: dict[Ends, dict[str, torch.Tensor]] = {}
        for ends, names in self._groups.items():
            own = {name: local_shard(live[name]) for name in names if name in live}
            for state in (sorted(kept[name].items()) for name in names if kept.get(name)):
                own |= state if turn is None else [state[turn % len(state)]]
            held[ends] = _opened(own)
        return held

    def _kept(self) -> Mapping[str, dict[str, torch.Tensor]]:
        """What the optimizer keeps, parameter by parameter; nothing of one that no checkpoint can hold."""
        try:
            return self._state.optimizer.states_by_parameter()
        except ModelError:  # its first step has warned of it
            return {}

    def check(self) -> tuple[dict[str, Any], ...]:
        """Compare; what differs is healed from the majority, optimizer state and all. Every rank calls it.

        Returns:
            What was healed, as JSON, the same on every rank.

        Raises:
            ReplicaError: on all ranks: copies differ, and no majority says which are right; or ranks of a group have
                called different collectives.
        """
        self._issued.check(self._state.step)
        return self.compare()

    def compare(self, needed: str = "") -> tuple[dict[str, Any], ...]:
        """The same of copies alone.

        Args:
            needed: where any difference is an error, what the error says of it.
        """
        mesh, step = self._mesh, self._state.step
        equal_at, self._equal_at = min(self._equal_at, step - 1), step
        if self._rows == 0:
            return ()
        is_trained = not needed and step > 0  # before that `check_agreement` has compared the buffers
        held = self._held(is_trained=is_trained, turn=self._turn)
        self._turn += is_trained
        own = [(*ends, _combined(tensors)) for ends, tensors in held.items()]
        own += [(-1, -1, 0)] * (self._rows - len(own))
        holders: dict[Ends, set[int]] = defaultdict(set)
        for first, last, found in (row for rows in gathered(own, mesh) for row in rows):
            holders[first, last].add(found)
        if all(len(sums) == 1 for ends, sums in holders.items() if ends[0] >= 0):
            return ()
        different = self._differing(self._held(is_trained=is_trained))
        if step == 0 or needed:
            raise ReplicaError(f"{told(step, different)}, {needed or _INITIAL}")
        return (self._heal(different, equal_at),)

    def _differing(self, held: Mapping[Ends, Mapping[str, torch.Tensor]]) -> list[Copies]:
        """The tensors that are not alike on their holders, the same list on every rank."""
        mine = {ends: {name: checksum(tensor) for name, tensor in tensors.items()} for ends, tensors in held.items()}
        theirs: list[Any] = [None] * self._mesh.world
        dist.all_gather_object(theirs, mine)
        known = dict.fromkeys((ends, name) for sums in theirs for ends, named in sums.items() for name in named)
        copies = [
            Copies(ends, name, {rank: sums[ends].get(name) for rank, sums in enumerate(theirs) if ends in sums})
            for ends, name in known
        ]
        return [each for each in copies if len(set(each.sums.values())) > 1]

    def _heal(self, different: list[Copies], equal_at: int) -> dict[str, Any]:
        """Copy what is right to those that have other bits; the event."""
        step, tp = self._state.step, self._mesh.size("tp")
        suspects = {column for copies in different for column in copies.unlike(tp)}
        right = [copies.right(tp, suspects) for copies in different]
        if undecided := [copies for copies, found in zip(different, right, strict=True) if found is None]:
            raise ReplicaError(
                f"{told(step, undecided)}{alike(undecided[0].sums)}; needed: more than half of them equal, to know "
                f"which are right; nothing was saved; go back to a checkpoint of step {equal_at} or before, when they "
                "were equal, and look at the memory of these machines"
            )
        transfers: dict[tuple[int, tuple[int, ...]], list[str]] = defaultdict(list)
        for copies, found in zip(different, right, strict=True):
            wrong = tuple(sorted(rank for rank, own in copies.sums.items() if own != found))
            transfers[min(rank for rank in copies.sums if rank not in wrong), wrong].append(copies.name)
        for (source, wrong), several in transfers.items():  # in one order on all ranks
            self._copy(several, source, wrong)
        given = {rank for _, wrong in transfers for rank in wrong}
        if self._mesh.rank in given and self._state.placed.copies is not None:
            self._state.placed.copies.refresh()
        faulty = {r for copies, found in zip(different, right, strict=True) for r in copies.faulty(tp, found)} or given
        names = list(dict.fromkeys(copies.name for copies in different))
        return {
            "event": "healed",
            "step": step,
            "ranks": sorted(faulty),
            "spread": sorted(given - faulty),
            "parameters": names,
            "said": _said(names, equal_at, step),
        }

    @torch.no_grad()
    def _copy(self, names: Sequence[str], source: int, wrong: Sequence[int]) -> None:
        """Tensors of these names from one rank to others."""
        mesh, optimizer = self._mesh, self._state.optimizer
        if mesh.rank != source and mesh.rank not in wrong:
            return
        kept = optimizer.state_tensors() if any(name.startswith(PREFIX) for name in names) else {}
        held = _opened({name: local_shard(tensor) for name, tensor in (self._live() | kept).items()})
        for name in names:
            local = held[name]
            buffer = local.contiguous().to(mesh.device)
            if mesh.rank == source:
                for rank in wrong:
                    dist.send(buffer, rank)
            else:
                dist.recv(buffer, source)
                local.copy_(buffer)
        now = optimizer.local_state() if kept and mesh.rank in wrong else {}
        if any(now[name].data_ptr() != held[name].data_ptr() for name in now.keys() & names):
            optimizer.state_template(
                kept
            )  # numbers of Python's, into which nothing is copied: it learns which they are
            optimizer.load_state_tensors(kept)


_INITIAL = (
    "before the first step; needed: the same initial values on every rank; let apply() initialise the model, or seed "
    "by the job and not by the rank"
)


def _said(names: Sequence[str], equal_at: int, step: int) -> str:
    """What a healed difference means for the run."""
    if all(name.startswith("ema.") for name in names):
        return "averages alone: no step was trained with them"
    if all(name.startswith(PREFIX) for name in names):
        return "state of the optimizer alone: no bit of a weight has come of it yet"
    steps = f"step {step}" if equal_at + 1 == step else f"steps {equal_at + 1} to {step}"
    return (
        f"{steps} may have been trained with the wrong bits, and what came of that is alike on all ranks now; nothing "
        f"differed after step {equal_at}: go on, or go back to a checkpoint of that step or before"
    )


def _combined(tensors: Mapping[str, torch.Tensor]) -> int:
    total = sum((2 * number + 1) * checksum(tensor) for number, tensor in enumerate(tensors.values()))
    return (total + 2**63) % 2**64 - 2**63


def _opened(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With the plain tensors that one is made of (codes and scales of a library's 8-bit state) in its place."""
    opened: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if (flatten := getattr(tensor, "__tensor_flatten__", None)) is not None:
            opened |= _opened({f"{name}.{inner}": getattr(tensor, inner) for inner in flatten()[0]})
        else:
            opened[name] = tensor
    return opened


def _layout(parameter: torch.Tensor) -> _Layout | None:
    """That of a parameter; None: it is spread over no ranks."""
    if not isinstance(parameter, DTensor):
        return None
    return parameter.device_mesh, tuple(placement.is_replicate() for placement in parameter.placements)


def _stored_buffers(placed: Placed) -> frozenset[str]:
    """Names of the buffers that a checkpoint holds once for all data ranks, and that have had values from the start."""
    kept = {name for part in placed.parts for name in part.root.state_dict()} - left_empty(placed)
    return frozenset(
        name
        for name, buffer in placed.named_buffers().items()
        if name in kept
        and not isinstance(buffer, DTensor)
        and not any(name.startswith(f"{expert}.") for expert in placed.experts)
    )


def left_empty(placed: Placed) -> set[str]:
    """Names of the buffers that the constructor has made, and given no values."""
    if placed.blueprint is None or placed.blueprint.history is None:
        return set()
    history, views = placed.blueprint.history, placed.blueprint.views
    buffers = placed.named_buffers()
    return {name for name in buffers if name in views and not history.is_written(views[name].storage)}


_STATISTICS = ("tp",)
"""Ranks along it may make the sums of a buffer each for itself, which kernels may round otherwise."""


def _holders(layout: _Layout | None, mesh: Mesh, but: Sequence[str] = ()) -> Ends:
    """The least and the greatest rank that hold the same elements as this one of what is laid out so.

    `but`: axes along which it need not be the same.
    """
    outside = {axis for axis in AXES if axis not in ("pp", *but) and mesh.size(axis) > 1}
    least = most = mesh.rank
    if layout is not None:
        part, whole = layout
        here = part.get_coordinate()
        assert here is not None, "this rank is outside the mesh of its own parameter"
        ranks = part.mesh
        least = int(ranks[tuple(0 if free else i for i, free in zip(here, whole, strict=True))])
        most = int(ranks[tuple(-1 if free else i for i, free in zip(here, whole, strict=True))])
        outside -= mesh.axes_of(part)
    stride = 1
    for axis in reversed(AXES):  # ranks count row by row, the last axis fastest
        if axis in outside:
            least -= (least // stride % mesh.size(axis)) * stride
            most += (mesh.size(axis) - 1 - most // stride % mesh.size(axis)) * stride
        stride *= mesh.size(axis)
    return least, most
