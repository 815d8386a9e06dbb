"""What the optimizer's update sends, by the rule of each; those that work on the local shards alone send nothing.

Sources: the rules themselves, in `train.updates.update_rules`, `train.updates.sharing` and `train.updates.low_bits`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple, Protocol

from shardwise.plan.messages.scene import Collective, Messages
from shardwise.plan.plan import Plan
from shardwise.plan.ranks.division import sharded_dim
from shardwise.plan.ranks.weights import Weight
from shardwise.plan.updating import NOT_ORTHOGONAL, newton_schulz_flops, part_sizes
from shardwise.plan.workload import Workload

LOW_BITS_LEAST, LOW_BITS_BLOCK = 4096, 256
"""Elements of a parameter whose averages are kept in 8 bits, at least; and in a block of them."""


class Stepping(Protocol):
    """One rank of a plan, as far as an update is concerned: a `Scene`, or that of a user's module."""

    @property
    def plan(self) -> Plan:
        """Its plan."""

    @property
    def workload(self) -> Workload:
        """The optimizer."""

    @property
    def index(self) -> Mapping[str, int]:
        """Where it lies on each axis, and on `ep`."""

    @property
    def stepped(self) -> Sequence[Weight]:
        """What its optimizer steps, in order."""

    @property
    def expert_axes(self) -> tuple[str, str]:
        """See `Scene`."""

    def axis(self, *axes: str) -> str:
        """See `axis_of`."""


class Axis(NamedTuple):
    """Ranks along which a parameter is split."""

    name: str
    size: int
    here: int
    """This rank's place among them."""
    dim: int
    """That is split."""


def update_messages(scene: Stepping) -> Messages:
    """Of all stages of the rank.

    Muon shares its matrices out; LAMB sums norms; Adafactor gathers every gradient and sums a square; of averages in
    8 bits ranks find the largest element of each block together, where they split rows.
    """
    weights = list(scene.stepped)
    match scene.workload.optimizer:
        case "muon":
            yield from _shared_out(scene, weights)
        case "lamb":
            yield from _norms(scene, weights)
        case "adafactor":
            for weight in weights:
                for message in _gathered(scene, weight):
                    yield message, 1
                for axis in _axes(scene, weight):
                    yield Collective("all-reduce", axis.name, _width(scene)), 1
        case "adamw-8bit":
            for weight in weights:
                yield from _largest(scene, weight)


def _width(scene: Stepping) -> int:
    """Bytes of the parameter's own type, or of that of its master copy."""
    return 8 if scene.plan.precision == "fp64" else 4


# ---------------------------------------------------------------- where a parameter lies


def _axes(scene: Stepping, weight: Weight) -> list[Axis]:
    """Along which it is split, in the order of the mesh: data, then `tp`; of experts their own."""
    plan, axes, index = scene.plan, scene.plan.axes, scene.index
    local, found = weight.local(plan), []
    shards, here = axes.dp_shard * axes.cp, index["dp_shard"] * axes.cp + index["cp"]
    name = scene.axis("dp_shard", "cp")
    if _is_ep(scene, weight):
        shards, here = shards * axes.tp // axes.ep, (here * axes.tp + index["tp"]) // axes.ep
        name = scene.expert_axes[1]
    if plan.zero and shards > 1 and local:  # without dims it stays whole
        regrouped = type(plan.communication.reshard_after_forward) is int
        found.append(Axis(name, shards, here, 0 if regrouped else sharded_dim(local, shards)))
    if _is_ep(scene, weight):
        found.append(Axis(scene.expert_axes[0], axes.ep, index["ep"], 0))
    elif axes.tp > 1 and weight.cut in ("out", "in"):
        found.append(Axis("tp", axes.tp, index["tp"], int(weight.cut == "in")))
    return found


def _is_ep(scene: Stepping, weight: Weight) -> bool:
    return weight.cut == "experts" and scene.plan.axes.ep > 1


def _alike(scene: Stepping, weight: Weight) -> Axis | None:
    """The ranks along one axis that hold the same of a matrix: where there are most."""
    plan, axes, index = scene.plan, scene.plan.axes, scene.index
    cp = 1 if plan.zero else axes.cp  # its ranks are replicas where nothing is sharded
    names = ("dp_replicate",) if plan.zero else ("dp_replicate", "cp")
    place = index["dp_replicate"] * cp + (0 if plan.zero else index["cp"])
    found = [Axis(scene.axis(*names), axes.dp_replicate * cp, place, 0)]
    if weight.cut not in ("out", "in"):
        found.append(Axis("tp", axes.tp, index["tp"], 0))
    most = max(found, key=lambda axis: axis.size)
    return most if most.size > 1 else None


def _shapes(weight: Weight, axes: list[Axis]) -> list[tuple[int, ...]]:
    """Of the rank's part before it is joined along each axis, and after the last."""
    shapes = [weight.shape]
    for axis in reversed(axes):
        shape = list(shapes[-1])
        shape[axis.dim] = part_sizes(shape[axis.dim], axis.size)[axis.here]
        shapes.append(tuple(shape))
    return shapes[::-1]


# ---------------------------------------------------------------- what is sent


def _shared_out(scene: Stepping, weights: list[Weight]) -> Messages:
    """Muon's: batches of matrices, those with most work first, each to one rank and back."""
    shared: dict[tuple[tuple[str, ...], Axis | None], list[Weight]] = {}
    for weight in weights:
        if len(weight.shape) == 2 and weight.name not in NOT_ORTHOGONAL:
            split = tuple(axis.name for axis in _axes(scene, weight))
            shared.setdefault((split, _alike(scene, weight)), []).append(weight)
    for (_, alike), members in shared.items():
        members.sort(key=lambda weight: -newton_schulz_flops(*weight.shape))
        team = prod(axis.size for axis in _axes(scene, members[0]))
        batches = [members[i : i + team] for i in range(0, len(members), team)]
        for i, batch in enumerate(batches):
            if alike is None or i % alike.size == alike.here:
                for message in _exchanged(scene, batch):
                    yield message, 2  # and back
            if alike is not None:
                parts = sum(prod(_shapes(weight, _axes(scene, weight))[0]) for weight in batch)
                yield Collective("broadcast", alike.name, parts * _width(scene)), 1


def _exchanged(scene: Stepping, batch: list[Weight]) -> Iterator[Collective]:
    """Parts of the matrices of a batch go to the ranks along each axis, until each has one."""
    axes = _axes(scene, batch[0])
    for level, axis in enumerate(axes):
        each = prod(after.size for after in axes[level + 1 :])
        mine = batch[axis.here * each : (axis.here + 1) * each]
        given, taken = (
            sum(prod(_shapes(weight, _axes(scene, weight))[at]) for weight in some)
            for some, at in ((batch, level), (mine, level + 1))
        )
        yield Collective("all-to-all", axis.name, max(given, taken) * _width(scene))
        batch = mine
        if not batch:
            return


def _norms(scene: Stepping, weights: list[Weight]) -> Messages:
    """LAMB's: two numbers of each parameter, of all that lie in the same way together."""
    meshes = ("ep" if _is_ep(scene, weight) else "" for weight in weights)
    splits = (tuple(axis.name for axis in _axes(scene, weight)) for weight in weights)
    for (_, split), count in Counter(zip(meshes, splits, strict=True)).items():
        for name in split:
            yield Collective("all-reduce", name, 2 * count * _width(scene)), 1


def _gathered(scene: Stepping, weight: Weight) -> Iterator[Collective]:
    """A whole tensor from its shards, in the order of DTensor's `full_tensor`: each filled up to the largest.

    What `fully_shard` split after `tp` or `ep` along the same dim first; else the last axis first.
    """
    axes = _axes(scene, weight)
    if len({axis.dim for axis in axes}) == len(axes):
        axes.reverse()
    for axis, shape in zip(axes, _shapes(weight, axes)[1:], strict=True):
        filled = [*shape[: axis.dim], -(-shape[axis.dim] // axis.size) * axis.size, *shape[axis.dim + 1 :]]
        yield Collective("all-gather", axis.name, prod(filled) * _width(scene))


def _largest(scene: Stepping, weight: Weight) -> Messages:
    """Of each block of a row, for both averages."""
    if len(weight.shape) < 2 or prod(weight.shape) < LOW_BITS_LEAST:
        return
    *rows, columns = weight.shape
    axes = _axes(scene, weight)
    *local, _ = _shapes(weight, axes)[0]
    blocks = prod(local) * -(-columns // LOW_BITS_BLOCK)
    for axis in axes:
        if axis.dim == len(rows):
            yield Collective("all-reduce", axis.name, blocks * _width(scene)), 2
