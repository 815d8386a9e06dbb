"""What is recovered from, how often, and what is said of it. Data and rules only; `supervisor.py` does it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shardwise.launch.elastic.slots import Elastic
from shardwise.launch.local import Failure


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """A failure after which the job went on."""

    number: int
    """From 1."""
    rank: int
    cause: str
    step: int
    """The last finished step, after which all went on; 0: none was, and the job began anew."""
    standby: bool
    """Whether processes stood by; else they were forked then, and ran the script from its beginning."""
    seconds: float
    """From the failure until every rank has its state and goes on with the next step."""
    halving: Mapping[str, Any] | None = None
    """After a rank ran out of memory: what did, and the rows of a micro-batch before and from now on."""

    def __str__(self) -> str:
        back = f"went on after step {self.step}" if self.step else "began again"
        return f"recovery {self.number}: rank {self.rank}: {self.cause}; all ranks {back} in {self.seconds:.2f} s"

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Recovering:
    """The policy of a job that recovers."""

    limit: int = 1000
    """Recoveries in all."""
    killed_in_a_row: int = 10
    """Recoveries from killed processes without a finished step in between."""
    raised_in_a_row: int = 1
    """Recoveries from errors without a finished step in between: what fails twice in one step always fails."""
    standby: bool = True
    """Keep a second set of processes that have run the script up to its first step. Takes a model's memory more."""
    tell: Callable[[Recovery], None] = print
    """Called at each recovery, when it is complete."""
    elastic: Elastic | None = None
    """How the number of processes may change; None: it does not."""


class Bounds:
    """Counts recoveries against a policy's limits.

    >>> from shardwise.errors import ExitCode
    >>> bounds = Bounds(Recovering(raised_in_a_row=1))
    >>> failure = Failure(rank=0, message="ValueError: x", exit_code=ExitCode.RANK_FAILED)
    >>> bounds.refuse(failure, copies=5, killed=False) is None  # step 6 is tried again
    True
    >>> bounds.refuse(failure, copies=5, killed=False).message
    'ValueError: x (recovery was tried once, and no step was finished since)'
    """

    def __init__(self, policy: Recovering) -> None:
        """Nothing has happened yet."""
        self.policy = policy
        self.total = 0
        self.halvings = 0
        """How often micro-batches are to be halved; a rank that ran out of memory asks for one more."""
        self._in_a_row = 0
        self._copies = -1
        self._first: Failure | None = None

    def refuse(self, failure: Failure, *, copies: int, killed: bool, damaged: str = "") -> Failure | None:
        """None when the job shall recover; else what to report: the first failure of those without progress.

        Args:
            failure: what happened.
            copies: number of the newest copy of the state: it grows by one per finished step.
            killed: a process was ended from outside or crashed, in place of an error of the script.
            damaged: copies that cannot be used; where there is no other, the job begins again from its checkpoint.
        """
        if copies > self._copies:
            self._in_a_row, self._first = 0, None
        self._copies, self._first = copies, self._first or failure
        allowed = self.policy.killed_in_a_row if killed else self.policy.raised_in_a_row if copies or damaged else 0
        if self.total >= self.policy.limit:
            return _with(failure, f"{self.total} recoveries were made, which is the limit")
        halvings = int(failure.halving["halvings"]) if failure.halving is not None else 0
        if halvings > self.halvings:  # ranks ask until a micro-batch has one row: that is the limit
            self.halvings = halvings
            self.total += 1
            return None
        if self._in_a_row >= allowed:
            times = "once" if self._in_a_row == 1 else f"{self._in_a_row} times"
            why = f"recovery was tried {times}, and no step was finished since" if self._in_a_row else ""
            return _with(self._first, why or "not tried again: no step was finished before")
        self.total += 1
        self._in_a_row += 1
        return None


def _with(failure: Failure, why: str) -> Failure:
    return Failure(
        rank=failure.rank,
        message=f"{failure.message} ({why})",
        exit_code=failure.exit_code,
        traceback=failure.traceback,
    )
