"""`shardwise check`: is this plan legal for this model and this number of ranks? Needs no torch and no device."""

from __future__ import annotations

import json as json_module
from typing import Annotated, Any

import typer
from rich.console import Console

from shardwise.cli.options.counts import LENGTH_HELP, length_of
from shardwise.errors import ExitCode, PlanError
from shardwise.extras import optional_module
from shardwise.findings import Finding, errors_in
from shardwise.model.spec import ModelSpec, load_spec
from shardwise.plan.constraints import check as check_plan
from shardwise.plan.plan import Plan
from shardwise.plan.report import findings_table, mesh_picture, plan_table


def check(
    plan: Annotated[str, typer.Argument(help="A shorthand ('pp2 fsdp4 tp2 / mb8 / bf16'), or a .toml or .json file.")],
    model: Annotated[
        str | None, typer.Option(help="A preset (llama-8b), a .toml or .json file of sizes, or hf:NAME.")
    ] = None,
    world: Annotated[int | None, typer.Option(min=1, help="Number of ranks that will run.")] = None,
    global_batch: Annotated[int | None, typer.Option(min=1, help="Samples per step, if the plan names none.")] = None,
    seq: Annotated[int | None, typer.Option(parser=length_of, help=LENGTH_HELP)] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check a plan against every constraint: exit 0 when it is legal, 1 when it is refused, 2 on a usage error."""
    declared = _declared(model) if model and model.startswith("hf:") else None
    spec = load_spec(model) if model and declared is None else None
    try:
        parsed = Plan.load(plan)
    except PlanError as error:
        syntax = Finding(id="plan.syntax", severity="error", what=str(error), fix="docs/plans.md lists the tokens")
        _show(None, spec, world, [syntax], json=json)
        raise typer.Exit(ExitCode.REFUSED) from None
    findings = check_plan(parsed, spec=spec, world=world, global_batch=global_batch, seq_len=seq)
    if declared is not None:
        findings = [*findings, *_declared_findings(declared, parsed)]
    _show(parsed, spec, world, findings, json=json)
    if errors_in(findings):
        raise typer.Exit(ExitCode.REFUSED)


def _declared(model: str) -> Any:
    """The configuration of a model of transformers."""
    optional_module("transformers", extra="hf", need=f"model {model}")
    from shardwise.models.hf import hf_config

    return hf_config(model)


def _declared_findings(config: Any, plan: Plan) -> list[Finding]:
    from shardwise.cli.options.hf import hf_findings

    return hf_findings(config, plan)


def _show(plan: Plan | None, spec: ModelSpec | None, world: int | None, findings: list[Finding], *, json: bool) -> None:
    legal = not errors_in(findings)
    if json:
        answer = {
            "plan": str(plan) if plan else None,
            "hash": plan.hash if plan else None,
            "model": spec.name if spec else None,
            "world": world or (plan.world if plan else None),
            "legal": legal,
            "findings": [finding.to_dict() for finding in findings],
        }
        typer.echo(json_module.dumps(answer, indent=2))
        return
    console = Console(highlight=False)
    if plan:
        console.print(plan_table(plan, spec))
        console.print(mesh_picture(plan), markup=False)
    if findings:
        console.print(findings_table(findings))
    console.print("legal" if legal else "refused", style="green" if legal else "red")
