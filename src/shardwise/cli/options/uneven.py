"""`--expert-imbalance` of `plan` and `estimate`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from shardwise.cli.options.planning import Question
from shardwise.errors import UsageError

ImbalanceOption = Annotated[
    float | None, typer.Option("--expert-imbalance", min=1, help="Tokens of the busiest rank of ep, over the mean.")
]


def unevenly(asked: Question, imbalance: float | None) -> Question:
    """The question with experts that are met so unevenly.

    Raises:
        UsageError: a model without experts, or more than it has.
    """
    if imbalance in (None, 1):
        return asked
    if not asked.profile.experts:
        raise UsageError(f"--expert-imbalance {imbalance:g}: {asked.profile.name} has no experts; leave it out")
    if not imbalance <= asked.profile.experts:
        raise UsageError(
            f"--expert-imbalance {imbalance:g}: needed at most {asked.profile.experts}, the experts of "
            f"{asked.profile.name}: all tokens meet one of them then; give a number as 1.5"
        )
    said = f"experts: where ep is above 1, its busiest rank has {imbalance:g} times the mean of the tokens"
    return replace(asked, workload=replace(asked.workload, imbalance=imbalance), assumed=(*asked.assumed, said))
