"""`Report`: what a verification found, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from shardwise.findings import Finding
from shardwise.records import in_words

Verdict = Literal["proven", "different", "refused"]
EXIT_CODES: Mapping[str, int] = {"proven": 0, "different": 1, "refused": 2}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the table: the worst difference of a kind."""

    kind: str
    count: int
    """Numbers or tensors compared, over all steps."""
    largest: float
    tolerance: float
    """Of the one that is furthest beyond, or nearest to, its own tolerance."""
    measured: float
    """What one process differed from itself by in that one."""
    where: str
    """Which one, and in which step."""
    over: int
    """How many are beyond their tolerance."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a verification found. `proven` is what a test asserts."""

    verdict: Verdict
    subject: str
    plan: str
    """What was run: the plan, in the type of the verification."""
    reference: str = ""
    steps: int = 0
    rows: tuple[Row, ...] = ()
    how: str = ""
    """How the tolerance was set."""
    findings: tuple[Finding, ...] = ()
    """Why it is refused; or the likely causes of a difference, the most specific first."""
    first_forward: str | None = None
    first_backward: str | None = None
    factor: str | None = None
    notes: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    """The evidence, for programs."""

    @property
    def proven(self) -> bool:
        """Whether every compared number is within its tolerance."""
        return self.verdict == "proven"

    @property
    def exit_code(self) -> int:
        """0 proven, 1 different, 2 refused."""
        return EXIT_CODES[self.verdict]

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {**in_words(asdict(self)), "proven": self.proven, "exit_code": self.exit_code}

    def __str__(self) -> str:
        """A few lines, for a failed assertion."""
        lines = [f"{self.verdict}: {self.subject} under `{self.plan}`"]
        worst = [r for r in self.rows if r.over]
        lines += [f"  {r.kind}: {r.largest:.1e}, tolerance {r.tolerance:.1e} ({r.where})" for r in worst]
        lines += [f"  first in {way}: {at}" for way, at in self._places() if at]
        lines += [f"  {finding}" for finding in self.findings]
        return "\n".join(lines)

    def _places(self) -> list[tuple[str, str | None]]:
        return [("forward order", self.first_forward), ("backward order", self.first_backward)]
