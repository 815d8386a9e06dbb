"""What a rank of a pipeline has alive while each action runs: when its memory may be largest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from operator import ge, sub
from typing import NamedTuple

from shardwise.plan.schedule import Action, actions, stages_of


class Moment(NamedTuple):
    """While an action runs. One number per stage of the rank, in the order of `stages_of`."""

    work: str
    """`F` forward; backward `B` whole, `I` to the inputs, `W` to the weights."""
    turn: int
    """Which of the rank's stages."""
    alive: tuple[int, ...]
    """Micro-batches that are forwarded and whose tensors are kept, one that runs backward included."""
    pending: tuple[int, ...]
    """Those of them whose inputs have their gradients, and whose weights have not."""
    outputs: tuple[int, ...]
    """Tensors sent on, of micro-batches that are no longer alive: all but 1F1B keep their sends until the end."""
    gradients: tuple[int, ...]
    """Gradients sent back and kept, the running one included."""
    coming: tuple[int, ...]
    """Activations of other ranks that came or are waited for, and are not used, the running action's included."""
    returning: tuple[int, ...]
    """The same of gradients, those of this rank too."""
    reached: tuple[int, ...]
    """How many backward passes have gone to the inputs, at most 2."""
    begun: tuple[bool, ...]
    """Whose weights have gradients."""
    done: tuple[bool, ...]
    """All of whose micro-batches have gone backward: their gradients are reduced."""
    fresh: tuple[bool, ...]
    """Whose weights have got gradients since a backward pass went to the inputs."""
    added: tuple[bool, ...]
    """Whose gradients a backward pass to the inputs, or a whole one, has added up behind one to the weights."""
    whole: tuple[bool, ...]
    """Whose gathered parameters a backward pass has left: the next forward pass shards them again."""
    ends: bool
    """It is the last one of its stage, whose gradients are reduced behind it."""


_OF_FIRST = {"I": "", "W": "B"}
"""The first stage's inputs have no gradients: torch does nothing for them, and all of it for the weights."""


@lru_cache(maxsize=1024)
def moments_of(kind: str, ranks: int, turns: int, count: int) -> tuple[tuple[Moment, ...], ...]:
    """Per rank, the different moments of a step of `count` micro-batches that may need most.

    Raises:
        PlanError: torch's schedule does not take this combination.

    Cost: linear in the actions, once per combination.

    >>> moments_of("1f1b", 2, 1, 4)[0][0].alive
    (2,)
    """
    shape = (ranks, turns, count)
    return tuple(tuple(_fullest(_of_rank(kind, shape, rank))) for rank in range(ranks))


def _fullest(moments: Iterable[Moment]) -> Iterator[Moment]:
    """Of moments that differ in no more than how much is kept, those that may be the largest.

    What sends keep in looped schedules grows with each round, which is like the one before else: the last one is the
    largest. Where as much goes as comes with each micro-batch, the first or the last is.
    """
    alike: dict[Moment, list[tuple[int, ...]]] = {}
    for moment in moments:
        kept = (*moment.alive, *moment.outputs, *moment.gradients, *moment.coming, *moment.returning)
        others = alike.setdefault(moment._replace(alive=(), outputs=(), gradients=(), coming=(), returning=()), [])
        if any(all(map(ge, other, kept)) for other in reversed(others)):
            continue
        others[:] = [other for other in others if not all(map(ge, kept, other))]
        if len(others) > 1 and _between(others[-2], others[-1], kept):
            others.pop()
        others.append(kept)
    for moment, found in alike.items():
        turns = len(moment.pending)
        for each in found:
            alive, outputs, gradients, *comes = (each[turns * part : turns * (part + 1)] for part in range(5))
            whole = moment._replace(alive=alive, outputs=outputs, gradients=gradients)
            yield whole._replace(coming=comes[0], returning=comes[1])


def _between(first: tuple[int, ...], middle: tuple[int, ...], last: tuple[int, ...]) -> bool:
    """Whether `middle` lies on the line from one to the other."""
    there, on = (tuple(map(sub, one, other)) for one, other in ((middle, first), (last, middle)))
    far, further = (sum(map(abs, way)) for way in (there, on))
    return all(a * further == b * far for a, b in zip(there, on, strict=True))


def _of_rank(kind: str, shape: tuple[int, int, int], rank: int) -> dict[Moment, None]:
    ranks, turns, count = shape
    stages = stages_of(kind, rank, ranks, turns)
    last, awaited = ranks * turns - 1, kind == "1f1b"
    sends = [stage < last and stage + 1 not in stages for stage in stages]
    returns = [stage > 0 and stage - 1 not in stages for stage in stages]
    alive, pending = [0] * turns, [0] * turns
    outputs, gradients = [0] * turns, [0] * turns
    left, whole = [count] * turns, [False] * turns
    ahead = min(count, ranks - rank) if kind == "1f1b" else 0
    reached = [0] * turns
    begun, fresh, added = ([False] * turns for _ in range(3))
    found: dict[Moment, None] = {}
    for action, awaiting in zip(actions(kind, ranks, turns, count)[rank], _awaited(kind, *shape)[rank], strict=True):
        turn = stages.index(action.stage)
        work = action.work if action.stage else _OF_FIRST.get(action.work, action.work)
        if not work:
            continue
        back = returns[turn] and work in "BI"
        now = tuple(back * (turn == each) + (0 if awaited else sent) for each, sent in enumerate(gradients))
        done = tuple(number == 0 for number in left)
        if kind == "1f1b":  # torch waits for the last send before the first backward pass, and keeps it
            outputs[0] = int(0 <= ahead - 2 < count - left[0] <= count - ahead)
        flags = (tuple(reached), tuple(begun), done, tuple(fresh), tuple(added), tuple(whole))
        left[turn] -= work in "BW"
        kept = (tuple(alive), tuple(pending), tuple(outputs), now, *awaiting)
        found[Moment(work, turn, *kept, *flags, not left[turn])] = None
        whole[turn] = work != "F" and left[turn] > 0
        if work == "F":
            alive[turn] += 1
            continue
        gradients[turn] += back
        reached[turn] = min(reached[turn] + (work != "W"), 2)
        added[turn] |= work == "B" or (work == "I" and fresh[turn])
        if work == "I":
            pending[turn] += 1
            fresh[turn] = False
            continue
        begun[turn], fresh[turn] = True, work == "W" and left[turn] > 0
        pending[turn] -= work == "W"
        alive[turn] -= 1
        outputs[turn] += sends[turn] and not awaited
    return found


Waiting = tuple[tuple[int, ...], tuple[int, ...]]


@lru_cache(maxsize=256)
def _awaited(kind: str, ranks: int, turns: int, count: int) -> tuple[tuple[Waiting, ...], ...]:
    """Per rank and action, `coming` and `returning`.

    A looped schedule of torch asks for a message as soon as the action that sends it has its place (`_add_send_recv`,
    which gives the ranks places in turn); GPipe and 1F1B ask right before they use it.
    """
    stages = [stages_of(kind, rank, ranks, turns) for rank in range(ranks)]
    left = [list(_at_once(row))[::-1] for row in actions(kind, ranks, turns, count)]
    last, here = ranks * turns - 1, Counter[tuple[str, int]]()
    there = {("F", 0, each) for each in range(count)} | {("B", last, each) for each in range(count)}
    found: list[list[Waiting]] = [[] for _ in range(ranks)]
    alone = turns == 1 and kind in ("gpipe", "1f1b")
    while any(left):
        for rank, row in enumerate(left):
            if not row or any(way and (way, *place) not in there for way, *place in map(_takes, row[-1])):
                continue
            group = row.pop()
            for action in group:
                way, stage, _ = _takes(action)
                own = Counter({(way, stage): 1}) if alone else here
                coming = tuple(own["F", each] * (each > 0 and each - 1 not in stages[rank]) for each in stages[rank])
                found[rank].append((coming, tuple(own["B", each] * (each < last) for each in stages[rank])))
                here[way, stage] -= 1
            for way, stage, micro_batch in map(_takes, group):
                to = stage + (1 if way == "F" else -1)
                there.add((way, to, micro_batch))
                here[way, to] += 1
    return tuple(map(tuple, found))


def _at_once(row: Iterable[Action]) -> Iterator[list[Action]]:
    """Actions that are one of torch's together."""
    group: list[Action] = []
    for action in row:
        group.append(action)
        if not action.overlapped:
            yield group
            group = []


def _takes(action: Action) -> tuple[str, int, int]:
    """What an action needs: activations or gradients, of which stage and micro-batch; a `W` needs none."""
    return {"F": "F", "W": ""}.get(action.work, "B"), action.stage, action.micro_batch
