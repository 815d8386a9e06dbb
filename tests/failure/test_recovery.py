"""`--recover`: ranks are killed at random instants, and the run ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import shardwise as sw
from shardwise.errors import ExitCode
from shardwise.launch.forking.nursery import STANDBY_NICE, may_raise_priority
from shardwise.launch.local import Failure
from shardwise.launch.recovery import Bounds, Recovering
from shardwise.testing.killer import Killer, processes_below
from shardwise.testing.world import World
from tests.failure import recovering
from tests.failure.test_forked_ranks import GLOO, LOOPBACK, listening

SCRIPT = Path(recovering.__file__)
SOAK = os.environ.get("SHARDWISE_SOAK")
STARTED: list[subprocess.Popen[str]] = []


def start(out: Path, script: Path, *words: str, **env: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "shardwise", "run", "--recover", "--events", str(out / "events"), str(script)]
    pipe = subprocess.PIPE
    STARTED.append(subprocess.Popen([*command, *words], stderr=pipe, text=True, env={**os.environ, **env}))
    return STARTED[-1]


@pytest.fixture(autouse=True)
def _none_is_left() -> Iterator[None]:
    """Where a test fails, what it started would run on beside the next ones, and be found there by the collector."""
    yield
    while STARTED:
        with STARTED.pop() as process:  # which closes its pipe, and waits for it
            process.kill()


def finish(process: subprocess.Popen[str], timeout_s: float = 120) -> tuple[int, str]:
    try:
        _, err = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    return process.returncode, err


def log_of(out: Path) -> list[str]:
    return (out / "log").read_text().splitlines() if (out / "log").exists() else []


def wait_for_steps(process: subprocess.Popen[str], out: Path, count: int) -> None:
    end = time.monotonic() + 100
    while len(log_of(out)) < count:
        assert process.poll() is None and time.monotonic() < end, finish(process, 5)
        time.sleep(0.02)


def last_step(out: Path) -> int:
    return max((int(line.split()[0]) for line in log_of(out)), default=0)


def wait_for_new_step(process: subprocess.Popen[str], out: Path, said: Sequence[str] = ()) -> None:
    """Until a step is finished on all ranks: who logs the next but one has passed the copy of the next.

    `said`: lines of its standard error that were read from the pipe already.
    """
    wanted, end = last_step(out) + 2, time.monotonic() + 100
    while last_step(out) < wanted:
        assert process.poll() is None and time.monotonic() < end, ("".join(said[-30:]), finish(process, 5))
        time.sleep(0.02)


def events_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "events").read_text().splitlines()]


def read_all(process: subprocess.Popen[str], lines: list[str]) -> None:
    """A pipe that nobody reads is full after some 400 recoveries, and whoever writes to it waits."""
    assert process.stderr is not None
    with process.stderr as said:
        lines.extend(said)


def survives(world: World, folder: Path, plan: str, *, kills: int) -> None:
    """Kill ranks of one run, end it, and compare it with one that nobody disturbs, started by another launcher."""
    ranks, here, there = sw.Plan.parse(plan).world, folder / "undisturbed", folder / "killed"
    here.mkdir()
    there.mkdir()
    process = start(there, SCRIPT, plan, "--", str(there), str(recovering.FOR_EVER), PACE_S="0.02")
    lines: list[str] = []
    reader = threading.Thread(target=read_all, args=(process, lines))
    reader.start()
    killer = Killer(process.pid, seed=7, mean_pause_s=0.15, double=0.6)
    wait_for_steps(process, there, 2)
    draw = random.Random(7)
    while killer.kills < kills:  # ten deaths without a step end a job: a slow machine gets one in between
        killer.run(len(killer.blows) + draw.randint(1, 6), while_true=lambda: process.poll() is None)
        wait_for_new_step(process, there, lines)
    wait_for_new_step(process, there, lines)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == ExitCode.TERMINATED, "".join(lines)
    reader.join()
    done, last = log_of(there), last_step(there)
    world(ranks, recovering.main, plan, str(here), last, timeout_s=60 + last)
    expected, events = log_of(here), events_of(there)
    seconds = [event["seconds"] for event in events]
    told = f"{killer.kills} kills in {len(killer.blows)} blows, {len(events)} recoveries, {last} steps"
    print(f"{plan}: {told}, median {statistics.median(seconds):.3f} s")
    assert [(there / f"digest-{rank}").read_text() for rank in range(ranks)] == [
        (here / f"digest-{rank}").read_text() for rank in range(ranks)
    ]
    assert sorted(set(done), key=lambda line: int(line.split()[0])) == expected  # nothing else was ever computed
    assert len(done) <= len(expected) + events[-1]["number"]  # no step but the retried one is done again


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "kills"),
    [
        ("dp4", 200),
        pytest.param("fsdp2 tp2", 10, marks=pytest.mark.soak),
        pytest.param("pp2 fsdp2 / 1f1b mb2", 10, marks=pytest.mark.soak),
        pytest.param("cp2 fsdp2", 10, marks=pytest.mark.soak),
        pytest.param("fsdp2 ep2", 10, marks=pytest.mark.soak),
        pytest.param("pp2 dp2 / 1f1b mb2 / fp16", 10, marks=pytest.mark.soak),
        *(
            pytest.param(plan, kills, marks=pytest.mark.soak)
            for plan, kills in [
                ("dp4", 1000), ("fsdp4", 200), ("tp4", 200), ("pp4 / 1f1b mb4", 200), ("dp2 fsdp2", 200)
            ]
        ),
    ],
)  # fmt: skip
def test_kills_change_no_bit(world: World, tmp_path: Path, plan: str, kills: int) -> None:
    survives(world, tmp_path, plan, kills=kills)


def test_all_ranks_at_once_lose_nothing(world: World, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    world(2, recovering.main, "dp2", str(tmp_path / "a"), 6)
    process = start(tmp_path, SCRIPT, "dp2", "--", str(tmp_path), "6", PACE_S="0.3")
    wait_for_steps(process, tmp_path, 3)
    for rank in called(process, "rank "):
        rank.kill()
    code, err = finish(process)
    assert code == 0, err
    (event,) = events_of(tmp_path)
    assert event["step"] >= 2 and "killed by SIGKILL" in event["cause"]
    assert "recovery 1: rank" in err and "all ranks went on after step" in err
    for rank in (0, 1):
        assert (tmp_path / f"digest-{rank}").read_text() == (tmp_path / "a" / f"digest-{rank}").read_text()


@pytest.mark.share(2)
@pytest.mark.parametrize("kills_first", [True, False])
def test_a_rank_that_dies_while_the_job_is_asked_to_end_costs_no_step(
    world: World, tmp_path: Path, kills_first: bool
) -> None:
    """Those who take over make a step, and end in order: a signal is no reason to lose what is in memory."""
    (tmp_path / "a").mkdir()
    process = start(tmp_path, SCRIPT, "dp2", "--", str(tmp_path), str(recovering.FOR_EVER), PACE_S="0.5")
    wait_for_steps(process, tmp_path, 3)
    victim = called(process, "rank 1")[0]
    if kills_first:
        victim.kill()
    process.send_signal(signal.SIGTERM)
    if not kills_first:
        time.sleep(0.2)  # it was passed on: all are in the body of the loop
        victim.kill()
    code, err = finish(process)
    assert code == ExitCode.TERMINATED, err
    (event,) = events_of(tmp_path)
    last = last_step(tmp_path)
    assert event["rank"] == 1 and last > event["step"] >= 2
    world(2, recovering.main, "dp2", str(tmp_path / "a"), last)
    for rank in (0, 1):
        assert (tmp_path / f"digest-{rank}").read_text() == (tmp_path / "a" / f"digest-{rank}").read_text()


def called(process: subprocess.Popen[str], name: str) -> list[psutil.Process]:
    return [child for _, child in processes_below(process.pid, name)]


def ready_standbys(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Both, stopped once they were ready."""
    end = time.monotonic() + 100
    while True:
        assert process.poll() is None and time.monotonic() < end, finish(process, 5)
        with suppress(psutil.NoSuchProcess):  # one was killed, and another one takes its place
            ready = [each for each in called(process, "standby") if each.status() == psutil.STATUS_STOPPED]
            if len(ready) == 2:
                return ready
        time.sleep(0.02)


def test_who_stands_by_takes_nothing_from_who_trains(tmp_path: Path) -> None:
    """It gets ready behind them, and is stopped then: threads of its groups would wake a hundred times a second."""
    process = start(tmp_path, SCRIPT, "dp2", "--", str(tmp_path), "100000", PACE_S="0.05")
    wait_for_steps(process, tmp_path, 2)
    ready = ready_standbys(process)
    own, behind = os.nice(0), {standby.nice() for standby in ready}
    assert behind == ({min(own + STANDBY_NICE, 19)} if may_raise_priority() else {own})
    spent = [sum(standby.cpu_times()) for standby in ready]
    time.sleep(0.5)
    assert [sum(standby.cpu_times()) for standby in ready] == spent
    called(process, "rank")[0].kill()
    wait_for_new_step(process, tmp_path)
    assert {rank.pid for rank in called(process, "rank")} == {standby.pid for standby in ready}
    for thread in (Path("/proc", str(rank.pid), "task") for rank in ready):
        assert {os.getpriority(os.PRIO_PROCESS, int(task.name)) for task in thread.iterdir()} == {own}
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == ExitCode.TERMINATED


def trained(folder: str, until: int) -> str:
    """Go on from the checkpoint that lies there, if any, and leave one; every bit of the state."""
    tokens = torch.randint(0, recovering.VOCAB, (64, recovering.SEQ + 1), generator=torch.Generator().manual_seed(5))
    data = [{"input_ids": row[:-1], "labels": row[1:]} for row in tokens]
    plan = sw.Plan.parse("dp4")
    with sw.open_mesh(plan, device="cpu") as mesh:
        placed = sw.apply(recovering.model, plan, mesh, seed=1)
        state = sw.TrainState(placed, sw.adamw(placed, lr=1e-2), sw.loader(data, plan.batch, mesh, global_size=8))
        store = sw.Store(folder)
        store.load_latest(state)
        for _ in sw.steps(state, recovering.loss_fn, until=until):
            pass
        store.save(state)
        return repr([(name, t.tolist()) for name, t in sorted(state.tensors().items())]) + repr(state.scalars())


def test_ddp_on_four_ranks_goes_on_from_a_checkpoint_to_the_same_bits(world: World, tmp_path: Path) -> None:
    """Without a rehearsal its first sums would be made in another order: see `shardwise.train.rehearsal`."""
    whole = world(4, trained, str(tmp_path / "whole"), 6)
    world(4, trained, str(tmp_path / "cut"), 3)
    assert world(4, trained, str(tmp_path / "cut"), 6) == whole


FLIPS = """                if m.step == 7 and mesh.rank == 0 and not (folder / "flipped").exists():
                    (folder / "flipped").touch()
                    for slot in state.mirror.place.memory.pair(1):
                        os.pwrite(slot.file, bytes([os.pread(slot.file, 1, 4099)[0] ^ 64]), 4099)
                    os.kill(os.getpid(), 9)
                drawn ="""


@pytest.mark.soak
def test_copies_that_are_damaged_in_memory_are_named_and_the_checkpoint_taken(world: World, tmp_path: Path) -> None:
    script = tmp_path / "flips.py"
    script.write_text(SCRIPT.read_text().replace("                drawn =", FLIPS))
    folders = {name: tmp_path / name for name in ("here", "there")}
    for folder in folders.values():
        folder.mkdir()
    code, err = finish(start(tmp_path, script, "dp2", "--", str(folders["there"]), "9", PACE_S="0.1"))
    assert code == ExitCode.OK and "what rank 1 had copied after step 6 was damaged in memory, and is not used" in err
    assert [line.split()[0] for line in log_of(folders["there"])] == ["1", "2", "3", "4", "5", "6", "6", "7", "8", "9"]
    world(2, recovering.main, "dp2", str(folders["here"]), 9)
    digests = [[(folder / f"digest-{rank}").read_text() for rank in (0, 1)] for folder in folders.values()]
    assert digests[0] == digests[1]


RAISES = """                if m.step == 3 and mesh.rank == 1:
                    raise ValueError("tide")
                drawn ="""
FAILS = SCRIPT.read_text().replace("                drawn =", RAISES)


def test_what_always_fails_is_tried_twice_and_named(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(FAILS)
    code, err = finish(start(tmp_path, script, "dp2", "--", str(tmp_path), "5", PACE_S="0.3"))
    assert code == ExitCode.RANK_FAILED
    assert err.splitlines()[-1].startswith("rank 1 failed: ValueError: tide (recovery was tried once")
    assert [event["step"] for event in events_of(tmp_path)] == [2]


STOPS = """                if m.step == 3 and mesh.rank == 1 and not (folder / "stopped").exists():
                    (folder / "stopped").touch()
                    os.kill(os.getpid(), 19)
                drawn ="""


@pytest.mark.parametrize(
    "words",
    [pytest.param(["--recover"], marks=pytest.mark.soak), ["--elastic", "1:2", "--slot-failures", "1"]],
)
def test_a_rank_that_is_stopped_is_named_when_the_others_have_waited_for_it(tmp_path: Path, words: list[str]) -> None:
    """And not the one that gave up: under `--elastic` its slot would be left out."""
    script = tmp_path / "stops.py"
    script.write_text(
        SCRIPT.read_text().replace("                drawn =", STOPS).replace("timeout_s=100", "timeout_s=3")
    )
    command = [sys.executable, "-m", "shardwise", "run", *words, str(script), "dp2", "--", str(tmp_path), "5"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == ExitCode.OK and last_step(tmp_path) == 5, ran.stderr
    assert "rank 1: rank 0 waited 3 s in a collective for one that did not come, and this one still ran" in ran.stderr
    assert "--elastic" not in words or "slot 1 is left out" in ran.stderr


WORKER_DIES = SCRIPT.read_text().replace("global_size=8", "global_size=8, workers=1")
WORKER_DIES = WORKER_DIES.replace(
    "        tokens = (self",
    """        if torch.utils.data.get_worker_info() and os.environ["RANK"] == "1":
            try:
                (Path(sys.argv[2]) / "died").touch(exist_ok=False)
                os.kill(os.getpid(), 9)
            except FileExistsError:
                pass
        tokens = (self""",
)


@pytest.mark.parametrize("words", [["--recover"], []])
def test_a_data_worker_that_is_killed_is_as_a_rank_that_is(tmp_path: Path, words: list[str]) -> None:
    """Before the first step, too: it reads ahead, and that is when memory runs out."""
    script = tmp_path / "worker_dies.py"
    script.write_text(WORKER_DIES)
    command = [sys.executable, "-m", "shardwise", "run", *words, str(script), "dp2", "--", str(tmp_path), "3"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert re.search(
        r"rank 1( failed)?: a data worker of it, process \d+, was ended by a signal: Killed \(", ran.stderr
    )
    assert "Traceback" not in ran.stderr
    assert ran.returncode == (ExitCode.OK if words else ExitCode.RANK_FAILED), ran.stderr
    assert last_step(tmp_path) == (3 if words else 0)


STANDBY_RAISES = """        import json, select
        from shardwise.errors import CheckpointError
        place = json.loads(os.environ["SHARDWISE_RECOVER"])
        if place["streams"] and mesh.rank == 1 and not (folder / "raised").exists():
            (folder / "raised").touch()
            select.select([place["order"]], [], [])
            raise CheckpointError("tide")
        store.load_latest(state)
"""
STANDBY_FAILS = SCRIPT.read_text().replace("        store.load_latest(state)\n", STANDBY_RAISES)


@pytest.mark.soak  # in every run: what fails in who trains
def test_what_fails_in_who_stood_by_is_tried_by_new_processes(tmp_path: Path) -> None:
    """It got ready while others trained: what it refused may be of that time alone."""
    script = tmp_path / "standby_fails.py"
    script.write_text(STANDBY_FAILS)
    process = start(tmp_path, script, "dp2", "--", str(tmp_path), "100000", PACE_S="0.05")
    end = time.monotonic() + 100
    while not (tmp_path / "raised").exists():
        assert process.poll() is None and time.monotonic() < end, finish(process, 5)
        time.sleep(0.02)
    called(process, "rank")[0].kill()
    wait_for_new_step(process, tmp_path)
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == ExitCode.TERMINATED
    (event,) = events_of(tmp_path)
    assert (event["number"], event["cause"], event["standby"]) == (2, "tide", False)


@pytest.mark.soak  # in every run: 200 kills, some of those that stand by
def test_standbys_are_given_up_after_failures_in_a_row(tmp_path: Path) -> None:
    process = start(tmp_path, SCRIPT, "dp2", "--", str(tmp_path), "100000", PACE_S="0.05")
    wait_for_steps(process, tmp_path, 2)
    for _ in range(4):  # each was ready: another one takes its place
        ready = ready_standbys(process)
        ready[0].kill()
        psutil.wait_procs(ready, timeout=60)
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == ExitCode.TERMINATED


FAILURE = Failure(rank=1, message="tide", exit_code=ExitCode.RANK_FAILED, traceback="...")


def test_bounds_count_what_makes_no_progress() -> None:
    bounds = Bounds(Recovering(limit=4, killed_in_a_row=2))
    assert [bounds.refuse(FAILURE, copies=1, killed=True) for _ in range(2)] == [None, None]
    assert bounds.refuse(FAILURE, copies=2, killed=True) is None  # a step was finished since
    assert bounds.refuse(replace(FAILURE, message="ebb"), copies=2, killed=True) is None
    last = bounds.refuse(replace(FAILURE, message="flood"), copies=3, killed=True)
    assert last is not None and last.message == "flood (4 recoveries were made, which is the limit)"


def test_the_first_of_failures_in_a_row_is_named() -> None:
    bounds = Bounds(Recovering(killed_in_a_row=2))
    for message in ("ebb", "flood"):
        assert bounds.refuse(replace(FAILURE, message=message), copies=0, killed=True) is None
    last = bounds.refuse(FAILURE, copies=0, killed=True)
    assert last is not None
    assert last.message == "ebb (recovery was tried 2 times, and no step was finished since)"


def test_an_error_before_the_first_step_is_final() -> None:
    last = Bounds(Recovering()).refuse(FAILURE, copies=0, killed=False)
    assert last is not None and last.message == "tide (not tried again: no step was finished before)"
    bounds = Bounds(Recovering())
    assert bounds.refuse(FAILURE, copies=0, killed=False, damaged="; what rank 0 had copied was damaged") is None
    assert bounds.refuse(FAILURE, copies=0, killed=False) is not None


OWN_LOOP = SCRIPT.read_text().replace("sw.steps(state, loss_fn, until=until, clip=1.0)", "sw.make_step(state, loss_fn)")


def test_a_loop_of_the_scripts_own_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(OWN_LOOP)
    code, err = finish(start(tmp_path, script, "dp2", "--", str(tmp_path), "5"))
    assert code == ExitCode.USAGE
    assert "make_step: found --recover and a loop of the script's own" in err and "steps(state, loss_fn" in err


def test_no_rank_outlives_its_launcher(tmp_path: Path) -> None:
    process = start(tmp_path, SCRIPT, "dp2", "--", str(tmp_path), "100000", PACE_S="0.05", **GLOO)
    wait_for_steps(process, tmp_path, 2)
    found = psutil.Process(process.pid).children(recursive=True)
    assert len(found) >= 3  # the fork server, two ranks, and perhaps two that stand by
    heard_on = listening(process.pid)
    assert heard_on and heard_on <= LOOPBACK
    process.send_signal(signal.SIGKILL)
    finish(process)
    _, alive = psutil.wait_procs(found, timeout=25)
    assert not alive


def test_a_killed_rank_of_the_train_verb_leaves_the_record_of_an_undisturbed_run(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i}: {i * i} is the square of {i}\n" for i in range(400)))
    sizes = "--model tiny --layers 2 --dim 32 --heads 2 --ffn 48 --seq 32 --batch 4 --plan fsdp2 --steps 40"
    words = [
        *sizes.split(),
        "--device",
        "cpu",
        "--deterministic",
        "--eval-every",
        "8",
        "--checkpoint-every",
        "6",
        "--json",
    ]
    base = [sys.executable, "-m", "shardwise", "train", "--data", str(text), *words, "--out"]
    killed = subprocess.Popen(
        [*base, str(tmp_path / "a"), "--recover"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    metrics = tmp_path / "a" / "metrics.jsonl"
    end = time.monotonic() + 100
    while not metrics.exists() or metrics.read_text().count("grad_norm") < 4:
        assert killed.poll() is None and time.monotonic() < end, finish(killed, 5)
        time.sleep(0.01)
    Killer(killed.pid, seed=7, mean_pause_s=0.01, double=0, standbys=0).run(1)
    code, err = finish(killed)
    assert code == 0, err
    assert subprocess.run([*base, str(tmp_path / "b")], capture_output=True, timeout=200).returncode == 0
    rows = []
    for out in (tmp_path / "a", tmp_path / "b"):
        found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        keys = ("step", "loss", "grad_norm", "eval_loss")
        rows.append([[row.get(key) for key in keys] for row in found if "grad_norm" in row or "eval_loss" in row])
    assert rows[0] == rows[1]
    events = [json.loads(line) for line in (tmp_path / "a" / "events.jsonl").read_text().splitlines()]
    (event,) = [event for event in events if event["event"] == "recovery"]
    assert event["step"] >= 3 and event["seconds"] > 0


@pytest.mark.soak  # in every run: the same while a rank dies
def test_sigterm_ends_in_order_and_is_not_recovered_from(tmp_path: Path) -> None:
    process = start(tmp_path, SCRIPT, "dp2", "--", str(tmp_path), "100000", PACE_S="0.05")
    wait_for_steps(process, tmp_path, 2)
    process.send_signal(signal.SIGTERM)
    code, err = finish(process)
    assert code == ExitCode.TERMINATED and not (tmp_path / "events").exists()
    assert err.startswith("shardwise: ended by SIGTERM (143)") and err.count("\n") == 1


@pytest.mark.parametrize("said", [None, "INFO"])
def test_torch_does_not_print_its_frames_of_each_connection_to_a_rank_that_died(
    tmp_path: Path, said: str | None
) -> None:
    """Nor is that changed where somebody has said what torch shall print."""
    script = tmp_path / "script.py"
    script.write_text(
        f"import os, torch\nopen({str(tmp_path / 'level')!r}, 'w').write(os.environ['TORCH_CPP_LOG_LEVEL'])"
    )
    process = start(tmp_path, script, "--nproc", "1", **({"TORCH_CPP_LOG_LEVEL": said} if said else {}))
    code, err = finish(process)
    assert (code, (tmp_path / "level").read_text()) == (ExitCode.OK, said or "ERROR"), err
