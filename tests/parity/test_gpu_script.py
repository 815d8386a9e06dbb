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


@pytest.mark.parametrize("sections", ["ranks,parity,state,runs", pytest.param("speed,predict", marks=pytest.mark.soak)])
def test_its_checks_pass_on_the_cpu(sections: str) -> None:
    words = ["--device", "cpu", "--size", "tiny", "--only", sections]
    ran = subprocess.run([*SCRIPT, *words], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    is_checked = "ranks" in sections
    # ranks, three precisions, a checkpoint, a run that is killed
    assert ran.stdout.count("ok  ") == (6 if is_checked else 0)
    assert is_checked or "seconds: median error" in ran.stdout
