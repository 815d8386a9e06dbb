"""`--elastic`: processes are lost and come back, the plan changes, and the run is that of one undisturbed process."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from shardwise.cli.main import main
from shardwise.cli.options.elastic import Asked, elastic_policy, plan_here
from shardwise.errors import ExitCode, LaunchError, UsageError
from shardwise.launch.elastic.nodes import plan_of_world
from shardwise.launch.elastic.plan import Known
from shardwise.launch.elastic.slots import Elastic, Fleet
from shardwise.launch.environment import Launch
from shardwise.launch.job import Job
from shardwise.launch.local import Failure
from shardwise.launch.recovery import Bounds, Recovering
from shardwise.plan.plan import Plan
from shardwise.testing.killer import processes_below
from shardwise.testing.world import World
from shardwise.train.kept.mirror import other_statistics
from tests.disks import disk
from tests.failure import resizing

SCRIPT = Path(resizing.__file__)
TOLERANCE = 1e-11


def start(out: Path, *words: str, stderr: int = subprocess.PIPE, **env: str) -> subprocess.Popen[str]:
    """`shardwise run --elastic`, with its list of slots and its events in `out`."""
    out.mkdir(exist_ok=True)
    here = ["--devices", str(out / "devices"), "--events", str(out / "events")]
    command = [sys.executable, "-m", "shardwise", "run", *here, *words]
    return subprocess.Popen(command, stderr=stderr, text=True, env={**os.environ, **env})


def finish(process: subprocess.Popen[Any], timeout_s: float = 100) -> tuple[int, str]:
    try:
        _, err = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    return process.returncode, err


def rows_of(out: Path, rank: int = 0) -> list[dict[str, Any]]:
    """What a rank noted, the last line of each step; the retried ones come twice."""
    path = out / f"rank-{rank}"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def wait_until(process: subprocess.Popen[Any], found: Callable[[], object]) -> None:
    end = time.monotonic() + 90
    while not found():
        assert process.poll() is None and time.monotonic() < end, finish(process, 5)
        time.sleep(0.02)


def wait_for_step(process: subprocess.Popen[Any], out: Path, step: int, world: int) -> None:
    """Until so many processes have finished a step."""
    wait_until(process, lambda: any(row["step"] >= step and row["world"] == world for row in rows_of(out)))


def events_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "events").read_text().splitlines()]


def kill_rank(process: subprocess.Popen[Any], rank: int) -> None:
    (victim,) = (child for name, child in processes_below(process.pid, "rank ") if name == f"rank {rank}")
    victim.kill()


def standbys_of(process: subprocess.Popen[Any]) -> set[psutil.Process]:
    """Of the first rank."""
    return {child for name, child in processes_below(process.pid, "standby ") if name == "standby 0"}


def ranks_of(process: subprocess.Popen[Any]) -> list[psutil.Process]:
    return [rank for _, rank in processes_below(process.pid, "rank ")]


def close(here: float, there: float) -> bool:
    return abs(here - there) <= TOLERANCE * max(abs(here), abs(there))


def check_as_undisturbed(world: World, out: Path, until: int) -> None:
    """What `compare` says of a run and of one of one process; and that it says so of no other."""
    alone = out.with_name(f"{out.name}-alone")
    alone.mkdir()
    world(1, resizing.main, "dp1 / fp64", str(alone), until, timeout_s=60 + until)
    compare(out, alone, until)
    for path, content in faults(out):
        kept = path.read_bytes()
        path.write_bytes(content)
        with pytest.raises(AssertionError):
            compare(out, alone, until)
        path.write_bytes(kept)
    compare(out, alone, until)


def faults(out: Path) -> Iterator[tuple[Path, bytes]]:
    """Files of a run in which one number is another."""
    row = rows_of(out)[-1]
    sees = next(rank for rank in range(row["world"]) if rows_of(out, rank)[-1]["seen"])  # under pp not the first one
    first, *seen = rows_of(out, sees)[-1]["seen"]
    for rank, fault in (
        (0, {"loss": row["loss"] * (1 + 1e-9)}),
        (0, {"norm": row["norm"] * (1 + 1e-9)}),
        (0, {"lr": row["lr"] * (1 + 1e-9)}),
        (sees, {"seen": [(first + 1) % resizing.ROWS, *seen]}),
        (0, {"step": row["step"] - 1}),
    ):
        path = out / f"rank-{rank}"
        *before, line = path.read_text().splitlines(keepends=True)
        yield path, "".join([*before, json.dumps(json.loads(line) | fault), "\n"]).encode()
    state = torch.load(out / "state.pt")
    for kind in ("model", "exp_avg", "exp_avg_sq"):
        largest = max((t for name, t in state.items() if kind_of(name) == kind), key=lambda t: float(t.abs().max()))
        largest *= 1 + 1e-9
        file = io.BytesIO()
        torch.save(state, file)
        largest /= 1 + 1e-9
        yield out / "state.pt", file.getvalue()
    data = json.loads((out / "scalars").read_text())
    yield out / "scalars", json.dumps(data | {"other": 1}).encode()


def compare(out: Path, alone: Path, until: int) -> None:
    """Losses, rates, samples, parameters, optimizer and data position of two runs."""
    expected = {row["step"]: row for row in rows_of(alone)}
    found = {row["step"]: row for row in rows_of(out)}  # of a step that was tried again, the last try
    assert sorted(found) == sorted(expected) == list(range(1, until + 1))
    for row in rows_of(out):  # the retried ones too: nothing else was ever computed
        there = expected[row["step"]]
        assert all(close(row[key], there[key]) for key in ("loss", "norm", "lr")), (row, there)
    seen: Counter[int] = Counter()
    for step, row in found.items():
        shares: dict[int, list[int]] = {}  # ranks along tp and pp have the same samples, or see none
        for rank in range(row["world"]):
            last = next(r for r in reversed(rows_of(out, rank)) if r["step"] == step)
            shares[last["share"]] = last["seen"] or shares.get(last["share"], [])
        samples = [number for share in shares.values() for number in share]
        assert sorted(samples) == sorted(expected[step]["seen"]), step
        seen.update(samples)
    epochs, rest = divmod(until * resizing.BATCH, resizing.ROWS)
    assert Counter(seen.values()) == Counter({epochs: resizing.ROWS - rest, epochs + 1: rest} if rest else {})
    here, there = torch.load(out / "state.pt"), torch.load(alone / "state.pt")
    assert here.keys() == there.keys()
    scales: dict[str, float] = {}  # some parameters have no gradient but noise: what counts is the kind's own scale
    for name, tensor in there.items():
        scales[kind_of(name)] = max(scales.get(kind_of(name), 0.0), float(tensor.abs().max()))
    for name, tensor in here.items():
        off = float((tensor - there[name]).abs().max())
        assert off <= TOLERANCE * scales[kind_of(name)], (name, off, scales[kind_of(name)])
    assert (out / "scalars").read_text() == (alone / "scalars").read_text()


def kind_of(name: str) -> str:
    """`model` of a parameter, the last part of the optimizer's: `exp_avg`."""
    return "model" if name.startswith("model.") else name.rpartition(".")[2]


def test_a_process_is_lost_and_comes_back(world: World, tmp_path: Path) -> None:
    """4 -> 3 by a death at a random step, 3 -> 4 by the list of slots."""
    out, draw = tmp_path / "a", random.Random(11)
    words = ("--elastic", "2:4", "--slot-failures", "1", str(SCRIPT), "fsdp4 / fp64", "--", str(out), "40")
    process = start(out, *words, PACE_S="0.5")
    wait_for_step(process, out, draw.randrange(2, 5), 4)
    time.sleep(draw.random() / 2)
    kill_rank(process, 2)
    wait_for_step(process, out, 0, 3)
    (out / "devices").write_text("0-9\n")  # no more than four are used
    wait_until(process, lambda: rows_of(out)[-1]["world"] == 4)
    (out / "hurry").touch()
    code, err = finish(process)
    assert code == 0, err
    check_as_undisturbed(world, out, 40)
    lost, back = events_of(out)
    assert [lost[key] for key in ("event", "before", "after", "slots")] == ["elastic", 4, 3, [0, 1, 3]]
    assert [back[key] for key in ("event", "before", "after", "slots")] == ["elastic", 3, 4, [0, 1, 2, 3]]
    plans = ["fsdp4 / fp64", "fsdp3 / mb2 / fp64", "fsdp4 / fp64"]
    assert [lost["plan_before"], lost["plan"], back["plan"]] == plans
    assert "rank 2: the process was killed by SIGKILL" in lost["cause"] and back["cause"] == "slots 0-9"
    for event in (lost, back):
        assert event["step"] >= 1 and event["first_step_s"] > 0 and event["standby"]
        assert event["seconds"] == event["detected_s"] + event["planned_s"] + event["resharded_s"]
    line = next(line for line in err.splitlines() if "processes:" in line)
    said = f"shardwise: elastic: 4 -> 3 processes: {plans[0]} -> {plans[1]}, resumed at step {lost['step']}, "
    assert line.startswith(said)
    print([round(event["seconds"], 2) for event in (lost, back)])


def test_below_the_minimum_nobody_trains_and_signals_end_in_order(tmp_path: Path) -> None:
    out = tmp_path / "a"
    words = ("--elastic", "2:3", str(SCRIPT), "dp2 / fp64", "--", str(out), "100000")
    process = start(out, *words, PACE_S="0.05")
    wait_for_step(process, out, 3, 2)
    (out / "devices").write_text("1")
    wait_until(process, lambda: not ranks_of(process))
    assert steps_saved(out) == [rows_of(out)[-1]["step"]]  # nobody may come back
    before = len(rows_of(out))
    time.sleep(0.5)
    assert len(rows_of(out)) == before
    (out / "devices").write_text("1-7")
    wait_until(process, lambda: ranks_of(process))
    process.send_signal(signal.SIGTERM)  # while three processes take over: they go on, finish a step and save
    children = psutil.Process(process.pid).children(recursive=True)
    code, err = finish(process)
    assert code == ExitCode.TERMINATED, err
    assert "1 slots can be used, and at least 2 are needed: nobody trains; waiting up to 300 s" in err
    saved, last = steps_saved(out), rows_of(out)[-1]
    assert saved[-1] == last["step"] and last["world"] == 3
    assert not psutil.wait_procs(children, timeout=5)[1]


@pytest.mark.soak  # in every run: what a few cannot save, below
def test_what_dies_after_the_save_of_a_pause_is_not_saved_by_a_few_once_more(tmp_path: Path) -> None:
    """One rank takes the save to its end and ends in order; the other one dies of what ends it then."""
    out, script = tmp_path / "a", tmp_path / "dies_at_exit.py"
    script.write_text(
        "import atexit, os, runpy\n"
        "if os.environ['RANK'] == '1':\n"
        "    atexit.register(os._exit, 1)\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
    )
    process = start(out, "--elastic", "2:2", str(script), "dp2 / fp64", "--", str(out), "100000", PACE_S="0.05")
    wait_for_step(process, out, 2, 2)
    (out / "devices").write_text("1")
    wait_until(process, lambda: not ranks_of(process))
    saved = steps_saved(out)
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    code, err = finish(process)
    assert "take over, only to save" not in err and "is not saved" not in err
    assert saved == steps_saved(out) == [rows_of(out)[-1]["step"]] and code == ExitCode.TERMINATED, err


@pytest.mark.soak  # in every run: a pause, above, and what a few cannot save
def test_the_same_go_on_after_a_pause_and_a_few_save_what_others_trained(tmp_path: Path) -> None:
    """2 -> 0 -> 2 by the list of slots; then a death, below the minimum: who is left takes over, saves and ends."""
    out = tmp_path / "a"
    words = ("--elastic", "2:2", "--slot-failures", "1", str(SCRIPT), "dp2 / fp64", "--", str(out), "100000")
    process = start(out, *words, PACE_S="0.05")

    def nobody_trains() -> bool:
        return not ranks_of(process)

    wait_for_step(process, out, 2, 2)
    (out / "devices").write_text("1")
    wait_until(process, nobody_trains)
    (out / "devices").write_text("0-1")
    wait_until(process, lambda: (out / "events").exists())
    kill_rank(process, 1)
    wait_until(process, lambda: rows_of(out)[-1]["world"] == 1 and nobody_trains())
    process.send_signal(signal.SIGTERM)
    code, err = finish(process)
    assert code == ExitCode.TERMINATED, err
    last, (event,) = rows_of(out)[-1], events_of(out)
    assert steps_saved(out)[-1] == last["step"] and last["world"] == 1
    assert [event[key] for key in ("before", "after", "slots", "cause")] == [2, 2, [0, 1], "slots 1"]
    assert "elastic: 2 -> 2 processes: dp2 / fp64 -> dp2 / fp64, resumed at step" in err
    assert "too few are left to train; 1 take over, only to save" in err and "is not saved" not in err


def test_what_a_few_cannot_save_is_said_and_has_the_code_of_it(tmp_path: Path) -> None:
    out = tmp_path / "a"
    words = ("--elastic", "2:2", "--slot-failures", "1", str(SCRIPT), "dp2 / fp64", "--", str(out), "100000")
    process = start(out, *words, stderr=(said := (tmp_path / "said").open("w+")).fileno(), PACE_S="0.05")
    wait_for_step(process, out, 2, 2)
    (out / "checkpoints").write_text("")  # no store any more
    kill_rank(process, 1)
    wait_until(process, lambda: "nobody trains; waiting up to 300 s" in (tmp_path / "said").read_text())
    process.send_signal(signal.SIGTERM)
    with said:
        assert process.wait(60) == ExitCode.KILLED
    err = (tmp_path / "said").read_text()
    assert "what was trained after the last checkpoint is not saved (store " in err and "it is a file" in err
    assert "as too few ranks were left to save (137); go on from the last checkpoint" in err


@pytest.mark.soak  # in every run: tests/failure/test_endings.py, what cannot be said
def test_who_is_not_heard_goes_on(tmp_path: Path) -> None:
    out, (read, write) = tmp_path / "a", os.pipe()
    words = ("--elastic", "1:2", "--slot-failures", "1", str(SCRIPT), "dp2 / fp64", "--", str(out), "100")
    process = start(out, *words, stderr=write, PACE_S="0.3")
    os.close(write)
    os.close(read)
    wait_for_step(process, out, 1, 2)
    kill_rank(process, 1)
    wait_for_step(process, out, 1, 1)
    (out / "hurry").touch()
    assert process.wait(90) == 0
    assert [(event["before"], event["after"]) for event in events_of(out)] == [(2, 1)]


@pytest.mark.soak
def test_another_number_of_micro_batches_is_another_batch_norm(tmp_path: Path) -> None:
    out = tmp_path / "a"
    words = ("--elastic", "1:2", "--slot-failures", "1", str(SCRIPT), "dp2 / fp64", "--", str(out), "100")
    process = start(out, *words, PACE_S="0.3", BATCH_NORM="1")
    wait_for_step(process, out, 3, 2)
    kill_rank(process, 1)
    wait_for_step(process, out, 1, 1)
    (out / "hurry").touch()
    code, err = finish(process)
    assert code == 0 and "batch norm: found 2 micro-batches per step, and 1 up to step" in err, err


@pytest.mark.parametrize(
    ("then", "now", "is_said"), [(1, 2, True), (2, 2, False), (0, 2, False), (2, 0, False), (0, 0, False)]
)
def test_only_another_number_of_micro_batches_is_said(then: int, now: int, is_said: bool) -> None:
    assert ("up to step 7" in other_statistics(then, now, 7)) == is_said


def steps_saved(out: Path) -> list[int]:
    return sorted(int(path.parent.name[5:]) for path in (out / "checkpoints").glob("step-????????/manifest.json"))


def test_too_few_for_too_long_is_an_error_and_what_is_no_list_changes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "a"
    words = ("--elastic", "2:2", "--elastic-wait", "1", str(SCRIPT), "dp2 / fp64", "--", str(out), "100000")
    process = start(out, *words, PACE_S="0.05")
    wait_for_step(process, out, 2, 2)
    (out / "devices").write_text("nought")
    step = rows_of(out)[-1]["step"]
    wait_for_step(process, out, step + 8, 2)
    for _ in range(2):  # twice within few steps: left out
        wait_for_step(process, out, (step := rows_of(out)[-1]["step"]) + 2, 2)
        kill_rank(process, 1)
    code, err = finish(process)
    assert code == ExitCode.LAUNCH, err
    assert "found 'nought', needed slots such as `0-3`" in err
    assert (
        "--elastic 2:2 with the plan `dp2 / fp64`: found 1 slots that can be used (0), needed 2; slot 1 is left" in err
    )
    assert "waited 1 s for" in err and "goes on from its last checkpoint" in err
    (event,) = events_of(out)  # the first failure was recovered from by as many
    assert (event["event"], event["rank"], event["standby"]) == ("recovery", 1, True)


@pytest.mark.soak  # in every run: a change alone, and too few alone
def test_a_change_before_too_few_are_left_is_recorded(tmp_path: Path) -> None:
    """3 -> 2, and in the first step of the two another death: nobody trains."""
    out = tmp_path / "a"
    words = ("--elastic", "2:3", "--slot-failures", "1", "--elastic-wait", "0", str(SCRIPT), "dp3 / fp64")
    process = start(out, *words, "--", str(out), "100000", PACE_S="2")
    wait_for_step(process, out, 2, 3)
    kill_rank(process, 2)
    wait_for_step(process, out, 1, 2)  # noted in the body of the loop: no copy of this step was made yet
    kill_rank(process, 1)
    code, err = finish(process)
    assert code == ExitCode.LAUNCH, err
    (event,) = events_of(out)
    assert [event[key] for key in ("before", "after", "slots", "first_step_s")] == [3, 2, [0, 1], None]
    assert "rank 2: the process was killed by SIGKILL" in event["cause"] and event["resharded_s"] > 0
    assert "elastic: 3 -> 2 processes" in err


@pytest.mark.soak  # in every run: tests/failure/test_recovery.py, the same fork server
def test_no_process_outlives_the_launcher(tmp_path: Path) -> None:
    out = tmp_path / "a"
    process = start(out, "--elastic", "1:3", str(SCRIPT), "dp2 / fp64", "--", str(out), "100000", PACE_S="0.05")
    wait_for_step(process, out, 2, 2)
    (out / "devices").write_text("0-2")  # a third set gets ready
    time.sleep(0.5)
    found = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    finish(process)
    assert len(found) >= 3 and not psutil.wait_procs(found, timeout=25)[1]


SIZES = "--model tiny --layers 2 --dim 32 --heads 2 --ffn 48 --seq 32 --batch 3 --schedule constant --no-sample --json"


def metrics_of(run: Path) -> dict[int, tuple[float, float, float]]:
    """Loss, gradient norm and weight of each step of a run of `shardwise train`."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return {row["step"]: (row["loss"], row["grad_norm"], row["weight"]) for row in rows if "grad_norm" in row}


def test_the_train_verb_trains_on_with_one_process(tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "a"
    text.write_text("".join(f"line {i}: {i * i} is the square of {i}\n" for i in range(400)))
    every = "--device cpu --eval-every 0 --checkpoint-every 0"
    base = [sys.executable, "-m", "shardwise", "train", "--data", str(text), *SIZES.split(), *every.split()]
    more = [
        "--out",
        str(out),
        "--plan",
        "fsdp2 / fp64",
        "--steps",
        "100000",
        "--elastic",
        "1:2",
        "--slot-failures",
        "1",
    ]
    process = subprocess.Popen([*base, *more], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    wait_until(process, lambda: len(metrics_of(out)) > 3)
    kill_rank(process, 1)
    wait_until(process, lambda: (out / "events.jsonl").exists())
    process.send_signal(signal.SIGTERM)
    code, err = finish(process)
    assert code == ExitCode.TERMINATED, err
    found = metrics_of(out)
    last = max(found)
    assert sorted(found) == list(range(1, last + 1)) and (out / "checkpoints" / f"step-{last:08}").is_dir()
    one = [*base, "--out", str(tmp_path / "b"), "--plan", "dp1 / fp64", "--steps", str(last)]
    assert subprocess.run(one, capture_output=True, timeout=200).returncode == 0
    alone = metrics_of(tmp_path / "b")
    assert alone.keys() == found.keys()
    for step, numbers in found.items():  # a batch of 3, which two ranks divide unevenly
        assert numbers == pytest.approx(alone[step], rel=TOLERANCE), step
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    (lost,) = [event for event in events if event["event"] == "elastic"]
    assert (lost["before"], lost["after"], lost["slots"]) == (2, 1, [0])
    assert lost["plan_before"] == "fsdp2 / gbs3 / fp64"
    assert lost["plan"] == str(Plan.load(out / "plan.toml")) == "dp1 zero3 / mb2 gbs3 / fp64"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """One of 8 MiB."""
    with disk(tmp_path, "8m") as path:
        yield path


@pytest.mark.soak  # in every run: tests/failure/test_endings.py, records on a full disk
def test_a_full_disk_ends_no_change(small_disk: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A rank dies while nothing can be written: the other one trains on, and saves when there is room again."""
    out, elsewhere = small_disk / "a", tmp_path_factory.mktemp("elsewhere")
    text, said = elsewhere / "text.txt", elsewhere / "said"
    text.write_text("".join(f"line {i}: {i * i} is the square of {i}\n" for i in range(400)))
    words = [*train_words(text, out, 100000, "fsdp2 / fp64"), "--elastic", "1:2", "--slot-failures", "1"]
    with said.open("w") as err:
        process = subprocess.Popen([sys.executable, "-m", "shardwise", *words], stdout=subprocess.DEVNULL, stderr=err)
    wait_until(process, lambda: len(metrics_of(out)) > 3)
    before = (out / "plan.toml").read_text()
    with contextlib.suppress(OSError), (small_disk / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(b"x" * 4096)
    standbys = standbys_of(process)
    for standby in standbys:  # it has opened its files while there was room
        standby.kill()
    wait_until(process, lambda: standbys_of(process) - standbys)
    kill_rank(process, 1)
    wait_until(process, lambda: "elastic: 2 -> 1 processes" in said.read_text())
    (small_disk / "filler").unlink()
    reached = max(metrics_of(out))
    wait_until(process, lambda: max(metrics_of(out)) > reached + 3)
    process.send_signal(signal.SIGTERM)
    finish(process)
    assert process.returncode == ExitCode.TERMINATED, said.read_text()
    assert (out / "checkpoints" / f"step-{max(metrics_of(out)):08}").is_dir()
    assert (out / "plan.toml").read_text() == before and said.read_text().count("is not recorded") == 1


NODES = {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "False"}


def as_rank(words: list[str]) -> tuple[int, str]:
    """`shardwise WORDS` in a process that a launcher has started: its exit code, and what it said."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            main(words)
        except SystemExit as end:
            return int(end.code or 0), said.getvalue()
    return 0, said.getvalue()


def train_words(text: Path, out: Path, steps: int, plan: str) -> list[str]:
    rest = f"--device cpu --eval-every 0 --checkpoint-every 0 --steps {steps} --data {text} --out {out}".split()
    return ["train", *SIZES.split(), *rest, "--plan", plan]


def test_a_world_of_another_size_goes_on_as_the_launcher_starts_it(world: World, tmp_path: Path) -> None:
    """What torch elastic does when nodes are lost or join, as its workers see it: other variables at the next start."""
    text, out = tmp_path / "text.txt", tmp_path / "a"
    text.write_text("".join(f"line {i}: {i * i} is the square of {i}\n" for i in range(400)))
    for steps, ranks in ((3, 2), (5, 1), (8, 3)):
        words = [*train_words(text, out, steps, "dp2 / fp64"), "--elastic", "1:3"]
        assert [code for code, _ in world(ranks, as_rank, words, **NODES)] == [0] * ranks
    assert world(1, as_rank, train_words(text, tmp_path / "b", 8, "dp1 / fp64"))[0][0] == 0
    found, alone = metrics_of(out), metrics_of(tmp_path / "b")
    assert list(found) == list(alone) == list(range(1, 9))
    for step, numbers in found.items():
        assert numbers == pytest.approx(alone[step], rel=TOLERANCE), step
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    plans = [event["plan"] for event in events if event["event"] == "elastic"]
    assert plans == ["dp2 / gbs3 / fp64", "dp1 / mb2 gbs3 / fp64", "dp3 / gbs3 / fp64"]
    changes = [change for event in events if event["event"] == "changed" for change in event["changes"]]
    assert all(change.startswith("train.steps") for change in changes)  # another plan is no change of a setting
    (code, err), *_ = world(1, as_rank, [*train_words(text, out, 9, "dp2 / fp64"), "--elastic", "2:3"], **NODES)
    assert code == ExitCode.LAUNCH and "found a world of 1 processes" in err and "nobody trains on alone" in err
    (code, err), *_ = world(1, as_rank, train_words(text, out, 9, "dp2 / fp64"), **NODES)
    assert code == ExitCode.REFUSED and "the plan needs 2 ranks and 1 run" in err
    shared = NODES | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    (code, err), *_ = world(2, as_rank, [*train_words(text, out, 9, "dp2 / fp64"), "--elastic", "1:3"], **shared)
    assert code == ExitCode.LAUNCH and "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in err
    assert list(metrics_of(out)) == list(range(1, 9))


def in_folder(folder: Path, words: list[str]) -> tuple[int, str]:
    os.chdir(folder)
    return as_rank(words)


def test_a_launched_process_that_is_alone_chooses_its_directory(world: World, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i}: {i * i} is the square of {i}\n" for i in range(400)))
    rest = f"--device cpu --eval-every 0 --checkpoint-every 0 --steps 2 --data {text}".split()
    words = ["train", *SIZES.split(), *rest]
    [(code, err)] = world(1, in_folder, tmp_path, words, **NODES)
    assert code == 0, err
    (run,) = (tmp_path / "runs").iterdir()
    assert list(metrics_of(run)) == [1, 2] and str(Plan.load(run / "plan.toml")) == "dp1 / gbs3 / fp32"
    for ranks, more in ((1, ["--elastic", "1:1"]), (2, [])):  # who are others, now or after a restart
        for code, err in world(ranks, in_folder, tmp_path, [*words, *more], **NODES):
            assert code == ExitCode.USAGE and "needed --out" in err
    assert list((tmp_path / "runs").iterdir()) == [run]


def test_what_is_refused_of_processes_that_a_launcher_started() -> None:
    launch = Launch(launcher="torchrun", rank=1, world=2, local_rank=1, local_world=2, init="env://")
    elastic = Elastic(least=2, most=3, own=Plan.parse("dp2 / gbs8"), arguments=lambda _: ())
    assert plan_of_world(elastic, launch, {}) is elastic.own
    for size, said, unsaid in ((1, "nobody trains on alone", "larger MAX"), (4, "larger MAX", "nobody trains")):
        with pytest.raises(LaunchError, match=f"found a world of {size} .* needed 2 to 3: .*{said}") as caught:
            plan_of_world(elastic, replace(launch, world=size), {})
        assert unsaid not in str(caught.value)
    asked = Asked(least=2, most=3)
    assert plan_here(asked, elastic.own, Known(), launch) is elastic.own
    for name, idle in (("--devices", {"devices": Path("d")}), ("--slot-failures", {"failures": 2})):
        with pytest.raises(UsageError, match=f"{name}: found 2 processes that torchrun started"):
            plan_here(replace(asked, **idle), elastic.own, Known(), launch)


def test_a_slot_may_fail_as_often_as_was_said(tmp_path: Path) -> None:
    """More often than recovery allows processes to be killed in one step otherwise."""
    asked = Asked.read("2:4", failures=12, wait_s=None)
    assert asked is not None
    policy = elastic_policy(
        asked, Recovering(), Plan.parse("dp3 / gbs6"), lambda _: (), devices=tmp_path / "devices", known=Known()
    )
    here = Fleet(Job(target=__file__, nproc=3), policy.elastic)
    failure = Failure(rank=1, message="killed", exit_code=ExitCode.RANK_FAILED)
    for killed in (True, False):
        bounds = Bounds(policy)
        for count in range(1, 13):
            assert bounds.refuse(failure, copies=5, killed=killed) is None, count
            assert here.fail(1 + killed, "killed", 5) is (count == 12)
        assert bounds.refuse(failure, copies=5, killed=killed) is not None, "the script's own fault"
    few = elastic_policy(
        replace(asked, failures=None), Recovering(), Plan(), lambda _: (), devices=tmp_path / "devices", known=Known()
    )
    assert few.elastic is not None and (few.elastic.failures, few.elastic.wait_s) == (2, 300.0)
    assert (few.raised_in_a_row, few.killed_in_a_row) == (2, 10)


def test_a_script_gets_the_plan_of_the_world_that_the_launcher_started(world: World, tmp_path: Path) -> None:
    words = ["run", "--elastic", "1:3", str(SCRIPT), "dp3 / fp64", "--", str(tmp_path), "4"]
    assert world(2, as_rank, words, **NODES) == [(0, "")] * 2
    assert [(row["step"], row["world"]) for row in rows_of(tmp_path)] == [(step, 2) for step in range(1, 5)]


CONF = "join_timeout=60,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"


@pytest.mark.soak
def test_two_agents_of_torchrun(tmp_path: Path) -> None:
    """One agent trains alone, a second one joins and is killed: torch elastic restarts, and each start plans anew."""
    text, out = tmp_path / "text.txt", tmp_path / "a"
    text.write_text("".join(f"line {i}: {i * i} is the square of {i}\n" for i in range(400)))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=5"]
    agent += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=x", f"--rdzv-conf={CONF}"]
    slowly = ("--lr", "0.00001")  # on a slow machine hundreds of steps go by, and rounding grows with what they change
    words = [*train_words(text, out, 100000, "dp2 / fp64"), *slowly, "--checkpoint-every", "20", "--elastic", "1:2"]
    env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}

    def join() -> subprocess.Popen[str]:
        command = [*agent, "-m", "shardwise", *words]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env)

    def plans() -> list[str]:
        path = out / "events.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [row["plan"] for row in rows if row["event"] == "elastic"]

    def trains(count: int) -> bool:
        """So many starts, and the last one has finished a step."""
        metrics, events = out / "metrics.jsonl", out / "events.jsonl"
        newer = metrics.exists() and events.exists() and metrics.stat().st_mtime > events.stat().st_mtime
        return newer and len(plans()) == count

    first = join()
    wait_until(first, lambda: trains(1))
    second = join()
    wait_until(first, lambda: trains(2))
    steps = max(metrics_of(out))
    wait_until(first, lambda: max(metrics_of(out)) > steps + 25)
    for process in [*psutil.Process(second.pid).children(recursive=True), psutil.Process(second.pid)]:
        process.kill()
    wait_until(first, lambda: trains(3))
    first.send_signal(signal.SIGTERM)
    _, err = finish(first)
    finish(second)
    assert plans() == ["dp1 / mb2 gbs3 / fp64", "dp2 / gbs3 / fp64", "dp1 / mb2 gbs3 / fp64"], err
    found = metrics_of(out)
    last = max(found)
    one = [sys.executable, "-m", "shardwise", *train_words(text, tmp_path / "b", last, "dp1 / fp64"), *slowly]
    assert subprocess.run(one, capture_output=True, timeout=200).returncode == 0
    alone = metrics_of(tmp_path / "b")
    assert sorted(found) == sorted(alone)
    for step, numbers in found.items():
        assert numbers == pytest.approx(alone[step], rel=TOLERANCE), step


@pytest.mark.soak
@pytest.mark.parametrize("plan", ["dp4", "fsdp2 tp2", "pp2 fsdp2 / 1f1b mb2", "dp2 fsdp2 zero2"])
def test_many_changes(world: World, tmp_path: Path, plan: str) -> None:
    """Random deaths and lists of slots for a long run: from pipelines to shards, from shards to tensor parallelism."""
    out, draw, until = tmp_path / "a", random.Random(plan), 150
    words = ("--elastic", "1:5", "--slot-failures", "2", str(SCRIPT), f"{plan} / fp64", "--", str(out), str(until))
    process, kills = start(out, *words, PACE_S="0.3"), 0
    wait_for_step(process, out, 2, 4)
    while process.poll() is None and (step := rows_of(out)[-1]["step"]) < until - 20:
        following = step + draw.randrange(10)  # by steps: on a slow machine deaths by the clock would use up every slot
        while process.poll() is None and rows_of(out)[-1]["step"] < following:
            time.sleep(0.02)
        time.sleep(draw.random())
        ranks = ranks_of(process)
        if draw.random() < 0.5 and ranks and kills < 10:  # two of each of six slots would leave none
            draw.choice(ranks).kill()
            kills += 1
        else:
            (out / "devices").write_text(" ".join(map(str, draw.sample(range(6), draw.randrange(1, 6)))))
    (out / "hurry").touch()
    code, err = finish(process, 200)
    assert code == 0, err
    check_as_undisturbed(world, out, until)
    print(f"{plan}: {Counter(event['event'] for event in events_of(out))}")
