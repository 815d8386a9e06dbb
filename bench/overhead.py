"""`make bench`: what Shardwise adds to a step and to a start, beside plain torch, in one run.

Two gloo processes with one thread each. The loops alternate in blocks of steps inside the same processes, in an order
that turns with every round, so that what else the machine does falls on all of them. A block's time is the median of
its steps: one that the machine interrupted says nothing of the loop. Reported are medians over rounds: of that time,
and of its difference and ratio *within* a round. Starts alternate as whole processes.

Writes docs/benchmarks.json and, between its markers, docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "benchmarks.json"
BEGIN, END = "<!-- make bench: begin -->", "<!-- make bench: end -->"
TARGET_RATIO, TARGET_US, TARGET_START = 1.02, 150.0, 1.25
THEIRS, OURS, AGAIN = "plain torch", "Shardwise", "plain torch again"
"""The loops of one comparison; a second copy of the plain one shows how far equal loops are apart."""
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Lap:
    """One block of steps: the median step by the clock, and processor time of this process per step, in seconds."""

    wall_s: float
    cpu_s: float


def pair(theirs: list[Lap], ours: list[Lap]) -> dict[str, float]:
    """Medians of two series that were taken round by round, and of what differs within a round.

    >>> pair([Lap(1.0, 1.0), Lap(2.0, 1.0)], [Lap(1.1, 1.0), Lap(2.2, 1.0)])["ratio"]
    1.1
    """
    both = list(zip(theirs, ours, strict=True))
    return {
        "torch_ms": round(statistics.median(lap.wall_s for lap in theirs) * 1e3, 4),
        "shardwise_ms": round(statistics.median(lap.wall_s for lap in ours) * 1e3, 4),
        "ratio": round(statistics.median(b.wall_s / a.wall_s for a, b in both), 4),
        "difference_us": round(statistics.median(b.wall_s - a.wall_s for a, b in both) * 1e6, 1),
        "cpu_difference_us": round(statistics.median(b.cpu_s - a.cpu_s for a, b in both) * 1e6, 1),
    }


# ---------------------------------------------------------------- in the two processes


def alternate(loops: dict[str, Callable[[], float]], steps: int, rounds: int) -> dict[str, list[Lap]]:
    """A lap of every loop in every round; the order turns by one each round."""
    import torch.distributed as dist

    times: dict[str, list[Lap]] = {name: [] for name in loops}
    names = list(loops)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            dist.barrier()
            cpu, ends = time.process_time(), [time.perf_counter()]
            for _ in range(steps):
                loops[name]()
                ends.append(time.perf_counter())
            wall = statistics.median(end - start for start, end in pairwise(ends))
            times[name].append(Lap(wall, (time.process_time() - cpu) / steps))
    return times


def work(quick: bool) -> Rows:
    """Time every size under both kinds of data parallelism; rows of results."""
    import torch

    import contestants
    import shardwise as sw
    import sizes

    torch.set_num_threads(1)
    rows: Rows = []
    ddp, fsdp = sw.Plan.parse("dp2"), sw.Plan.parse("fsdp2")
    with sw.open_mesh(ddp) as replicas, sw.open_mesh(fsdp) as shards:
        for size in sizes.SIZES:
            batch = sizes.batch_of(size, replicas.rank)
            for name, plain, mesh, plan in (
                ("torch DDP", contestants.torch_ddp, replicas, ddp),
                ("torch FSDP2", contestants.torch_fsdp2, shards, fsdp),
            ):
                steps = {THEIRS: plain(size), OURS: contestants.shardwise(size, mesh, plan), AGAIN: plain(size)}
                loops = {who: partial(step, batch) for who, step in steps.items()}
                check_same_training(name, {who: [loop() for _ in range(5)] for who, loop in loops.items()}, mesh)
                times = alternate(loops, size.steps_per_block, 4 if quick else size.rounds)
                again = pair(times[THEIRS], times[AGAIN])["difference_us"]
                rows.append({"model": size.name, "against": name, "again_us": again} | pair(times[THEIRS], times[OURS]))
    return rows


def check_same_training(against: str, losses: dict[str, list[float]], mesh: Any) -> None:
    """The loops must train alike, or their times compare nothing: their mean losses over both ranks agree."""
    import torch

    plain = mesh.all_reduce_sum(torch.tensor(losses[THEIRS], dtype=torch.float64)) / mesh.world
    own = torch.tensor(losses[OURS], dtype=torch.float64)
    if not torch.allclose(plain, own, rtol=1e-5):
        raise SystemExit(f"{against} and Shardwise train differently: {plain.tolist()} and {own.tolist()}")


# ---------------------------------------------------------------- the parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def measure_steps(quick: bool) -> Rows:
    """Start two workers of this file and read the rows that rank 0 prints."""
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, __file__, "--worker", *(["--quick"] if quick else [])]
    workers = [
        subprocess.Popen(
            command,
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        output = workers[0].communicate()[0]
        if any(worker.wait() for worker in workers):
            raise SystemExit("bench: a worker failed; its message is above")
    finally:
        for worker in workers:
            worker.kill()
    return list(json.loads(output.splitlines()[-1]))


def start_s(command: list[str]) -> float:
    """Seconds from the start of a command until its first step is done, which it prints as a clock reading."""
    begin = time.time()
    ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    marks = [line.split()[-1] for line in ran.stdout.splitlines() if "first step done at" in line]
    if ran.returncode or not marks:
        raise SystemExit(f"bench: {' '.join(command)} failed\n{ran.stdout}\n{ran.stderr}")
    return float(marks[0]) - begin


def measure_start(rounds: int) -> dict[str, float]:
    """Start to first step, alternating `torchrun` on plain torch and `shardwise run`."""
    bench, bin_ = ROOT / "bench", Path(sys.executable).parent
    port = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    plain = [str(bin_ / "torchrun"), "--nproc-per-node=2", *port, str(bench / "start_torch.py")]
    ours = [str(bin_ / "shardwise"), "run", str(bench / "start_shardwise.py"), "dp2", "--nproc", "2"]
    start_s(plain), start_s(ours)  # fill the file cache
    pairs = [(start_s(plain), start_s(ours)) for _ in range(rounds)]
    return {
        "torch_s": round(statistics.median(a for a, _ in pairs), 3),
        "shardwise_s": round(statistics.median(b for _, b in pairs), 3),
        "ratio": round(statistics.median(b / a for a, b in pairs), 3),
        "rounds": rounds,
    }


def machine() -> dict[str, Any]:
    """What the numbers were taken on."""
    from importlib.metadata import version

    model = next(
        (line.split(":")[1].strip() for line in cpu_lines() if line.startswith("model name")), platform.machine()
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": version("torch"),
        "date": time.strftime("%Y-%m-%d"),
    }


def cpu_lines() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def verdict(met: bool) -> str:
    return "yes" if met else "**no**"


def markdown(report: dict[str, Any]) -> str:
    """The section of docs/benchmarks.md."""
    where = report["machine"]
    lines = [
        f"Measured {where['date']}: 2 processes, gloo, 1 thread each; {where['cores']} cores ({where['cpu']}), "
        f"load average {where['load_before']} before the run, Python {where['python']}, torch {where['torch']}.",
        "",
        "| model | against | torch ms/step | Shardwise ms/step | ratio | difference | processor time "
        "| a second plain copy | target | met |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in report["steps"]:
        tiny = row["model"] == "tiny"
        met = row["difference_us"] <= TARGET_US if tiny else row["ratio"] <= TARGET_RATIO
        target = f"<= {TARGET_US:.0f} us" if tiny else f"<= {TARGET_RATIO}"
        lines.append(
            f"| {row['model']} | {row['against']} | {row['torch_ms']:.3f} | {row['shardwise_ms']:.3f} "
            f"| {row['ratio']:.3f} | {row['difference_us']:+.0f} us "
            f"| {row['cpu_difference_us']:+.0f} us | {row['again_us']:+.0f} us | {target} | {verdict(met)} |"
        )
    if start := report["start"]:
        lines += [
            "",
            f"Start to first step, {start['rounds']} alternations: torchrun with plain torch {start['torch_s']:.2f} s, "
            f"`shardwise run` {start['shardwise_s']:.2f} s, ratio {start['ratio']:.2f} "
            f"(target <= {TARGET_START}; met: {verdict(start['ratio'] <= TARGET_START)}).",
        ]
    return "\n".join(lines)


def paste(page: str, section: str) -> str:
    """The page with the section between the markers replaced."""
    before, _, rest = page.partition(BEGIN)
    _, marker, after = rest.partition(END)
    if not marker:
        raise SystemExit(f"{PAGE}: the markers {BEGIN} and {END} are gone; put them back where the table belongs")
    return f"{before}{BEGIN}\n\n{section}\n\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds, and the page stays as it is")
    parser.add_argument("--no-start", action="store_true", help="leave out the start of whole processes")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        rows = work(options.quick)
        print(json.dumps(rows), flush=True)
        return
    report = {"machine": machine(), "steps": measure_steps(options.quick)}
    report["start"] = None if options.no_start else measure_start(1 if options.quick else 5)
    print(markdown(report))
    if not options.quick and not options.no_start:
        RESULTS.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(paste(PAGE.read_text(encoding="utf-8"), markdown(report)), encoding="utf-8")


if __name__ == "__main__":
    main()
