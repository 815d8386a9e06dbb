"""`Shards`: when torch's `fully_shard` gathers and reduces each of its groups, call by call. No torch.

A group is gathered when a forward or a backward pass needs it, or the pass before it looks ahead; what holds it then
depends on what came before. So the passes of a step are gone through, as `FSDPParamGroup` of torch does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shardwise.model.module_step import Event

ROOT = -1
"""The number of the group of what is in no block."""


@dataclass(frozen=True)
class Dials:
    """What a backward pass does, as the step or a pipeline's schedule tells `fully_shard`."""

    reduces: bool = True
    sums_replicas: bool = True
    reshards: bool = True
    is_last: bool = True


@dataclass(eq=False)
class Group:
    """Parameters that are gathered together, and what was done with them."""

    gathers: int = 0
    gathers_of_part: int = 0
    """Among the neighbours that hold it together since its forward pass."""
    reductions: int = 0
    sums: int = 0
    """Reductions that were followed by a sum over replicas."""
    pass_: str = ""
    """`forward`, `before` a backward pass, `behind` it; empty: none."""
    is_whole: bool = False
    is_near: bool = False
    """Neighbours hold it together."""
    is_coming: bool = False
    """It was gathered, and nobody has waited for it."""
    was_whole: bool = False
    places: list[int] = field(default_factory=list)
    """In the order of forward calls, of those that have not gone backward."""


class Shards:
    """The groups of one stage: units, and the root."""

    def __init__(self, units: Sequence[int], *, has_root: bool, reshards: bool | int, depth: int = 1) -> None:
        """Say which there are.

        Args:
            units: by their numbers, in order.
            has_root: some parameters are in none of them.
            reshards: units let go of their parameters behind a forward call; a number: to so many neighbours.
            depth: how many of them are gathered ahead; 1 is what torch does by itself in a backward pass.
        """
        self.groups = {number: Group() for number in (*units, *([ROOT] if has_root else []))}
        self._reshards = reshards
        self._next: dict[int, list[Group]] = {}
        self._before: dict[int, list[Group]] = {}
        if depth > 1:
            groups = [self.groups[number] for number in units]
            self._next = {number: groups[i + 1 : i + 1 + depth] for i, number in enumerate(units)}
            self._before = {number: groups[max(0, i - depth) : i][::-1] for i, number in enumerate(units)}
        self._order: list[Group] = []

    def forward(self, events: Iterable[Event]) -> None:
        """A forward pass."""
        for event in (Event("call", ROOT), *events, Event("return", ROOT)):
            group = self.groups.get(event.unit)
            if group is None:
                continue
            if event.what == "call":
                group.pass_ = "forward"
                _wait(group)
                for ahead in self._next.get(event.unit, ()):
                    _gather(ahead)
                continue
            if event.unit != ROOT and self._reshards:
                group.is_whole, group.is_near = False, self._reshards is not True
            group.places.append(len(self._order))
            self._order.append(group)
            group.pass_ = ""

    def backward(self, events: Iterable[Event], dials: Dials) -> None:
        """A backward pass."""
        for event in (Event("back", ROOT), *events):
            group = self.groups.get(event.unit)
            if group is None:
                continue
            if event.what == "done":
                _reduce(group, dials)
                continue
            told = self._before.get(event.unit)
            if group.pass_ != "before":
                group.pass_ = "before"
                _wait(group)
                if not told and group.places and (place := group.places.pop()):
                    _gather(self._order[place - 1])  # ahead of its use
            for ahead in told or ():
                _gather(ahead)
        self.end(dials)

    def end(self, dials: Dials) -> None:
        """What has not gone backward is reduced now; so is everything behind a pipeline's last pass."""
        for group in self.groups.values():
            if group.pass_ != "behind":  # whose inputs have no gradient
                _reduce(group, dials)
            group.pass_ = ""
            if dials.is_last:
                group.is_coming = False
                group.places.clear()
        if dials.is_last:
            self._order.clear()


def _gather(group: Group) -> None:
    if not (group.is_whole or group.is_coming):
        group.gathers += not group.is_near
        group.gathers_of_part += group.is_near
        group.is_coming = True


def _wait(group: Group) -> None:
    _gather(group)
    group.is_whole, group.is_near, group.is_coming, group.was_whole = True, False, False, True


def _reduce(group: Group, dials: Dials) -> None:
    group.pass_ = "behind"
    if dials.reshards:
        group.is_whole = group.is_near = False
    if dials.reduces and group.was_whole:
        group.reductions += 1
        group.sums += dials.sums_replicas
