"""Names of a foreign checkpoint made those of the model: wrappers' parts, prefixes, and the user's own rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from shardwise.checkpoint.foreign.state import PREFIXES, Foreign, untied, unwrapped
from shardwise.errors import ConfigError, DataError
from shardwise.findings import nearest, shown
from shardwise.records import parse_toml, read_small

T = TypeVar("T")
_DDP = "module."


@dataclass(frozen=True)
class Rule:
    """`*` stands for a part of a name, `**` for one or more of them; in `to` for what they stood for, in order."""

    source: str
    target: str

    def renamed(self, name: str) -> str | None:
        """The new name; None: the rule does not match.

        >>> Rule("h.*.attn.**", "blocks.*.attention.**").renamed("h.3.attn.q.weight")
        'blocks.3.attention.q.weight'
        """
        match = _pattern(self.source).fullmatch(name)
        if match is None:
            return None
        parts = iter(match.groups())
        return re.sub(r"\*\*|\*", lambda _: next(parts), self.target)

    def __post_init__(self) -> None:
        """Refuse what could not be filled in."""
        if self.target and _stars(self.target) != _stars(self.source):
            raise ConfigError(
                f"rename {self.source!r} = {self.target!r}: found {_stars(self.source)} in the pattern, needed the "
                "same stars in the same order in the new name; write them alike"
            )


def _stars(text: str) -> list[str]:
    return re.findall(r"\*\*|\*", text)


def _pattern(text: str) -> re.Pattern[str]:
    pieces = re.split(r"(\*\*|\*)", text)
    found = {"*": r"([^.]+)", "**": r"(.+)"}
    return re.compile("".join(found.get(piece) or re.escape(piece) for piece in pieces))


def read_rules(path: Path) -> list[Rule]:
    """A file of rules: `[rename]` with "pattern" = "new name"; an empty new name leaves the tensor out.

    Raises:
        DataError: no such file, or no TOML.
        ConfigError: another table, a value that is no text, or stars that differ.
    """
    try:
        data = parse_toml(read_small(path).decode("utf-8"))
    except (OSError, ValueError) as error:  # no such file or path, another encoding, or no TOML
        raise DataError(f"{path}: cannot be read ({error}); needed a TOML file with a table [rename]") from None
    table = data.get("rename")
    if set(data) != {"rename"} or not isinstance(table, dict) or not table:
        raise ConfigError(f"{path}: found {sorted(data) or 'nothing'}, needed one table [rename]; see docs/convert.md")
    if not all(isinstance(value, str) for value in table.values()):
        raise ConfigError(f'{path}: [rename]: needed "pattern" = "new name" in each line')
    return [Rule(source, target) for source, target in table.items()]


def rename(found: Foreign, rules: Iterable[Rule]) -> None:
    """Give weights and state the model's names: wrappers off, prefix off, then the first rule that matches.

    Raises:
        ConfigError: a rule that matches nothing, or two tensors that get one name.
    """
    found.weights, ties = untied(found.weights)
    found.ties |= ties
    if found.ties:
        pairs = [f"{name} = {first}" for name, first in found.ties.items()]
        found.notes.append(f"tied parameters, kept under one name: {shown(pairs)}")
    _apply(found, unwrapped)
    prefix = _common(found)
    if prefix:
        found.notes.append(f"names without the prefix {prefix!r}, which all had")
        _apply(found, lambda name: name.removeprefix(prefix))
    used: set[Rule] = set()
    rules = list(rules)

    def by_rules(name: str) -> str | None:
        for rule in rules:
            new = rule.renamed(name)
            if new is not None:
                used.add(rule)
                return new or None
        return name

    old = list(found.weights)
    _leave_first_names(found, by_rules)
    _apply(found, by_rules)
    idle = [rule for rule in rules if rule not in used]
    if idle:
        raise ConfigError(
            f"rename {idle[0].source!r}: found no tensor that it or no rule before it matches; "
            f"{nearest(idle[0].source, old)}; needed a pattern of a name: take the rule out or mend it"
        )


def _leave_first_names(found: Foreign, change: Callable[[str], str | None]) -> None:
    """A tied weight whose first name is left out is there under the next name that is not."""
    for name, first in list(found.ties.items()):
        if first in found.weights and change(first) is None and change(name) is not None:
            found.weights[name] = found.weights.pop(first)
            if first in found.optimizer:
                found.optimizer[name] = found.optimizer.pop(first)
            found.ties = {n: name if f == first else f for n, f in found.ties.items() if n != name}


def _common(found: Foreign) -> str:
    """DDP's prefix, or that of a LightningModule whose only child is the model, with DDP's behind it."""
    is_lightning = found.kind.startswith("lightning")
    prefixes = [own + ddp for own in PREFIXES for ddp in (_DDP, "")] if is_lightning else [_DDP]
    names = list(found.weights)
    return next((p for p in prefixes if names and all(name.startswith(p) for name in names)), "")


def _apply(found: Foreign, change: Callable[[str], str | None]) -> None:
    found.weights = _changed(found.weights, change)
    found.optimizer = _changed(found.optimizer, change)
    ties = ((change(name), change(first)) for name, first in found.ties.items())
    found.ties = {name: first for name, first in ties if name and first in found.weights and name not in found.weights}


def _changed(named: Mapping[str, T], change: Callable[[str], str | None]) -> dict[str, T]:
    fresh: dict[str, T] = {}
    first: dict[str, str] = {}
    for name, value in named.items():
        new = change(name)
        if new is None:  # a rule leaves it out
            continue
        if new in fresh:
            raise ConfigError(
                f"rename: {first[new]} and {name} both become {new}; needed one name for each: mend the rules, or, "
                "where wrappers' parts of the names are all that differs, save one of the two models"
            )
        fresh[new], first[new] = value, name
    return fresh
