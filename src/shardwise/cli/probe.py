"""`shardwise probe`: what this machine does, measured, as a cluster file that `plan` and `estimate` read."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from shardwise.cli.options.devices import launched
from shardwise.cli.options.planning import check_path
from shardwise.cli.output import console, print_json
from shardwise.errors import UsageError
from shardwise.hardware.cluster import GIB, Cluster, Device, Loading, load_cluster
from shardwise.plan.spelled import seconds
from shardwise.records import as_dict

if TYPE_CHECKING:
    from shardwise.hardware.bench import Measured, Runner

SECONDS = 30.0
MOST = 256
"""Ranks on one machine."""


def probe(
    world: Annotated[int | None, typer.Option(min=1, max=MOST, help="Ranks; default: one per device or core.")] = None,
    out: Annotated[Path, typer.Option(help="Where the cluster is written.")] = Path("cluster.toml"),
    seconds: Annotated[float, typer.Option(min=2, max=600, help="About how long to measure.")] = SECONDS,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure products, memory, attention and links of this machine: exit 0, 2 on a usage error, 130 on Ctrl-C.

    Under torchrun, srun or mpirun the ranks of the job are measured, and the links between nodes with them.
    """
    check_path(out, (".toml", ".json"))
    launch = launched(nproc_given=world is not None, command="shardwise probe")
    if launch is not None and world not in (None, launch.world):
        raise UsageError(
            f"probe: --world {world}: found {launch.launcher} with {launch.world} ranks, needed the same number; leave "
            "--world out: the ranks of the job are measured"
        )
    found = _measured(world, seconds) if launch is None else _together(seconds, quiet=launch.rank > 0)
    if launch is not None and launch.rank > 0:
        return
    found.cluster.save(out)
    if json:
        print_json(probe_json(found, out))
    else:
        show(console(), found, out)


def probed() -> Cluster:
    """The cluster that `plan MODEL probe` plans for: this machine, measured now.

    Raises:
        UsageError: as `measure`.
    """
    return _measured(None, SECONDS).cluster


def _measured(world: int | None, duration: float) -> Measured:
    """Measure on ranks that are forked here: the parent touches no device, or they could not."""
    from shardwise.hardware.bench import measure
    from shardwise.hardware.stages import place
    from shardwise.launch.forked import World

    pool = World(MOST)
    try:
        count = world or len(_call(pool, 1, place)[0][0].names)
        run: Runner = partial(_call, pool, count)
        with _progress() as bar:
            return with_loading(measure(run, seconds=duration, on_stage=_advance(bar)), run)
    finally:
        pool.close()


def _together(duration: float, *, quiet: bool) -> Measured:
    """Measure as one rank of a job that a launcher started: every rank calls this, and all get the same answer."""
    import torch.distributed as dist

    from shardwise.hardware.bench import measure
    from shardwise.hardware.stages import join

    join()
    try:
        with _progress(quiet=quiet) as bar:
            return with_loading(measure(_gathered, seconds=duration, on_stage=_advance(bar)), _gathered)
    finally:
        dist.destroy_process_group()


READ_S = 0.5
"""Seconds in which rows of tokens are read."""


def with_loading(found: Measured, run: Runner) -> Measured:
    """The same with the rate at which the processes of a node, one per rank, read rows of tokens at once."""
    cluster = found.cluster
    rows = median(run(token_rows, READ_S)) * cluster.per_node
    left = f"loading.decoded: assumed, {Loading.decoded:g}"
    loading = Loading(rows=rows, origin="measured")
    return replace(found, cluster=cluster.with_(loading=loading, origins=(*cluster.origins, left)))


def token_rows(duration: float) -> float:
    """Bytes of token ids per second that a process reads: rows of 2,048 as `TokenDataset` gives them, 8 at a time."""
    import numpy as np

    from shardwise.train.data.token_data import TokenDataset

    data = TokenDataset(np.zeros(2**22, dtype=np.uint16), 2048)
    order = np.random.default_rng(0).permutation(data.num_targets // data.seq_len).reshape(-1, 1)
    done, start = 0, time.perf_counter()
    while time.perf_counter() - start < duration:
        for at in range(0, len(order) - 8, 8):
            done += data.get_batch(order[at : at + 8, 0].tolist())["input_ids"].nbytes
    return done / (time.perf_counter() - start)


def _gathered(function: Callable[..., Any], *args: Any) -> list[Any]:
    import torch.distributed as dist

    dist.barrier()
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, function(*args))
    return results


def _call(pool: Any, count: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    results: list[Any] = pool(count, _ranked, function, args, timeout_s=900.0)
    return results


def _ranked(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """In a rank: Ctrl-C ends it at once, so that the parent need not wait for it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return function(*args)


def _progress(*, quiet: bool = False) -> Progress:
    columns = (TextColumn("{task.description:18}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet)


def _advance(bar: Progress) -> Callable[[str, float], None]:
    task = bar.add_task("starting", total=1.0)
    return lambda name, done: bar.update(task, description=name, completed=done)


# ---------------------------------------------------------------- what is shown


def rows_of(found: Measured) -> list[tuple[str, str, str, str]]:
    """(what, measured, the nearest preset's, ratio)."""
    cluster = found.cluster
    other = load_cluster(f"{found.nearest}:{cluster.per_node}x{cluster.nodes}")
    mine, its = cluster.device, other.device
    timed = {row.dtype for row in found.readings.products}
    rows: list[tuple[str, float, float, Callable[[float], str]]] = [
        (f"{name} products, best reached", _best(mine, name), _best(its, name), _flops)
        for name in vars(mine.rates)
        if name in timed and getattr(its.rates, name)
    ]
    rows += [
        ("half of that at inner size", mine.curve.depth, its.curve.depth, lambda value: f"{value:.0f}"),
        ("memory", mine.memory, its.memory, lambda value: f"{value / GIB:.1f} GiB"),
        ("memory bandwidth", mine.bandwidth * mine.stream, its.bandwidth * its.stream, _bytes),
        ("attention", _attention(mine), _attention(its), _flops),
        ("host to device", cluster.host_bandwidth, other.host_bandwidth, _bytes),
        ("token rows of a node", cluster.loading.rows, other.loading.rows, _bytes),
    ]
    for tier in ("local", "network"):
        link, known = getattr(cluster, tier), getattr(other, tier)
        if link.origin == "measured":
            rows.append((f"{tier} links", link.bandwidth, known.bandwidth, _bytes))
            rows.append((f"{tier} latency", link.latency, known.latency, seconds))
    return [(name, spell(here), spell(there), f"{here / there:.2f}") for name, here, there, spell in rows]


def _attention(device: Device) -> float:
    return device.attention.flash2 * device.rates.of("bf16")


def _best(device: Device, dtype: str) -> float:
    share = device.low_best if dtype in ("fp8", "fp4") else device.curve.best
    return float(device.rates.of(dtype) * share)


def _flops(value: float) -> str:
    return f"{value / 1e12:.3g} Tflop/s" if value >= 1e11 else f"{value / 1e9:.3g} Gflop/s"


def _bytes(value: float) -> str:
    return f"{value / 1e9:.3g} GB/s"


def show(out: Console, found: Measured, path: Path) -> None:
    """What was measured beside the nearest preset, how well the formulas hold, what was not measured."""
    table = Table(title=f"{found.cluster.name} ({found.seconds:.0f} s)", title_justify="left")
    for column in ("", "measured", f"preset {found.nearest}", "ratio"):
        table.add_column(column, justify="right" if column else "left")
    for row in rows_of(found):
        table.add_row(*row)
    out.print(table)
    off = ", ".join(f"{name} {error:.0%}" for name, error in found.errors.items())
    out.print(f"the planner's formulas with these constants are off by (median): {off}")
    own, product, biased = map(seconds, (found.launch, found.readings.product_launch, found.readings.biased_launch))
    out.print(
        f"host per kernel: {own}, per product: {product}, with a bias: {biased} (`launch` and the like of the file)"
    )
    for line in found.cluster.origins:
        out.print(f"not measured: {line}", style="dim", markup=False)
    out.print(f"written: {path}", markup=False)


def probe_json(found: Measured, path: Path | None) -> dict[str, Any]:
    """The same for programs."""
    return {
        "cluster": as_dict(found.cluster),
        "nearest": found.nearest,
        "launch": found.launch,
        "product_launch": found.readings.product_launch,
        "biased_launch": found.readings.biased_launch,
        "errors": dict(found.errors),
        "seconds": found.seconds,
        "timings": len(found.readings.products) + sum(map(len, found.readings.links.values())),
        "written": str(path) if path else None,
    }
