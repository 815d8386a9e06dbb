"""`shardwise ckpt convert` and `export`: checkpoints of other libraries, in and out; call one function, print."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import typer

from shardwise.cli.output import print_json
from shardwise.errors import ExitCode, ShardwiseError
from shardwise.launch.stopping import handling

if TYPE_CHECKING:
    from shardwise.checkpoint.foreign.convert import Options
    from shardwise.checkpoint.foreign.export import ExportOptions


class From(StrEnum):
    """What a foreign checkpoint is."""

    AUTO = "auto"
    SAFETENSORS = "safetensors"
    TORCH = "torch"
    DCP = "dcp"
    DEEPSPEED = "deepspeed"
    FSDP = "fsdp"
    LIGHTNING = "lightning"


class To(StrEnum):
    """What is written."""

    SAFETENSORS = "safetensors"
    TORCH = "torch"
    LIGHTNING = "lightning"
    DCP = "dcp"


class Dtype(StrEnum):
    """Of floating-point weights."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


class Terminated(ShardwiseError):
    """SIGTERM or SIGHUP came, and what was half written is removed."""

    exit_code = ExitCode.TERMINATED


_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def _clearing_up(target: Path) -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP end the block, so that what is half written is removed; once, then they wait for that.

    A signal that is ignored (`nohup`) stays so.
    """
    stops = [stop for stop in _STOPS if signal.getsignal(stop) is not signal.SIG_IGN]
    heard: list[signal.Signals] = []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        for stop in stops:
            signal.signal(stop, signal.SIG_IGN)
        heard.append(signal.Signals(number))
        raise KeyboardInterrupt

    try:
        with handling(stops, on_signal):
            yield
    except BaseException:  # whatever a library made of it on its way
        if not heard:
            raise
        said = f"{heard[0].name}: stopped; {target} is as it was, or complete"
        if heard[0] == signal.SIGINT:
            raise KeyboardInterrupt(said) from None
        raise Terminated(said) from None


def run_convert(source: Path, target: Path, options: Options, json: bool) -> None:
    """Convert, and say what was taken over and what was not."""
    from shardwise.checkpoint.foreign.convert import convert

    if options.unsafe:
        typer.echo(
            f"shardwise: --unsafe-pickle: {source} is loaded as a program: it may do whatever you may do. It runs in a "
            "process of its own with limits on memory and time, which stop accidents and no attacker.",
            err=True,
        )
    with _clearing_up(target):
        done = convert(source, target, options)
    if json:
        print_json(asdict(done) | {"path": str(done.path)})
        return
    state = f"optimizer state of {done.num_parameters_with_state}" if done.num_parameters_with_state else "no optimizer"
    typer.echo(
        f"{done.path}: from {done.kind}: step {done.step}, {done.num_weights} weights, {state}, "
        f"{done.size_bytes / 1e6:.1f} MB, every bit read back"
    )
    for note in done.notes:
        typer.echo(f"  not taken over: {note}" if not note.startswith(("tied", "names")) else f"  {note}")


def run_export(source: Path, target: Path, options: ExportOptions, json: bool) -> None:
    """Export, and say what was written."""
    from shardwise.checkpoint.foreign.export import export, settled

    options = settled(target, options)
    if options.to == "dcp":
        from shardwise.checkpoint.foreign.dcp_out import export_dcp as export  # it needs torch
    with _clearing_up(target):
        done = export(source, target, options)
    if json:
        print_json(asdict(done) | {"path": str(done.path)})
        return
    files = f"{len(done.files)} files" if len(done.files) > 1 else done.files[0]
    typer.echo(
        f"{done.path}: step {done.step}, {done.num_tensors} tensors as {options.to}, {done.size_bytes / 1e6:.1f} MB in "
        f"{files}"
    )
    for note in done.notes:
        typer.echo(f"  left out: {note}")
