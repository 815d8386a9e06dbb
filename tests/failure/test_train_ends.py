"""The end of `shardwise train`, and what may be gone by then: a signal after the last step, output, its own record."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any
from unittest.mock import patch

import pytest

from shardwise.checkpoint.directory import Directory
from shardwise.checkpoint.store import Store
from shardwise.errors import ExitCode
from shardwise.launch.rank import session
from shardwise.launch.rank.session import Session
from shardwise.testing.world import World
from shardwise.train.kept.rundir import RunDir, check_not_lost
from shardwise.train.progress import Sight, open_progress
from tests.failure.as_rank import ran, typed
from tests.failure.test_resume_rules import command

STEPS = 3


def words(plan: str, *more: str) -> list[str]:
    return command("run", "--plan", plan, "--steps", str(STEPS), "--checkpoint-every", "0", *more)


def planted(folder: str, argv: list[str], fault: str) -> CompletedProcess[str]:
    """`shardwise ARGV` as a rank, with a fault in this process."""
    with FAULTS[fault](Path(folder, "run")):
        return ran(folder, argv)


def in_evaluation(_run: Path) -> Any:
    """The last rank is told to end in the middle of an evaluation, which would go on for a while."""
    seen, loss = list[int](), session.token_loss

    def told(*args: Any) -> Any:
        seen.append(1)
        assert len(seen) <= 4, "the evaluation went on"
        if len(seen) == 3 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        return loss(*args)

    return patch.object(session, "token_loss", told)


def in_save(_run: Path) -> Any:
    """Every rank is told to end while it saves the last step."""
    save = Store.save

    def told(*args: Any, **keywords: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return save(*args, **keywords)

    return patch.object(Store, "save", told)


def after_step_two(action: Any) -> Any:
    after = Session._after

    def then(self: Session, m: Any) -> None:
        after(self, m)
        if m.step == 2:
            action()

    return patch.object(Session, "_after", then)


def disk_is_full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


FAULTS = {
    "signal in the last evaluation": in_evaluation,
    "signal in the last save": in_save,
    "exit": lambda run: after_step_two(lambda: sys.exit(1)),
    "directory removed": lambda run: after_step_two(lambda: shutil.rmtree(run)),
    "no save is complete": lambda run: patch.object(Directory, "commit", disk_is_full),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("".join(f"line {i}: {i * i} is the square of {i}\n" for i in range(400)))
    return tmp_path


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.share(4)
@pytest.mark.parametrize("best", ["0", "1"])
@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("signal in the last evaluation", ExitCode.TERMINATED),
        ("signal in the last save", ExitCode.INTERRUPTED),
    ],
)
def test_after_the_last_step_a_signal_leaves_out_all_but_the_save(
    world: World, folder: Path, fault: str, code: ExitCode, best: str
) -> None:
    argv = words("dp2", "--set", f"train.keep_best={best}", "--eval-every", "9", "--set", "data.holdout=0.5")
    ends = world(2, planted, str(folder), argv, fault, TORCHELASTIC_RUN_ID="x")
    assert [end.returncode for end in ends] == [code, code], ends
    assert f"step {STEPS}: asked to stop; saved to " in ends[0].stdout
    run = RunDir(folder / "run")
    assert (run.checkpoints / "latest").read_text() == f"step-{STEPS:08}\n" and run.has_checkpoints
    assert not run.summary.exists() and [row["code"] for row in run.read_events("stopped")] == [code]
    evaluated = [row for row in records(folder) if "eval_loss" in row]
    assert len(evaluated) == (fault == "signal in the last save" and best == "1")  # there it comes before
    again = typed(world, folder, argv, ranks=2)
    assert again.returncode == 0, again.stderr
    assert json.loads(run.summary.read_text())["train_loss"] == records(folder)[STEPS - 1]["loss"]


def test_an_exit_that_is_not_the_loops_has_saved_nothing(world: World, folder: Path) -> None:
    (end,) = world(1, planted, str(folder), words("dp1"), "exit", TORCHELASTIC_RUN_ID="x")
    assert end.returncode == 1 and "saved" not in end.stdout
    assert not RunDir(folder / "run").read_events("stopped")
    check_not_lost(RunDir(folder / "run"), None)


def test_a_run_whose_saves_all_failed_begins_again(world: World, folder: Path) -> None:
    argv = words("dp1", "--checkpoint-every", "1")
    (end,) = world(1, planted, str(folder), argv, "no save is complete", TORCHELASTIC_RUN_ID="x")
    assert end.returncode == ExitCode.CHECKPOINT and "No space left on device" in end.stderr
    assert "free some space there; when that is mended, `shardwise train run/config.toml` goes on from" in end.stderr
    assert sum("save_stall_s" in row for row in records(folder)) == STEPS - 1
    again = typed(world, folder, argv)
    assert again.returncode == 0, again.stderr
    assert [row["step"] for row in records(folder) if "loss" in row] == [1, 2, 3]
    assert [row["step"] for row in records(folder) if "saved_s" in row] == [1, 2, 3]
    RunDir(folder / "run").summary.unlink()
    shutil.rmtree(folder / "run" / "checkpoints")
    assert typed(world, folder, argv).returncode == ExitCode.CHECKPOINT  # negative control: there was one


def test_a_directory_that_is_removed_meanwhile_costs_the_record_of_it(world: World, folder: Path) -> None:
    (end,) = world(1, planted, str(folder), words("dp1"), "directory removed", TORCHELASTIC_RUN_ID="x")
    assert end.returncode == 0, end.stderr
    held, line = sorted(end.stderr.splitlines(), key=lambda said: "metrics.jsonl" in said)
    assert "metrics.jsonl: [Errno 2] No such file or directory" in line and "goes on without it" in line
    assert "checkpoints/lock was removed while this run uses it; it is made anew, and the run goes on" in held
    assert RunDir(folder / "run").has_checkpoints and RunDir(folder / "run").summary.exists()


def test_facts_of_the_machine_that_cannot_be_written_are_left_out(world: World, folder: Path) -> None:
    assert typed(world, folder, words("dp1")).returncode == 0
    environment = RunDir(folder / "run").environment
    environment.unlink()
    environment.mkdir()
    again = typed(world, folder, words("dp1"))
    assert again.returncode == 0, again.stderr
    assert [line for line in again.stderr.splitlines() if "environment.json: [Errno" in line]
    assert list(environment.parent.glob("*.part")) == []


@pytest.mark.parametrize("lost", ["pipe", "disk", "closed"])
def test_output_that_cannot_be_written_is_said_once_and_ends_nothing(
    lost: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    read, write = os.pipe()
    os.close(read)
    if lost == "disk":
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, write)
        os.close(full)
    file = os.fdopen(write, "w")
    if lost == "closed":
        file.close()
    monkeypatch.setattr(sys, "stdout", file)
    with open_progress(0, 5, quiet=False) as progress:
        for step in range(1, 6):
            progress.show(Sight(step=step, loss=1.0, tokens_per_s=1.0, memory_bytes=1))
        progress.note("the end")
        if lost != "closed":
            print("of a script's own", flush=True)
    file.close()  # nothing is left in its buffer that cannot be written
    said = capfd.readouterr().err
    why = {"pipe": "Broken pipe", "disk": "No space left on device", "closed": "closed file"}[lost]
    assert why in said and said.count("\n") == 1


def test_letters_that_the_output_has_no_bytes_for_are_escaped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with open(tmp_path / "out", "w", encoding="ascii") as file, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", file)
        with open_progress(0, 5, quiet=False) as progress:
            progress.note("saved für")
    assert (tmp_path / "out").read_text() == "saved f\\xfcr\n"


def test_a_reader_that_leaves_ends_no_run(folder: Path) -> None:
    argv = [sys.executable, "-m", "shardwise", *words("dp1", "--steps", "60")]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder)
    assert process.stdout is not None and process.stderr is not None
    assert any(line.startswith("step ") for line in process.stdout)
    process.stdout.close()
    with process.stderr:
        said = process.stderr.read()
    assert process.wait(60) == ExitCode.OK
    assert "standard output: [Errno 32] Broken pipe; nothing more is shown" in said and "Traceback" not in said
    assert json.loads((folder / "run" / "summary.json").read_text())["step"] == 60
