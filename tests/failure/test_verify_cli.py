"""`shardwise verify` on the command line: exit codes, JSON, what it refuses, the matrix."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from shardwise.cli.main import main

SCRIPT = Path(__file__).parents[1] / "parity" / "verified.py"
COMMAND = Path(sys.executable).with_name("shardwise")


def verify(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "120"} | environment
    command = [str(COMMAND), "verify", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=variables, timeout=240)


def test_proven_is_exit_0_with_a_table(tmp_path: Path) -> None:
    ran = verify(tmp_path, str(SCRIPT), "--plan", "fsdp2 / mb2 / bf16", "--", "clip")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for text in ("gradient norm", "optimizer state", "against `dp1 / fp64`", "proven: the same training", "16 x what"):
        assert text in ran.stdout
    assert "run in fp64 in place of bf16" in ran.stdout
    assert list(tmp_path.iterdir()) == []


def test_different_is_exit_1_with_the_cause_in_the_json(tmp_path: Path) -> None:
    ran = verify(tmp_path, str(SCRIPT), "--plan", "dp2", "--json", "--steps", "1", FAULT="mean-of-means")
    answer = json.loads(ran.stdout)
    assert (ran.returncode, answer["exit_code"], answer["verdict"]) == (1, 1, "different")
    assert answer["findings"][0]["id"] == "verify.mean-of-means"
    assert answer["first_forward"] == "the loss" and answer["steps"] == 1
    assert {row["kind"] for row in answer["rows"] if row["over"]} >= {"loss", "grad"}


def test_refused_is_exit_2_with_the_id_in_the_json(tmp_path: Path) -> None:
    ran = verify(tmp_path, str(SCRIPT), "--plan", "dp2 / seq", "--json")
    answer = json.loads(ran.stdout)
    assert (ran.returncode, answer["exit_code"], answer["verdict"]) == (2, 2, "refused")
    assert [finding["id"] for finding in answer["findings"]] == ["tp.sequence"]


def test_a_run_toml_is_shrunk_and_proven(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    (tmp_path / "run.toml").write_text(
        '[data]\nsources = "text.txt"\nholdout = 0.1\n[train]\nsteps = 20\nglobal_batch = 4\n'
    )
    ran = verify(tmp_path, "run.toml", "--plan", "dp2 / mb2", "--shrink")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "shrunk: num_layers 8 -> 4, dim 192 -> 48" in ran.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.toml", "text.txt"]


def test_every_legal_plan_of_a_world_as_a_matrix(tmp_path: Path) -> None:
    ran = verify(tmp_path, "llama-8b", "--all", "--world", "2", "--limit", "2", "--steps", "1")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "legal plans of 2 ranks (--limit" in ran.stdout
    assert "2 proven, 0 different, 0 refused; drawn: verify.png" in ran.stdout
    with Image.open(tmp_path / "verify.png") as image:
        assert (34, 139, 84) in {colour for _, colour in image.getcolors(1 << 20)}


@pytest.mark.parametrize(
    ("words", "name", "text"),
    [
        (["train.py", "--plan", "dp2"], "verify.usageerror", "does not exist"),
        (["train.py"], "verify.usageerror", "under which plan"),
        (["train.py", "--all"], "verify.usageerror", "--world 4"),
        (["train.py", "--plan", "dp2 tp"], "plan.syntax", "tp"),
        (["train.py", "--plan", "dp2", "--world", "4"], "verify.usageerror", "leave --world out"),
        (["llama-9b", "--plan", "dp2"], "verify.usageerror", "llama-8b"),
        (["llama-8b", "--plan", "dp2", "--", "--fast"], "verify.usageerror", "go to a script"),
        ([str(SCRIPT), "--plan", "dp2", "--shrink"], "verify.modelerror", "nothing to shrink"),
        (["llama-8b", "--all", "--world", "2", "--png", "no/where.png"], "verify.usageerror", "cannot draw"),
    ],
)
def test_what_cannot_be_verified_is_refused_before_anything_runs(capsys, words, name, text) -> None:
    at = words.index("--") if "--" in words else len(words)
    with pytest.raises(SystemExit) as stop:
        main(["verify", *words[:at], "--json", *words[at:]])
    finding = json.loads(capsys.readouterr().out)["findings"][0]
    assert (stop.value.code, finding["id"]) == (2, name), finding
    assert text in finding["what"]
