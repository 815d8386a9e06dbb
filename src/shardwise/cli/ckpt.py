"""`shardwise ckpt`: what a checkpoint holds, whether it is whole, and how two differ."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from shardwise.cli.output import console, print_json
from shardwise.errors import ExitCode, UsageError

_SHOWN = 20


class Action(StrEnum):
    """What is done."""

    INSPECT = "inspect"
    VERIFY = "verify"
    DIFF = "diff"


def ckpt(
    action: Annotated[Action, typer.Argument(help="inspect, verify, or diff of two.")],
    paths: Annotated[list[Path], typer.Argument(help="A checkpoint; a store or a run's directory means its newest.")],
    all_tensors: Annotated[bool, typer.Option("--all", help="inspect, diff: every tensor, not the first few.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Look at checkpoints: by streaming, on one process, in bounded memory, without running anything of theirs.

    diff exits 0 when all tensors are equal bit by bit, 1 when not; damage exits 4.
    """
    needed = 2 if action is Action.DIFF else 1
    if len(paths) != needed:
        raise UsageError(
            f"ckpt {action}: found {len(paths)} paths, needed {needed}; give {'A B' if needed > 1 else 'one'}"
        )
    if action is Action.INSPECT:
        _inspect(paths[0], all_tensors, json)
    elif action is Action.VERIFY:
        _verify(paths[0], json)
    else:
        raise typer.Exit(_diff(paths[0], paths[1], all_tensors, json))


def _inspect(path: Path, all_tensors: bool, json: bool) -> None:
    from shardwise.checkpoint.compare import inspect

    found = inspect(path)
    if json:
        print_json(found)
        return
    out = console()
    out.print(
        f"{found['path']}: step {found['step']}, {found['created']}, plan {found['plan']}, {found['world']} ranks on "
        f"{found['device']}, {len(found['tensors'])} tensors, {found['bytes'] / 1e6:.1f} MB in "
        f"{len(found['files'])} files",
        soft_wrap=True,
    )
    if found["probe"] is not None:
        out.print(f"probe: loss {found['probe']['loss']:.6g}, gradient norm {found['probe']['grad_norm']:.6g}")
    table = Table("tensor", "type", "shape", "checksum")
    rows: list[tuple[str, dict[str, Any]]] = sorted(found["tensors"].items(), key=lambda row: -row[1]["bytes"])
    for name, entry in rows if all_tensors else rows[:_SHOWN]:
        table.add_row(name, entry["dtype"], " x ".join(map(str, entry["shape"])) or "()", entry["checksum"])
    out.print(table)
    if len(rows) > _SHOWN and not all_tensors:
        out.print(f"and {len(rows) - _SHOWN} smaller ones; --all shows them")


def _verify(path: Path, json: bool) -> None:
    from shardwise.checkpoint.compare import verify

    found = verify(path)
    if json:
        print_json(asdict(found) | {"path": str(found.path), "whole": True})
        return
    typer.echo(
        f"{found.path}: whole: step {found.step}, {found.num_tensors} tensors, {found.size_bytes / 1e6:.1f} MB in "
        f"{found.num_files} files, {found.seconds:.2f} s"
    )


def _diff(first: Path, second: Path, all_tensors: bool, json: bool) -> ExitCode:
    from shardwise.checkpoint.compare import diff

    found = diff(first, second)
    if json:
        print_json({"equal": not found, "differences": [item._asdict() for item in found]})
    elif not found:
        typer.echo("all tensors are equal, bit by bit")
    else:
        for item in found if all_tensors else found[:_SHOWN]:
            typer.echo(f"{item.name}: {item.kind}" + (f": {item.detail}" if item.detail else ""))
        if len(found) > _SHOWN and not all_tensors:
            typer.echo(f"and {len(found) - _SHOWN} more; --all lists them")
    return ExitCode.REFUSED if found else ExitCode.OK
