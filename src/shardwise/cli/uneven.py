"""`--expert-imbalance` of `plan` and `estimate`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from shardwise.cli.planning import Question

ImbalanceOption = Annotated[
    float | None, typer.Option("--expert-imbalance", min=1, help="Tokens of the busiest rank of ep, over the mean.")
]


def unevenly(asked: Question, imbalance: float | None) -> Question:
    """The question with experts that are met so unevenly; of a model without experts, it itself."""
    if imbalance in (None, 1) or not asked.profile.experts:
        return asked
    said = f"experts: where ep is above 1, its busiest rank has {imbalance:g} times the mean of the tokens"
    return replace(asked, workload=replace(asked.workload, imbalance=imbalance), assumed=(*asked.assumed, said))
