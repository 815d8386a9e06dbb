"""`make bench`: saving and loading about 300 MB with Adam on 2 ranks, beside `torch.save`, torch's DCP and `dd`.

The contestants take turns in every round, in the same two processes and on the same disk, so that what else the
machine does falls on all of them. A stall is how long a save in the background keeps the loop: the call that starts it,
and what the optimizer of the step after it waits.

Writes the table of docs/checkpoints.md between its markers.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from shardwise.checkpoint import taking
from shardwise.checkpoint.digests import BLOCK
from shardwise.checkpoint.loading import Proof
from shardwise.checkpoint.shardfile import Seen, ShardFile, ignore
from shardwise.checkpoint.store import Store
from shardwise.launch.forked import World
from shardwise.parallel.compose import apply
from shardwise.parallel.mesh import Mesh, open_mesh
from shardwise.plan.plan import Plan
from shardwise.train.loss import Loss
from shardwise.train.optimizers import adamw
from shardwise.train.state import TrainState
from shardwise.train.step import make_step

PAGE = Path(__file__).parents[1] / "docs" / "checkpoints.md"
BEGIN, END = "<!-- bench/checkpoint.py: begin -->", "<!-- bench/checkpoint.py: end -->"
WIDTH, LAYERS, ROWS = 1600, 10, 64
Times = dict[str, list[float]]


def model() -> nn.Module:
    """25.6 million parameters: 307 MB with AdamW's averages."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def trained(mesh: Mesh, plan: Plan) -> TrainState:
    placed = apply(model, plan, mesh, seed=1)
    state = TrainState(placed, adamw(placed, 1e-3))
    for parameter in placed.parameters():
        parameter.grad = torch.ones_like(parameter)
    state.optimizer.take_grads({name: p.grad for name, p in placed.named_parameters().items()})
    state.optimizer.step()
    state.optimizer.zero_grad()
    return state


def stepping(mesh: Mesh, state: TrainState) -> Callable[[], Any]:
    """A training step."""
    step = make_step(state, lambda output, batch: Loss((output - batch[1]).square().sum(), torch.tensor(float(ROWS))))
    draw = torch.Generator().manual_seed(mesh.rank)
    batch = tuple(torch.randn(ROWS, WIDTH, generator=draw) for _ in range(2))
    return lambda: step(batch)


def unchecked(store: Store, state: TrainState, path: Path) -> None:
    """Load without digests of what is read, and without the proof of what arrived."""

    def read(file: ShardFile, first: int, target: memoryview, seen: Seen = ignore) -> None:
        for begin in range(0, len(target), file._files.piece):
            file._fill(file._data + first * BLOCK + begin, target[begin : begin + file._files.piece])

    nothing = Proof(matched=0, stored=0)
    with (
        patch.object(ShardFile, "_fill_blocks", read),
        patch.object(taking, "found", lambda *_: None),
        patch.object(taking, "prove", lambda *_: nothing),
    ):
        store.load(state, path)


def forget(path: Path) -> None:
    """What is next read of a directory's files is read from the disk."""
    for file in path.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def raw(path: Path, buffer: memoryview) -> None:
    """Read a file, and do nothing with it."""
    descriptor, at = os.open(path, os.O_RDONLY), 0
    while got := os.preadv(descriptor, [buffer[at : at + 4 * 2**20]], at):
        at += got
    os.close(descriptor)


def timed(mesh: Mesh, work: Callable[[], Any]) -> float:
    """Seconds until all ranks are done."""
    mesh.barrier()
    start = time.perf_counter()
    work()
    mesh.barrier()
    return time.perf_counter() - start


def flushed(path: Path) -> None:
    for name in os.listdir(path):
        descriptor = os.open(path / name, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def dd(path: Path, megabytes: int) -> None:
    command = ["dd", "if=/dev/zero", f"of={path}", "bs=1M", f"count={megabytes}", "conv=fsync"]
    subprocess.run(command, check=True, capture_output=True)


def torch_save(path: Path, rank: int, tensors: dict[str, torch.Tensor]) -> None:
    local = {name: t.to_local() if hasattr(t, "to_local") else t for name, t in tensors.items()}
    with (path / f"{rank}.pt").open("wb") as file:
        torch.save(local, file)
        file.flush()
        os.fsync(file.fileno())


def measure(folder: str, rounds: int, stalls: int) -> Times:
    warnings.simplefilter("ignore")
    base, times = Path(folder), Times()
    plan = Plan.parse("fsdp2")

    def note(name: str, seconds: float) -> None:
        times.setdefault(name, []).append(seconds)

    with open_mesh(plan) as mesh:
        state = trained(mesh, plan)
        tensors = state.tensors()
        group = dist.new_group(backend="gloo")
        megabytes = sum(t.numel() * t.element_size() for t in tensors.values()) // 10**6
        store = Store(base / "ours", keep=100)
        for i in range(rounds):
            if mesh.is_first:
                note("dd", timed_alone(partial(dd, base / "dd", megabytes)))
                (base / "dd").unlink()
                (base / "torch").mkdir(exist_ok=True)
            state.step = i
            note("ours save", timed(mesh, partial(store.save, state)))
            note("torch save", timed(mesh, partial(torch_save, base / "torch", mesh.rank, tensors)))
            where = base / f"dcp{i}"
            note("dcp save", timed(mesh, lambda where=where: (dcp.save(tensors, checkpoint_id=where), flushed(where))))
            template, latest = state.template(tensors), base / "ours" / f"step-{i:08d}"
            own = next(latest.glob(f"rank-*{mesh.rank}.safetensors"))
            buffer = memoryview(bytearray(own.stat().st_size + 1))
            loads: dict[str, tuple[Path, Callable[[], Any]]] = {
                "ours": (latest, partial(store.load, state, latest)),
                "unchecked": (latest, partial(unchecked, store, state, latest)),
                "dcp": (where, partial(dcp.load, template, checkpoint_id=where)),
                "torch": (base / "torch", lambda: torch.load(base / "torch" / f"{mesh.rank}.pt", weights_only=True)),
                "raw": (latest, partial(raw, own, buffer)),
            }
            for name in Random(i).sample(list(loads), len(loads)):  # what comes before leaves its traces
                path, load = loads[name]
                mesh.barrier()
                if mesh.is_first:
                    forget(path)
                with own_core(mesh.rank):
                    note(f"{name} load", timed(mesh, load))
                    note(f"{name} reload", timed(mesh, load))  # from the page cache
            if mesh.is_first:
                for path in (where, latest):
                    shutil.rmtree(path)
        step = stepping(mesh, state)
        step()
        for i in range(stalls):
            state.step = 1000 + i
            note("step", timed(mesh, step))
            state.step = 1000 + i
            saving = store.save_async(state)
            note("step beside ours", timed_alone(step))
            done = saving.wait()
            store.wait()
            note("ours stall", saving.stalled_s + saving.held_up_s)
            where = base / f"async{i}"
            mesh.barrier()
            start = time.perf_counter()
            going_on = dcp.async_save(state.tensors(), checkpoint_id=where, process_group=group)
            note("dcp stall", time.perf_counter() - start)
            note("step beside dcp", timed_alone(step))
            going_on.result()
            mesh.barrier()
            if mesh.is_first:
                shutil.rmtree(where)
                shutil.rmtree(done.path)
            mesh.barrier()
        times["bytes"] = [float(megabytes)]
    return times


@contextmanager
def own_core(rank: int) -> Iterator[None]:
    """Within it a rank stays on a core of its own, as on machines that have more cores than ranks.

    Where they are as many, the scheduler has two ranks that wake up for the disk share one for a while.
    """
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(cores)[rank % len(cores)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def timed_alone(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def table(times: Times, load: float) -> str:
    def middle(name: str) -> float:
        return statistics.median(times[name])

    size, stalls = times["bytes"][0], {name: times[f"{name} stall"] for name in ("ours", "dcp")}
    rate, share = size / middle("dd"), middle("dd") / middle("ours save")
    ours, theirs = (f"{1e3 * middle(f'{name} stall'):.0f}, {1e3 * p99(stalls[name]):.0f}" for name in stalls)
    checks = middle("ours load") / middle("unchecked load") - 1, middle("ours reload") / middle("unchecked reload") - 1
    beside = {name: 1e3 * (middle(f"step beside {name}") - middle("step")) for name in stalls}
    rows = [
        "| | shardwise | torch DCP | torch.save, a file per rank |",
        "|---|---|---|---|",
        f"| save, flushed (s) | {middle('ours save'):.2f} | {middle('dcp save'):.2f} | {middle('torch save'):.2f} |",
        f"| load from the disk (s) | {middle('ours load'):.2f} | {middle('dcp load'):.2f} | "
        f"{middle('torch load'):.2f} |",
        f"| load from the page cache (s) | {middle('ours reload'):.2f} | {middle('dcp reload'):.2f} | "
        f"{middle('torch reload'):.2f} |",
        f"| stall of a save in the background, p50, p99 (ms) | {ours} | {theirs} | |",
        f"| the step beside it is slower by, p50 (ms) | {beside['ours']:.0f} | {beside['dcp']:.0f} | |",
    ]
    machine = (
        f"{date.today()}, {size:.0f} MB, 2 ranks of one thread on {os.cpu_count()} shared cores, load {load:.1f} "
        "before.\n"
        f"`dd` with `conv=fsync` writes {rate:.0f} MB/s here; a save reaches {share:.0%} and a load from the disk "
        f"{middle('dd') / middle('ours load'):.0%} of that.\n"
        f"Only reading the bytes takes {middle('raw load'):.2f} s, {middle('raw reload'):.2f} s from the page cache. "
        "Digests and proof make a load\n"
        f"from the disk {checks[0]:.0%} longer, one from the page cache {checks[1]:.0%}. "
        f"A step takes {1e3 * middle('step'):.0f} ms."
    )
    method = (
        f"Medians of {len(times['dd'])} rounds, {len(stalls['ours'])} stalls of both ranks, the first one, which gets "
        "the memory, included.\nWhile it loads, each rank is on a core of its own. The other loads check nothing. "
        "`torch.save` cannot be loaded by another number\nof ranks."
    )
    return "\n\n".join([machine, method, "\n".join(rows)])


def p99(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--stalls", type=int, default=50)
    parser.add_argument("--print", action="store_true", help="leave the page as it is")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    world = World(2)
    with tempfile.TemporaryDirectory() as folder:
        parts = world(2, measure, folder, options.rounds, options.stalls, timeout_s=1800)
    world.close()
    times: Times = {}
    for part in parts:
        for name, values in part.items():
            times.setdefault(name, []).extend(values)
    text = table(times, load)
    print(text)
    if not options.print:
        page = PAGE.read_text(encoding="utf-8")
        if BEGIN not in page or END not in page:
            raise SystemExit(f"{PAGE} lacks the markers {BEGIN} and {END}")
        before, after = page.split(BEGIN)[0], page.split(END)[1]
        PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
