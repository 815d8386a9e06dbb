"""NaN in the data of one rank: one verdict on all ranks, nothing of the step is kept, and training can go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.errors import ExitCode, NonFiniteError, UsageError
from tests.parity import grid, points
from tests.parity.points import Case

# windows of 8 rows in order: sample 15 is the last row of the second window, which is on the last data rank
BAD, CASE = 15, Case(rows=24, global_batch=8, steps=3, clip=None)
PLANS = ["dp1 / mb2", "dp2", "fsdp2", "fsdp2 / zero1 / mb2", "tp2", "pp2 / 1f1b mb2"]


def snapshot(state: sw.TrainState) -> dict[str, torch.Tensor]:
    """Every parameter and every number of the optimizer, whole."""
    return {name: grid.whole(tensor) for name, tensor in state.tensors().items()}


def is_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def skip(text: str, bad: int | None) -> dict[str, Any]:
    """Three steps, the second with NaN; what was skipped, and whether anything changed in which step."""
    with points.placed_state(text, CASE, points.Points(CASE.rows, bad), shuffle=False) as state:
        before, skipped, kept = snapshot(state), [], []
        for metrics in sw.steps(state, points.weighted, until=CASE.steps):
            after = snapshot(state)
            skipped.append(metrics.skipped)
            kept.append(is_same(before, after))
            before = after
        return {"skipped": skipped, "kept": kept, "count": state.skipped, "step": state.step, "end": before}


@pytest.mark.share(4)
@pytest.mark.parametrize("plan", PLANS)
def test_skip(world, plan: str) -> None:
    size = sw.Plan.parse(plan).world
    for rank in world(size, skip, f"{plan} / fp64", BAD):
        assert rank["skipped"] == rank["kept"] == [False, True, False]
        assert rank["count"] == 1 and rank["step"] == 3
        assert all(tensor.isfinite().all() for tensor in rank["end"].values())
    for rank in world(size, skip, f"{plan} / fp64", None):  # the control: nothing is skipped where nothing is wrong
        assert rank["skipped"] == rank["kept"] == [False, False, False] and rank["count"] == 0


def without_the_bad_window(text: str) -> dict[str, torch.Tensor]:
    """The first and the third window, as if the second one did not exist."""
    data = points.Points(CASE.rows)
    with points.placed_state(text, CASE, data, shuffle=False) as state:
        step = sw.make_step(state, points.weighted)
        for start in (0, 16):
            window = slice(start, start + 8)
            step((data.x[window], data.y[window], data.weight[window]))
        return snapshot(state)


@pytest.mark.share(2)
@pytest.mark.parametrize("plan", ["dp2", "fsdp2"])
def test_a_skipped_step_leaves_no_trace(world, plan: str) -> None:
    [truth] = world(1, without_the_bad_window, "dp1 / fp64")
    for rank in world(2, skip, f"{plan} / fp64", BAD):
        for name, tensor in truth.items():
            torch.testing.assert_close(rank["end"][name], tensor, rtol=1e-11, atol=1e-13)


def stop(text: str) -> dict[str, Any]:
    options = sw.StepOptions(on_nonfinite="stop")
    with points.placed_state(text, CASE, points.Points(CASE.rows, BAD), shuffle=False) as state:
        seen, code = [], None
        try:
            for metrics in sw.steps(state, points.weighted, until=CASE.steps, options=options):
                seen.append((metrics.step, metrics.skipped, metrics.stopping))
        except SystemExit as exit_:
            code = exit_.code
        return {"seen": seen, "code": code, "end": snapshot(state)}


@pytest.mark.share(2)
@pytest.mark.parametrize("plan", ["dp2", "fsdp2", "pp2 / 1f1b mb2"])
def test_stop(world, plan: str) -> None:
    for rank in world(2, stop, f"{plan} / fp64"):
        assert rank["code"] == ExitCode.NON_FINITE == 5
        first, second = rank["seen"]
        assert first == (1, False, None)
        assert second[:2] == (2, True) and "not finite" in second[2] and "over all 2 ranks" in second[2]
        assert all(tensor.isfinite().all() for tensor in rank["end"].values())


def skip_too_often(text: str, most: int) -> Any:
    """One good step, then none."""
    data = points.Points(CASE.rows)
    data.y[CASE.global_batch :] = torch.inf
    with points.placed_state(text, CASE, data, shuffle=False) as state:
        seen = []
        with pytest.raises(SystemExit) as ended:
            for metrics in sw.steps(state, points.weighted, until=CASE.steps, options=sw.StepOptions(max_skips=most)):
                seen.append(metrics.skipped)
        return ended.value.code, seen, snapshot(state)


@pytest.mark.parametrize("most", [0, 1])
def test_no_more_are_skipped_in_a_row_than_allowed(world, most: int) -> None:
    for code, seen, end in world(2, skip_too_often, "dp2 / fp64", most):
        assert code == ExitCode.NON_FINITE and seen == [False] + [True] * (most + 1)
        assert all(tensor.isfinite().all() for tensor in end.values())


def save_between_them(most: int, folder: str) -> Any:
    """One good step and one that is left out; another process, or a rank that comes back, goes on from there."""
    data = points.Points(CASE.rows)
    data.y[CASE.global_batch :] = torch.inf
    options, seen = sw.StepOptions(max_skips=most), []
    for until in (2, CASE.steps):
        with points.placed_state("dp2 / fp64", CASE, data, shuffle=False) as state:
            store = sw.Store(folder)
            store.load_latest(state)
            try:
                for metrics in sw.steps(state, points.weighted, until=until, options=options):
                    seen.append(metrics.skipped)
            except SystemExit as ended:
                return ended.code, seen
            store.save(state)
    return 0, seen


def test_steps_that_are_left_out_count_on_after_a_load(world, tmp_path: Path) -> None:
    for code, seen in world(2, save_between_them, 1, str(tmp_path / "store")):
        assert code == ExitCode.NON_FINITE and seen == [False, True, True]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("clip_norm", (-1.0, 0.0, float("nan"), "1.0")),
        ("clip_value", (-1.0, 0.0, float("nan"))),
        ("max_skips", (-1, 1.5)),
        ("check_replicas", (-1, 2.5)),
        ("on_nonfinite", ("ignore",)),
        ("on_oom", ("Halve",)),
    ],
)
def test_options_that_cannot_be(name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises(UsageError, match=f"found {name}={value!r}, needed"):
            sw.StepOptions(**{name: value})


def raise_and_go_on(text: str) -> dict[str, Any]:
    options = sw.StepOptions(on_nonfinite="raise")
    with points.placed_state(text, CASE, points.Points(CASE.rows, BAD), shuffle=False) as state:
        said, loop = [], sw.steps(state, points.weighted, until=CASE.steps, options=options)
        while state.step < CASE.steps:
            try:
                said.append(next(loop).skipped)
            except NonFiniteError as error:
                said.append(str(error))
                loop = sw.steps(state, points.weighted, until=CASE.steps, options=options)
        return {"said": said, "end": snapshot(state)}


@pytest.mark.share(4)
@pytest.mark.parametrize("plan", ["dp2", "fsdp2", "fsdp2 / zero1 / mb2", "pp2 / 1f1b mb2"])
def test_raise_on_all_ranks_and_go_on(world, plan: str) -> None:
    skipping = world(2, skip, f"{plan} / fp64", BAD)
    for rank, other in zip(world(2, raise_and_go_on, f"{plan} / fp64"), skipping, strict=True):
        assert rank["said"][0] is False and rank["said"][2] is False
        assert "step 2: loss nan" in rank["said"][1] and "gradient norm nan" in rank["said"][1]
        assert is_same(rank["end"], other["end"])


def infinite_slope(output: torch.Tensor, batch: list[torch.Tensor]) -> sw.Loss:
    """A finite loss with a gradient that is not: the root at zero, on the rank that holds sample 15."""
    here = (batch[0] == points.Points(CASE.rows).x[BAD]).all(dim=1).any()
    total, weight = points.weighted(output, batch)
    return sw.Loss(total + ((output.sum() * 0).abs().sqrt() if here else 0.0), weight)


def gradient_only(text: str) -> list[tuple[bool, bool]]:
    with points.placed_state(text, CASE, points.Points(CASE.rows), shuffle=False) as state:
        loop = sw.steps(state, infinite_slope, until=CASE.steps)
        return [(m.skipped, m.loss == m.loss) for m in loop]


@pytest.mark.parametrize("plan", ["dp2", "fsdp2"])
def test_gradient_that_is_not_finite_under_a_finite_loss(world, plan: str) -> None:
    for rank in world(2, gradient_only, f"{plan} / fp64"):
        assert rank == [(False, True), (True, True), (False, True)]


def nothing_counts(output: torch.Tensor, batch: list[torch.Tensor]) -> sw.Loss:
    return sw.Loss(points.per_row(output, batch).sum() * 0, 0)


def empty_window(text: str) -> list[bool]:
    with points.placed_state(text, CASE) as state:
        options = sw.StepOptions(on_nonfinite="raise")
        return [m.skipped for m in sw.steps(state, nothing_counts, until=2, options=options)]


def test_a_window_without_weight_is_skipped_and_is_no_fault(world) -> None:
    assert world(2, empty_window, "dp2 / fp64") == [[True, True]] * 2


class Counting(torch.nn.Module):
    """Changes its buffers in each way that a forward pass may: in place, behind torch's back, by another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(points.WIDTH)
        self.lin = torch.nn.Linear(points.WIDTH, points.WIDTH)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("largest", torch.zeros((), dtype=torch.float64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen = self.seen + 1
            self.largest.data.copy_(x.detach().abs().max())
        return x + self.lin(torch.tanh(self.norm(x)))


class Tracking(points.Net):
    """`points.Net` with statistics in its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Counting() for _ in range(2))


def buffers(state: sw.TrainState) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in state.placed.named_buffers().items()}


def tracked(text: str, options: sw.StepOptions, data: points.Points) -> dict[str, Any]:
    """The buffers of this rank after each of six steps, which of them were skipped, and a loss of evaluation."""
    plan, skipped = sw.Plan.parse(text), []
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(Tracking, plan, mesh, seed=points.SEED)
        batches = sw.loader(data, grid.batch(plan, 8), mesh, shuffle=False)
        state = sw.TrainState(placed, sw.sgd(placed, lr=1e-3), batches)
        step, seen = sw.make_step(state, points.weighted, options=options), [buffers(state)]
        for _ in range(6):
            try:
                skipped.append(step(next(batches)).skipped)
            except NonFiniteError:
                skipped.append(True)
            seen.append(buffers(state))
        total = sw.evaluate(placed, points.weighted, batches.evaluation(points.Points(16)))
        return {"skipped": skipped, "buffers": seen, "loss": float(total.sum)}


def test_negative_control_buffers_change_in_steps_that_are_made(world) -> None:
    [rank] = world(1, tracked, "dp1 / fp64", sw.StepOptions(), points.Points(48))
    before, after = rank["buffers"][4:6]
    assert rank["skipped"] == [False] * 6 and len(before) == 10
    assert not any(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.share(2)
@pytest.mark.parametrize(
    ("plan", "policy"),
    [
        ("dp1 / mb2", "skip"),
        ("dp2", "skip"),
        ("dp2", "raise"),
        ("dp2", "protect"),
        ("fsdp2", "skip"),
        ("pp2 / 1f1b mb2", "skip"),
        ("pp2 / 1f1b mb2", "spike"),
    ],
)
def test_a_step_without_update_leaves_the_buffers(world, plan: str, policy: str) -> None:
    data = points.Points(48, None if policy == "spike" else 38)  # the fifth window
    if policy == "spike":
        data.y[32:40] *= 1e3
    protect = sw.StepOptions(protect=sw.Protect(min_history=4))
    options = {"skip": sw.StepOptions(), "raise": sw.StepOptions(on_nonfinite="raise")}.get(policy, protect)
    for rank in world(sw.Plan.parse(plan).world, tracked, f"{plan} / fp64", options, data):
        assert rank["skipped"] == [False] * 4 + [True, False]
        seen = rank["buffers"]
        assert is_same(seen[4], seen[5]) and not is_same(seen[5], seen[6])
        assert torch.isfinite(torch.tensor(rank["loss"]))
