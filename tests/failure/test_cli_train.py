"""`shardwise train` for real, with a model of a few thousand parameters: what a run leaves, resumes, and refuses."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from shardwise.errors import ExitCode
from shardwise.plan.plan import Plan
from shardwise.testing.world import World
from tests.failure.as_rank import typed

SIZES = [
    "--model",
    "tiny",
    "--layers",
    "2",
    "--dim",
    "32",
    "--heads",
    "2",
    "--ffn",
    "48",
    "--seq",
    "32",
    "--batch",
    "4",
]
SHORT = [*SIZES, "--device", "cpu", "--schedule", "constant", "--deterministic", "--eval-every", "0"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(f"line {i}: {i * i} is the square of {i}\n" for i in range(400)))
    return path


def command(text: Path, out: Path, *words: str) -> list[str]:
    base = [sys.executable, "-m", "shardwise", "train", "--data", str(text), "--out", str(out)]
    return [*base, *SHORT, *words]


def train(text: Path, out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(text, out, *words), capture_output=True, text=True, timeout=300)


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def losses(out: Path) -> list[tuple[int, float, float]]:
    return [(row["step"], row["loss"], row["grad_norm"]) for row in records(out) if "loss" in row]


def tensors(out: Path) -> dict[str, str]:
    """Checksums of the newest checkpoint's tensors."""
    newest = max((out / "checkpoints").glob("step-*"))
    stored = json.loads((newest / "manifest.json").read_text())["tensors"]
    return {name: entry["checksum"] for name, entry in stored.items()}


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps without interruption."""
    out = tmp_path_factory.mktemp("whole") / "run"
    ran = train(text, out, "--steps", "4")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == f"results: {out}"
    assert "unigram entropy" in ran.stdout and "a sample of the trained model" in ran.stdout
    return out


def test_what_a_run_leaves(whole: Path) -> None:
    assert [step for step, _, _ in losses(whole)] == [1, 2, 3, 4]
    wanted = {"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "step_s", "memory_bytes", "skipped"}
    assert wanted <= records(whole)[0].keys()
    evaluation = [row for row in records(whole) if "eval_loss" in row]
    assert [row["step"] for row in evaluation] == [4]
    assert Plan.load(whole / "plan.toml").world == 2
    assert json.loads((whole / "environment.json").read_text())["packages"]["torch"]
    assert json.loads((whole / "summary.json").read_text())["eval_loss"] == evaluation[0]["eval_loss"]
    with Image.open(whole / "loss.png") as picture:
        assert picture.size == (960, 560)
    assert (whole / "sample.txt").read_text().strip()
    assert sorted(path.name for path in (whole / "checkpoints").glob("step-*")) == ["step-00000002", "step-00000004"]


def test_environment_holds_no_name_of_user_or_place(whole: Path) -> None:
    text = (whole / "environment.json").read_text()
    assert str(Path.home()) not in text and os.uname().nodename not in text


def test_evaluation_covers_the_held_out_split_exactly(whole: Path, text: Path) -> None:
    (row,) = [row for row in records(whole) if "eval_loss" in row]
    held_out = int(len(text.read_bytes()) * 0.005)
    assert row["eval_tokens"] == held_out - 1


def test_a_resumed_run_ends_bit_equal_on_other_processes(world: World, whole: Path, text: Path, tmp_path: Path) -> None:
    """Those of its first start are a launcher's, those of the second its own."""
    out = tmp_path / "run"
    began = typed(world, tmp_path, command(text, out, "--steps", "2")[3:], ranks=2)
    assert began.returncode == 0, began.stderr
    ran = train(text, out, "--steps", "4", "--no-sample")
    assert ran.returncode == 0, ran.stderr
    assert "continuing from" in ran.stdout
    proof = re.search(r"resume proof: (\d+)/(\d+) tensors, checksums ok, probe loss (\S+) = (\S+), ", ran.stdout)
    assert proof and proof[1] == proof[2] == str(len(tensors(out))) and proof[3] == proof[4]
    (kept,) = [json.loads(line) for line in (out / "resumes.jsonl").read_text().splitlines()]
    assert kept["step"] == 2 and kept["proof"]["probe"] == kept["proof"]["stored_probe"] is not None
    assert losses(out) == losses(whole)
    assert tensors(out) == tensors(whole)
    main = [str(Path(sys.executable).parent / "shardwise"), "ckpt", "diff", str(out), str(whole)]
    assert subprocess.run(main, capture_output=True).returncode == 0


@pytest.mark.soak
def test_negative_control_another_seed_is_another_run(whole: Path, text: Path, tmp_path: Path) -> None:
    assert train(text, tmp_path / "run", "--steps", "1", "--seed", "1", "--no-sample").returncode == 0
    assert losses(tmp_path / "run")[0] != losses(whole)[0]


def test_sigterm_saves_and_the_run_continues(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ("--steps", "100000", "--checkpoint-every", "0", "--no-sample")
    process = subprocess.Popen(command(text, out, *words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 240
    while not (out / "metrics.jsonl").exists() or not records(out):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == ExitCode.TERMINATED, stderr
    step = losses(out)[-1][0]
    assert [path.name for path in (out / "checkpoints").glob("step-*")] == [f"step-{step:08}"]
    assert f"step {step}: asked to stop" in stdout
    assert f"shardwise train {out / 'config.toml'}" in stderr
    ran = subprocess.run(
        [sys.executable, "-m", "shardwise", "train", str(out / "config.toml"), "--steps", str(step + 1), "--json"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["step"] == step + 1


@pytest.mark.parametrize(
    ("words", "code", "text_of_error"),
    [
        (["--dim", "64"], ExitCode.CHANGED, "model.dim: 32 -> 64 (maths)"),
        (["--optimizer", "lion"], ExitCode.CHANGED, "optimizer.name: 'adamw' -> 'lion' (maths)"),
        (["--resume", "never"], ExitCode.USAGE, "--resume never would overwrite"),
    ],
)
def test_out_that_holds_another_run(
    whole: Path, text: Path, words: list[str], code: ExitCode, text_of_error: str
) -> None:
    before = (whole / "config.json").read_bytes()
    ran = train(text, whole, "--steps", "4", *words)
    assert ran.returncode == code
    assert text_of_error in ran.stderr
    assert (whole / "config.json").read_bytes() == before


def test_bad_data_is_one_message_with_file_and_line(text: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\n{"text": "cut')
    ran = train(bad, tmp_path / "run", "--steps", "1")
    assert ran.returncode == ExitCode.USAGE
    assert f"{bad}, line 2" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_tokenizer_that_exceeds_the_vocabulary(world: World, text: Path, tmp_path: Path) -> None:
    ran = typed(world, tmp_path, command(text, tmp_path / "run", "--steps", "1", "--vocab", "100")[3:])
    assert ran.returncode == ExitCode.USAGE
    assert "vocab_size >= 256" in ran.stderr


@pytest.mark.soak  # in every run: a factory of transformers, tests/parity/test_hf_train.py
def test_a_factory_under_another_plan(text: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from shardwise.models.gpt import GPT, GPTConfig\n"
        "def model():\n"
        "    return GPT(GPTConfig(vocab_size=256, dim=32, num_layers=2, num_heads=2, max_seq_len=32))\n"
    )
    words = ["--model", "mine:model", "--plan", "fsdp2 / mb2", "--optimizer", "sgd", "--steps", "1", "--seq", "32"]
    ran = subprocess.run(
        [sys.executable, "-m", "shardwise", "train", "--data", str(text), "--out", "run", "--device", "cpu", *words],
        capture_output=True, text=True, timeout=300, cwd=tmp_path,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert len(losses(tmp_path / "run")) == 1


def test_a_changed_rate_needs_leave_and_a_changed_layout_does_not(world: World, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    began = typed(world, tmp_path, command(text, out, "--steps", "1", "--no-sample", "--plan", "dp2")[3:], ranks=2)
    assert began.returncode == 0, began.stderr
    words = ["--steps", "3", "--no-sample", "--plan", "fsdp2", "--lr", "0.5", "--seed", "5", "--check-replicas", "1"]
    refused = train(text, out, *words)
    assert refused.returncode == ExitCode.CHANGED
    assert "add --allow optimizer.lr --allow train.seed" in refused.stderr
    ran = train(text, out, *words, "--allow", "optimizer.lr", "--allow", "train.seed")
    assert ran.returncode == 0, ran.stderr
    assert "changed since the last start: train.seed: 0 -> 5 (maths)" in ran.stderr
    assert "plan.shorthand: 'dp2' -> 'fsdp2' (layout)" in ran.stderr
    [event] = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    assert event["event"] == "changed" and event["allowed"] == ["optimizer.lr", "train.seed"]
    assert [step for step, _, _ in losses(out)] == [1, 2, 3]
    [lock] = (out / "lock").iterdir()
    assert json.loads(lock.read_text())["released"]
