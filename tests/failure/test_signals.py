"""SIGTERM and SIGINT to one process of a world: all ranks finish the step, save, and end with the signal's code."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import shardwise as sw
from shardwise.errors import ExitCode
from shardwise.launch.stopping import RUN_ID, Stopping, catching
from shardwise.testing.world import World, WorldError
from shardwise.train.signals import SAME_SIGNAL_S, STOP_SIGTERM, STOPS, listening, stop_name
from shardwise.train.sums import _gathered, _spread
from tests.parity import grid, points
from tests.parity.points import Case

CASE = Case(steps=5, clip=None)


def interrupted(text: str, number: int, directory: str) -> dict[str, Any]:
    """The last rank sends itself a signal in the middle of step 2; what every rank did and saw."""
    seen: list[tuple[int, str | None]] = []
    with points.placed_state(text, CASE) as state:

        def loss_fn(output: torch.Tensor, batch: list[torch.Tensor]) -> sw.Loss:
            if state.step == 1 and state.mesh.rank == state.mesh.world - 1:
                os.kill(os.getpid(), number)
            return points.weighted(output, batch)

        handlers = [signal.getsignal(kind) for kind in STOPS]
        code: Any = None
        try:
            for metrics in sw.steps(state, loss_fn, until=CASE.steps, store=sw.Store(directory)):
                seen.append((metrics.step, metrics.stopping))
        except SystemExit as exit_:
            code = exit_.code
        restored = [signal.getsignal(kind) for kind in STOPS] == handlers
        return {"seen": seen, "code": code, "restored": restored, "step": state.step}


def goes_on(text: str, directory: str) -> dict[str, torch.Tensor]:
    """The rest of the run, from what was saved; a new run where nothing was."""
    with points.placed_state(text, CASE) as state:
        sw.Store(directory).load_latest(state)
        for _ in sw.steps(state, points.weighted, until=CASE.steps):
            pass
        return {n: grid.whole(p) for n, p in state.placed.named_parameters().items()}


@pytest.mark.share(2)
@pytest.mark.parametrize("plan", ["dp2", "fsdp2", "pp2 / 1f1b mb2"])
def test_sigterm_finishes_the_step_saves_and_exits_143(world: World, tmp_path: Path, plan: str) -> None:
    text = f"{plan} / fp64"
    for rank in world(2, interrupted, text, signal.SIGTERM, str(tmp_path / "cut")):
        assert rank == {"seen": [(1, None), (2, "SIGTERM")], "code": 143, "restored": True, "step": 2}
    uncut = world(2, goes_on, text, str(tmp_path / "none"))
    for rank, other in zip(world(2, goes_on, text, str(tmp_path / "cut")), uncut, strict=True):
        assert all(torch.equal(tensor, other[name]) for name, tensor in rank.items())


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, ExitCode.INTERRUPTED),
        (signal.SIGUSR1, ExitCode.PREEMPTED),
        (signal.SIGHUP, ExitCode.TERMINATED),
    ],
)
def test_other_signals_have_codes_of_their_own(
    world: World, tmp_path: Path, number: signal.Signals, code: ExitCode
) -> None:
    said = "SIGTERM" if number == signal.SIGHUP else number.name
    for rank in world(2, interrupted, "dp2 / fp64", number, str(tmp_path)):
        assert rank == {"seen": [(1, None), (2, said)], "code": int(code), "restored": True, "step": 2}
    assert (tmp_path / "latest").read_text() == "step-00000002\n"


def all_at_once(text: str, directory: str) -> list[Any]:
    """Every rank is told to stop, as a launcher does it."""
    with points.placed_state(text, CASE) as state:
        loop = sw.steps(state, points.weighted, until=CASE.steps, store=sw.Store(directory))
        next(loop)
        os.kill(os.getpid(), signal.SIGTERM)
        stopping = next(loop).stopping
        try:
            next(loop)
        except SystemExit as exit_:
            return [stopping, exit_.code, state.step]
    return []


def test_sigterm_to_all_ranks(world: World, tmp_path: Path) -> None:
    assert world(4, all_at_once, "dp4 / fp64", str(tmp_path)) == [["SIGTERM", 143, 2]] * 4


def twice(text: str, marks: str) -> None:
    """The second signal comes before the step is over."""

    def loss_fn(output: torch.Tensor, batch: list[torch.Tensor]) -> sw.Loss:
        for number in range(3):  # the launcher and the batch system may both pass one request on: two at once are one
            os.kill(os.getpid(), signal.SIGTERM)
            Path(marks, f"{os.environ['RANK']}-{number}").touch()
            time.sleep(number * (SAME_SIGNAL_S + 0.2))
        return points.weighted(output, batch)

    with points.placed_state(text, CASE) as state:
        next(sw.steps(state, loss_fn, until=CASE.steps))


def test_a_second_signal_ends_the_process_at_once(world: World, tmp_path: Path) -> None:
    with pytest.raises(WorldError, match=rf"exit code -{signal.SIGTERM:d}\)"):
        world(2, twice, "dp2 / fp64", str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"0-0", "0-1", "1-0", "1-1"}  # not past the third


class Asked:
    """Who listens."""

    stop_requested = 0


def nested(marks: str) -> list[int]:
    """Somebody listens, also around a loop; what they heard. Then comes a second signal."""
    around, loop, late = Asked(), Asked(), Asked()
    with listening(around):
        with listening(loop):
            os.kill(os.getpid(), signal.SIGUSR1)
        with listening(late):
            heard = [each.stop_requested for each in (around, loop, late)]
        if marks:
            Path(marks, "heard").touch()
            time.sleep(SAME_SIGNAL_S + 0.2)
            os.kill(os.getpid(), signal.SIGTERM)
            Path(marks, "outlived").touch()
    return heard


def minded() -> bool:
    """A rank of a launcher of ours, to which the launcher passes on late what came to both."""
    with patch.dict(os.environ, TORCHELASTIC_RUN_ID=RUN_ID), listening(Asked()):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(SAME_SIGNAL_S + 0.2)
        os.kill(os.getpid(), signal.SIGTERM)
    return True


def test_a_rank_leaves_a_second_signal_to_its_launcher(world: World) -> None:
    assert world(1, minded) == [True]


def test_who_listens_around_a_loop_hears_what_comes_in_it(world: World, tmp_path: Path) -> None:
    assert world(1, nested, "") == [[STOPS[signal.SIGUSR1]] * 3]
    with pytest.raises(WorldError, match=rf"exit code -{signal.SIGTERM:d}\)"):
        world(1, nested, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["heard"]


def test_requests_of_many_ranks_stay_apart_even_where_they_ride_as_fp32() -> None:
    for ranks in (1, 2, 511, 512):
        for number, stop in STOPS.items():
            total = torch.zeros(21, dtype=torch.float32)
            for _ in range(ranks):
                total += torch.tensor(_spread([0.5, 3.0, stop, 1.0, 1.0, 0.0]), dtype=torch.float32)
            said = "SIGTERM" if number == signal.SIGHUP else number.name
            assert stop_name(_gathered(total.tolist())[2]) == said
    assert stop_name(STOP_SIGTERM + 99_999) == "SIGTERM" and stop_name(99_999) == "SIGINT"


def test_the_first_ctrl_c_is_no_second_signal_of_another_kind() -> None:
    for first, then, count in (
        (signal.SIGTERM, signal.SIGINT, 1), (signal.SIGINT, signal.SIGTERM, 1), (signal.SIGINT, signal.SIGINT, 2),
    ):  # fmt: skip
        stopping = Stopping()
        stopping.on_signal(first, None)
        stopping.on_signal(then, None)
        assert (stopping.first, stopping.count) == (first, count)


def test_a_signal_that_comes_while_the_first_one_is_handled_is_that_one_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python runs a handler within a handler: at each of its calls the second one may be in between."""
    stopping, moments = Stopping(), iter([None])

    def now() -> float:
        for _ in moments:
            stopping.on_signal(signal.SIGTERM, None)
        return 5.0

    monkeypatch.setattr(time, "monotonic", now)
    stopping.on_signal(signal.SIGTERM, None)
    assert (len(stopping.came), stopping.first, stopping.at, stopping.count) == (2, signal.SIGTERM, 5.0, 1)
    monkeypatch.setattr(time, "monotonic", lambda: 6.5)
    stopping.on_signal(signal.SIGTERM, None)
    assert stopping.count == 2 and stopping.killed


@pytest.mark.parametrize("before", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_nohup_ignores_stays_ignored(before: Any) -> None:
    kept = signal.signal(signal.SIGHUP, before)
    try:
        with catching() as stopping:
            assert (signal.getsignal(signal.SIGHUP) == signal.SIG_IGN) == (before == signal.SIG_IGN)
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.05)
        assert stopping.count == (before == signal.SIG_DFL) and signal.getsignal(signal.SIGHUP) == before
    finally:
        signal.signal(signal.SIGHUP, kept)
