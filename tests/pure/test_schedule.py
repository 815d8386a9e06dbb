"""Pipeline schedules without torch: hand-worked times, properties of the clock, and activations in flight."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from itertools import product

import pytest

from shardwise.errors import PlanError
from shardwise.plan.eager.moments import moments_of
from shardwise.plan.memory_terms.flights import beside_gradients, peaks_in_flight, whole_backwards
from shardwise.plan.plan import LOOPED, SCHEDULES, V_SHAPED, ZERO_BUBBLE
from shardwise.plan.rows.pipeline import micro_batches_fit
from shardwise.plan.schedule import ActionTable, actions, in_flight
from shardwise.plan.time_terms.simulate import Costs, Timeline, least_time, pipeline_time, simulate

GRID = [
    (kind, ranks, stages, micro)
    for kind, ranks, stages, micro in product(SCHEDULES, (1, 2, 3, 4), (1, 2, 3), (1, 2, 3, 4, 6, 8, 12))
    if (stages == 2 if kind in V_SHAPED else stages == 1 or kind in LOOPED) and micro_batches_fit(kind, ranks, micro)
]


def drawn_costs(rng: random.Random, num_stages: int) -> Costs:
    def row() -> list[int]:
        return [rng.randint(1, 9) for _ in range(num_stages)]

    return Costs(forward=row(), backward=row(), backward_input=row(), backward_weight=row())


def ends_of(timeline: Timeline) -> list[float]:
    return [span.end for rank in timeline.ranks for span in rank]


# ---------------------------------------------------------------- worked by hand


def test_1f1b_with_a_slow_last_stage() -> None:
    # rank 1 starts at 1 and never waits again: 1 + 4 x (2 + 4), and the last gradient's 2 on rank 0
    costs = Costs(forward=(1, 2), backward=(2, 4))
    timeline = simulate(actions("1f1b", 2, 1, 4), costs)
    assert timeline.total == 27
    assert timeline.busy == (12, 24) and timeline.idle == (15, 3)
    assert timeline.bubble == pytest.approx(18 / 54)


def test_gpipe_with_transfer() -> None:
    # stage 1 is free at 2.5 and only then receives F1's operand; stage 0 is free at 8.5 and then receives B1's
    timeline = simulate(actions("gpipe", 2, 1, 2), Costs(), transfer=0.5)
    assert [(s.start, s.end) for s in timeline.ranks[1]] == [(1.5, 2.5), (3.0, 4.0), (4.0, 6.0), (6.0, 8.0)]
    assert [(s.start, s.end) for s in timeline.ranks[0]] == [(0.0, 1.0), (1.0, 2.0), (6.5, 8.5), (9.0, 11.0)]


def test_1f1b_never_hides_a_transfer() -> None:
    # the last rank of two does F B, and before each further F a gradient leaves and an activation comes
    timeline = simulate(actions("1f1b", 2, 1, 3), Costs(), transfer=0.25)
    assert [s.start for s in timeline.ranks[1]] == [1.25, 2.25, 4.5, 5.5, 7.75, 8.75]
    assert timeline.total == 8.75 + 2 + 0.25 + 2


def test_stages_of_one_rank_hand_over_at_once() -> None:
    # pp 1 in a V: F0 F1 follow each other, no transfer
    assert simulate(actions("zero-bubble-v", 1, 2, 1), Costs(), transfer=9.0).total == 6


def test_an_overlapped_pair_is_sent_at_its_end() -> None:
    table = actions("dualpipe-v", 2, 2, 4)
    row = " ".join(f"{action}{'+' if action.overlapped else ''}" for action in table[0])
    assert row == "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3+ 3B1 3F2+ 0B0 3B2 3F3+ 0B1 3B3 0I2 0W2 0I3 0W3"
    spans = {str(span.action): span for rank in simulate(table).ranks for span in rank}
    assert spans["0F3"].end < spans["3B1"].end <= spans["1F3"].start


@pytest.mark.parametrize(("kind", "turns"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("looped-bfs", 3)])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (4, 16)])
def test_bubble_of_equal_stages(kind: str, turns: int, ranks: int, micro_batches: int) -> None:
    # (p - 1) / (v m + p - 1): Narayanan et al., arXiv:2104.04473, section 2.2
    expected = (ranks - 1) / (turns * micro_batches + ranks - 1)
    assert simulate(actions(kind, ranks, turns, micro_batches)).bubble == pytest.approx(expected)


def test_zb_v_of_equal_thirds() -> None:
    # F = I = W: only the way there and back of the first rank's neighbours is lost, arXiv:2401.10241, section 6
    timeline = simulate(actions("zero-bubble-v", 4, 2, 16))
    assert timeline.total == pytest.approx(6 * 16 + 3)


# ---------------------------------------------------------------- properties


@pytest.mark.parametrize("case", GRID, ids=str)
def test_the_clock(case: tuple[str, int, int, int]) -> None:
    """Sums, bounds, formulas, scale; a longer stage, a longer transfer never shortens anything."""
    kind, ranks, stages, micro = case
    rng = random.Random(str(case))
    table, costs = actions(*case), drawn_costs(rng, ranks * stages)
    before = None
    for transfer in (0.0, 0.5, 2.0):
        timeline = simulate(table, costs, transfer)
        assert all(a + b == pytest.approx(timeline.total) for a, b in zip(timeline.busy, timeline.idle, strict=True))
        assert timeline.bubble == pytest.approx(sum(timeline.idle) / (ranks * timeline.total))
        for rank in timeline.ranks:
            assert all(a.end <= b.start for a, b in zip(rank, rank[1:], strict=False))
        taken = pipeline_time(kind, ranks, costs, micro, stages_per_rank=stages, transfer=transfer)
        assert taken == pytest.approx(timeline.total)
        assert least_time(kind, ranks, costs, micro, stages_per_rank=stages, transfer=transfer) <= taken + 1e-9
        assert before is None or all(a <= b for a, b in zip(before, ends_of(timeline), strict=True))
        before = ends_of(timeline)
    field = rng.choice(["forward", "backward", "backward_input", "backward_weight"])
    longer = {
        name: [t + 3 * (name == field and i == ranks * stages // 2) for i, t in enumerate(getattr(costs, name))]
        for name in ("forward", "backward", "backward_input", "backward_weight")
    }
    assert before is not None
    slower = simulate(table, Costs(**longer), 2.0)
    assert all(a <= b for a, b in zip(before, ends_of(slower), strict=True))
    doubled = simulate(table, Costs(**{name: [2 * t for t in getattr(costs, name)] for name in longer}), 4.0)
    assert doubled.total == pytest.approx(2 * max(before))


@pytest.mark.parametrize("case", [c for c in GRID if c[0] not in ZERO_BUBBLE and (c[3] >= c[1] or c[2] == 1)], ids=str)
def test_the_bound_is_the_time_of_equal_stages(case: tuple[str, int, int, int]) -> None:
    kind, ranks, stages, micro = case
    costs = Costs(forward=3, backward=7)
    expected = simulate(actions(*case), costs).total
    assert least_time(kind, ranks, costs, micro, stages_per_rank=stages) == pytest.approx(expected)
    assert expected == (stages * micro + ranks - 1) * 10


def calls_of(work: Callable[[], object]) -> int:
    """Calls of functions, the interpreter's own included: what work takes, alike on every machine."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def test_work_is_linear_in_the_actions_and_is_done_once() -> None:
    for micro_batches in (64, 128):
        table = actions.__wrapped__("interleaved", 16, 8, micro_batches)
        number = sum(map(len, table))
        assert number == 16 * 2 * 8 * micro_batches
        assert calls_of(lambda n=micro_batches: actions.__wrapped__("interleaved", 16, 8, n)) < 8 * number
        assert calls_of(lambda table=table: simulate(table, Costs(), 0.1)) < 20 * number
    slow = [Costs(forward=[1 + i / 100 for _ in range(128)], backward=2.0) for i in range(4)]
    spent = [
        calls_of(lambda costs=costs: pipeline_time("interleaved", 16, costs, 128, stages_per_rank=8, transfer=0.1))
        for costs in slow
    ]
    assert max(spent[1:]) < 1000 < spent[0]  # other costs of a schedule that is known


# ---------------------------------------------------------------- activations in flight


def brute_force(table: ActionTable) -> list[int]:
    most = []
    for row in table:
        alive: set[tuple[int, int]] = set()
        top = 0
        for work, stage, micro_batch, _ in row:
            if work == "F":
                alive.add((stage, micro_batch))
            elif work in "BW":
                alive.remove((stage, micro_batch))
            top = max(top, len(alive))
        assert not alive
        most.append(top)
    return most


@pytest.mark.parametrize("case", GRID, ids=str)
def test_in_flight(case: tuple[str, int, int, int]) -> None:
    table = actions(*case)
    found = in_flight(table)
    assert [rank.most for rank in found] == brute_force(table)
    for rank in found:
        assert rank.most == max(map(sum, rank.peaks))
        assert rank.per_stage == tuple(max(counts) for counts in zip(*rank.peaks, strict=True))


@pytest.mark.parametrize("kind", SCHEDULES)
def test_what_the_planner_takes_to_be_in_flight_is_in_the_table(kind: str) -> None:
    """Of 6 micro-batches on 4 ranks, and of more than the few rounds that it looks at."""
    stages = 2 if kind in LOOPED else 1
    counts = [n for n in (*range(1, 17), 20, 36, 40, 60) if micro_batches_fit(kind, 4, n)]
    assert len(counts) > 12
    for shape in ((4, stages, count) for count in counts):
        assert peaks_in_flight(kind, shape) == tuple(rank.peaks for rank in in_flight(actions(kind, *shape))), shape


def test_gradients_come_with_the_first_backward_pass_of_their_stage() -> None:
    """Of the schedules whose moments are written down, as their tables have them; and what bounds of memory hold to."""
    for kind, shape in product(("gpipe", "1f1b", "looped-bfs"), [(4, 1, 4), (4, 1, 5), (4, 1, 9)]):
        for rank, row in enumerate(moments_of(kind, *shape)):
            table = {(each.turn, each.alive, each.begun, each.whole) for each in row if each.work == "B"}
            found = whole_backwards(kind, shape, rank)
            assert set(found) <= table, (kind, shape, rank)
            for turn, alive, begun, whole in table:  # none of the table's is above all of these
                assert any((one[0], *one[2:]) == (turn, begun, whole) and one[1] >= alive for one in found), (
                    kind,
                    shape,
                    rank,
                )
    assert whole_backwards("looped-bfs", (2, 2, 4), 0)[-1] == (1, (4, 3), (False, True), (False, True))
    assert beside_gradients("1f1b", (4, 1, 9), 0) is None
    # F1 F1 F3 I3 F3 [I3] W3 [I1] W3 [I1] W1 W1, by stages 1 and 3: one waits, and none was added up
    assert beside_gradients("zero-bubble", (2, 2, 2), 1) == (
        (1, (2, 2), (0, 1), (False, False)),
        (0, (2, 1), (0, 1), (False, False)),
        (0, (2, 0), (1, 0), (False, False)),
    )
    assert beside_gradients("gpipe", (4, 1, 9), 0) == ((0, (8,), (0,), (True,)),)
    assert beside_gradients("1f1b", (4, 1, 4), 0) == ((0, (3,), (0,), (True,)),)


def test_in_flight_by_hand() -> None:
    assert [rank.most for rank in in_flight(actions("1f1b", 4, 1, 8))] == [4, 3, 2, 1]
    assert [rank.most for rank in in_flight(actions("gpipe", 4, 1, 8))] == [8] * 4
    # F0 F1 of stage 0, F0 F1 of stage 2, and two more hops' worth; the first backward is of stage 2
    first = in_flight(actions("interleaved", 2, 2, 4))[0]
    assert (first.most, first.stages, first.per_stage) == (5, (0, 2), (4, 2))
    # a V keeps the same on every rank: arXiv:2401.10241, section 6
    assert {rank.most for rank in in_flight(actions("zero-bubble-v", 4, 2, 12))} == {8}


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (("dualpipe-v", 4, 2, 3), "torch refuses 4 ranks x 2 stages with 3 micro-batches"),
        (("1f1b", 4, 1, 3), "does not run with 3 micro-batches"),
        (("1f1b", 4, 2, 8), "puts 1 stage on a rank"),
        (("zero-bubble-v", 4, 3, 8), "puts 2 stages on a rank"),
        (("chimera", 4, 1, 8), "the kinds are gpipe, 1f1b"),
        (("gpipe", 4, 1, 0), "at least 1"),
    ],
)
def test_what_torch_refuses(case: tuple[str, int, int, int], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        actions(*case)


def test_wrong_costs() -> None:
    with pytest.raises(PlanError, match="forward has 3 times, and the schedule has 4 stages"):
        simulate(actions("1f1b", 4, 1, 4), Costs(forward=(1, 2, 3)))
    for bad in (-1, float("nan"), (1, float("inf")), ()):
        with pytest.raises(PlanError, match="not a time for every stage"):
            Costs(forward=bad)


def test_tables_that_cannot_finish() -> None:
    first, second = actions("gpipe", 2, 1, 2)
    with pytest.raises(PlanError, match="cannot finish, 0B1, 1F0 wait for each other"):
        simulate([first[::-1], second])
    with pytest.raises(PlanError, match="cannot finish, 0B0 wait"):  # a backward before its forward
        simulate([first[2:] + first[:2]])
    with pytest.raises(PlanError, match="0B0, 1F0 wait"):  # a forward that no rank does
        simulate([first[1:], second])
