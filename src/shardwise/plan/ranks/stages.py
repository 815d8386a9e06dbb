"""Stages of a pipeline: where a chain of blocks is cut, and which rank has which."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from math import inf

from shardwise.errors import PlanError
from shardwise.model.ops import Attention, Matmul
from shardwise.model.profile import Block, Profile
from shardwise.plan.plan import V_SHAPED, Schedule


@dataclass(frozen=True)
class Stage:
    """Neighbouring blocks of the chain, with the embedding before the first and the head after the last."""

    blocks: tuple[Block, ...]
    start: int
    """Index of its first block in the chain."""
    first: bool
    last: bool
    given: float = 0.0
    """Elements per token that the stage before it sends it: a stream, and what blocks hand on beside it."""
    handed: float = 0.0
    """Those that it sends on."""

    @cached_property
    def counts(self) -> tuple[tuple[Block, int], ...]:
        """Its distinct blocks, with how many there are of each."""
        return tuple(Counter(self.blocks).items())


STAGES = 8
"""The most stages on a rank that looped schedules are tried with."""
Ranks = tuple[tuple[Stage, ...], ...]
"""Stages of each rank of the `pp` axis, in the order of the chain."""


@lru_cache(maxsize=4096)
def stages_of_ranks(profile: Profile, pp: int, schedule: Schedule, rule: str, seq_len: int) -> Ranks:
    """Cut once per profile and pipeline: layouts of the other axes share the stages."""
    turns = schedule.stages if pp > 1 else 1
    count = pp * turns
    if pp > 1 and schedule.boundaries:
        cuts = _given(profile.blocks, schedule.boundaries, count)
    else:
        cuts = cut(profile, count, rule, seq_len)
    stages, start = [], 0
    streams = [*(block.width + block.beside for block in profile.blocks), profile.head.width]
    for i, part in enumerate(cuts):
        here, end = tuple(part) if i == 0 else tuple(block.through or block for block in part), start + len(part)
        given, handed = (streams[start] if i else 0.0), (streams[end] if i < count - 1 else 0.0)
        stages.append(Stage(here, start, i == 0, i == count - 1, given, handed))
        start = end
    if turns > 1 and schedule.kind in V_SHAPED:
        return tuple((stages[r], stages[count - 1 - r]) for r in range(pp))
    return tuple(tuple(stages[r + pp * turn] for turn in range(turns)) for r in range(pp))


@lru_cache(maxsize=4096)
def alike_ranks(profile: Profile, pp: int, schedule: Schedule, rule: str, seq_len: int) -> tuple[int, ...]:
    """For each rank the first one that holds the same blocks and ends of the chain."""
    firsts: dict[tuple[object, ...], int] = {}
    ranks = enumerate(stages_of_ranks(profile, pp, schedule, rule, seq_len))
    held = ((rank, tuple((stage.counts, stage.first, stage.last) for stage in stages)) for rank, stages in ranks)
    return tuple(firsts.setdefault(key, rank) for rank, key in held)


def _given(blocks: Sequence[Block], boundaries: Sequence[str], stages: int) -> list[Sequence[Block]]:
    """The stages that the plan's boundaries make: the last number of a block's name is its place in the chain."""
    numbers = [re.findall(r"[0-9]+", name) for name in boundaries]
    starts = [0, *(int(found[-1]) if found else -1 for found in numbers)]
    if len(starts) != stages or any(a >= b for a, b in pairwise([*starts, len(blocks)])):
        raise PlanError(
            f"pipeline: boundaries: found {', '.join(boundaries)} for {stages} stages of {len(blocks)} blocks; needed "
            "the first block of each stage but the first, in order; change them"
        )
    return [blocks[a:b] for a, b in pairwise([*starts, len(blocks)])]


def cut(profile: Profile, stages: int, rule: str = "even", seq_len: int = 0) -> list[Sequence[Block]]:
    """Blocks on stages.

    `balanced`: the most even split by operations in sequences of `seq_len`, the head's counted on the last block.
    `greedy`: each stage takes blocks until it has its share of the parameters met per token. `even`: by number; where
    that does not divide, embedding and head count as a block each.

    >>> from shardwise.model.profile import profile_of
    >>> from shardwise.model.spec import preset
    >>> profile = profile_of(preset("llama-1b"))
    >>> [len(part) for part in cut(profile, 5)], [len(part) for part in cut(profile, 4, "balanced", 4096)]
    ([3, 4, 3, 3, 3], [5, 5, 5, 1])
    """
    blocks, count = profile.blocks, len(profile.blocks)
    if rule == "balanced" and stages <= count:
        costs = [counted_flops(block, seq_len) for block in (profile.even or profile).blocks]
        costs[-1] += counted_flops(profile.head, seq_len)
        starts = split_evenly(tuple(costs), stages)
        return [blocks[a:b] for a, b in zip(starts, (*starts[1:], count), strict=True)]
    if rule == "greedy" and stages <= count:
        return _greedy(blocks, stages, profile.head.params)
    ends = 0 if count % stages == 0 or stages <= count < 2 * stages - 2 else 1  # each end gives up a block
    size, spare = divmod(count + 2 * ends, stages)
    sizes = [size + (1 <= i <= spare if ends else i < spare) for i in range(stages)]
    sizes[0] -= ends
    sizes[-1] -= ends
    ends_at = list(accumulate(sizes))
    return [blocks[end - size : end] for size, end in zip(sizes, ends_at, strict=True)]


def counted_flops(block: Block, seq_len: int) -> float:
    """Forward operations of a block per token as torch's counter has them: with every score, masked or not.

    Pipelines are cut by them (`parallel.pipeline.first_blocks` counts the forward itself).
    """
    total = 0.0
    for op in block.ops:
        if isinstance(op, Matmul):
            total += 2.0 * op.ins * op.made
        elif isinstance(op, Attention):
            total += 2.0 * op.rows * op.heads * (op.qk_dim + op.v_dim) * seq_len * op.reach
    return total


def _greedy(blocks: Sequence[Block], stages: int, head: float) -> list[Sequence[Block]]:
    share = (sum(block.met_params for block in blocks) + head) / stages
    starts, met = [0], 0.0
    for i, block in enumerate(blocks):
        if met >= share * len(starts) and len(starts) < stages:
            starts.append(i)
        met += block.met_params
    starts += [len(blocks)] * (stages - len(starts))  # the last stages hold the head alone, or nothing
    return [blocks[a:b] for a, b in zip(starts, (*starts[1:], len(blocks)), strict=True)]


@lru_cache(maxsize=4096)
def split_evenly(costs: tuple[float, ...], num_parts: int) -> tuple[int, ...]:
    """Start of each part of the contiguous split whose largest part is smallest; ties: the smallest sum of squares.

    Cost: items^2 x log(parts); 3 ms for 126 blocks on 32 stages.

    >>> split_evenly((1, 1, 1, 1, 1, 1, 3), 3)
    (0, 3, 6)
    """
    total: list[float] = [0]
    for cost in costs:
        total.append(total[-1] + cost)
    # best[end]: (largest part, sum of squares, starts but the last, the last) of the items before `end`
    best: dict[int, tuple[float, float, tuple[int, ...], int]]
    best = {end: (total[end], total[end] ** 2, (), 0) for end in range(1, len(costs) + 1)}
    for part in range(1, num_parts):
        known, best = best, {}
        for end in range(part + 1, len(costs) + 1):
            least: tuple[float, float, tuple[int, ...], int] = inf, inf, (), 0
            for start in range(end - 1, part - 1, -1):
                own = total[end] - total[start]
                if own > least[0]:
                    break  # parts that begin sooner are larger still
                largest, squares, starts, last = known[start]
                found = max(largest, own), squares + own**2
                if found <= least[:2]:
                    least = min(least, (*found, (*starts, last), start))
            best[end] = least
    _, _, starts, last = best[len(costs)]
    return (*starts, last)


def loops_of(blocks: int, pp: int) -> list[int]:
    """Stages on a rank that looped schedules are tried with: divisors of its blocks, powers of two, up to `STAGES`.

    Of blocks that `pp` does not divide, the rank with most of them counts.

    >>> loops_of(48, 4), loops_of(126, 16)
    ([2, 3, 4, 6, 8], [2, 4])
    """
    least, most = blocks // pp, -(-blocks // pp)
    divides = {number for number in range(2, STAGES + 1) if most % number == 0}
    return [number for number in sorted(divides | {2, 4, 8}) if number <= least]
