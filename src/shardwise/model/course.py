"""What a step of a module was seen to hold, moment by moment, as data. No torch."""

from __future__ import annotations

from typing import NamedTuple

DRAWN = 1 << 16
"""Elements whose random bits are there at once on a CPU: `shardwise.parallel.randomness.counter.CPU_CHUNK`."""


class Held(NamedTuple):
    """Bytes that live at one moment of a step."""

    per_token: float = 0.0
    once: float = 0.0
    """Whatever the number of rows: masks, positions, what is made of a weight."""
    gradients: float = 0.0
    """Elements of the gradients of the phase's own parameters that its backward pass has made so far."""
    fresh: float = 0.0
    """Those of them that are not added to their parameter's yet."""
    drawn: float = 0.0
    """Random numbers of 8 bytes per token, in two buffers, of which a CPU makes `DRAWN` each at a time."""
    squared: float = 0.0
    """Per pair of tokens of the micro-batch: where every row meets every other (places of tokens with experts, scores
    of each text with each picture)."""
    given: float = 0.0
    """Per token, of the bytes above: gradients that the phase behind it made. Of a pipeline's last block they lie in a
    receive buffer."""

    def size(self, tokens: float) -> float:
        """Bytes of so many tokens, without gradients."""
        drawn = 8 * min(self.drawn * tokens, 2 * DRAWN)
        return (self.per_token + self.squared * tokens) * tokens + self.once + drawn


class Course(NamedTuple):
    """What a phase of a step (a block, what is before or behind the blocks) was seen to hold, kernel by kernel."""

    kept: Held
    """From its forward to its backward pass."""
    forward: tuple[Held, ...]
    """Moments of its forward pass of which one is the largest, whatever the batch. Less what was kept before it."""
    backward: tuple[Held, ...]
    """Those of its backward pass."""
    left: Held = Held()
    """The same where blocks are recomputed: what others are given, and what is kept outside of them."""
    again: tuple[Held, ...] = ()
    """Moments of a forward pass that a recomputed block runs again: those within it, but for its last operation."""
    shared: tuple[Held, Held] = (Held(), Held())
    """Of what runs before the blocks, the parts of `kept` and of `left` that blocks after the first are given, without
    a gradient (masks, tables of positions): each stage of a pipeline makes them for itself."""


class Seen(NamedTuple):
    """Of which step a course is."""

    width: float
    """Bytes of an element of what is computed with."""
    recomputed: bool = False
    """Blocks are recomputed operator by operator."""


Courses = tuple[tuple[Seen, Course], ...]
