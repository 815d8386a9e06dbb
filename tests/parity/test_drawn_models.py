"""Model x plan x options, drawn at random: every legal draw trains as one process does.

Loss, norm, each gradient, each parameter and each average of two steps, in fp64. `SHARDWISE_SOAK=200` draws 48
times as many, others on every run; the seed is in the name of the test. A failure names its case;
`differences(world, [case])` repeats it.
"""

from __future__ import annotations

import os
from random import Random
from typing import Any

import pytest

from tests.parity import grid
from tests.parity.drawn_models import MODELS, Case, draw, run_cases

SOAK = int(os.environ.get("SHARDWISE_SOAK", "0"))
PER_JOB = 8 if SOAK else 4
WORLDS = (1, 2, 2, 4) * (36 if SOAK else 1)
"""World sizes of the jobs."""
FIRST_SEED = Random().randrange(10**6) if SOAK else 0
TOLERANCE = 1e-11


def differences(world: Any, cases: list[Case]) -> dict[Case, float]:
    """The largest relative difference of each case to one process."""
    truths = list(dict.fromkeys(case.truth for case in cases))
    known = dict(zip(truths, world(1, run_cases, truths, timeout_s=300)[0], strict=True))
    ranks = world(cases[0].world, run_cases, cases, timeout_s=600)
    return {
        case: max(grid.differences([traces[i] for traces in ranks], known[case.truth]).values())
        for i, case in enumerate(cases)
    }


@pytest.mark.parametrize(("seed", "num_ranks"), [(FIRST_SEED + i, n) for i, n in enumerate(WORLDS)])
def test_every_legal_draw_trains_as_one_process(world: Any, seed: int, num_ranks: int) -> None:
    random = Random(seed)
    cases = [draw(random, num_ranks) for _ in range(PER_JOB)]
    worst = differences(world, cases)
    assert max(worst.values()) <= TOLERANCE, {case: value for case, value in worst.items() if value > TOLERANCE}


def test_the_draws_reach_every_model_and_axis() -> None:
    random = Random(0)
    cases = [draw(random, 4) for _ in range(300)]
    assert {case.model for case in cases} == set(MODELS)
    words = {word.rstrip("0123456789") for case in cases for word in case.plan.split()}
    assert words >= {"pp", "dp", "fsdp", "cp", "tp", "ep", "mb", "seq", "loss-parallel"}
