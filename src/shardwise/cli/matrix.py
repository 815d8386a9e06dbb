"""`shardwise verify --all`: every legal plan of a world, with a bar while it goes on and a matrix at the end."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from shardwise.cli.options.subjects import subject_for
from shardwise.cli.output import console, print_json
from shardwise.errors import UsageError
from shardwise.plan.plan import Axes, Plan

if TYPE_CHECKING:
    from shardwise.diagnose.matrix import Cell
    from shardwise.diagnose.verify import Options, Report
    from shardwise.diagnose.verifying.subject import Subject

_MARKS = {"proven": ("ok", "green"), "different": ("XX", "bold red"), "refused": ("--", "dim")}


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """The dials of `--all`."""

    world: int
    small: bool
    limit: int
    png: Path
    json: bool


def verify_all(text: str, base: Plan, words: tuple[str, ...], options: Options, dials: Matrix) -> int:
    """Run the plans; 1 when one is different, 2 when all are refused, else 0.

    Args:
        text: the subject's name.
        base: what all plans have in common: the global batch, names of blocks.
        words: for a script.
        options: of each verification.
        dials: how many ranks and plans, and what is shown.
    """
    from shardwise.diagnose.matrix import draw_matrix, legal_plans

    _check_picture(dials.png)
    degrees = Axes(pp=dials.world, tp=dials.world, ep=dials.world)
    subject = subject_for(text, base.with_(axes=degrees), words, small=dials.small, device=options.device)
    cells = legal_plans(dials.world, base, subject.spec)
    chosen = cells[: dials.limit]
    if not dials.json:
        more = f" (--limit {len(cells)} runs all)" if len(chosen) < len(cells) else ""
        console().print(f"{len(chosen)} of {len(cells)} legal plans of {dials.world} ranks{more}", markup=False)
    reports = _run(subject, chosen, options, dials)
    title = f"{subject.title} on {dials.world} ranks, {options.dtype}, {options.steps} steps"
    draw_matrix(chosen, reports, dials.png, title)
    if dials.json:
        rows = [report.to_dict() for report in reports]
        print_json({"world": dials.world, "legal": len(cells), "png": str(dials.png), "plans": rows})
    else:
        _show(chosen, reports, dials.png)
    verdicts = {report.verdict for report in reports}
    return 1 if "different" in verdicts else 2 if verdicts <= {"refused"} else 0


def _check_picture(path: Path) -> None:
    """Before minutes of work, not after them."""
    if path.suffix != ".png" or not path.parent.is_dir():
        raise UsageError(
            f"verify --all: cannot draw {path}; give --png a path that ends in .png, in a folder that is there"
        )


def _run(subject: Subject, cells: Sequence[Cell], options: Options, dials: Matrix) -> list[Report]:
    from shardwise.diagnose.verify import Verifier
    from shardwise.launch.forked import World

    reports: list[Report] = []
    with tempfile.TemporaryDirectory(prefix="shardwise-verify-") as folder, _bar(len(cells), dials.json) as advance:
        processes = World(dials.world)
        try:
            verifier = Verifier(subject, processes, Path(folder), options)
            for cell in cells:
                advance(str(cell.plan))
                reports.append(verifier.verify(cell.plan))
        finally:
            processes.close()
    return reports


@contextmanager
def _bar(total: int, quiet: bool) -> Iterator[Callable[[str], None]]:
    """A bar on a terminal; called with the plan that begins."""
    err = Console(stderr=True)
    if quiet or not err.is_terminal:
        yield lambda _: None
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task("", total=total, completed=-1)
        yield lambda text: progress.update(task, description=text, advance=1)


def _show(cells: Sequence[Cell], reports: Sequence[Report], png: Path) -> None:
    from shardwise.diagnose.matrix import grid_of

    layouts, variants = grid_of(cells)
    verdicts = {(c.layout, c.variant): r.verdict for c, r in zip(cells, reports, strict=True)}
    out, table = console(), Table(title_justify="left", pad_edge=False)
    table.add_column("layout", no_wrap=True)
    for number in range(len(variants)):
        table.add_column(str(number + 1), justify="center", min_width=2)
    for layout in layouts:
        marks = [_MARKS[verdicts[layout, v]] if (layout, v) in verdicts else ("", "") for v in variants]
        table.add_row(layout, *(Text(mark, style) for mark, style in marks))
    out.print(table)
    for number, variant in enumerate(variants, 1):
        out.print(f"{number:3} {variant}", markup=False)
    for text, plans in _reasons(reports).items():
        more = f" and {len(plans) - 1} more" if len(plans) > 1 else ""
        out.print(Text(f"`{plans[0]}`{more}: {text}"), soft_wrap=True)
    counts = {v: sum(r.verdict == v for r in reports) for v in _MARKS}
    out.print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()) + f"; drawn: {png}", markup=False)


def _reasons(reports: Sequence[Report]) -> dict[str, list[str]]:
    """What is wrong -> the plans that it is said of; the same words about several plans once."""
    found: dict[str, list[str]] = {}
    for report in reports:
        if report.verdict != "proven":
            finding = report.findings[0]
            text = re.sub(r" on rank \d+", "", finding.what).replace(f"`{report.plan}`", "the plan")
            text = re.sub(r"\(pp \d+ x \d+ per rank\) ", "", text)
            found.setdefault(f"{report.verdict}: {text} [{finding.id}]", []).append(report.plan)
    return found
