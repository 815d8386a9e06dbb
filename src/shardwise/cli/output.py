"""What verbs print: tables for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import typer
from rich.console import Console
from rich.status import Status

from shardwise.model.profile import Profile
from shardwise.plan.band import likeness
from shardwise.plan.plan import Plan
from shardwise.records import in_words


def print_json(answer: Mapping[str, Any]) -> None:
    """One JSON object on stdout, strict: infinities and NaN, which JSON has no words for, are "inf", "-inf", "nan"."""
    typer.echo(json.dumps(in_words(answer), indent=2, default=str, allow_nan=False))


def console() -> Console:
    """Where tables go; without a terminal they are 120 columns wide."""
    out = Console(highlight=False)
    return out if out.is_terminal else Console(highlight=False, width=120)


def waiting(doing: str) -> Status:
    """Within it a terminal's error output says what takes so long; elsewhere nothing is shown."""
    return Console(stderr=True).status(doing)


def show_likeness(out: Console, plan: Plan, profile: Profile) -> None:
    """How far the estimates of layouts such as this one have been from published runs."""
    out.print(likeness(plan, profile), style="dim", markup=False)


def plan_json(plan: Plan) -> dict[str, Any]:
    """The plan for programs."""
    return {"shorthand": str(plan), "hash": plan.hash, "world": plan.world}
