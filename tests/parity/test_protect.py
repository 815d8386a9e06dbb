"""Spikes: one verdict on all ranks before the update, the policies, and samples that are never fed again."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.errors import ConfigError, ExitCode, SpikeError, UsageError
from shardwise.launch.rank.allowed import quarantined
from shardwise.testing import World, WorldError
from shardwise.train.data.loader_options import LoaderOptions
from shardwise.train.protect import Protection, z_score
from tests.parity import points
from tests.parity.points import Case
from tests.parity.test_nonfinite import is_same, snapshot

CASE = Case(rows=64, global_batch=8, steps=18, clip=None)
SPIKE = range(56, 64)  # the last window of the first epoch, in plain order; they come again in step 16


class Spiking(points.Points):
    """Finite numbers, a thousand times too large in one window."""

    def __init__(self, factor: float = 1e3) -> None:
        super().__init__(CASE.rows)
        self.y[SPIKE.start : SPIKE.stop] *= factor


def options(policy: Any, **more: Any) -> sw.StepOptions:
    return sw.StepOptions(protect=sw.Protect(policy=policy, min_history=4, keep_every=3, **more))


def run(text: str, policy: str, factor: float, quarantine: tuple[int, int] | None = None) -> dict[str, Any]:
    fed: list[list[int]] = []
    with points.placed_state(text, CASE, Spiking(factor), shuffle=False) as state:
        if quarantine is not None:
            state.batches.quarantine(*quarantine)  # type: ignore[union-attr]
        seen, events = [], []

        def loss_fn(output: torch.Tensor, batch: list[torch.Tensor]) -> sw.Loss:
            fed.append([int((batch[1] == row).all(dim=1).any()) for row in Spiking(factor).y[SPIKE.start : SPIKE.stop]])
            return points.weighted(output, batch)

        for m in sw.steps(state, loss_fn, until=CASE.steps, options=options(policy)):
            seen.append((m.step, m.skipped))
            events += m.events
        return {
            "seen": seen,
            "events": events,
            "end": snapshot(state),
            "fed": sum(map(sum, fed)),
            "data": state.batches.state_dict(),  # type: ignore[union-attr]
            "skipped": state.skipped,
            "guard": state.guard,
        }


@pytest.mark.share(2)
@pytest.mark.parametrize("plan", ["dp2", "pp2 / 1f1b mb2"])
def test_skip_leaves_the_update_out_on_all_ranks(world: World, plan: str) -> None:
    for rank in world(2, run, f"{plan} / fp64", "skip", 1e3):
        assert [step for step, skipped in rank["seen"] if skipped] == [8]
        [event] = rank["events"]
        assert (event["event"], event["step"], event["rows"]) == ("quarantine", 8, [56, 64])
        assert event["cause"].startswith("spike: ") and "above 10" in event["cause"]
        assert rank["data"]["quarantine"] == [[56, 64]] and rank["skipped"] == 1
    for rank in world(2, run, f"{plan} / fp64", "skip", 1.0):  # the control: nothing spikes, nothing is left out
        assert not rank["events"] and not any(skipped for _, skipped in rank["seen"])


@pytest.mark.parametrize("plan", ["dp2", pytest.param("fsdp2", marks=pytest.mark.soak)])
def test_rewind_ends_as_if_the_samples_had_never_been_there(world: World, plan: str) -> None:
    ranks = world(2, run, f"{plan} / fp64", "rewind", 1e3)
    never = world(2, run, f"{plan} / fp64", "rewind", 1e3, (56, 64))
    [truth] = world(1, run, "dp1 / fp64", "skip", 1e3, (56, 64))
    for rank, other in zip(ranks, never, strict=True):
        # kept before step 7; step 7 is done again with its own samples, step 8 with others
        assert [step for step, _ in rank["seen"]] == [*range(1, 9), *range(7, 19)]
        assert rank["events"][0]["rewound_to"] == 6
        assert is_same(rank["end"], other["end"])
        assert rank["guard"].losses == other["guard"].losses and rank["skipped"] == 1
        assert other["fed"] == 0
        for name, tensor in truth["end"].items():
            torch.testing.assert_close(rank["end"][name], tensor, rtol=1e-11, atol=1e-13)
    assert sum(rank["fed"] for rank in ranks) == len(SPIKE)  # once, and not in the second epoch


def cut(text: str, directory: str, until: int, policy: str) -> None:
    with points.placed_state(text, CASE, Spiking(), shuffle=False) as state:
        for _ in sw.steps(state, points.weighted, until=until, options=options(policy)):
            pass
        sw.Store(directory).save(state)


def resumed(text: str, directory: str) -> dict[str, Any]:
    with points.placed_state(text, CASE, Spiking(), shuffle=False) as state:
        sw.Store(directory).load_latest(state)
        kept = (state.guard.hits, len(state.guard.losses), state.batches.quarantined)  # type: ignore[union-attr]
        for _ in sw.steps(state, points.weighted, until=CASE.steps, options=options("skip")):
            pass
        ids: list[int] = []
        again = sw.loader(Spiking(), CASE.global_batch, state.mesh, seed=points.SEED, shuffle=False)
        again.load_state_dict(state.batches.state_dict())  # type: ignore[union-attr]
        for _ in range(8):
            ids += next(again).indices
        return {"kept": kept, "end": snapshot(state), "ids": ids}


def test_quarantine_and_history_survive_a_resume(world: World, tmp_path: Path) -> None:
    uncut = world(2, run, "dp2 / fp64", "skip", 1e3)
    world(2, cut, "dp2 / fp64", str(tmp_path), 10, "skip", timeout_s=20.0)
    for rank, other in zip(world(2, resumed, "dp2 / fp64", str(tmp_path)), uncut, strict=True):
        assert rank["kept"] == ([8], 9, [(56, 64)])
        assert is_same(rank["end"], other["end"])
        assert not set(rank["ids"]) & set(SPIKE)


def resumed_between_kept_steps(text: str, directory: str) -> dict[str, Any]:
    with points.placed_state(text, CASE, Spiking(), shuffle=False) as state:
        sw.Store(directory).load_latest(state)
        steps = sw.steps(state, points.weighted, until=CASE.steps, options=options("rewind"))
        return {"events": [event for metrics in steps for event in metrics.events], "end": snapshot(state)}


def test_a_run_that_goes_on_keeps_the_steps_that_it_would_have_kept(world: World, tmp_path: Path) -> None:
    """States are kept before steps 1, 4 and 7, it is saved after step 5, and the spike is in step 8."""
    uncut = world(2, run, "dp2 / fp64", "rewind", 1e3)
    world(2, cut, "dp2 / fp64", str(tmp_path), 5, "rewind")
    for rank, other in zip(world(2, resumed_between_kept_steps, "dp2 / fp64", str(tmp_path)), uncut, strict=True):
        assert [event["rewound_to"] for event in rank["events"]] == [6]
        assert is_same(rank["end"], other["end"])


def stopped(text: str, more: dict[str, Any]) -> Any:
    with points.placed_state(text, CASE, Spiking(), shuffle=False) as state:
        try:
            for _ in sw.steps(state, points.weighted, until=CASE.steps, options=options(**more)):
                pass
        except SystemExit as exit_:
            return exit_.code, state.step
        except SpikeError as error:
            return str(error), state.step
    return None


def test_stop_exits_9_and_a_limit_is_an_error(world: World) -> None:
    assert world(2, stopped, "dp2 / fp64", {"policy": "stop"}) == [(int(ExitCode.SPIKE), 8)] * 2
    tight = {"policy": "skip", "limit": 1, "threshold": 1.0, "floor": 1e-6}  # everything above the median spikes
    for text, _ in world(2, stopped, "dp2 / fp64", tight):
        assert "windows were left out within 64 steps" in text and "needed: at most 1" in text


def one_verdict(text: str, own_only: bool) -> str | None:
    """Rank 1 alone sees a norm that spikes: what a faulty device would compute."""
    with points.placed_state(text, CASE) as state:
        protection = Protection(state, sw.Protect(min_history=4), is_norm_local=not own_only)
        for loss in (1.0, 1.1, 0.9, 1.0, 1.0):
            assert protection.judge(loss, loss, excused=False) is None
        return protection.judge(1.0, 1e6 if state.mesh.rank else 1.0, excused=False)


@pytest.mark.share(2)
@pytest.mark.parametrize("plan", ["fsdp2 / fp16", "dp2 / fp16"])
def test_a_spike_whose_gradient_overflows_in_fp16_is_one(world: World, plan: str) -> None:
    """The scale makes up for gradients, and for no loss: 1e6 times the median is no matter of the scale."""
    assert world(2, stopped, plan, {"policy": "stop"}) == [(int(ExitCode.SPIKE), 8)] * 2
    for rank in world(2, run, plan, "rewind", 1e3):
        [event] = rank["events"]
        assert event["rows"] == [56, 64] and event["cause"].startswith("spike: loss ")
    for rank in world(2, run, plan, "rewind", 1.0):  # the control
        assert not rank["events"]


def test_the_verdict_of_one_rank_is_that_of_all(world: World) -> None:
    first, second = world(2, one_verdict, "dp2 / fp64", False)
    assert "on another rank" in first and "gradient norm" in second
    first, second = world(2, one_verdict, "dp2 / fp64", True)
    assert first is None and second is not None  # the negative control: without asking they part


def test_z_score() -> None:
    history = [float(i) for i in range(1, 10)]
    assert z_score(5.0, history, 0.01) == 0 and z_score(1.0, history, 0.01) < 0  # downwards is no spike
    assert math.isclose(z_score(9.0, history, 0.01), 4 / (1.4826 * 2))
    assert math.isclose(z_score(1.02, [1.0] * 9, 0.05), 0.4)  # the floor, where nothing moves


@pytest.mark.parametrize("bad", [{"threshold": 0.0}, {"threshold": math.nan}, {"window": 8}, {"policy": "ignore"}])
def test_what_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="Protect: .*found.*needed"):
        sw.Protect(**bad)
    with pytest.raises(UsageError, match="one policy"):
        sw.StepOptions(on_nonfinite="stop", protect=sw.Protect())


class OwnBatches:
    """Of a script: they tell where they are, and cannot leave samples out."""

    def __init__(self) -> None:
        self.step = 0

    def __next__(self) -> list[torch.Tensor]:
        self.step += 1
        x, y, weight = points.Points(CASE.rows)[8 * self.step - 8 : 8 * self.step]
        return [x, y * math.nan if self.step == 6 else y, weight]

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def test_batches_of_a_scripts_own_are_passed_over_and_not_rewound() -> None:
    """A rewind would skip the window of the kept step, and meet the bad one again until `SpikeError`."""
    plan = sw.Plan.parse("dp1 / fp64")
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(points.Net, plan, mesh, seed=1)
        state = sw.TrainState(placed, sw.adamw(placed, lr=points.LR), OwnBatches())
        with pytest.raises(UsageError, match="found batches of type OwnBatches; needed: the windows of shardw"):
            next(sw.steps(state, points.weighted, until=8, options=options("rewind")))
        state.batches = OwnBatches()
        seen = [(m.step, m.skipped) for m in sw.steps(state, points.weighted, until=8, options=options("skip"))]
        assert seen == [(step, step == 6) for step in range(1, 9)]


class Stream:
    def __iter__(self) -> Any:
        yield from range(64)


def streamed(text: str) -> list[list[int]]:
    with sw.open_mesh(sw.Plan.parse(text)) as mesh:
        data = sw.loader(Stream(), 8, mesh, options=LoaderOptions())
        window = next(data)
        first = window.micro_batches[0].tolist()
        data.quarantine(*(data.ahead.rows_of(window) or ()))
        data.load_state_dict(data.state_before(window))
        return [first, *(next(data).micro_batches[0].tolist() for _ in range(2))]


def test_of_a_stream_windows_are_passed_over(world: World) -> None:
    assert world(2, streamed, "dp2") == [
        [[0, 2, 4, 6], [8, 10, 12, 14], [16, 18, 20, 22]],
        [[1, 3, 5, 7], [9, 11, 13, 15], [17, 19, 21, 23]],
    ]


@pytest.mark.parametrize("bad", [[0], [63], [5, 6, 7, 8], list(range(0, 64, 2)), list(range(63))])
def test_substitutes_are_never_in_quarantine(world: World, bad: list[int]) -> None:
    [(fed, substitutes)] = world(1, excluding, bad)
    assert not set(fed) & set(bad)
    assert len(fed) == 64 and set(range(64)) - set(bad) <= set(fed)  # all others come, as before
    assert len(set(substitutes)) >= min(len(bad), 64 - len(bad)) / 2  # spread, not one for all


def excluding(bad: list[int]) -> tuple[list[int], list[int]]:
    with sw.open_mesh(sw.Plan()) as mesh:
        data = sw.loader(list(range(64)), 8, mesh, shuffle=False)
        for index in bad:
            data.quarantine(index, index + 1)
        fed = [i for _ in range(8) for i in next(data).indices]
        return fed, [fed[i] for i in bad]


def test_when_nothing_is_left_it_says_so(world: World) -> None:
    with pytest.raises(WorldError, match="all 64 samples of the data set are in quarantine"):
        world(1, excluding, list(range(64)))


def refed(text: str, policy: Any, bad: list[int]) -> tuple[list[list[int]], list[tuple[int, int]], list[list[int]]]:
    rows = [torch.full((4,), float("nan") if index in bad else index / 24) for index in range(24)]
    with sw.open_mesh(sw.Plan.parse(text)) as mesh:
        placed = sw.apply(lambda: torch.nn.Linear(4, 1), sw.Plan.parse(text), mesh, seed=1)
        data = sw.loader(rows, 4, mesh, shuffle=False)
        state = sw.TrainState(placed, sw.sgd(placed, lr=1e-3), data)
        seen = []

        def loss_fn(out: torch.Tensor, batch: Any) -> sw.Loss:
            fed.append([round(float(row[0]) * 24) if row[0].isfinite() else -1 for row in batch])
            return sw.mean_over(out.square())

        fed: list[list[int]] = []
        for m in sw.steps(state, loss_fn, until=12, options=options(policy)):
            seen += [] if m.skipped else [fed[-1]]
        resumed = sw.loader(rows, 4, mesh, shuffle=False)
        resumed.load_state_dict(data.state_dict())
        assert resumed.quarantined == data.quarantined
        again = [next(resumed).indices for _ in range(3)]
        assert again == [next(data).indices for _ in range(3)]
        return seen, data.quarantined, again


@pytest.mark.parametrize("policy", ["rewind", "skip"])
def test_stand_ins_that_are_bad_too_are_left_out_as_well(world: World, policy: str) -> None:
    """12 to 15 stand in for 8 to 11, where 8 is bad; of them 13 is."""
    for seen, left_out, _ in world(2, refed, "dp2", policy, [8, 13]):
        assert len(left_out) == 2 and len(set(left_out)) == (1 if policy == "rewind" else 2)
        assert len(seen) >= 10 and all(-1 not in rows for rows in seen)


def test_quarantine_by_the_record_of_a_run() -> None:
    told = [
        {"rows": [0, 4]}, {"rows": [8, 12]}, {"rows": [8, 12]}, {"rows": None},  # of an older version
        {"rows": [8, 12], "nth": 3}, {"rows": [8, 12], "nth": 3}, {"rows": [4, 8], "nth": 4},
    ]  # fmt: skip
    assert quarantined(told) == [(0, 4), (8, 12), (8, 12), (4, 8)]
    anew = [*told, {"rows": None, "nth": 0}]
    assert quarantined(anew) == [] and quarantined([*anew, {"rows": [2, 3], "nth": 1}]) == [(2, 3)]


def test_what_a_script_makes_of_a_window_is_not_rewound() -> None:
    """The loader does not know which of its samples are in it."""
    with points.placed_state("dp1 / fp64", CASE, Spiking(), shuffle=False) as state:
        step = sw.make_step(state, points.weighted, options=options("rewind"))
        batches: Any = state.batches
        window = next(batches)
        with pytest.raises(UsageError, match="found a batch of type list of the script's own; needed: the windows of"):
            step(list(window.micro_batches))
        assert step(window).step == 1
