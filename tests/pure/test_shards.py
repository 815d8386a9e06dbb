"""When `fully_shard` gathers and reduces, against cases worked by hand from its rules."""

from __future__ import annotations

from shardwise.model.module_step import Event
from shardwise.plan.ranks.shards import ROOT, Dials, Shards

FORWARD = [Event(what, i) for i in range(2) for what in ("call", "return")]
BACKWARD = [Event(what, i) for i in (1, 0) for what in ("back", "done")]


def counts(shards: Shards, number: int) -> tuple[int, int, int]:
    group = shards.groups[number]
    return group.gathers, group.reductions, group.sums


def test_units_are_gathered_for_each_pass_and_the_root_once() -> None:
    shards = Shards([0, 1], has_root=True, reshards=True)
    for last in (False, True):
        shards.forward(FORWARD)
        shards.backward(BACKWARD, Dials(sums_replicas=last, is_last=last))
    assert counts(shards, 0) == counts(shards, 1) == (4, 2, 1)
    assert counts(shards, ROOT) == (2, 2, 1)


def test_what_stays_whole_is_gathered_once() -> None:
    """Without a root the first unit looks ahead, in its last backward pass, to the last one of the pass before."""
    for has_root in (True, False):
        shards = Shards([0, 1], has_root=has_root, reshards=False)
        for last in (False, True):
            shards.forward(FORWARD)
            shards.backward(BACKWARD, Dials(reduces=last, sums_replicas=last, reshards=last, is_last=last))
        assert counts(shards, 0) == (1, 1, 1) and counts(shards, 1) == (1 + (not has_root), 1, 1)


def test_what_is_gathered_ahead_and_not_used_serves_the_next_forward() -> None:
    """Nothing that unit 0 gives has a gradient: unit 1 looks ahead to it all the same."""
    shards = Shards([0, 1], has_root=False, reshards=True)
    for last in (False, True):
        shards.forward(FORWARD)
        shards.backward(BACKWARD[:2], Dials(is_last=last))
    assert counts(shards, 0) == (3, 2, 2) and counts(shards, 1) == (4, 2, 2)


def test_a_part_is_gathered_by_neighbours_after_a_forward() -> None:
    shards = Shards([0, 1], has_root=False, reshards=2)
    shards.forward(FORWARD)
    shards.backward(BACKWARD, Dials())
    assert [(group.gathers, group.gathers_of_part) for group in shards.groups.values()] == [(1, 1), (1, 1)]


def test_units_that_are_called_twice_reduce_twice() -> None:
    shards = Shards([0, 1], has_root=False, reshards=True)
    shards.forward([*FORWARD, *FORWARD])
    shards.backward([*BACKWARD, *BACKWARD], Dials())
    assert counts(shards, 0) == counts(shards, 1) == (4, 2, 2)
