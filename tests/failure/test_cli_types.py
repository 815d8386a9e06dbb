"""`shardwise train` goes on with averages of another type: with leave, and also where the start that had it died."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import ExitCode

SIZES = {"layers": 1, "dim": 32, "heads": 2, "ffn": 48, "seq": 32, "batch": 4, "eval-every": 0, "nproc": 1}
FLAGS = [word for flag, value in SIZES.items() for word in (f"--{flag}", str(value))]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(f"line {i}: {i * i} is the square of {i}\n" for i in range(400)))
    return path


def train(text: Path, out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shardwise", "train", "--model", "tiny", "--data", str(text), "--out", str(out)]
    rest = [*FLAGS, "--device", "cpu", "--schedule", "constant", "--no-sample", *words]
    return subprocess.run([*command, *rest], capture_output=True, text=True, timeout=300)


def stored(out: Path, step: int) -> list[str]:
    manifest: dict[str, Any] = json.loads((out / f"checkpoints/step-{step:08d}/manifest.json").read_text())
    return list(manifest["tensors"])


@pytest.mark.soak
def test_a_run_goes_on_with_other_averages_with_leave(text: Path, tmp_path: Path) -> None:
    out, narrow = tmp_path / "run", ("--set", "optimizer.state_dtype=8bit", "--steps", "2")
    assert train(text, out, "--steps", "1").returncode == 0
    refused = train(text, out, *narrow)
    assert refused.returncode == ExitCode.CHANGED and "add --allow optimizer.state_dtype" in refused.stderr
    ran = train(text, out, *narrow, "--allow", "optimizer.state_dtype")
    assert ran.returncode == 0, ran.stderr
    assert "moments from float32 to 8bit (largest rounding 0.0" in ran.stdout
    [resume] = [json.loads(line) for line in (out / "resumes.jsonl").read_text().splitlines()]
    assert resume["proof"]["converted"][0]["before"] == "float32" and resume["proof"]["probe"] is not None
    assert any(name.endswith(".codes") for name in stored(out, 2)) and "optim." in " ".join(stored(out, 1))
    assert not any(name.endswith(".codes") for name in stored(out, 1))
    shutil.rmtree(out / "checkpoints" / "step-00000002")  # as if it had died before it saved
    again = train(text, out, *narrow)
    assert again.returncode == 0, again.stderr
    assert "moments from float32 to 8bit" in again.stdout


@pytest.mark.soak
def test_another_runs_checkpoint_is_converted_with_leave(text: Path, tmp_path: Path) -> None:
    assert train(text, tmp_path / "a", "--steps", "1").returncode == 0
    words = ("--steps", "2", "--set", "optimizer.state_dtype=bf16", "--resume", str(tmp_path / "a"))
    refused = train(text, tmp_path / "b", *words)
    assert refused.returncode == ExitCode.CHANGED and "--allow optimizer.state_dtype" in refused.stderr
    ran = train(text, tmp_path / "c", *words, "--allow", "optimizer.state_dtype")
    assert ran.returncode == 0, ran.stderr
    assert "moments from float32 to bfloat16 (largest relative rounding 0.0039)" in ran.stdout
