"""Replica checks: tensors that several ranks must hold alike are compared by 64-bit checksums, named and healed.

They are parameters, averages of them (`Ema`), and the buffers that checkpoints hold. Which ranks hold the same elements
of one follows from its layout: those that differ from this one only along axes over which it is replicated. The least
and the greatest of them name the set (`_holders`); a rank's tensors with the same one share a checksum, and what is
communicated is one all-gather of three numbers for each.

The checksum is sum((2 * i + 1) * bits[i]) modulo 2**64 over the elements as integers: the factors are odd, so a change
of a single element changes it, and elements that are swapped do, too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise.errors import ReplicaError
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.placed import Placed
from shardwise.plan.plan import AXES
from shardwise.train.exchange import gathered, listed
from shardwise.train.issued import Issued
from shardwise.train.optim import PREFIX
from shardwise.train.state import TrainState
from shardwise.train.update_rules import local_shard

Ends = tuple[int, int]
"""Least and greatest rank of those that hold the same: with the axes' sizes they tell the set."""
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

    Cost of a `check`: one pass over the parameters, one all-gather of two integers per kind of layout.
    """

    def __init__(self, state: TrainState) -> None:
        """See the class."""
        self._state, self._mesh, self._issued = state, state.mesh, Issued(state.mesh)
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
        mesh = self._mesh
        if self._rows == 0:
            return ()
        live = self._live(buffers=not needed and self._state.step > 0)  # `check_agreement` has compared those
        own = [(*ends, _combined(live, names)) for ends, names in self._groups.items()]
        own += [(-1, -1, 0)] * (self._rows - len(own))
        holders: dict[Ends, dict[int, int]] = defaultdict(dict)
        for rank, rows in enumerate(gathered(own, mesh)):
            for first, last, found in rows:
                if first >= 0:
                    holders[first, last][rank] = found
        different = [(ends, sums) for ends, sums in sorted(holders.items()) if len(set(sums.values())) > 1]
        return tuple(self._settle(ends, sums, live, needed) for ends, sums in different)

    def _settle(
        self, ends: Ends, sums: Mapping[int, int], live: Mapping[str, torch.Tensor], needed: str
    ) -> dict[str, Any]:
        """Name who differs, and copy what the majority has."""
        state = self._state
        (common, count), *_ = Counter(sums.values()).most_common(1)
        is_majority = count * 2 > len(sums)
        # without one, the last step's least rank is as good a suspect as any: all are named
        wrong = [rank for rank, found in sums.items() if found != common] if is_majority else sorted(sums)
        names = self._differing(ends, list(sums), live)
        text = (
            f"step {state.step}: {', '.join(names[:3])} ({len(names)} tensors) must be equal on ranks "
            f"{listed(sorted(sums))}: found other bits on rank {listed(wrong)}"
        )
        if state.step == 0:
            needed = (
                "before the first step; needed: the same initial values on every rank; let apply() initialise the "
                "model, or seed by the job and not by the rank"
            )
        if needed:
            raise ReplicaError(f"{text}, {needed}")
        if not is_majority:
            raise ReplicaError(
                f"{text}{_alike(sums)}; needed: more than half of them equal, to know which are right; nothing was "
                "saved; go back to the last checkpoint, and look at the memory of these machines"
            )
        source = next(rank for rank, found in sums.items() if found == common)
        self._copy(ends, source, wrong)
        return {"event": "healed", "step": state.step, "ranks": wrong, "source": source, "parameters": names}

    def _differing(self, ends: Ends, ranks: list[int], live: Mapping[str, torch.Tensor]) -> list[str]:
        """Names of the tensors of a group whose checksums differ; only asked when one does."""
        names = [name for name in self._groups.get(ends, []) if name in live and self._mesh.rank in ranks]
        theirs: list[Any] = [None] * self._mesh.world
        dist.all_gather_object(theirs, {name: checksum(local_shard(live[name])) for name in names})
        found = [theirs[rank] for rank in ranks]
        named = dict.fromkeys(name for one in found for name in one)  # ranks may have placed a tensor otherwise
        return [name for name in named if len({one.get(name) for one in found}) > 1]

    @torch.no_grad()
    def _copy(self, ends: Ends, source: int, wrong: list[int]) -> None:
        """What a group holds, and the optimizer's state of its parameters, from one rank to others."""
        mesh, state = self._mesh, self._state
        if mesh.rank != source and mesh.rank not in wrong:
            return
        names = self._groups[ends]
        tensors = {f"model.{name}": tensor for name, tensor in self._live().items() if name in names}
        prefixes = tuple(f"{PREFIX}{name}." for name in names)
        optimizer = state.optimizer.state_tensors()
        state.optimizer.state_template(optimizer)  # it learns which states are plain numbers
        mine = {key: tensor for key, tensor in optimizer.items() if key.startswith(prefixes)}
        for _, tensor in sorted((tensors | mine).items()):
            local = local_shard(tensor)
            buffer = local.contiguous().to(mesh.device)
            if mesh.rank == source:
                for rank in wrong:
                    dist.send(buffer, rank)
            else:
                dist.recv(buffer, source)
                local.copy_(buffer)
        if mesh.rank in wrong:
            state.optimizer.load_state_tensors(optimizer)
            if state.placed.copies is not None:
                state.placed.copies.refresh()


def _alike(sums: Mapping[int, int]) -> str:
    """Which ranks agree with one another, where there is no majority; empty: none do.

    >>> _alike({0: 7, 1: 8, 2: 7, 3: 9})
    ' (alike: 0, 2)'
    """
    holders: dict[int, list[int]] = defaultdict(list)
    for rank, found in sorted(sums.items()):
        holders[found].append(rank)
    several = [listed(ranks) for ranks in holders.values() if len(ranks) > 1]
    return f" (alike: {'; '.join(several)})" if several else ""


def _combined(live: Mapping[str, torch.Tensor], names: list[str]) -> int:
    total = 0
    for number, name in enumerate(name for name in names if name in live):
        total += (2 * number + 1) * checksum(local_shard(live[name]))
    return (total + 2**63) % 2**64 - 2**63


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
