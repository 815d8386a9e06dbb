"""Out of memory where ranks communicate: the supervisor starts again with half the rows, to the undisturbed result."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.errors import ExitCode
from shardwise.launch.job import Job
from shardwise.launch.local import Failure, Outcome
from shardwise.launch.recovering import run_recovering
from shardwise.launch.recovery import Bounds, Recovering, Recovery
from shardwise.testing.world import World
from tests.failure import running_out

SCRIPT, UNTIL, TOLERANCE = Path(running_out.__file__), 6, 1e-11


def recovered(plan: str, out: Path, fault: dict[str, Any], until: int = UNTIL) -> tuple[Outcome, list[Recovery]]:
    """The run under a supervisor of this process, and what it told."""
    out.mkdir(exist_ok=True)
    told: list[Recovery] = []
    job = Job(target=str(SCRIPT), args=(plan, str(out), str(until), json.dumps(fault)), nproc=2)
    return run_recovering(job, Recovering(standby="killed" in fault, tell=told.append)), told


def rows_of(out: Path, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / f"rank-{rank}").read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process without faults left."""
    out = tmp_path_factory.mktemp("alone")
    world(1, running_out.main, "dp1 / fp64", str(out), UNTIL, {})
    return out


def check_as(alone: Path, out: Path) -> None:
    """Every loss and norm, also of steps that were done twice, and the state at the end, are those of one process."""
    expected = {row["step"]: row for row in rows_of(alone, 0)}
    found = rows_of(out, 0)
    assert {row["step"] for row in found} == set(expected)
    for row in found:
        for key in ("loss", "norm"):
            assert abs(row[key] - expected[row["step"]][key]) <= TOLERANCE * abs(row[key]), row
    here, there = torch.load(out / "state.pt"), torch.load(alone / "state.pt")
    assert here.keys() == there.keys()
    for name, tensor in there.items():
        assert float((here[name] - tensor).abs().max()) <= TOLERANCE * max(1.0, float(tensor.abs().max())), name


# plan, fault, [(rows before, rows)], rows of the last step on the rank
CASES = {
    "sharded": (
        "fsdp2 / fp64",
        {"rank": 0, "fits": [[3, 2]], "where": "forward", "error": "device", "killed": 4},
        [(5, 3), (3, 2)],
        [2, 1, 1, 1],
    ),
    "pipeline": (  # three micro-batches of three rows and one of padding: two flushes, of two rows each and of one
        "pp2 / 1f1b mb2 / fp64",
        {"rank": 1, "fits": [[1, 2]], "where": "backward", "error": "python"},
        [(3, 2)],
        [2, 1, 2, 1, 2, 1, 2, 1],
    ),
    "tensor": (
        "tp2 / fp64",
        {"rank": 1, "fits": [[2, 5]], "where": "backward", "error": "cpu"},
        [(9, 5)],
        [5, 4],
    ),
}


@pytest.mark.share(3)
@pytest.mark.parametrize("name", ["sharded", "pipeline", pytest.param("tensor", marks=pytest.mark.soak)])
def test_the_result_is_that_of_an_undisturbed_run(alone: Path, tmp_path: Path, name: str) -> None:
    plan, fault, expected, rows = CASES[name]
    outcome, told = recovered(plan, tmp_path, fault)
    assert outcome == Outcome(exit_code=ExitCode.OK)
    check_as(alone, tmp_path)
    check_told([recovery.to_dict() for recovery in told], fault, expected)
    assert [str(each) for each in told if each.halving][0].startswith(
        f"recovery 1: rank {fault['rank']}: step {fault['fits'][0][0]}: out of memory with micro-batches of "
        f"{expected[0][0]} rows, of {expected[0][1]} from now on ("
    )
    assert len(told) == len(expected) + ("killed" in fault)  # and no more after the kill: the halvings are kept
    assert sorted(rows_of(tmp_path, fault["rank"])[-1]["rows"]) == sorted(rows)


def check_told(events: list[dict[str, Any]], fault: dict[str, Any], expected: list[tuple[int, int]]) -> None:
    """What ran out, on which rank, and how many rows there were before and after."""
    halvings = [event for event in events if "halving" in event]
    assert {event["rank"] for event in halvings} == {fault["rank"]}
    asked = [event["halving"] for event in halvings]
    assert [(each["rows_before"], each["rows"]) for each in asked] == expected
    assert [each["halvings"] for each in asked] == list(range(1, len(expected) + 1))
    assert [each["step"] for each in asked] == [event["step"] + 1 for event in halvings]
    assert all(str(running_out.ERRORS[fault["error"]]) in each["ran_out"] for each in asked)


def elastic(plan: str, out: Path, fault: dict[str, Any]) -> tuple[int, str, list[dict[str, Any]]]:
    """`shardwise run --elastic` of one or two processes: exit code, standard error, events."""
    record = out / "events"
    options = ["--elastic", "1:2", "--slot-failures", "1", "--events", str(record)]
    words = [str(SCRIPT), plan, "--", str(out), str(UNTIL), json.dumps(fault)]
    command = [sys.executable, "-m", "shardwise", "run", *options, *words]
    found = subprocess.run(command, capture_output=True, text=True, timeout=200)
    return found.returncode, found.stderr, [json.loads(line) for line in record.read_text().splitlines()]


@pytest.mark.soak
def test_another_number_of_processes_goes_on_halved(alone: Path, tmp_path: Path) -> None:
    fault = {"rank": 0, "fits": [[2, 3]], "where": "forward", "error": "device", "killed": 4}
    code, err, events = elastic("fsdp2 / fp64", tmp_path, fault)
    assert code == 0, err
    check_as(alone, tmp_path)
    check_told(events, fault, [(5, 3)])
    lost = events[-1]
    assert (lost["event"], lost["before"], lost["after"]) == ("elastic", 2, 1), events
    assert rows_of(tmp_path, 0)[-1]["rows"] == [3, 2, 2, 2]


def test_one_row_that_does_not_fit_ends_the_job_and_no_slot_is_blamed(alone: Path, tmp_path: Path) -> None:
    fault = {"rank": 1, "fits": [[2, 2], [4, 0]], "where": "backward", "error": "cpu"}
    code, err, events = elastic("tp2 / mb4 / fp64", tmp_path, fault)
    assert code == ExitCode.OUT_OF_MEMORY, err
    last = err.splitlines()[-1]
    assert "step 4: rank 1 is out of memory with micro-batches of one row" in last and "recompute blocks" in last
    assert {event["event"] for event in events} == {"recovery"}
    check_told(events, fault, [(3, 2), (2, 1)])
    expected = {row["step"]: row for row in rows_of(alone, 0)}
    steps = rows_of(tmp_path, 0)
    assert [row["step"] for row in steps] == [1, 2, 3]
    for row in steps:
        assert abs(row["loss"] - expected[row["step"]]["loss"]) <= TOLERANCE
        assert abs(row["norm"] - expected[row["step"]]["norm"]) <= TOLERANCE


def asking(halvings: int) -> Failure:
    halving = {"step": 1, "ran_out": "memory", "rows_before": 2, "rows": 1, "halvings": halvings}
    return Failure(rank=0, message="out", exit_code=ExitCode.OUT_OF_MEMORY, halving=halving)


def test_each_halving_is_one_more_than_the_last_and_within_the_limit() -> None:
    bounds = Bounds(Recovering(limit=3))
    assert [bounds.refuse(asking(number), copies=0, killed=False) for number in (1, 2)] == [None, None]
    assert bounds.halvings == 2
    again = bounds.refuse(asking(2), copies=0, killed=False)  # as the ranks were told: it is no remedy
    assert again is not None and "no step was finished before" in again.message
    assert bounds.refuse(asking(3), copies=0, killed=False) is None
    last = bounds.refuse(asking(4), copies=0, killed=False)
    assert last is not None and "3 recoveries were made, which is the limit" in last.message
