"""What a run was resolved to: its configuration and plan as tables for people, JSON for programs, TOML for both.

Apart from `output`, as it needs what only `train` needs.
"""

from __future__ import annotations

import json
from typing import Any

import tomlkit
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.cli.options.config import Configuration, Origin
from shardwise.cli.options.derive import Derived
from shardwise.plan.report import plan_rows, plan_table


def configuration_table(configuration: Configuration) -> Table:
    """Every setting: name, value, where it came from."""
    table = Table(title="configuration", title_justify="left")
    for column in ("setting", "value", "origin"):
        table.add_column(column, overflow="fold")
    section = ""
    for key, value, origin in configuration.rows():
        if key.partition(".")[0] != section and section:
            table.add_section()
        section = key.partition(".")[0]
        style = "" if origin != "default" else "dim"
        table.add_row(Text(key, style), Text(_spell(value), style), Text(origin, style))
    return table


def _spell(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def configuration_toml(configuration: Configuration) -> str:
    """The settings as TOML that `shardwise train` reads, each with its origin as a comment."""
    document = tomlkit.document()
    document.add(tomlkit.comment("Resolved by shardwise train; the comments say where each value came from."))
    for key, value, origin in configuration.rows():
        section, _, name = key.partition(".")
        if section not in document:
            document.add(section, tomlkit.table())
        item = tomlkit.item(list(value) if isinstance(value, tuple) else value)
        item.comment("".join(letter if letter.isprintable() else " " for letter in origin))  # of a file's name
        document[section].add(name, item)
    return tomlkit.dumps(document)


def configuration_json(derived: Derived) -> dict[str, Any]:
    """The same for programs and for the ranks: settings, origins, sizes and what makes this run this run."""
    configuration = derived.configuration
    return {
        "settings": json.loads(configuration.settings.model_dump_json()),
        "origins": {key: origin for key, _, origin in configuration.rows()},
        "spec": spec_fields(derived),
        "identity": identity(derived),
    }


def spec_fields(derived: Derived) -> dict[str, Any] | None:
    """The model's sizes as plain data; None when a factory makes it."""
    return dict(vars(derived.spec)) if derived.spec is not None else None


def identity(derived: Derived) -> dict[str, Any]:
    """What a resumed run must agree with: the model, the data, the optimizer and the seed of the order."""
    settings = derived.settings
    spec = spec_fields(derived) or {}
    return {
        "model": settings.model.factory or {k: v for k, v in spec.items() if k != "name"},
        "data": [list(settings.data.sources), settings.data.tokenizer, settings.data.seq_len, settings.data.holdout],
        "optimizer": settings.optimizer.name,
        "seed": settings.train.seed,
    }


def plan_reasons(derived: Derived) -> dict[str, str]:
    """A reason per row of the plan's table."""
    origin = derived.configuration.origin
    key = "plan.file" if derived.settings.plan.file else "plan.shorthand"
    whole = "" if origin(key).kind == "derived" else str(origin(key))
    model = "model.preset" if derived.settings.model.preset else "model.factory"
    reasons = {name: whole for name, _, _ in plan_rows(derived.plan, derived.spec)} | dict(derived.reasons)
    reasons |= {
        "model": _why(origin(model)),
        "world": _why(origin("train.nproc")),
        "batch.global_size": _why(origin("train.global_batch")),
        "batch.micro_batches": _why(origin("train.micro_batches")),
    }
    return reasons


def _why(origin: Origin) -> str:
    return origin.detail if origin.kind == "derived" else str(origin)


def print_plan(out: Console, derived: Derived) -> None:
    """The plan in one table with a reason per choice."""
    out.print(plan_table(derived.plan, derived.spec, plan_reasons(derived), title=f"plan: {derived.plan}"))
