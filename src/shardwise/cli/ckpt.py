"""`shardwise ckpt`: what a checkpoint holds, whether it is whole, how two differ; and those of other libraries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from shardwise.cli.ckpt_moves import Dtype, From, To, run_convert, run_export
from shardwise.cli.output import console, print_json
from shardwise.errors import ExitCode, UsageError

_SHOWN = 20


class Action(StrEnum):
    """What is done."""

    INSPECT = "inspect"
    VERIFY = "verify"
    DIFF = "diff"
    CONVERT = "convert"
    EXPORT = "export"


_TWO = {Action.DIFF: "A B", Action.CONVERT: "SOURCE TARGET", Action.EXPORT: "SOURCE TARGET"}
_LOCAL = (Action.CONVERT, Action.EXPORT)
_BOTH = ("--dtype", "--optimizer", "--overwrite")
_OPTIONS = {
    Action.INSPECT: ("--all",),
    Action.VERIFY: (),
    Action.DIFF: ("--all",),
    Action.CONVERT: (*_BOTH, "--from", "--rename", "--like", "--params-in-order", "--unsafe-pickle"),
    Action.EXPORT: (*_BOTH, "--to", "--max-shard-size"),
}


def ckpt(
    action: Annotated[Action, typer.Argument(help="inspect, verify, diff of two, convert or export.")],
    words: Annotated[
        list[str], typer.Argument(metavar="paths", help="A checkpoint; a store or a run's directory means its newest.")
    ],
    all_tensors: Annotated[bool, typer.Option("--all", help="inspect, diff: every tensor, not the first few.")] = False,
    kind: Annotated[From, typer.Option("--from", help="convert: what the source is.")] = From.AUTO,
    rename: Annotated[Path | None, typer.Option(help="convert: a TOML file of rules, pattern = name.")] = None,
    like: Annotated[Path | None, typer.Option(help="convert: a run of the model: its names, shapes and types.")] = None,
    in_order: Annotated[
        bool, typer.Option("--params-in-order", help="convert: the optimizer was made from model.parameters().")
    ] = False,
    unsafe: Annotated[
        bool, typer.Option("--unsafe-pickle", help="convert: load as a program, which may do whatever you may.")
    ] = False,
    to: Annotated[To | None, typer.Option(help="export: what to write; else by the suffix, or safetensors.")] = None,
    max_shard: Annotated[str | None, typer.Option("--max-shard-size", help="export: of a file, as 5GB.")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="convert, export: of floating-point weights.")] = None,
    optimizer: Annotated[
        bool | None, typer.Option(help="convert (yes), export (no): take the optimizer's state along.")
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="convert, export: replace the target.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Look at checkpoints, and move them: by streaming, on one process, without running anything of theirs.

    diff exits 0 when all tensors are equal bit by bit, 1 when not; what is damaged or refused exits 4, as does diff
    of a run or store in which a checkpoint is damaged.
    """
    paths = _paths(action, words)
    given = {
        "--all": all_tensors, "--from": kind != From.AUTO, "--rename": rename, "--like": like, "--dtype": dtype,
        "--params-in-order": in_order, "--unsafe-pickle": unsafe, "--to": to,
        "--max-shard-size": max_shard, "--optimizer": optimizer is not None, "--overwrite": overwrite,
    }  # fmt: skip
    idle = [name for name, value in given.items() if value and name not in _OPTIONS[action]]
    if idle:
        raise UsageError(f"ckpt {action}: found {idle[0]}, needed only {', '.join(_OPTIONS[action]) or '--json'}")
    if action in _LOCAL:
        paths = _local(action, paths)
    if action is Action.CONVERT:
        from shardwise.checkpoint.foreign.convert import Options

        run_convert(paths[0], paths[1], Options(
            kind=kind.value, rename=rename, like=like, dtype=dtype and dtype.value, optimizer=optimizer is not False,
            in_order=in_order, overwrite=overwrite, unsafe=unsafe,
        ), json)  # fmt: skip
    elif action is Action.EXPORT:
        from shardwise.checkpoint.foreign.export import MAX_SHARD, ExportOptions, parse_size

        run_export(paths[0], paths[1], ExportOptions(
            to=to.value if to else None, dtype=dtype and dtype.value, optimizer=bool(optimizer), overwrite=overwrite,
            max_shard=parse_size(max_shard) if max_shard is not None else MAX_SHARD,
        ), json)  # fmt: skip
    elif action is Action.INSPECT:
        _inspect(paths[0], all_tensors, json)
    elif action is Action.VERIFY:
        _verify(paths[0], json)
    else:
        raise typer.Exit(_diff(paths[0], paths[1], all_tensors, json))


def _paths(action: Action, words: list[str]) -> list[Path]:
    """As many as the action takes; an empty one, as of a shell's variable that is not set, is none."""
    needed = 2 if action in _TWO else 1
    if len(words) != needed or "" in words:
        empty = ", one of them empty" if "" in words else ""
        raise UsageError(
            f"ckpt {action}: found {len(words)} paths{empty}, needed {needed}; give {_TWO.get(action, 'one')}"
        )
    return [Path(word) for word in words]


def _local(action: Action, paths: list[Path]) -> list[Path]:
    """The paths, `file://` as what it names; other URLs are refused."""
    from shardwise.checkpoint.remote import RemotePath, located

    places = [located(path) for path in paths]
    for path in places:
        if isinstance(path, RemotePath):
            raise UsageError(
                f"ckpt {action}: found the URL {path}, needed a path: only inspect, verify and diff take URLs; "
                "copy the checkpoint's directory first"
            )
    return places


def _inspect(path: Path, all_tensors: bool, json: bool) -> None:
    from shardwise.checkpoint.compare import inspect

    found = inspect(path)
    _say_skipped(found["skipped"], f"{found['path']} is shown")
    if json:
        print_json(found)
        return
    out = console()
    out.print(
        f"{found['path']}: step {found['step']}, {found['created']}, plan {found['plan']}, {found['world']} ranks on "
        f"{found['device']}, {len(found['tensors'])} tensors, {found['bytes'] / 1e6:.1f} MB in "
        f"{len(found['files'])} files",
        soft_wrap=True,
        markup=False,
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


def _say_skipped(skipped: Iterable[Mapping[str, str]], instead: str) -> None:
    for item in skipped:
        typer.echo(f"shardwise: damaged, and skipped: {item['reason']}; {instead}", err=True)


def _diff(first: Path, second: Path, all_tensors: bool, json: bool) -> ExitCode:
    """A run whose newest checkpoint is damaged is not what was asked for, however equal an older one is."""
    from shardwise.checkpoint.compare import diff_found, find

    a, b = find(first), find(second)
    skipped = {str(item.path): {"path": str(item.path), "reason": item.reason} for item in (*a.damaged, *b.damaged)}
    found = diff_found(a, b)
    _say_skipped(skipped.values(), f"{a.path} and {b.path} are compared; name the checkpoints that are meant")
    if json:
        print_json({
            "equal": not found, "first": str(a.path), "second": str(b.path), "skipped": list(skipped.values()),
            "differences": [item._asdict() for item in found],
        })  # fmt: skip
    elif not found:
        which = f" of {a.path} and {b.path}" if skipped else ""
        typer.echo(f"all tensors{which} are equal, bit by bit")
    else:
        for item in found if all_tensors else found[:_SHOWN]:
            typer.echo(f"{item.name}: {item.kind}" + (f": {item.detail}" if item.detail else ""))
        if len(found) > _SHOWN and not all_tensors:
            typer.echo(f"and {len(found) - _SHOWN} more; --all lists them")
    if skipped:
        return ExitCode.CHECKPOINT
    return ExitCode.REFUSED if found else ExitCode.OK
