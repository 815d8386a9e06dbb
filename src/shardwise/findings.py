"""`Finding`: one thing that a check found out, with its evidence and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher, get_close_matches
from typing import Literal, TypeVar

Row = TypeVar("Row")
Test = TypeVar("Test")
Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a constraint, a check or a watcher found.

    `id` is stable across versions (`tp.heads`): tests, documents and JSON readers refer to it.
    """

    id: str
    severity: Severity
    what: str
    evidence: str = ""
    """The numbers or names that it was found by."""
    fix: str = ""
    """What to do; of a constraint with the nearest plan that works."""

    def __str__(self) -> str:
        found = f"found: {self.evidence}" if self.evidence else ""
        parts = [self.what, found, f"do: {self.fix}" if self.fix else ""]
        return f"[{self.id}] " + "; ".join(part for part in parts if part)

    def to_dict(self) -> dict[str, str]:
        """The row that `--json` prints: `{id, severity, what, evidence, fix}`."""
        return asdict(self)


def errors_in(findings: Iterable[Finding]) -> list[Finding]:
    """Those findings that refuse."""
    return [finding for finding in findings if finding.severity == "error"]


def table_of(row: Callable[..., Row]) -> tuple[dict[str, Row], Callable[[str, str], Callable[[Test], Test]]]:
    """An empty table of predicates by id, and the decorator that adds one under an id and a sentence.

    `row` makes an entry from `id`, `why` and `test`.
    """
    rows: dict[str, Row] = {}

    def named(row_id: str, why: str) -> Callable[[Test], Test]:
        assert row_id not in rows, row_id

        def add(test: Test) -> Test:
            rows[row_id] = row(id=row_id, why=why, test=test)
            return test

        return add

    return rows, named


def shown(names: Sequence[object], most: int = 3) -> str:
    """The first few of many names, for a message.

    >>> shown(["a", "b", "c", "d", "e"]), shown([0, 2])
    ('a, b, c and 2 more', '0, 2')
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def nearest(name: str, known: Sequence[str], limit: int = 3) -> str:
    """`"did you mean 'layers.*.wq'?"`, or the known names when nothing is near.

    >>> nearest("sead", ["seed", "steps"])
    "did you mean 'seed'?"
    """
    if close := near(name, known, limit):
        return close
    first = ", ".join(sorted({*known})[:20])
    return f"known: {first}{', ...' if len(known) > 20 else ''}"


def near(name: str, known: Sequence[str], limit: int = 3) -> str:
    """The same, and nothing when no name is near; one that differs in the case of its letters alone is the one meant.

    >>> near("sead", ["steps"]), near("PP", ["pp", "cp"]), near("doesnotexist", ["dots3_note"])
    ('', "did you mean 'pp'?", '')
    """
    names = list(dict.fromkeys(known))  # tables of several kinds have some twice
    same = [each for each in names if each.casefold() == name.casefold()]
    alike, sure = (get_close_matches(name, names, n=len(names) or 1, cutoff=cutoff) for cutoff in (0.6, 2 / 3))
    close = same or [each for each in alike if each in sure or _share_a_half(name, each)][:limit]
    return "did you mean " + " or ".join(repr(c) for c in close) + "?" if close else ""


def _share_a_half(name: str, other: str) -> bool:
    """Whether half of the shorter one stands in both in one piece: letters here and there make nothing near."""
    return 2 * SequenceMatcher(None, name, other).find_longest_match().size >= min(len(name), len(other))
