"""`Rules`: tensor-parallel rules as a file to keep, with reasons, limits and the proof that they were verified.

Pure, no torch. `shardwise rules MODEL --out rules.toml` writes it; `apply(..., rules="rules.toml")` reads it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tomlkit

from shardwise.errors import ConfigError, DataError, ModelError
from shardwise.findings import nearest
from shardwise.model.rules import STYLES, compile_pattern
from shardwise.records import parse_toml, read_small

_KEYS = {"model": str, "tp_divides": int, "no_sequence": str, "verified": str, "verified_hash": str, "rules": dict}
_HEAD = (
    "Tensor-parallel rules: pattern = style, docs/rules.md. Written by `shardwise rules`; it is yours to keep and edit."
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Rules(Mapping[str, str]):
    """Pattern -> style, with what is known of them.

    >>> Rules(styles={"up": "column", "down": "row"})["up"]
    'column'
    """

    styles: Mapping[str, str]
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Pattern -> why it has its style."""
    model: str = ""
    """Class of the model that they were inferred from."""
    tp_divides: int = 0
    """A degree of `tp` must divide it; 0: not known."""
    no_sequence: str = ""
    """Why `seq` is refused with these rules; empty: it is not."""
    verified: str = ""
    """Shorthand of the plan under which these rules equal one process; empty: nobody compared them."""

    def __getitem__(self, pattern: str) -> str:
        return self.styles[pattern]

    def __iter__(self) -> Iterator[str]:
        return iter(self.styles)

    def __len__(self) -> int:
        return len(self.styles)

    @property
    def hash(self) -> str:
        """Of patterns and styles: an edited table was not verified."""
        text = json.dumps(sorted(self.styles.items()))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def with_verified(self, plan: str) -> Rules:
        """The same rules, compared with one process under a plan."""
        return replace(self, verified=plan)

    def check(self, *, tp: int, sequence: bool) -> None:
        """Refuse a plan that these rules do not cover.

        Raises:
            ModelError: `tp` does not divide what they split, or sequence shards would be wrong.
        """
        if self.tp_divides and self.tp_divides % tp:
            degrees = ", ".join(str(d) for d in range(1, self.tp_divides + 1) if self.tp_divides % d == 0)
            raise ModelError(
                f"rules of {self.model or 'a file'}: tp={tp} does not divide the {self.tp_divides} units that they "
                f"split; use tp in {{{degrees}}}, or infer rules for this degree: shardwise rules MODEL --degree {tp}"
            )
        if tp > 1 and sequence and self.no_sequence:
            raise ModelError(
                f"rules of {self.model or 'a file'}: sequence shards would train something else: {self.no_sequence}; "
                "drop `seq` from the plan"
            )

    def to_toml(self) -> str:
        """The text of the file."""
        document = tomlkit.document()
        document.add(tomlkit.comment(_HEAD))
        for key in ("model", "tp_divides", "no_sequence", "verified"):
            if getattr(self, key):
                document.add(key, getattr(self, key))
        if self.verified:
            document.add("verified_hash", self.hash)
        else:
            document.add(
                tomlkit.comment("verified = ... is added by `shardwise rules MODEL --rules FILE --verify tp2`")
            )
        table = tomlkit.table()
        for pattern, style in self.styles.items():
            item = tomlkit.item(style)
            if pattern in self.reasons:
                item.comment(self.reasons[pattern])
            table.add(pattern, item)
        document.add("rules", table)
        return tomlkit.dumps(document)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file."""
        try:
            Path(path).write_text(self.to_toml(), encoding="utf-8")
        except OSError as error:
            raise DataError(
                f"cannot write rules to {path}: {error.strerror}; give a path that can be written"
            ) from None


def load_rules(path: str | os.PathLike[str], *, unverified: bool = False) -> Rules:
    """The rules of a file, strictly.

    Args:
        path: what `shardwise rules MODEL --out` wrote, or a file written by hand: a table `[rules]` of pattern = style.
        unverified: also rules that were not compared with one process since they were last changed.

    Returns:
        A mapping for `apply(..., rules=)`.

    Raises:
        DataError: no such file, or no TOML.
        ConfigError: an unknown key or style with its line, a pattern that cannot be one, rules that are not verified.

    >>> load_rules("rules.toml")["layers.*.attn.wq"]  # doctest: +SKIP
    'column'
    """
    text = _text(path)
    try:
        data = parse_toml(text)
    except tomllib.TOMLDecodeError as error:
        raise DataError(
            f"rules file {path}: found no TOML ({error}); needed: [rules], then lines pattern = style"
        ) from None
    for key, value in data.items():
        if key not in _KEYS:
            raise _at(path, text, key, f"unknown key {key!r}; {nearest(key, list(_KEYS))}")
        if not isinstance(value, _KEYS[key]) or isinstance(value, bool):
            raise _at(path, text, key, f"found {key} = {value!r}, needed a {_NAMED[_KEYS[key]]}")
    rules = _rules(path, text, data)
    if rules.verified and data.get("verified_hash") == rules.hash:
        return rules
    if not unverified:
        why = "they were changed since" if rules.verified else "nobody compared them with one process"
        raise ConfigError(
            f"rules file {path}: found rules that are not verified ({why}); a wrong rule may train something else "
            f"without an error; do: shardwise rules MODEL --rules {path} --verify tp2, which marks the file, or "
            "load_rules(path, unverified=True)"
        )
    return replace(rules, verified="")


_NAMED = {str: "text", int: "number", dict: "table of pattern = style"}


def _rules(path: str | os.PathLike[str], text: str, data: Mapping[str, Any]) -> Rules:
    table = data.get("rules", {})
    if not table:
        raise ConfigError(f"rules file {path}: found no rules; needed: [rules], then lines pattern = style")
    for pattern, style in table.items():
        if not isinstance(style, str) or style not in STYLES:
            hint = nearest(str(style), list(STYLES)) if isinstance(style, str) else "quote patterns that have dots"
            raise _at(path, text, pattern, f"rule {pattern!r}: unknown style {style!r}; {hint}")
        try:
            compile_pattern(pattern)
        except ModelError as error:
            raise _at(path, text, pattern, str(error)) from None
    if data.get("tp_divides", 0) < 0:
        raise _at(path, text, "tp_divides", f"found {data['tp_divides']}, needed a number of units, or 0: not known")
    reasons = {}
    for pattern in table:
        found = re.search(rf'^\s*"?{re.escape(pattern)}"?\s*=[^#\n]*#\s*(.*)$', text, re.MULTILINE)
        if found:
            reasons[pattern] = found[1].strip()
    plain = {key: data[key] for key in ("model", "tp_divides", "no_sequence", "verified") if key in data}
    return Rules(styles=dict(table), reasons=reasons, **plain)


def _text(path: str | os.PathLike[str]) -> str:
    try:
        return read_small(Path(path)).decode("utf-8")
    except UnicodeDecodeError:
        raise DataError(f"rules file {path}: it is no UTF-8 text; needed: TOML with a table [rules]") from None
    except OSError as error:
        folder = Path(path).parent
        beside = [p.name for p in folder.glob("*.toml")] if folder.is_dir() else []
        hint = nearest(Path(path).name, beside) if beside else "write one with shardwise rules MODEL --out rules.toml"
        raise DataError(f"rules file {path}: {error.strerror}; {hint}") from None


def _at(path: str | os.PathLike[str], text: str, key: str, message: str) -> ConfigError:
    pattern = re.compile(rf'^\s*"?{re.escape(key)}"?\s*=|^\s*\[{re.escape(key)}')
    line = next((i for i, row in enumerate(text.splitlines(), 1) if pattern.search(row)), None)
    return ConfigError(f"rules file {path}{f', line {line}' if line else ''}: {message}")
