"""What a plan file was made for: `plan` writes it there, `explain` and `estimate` take from it what is not given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args

from shardwise.cli.options.adapted import adapted
from shardwise.cli.options.planning import Question, is_module, question
from shardwise.cli.options.uneven import unevenly
from shardwise.errors import ConfigError, UsageError
from shardwise.findings import nearest
from shardwise.plan.plan import MADE_FOR, Plan
from shardwise.plan.rows.modules import used
from shardwise.plan.searching.choice import Goal
from shardwise.records import RecordError, as_dict, from_dict, located, read_file, write_file

FILES = (".toml", ".json")


@dataclass(frozen=True, kw_only=True)
class MadeFor:
    """The words that `shardwise plan` was given, and the length and batch that they came to."""

    model: str = ""
    cluster: str = ""
    seq: int | None = None
    global_batch: int | None = None
    optimizer: str = ""
    stack: str = ""
    goal: str = ""
    imbalance: float = 1.0
    price: float | None = None
    adapters: str = ""
    base: str = ""
    allow: tuple[str, ...] = ()
    forbid: tuple[str, ...] = ()


def save_plan(plan: Plan, path: Path, made: MadeFor) -> None:
    """Write a plan with what it was made for; it is loaded as any other plan.

    Raises:
        ConfigError: a place that cannot be written.
    """
    said = {name: value for name, value in as_dict(made).items() if value != getattr(MadeFor(), name) and value != []}
    write_file(path, {**plan.to_dict(), MADE_FOR: said}, comment=str(plan))


def load_made_for(source: str) -> MadeFor:
    """What a plan file says of it; nothing of a shorthand, and of a file that says nothing.

    Raises:
        ConfigError: a file that cannot be read, or a value of a wrong type, with its line.
    """
    if not source.endswith(FILES):
        return MadeFor()
    data, text = read_file(source)
    found = data.get(MADE_FOR, {})
    try:
        if not isinstance(found, dict):
            raise RecordError((MADE_FOR,), f"found {found!r}, needed a table of keys")
        known = {f.name for f in fields(MadeFor)}  # what a later version adds is its own
        made = from_dict(MadeFor, {key: value for key, value in found.items() if key in known}, (MADE_FOR,))
        if made.goal and made.goal not in get_args(Goal):
            raise RecordError((MADE_FOR, "goal"), f"found {made.goal!r}; {nearest(made.goal, get_args(Goal))}")
        return made
    except ConfigError as error:
        raise located(error, source, text) from None


def question_of(verb: str, source: str, plan: Plan, **given: Any) -> tuple[Question, str]:
    """What a verb is asked of a plan, and the name of the stack: options win, the plan's file says the rest.

    Args:
        verb: for messages.
        source: the plan's word: a file or a shorthand.
        plan: that plan.
        **given: `model`, `cluster`, `seq`, `global_batch`, `tokens`, `optimizer`, `stack`, `price`, `trace_on`,
            `blocks`, `imbalance`, `adapters`, `base`.

    Raises:
        UsageError: neither says the model or the cluster; only the file names a module, which would be imported; or a
            word that means nothing.
        ConfigError: a file that is gone, or that does not describe what it should.
    """
    made = load_made_for(source)
    names = ("model", "cluster", "seq", "optimizer", "stack", "price", "adapters", "base")
    taken = [name for name in names if given.get(name) in ("", None)]
    words = {name: getattr(made, name) if name in taken else given[name] for name in (*taken, *given)}
    for name in ("model", "cluster"):
        _refuse_word(verb, source, name, words[name], from_file=name in taken)
    batch = given.get("global_batch")
    from_file = given.get("tokens") is None and not (batch or plan.batch.global_size)
    if given.get("tokens") is None:
        batch = batch or plan.batch.global_size or made.global_batch
    blocks = given.get("blocks") or plan.blocks  # what a module cannot have depends on them
    more = {"price": words["price"], "trace_on": given.get("trace_on"), "blocks": blocks, "allow": (plan.precision,)}
    said = [f"--{name} {words[name]}" for name in taken if words[name] not in ("", None)]
    said += [f"--global-batch {batch}"] if from_file and batch is not None else []
    try:
        asked = question(
            words["model"], words["cluster"], seq=words["seq"], batch=batch, tokens=given.get("tokens"),
            optimizer=words["optimizer"], **more,
        )  # fmt: skip
        asked = _as_applied(asked, plan)
        asked = unevenly(asked, given.get("imbalance") or (made.imbalance if asked.profile.experts else None))
        asked = adapted(asked, words["adapters"], words["base"])
        asked.stack(words["stack"])
    except UsageError as error:
        if not said:
            raise
        kind = ConfigError if isinstance(error, ConfigError) else UsageError
        raise kind(f"{error}; {source} says that it was made for {' '.join(said)}: an option wins over it") from None
    if said:
        asked = replace(asked, assumed=(f"as {source} says it was made for: {' '.join(said)}", *asked.assumed))
    return asked, words["stack"]


def _as_applied(asked: Question, plan: Plan) -> Question:
    """With what `apply` says of a plan's `tp` and `ep`, where it is not known whether the module can have them."""
    found = used(plan, asked.left_out)
    open_to_it = [axis for axis in ("tp", "ep") if axis in found and not found[axis].startswith("module.")]
    if not open_to_it or asked.factory is None:
        return asked
    from shardwise.cli.options.applied import refusal  # torch, which has read the module

    why = refusal(asked.factory, plan)
    left_out = [(word, why if word in open_to_it else said) for word, said in asked.left_out]
    return replace(asked, left_out=tuple((word, said) for word, said in left_out if said))


def _refuse_word(verb: str, source: str, name: str, word: str, *, from_file: bool) -> None:
    """Refuse a word that is missing, and one of a file that would import code, measure, or name a file that is gone."""
    if not word:
        says = (
            f"{source} does not say what it was made for" if source.endswith(FILES) else "a shorthand does not say it"
        )
        raise UsageError(f"{verb}: --{name} is missing, and {says}; give --{name} {_EXAMPLES[name]}")
    if not from_file:
        return
    if name == "model" and is_module(word) and not word.startswith("hf:"):
        raise UsageError(
            f"{verb}: {source} was made for the module {word}; a file's word is not imported, as that runs code: give "
            f"--model {word} if you trust it"
        )
    if name == "cluster" and word == "probe":
        raise UsageError(
            f"{verb}: {source} was made for a cluster as it was measured; give --cluster cluster.toml, which "
            "`shardwise probe` writes, or --cluster probe to measure again"
        )
    path = word.removeprefix("hf:")
    if path.endswith(FILES) and not Path(path).is_file():
        raise ConfigError(
            f"{verb}: {source} was made for the {name} in {path}, which is no file here (working directory: "
            f"{Path.cwd()}); give --{name}"
        )


_EXAMPLES = {"model": "llama-8b, or a file of sizes", "cluster": "h100:8x2, or a file"}


def made_for(
    model: str, cluster: str, asked: Question, goal: str, words: Sequence[Sequence[str]], stack: str
) -> MadeFor:
    """The record of a question; `words`: what was allowed, and what was forbidden."""
    workload = asked.workload
    return MadeFor(
        model=model, cluster=cluster, seq=workload.seq_len, global_batch=workload.global_batch,
        optimizer=workload.optimizer, stack=stack, goal=goal, imbalance=workload.imbalance,
        allow=tuple(words[0]), forbid=tuple(words[1]),
    )  # fmt: skip
