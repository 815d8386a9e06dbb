"""`make gpu` without a GPU: it says so; and its code runs on the CPU, so that it does not rot."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from pages import ROOT

SCRIPT = [sys.executable, str(ROOT / "tools" / "gpu.py")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here: `make gpu` does its work")
def test_without_a_gpu_it_says_so() -> None:
    ran = subprocess.run(SCRIPT, capture_output=True, text=True)
    assert ran.returncode == 1
    assert "needs a CUDA device" in ran.stdout and "Nothing was checked" in ran.stdout


@pytest.mark.parametrize(
    ("sections", "checks"),
    [
        ("ranks,parity,state", 5),  # ranks, three precisions, a checkpoint
        pytest.param("runs", 1, marks=pytest.mark.soak),  # a run that is killed
        pytest.param("speed,predict", 0, marks=pytest.mark.soak),
    ],
)
def test_its_checks_pass_on_the_cpu(sections: str, checks: int) -> None:
    words = ["--device", "cpu", "--size", "tiny", "--only", sections]
    ran = subprocess.run([*SCRIPT, *words], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("ok  ") == checks
    assert checks or "seconds: median error" in ran.stdout
