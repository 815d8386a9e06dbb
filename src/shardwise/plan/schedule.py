"""Pipeline schedules as data: the order of work of every rank, and the activations that it keeps alive.

    actions(kind, ranks, stages per rank, micro-batches) -> table -> simulate (time), in_flight (memory)

The tables are those of torch 2.13's schedules, action by action, which is tested; torch is not needed for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from shardwise.errors import PlanError
from shardwise.plan.plan import LOOPED, SCHEDULES, V_SHAPED, ZERO_BUBBLE, Plan
from shardwise.plan.rows.pipeline import micro_batches_fit


class Action(NamedTuple):
    """One piece of work of a rank: `F`, `B` (whole backward), `I` (to the inputs) or `W` (to the weights)."""

    work: str
    stage: int
    micro_batch: int
    overlapped: bool = False
    """A forward that is one action of torch's with the backward after it: both are sent when both are done."""

    def __str__(self) -> str:
        return f"{self.stage}{self.work}{self.micro_batch}"


ActionTable = Sequence[Sequence[Action]]
"""Per rank, its actions in the order in which it runs them."""

_Words = Iterator[tuple[str, int, bool]]
"""Work, turn (which of the rank's stages, ascending) and overlap, in order; micro-batches are counted afterwards."""


class _Shape(NamedTuple):
    ranks: int
    turns: int
    micro_batches: int


def stages_of(kind: str, rank: int, num_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Stages on a rank, ascending: `rank, rank + pp, ...` in a loop, `rank` and `2 pp - 1 - rank` in a V.

    >>> stages_of("zero-bubble-v", 0, 4, 2)
    (0, 7)
    """
    if kind in V_SHAPED:
        return (rank, 2 * num_ranks - 1 - rank)
    return tuple(rank + num_ranks * turn for turn in range(stages_per_rank))


@lru_cache(maxsize=64)
def actions(kind: str, ranks: int, stages_per_rank: int, micro_batches: int) -> ActionTable:
    """What each rank does, in order, as torch's schedule of this kind runs it.

    Args:
        kind: one of `shardwise.plan.plan.SCHEDULES`.
        ranks: size of the pp axis.
        stages_per_rank: 1 for gpipe and 1f1b, 2 for V-shaped schedules, 1 or more for the other looped ones.
        micro_batches: micro-batches per step.

    Raises:
        PlanError: torch's schedule does not take this combination.

    Cost: linear in the number of actions (about a microsecond each); tables are kept.

    >>> [str(action) for action in actions("1f1b", 2, 1, 2)[1]]
    ['1F0', '1B0', '1F1', '1B1']
    """
    _refuse_what_torch_refuses(kind, ranks, stages_per_rank, micro_batches)
    shape, words = _Shape(ranks, stages_per_rank, micro_batches), _WORDS[kind]
    table = []
    for rank in range(ranks):
        stages = stages_of(kind, rank, ranks, stages_per_rank)
        row = _numbered(words(rank, shape), stages)
        if kind == "looped-bfs":  # its backwards go from the last micro-batch to the first
            row = (a if a.work == "F" else a._replace(micro_batch=micro_batches - 1 - a.micro_batch) for a in row)
        table.append(tuple(action for action in row if action.micro_batch < micro_batches))
    return tuple(table)


def table_of(plan: Plan) -> ActionTable:
    """The action table of a plan. Raises `PlanError` for a plan without a pipeline."""
    if plan.axes.pp == 1:
        raise PlanError(f"schedule: the plan `{plan}` has no pipeline (pp is 1), so there is nothing to draw; add pp2")
    return actions(plan.schedule.kind, plan.axes.pp, plan.schedule.stages, plan.batch.micro_batches)


def _refuse_what_torch_refuses(kind: str, ranks: int, stages_per_rank: int, micro_batches: int) -> None:
    needed = 2 if kind in V_SHAPED else 1
    if kind not in SCHEDULES:
        why = f"it has no such schedule; the kinds are {', '.join(SCHEDULES)}"
    elif min(ranks, stages_per_rank, micro_batches) < 1:
        why = "each of them must be at least 1"
    elif (kind in V_SHAPED or kind not in LOOPED) and stages_per_rank != needed:
        why = f"{kind} puts {needed} stage{'s' if needed > 1 else ''} on a rank"
    elif not micro_batches_fit(kind, ranks, micro_batches):
        why = f"{kind} over {ranks} ranks does not run with {micro_batches} micro-batches"
    else:
        return
    raise PlanError(
        f"schedule {kind}: torch refuses {ranks} ranks x {stages_per_rank} stages with {micro_batches} "
        f"micro-batches: {why}. Change mb, pp or the stages per rank"
    )


def _numbered(words: _Words, stages: Sequence[int]) -> Iterator[Action]:
    """Micro-batches in their order, counted for each stage and direction; a whole backward counts as both halves."""
    forwards, inputs, weights = [0] * len(stages), [0] * len(stages), [0] * len(stages)
    for work, turn, overlapped in words:
        counter = forwards if work == "F" else weights if work == "W" else inputs
        yield Action(work, stages[turn], counter[turn], overlapped)
        counter[turn] += 1
        if work == "B":
            weights[turn] += 1


# ---------------------------------------------------------------- the kinds


def _gpipe(rank: int, shape: _Shape) -> _Words:
    """All forwards, all backwards (Huang et al., arXiv:1811.06965)."""
    yield from [("F", 0, False)] * shape.micro_batches
    yield from [("B", 0, False)] * shape.micro_batches


def _one_forward_one_backward(rank: int, shape: _Shape) -> _Words:
    """As many forwards as there are stages behind, then pairs (Narayanan et al., arXiv:2006.09503)."""
    ahead = shape.ranks - 1 - rank
    yield from [("F", 0, False)] * ahead
    yield from [("F", 0, False), ("B", 0, False)] * (shape.micro_batches - ahead)
    yield from [("B", 0, False)] * ahead


def _looped_bfs(rank: int, shape: _Shape) -> _Words:
    """GPipe, stage after stage (Lamy-Poirier, arXiv:2211.05953)."""
    for turn in range(shape.turns):
        yield from [("F", turn, False)] * shape.micro_batches
    for turn in reversed(range(shape.turns)):
        yield from [("B", turn, False)] * shape.micro_batches


def warmup(rank: int, shape: tuple[int, int, int], hops: int) -> int:
    """Forwards of an interleaved schedule before a rank's first backward; shape: ranks, stages per rank, micro-batches.

    `hops` more for each rank between this one and the last: 2 for interleaved, 1 for zero-bubble.
    """
    ranks, turns, micro_batches = shape
    return min(turns * micro_batches, (turns - 1) * _round(ranks, micro_batches) + hops * (ranks - 1 - rank))


def _round(ranks: int, micro_batches: int) -> int:
    """Micro-batches that pass through one stage of a rank before its next stage has its turn."""
    return micro_batches // max(1, micro_batches // ranks)


def _interleaved(rank: int, shape: _Shape) -> _Words:
    """1F1B over several stages per rank, in rounds of micro-batches (Narayanan et al., arXiv:2104.04473)."""
    return _rounds(rank, shape, 2, None)


def _zero_bubble(rank: int, shape: _Shape) -> _Words:
    """Interleaved with split backwards, weights `rank` backwards later: ZB1P of Qi et al., arXiv:2401.10241."""
    return _rounds(rank, shape, 1, rank)


def _rounds(rank: int, shape: _Shape, hops: int, lag: int | None) -> _Words:
    size, turns = _round(shape.ranks, shape.micro_batches), shape.turns
    total, ahead = turns * shape.micro_batches, warmup(rank, shape, hops)
    forward = [step // size % turns for step in range(total)]
    backward = [turns - 1 - turn for turn in forward]
    yield from (("F", turn, False) for turn in forward[:ahead])
    for step, turn in enumerate(backward):
        if step < total - ahead:
            yield "F", forward[ahead + step], False
        yield "B" if lag is None else "I", turn, False
        if lag is not None and step >= lag:
            yield "W", backward[step - lag], False
    if lag:
        yield from (("W", turn, False) for turn in backward[max(0, total - lag) :])


def _zero_bubble_v(rank: int, shape: _Shape) -> _Words:
    """ZB-V of Qi et al., arXiv:2401.10241, section 6: written for 2 pp - 1 micro-batches or more, cut for fewer."""
    down, up = (
        {work: (work, turn, False) for work in "FIW"} for turn in (0, 1)
    )  # the stage on the way down the V, and on the way up
    ranks, count = shape.ranks, max(2 * shape.ranks - 1, shape.micro_batches)
    yield from [down["F"]] * (2 * (ranks - rank) - 1)
    yield from [up["F"], down["F"]] * rank
    yield from [up["F"], up["I"], up["W"]] * (ranks - rank)
    started = 2 * ranks - rank - 1
    for step in range(count - ranks):
        if step < count - started:
            yield down["F"]
        yield from (down["I"], down["W"], up["F"], up["I"], up["W"])
    yield from [down["I"], up["I"]] * rank
    yield from [down["I"], down["W"]] * (ranks - rank)
    yield from [up["W"]] * rank
    yield from [down["W"]] * rank


def _dualpipe_v(rank: int, shape: _Shape) -> _Words:
    """DualPipe (DeepSeek-V3, arXiv:2412.19437) folded into a V; its steady part pairs forwards and backwards."""
    down, up, after = 0, 1, shape.ranks - rank - 1
    there = (("F", down, True), ("B", up, False))
    back = (("F", up, True), ("B", down, False))
    yield from [("F", down, False)] * (2 * after)
    yield from [("F", down, False), ("F", up, False)] * (rank + 1)
    yield from [("I", up, False), ("W", up, False), ("F", up, False)] * after
    for step in range(shape.micro_batches - 2 * shape.ranks + rank + 1):
        # the last rank's first pair is not one, for a smaller bubble
        yield from (("F", down, False), ("B", up, False)) if step == 0 and after == 0 else there
        yield from back
    for _ in range(after):
        yield "B", up, False
        yield from back
    # of the last backwards the second half is split, so that their weights fill the end
    ends = [up, down] * (rank + 1)
    yield from (("B", turn, False) for turn in ends[: rank + 1])
    yield from (("I", turn, False) for turn in ends[rank + 1 :])
    pending = iter(ends[rank + 1 :] + [down] * after)
    for _ in range(after):
        yield "W", next(pending), False
        yield "I", down, False
    yield from (("W", turn, False) for turn in pending)


_WORDS: dict[str, Callable[[int, _Shape], _Words]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved": _interleaved,
    "looped-bfs": _looped_bfs,
    "zero-bubble": _zero_bubble,
    "zero-bubble-v": _zero_bubble_v,
    "dualpipe-v": _dualpipe_v,
}


# ---------------------------------------------------------------- activations


class InFlight(NamedTuple):
    """Activations of one rank that are alive at once, in pairs of stage and micro-batch; not weighed by size."""

    most: int
    """The most at any moment, all stages of the rank together."""
    stages: tuple[int, ...]
    """The rank's stages, ascending."""
    per_stage: tuple[int, ...]
    """The most of each stage, at moments that may differ."""
    peaks: tuple[tuple[int, ...], ...]
    """Moments that may be the worst: counts per stage, none below another in every stage. With activations of
    `size[i]` bytes per micro-batch the rank's peak is the largest sum of `count[i] * size[i]` of these."""


def in_flight(table: ActionTable) -> tuple[InFlight, ...]:
    """Per rank, how many activations are alive at once: from the start of a forward to the end of its `B` or `W`.

    The order alone decides, not the times. Between `I` and `W` an activation counts as whole.

    Cost: linear in the number of actions.

    >>> [rank.most for rank in in_flight(actions("1f1b", 4, 1, 8))]
    [4, 3, 2, 1]
    """
    return tuple(map(_in_flight, table))


def _in_flight(row: Sequence[Action]) -> InFlight:
    stages = sorted({action.stage for action in row})
    place = {stage: index for index, stage in enumerate(stages)}
    counts, moments = [0] * len(stages), set()
    grew = False
    for work, stage, *_ in row:
        if work == "F":
            counts[place[stage]] += 1
            grew = True
        elif work != "I":
            if grew:  # what is alive grows up to here
                moments.add(tuple(counts))
            counts[place[stage]] -= 1
            grew = False
    return InFlight(
        most=max(map(sum, moments)),
        stages=tuple(stages),
        per_stage=tuple(map(max, zip(*moments, strict=True))),
        peaks=tuple(sorted(_undominated(moments))),
    )


def _undominated(moments: set[tuple[int, ...]]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for moment in sorted(moments, key=sum, reverse=True):
        if not any(all(a >= b for a, b in zip(other, moment, strict=True)) for other in found):
            found.append(moment)
    return found


@lru_cache(maxsize=65536)
def after_warmup(kind: str, shape: tuple[int, int, int], rank: int) -> tuple[int, ...]:
    """Micro-batches that a rank keeps when its warm-up ends, for each of its stages: none has gone back yet.

    `shape`: ranks of the pipeline, stages on each, micro-batches.
    """
    pp, turns, count = shape
    if pp == 1:
        return (1,)
    if kind in ("gpipe", "looped-bfs"):
        return (count,) * turns
    if kind in V_SHAPED:
        return (min(count, 2 * pp - rank - 1), min(count, rank + 1))
    if kind == "1f1b":
        return (min(count, pp - rank),)
    done = min(count * turns, warmup(rank, shape, 1 if kind in ZERO_BUBBLE else 2) + 1)
    size = count // max(1, count // pp)  # micro-batches that pass one stage before the next has its turn
    cycles, rest = divmod(done, size * turns)
    return tuple(cycles * size + min(size, max(0, rest - turn * size)) for turn in range(turns))
