"""`--adapters` and `--base` of `plan`, `estimate` and `explain`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from shardwise.cli.options.planning import Question
from shardwise.errors import UsageError
from shardwise.findings import nearest
from shardwise.plan.frozen import adapted_share
from shardwise.plan.updating import RULES
from shardwise.plan.workload import PACKED, Adapters

AdaptersOption = Annotated[
    str, typer.Option("--adapters", help="Train adapters (LoRA) of this rank on every product, or on some: 16, 16:q,v.")
]
BaseOption = Annotated[
    str, typer.Option("--base", help=f"What the frozen weights below adapters are packed as: {', '.join(PACKED)}.")
]


def adapted(asked: Question, adapters: str, base: str) -> Question:
    """The question with adapters on frozen weights: `rank` or `rank:part,part`, and a key of `PACKED`.

    Raises:
        UsageError: no rank, a part that the model has not, a base without adapters, or what they are not known for.
    """
    if not adapters:
        if base:
            raise UsageError(f"--base {base}: only frozen weights are packed; give the rank of adapters: --adapters 16")
        return asked
    spec, what = asked.spec, f"--adapters {adapters}"
    if spec is None:
        raise UsageError(f"{what}: {asked.profile.name} is a module, which brings its own; leave it out")
    if asked.cluster.device.name.startswith("cpu"):
        raise UsageError(f"{what}: what adapters keep on a CPU is not known; give a module that has them")
    if asked.workload.optimizer in RULES:
        raise UsageError(f"{what}: --optimizer {asked.workload.optimizer} goes by whole matrices; give adamw")
    word, _, some = adapters.partition(":")
    if not word.isdecimal() or not 1 <= int(word) <= spec.dim:
        raise UsageError(f"{what}: found {word!r}, needed a rank of 1 to {spec.dim}, as 16 or 16:q,v")
    every = ("q", "k", "v", "o", *(("gate", "up", "down") if spec.ffn == "gated" else ("up", "down")))
    on = tuple(dict.fromkeys(some.split(","))) if some else every
    for part in on:
        if part not in every:
            raise UsageError(f"{what}: found {part!r}; {nearest(part, every)}")
    if base and base not in PACKED:
        raise UsageError(f"--base: found {base!r}; {nearest(base, list(PACKED))}")
    share = adapted_share(spec, int(word), on)
    said = (
        f"adapters of rank {word} on {', '.join(on)}, {share:.2%} of the parameters, without dropout; no reference "
        "model has them, so that the plan is for a module of yours"
    )
    workload = replace(asked.workload, trained=share, adapters=Adapters(on=on, base=base))
    return replace(asked, workload=workload, assumed=(*asked.assumed, said))


def refuse_traced(asked: Question, *, trace: bool, traffic: bool) -> None:
    """Refuse what goes by the reference model, which has no adapters.

    Raises:
        UsageError: a trace or the messages of a question with adapters.
    """
    if asked.workload.adapters and (trace or traffic):
        word = "--trace" if trace else "--traffic"
        raise UsageError(
            f"{word}: no reference model has adapters; leave --adapters out, or give a module that has them"
        )
