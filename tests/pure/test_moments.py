"""The moments of a pipeline that are looked at are those that may need most."""

from __future__ import annotations

from random import Random

import pytest

from shardwise.hardware.cluster import load_cluster
from shardwise.model.profile import profile_of
from shardwise.model.spec import preset
from shardwise.plan.eager import moments
from shardwise.plan.eager.moments import Moment, moments_of
from shardwise.plan.plan import LOOPED, SCHEDULES, V_SHAPED
from shardwise.plan.rows.pipeline import micro_batches_fit
from shardwise.plan.search import find_plan
from shardwise.plan.stack import load_stack
from shardwise.plan.workload import Workload


def largest(found: tuple[Moment, ...], weights: list[float]) -> dict[Moment, float]:
    """Of moments that are alike but for how much is kept, the most bytes."""
    most: dict[Moment, float] = {}
    for moment in found:
        kept = (*moment.alive, *moment.outputs, *moment.gradients, *moment.coming, *moment.returning)
        size = sum(w * n for w, n in zip(weights, kept, strict=True))
        alike = moment._replace(alive=(), outputs=(), gradients=(), coming=(), returning=())
        most[alike] = max(most.get(alike, 0.0), size)
    return most


@pytest.mark.parametrize("kind", SCHEDULES)
def test_none_that_is_left_out_needs_more(kind: str) -> None:
    """Whatever a micro-batch, what it sent and what comes take; and they are few, however many micro-batches."""
    draw = Random(kind)
    for ranks in (2, 3, 4):
        for turns in [2] if kind in V_SHAPED else (1, 3) if kind in LOOPED else [1]:
            for count in (count for count in (1, 4, 7, 12, 40) if micro_batches_fit(kind, ranks, count)):
                kept = moments_of(kind, ranks, turns, count)
                for rank in range(ranks):
                    every = tuple(moments._of_rank(kind, (ranks, turns, count), rank))
                    assert set(kept[rank]) <= set(every)
                    assert len(kept[rank]) < 20 * turns**2 * ranks
                    for _ in range(3):
                        weights = [draw.choice((0.0, 1.0, draw.random())) for _ in range(5 * turns)]
                        assert largest(kept[rank], weights) == pytest.approx(largest(every, weights))


def test_a_batch_of_a_million_is_planned_soon() -> None:
    """What all micro-batches keep of a pipeline is in the bounds: thousands of plans were estimated, for minutes."""
    sizes, work = preset("tiny"), Workload(seq_len=64, global_batch=1_000_000)
    found = find_plan(profile_of(sizes), sizes, load_cluster("cpu:4"), work, stack=load_stack("shardwise-cpu"))
    assert found.best is not None and found.estimated < 100
