"""Every pair of techniques is in a plan that trains as one process does, or is refused by a constraint."""

from __future__ import annotations

import pytest

import compatibility
from shardwise.plan.plan import Plan
from tests.parity import test_context, test_experts, test_grid, test_typed
from tests.parity.pairs import COMPILED, PLANS, open_pairs


def check(world, text: str, run=test_grid.grid.run_plan) -> None:
    plan = Plan.parse(text)
    if plan.axes.ep > 1:
        test_experts.check(world, text, "bias-deep" if plan.axes.pp * plan.schedule.stages > 2 else "bias")
    else:
        test_grid.check(world, text, "decoder", "fp64", run=run)


LARGE = [plan for plan in PLANS if Plan.parse(plan).world == 8]
SOAK = set(LARGE) - set(LARGE[::8])


@pytest.mark.share(10)
@pytest.mark.parametrize("plan", test_grid.cells([*PLANS], SOAK))
def test_pairs(world, plan: str) -> None:
    check(world, plan)


@pytest.mark.soak
@pytest.mark.parametrize("plan", COMPILED, ids=str)
def test_compiled_pairs(world, plan: str) -> None:
    check(world, plan, run=test_grid.run_compiled)


def test_the_page_is_current() -> None:
    page = compatibility.PAGE.read_text(encoding="utf-8")
    assert page == compatibility.text(), "run `make docs`"


def test_no_pair_is_left_open() -> None:
    proven = (*test_grid.PLANS, *test_grid.COMPILED, *test_context.PLANS, *PLANS, *COMPILED)
    proven += (*test_typed.FP8_PLANS, *test_typed.EXPERTS, *test_typed.COMPILED)
    assert open_pairs(proven) == set()
