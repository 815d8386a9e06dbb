"""A block's parameters one by one, where a moment of a step is decided by single ones. See `kernels.py`."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.model.profile import Block
from shardwise.plan.ranks.division import Division
from shardwise.plan.ranks.engines import CAST_TOGETHER
from shardwise.plan.updating import matrices


def tensors_of(block: Block) -> Sequence[float]:
    """Elements of each parameter of a block that gets a gradient; of sizes alone those of its small ones in one."""
    if block.tensors:
        return block.tensors
    stacks = [op.params / (1 + op.name.endswith("-up")) for op in block.matmuls if op.experts]  # gate and up are one
    large = [*(matrix.num_params for matrix in matrices(block)), *stacks, *stacks[:-1]]
    return *large, block.params - sum(large)


def last_of(block: Block, division: Division) -> float:
    """Elements on a rank of the last parameter of a block that gets a gradient; of a table its only one.

    Of a head it is the last one outside of blocks.
    """
    axes = division.plan.axes
    if block.tensors and axes.tp == axes.ep == 1:
        return block.tensors[-1]
    own = [op for op in block.matmuls if op.trained]
    if not own:
        return 0.0 if block.frozen else division.dense(block)
    last, tied = own[-1], block is division.profile.head and division.profile.tied
    if last.biased or tied:
        return 0.0  # a bias, or a norm, is small
    if last.experts:
        return last.params / division.expert_split
    return last.params / (axes.tp if last.split in ("column", "row") else 1)


def widening(tensors: Sequence[float], narrow: float, wide: float, *, accumulates: bool) -> float:
    """Bytes of a unit's gradients, most at once, while they come back into their parameters' type.

    One by one from the last to the first, and then the small ones together, as `parallel.engines.casts` casts them.

    Args:
        tensors: elements of each.
        narrow: bytes of an element as it was made.
        wide: and as its parameter has it.
        accumulates: each is then added to one that is there.

    >>> widening([100, 200], 2, 4, accumulates=False), widening([1 << 20, 1 << 20], 2, 4, accumulates=True) / (1 << 20)
    (1800.0, 8.0)
    """
    small = [size for size in tensors if size <= CAST_TOGETHER]
    apart = [size for size in tensors if size > CAST_TOGETHER] if len(small) > 1 else tensors
    left, done, worst = sum(tensors), 0.0, 0.0
    for size in (*reversed(apart), sum(tensors) - sum(apart)):
        done = size if accumulates else done + size
        worst = max(worst, left * narrow + done * wide)
        left -= size
    return worst
