"""The planner's pipeline time against real pipelines: `python bench/pipeline.py`; four gloo processes.

Work is waiting: a block's forward, its gradient of the input and that of the weight each sleep for a given time, so
that four processes do not compete for the cores of a small machine. Everything else is real: Shardwise cuts the model,
torch's schedules run it and send its tensors. Simulated is what `simulate` says of the times that were slept.

Writes, between its markers, docs/pipeline.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from overhead import free_port, machine
from shardwise.plan.plan import LOOPED, SCHEDULES
from shardwise.plan.schedule import actions
from shardwise.plan.time_terms.simulate import Costs, simulate

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "pipeline.md"
BEGIN, END = "<!-- bench/pipeline.py: begin -->", "<!-- bench/pipeline.py: end -->"
RANKS, MICRO_BATCHES, TARGET = 4, 8, 0.03
# seconds of forward, and of both halves of backward, of 8 blocks that differ up to 2.4 times; stages of the kinds
# with one stage per rank are two of them
FORWARD = (0.12, 0.20, 0.16, 0.24, 0.18, 0.10, 0.22, 0.14)
INPUT = (0.14, 0.18, 0.20, 0.22, 0.20, 0.12, 0.26, 0.16)
WEIGHT = (0.10, 0.14, 0.10, 0.18, 0.16, 0.08, 0.16, 0.12)


def costs_of(kind: str) -> Costs:
    """The slept times of each stage of a schedule."""
    blocks = 1 if kind in LOOPED else 2
    stages = [range(first, first + blocks) for first in range(0, len(FORWARD), blocks)]
    return Costs.of_stages(*([sum(row[i] for i in blocks) for blocks in stages] for row in (FORWARD, INPUT, WEIGHT)))


# ---------------------------------------------------------------- in the four processes


class Pass(torch.autograd.Function):
    """Hands its input on, and its gradient back, each after a time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, input_s: float) -> torch.Tensor:
        """The input, after `forward_s`; at once where a model is only traced."""
        ctx.input_s = input_s
        if x.device.type != "meta":
            time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """The gradient, after `input_s`."""
        time.sleep(ctx.input_s)
        return grads[0].clone(), None, None


class Weigh(torch.autograd.Function):
    """A weight whose gradient takes a time."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, weight_s: float) -> torch.Tensor:
        """The weight."""
        ctx.weight_s = weight_s
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """The gradient, after `weight_s`."""
        time.sleep(ctx.weight_s)
        return grads[0].clone(), None


class Waiting(nn.Module):
    """A block that waits."""

    def __init__(self, forward_s: float, input_s: float, weight_s: float) -> None:
        super().__init__()
        self.times = (forward_s, input_s, weight_s)
        self.weight = nn.Parameter(torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Input plus weight, both after their times."""
        forward_s, input_s, weight_s = self.times
        return Pass.apply(x, forward_s, input_s) + Weigh.apply(self.weight, weight_s)


class Tower(nn.Module):
    """A chain of such blocks. `start` makes the first stage's gradients flow through all of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.zeros(16))
        self.layers = nn.ModuleList(Waiting(*times) for times in zip(FORWARD, INPUT, WEIGHT, strict=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All blocks in turn."""
        x = x + self.start
        for layer in self.layers:
            x = layer(x)
        return x


def loss_fn(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Any loss: nothing is learnt."""
    return output.sum()


def measure(kind: str, rounds: int) -> list[float]:
    """Seconds of each round, from when all ranks are ready until the last one is done."""
    stages = RANKS * (2 if kind in LOOPED else 1)
    size = len(FORWARD) // stages
    split = ",".join(f"layers.{first}" for first in range(size, len(FORWARD), size))
    plan = sw.Plan.parse(f"pp{RANKS} / {kind} split={split} mb{MICRO_BATCHES} / fp32")
    batches = [{"x": torch.zeros(4, 16)} for _ in range(MICRO_BATCHES)]
    seconds = []
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(Tower, plan, mesh, sample=batches[0])
        assert placed.pipeline is not None
        for _ in range(rounds + 1):
            dist.barrier()
            begin = time.monotonic()
            placed.pipeline.run(batches, loss_fn, backward=True)
            span = torch.tensor([-begin, time.monotonic()], dtype=torch.float64)
            dist.all_reduce(span, dist.ReduceOp.MAX)  # one machine, one clock
            seconds.append(float(span.sum()))
    return seconds[1:]  # the first one learns what passes between stages


# ---------------------------------------------------------------- the parent


def run_workers(kinds: list[str], rounds: int) -> dict[str, list[float]]:
    """Start four workers of this file and read what rank 0 prints."""
    common = {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--worker", "--rounds", str(rounds), *kinds]
    workers = [
        subprocess.Popen(
            command,
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        output = workers[0].communicate()[0]
        if any(worker.wait() for worker in workers):
            raise SystemExit("bench: a worker failed; its message is above")
    finally:
        for worker in workers:
            worker.kill()
    return dict(json.loads(output.splitlines()[-1]))


def rows_of(measured: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Simulated beside measured, by kind."""
    rows = []
    for kind, seconds in measured.items():
        timeline = simulate(actions(kind, RANKS, 2 if kind in LOOPED else 1, MICRO_BATCHES), costs_of(kind))
        median = statistics.median(seconds)
        rows.append(
            {
                "kind": kind,
                "simulated_s": timeline.total,
                "measured_s": median,
                "spread": (max(seconds) - min(seconds)) / median,
                "error": timeline.total / median - 1,
                "bubble": timeline.bubble,
            }
        )
    return rows


def markdown(rows: list[dict[str, Any]], where: dict[str, Any], rounds: int) -> str:
    """The section of docs/pipeline.md."""
    lines = [
        f"Measured {where['date']}: {RANKS} processes, gloo, 1 thread each, {MICRO_BATCHES} micro-batches, median of "
        f"{rounds} steps; {where['cores']} cores ({where['cpu']}), load average {where['load_before']} before the run, "
        f"torch {where['torch']}.",
        "",
        "| schedule | simulated s | measured s | error | spread of the steps | bubble, simulated |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| `{row['kind']}` | {row['simulated_s']:.3f} | {row['measured_s']:.3f} | {100 * row['error']:+.1f} % "
        f"| {100 * row['spread']:.1f} % | {100 * row['bubble']:.1f} % |"
        for row in rows
    ]
    return "\n".join(lines)


def paste(page: str, section: str) -> str:
    """The page with the section between the markers replaced."""
    before, begin, rest = page.partition(BEGIN)
    _, marker, after = rest.partition(END)
    if not begin or not marker:
        raise SystemExit(f"{PAGE}: the markers {BEGIN} and {END} are gone; put them back where the table belongs")
    return f"{before}{BEGIN}\n\n{section}\n\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", help="schedules; none: all of them, and the page is rewritten")
    parser.add_argument("--rounds", type=int, default=3, help="measured steps per schedule")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    kinds = options.kinds or list(SCHEDULES)
    if options.worker:
        torch.set_num_threads(1)
        print(json.dumps({kind: measure(kind, options.rounds) for kind in kinds}), flush=True)
        return
    where = machine()
    rows = rows_of(run_workers(kinds, options.rounds))
    section = markdown(rows, where, options.rounds)
    print(section)
    if not options.kinds:
        PAGE.write_text(paste(PAGE.read_text(encoding="utf-8"), section), encoding="utf-8")
    if worst := [row["kind"] for row in rows if abs(row["error"]) > TARGET]:
        raise SystemExit(f"off by more than {100 * TARGET:.0f} %: {', '.join(worst)}")


if __name__ == "__main__":
    main()
