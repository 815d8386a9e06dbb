"""What blocks keep of a micro-batch, in tables for bounds of memory: by recompute policy. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from shardwise.model.profile import Block
from shardwise.plan.eager.kernels import deferred_in, head_kept, local_of
from shardwise.plan.memory_terms.passing import behind_loss
from shardwise.plan.plan import Axes, Plan, Recompute, Tensor
from shardwise.plan.ranks.activations import kept_bytes, saved_bytes
from shardwise.plan.searching.bounds_work import Cut, Flight, Upto
from shardwise.plan.searching.families import Core, Flow
from shardwise.plan.searching.space import Space
from shardwise.plan.updating import OWN


class KeptBytes(NamedTuple):
    """Bytes per token of a micro-batch: for each recompute policy, but for `blocks`."""

    upto: list[Upto]
    """Kept up to each block."""
    steps: list[list[float]]
    """Kept of each block."""
    blocks: list[float]
    """Of each distinct block in full."""
    waiting: list[Upto]
    """Gradients up to each block that wait for the weights' part of a backward pass."""
    marks: Sequence[Sequence[bool]]
    """Which blocks it recomputes."""
    eager: bool
    """What a block kept that is computed again is part of what it has then."""


Passes = tuple[tuple[float, float, Sequence[bool], Sequence[bool]], ...]
"""When backward passes begin: bytes that micro-batches keep; logits; for each stage whether it has gradients, and
whether it has micro-batches."""


class Given(NamedTuple):
    """Bytes on a rank: of all gradients, and of weights that are gathered."""

    gradients: float
    gathered: float
    shares: Sequence[float]
    """Its stages' shares of its parameters."""
    goes: bool
    """A stage gives back what it has when its last micro-batch has gone backward; a single one does block by block."""
    by_block: bool
    """Gathered is a block, of whatever stage."""

    def at_least(self, accumulates: bool) -> tuple[float, float]:
        """Of both, what is there while a block goes backward, whichever it is; and at some moment, beside no block."""
        if not self.goes or (accumulates and len(self.shares) == 1):
            return (self.gradients + self.gathered,) * 2
        if not accumulates:
            return self.gathered, max(self.gradients, self.gathered)
        stays = self.gathered * self.by_block
        goes = self.gradients + self.gathered - stays
        return stays + goes * min(self.shares), stays + goes * max(self.shares)

    def when(self, made: Sequence[bool], left: Sequence[bool]) -> float:
        """Of both, what is there of stages that have gradients, and of those that have micro-batches left."""
        here = [float(share * (rest or not self.goes)) for share, rest in zip(self.shares, left, strict=True)]
        given = sum([share for share, there in zip(here, made, strict=True) if there])
        return self.gradients * given + self.gathered * (sum(here) if self.goes and not self.by_block else 1.0)


def full_sizes(
    space: Space, core: Core, blocks: Sequence[tuple[Block, int]], *, compiled: bool = True
) -> dict[int, float]:
    """Bytes per token that each distinct block keeps of a micro-batch, by its `id`."""
    return {id(block): saved_bytes(block, space.saving(core, compiled=compiled)) for block, _ in blocks}


def bytes_kept(
    space: Space,
    core: Core,
    blocks: Sequence[tuple[Block, int]],
    every_mark: Sequence[Sequence[bool]],
    *,
    compiled: bool,
) -> KeptBytes:
    """The tables of a core.

    Args:
        space: of the question.
        core: whose kernels keep them.
        blocks: distinct ones, with how many there are.
        every_mark: for each policy, which blocks it recomputes.
        compiled: whether blocks are, of its plans that compile.
    """
    full, how = full_sizes(space, core, blocks, compiled=compiled), space.saving(core, compiled=compiled)
    less = {
        mode: {id(block): kept_bytes(block, 0, Plan(recompute=Recompute(mode=mode)), how) for block, _ in blocks}
        for mode in ("ops", "blocks")
    }
    keys = [id(block) for block in space.profile.blocks]
    steps = []
    for recompute, marks in zip(space.recomputes, every_mark, strict=True):
        part = less["ops" if recompute.mode == "ops" else "blocks"]
        steps.append([part[key] if on else full[key] for key, on in zip(keys, marks, strict=True)])
    upto = [tuple(accumulate(sizes, initial=0.0)) for sizes in steps]
    plan = Plan(axes=Axes(tp=core.tp), precision=core.precision, tensor=Tensor(sequence=core.sequence))
    late = {id(block): deferred_in(block, local_of(plan)) for block, _ in blocks}
    waits = [[0.0 if on else late[key] for key, on in zip(keys, marks, strict=True)] for marks in every_mark]
    waiting = [tuple(accumulate(sizes, initial=0.0)) for sizes in waits]
    return KeptBytes(upto, steps, [full[id(block)] for block, _ in blocks], waiting, every_mark, space.stack.eager)


def kept_by(
    kept: KeptBytes, policy: int, cut: Cut, flight: Flight, late: Sequence[int] = ()
) -> tuple[float, float, float]:
    """Bytes per token of a rank with so many micro-batches in flight; of a block computed again; of its largest.

    `flight` counts them for each stage, `late` those whose weights wait for gradients. Where it offloads they are
    on the host, but for those of the block at work and of the one ahead of it.
    """
    (stages, _, distinct), (counts, offload), upto, steps = cut, flight, kept.upto[policy], kept.steps[policy]
    block, size, waiting = max([kept.blocks[n] for n in distinct], default=0.0), 0.0, kept.waiting[policy]
    for (start, end), count in zip(stages, counts, strict=False):
        size += count * (upto[end] - upto[start])
    for (start, end), count in zip(stages, late, strict=False):
        size += count * (waiting[end] - waiting[start])
    if offload:
        size = min(size, 2 * max([max(steps[start:end], default=0.0) for start, end in stages]))
    marks = kept.marks[policy]  # what others keep has gone by the last block's turn; and no more is sure
    ends = [end - 1 for start, end in stages if end > start and marks[end - 1]]
    last = max([kept.steps[0][end] - steps[end] * kept.eager for end in ends], default=0.0)
    return size, last, block


def head_in(cut: Cut) -> int:
    """Which stage of the rank that holds the head is the last of all."""
    return max(range(len(cut[0])), key=lambda turn: (cut[0][turn][1], turn))


def in_passes(passes: Passes, again: float, given: Given) -> float:
    """The most when a backward pass begins, beside states; `again`: of a block that is computed again."""
    return max(
        [before + max(again, logits) + given.when(made, left) for before, logits, made, left in passes], default=0.0
    )


def waits_at_loss(space: Space, flow: Flow, cut: Cut, alive: Sequence[int], late: Sequence[int] = ()) -> float:
    """Bytes per token behind the loss of micro-batches that wait on the rank that has it, if they are on the device."""
    core, turn, profile = flow.pipe.core, head_in(cut), space.profile
    if not cut[1] or flow.offload or flow.pipe.pp == 1 or space.stack.name not in OWN:
        return 0.0
    vocab, waiting = profile.vocab / (core.tp if core.loss else 1), (alive[turn], late[turn] if late else 0)
    if not space.stack.eager:
        return behind_loss(waiting, vocab, profile.dim, core.width)
    kept = max(0, waiting[0] - 1) * head_kept(profile.head, core.width)  # less where it takes a part of the tokens
    late_ones = waiting[1] * (profile.vocab / core.tp + profile.dim) * core.width
    return kept + late_ones + behind_loss((waiting[0] - waiting[1], 0), vocab, 0, core.width)
