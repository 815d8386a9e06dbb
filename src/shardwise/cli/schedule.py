"""`shardwise schedule`: which rank does what when in a pipeline, and what share of the time nothing runs."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from shardwise.errors import ExitCode, PlanError
from shardwise.plan.constraints import check, refuse
from shardwise.plan.plan import Plan
from shardwise.plan.schedule import table_of
from shardwise.plan.time_terms.simulate import simulate


def schedule(
    plan: Annotated[str, typer.Argument(help="A shorthand ('pp4 interleaved mb8'), or a .toml or .json file.")],
    png: Annotated[Path | None, typer.Option(help="Also draw it into this file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show a plan's pipeline schedule and its bubble: exit 0, 1 when the plan is refused, 2 on a usage error.

    Times are counted in forwards of one stage; a backward takes two, or one for each of its halves.
    """
    from shardwise.parallel.stages.schedules import picture, save_png

    if png is not None and png.suffix.lower() != ".png":
        typer.echo(f"schedule: --png: found {png}, needed a path that ends in .png", err=True)
        raise typer.Exit(ExitCode.USAGE)
    try:
        parsed = Plan.load(plan)
        refuse(check(parsed))
        timeline = simulate(table_of(parsed))
    except PlanError as error:
        typer.echo(
            json_module.dumps({"plan": plan, "error": str(error)}, indent=2) if json else str(error), err=not json
        )
        raise typer.Exit(ExitCode.REFUSED) from None
    if png:
        try:
            save_png(timeline, png, title=str(parsed))
        except OSError as error:
            typer.echo(f"schedule: cannot write {png}: {error}; give another path", err=True)
            raise typer.Exit(ExitCode.USAGE) from None
    if json:
        answer = {
            "plan": str(parsed),
            "total": timeline.total,
            "bubble": timeline.bubble,
            "png": str(png) if png else None,
            "ranks": [
                [
                    {"work": work, "stage": stage, "micro_batch": micro_batch, "start": start, "end": end}
                    for (work, stage, micro_batch, _), start, end in spans
                ]
                for spans in timeline.ranks
            ],
        }
        typer.echo(json_module.dumps(answer, indent=2))
        return
    console = Console(highlight=False)
    width = next((w for w in (4, 3) if timeline.total * w + 9 <= console.width), 3)
    for line in picture(timeline, width=width):
        console.print(line, soft_wrap=True)
    console.print(f"bubble {100 * timeline.bubble:.1f} %", style="bold")
    if png:
        console.print(f"drawn: {png}", markup=False)
