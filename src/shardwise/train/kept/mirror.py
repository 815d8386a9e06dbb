"""`Mirror`: after every step a copy of the state in memory that outlives the ranks; under `--recover` only.

Each part of the state is kept once per host: ranks of a host that hold the same elements (replicas) share the work, by
bytes. So a job keeps two copies of what a host's ranks hold in its memory, whatever their number, and a step pays for
copying `bytes of that / ranks` per rank. Two, as a rank may die while it makes one. A copy says where each part lies in
its whole tensor, so that another number of ranks under another plan can take it over.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from mmap import mmap
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.checkpoint.format import Box
from shardwise.checkpoint.layout import Held, held_by, signature
from shardwise.errors import CheckpointError, OutOfMemoryError, UsageError
from shardwise.launch.environment import recovery_place
from shardwise.launch.variables import variables
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.randomness import generators
from shardwise.train.kept.outliving import DATA, Board, Header, Place, call_process
from shardwise.train.kept.stateful import own_place
from shardwise.train.torch_private import copy_all
from shardwise.train.updates.state_values import Kind

Key = tuple[str, Box]
"""A tensor's name, and which part of it."""
_ALIGN = 64


class State(Protocol):
    """What is kept; `TrainState` is one."""

    step: int

    @property
    def mesh(self) -> Mesh:
        """All ranks."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """This rank's tensors by name; a name has one global value over all ranks."""
        ...

    def local_tensors(self) -> dict[str, Tensor]:
        """The same names: of each tensor what is here, as a plain one that shares its storage."""
        ...

    def scalars(self) -> dict[str, Any]:
        """Everything else, as JSON."""
        ...

    def template(
        self, names: Collection[str], *, late: Mapping[str, Kind] | None = None, forms: Mapping[str, str] | None = None
    ) -> dict[str, Tensor]:
        """Fresh tensors of those names, as they would be here."""
        ...

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take over the filled template."""
        ...

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        """Take over what `scalars` gave."""
        ...


@dataclass(frozen=True)
class Part:
    """A part of a tensor, and where it lies in a slot."""

    key: Key
    dtype: str
    whole: tuple[int, ...]
    """Shape of the tensor that it is a part of."""
    start: int

    def of(self, memory: mmap) -> Tensor:
        """The part as it lies in a slot's memory."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        box = self.key[1]
        size = dtype.itemsize * box.num_elements
        return torch.frombuffer(memory, dtype=torch.uint8, offset=self.start, count=size).view(dtype).view(box.sizes)

    def to_json(self) -> list[Any]:
        """As it stands in a description."""
        return [self.key[0], *self.key[1], self.dtype, self.whole, self.start]

    @classmethod
    def from_json(cls, found: list[Any]) -> Part:
        """The inverse of `to_json`."""
        name, offsets, sizes, dtype, whole, start = found
        return cls((name, Box(tuple(offsets), tuple(sizes))), dtype, tuple(whole), start)


class Mirror:
    """What this rank keeps of a state; made by `rejoin`."""

    def __init__(self, place: Place) -> None:
        """See the class."""
        self.place = place
        self.recovered_step: int | None = None
        """The step that this process went on from; None: it began, or loaded a checkpoint."""
        self._count = 0
        self._sealer = ThreadPoolExecutor(1, thread_name_prefix="shardwise-seal")
        self._sealed: Future[None] | None = None
        self._slots = place.memory.pair(place.rank)
        self._shapes: list[tuple[Any, ...]] = []
        """Of the tensors that are here, when it was found out who keeps what."""
        self._parts: list[Part] = []
        self._sources: list[tuple[str, tuple[slice, ...] | None]] = []
        """Of each part its tensor, and where it lies in what is here of that; None: it is all of it."""
        self._targets: list[list[Tensor]] = []
        """Of each slot the parts as they lie in it."""
        self._end = DATA
        self._description = ""
        self._random: tuple[Mapping[str, bytes] | None, str] = (None, "")
        self._template: tuple[Any, list[Held]] = (None, [])
        """What decides how a template is laid out, and how it is."""

    def join(self, state: State) -> None:
        """Wait until this process is to train, and take over the copy that the job goes on with, if there is one.

        Raises:
            UsageError: this process keeps another state already.
            CheckpointError: the copy is not of this model and optimizer.
        """
        place, board = self.place, Board(self.place.memory.board)
        if board.read(place.rank)[0] == place.world:
            raise UsageError(
                f"rank {place.rank}: --recover keeps one TrainState per process, and steps() was called with a second "
                "one; needed: one state, whose optimizer may step several models (sw.several); train the other in a "
                "script of its own, or start without --recover"
            )
        _, trains, since = board.read(place.rank)  # of another set, while this one stands by
        board.write(place.rank, place.world, trains, since)
        order = _read_line(place.order)
        count = int(order["count"])
        if place.streams is not None:
            for stream, number in zip(place.streams, (1, 2), strict=True):
                os.dup2(stream, number)
            call_process(f"rank {place.rank}")
        if count:
            self._load(state, count, int(order["ranks"]))
            self._count, self.recovered_step = count, state.step
        board.write(place.rank, place.world, place.world, time.monotonic_ns())

    def prepare(self, state: State) -> None:
        """While it stands by: have all tensors that a copy will be read into, the optimizer's above all.

        Their values are those of no step; `join` brings the right ones.
        """
        kinds: dict[str, Kind] = {}
        scalars: dict[str, Any] = {}
        for rank in self.place.memory.ranks:
            for slot in self.place.memory.pair(rank):
                # the rank that writes it trains on: what was described is sure only while the same copy is there
                while (before := slot.header()).count:
                    text = slot.text(before)
                    if slot.header() == before:
                        description = json.loads(text)
                        found, scalars = map(Part.from_json, description["parts"]), description["scalars"]
                        kinds |= {part.key[0]: (part.whole, part.dtype) for part in found}
                        break
        template = state.template(kinds, late=kinds, forms=scalars.get("optimizer_forms"))
        self._template = (signature(template), held_by(template))
        with torch.no_grad():
            state.load_tensors(template)
        self._lay_out(state, state.local_tensors())

    def keep(self, state: State) -> None:
        """Copy the state; every rank calls it after every step.

        Cost: copies of this rank's parts, which come from an accelerator over its bus; a collective when the layout
        is new (after the first step), none otherwise.
        """
        local = state.local_tensors()
        if _shapes(local) != self._shapes:
            self._lay_out(state, local)
        which = (self._count + 1) % 2
        slot = self._slots[which]
        slot.clear()
        sources = [local[name] if where is None else local[name][where] for name, where in self._sources]
        with torch.no_grad():
            copy_all(self._targets[which], sources)
        if state.mesh.device.type != "cpu":
            torch.accelerator.synchronize()
        rest = json.dumps({"scalars": state.scalars()})
        text = f'{self._description}, "random": {self._random_numbers(state.mesh.device)}, {rest[1:]}'
        self._count += 1
        header = slot.commit(Header(self._count, state.step, self._end, 0, state.mesh.world), text)
        if self._sealed is not None:
            self._sealed.result()
        self._sealed = self._sealer.submit(slot.seal, header)  # while the next step computes

    def _lay_out(self, state: State, local: Mapping[str, Tensor]) -> None:
        """Find who keeps what; every rank calls it. The two slots may then hold different layouts: each has its own."""
        self._shapes = _shapes(local)
        tensors = state.tensors()
        held = {(each.part.name, each.part.box): each for each in held_by(tensors)}
        mine = [(key, each.of(tensors[key[0]]).nbytes) for key, each in held.items()]
        everyones: list[list[tuple[Key, int]]] = [mine] * state.mesh.world
        if state.mesh.world > 1:
            dist.all_gather_object(everyones, mine)
        self._parts, self._sources, self._end = [], [], DATA
        sizes = dict(mine)
        here = [rank for rank in self.place.memory.ranks if rank < state.mesh.world]
        for key in keepers([everyones[rank] for rank in here])[here.index(state.mesh.rank)]:
            part = held[key].part
            self._parts.append(Part(key, part.dtype, part.shape, self._end))
            self._sources.append((key[0], held[key].within(local[key[0]])))
            self._end += -(-sizes[key] // _ALIGN) * _ALIGN
        try:
            memories = [slot.data(self._end, mine=True) for slot in self._slots]
        except OSError as error:
            raise OutOfMemoryError(
                f"--recover: rank {state.mesh.rank} keeps two copies of its part of the state, "
                f"{self._end / 2**20:.1f} MiB each: found {error.strerror}; needed: so much memory of this host beside "
                "what trains; start without --recover, or divide the state over more hosts"
            ) from error
        self._targets = [[part.of(memory) for part in self._parts] for memory in memories]
        self._description = f'{{"parts": {json.dumps([part.to_json() for part in self._parts])}'

    def _random_numbers(self, device: torch.device) -> str:
        """Where the generators that a script may use are, as JSON; that is long, and they rarely move."""
        if (now := generators.states(device)) != self._random[0]:
            self._random = (now, json.dumps({kind: state.hex() for kind, state in now.items()}))
        return self._random[1]

    def _load(self, state: State, count: int, ranks: int) -> None:
        found: dict[str, list[tuple[Part, mmap]]] = {}
        own: dict[str, Any] = {}
        places: list[Any] = []
        then = 0
        for rank in (rank for rank in self.place.memory.ranks if rank < ranks):
            slot = next(slot for slot in self.place.memory.pair(rank) if slot.header().count == count)
            header = slot.header()
            description, memory = json.loads(slot.text(header)), slot.data(header.end)
            places.append(description["scalars"].get("data"))
            then = max(then, _micro_batches(description["scalars"]))
            for part in map(Part.from_json, description["parts"]):
                found.setdefault(part.key[0], []).append((part, memory))
            own = description if rank == self.place.rank % ranks else own
        if ranks != state.mesh.world and any(place != places[0] for place in places):
            own_place(None, range(ranks), state.mesh)  # of other ranks
        kinds = {name: (parts[0][0].whole, parts[0][0].dtype) for name, parts in found.items()}
        template = state.template(kinds, late=kinds, forms=own["scalars"].get("optimizer_forms"))
        layout, boxes = self._template
        with torch.no_grad():
            for held in boxes if signature(template) == layout else held_by(template):
                problem = _fill(held.of(template[held.part.name]), held, found.get(held.part.name, []))
                if problem is not None:
                    raise CheckpointError(
                        f"recovery of rank {self.place.rank}: {held.part.name}: found {problem} in the copy that was "
                        f"kept after step {own['scalars']['step']}, needed {held.part.shape} {held.part.dtype}; the "
                        "script must build the same model and optimizer every time it is run"
                    )
        now = _micro_batches(state.scalars())  # of this stage
        state.load_scalars(own["scalars"])
        state.load_tensors(template)
        generators.restore({kind: bytes.fromhex(state) for kind, state in own["random"].items()}, state.mesh.device)
        differs = int(_shapes(state.local_tensors()) != self._shapes)
        told = state.mesh.all_reduce_max(torch.tensor([differs, then, now], device=state.mesh.device))
        differs, then, now = map(int, told.tolist())
        if differs:  # some rank has tensors that it did not stand by with: all find out anew
            self._shapes = []
        if (other := other_statistics(then, now, state.step)) and state.mesh.is_first:
            with suppress(Warning):  # `-W error` does not end one rank, for which the others would wait
                warnings.warn(other, stacklevel=2)


def other_statistics(then: int, now: int, step: int) -> str:
    """What is another result, though the samples are the same: batch norm over micro-batches of another size.

    Args:
        then: micro-batches per step, as long as the copy's ranks trained; 0: no rank has a batch norm.
        now: from here on.
        step: of the copy.
    """
    if not (then and now) or then == now:
        return ""
    return (
        f"batch norm: found {now} micro-batches per step, and {then} up to step {step}; it takes its "
        "statistics of one, so that from here on steps are not those of an undisturbed run; for the same maths use "
        "group or layer norm"
    )


def _micro_batches(scalars: Mapping[str, Any]) -> int:
    """Of whose rows the batch norms of a stage take statistics; 0: it has none."""
    return int((scalars.get("batch_norm") or {}).get("micro_batches", 0))


def _shapes(local: Mapping[str, Tensor]) -> list[tuple[Any, ...]]:
    return [(name, tensor.shape, tensor.dtype) for name, tensor in local.items()]


def _fill(target: Tensor, held: Held, kept: list[tuple[Part, mmap]]) -> str | None:
    """Copy a box of a tensor out of the parts that memory keeps of it; what is wrong with them, if anything."""
    wanted, filled = held.part.box, 0
    for part, memory in kept:
        if (part.whole, part.dtype) != (held.part.shape, held.part.dtype):
            return f"{part.whole} {part.dtype}"
        both = part.key[1].overlap(wanted)
        if both is not None:
            target[both.slices(wanted)].copy_(part.of(memory)[both.slices(part.key[1])])
            filled += both.num_elements
    if filled == wanted.num_elements:
        return None
    return f"{filled} of {wanted.num_elements} elements of {wanted}" if kept else "nothing"


def keepers(everyones: list[list[tuple[Key, int]]]) -> list[list[Key]]:
    """Which of its parts each rank keeps: each part once, bytes spread evenly, in the same way on all ranks.

    Args:
        everyones: (key, bytes) of what each rank holds.

    >>> a, b = ("a", Box((0,), (2,))), ("b", Box((0,), (2,)))
    >>> [[name for name, _ in keys] for keys in keepers([[(a, 8), (b, 8)], [(a, 8), (b, 8)]])]
    [['a'], ['b']]
    """
    holders: dict[Key, list[int]] = {}
    sizes: dict[Key, int] = {}
    for rank, held in enumerate(everyones):
        for key, size in held:
            holders.setdefault(key, []).append(rank)
            sizes[key] = size
    load, chosen = [0] * len(everyones), [list[Key]() for _ in everyones]
    for key, ranks in sorted(holders.items(), key=lambda item: len(item[1])):
        rank = min(ranks, key=lambda rank: (load[rank], rank))
        load[rank] += sizes[key]
        chosen[rank].append(key)
    return chosen


def refuse_own_loop() -> None:
    """A loop that is not `steps` cannot be taken back by a step.

    Raises:
        UsageError: under a supervisor.
    """
    if recovery_place(variables()) is not None:
        raise UsageError(
            "make_step: found --recover and a loop of the script's own, which chooses its batches itself: after a "
            "recovery it would begin anew, with other samples than the step that is retried; needed: "
            "`for m in shardwise.steps(state, loss_fn, ...)`; use it, or start without --recover"
        )


def _read_line(file: int) -> dict[str, Any]:
    """One line of JSON from a pipe; blocks. Its end without a line: the supervisor is gone."""
    text = b""
    while not text.endswith(b"\n"):
        piece = os.read(file, 4096)
        if not piece:
            raise SystemExit(1)
        text += piece
    return dict(json.loads(text))
