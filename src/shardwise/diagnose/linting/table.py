"""What a rule of `shardwise lint` is made of."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from shardwise.diagnose.linting.kinds import Kinds
from shardwise.diagnose.linting.script import Script
from shardwise.findings import Severity, table_of


@dataclass(frozen=True, kw_only=True)
class Hit:
    """A rule's finding: where, what, what was seen, what to do."""

    node: ast.expr | ast.stmt
    what: str
    found: str = ""
    fix: str = ""
    severity: Severity = "error"


Test = Callable[["Facts"], Iterable[Hit]]
"""A predicate: all places of a script where the rule is broken."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One mistake: stable id, the sentence of docs/lint.md, and the predicate."""

    id: str
    why: str
    test: Test


@dataclass
class Facts:
    """A script and what its variables hold."""

    script: Script

    @cached_property
    def kinds(self) -> Kinds:
        """What expressions hold."""
        return Kinds(self.script)


def rules() -> tuple[dict[str, Rule], Callable[[str, str], Callable[[Test], Test]]]:
    """An empty section of the table, and the decorator that adds a predicate to it under an id and a sentence."""
    return table_of(Rule)


def source(node: ast.AST, limit: int = 70) -> str:
    """The expression as text, cut to a length.

    >>> source(ast.parse("a  +  b").body[0].value)
    'a + b'
    """
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."
