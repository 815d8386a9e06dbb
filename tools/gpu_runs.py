"""Of `make gpu`: whole runs of `shardwise train` that are killed, and end as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

from shardwise.launch.environment import BACKEND, HOST
from shardwise.testing.killer import Killer

STEPS, KILLED_AT, EVERY = 12, 7, 2
SMALL = "--model tiny --seq 32 --batch 4"
MIDDLE = "--dim 512 --layers 6 --heads 8 --kv-heads 4 --ffn 1408 --seq 512 --batch 8"
ALLOWED = 1e-5
"""Of a loss in fp32 on another mesh: other orders of sums."""
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Runs:
    """Where runs write, and what all of them are told."""

    folder: Path
    device: str
    words: str

    def start(self, out: str, plan: str, *more: str) -> subprocess.Popen[str]:
        """A run that two equal ones of end bit-equal; its own process group, to be killed as one."""
        words = f"{self.words} --steps {STEPS} --checkpoint-every {EVERY} --deterministic --no-sample".split()
        command = [sys.executable, "-m", "shardwise", "train", *words, "--device", self.device, "--plan", plan]
        command += ["--out", str(self.folder / out), *more]
        shared = {BACKEND: HOST} if self.device != "cpu" else {}
        with (self.folder / f"{out}.log").open("a", encoding="utf-8") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=log, text=True, env=os.environ | shared, start_new_session=True
            )

    def whole(self, out: str, plan: str, *more: str) -> None:
        """A run from its start, or from where it was, to its end."""
        process = self.start(out, plan, *more)
        try:
            code = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, signal.SIGKILL)
        if code != 0:
            raise RuntimeError(f"{plan}: exit code {code}: {self.log(out)[-1500:]}")

    def log(self, out: str) -> str:
        """What it printed."""
        return (self.folder / f"{out}.log").read_text(encoding="utf-8")

    def losses(self, out: str) -> dict[int, float]:
        """By step; of a step that was done twice, the last."""
        path = self.folder / out / "metrics.jsonl"
        rows = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        found = [json.loads(row) for row in rows if row.endswith("}")]
        return {row["step"]: row["loss"] for row in found if "step" in row and "loss" in row}

    def await_step(self, process: subprocess.Popen[str], out: str, step: int) -> None:
        """Until the run is past a step."""
        end = time.monotonic() + TIMEOUT_S
        while step not in self.losses(out):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"no step {step}: exit code {process.poll()}: {self.log(out)[-1500:]}")
            time.sleep(0.02)

    def same(self, one: str, other: str) -> bool:
        """Whether all tensors of the last checkpoints are bit-equal, weights and optimizer alike."""
        folders = [str(self.folder / out) for out in (one, other)]
        ran = subprocess.run([sys.executable, "-m", "shardwise", "ckpt", "diff", *folders], capture_output=True)
        return ran.returncode == 0 and self.losses(one) == self.losses(other)


def check_runs(device: str, *, few: bool) -> Iterator[str]:
    """A line per run that was killed; they run beside each other."""
    with tempfile.TemporaryDirectory(prefix="shardwise-gpu-") as folder, ThreadPoolExecutor() as pool:
        runs = Runs(Path(folder), device, SMALL if few else MIDDLE)
        work = [pool.submit(_resumed, runs, "fp32" if few else "bf16")]
        if not few:
            work += [pool.submit(_resumed, runs, "fsdp2 / bf16"), pool.submit(_recovered, runs, "fsdp2 / bf16")]
            work.append(pool.submit(_elsewhere, runs, "fsdp2", "dp1"))
        for done in work:
            try:
                yield done.result()
            except RuntimeError as error:
                yield f"FAIL {error}"


def _killed(runs: Runs, out: str, plan: str) -> None:
    process = runs.start(out, plan)
    runs.await_step(process, out, KILLED_AT)
    ranks = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    psutil.wait_procs(ranks, timeout=30)  # which end by themselves behind their launcher, and hold the directory


def _proof(runs: Runs, out: str) -> str:
    return next((line for line in runs.log(out).splitlines() if "resume proof" in line), "no resume proof")


def _resumed(runs: Runs, plan: str) -> str:
    name = plan.replace(" / ", "-")
    runs.whole(f"{name}-whole", plan)
    _killed(runs, f"{name}-killed", plan)
    runs.whole(f"{name}-killed", plan)
    same, proof = runs.same(f"{name}-whole", f"{name}-killed"), _proof(runs, f"{name}-killed")
    word = "ok  " if same and "checksums ok" in proof else "FAIL"
    return f"{word} {plan} killed at step {KILLED_AT}, resumed: bit-equal at step {STEPS}: {same}; {proof}"


def _recovered(runs: Runs, plan: str) -> str:
    runs.whole("quiet", plan)
    process = runs.start("struck", plan, "--recover")
    killer = Killer(process.pid, seed=3, mean_pause_s=0.05, double=0.0, standbys=0.0)
    for blows in (1, 2):
        runs.await_step(process, "struck", 4 * blows)
        killer.run(blows, while_true=lambda: process.poll() is None)
    code = process.wait(TIMEOUT_S)
    same = code == 0 and runs.same("quiet", "struck")
    word = "ok  " if same and killer.kills == 2 else "FAIL"
    more = "" if same else runs.log("struck")[-1500:]
    return f"{word} {plan} --recover, {killer.kills} ranks killed: bit-equal at step {STEPS}: {same} {more}".rstrip()


def _elsewhere(runs: Runs, here: str, there: str) -> str:
    runs.whole("home", here)
    _killed(runs, "moved", here)
    runs.whole("moved", there)
    home, moved = runs.losses("home"), runs.losses("moved")
    worst = max(abs(moved[step] / home[step] - 1) for step in home) if home.keys() == moved.keys() else float("inf")
    proof = _proof(runs, "moved")
    word = "ok  " if worst <= ALLOWED and "checksums ok" in proof else "FAIL"
    return f"{word} {here} killed, resumed under {there}: losses {worst:.1e} apart, allowed {ALLOWED:.0e}; {proof}"
