"""Predicted against measured step times on this machine: `python bench/prediction.py`; two gloo processes.

Probes the machine, predicts a step of the reference decoder under four plans with `estimate_time`, and trains it. Plans
are timed in rounds, and the machine is probed before the first and after the last, so that what else it does falls on
all of them; a prediction is the mean of those from both probes.

Writes, between its markers, docs/planner.md.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import shardwise as sw
from overhead import machine
from shardwise.hardware.bench import Measured, measure
from shardwise.launch.forked import World
from shardwise.model.profile import profile_of
from shardwise.models.presets import build
from shardwise.plan.stack import Stack, load_stack
from shardwise.plan.timing import estimate_time
from shardwise.plan.workload import Workload

PAGE = Path(__file__).parents[1] / "docs" / "planner.md"
BEGIN, END = "<!-- bench/prediction.py: begin -->", "<!-- bench/prediction.py: end -->"
MODEL, SEQ, BATCH, RANKS = "bytes-3m", 256, 8, 2
PLANS = ("dp2", "fsdp2", "tp2", "pp2 / mb4")


def loss_fn(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> sw.Loss:
    """Sum over tokens, and their number."""
    return sw.token_cross_entropy(logits, batch["labels"])


def plan_of(text: str) -> sw.Plan:
    """A plan with the global batch of this page."""
    plan = sw.Plan.parse(text)
    return replace(plan, batch=replace(plan.batch, global_size=BATCH))


Step = tuple[float, float]
"""Seconds by the clock, and of processor time."""


def train(text: str, seconds: float) -> list[Step]:
    """In a rank: the steps under a plan, after five for warmth."""
    plan = plan_of(text)
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(build(sw.preset(MODEL)), plan, mesh)
        step = sw.make_step(sw.TrainState(placed, sw.adamw(placed, lr=1e-4)), loss_fn)
        rows = BATCH // mesh.batch.size
        ids = torch.randint(256, (rows, SEQ + 1), generator=torch.Generator().manual_seed(mesh.batch.rank))
        batch = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
        times: list[Step] = []
        begin = torch.tensor(time.perf_counter())
        dist.broadcast(begin, 0)  # ranks count the same steps
        goes_on = torch.ones(())
        while bool(goes_on):
            dist.barrier()
            start, busy = time.perf_counter(), time.process_time()
            step(batch)
            times.append((time.perf_counter() - start, time.process_time() - busy))
            goes_on = torch.tensor(float(time.perf_counter() - float(begin) < seconds or len(times) < 20))
            dist.broadcast(goes_on, 0)
        return times[5:]


def predicted(probes: list[Measured], text: str, stack_of: Callable[[Measured], Stack]) -> Step:
    """Seconds of a step, and those of them that a processor computes: means over the probes."""
    workload = Workload(seq_len=SEQ, global_batch=BATCH)
    totals = []
    for found in probes:
        step = estimate_time(
            profile_of(sw.preset(MODEL)), found.cluster, plan_of(text), workload, stack=stack_of(found)
        )
        waits = sum(step.terms.get(name, 0.0) for name in ("data", "tensor", "pipeline"))
        totals.append((step.total, step.total - waits))
    return statistics.mean(total for total, _ in totals), statistics.mean(busy for _, busy in totals)


def as_run_here(found: Measured) -> Stack:
    """The stack of these runs: operators one by one, the host's time per kernel as probed, nothing else."""
    return replace(load_stack("shardwise"), fused=False, launch=found.launch, micro_host=0.0, step=0.0)


def page(probes: list[Measured], times: dict[str, list[Step]], load: tuple[str, str]) -> str:
    """The block of the page."""
    about = machine()
    lines = [
        f"{about['cpu']}, {about['cores']} cores, torch {about['torch']}, {about['date']}. `{MODEL}`, fp32, {BATCH}",
        f"samples of {SEQ} tokens. Load average {load[0]} before and {load[1]} after; these runs alone make {RANKS}.",
        "",
        "| plan | steps | step, ms | `shardwise`, ms | error | eager, ms | error | processor, ms | eager, ms | error |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    errors: dict[str, list[float]] = {"step": [], "eager": [], "processor": []}
    for text, steps in times.items():
        clock = statistics.quantiles([wall for wall, _ in steps], n=10, method="inclusive")[0]
        busy = statistics.median(cpu for _, cpu in steps)
        default = predicted(probes, text, lambda _: load_stack("shardwise"))
        eager = predicted(probes, text, as_run_here)
        cells = [text, str(len(steps)), ms(clock)]
        pairs = {"step": (default[0], clock), "eager": (eager[0], clock), "processor": (eager[1], busy)}
        for name, (told, measured) in pairs.items():
            cells += [*([ms(busy)] if name == "processor" else []), ms(told), f"{told / measured - 1:+.0%}"]
            errors[name].append(abs(told / measured - 1))
        lines.append("| " + " | ".join(cells) + " |")
    middle = {name: f"{statistics.median(values):.0%}" for name, values in errors.items()}
    one, two = (probe.cluster for probe in (probes[0], probes[-1]))
    pairs_of = (
        ("fp32", "Gflop/s", *(c.device.rates.fp32 * c.device.curve.best / 1e9 for c in (one, two))),
        ("memory", "GB/s", *(c.device.bandwidth * c.device.stream / 1e9 for c in (one, two))),
        ("links", "GB/s", *(c.local.bandwidth / 1e9 for c in (one, two))),
        ("latency", "us", *(c.local.latency * 1e6 for c in (one, two))),
    )
    both = ", ".join(f"{name} {a:.3g} and {b:.3g} {unit}" for name, unit, a, b in pairs_of)
    lines += [
        "",
        f"Median errors: step {middle['step']}, eager {middle['eager']}, processor {middle['processor']}.",
        f"Both probes: {both}.",
    ]
    return "\n".join(lines)


def ms(value: float) -> str:
    """Milliseconds."""
    return f"{value * 1e3:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="per probe, and per plan over all rounds")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dry-run", action="store_true", help="print, do not write the page")
    options = parser.parse_args()
    world = World(RANKS)
    load = Path("/proc/loadavg").read_text(encoding="ascii").split()[0]
    try:
        probes = [measure(partial(world, RANKS), seconds=options.seconds)]
        times: dict[str, list[Step]] = {text: [] for text in PLANS}
        for _ in range(options.rounds):
            for text in PLANS:
                ranks = world(RANKS, train, text, options.seconds / options.rounds)
                times[text] += [(max(a[0], b[0]), max(a[1], b[1])) for a, b in zip(*ranks, strict=True)]
        probes.append(measure(partial(world, RANKS), seconds=options.seconds))
    finally:
        world.close()
    after = Path("/proc/loadavg").read_text(encoding="ascii").split()[0]
    text = page(probes, times, (load, after))
    print(text)
    if not options.dry_run:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        _, _, behind = rest.partition(END)
        PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{behind}", encoding="utf-8")


if __name__ == "__main__":
    main()
