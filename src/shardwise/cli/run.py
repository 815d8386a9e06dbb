"""`shardwise run`: any user script as the ranks of a world on this machine."""

from __future__ import annotations

import shlex
import sys
from typing import Annotated

import typer

from shardwise.cli.devices import launched, local_devices
from shardwise.cli.output import plan_json, print_json
from shardwise.errors import ExitCode, PlanError
from shardwise.launch.job import Job
from shardwise.plan.constraints import check, refuse
from shardwise.plan.plan import Plan


def run(
    ctx: typer.Context,
    script: Annotated[str, typer.Argument(help="A Python script.")],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[PLAN] [ARGS]...", help="The plan, then words for the script.")
    ] = None,
    nproc: Annotated[int | None, typer.Option(min=1, help="Processes; default: the plan's, or one per device.")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the rendezvous; 0: a free one.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be started.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
) -> None:
    """Run a script in several processes: `shardwise run train.py "dp2 tp2" --nproc 4 -- --fast`.

    The first word after the script is the plan (shorthand or file); it is checked before anything starts, and the
    script gets it as its first argument. What stands after `--` goes to the script unread.
    """
    given, after = list(words or ()), tuple(ctx.obj or ())
    plan = _plan(given[0]) if given else None
    launch = launched(nproc_given=nproc is not None, command=shlex.join(["shardwise", "run", script, *given]))
    world = nproc or (launch.world if launch else None) or (plan.world if plan else max(1, local_devices()[1]))
    if plan is not None:
        refuse(check(plan, world=launch.world if launch else world))
    job = Job(target=script, args=(*given, *after), nproc=world, port=port)
    if dry_run:
        _show(job, plan, json=json)
        return
    if launch is not None:
        from shardwise.launch.entry import main as become

        sys.exit(become(["--script", script, *job.args]))
    code = start(job)
    if json:
        print_json({"script": script, "world": world, "plan": plan_json(plan) if plan else None, "exit_code": code})
    raise typer.Exit(code)


def start(job: Job) -> ExitCode:
    """Run a job here; the first failure goes to stderr."""
    from shardwise.launch.local import run_local

    outcome = run_local(job)
    if outcome.failure is not None:
        typer.echo(f"shardwise: {outcome.failure}" if not outcome.failure.traceback else str(outcome.failure), err=True)
    return outcome.exit_code


def _plan(word: str) -> Plan:
    try:
        return Plan.load(word)
    except PlanError as error:
        raise PlanError(f"{error}\nwords for the script that are no plan stand after `--`") from None


def _show(job: Job, plan: Plan | None, *, json: bool) -> None:
    command = shlex.join(job.command())
    if json:
        print_json({"world": job.nproc, "plan": plan_json(plan) if plan else None, "command": command})
        return
    typer.echo(f"{job.nproc} processes of: {command}")
    if plan is not None:
        typer.echo(f"plan: {plan}")
