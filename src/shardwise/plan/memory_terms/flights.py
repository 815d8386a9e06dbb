"""Micro-batches that a rank of a pipeline keeps while its schedule runs, and which gradients are there. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from operator import ge
from typing import NamedTuple

from shardwise.plan.rows.pipeline import micro_batches_fit
from shardwise.plan.schedule import actions, after_warmup, in_flight, stages_of, warmup


@lru_cache(maxsize=4096)
def peaks_in_flight(kind: str, shape: tuple[int, int, int]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Per rank, the moments that may be the worst: micro-batches in flight for each of its stages.

    `shape`: ranks, stages per rank, micro-batches. More micro-batches than a few rounds change nothing but for the
    schedules that keep all.
    """
    ranks, turns, count = shape
    if kind in ("gpipe", "looped-bfs"):
        return (((count,) * turns,),) * ranks
    if kind == "1f1b":
        return tuple(((min(count, ranks - rank),),) for rank in range(ranks))
    if kind == "interleaved" and not micro_batches_fit(kind, ranks, count):  # torch refuses it; others may not
        whole = (ranks, turns, count - count % ranks)
        most = [warmup(rank, whole, 2) + 1 for rank in range(ranks)]
        return tuple(((-(-alive // turns),) * turns,) for alive in most)
    return tuple(rank.peaks for rank in in_flight(actions(kind, *few_rounds(*shape))))


def few_rounds(ranks: int, turns: int, count: int) -> tuple[int, int, int]:
    """The same with micro-batches of four rounds at most, each as long as the plan's."""
    return ranks, turns, count if count < 5 * ranks else 4 * (count // (count // ranks))


@lru_cache(maxsize=4096)
def whole_backwards(
    kind: str, shape: tuple[int, int, int], rank: int
) -> tuple[tuple[int, Sequence[int], Sequence[bool], Sequence[bool]], ...]:
    """Of a schedule whose backward passes are in one piece, those of a rank before which most may be there.

    The stage that goes backward, of all of the rank; micro-batches that each keeps; whose weights have gradients, and
    whose were left whole. `shape`: ranks, stages per rank, micro-batches.
    """
    ranks, turns, count = shape
    if kind in ("gpipe", "looped-bfs"):

        def before(turn: int, left: int) -> tuple[int, Sequence[int], Sequence[bool], Sequence[bool]]:
            ahead, here, behind = (False,) * turn, (left < count,), turns - turn - 1
            alive, done = (count,) * turn + (left,) + (0,) * behind, (True,) * behind
            return turn, alive, ahead + here + done, ahead + here + (False,) * behind

        return tuple(before(turn, left) for turn in range(turns) for left in (count, count - 1) if left)
    if kind == "1f1b":
        most = min(count, ranks - rank)
        later = [(0, (most,), (True,), (False,))] * (count > most) + [(0, (most - 1,), (True,), (True,))] * (most > 1)
        return (0, (most,), (False,), (False,)), *later
    alike: dict[tuple[int, Sequence[bool], Sequence[bool]], list[Sequence[int]]] = {}
    for turn, alive, _, begun, whole in _backwards(kind, few_rounds(*shape), rank):
        others = alike.setdefault((turn, begun, whole), [])
        if not any(all(map(ge, other, alive)) for other in others):
            others[:] = [other for other in others if not all(map(ge, alive, other))] + [alive]
    return tuple((turn, alive, begun, whole) for (turn, begun, whole), found in alike.items() for alive in found)


class Beside(NamedTuple):
    """When a backward pass of a rank begins, of each of its stages."""

    turn: int
    """The one that goes backward."""
    alive: Sequence[int]
    """Micro-batches that it keeps."""
    pending: Sequence[int]
    """Those of them whose inputs have gradients, and whose weights have none yet."""
    added: Sequence[bool]
    """Whether gradients of its weights were added up."""


@lru_cache(maxsize=65536)
def beside_gradients(kind: str, shape: tuple[int, int, int], rank: int) -> tuple[Beside, ...] | None:
    """What a rank keeps of each stage when a backward pass begins.

    Those that no other is above. None: all are added up when as many are kept as when the warm-up ends.
    """
    few = shape if kind in ("gpipe", "looped-bfs", "1f1b") else few_rounds(*shape)
    whole, most = few is shape, after_warmup(kind, few, rank)
    if whole:
        none = (0,) * few[1]
        passes = [Beside(turn, alive, none, added) for turn, alive, added, _ in whole_backwards(kind, few, rank)]
    else:
        passes = [Beside(*each[:4]) for each in _backwards(kind, few, rank)]
    found: list[Beside] = []
    for here in passes:
        if all(here.added) and all(map(ge, here.alive, most)):
            return None
        if (any(here.added) or any(here.pending)) and not any(_no_less(other, here) for other in found):
            found = [other for other in found if not _no_less(here, other)] + [here]
    return tuple(found)


def _no_less(one: Beside, other: Beside) -> bool:
    each = zip(one[1:], other[1:], strict=True)
    return one.turn == other.turn and all(all(map(ge, ours, theirs)) for ours, theirs in each)


def _backwards(
    kind: str, shape: tuple[int, int, int], rank: int
) -> Iterator[tuple[int, Sequence[int], Sequence[int], Sequence[bool], Sequence[bool]]]:
    """Before each backward pass to the inputs of a rank: which of its stages goes back, and of each what it has.

    Alive, pending, added and whole, as `Moment` has them: only of one rank, and what others send is not looked at.
    """
    ranks, turns, count = shape
    place = {stage: turn for turn, stage in enumerate(stages_of(kind, rank, ranks, turns))}
    alive, pending, left = [0] * turns, [0] * turns, [count] * turns
    fresh, added, whole = [False] * turns, [False] * turns, [False] * turns
    for action in actions(kind, ranks, turns, count)[rank]:
        turn, work = place[action.stage], action.work
        if action.stage == 0 and work in "IW":  # whose inputs have no gradients
            if work == "I":
                continue
            work = "B"
        if work in "BI":
            yield turn, tuple(alive), tuple(pending), tuple(added), tuple(whole)
        left[turn] -= work in "BW"
        whole[turn] = work != "F" and left[turn] > 0
        if work == "F":
            alive[turn] += 1
            continue
        added[turn] |= work == "B" or (work == "I" and fresh[turn])
        fresh[turn] = work == "W"
        alive[turn] -= work != "I"
        pending[turn] += (work == "I") - (work == "W")
