"""`shardwise verify`: is a script under a plan the same training as on one process? Proven in numbers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.cli.matrix import Matrix, verify_all
from shardwise.cli.options.subjects import subject_for
from shardwise.cli.output import console, print_json
from shardwise.errors import ModelError, PlanError, ShardwiseError, UsageError
from shardwise.findings import Finding
from shardwise.plan.plan import Plan

if TYPE_CHECKING:
    from shardwise.diagnose.verify import Options, Report

_COLOURS = {"proven": "green", "different": "red", "refused": "yellow"}
_KINDS = {"norm": "gradient norm", "grad": "gradients", "param": "parameters after the update"}
_KINDS |= {"state": "optimizer state", "statistics": "buffers (batch statistics)"}
_REFUSED = 2


def verify(
    ctx: typer.Context,
    subject: Annotated[str, typer.Argument(help="A script, a run.toml, a preset (llama-8b), or hf:NAME.")],
    plan: Annotated[str | None, typer.Option(help="Shorthand ('fsdp2 tp2 / seq') or file.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Accumulation windows and updates to compare.")] = 2,
    shrink: Annotated[bool, typer.Option("--shrink", help="Shrink the model (large ones are without asking).")] = False,
    dtype: Annotated[Literal["fp64", "fp32"], typer.Option(help="What everything runs in.")] = "fp64",
    device: Annotated[str, typer.Option(help="cpu: gloo processes; cuda: a process per GPU, or several.")] = "cpu",
    everything: Annotated[bool, typer.Option("--all", help="Every legal plan of --world ranks, as a matrix.")] = False,
    world: Annotated[int | None, typer.Option(min=1, max=64, help="Ranks, with --all.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Most plans to run, with --all.")] = 40,
    png: Annotated[Path, typer.Option(help="Where --all draws its matrix.")] = Path("verify.png"),
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that a run may take.")] = 300.0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run a script under a plan and on one process, and compare: exit 0 proven, 1 different, 2 refused.

    `shardwise verify train.py --plan "fsdp2 tp2" -- --fast`: what stands after `--` goes to the script, in which
    `{out}` is a fresh directory of each run.
    """
    words = tuple(ctx.obj or ())
    try:
        parsed = _plan(plan, world, everything=everything)
        from shardwise.diagnose.verify import Options

        options = Options(steps=steps, dtype=dtype, device=device, timeout_s=timeout)
        if everything:
            dials = Matrix(world=int(world or 1), small=shrink, limit=limit, png=png, json=json)
            code = verify_all(subject, parsed, words, options, dials)
        else:
            report = _verify_one(subject, parsed, words, options, small=shrink, quiet=json)
            _show(report, json=json)
            code = report.exit_code
    except ShardwiseError as error:
        code = _refuse(subject, plan, error, json=json)
    raise typer.Exit(code)


def _plan(text: str | None, world: int | None, *, everything: bool) -> Plan:
    """The plan; with `--all` what its plans have in common."""
    if everything:
        if world is None:
            raise UsageError("verify --all: of how many ranks? give --world 4")
        return Plan.load(text) if text else Plan()
    if text is None:
        raise UsageError("verify: under which plan? give --plan 'fsdp2 tp2', or --all --world 4")
    parsed = Plan.load(text)
    if world is not None and world != parsed.world:
        raise UsageError(f"verify: --world {world} and the plan `{parsed}` of {parsed.world} ranks; leave --world out")
    return parsed


def _verify_one(text: str, plan: Plan, words: tuple[str, ...], options: Options, *, small: bool, quiet: bool) -> Report:
    from shardwise.diagnose.verify import Verifier
    from shardwise.launch.forked import World

    subject = subject_for(text, plan, words, small=small, device=options.device)
    with tempfile.TemporaryDirectory(prefix="shardwise-verify-") as folder, _saying(quiet) as say:
        processes = World(plan.world)
        try:
            return Verifier(subject, processes, Path(folder), options, say=say).verify(plan)
        finally:
            processes.close()


@contextmanager
def _saying(quiet: bool) -> Iterator[Callable[[str], None]]:
    """One line that says what runs, on a terminal only."""
    err = Console(stderr=True)
    if quiet or not err.is_terminal:
        yield lambda _: None
        return
    with err.status("") as status:
        yield status.update


def _show(report: Report, *, json: bool) -> None:
    if json:
        print_json(report.to_dict())
        return
    out = console()
    if report.rows:
        out.print(_table(report))
        out.print(Text(f"tolerance: {report.how}", "dim"), soft_wrap=True)
    for note in report.notes:
        out.print(Text(f"note: {note}", "dim"), soft_wrap=True)
    places = (("first in forward order", report.first_forward), ("first in backward order", report.first_backward))
    for label, text in (*places, ("factor", report.factor)):
        if text:
            out.print(f"{label}: {text}", markup=False, soft_wrap=True)
    _show_findings(report, out)
    ends = {"proven": f"the same training as on one process, over {report.steps} steps", "different": "not the same"}
    verdict = Text(report.verdict, f"bold {_COLOURS[report.verdict]}")
    out.print(verdict.append(f": {ends.get(report.verdict, 'nothing was compared')}", "default"))


def _show_findings(report: Report, out: Console) -> None:
    label = "likely cause" if report.verdict == "different" else "refused"
    for number, finding in enumerate(report.findings):
        name = label if not number else "or"
        out.print(Text(f"{name}: ", "bold").append(f"{finding.what} [{finding.id}]", "default"), soft_wrap=True)
        for what, text in (("found", finding.evidence), ("do", finding.fix)):
            if text:
                out.print(Text(f"    {what}: {text.rstrip()}"), soft_wrap=True)


def _table(report: Report) -> Table:
    title = f"{report.subject} under `{report.plan}` against `{report.reference}`, {report.steps} steps"
    table = Table(title=title, title_justify="left")
    for column in ("compared", "of", "largest difference", "tolerance", "one process from itself", "where"):
        table.add_column(column, justify="right" if column not in ("compared", "where") else "left", overflow="fold")
    for row in report.rows:
        style = "red" if row.over else ""
        beyond = f" ({row.over} beyond)" if row.over else ""
        numbers = (f"{row.largest:.1e}", f"{row.tolerance:.1e}", f"{row.measured:.1e}", row.where)
        table.add_row(_KINDS.get(row.kind, row.kind) + beyond, str(row.count), *numbers, style=style)
    return table


def _refuse(subject: str, plan: str | None, error: ShardwiseError, *, json: bool) -> int:
    """Exit code 2, with a finding: a bad plan, a missing file, a model that cannot be shrunk."""
    row = error.row if isinstance(error, ModelError) else ""
    kind = "plan.syntax" if isinstance(error, PlanError) else row or f"verify.{type(error).__name__.lower()}"
    finding = Finding(id=kind, severity="error", what=str(error))
    if json:
        empty = {"verdict": "refused", "proven": False, "exit_code": _REFUSED, "subject": subject, "plan": plan}
        print_json({**empty, "findings": [finding.to_dict()]})
    else:
        typer.echo(f"shardwise: {error}", err=True)
    return _REFUSED
