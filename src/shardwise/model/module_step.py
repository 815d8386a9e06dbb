"""`ModuleStep`: what a module does in one step on one process, as data, whatever the plan. No torch.

What ranks send in a step of a module follows from it: which parameters there are, when its parts are called and go
backward, in which order gradients are there, and what passes from block to block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

BEFORE = -1
"""The place of what is before the blocks; what is behind them has the number of blocks as its place."""
EVERYWHERE = -2
"""The place of what runs between two blocks: every stage of a pipeline does it."""


class Held(NamedTuple):
    """A parameter."""

    names: tuple[str, ...]
    """All that it goes by, the first one first."""
    shape: tuple[int, ...]
    trained: bool
    places: tuple[int, ...]
    """Numbers of the blocks that use it, `BEFORE`, or the number of blocks."""


class Event(NamedTuple):
    """Something that happens to a unit: it is called, returns, goes backward, or has gone."""

    what: Literal["call", "return", "back", "done"]
    unit: int


class Norm(NamedTuple):
    """Passes of a batch norm, which sums over ranks twice in each."""

    place: int
    channels: int
    forward: int
    backward: int


class Passed(NamedTuple):
    """A tensor that goes from one block to the next."""

    num_bytes: int
    has_gradient: bool


@dataclass(frozen=True, kw_only=True)
class ModuleStep:
    """One micro-batch of a module."""

    blocks: tuple[str, ...]
    units: tuple[str, ...]
    """The modules whose parameters are gathered together, inner ones first: its blocks, or modules of a size."""
    held: tuple[Held, ...]
    """Parameters in the order in which they are registered."""
    ready: tuple[int, ...]
    """Numbers of those that get a gradient, in the order in which they do."""
    forward: tuple[Event, ...]
    backward: tuple[Event, ...]
    norms: tuple[Norm, ...] = ()
    draws: bool = False
    """It draws at random: ranks number their rows, by which draws are keyed."""
    costs: tuple[int, ...] = ()
    """Of each block, by which a pipeline is cut; empty: it was not asked for."""
    passed: tuple[tuple[Passed, ...], ...] = ()
    """From each block to the next one; empty: it was not asked for."""
