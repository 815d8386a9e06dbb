"""What a micro-batch takes of the ranks of a model, by the estimators' kernels: what bounds of time are made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from operator import le
from typing import NamedTuple

from shardwise.model.profile import Block
from shardwise.plan.ranks.activations import GATHERED
from shardwise.plan.ranks.imbalance import busiest_block, factor_of
from shardwise.plan.searching.families import Core
from shardwise.plan.searching.space import Space
from shardwise.plan.stack import Stack
from shardwise.plan.time_terms.blocktime import block_time
from shardwise.plan.time_terms.setting import Setting
from shardwise.plan.time_terms.simulate import Costs

Upto = tuple[float, ...]
"""A sum over the blocks before each block, and over all of them."""
Flight = tuple[tuple[int, ...], bool]
"""Micro-batches in flight on each stage of a rank; whether what they keep is offloaded."""
Cut = tuple[list[tuple[int, int]], bool, frozenset[int]]
"""First and end of each stage of a rank, whether it holds the head, and the numbers of its distinct blocks."""
Floor = tuple[float, ...]
"""States of a spread: bytes of each of some ranks in the loss, with what gradients are there before the first
backward pass; then of each in that pass."""


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """What one micro-batch takes of the ranks of one `tp x cp` group, through the whole model."""

    busy: Upto
    """Seconds."""
    forwards: Upto
    """Those of forward passes."""
    head: float
    head_forward: float
    lag: float
    """Those by which hosts are behind devices in all blocks' backward passes: at most so many hide behind the head."""
    least: float
    """The least share of a block's time, or of the head's, that is its forward pass; and the most."""
    most: float
    weights: Upto
    """Seconds of the backward passes that make gradients of weights, where no block is recomputed."""
    head_weight: float
    again: tuple[float, ...]
    """Seconds that each policy of `Space.recomputes` adds."""
    repeats: tuple[Mapping[int, float], Mapping[int, float]]
    """Seconds that repeating a distinct block adds, by its `id`: all of it, and its cheap operators alone."""


class RankWork(NamedTuple):
    """Seconds of a micro-batch on one rank of the pipeline: without recompute, and what that adds."""

    busy: float
    again: float
    first: float
    """Those of its first stage."""
    first_again: float
    first_forward: float


def work_of(
    core: Core, stack: Stack, space: Space, blocks: list[tuple[Block, int]], recomputed: list[Counter[int]]
) -> Work:
    """What a core's kernels, and the communication inside of blocks, take.

    `stack`: as it runs them; `blocks`: distinct ones, with how many there are; `recomputed`: for each policy, how often
    it recomputes each.
    """
    plain = "bf16" if core.precision == "bf16-pure" else core.precision
    dtype = space.workload.compute or ("fp8" if core.float8 != "none" else plain)
    seen = (
        dtype,
        core.sequence,
        core.context,
        space.workload.trained < 1,
        stack.keeps_shards and core.precision in GATHERED and core.world > 1,  # other engines: at zero 3 alone
    )
    setting = Setting(space.cluster, stack, core.axes, *seen, adapters=space.workload.adapters)
    shape = (core.samples, space.workload.seq_len)
    factor = factor_of(space.workload, core.ep)
    times = {id(block): block_time(busiest_block(block, factor), shape, setting) for block, _ in blocks}
    hooked = replace(setting, gathers=True)  # the host is behind by most where some `zero` shards in this type too
    lags = {id(block): block_time(busiest_block(block, factor), shape, hooked).lag for block, _ in blocks}
    chain = [times[id(block)] for block in space.profile.blocks]
    end = block_time(space.profile.head, shape, setting)
    again = tuple(
        sum(count * times[key].again(recompute.mode) for key, count in counts.items())
        for recompute, counts in zip(space.recomputes, recomputed, strict=True)
    )
    shares = [time.forward / (time.forward + time.backward) for time in (*times.values(), end) if time.forward]
    return Work(
        busy=tuple(accumulate([time.forward + time.backward for time in chain], initial=0.0)),
        forwards=tuple(accumulate([time.forward for time in chain], initial=0.0)),
        head=end.forward + end.backward,
        head_forward=end.forward,
        lag=sum([lags[id(block)] for block in space.profile.blocks]),
        least=min(shares),
        most=max(shares),
        weights=tuple(accumulate([time.weight for time in chain], initial=0.0)),
        head_weight=end.weight,
        again=again,
        repeats=({key: time.whole for key, time in times.items()}, {key: time.light for key, time in times.items()}),
    )


def rank_works(work: Work, again: Upto, cut: Iterable[Cut]) -> list[RankWork]:
    """Of each rank of a pipeline; `again`: seconds that recompute adds, before each block."""
    busy, found = work.busy, []
    for stages, last, _ in cut:
        start, end = stages[0]
        found.append(
            RankWork(
                sum([busy[end] - busy[start] for start, end in stages]) + (work.head if last else 0.0),
                sum([again[end] - again[start] for start, end in stages]),
                busy[end] - busy[start],
                again[end] - again[start],
                work.forwards[end] - work.forwards[start],
            )
        )
    return found


def stage_costs(work: Work, again: Upto, marks: Sequence[bool], cut: Iterable[Cut], loss: float) -> Costs:
    """What a micro-batch takes of each stage of a pipeline.

    `again`: as in `rank_works`; `marks`: which blocks are recomputed, whose gradients of weights come with those of
    their inputs; `loss`: seconds of the cross entropy, each way.
    """
    weights = zip(marks, pairwise(work.weights), strict=True)
    grads = tuple(accumulate((0.0 if on else after - before for on, (before, after) in weights), initial=0.0))
    places = sorted(each for stages, *_ in cut for each in stages)

    def of_stages(upto: Upto, more: float) -> list[float]:
        sums = [upto[end] - upto[start] for start, end in places]
        return [*sums[:-1], sums[-1] + more]

    forward, both = of_stages(work.forwards, work.head_forward + loss), of_stages(work.busy, work.head + 2 * loss)
    repeated, lazy = of_stages(again, 0.0), of_stages(grads, work.head_weight)
    rows = zip(forward, both, repeated, lazy, strict=True)
    return Costs.of_stages(forward, [max(0.0, all_ + more - ahead - late) for ahead, all_, more, late in rows], lazy)


def lowest(floors: Iterable[Floor]) -> list[Floor]:
    """Without those that another is nowhere above."""
    found: list[Floor] = []
    for floor in dict.fromkeys(floors):
        if not any(all(map(le, other, floor)) for other in found):
            found = [other for other in found if not all(map(le, floor, other))] + [floor]
    return found
