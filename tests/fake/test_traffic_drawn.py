"""The closed form of a step's messages against the traced step, for sizes x plan x options drawn at random.

`SHARDWISE_SOAK=150` draws so many, others on every run; the seed is in the name of the test. A failure names its case;
`differences(case)` repeats it.
"""

from __future__ import annotations

import os
import re
from random import Random

import pytest

from shardwise.errors import ModelError
from shardwise.plan.workload import Workload
from tests.fake.drawn_traffic import SIZES, Case, differences, draw

SOAK = int(os.environ.get("SHARDWISE_SOAK", "0"))
SEEDS = range(first := Random().randrange(10**6), first + SOAK) if SOAK else range(2)
REFUSED = re.compile(r"\[module\.float8\]|precision rules")
"""Why a model refuses a plan though no constraint on sizes says so."""

FOUND = [
    ("pp2 tp2 cp2 / looped-bfs / seq / bf16-pure / reduce=fp32", "moe", 0),
    ("pp2 fsdp2 tp2 / gpipe / seq", "moe", 7),
    ("pp2 / gpipe / bf16-pure", "tied", 0),
    ("pp2 tp2 / zero-bubble mb2 / seq / bf16", "llama", 3),
    ("pp2 tp2 / zero-bubble mb1 / seq / bf16", "llama", 0),
    ("pp2 tp2 / zero-bubble mb2 / seq / bf16 / recompute=blocks", "llama", 2),
    ("fsdp2 cp2 / reshard=2 / context=gather", "llama", 1),
    ("fsdp6 / reshard=2", "moe", 0),
    ("pp2 cp2 / gpipe / reduce=bf16", "llama", 0),
]
"""What draws have found, or what stands beside it."""


@pytest.mark.share(2)
@pytest.mark.parametrize("seed", SEEDS)
def test_closed_form_equals_the_trace(seed: int) -> None:
    case = draw(Random(seed))
    try:
        found = differences(case)
    except ModelError as error:
        assert REFUSED.search(str(error)), case
        return
    assert not found, (case, found)


@pytest.mark.share(9)
@pytest.mark.parametrize(("plan", "model", "rank"), FOUND)
def test_what_draws_have_found(plan: str, model: str, rank: int) -> None:
    work = Workload(seq_len=12, global_batch=12)
    assert not differences(Case(SIZES[model], plan, work, clip=1.0, rank=rank))
