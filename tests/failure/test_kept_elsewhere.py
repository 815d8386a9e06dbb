"""Which checkpoints `shardwise train` keeps, where, and that its run's directory stands for them, as it is typed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from shardwise.checkpoint.compare import verify
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.retention import Retention
from shardwise.launch.rank.resuming import read_held_out
from shardwise.testing.world import World
from shardwise.train.kept.rundir import RunDir
from tests.failure.as_rank import typed

TINY = ["--model", "tiny", "--layers", "1", "--dim", "32", "--heads", "2", "--ffn", "48", "--seq", "16", "--batch", "2",
        "--device", "cpu", "--plan", "dp1", "--schedule", "constant", "--no-sample", "--data", "text.txt"]  # fmt: skip


def shardwise(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shardwise", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=300)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run `runs/a` of 11 steps, whose rate is so high that its loss rises, and its checkpoints."""
    folder = tmp_path_factory.mktemp("kept")
    (folder / "text.txt").write_text("".join(f"line {i}: {i * i} is the square of {i}\n" for i in range(400)))
    keep = ["--set", "train.keep=1", "--set", "train.keep_every=4", "--set", "train.keep_best=2"]
    words = ["--out", "runs/a", "--checkpoints", "elsewhere", "--checkpoint-every", "1", "--eval-every", "2"]
    ran = shardwise(folder, "train", *TINY, *words, *keep, "--steps", "11", "--lr", "0.3")
    assert ran.returncode == 0, ran.stderr
    return folder


def losses(run: Path) -> dict[int, float]:
    rows: list[dict[str, Any]] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row}


def test_the_newest_every_nth_and_the_best_stay(here: Path) -> None:
    found = losses(here / "runs" / "a")
    assert list(found) == [2, 4, 6, 8, 10, 11]
    metrics = {step: found.get(step, found.get(step - 1)) for step in range(1, 12)}
    kept: list[tuple[int, float | None]] = []
    for step, metric in metrics.items():
        saves = [(step, metric), *kept]
        stays = Retention(last=1, every=4, best=2).keeps(saves)
        kept = [save for save, stay in zip(saves, stays, strict=True) if stay]
    best = {step for step, _ in kept} - {4, 8, 11}
    assert best, f"the loss falls until the end, so that this shows nothing: {found}"
    paths = sorted((here / "elsewhere").glob("step-*"))
    assert [int(path.name[5:]) for path in paths] == sorted(step for step, _ in kept)
    assert {int(path.name[5:]): Manifest.read(path).metric for path in paths} == dict(kept)


def test_a_runs_directory_stands_for_checkpoints_elsewhere(world: World, here: Path, tmp_path: Path) -> None:
    """The place was said relative to the folder where the run began; this process is in another one."""
    assert verify(here / "runs" / "a").path == here / "elsewhere" / "step-00000011"
    (tmp_path / "text.txt").write_bytes((here / "text.txt").read_bytes())
    words = ["--out", "b", "--resume", str(here / "runs" / "a"), "--steps", "13", "--eval-every", "0", "--lr", "0.3"]
    ran = typed(world, tmp_path, ["train", *TINY, *words, "--checkpoint-every", "auto"])
    assert ran.returncode == 0, ran.stderr
    (resumed,) = [json.loads(line) for line in (tmp_path / "b" / "resumes.jsonl").read_text().splitlines()]
    assert resumed["checkpoint"] == str(here / "elsewhere" / "step-00000011")
    # a run that ends before the save that it has planned has said why it planned it
    assert "step 12: next checkpoint at step 15: the first of this start, early, to measure" in ran.stdout


def test_a_start_knows_the_loss_of_the_last_evaluation_before_it(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with sw.open_mesh(sw.Plan.parse("dp1"), device="cpu") as mesh:
        assert read_held_out(run, 0, mesh).before(3) is None
        assert read_held_out(run, 2, mesh, 6.5).before(3) == 6.5  # of the checkpoint, on a machine without the record
        rows = [{"step": 2, "eval_loss": 5.5}, {"step": 4, "eval_loss": 4.5}, {"step": 5, "loss": 1.0}]
        run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
        held_out = read_held_out(run, 5, mesh, 6.5)
        with run.metrics.open("a") as file:
            file.write('{"step": 6, "eval_loss": null}\n')  # it was not finite
        assert read_held_out(run, 6, mesh).before(7) is None
    held_out.seen[8] = 4.0
    assert [held_out.before(step) for step in (5, 7, 8, 9)] == [4.5, 4.5, 4.0, 4.0]  # 7: after a rewind to before 8
    held_out.seen[10] = float("nan")
    assert held_out.before(11) is None
