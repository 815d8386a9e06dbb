"""Reads `run.toml` and flags into `RunSettings`, keeps where each value came from, and checks them. No torch.

default  <  file  <  flag  <  --set section.key=value         what is still None is derived, see cli/options/derive.py
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from shardwise.checkpoint.cadence import Every
from shardwise.errors import ConfigError, PlanError
from shardwise.findings import nearest
from shardwise.model.spec import presets
from shardwise.plan.plan import Plan
from shardwise.records import parse_toml, read_small
from shardwise.train.settings import KEYS, SECTIONS, RunSettings, TrainSettings, get

OriginKind = Literal["default", "file", "flag", "derived"]


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a value came from: `file run.toml:12`, `flag --seed`, `derived: 2 gloo processes on a CPU`."""

    kind: OriginKind
    detail: str = ""

    def __str__(self) -> str:
        separator = ": " if self.kind == "derived" else " "
        return f"{self.kind}{separator}{self.detail}" if self.detail else self.kind


DEFAULT = Origin(kind="default")
_EITHER = (("plan.shorthand", "plan.file"), ("train.steps", "train.tokens"), ("model.preset", "model.factory"))
REPLACES = dict(_EITHER) | {other: one for one, other in _EITHER}
"""A flag for one of these replaces a file's other one: `--steps` a file's `tokens`."""


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """Settings and the origin of each, by dotted name."""

    settings: RunSettings
    origins: Mapping[str, Origin] = field(default_factory=dict)

    def origin(self, key: str) -> Origin:
        """Where a value came from; `default` when nobody said it."""
        return self.origins.get(key, DEFAULT)

    def value(self, key: str) -> Any:
        """The value of a dotted name."""
        return get(self.settings, key)

    def derive(self, values: Mapping[str, tuple[Any, str]]) -> Configuration:
        """A copy with values that nobody said filled in, each `(value, reason)`."""
        origins = {key: Origin(kind="derived", detail=reason) for key, (_, reason) in values.items()}
        settings = _validate({**_flat(self.settings), **{key: value for key, (value, _) in values.items()}}, origins)
        return Configuration(settings=settings, origins={**self.origins, **origins})

    def rows(self) -> list[tuple[str, Any, str]]:
        """Every setting that has a value: dotted name, value, origin; in the order of the file's tables."""
        return [(key, value, str(self.origin(key))) for key in KEYS if (value := self.value(key)) is not None]


@dataclass(frozen=True, kw_only=True)
class Given:
    """One value that somebody said."""

    key: str
    value: Any
    origin: Origin


def read_configuration(path: Path | None, flags: Iterable[Given] = (), sets: Iterable[str] = ()) -> Configuration:
    """Settings of a file, then flags, then `--set` words; later ones win.

    Args:
        path: a TOML file, or None.
        flags: values from the command line.
        sets: `section.key=value`, the value as in TOML (a bare word is a string).

    Raises:
        ConfigError: unknown key (names the nearest), wrong type or value, unreadable file; with file and line.

    Example:
        >>> read_configuration(None, sets=["train.seed=3"]).settings.train.seed
        3
    """
    said = [*flags, *(_read_set(text) for text in sets)]
    replaced = {REPLACES[one.key] for one in said if one.key in REPLACES}
    given = [*(one for one in (_read_file(path) if path else ()) if one.key not in replaced), *said]
    values = {one.key: one.value for one in given}
    origins = {one.key: one.origin for one in given}
    return Configuration(settings=_validate(values, origins), origins=origins)


def _meant_by(word: str) -> str:
    """What to do about a word that is no file."""
    if word in presets():
        return f"a model is given as --model {word}"
    try:
        Plan.parse(word)
    except PlanError:
        return "give the path of a run.toml"
    return f"a plan is given as --plan {word}"


def _read_file(path: Path) -> list[Given]:
    try:
        text = read_small(path).decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(f"cannot read the configuration {path}: no such file; {_meant_by(str(path))}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {error}; it must be a TOML text file") from None
    try:
        tables = parse_toml(text)
    except tomllib.TOMLDecodeError as error:
        hint = f"; `shardwise run {path}` runs a script" if path.suffix == ".py" else ""
        raise ConfigError(f"{path} is not TOML: {error}{hint}") from None
    given = []
    for section, table in tables.items():
        where = f"{path}:{_line_of(text, section, None)}"
        if section not in SECTIONS:
            raise ConfigError(f"{where}: unknown {_kind(table)} {section!r}; {_nearest_key(section, None)}")
        if not isinstance(table, dict):
            raise ConfigError(f"{where}: {section!r} is a table; write `[{section}]` and its keys below")
        for key, value in table.items():
            origin = Origin(kind="file", detail=f"{path}:{_line_of(text, section, key)}")
            _check_key(f"{section}.{key}", origin)
            given.append(Given(key=f"{section}.{key}", value=value, origin=origin))
    return given


def _kind(table: object) -> str:
    return "table" if isinstance(table, dict) else "key"


def _read_set(text: str) -> Given:
    key, separator, written = text.partition("=")
    origin = Origin(kind="flag", detail=f"--set {text}")
    if not separator or "." not in key:
        raise ConfigError(f"--set {text!r}: expected section.key=value, for example --set train.seed=3")
    _check_key(key.strip(), origin)
    try:
        value = parse_toml(f"value = {written}")["value"]
    except tomllib.TOMLDecodeError:
        value = written  # a bare word
    return Given(key=key.strip(), value=value, origin=origin)


def _check_key(key: str, origin: Origin) -> None:
    if key not in KEYS:
        section, _, name = key.partition(".")
        what = f"unknown key {name!r} in [{section}]" if section in SECTIONS else f"unknown table {section!r}"
        raise ConfigError(f"{origin.detail}: {what}; {_nearest_key(name if section in SECTIONS else section, section)}")


def _nearest_key(name: str, section: str | None) -> str:
    """The nearest name at the same level; or the table that the key lives in."""
    homes = [key.partition(".")[0] for key in KEYS if key.partition(".")[2] == name]
    if homes:
        return f"{name!r} belongs in [{homes[0]}]"
    if section in SECTIONS:
        own = nearest(name, list(SECTIONS[section].model_fields))
        if own.startswith("did you mean"):
            return own
        elsewhere = nearest(name, [key.partition(".")[2] for key in KEYS])
        return elsewhere if elsewhere.startswith("did you mean") else own
    tables = nearest(name, list(SECTIONS))
    if tables.startswith("did you mean"):
        return tables
    keys = nearest(name, [key.partition(".")[2] for key in KEYS])
    return keys if keys.startswith("did you mean") else f"the tables are {', '.join(f'[{s}]' for s in SECTIONS)}"


def _line_of(text: str, section: str, key: str | None) -> int:
    """Line of a table's header, or of a key in it: tomllib keeps no positions. 1 when it is written in an odd way."""
    wanted = (section,) if key is None else (section, key)
    lines: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*\[+([^\]]+)\]", line)
        assigned = re.match(r"\s*([\w\-.\"' ]+?)\s*=", line)
        if header:
            table = _path(header[1])
            lines.setdefault(table, number)
        elif assigned:
            path = (*table, *_path(assigned[1]))
            lines.setdefault(path, number)
            lines.setdefault(path[:1], number)
    return lines.get(wanted, lines.get((section,), 1))


def _path(written: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in written.split("."))


def _flat(settings: RunSettings) -> dict[str, Any]:
    return {key: get(settings, key) for key in KEYS}


def _validate(values: Mapping[str, Any], origins: Mapping[str, Origin]) -> RunSettings:
    nested: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        nested.setdefault(section, {})[name] = value
    try:
        return RunSettings.model_validate(nested)
    except ValidationError as error:
        lines = [_explain(dict(one), origins) for one in error.errors()]
        raise ConfigError("\n".join(dict.fromkeys(lines))) from None


def _explain(error: dict[str, Any], origins: Mapping[str, Origin]) -> str:
    location = [str(part) for part in error["loc"]]
    key = ".".join(location[:2])
    origin = origins.get(key, DEFAULT)
    found = error["input"]
    text = f"{origin.detail or origin.kind}: {key} = {found!r}: {error['msg'][:1].lower()}{error['msg'][1:]}"
    if error["type"] == "literal_error" and isinstance(found, str):
        known = re.findall(r"'([^']+)'", str(error["ctx"]["expected"]))
        text += f"; {nearest(found, known)}"
    if error["type"].endswith("_type") and isinstance(found, str) and origin.kind == "file":
        text += "; leave out the quotes"
    return text


def read_clip(text: str) -> dict[str, Any]:
    """The settings that `--clip` means: `1.0`, `norm:1.0`, `value:0.5`, `none`.

    Raises:
        ConfigError: anything else.
    """
    kind, _, number = text.rpartition(":")
    if text == "none":
        return {"train.clip_norm": 0.0}
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if kind not in ("", "norm", "value") or value <= 0:
        raise ConfigError(f"--clip {text!r}: needed a positive number, `norm:1.0`, `value:0.5` or `none`")
    return {"train.clip_value": value} if kind == "value" else {"train.clip_norm": value}


def read_count(text: str) -> int:
    """`300000`, `4M`, `1.5B`.

    Raises:
        ConfigError: anything else, or more than 10^18.

    >>> read_count("4M")
    4000000
    """
    factors = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
    factor = factors.get(text[-1:].lower(), 1.0)
    try:
        count = float(text[:-1] if factor > 1 else text) * factor
    except ValueError:
        count = 0.0
    if not 1 <= count <= 1e18:
        raise ConfigError(f"--tokens {text!r}: needed a count such as 300000, 4M or 1.5B")
    return int(count)


def check_saves(train: TrainSettings) -> None:
    """Refuse a cadence that is none, and checkpoints to be kept that would not be made.

    Raises:
        ConfigError: saying which.
    """
    every = Every.parse(train.checkpoint_every)
    if train.keep_every and every.steps is None:
        raise ConfigError(
            f"train.keep_every = {train.keep_every}: found checkpoint_every = {train.checkpoint_every!r}, whose steps "
            "are multiples of a number by chance alone, needed a number of steps; give one, or leave keep_every out"
        )
    if train.keep_best and train.eval_every == 0:
        raise ConfigError(
            f"train.keep_best = {train.keep_best}: found eval_every = 0, so that only the last checkpoint has a "
            "held-out loss, needed evaluations during the run; give --eval-every, or leave keep_best out"
        )
