"""Which processes an elastic job has now: slots, the file that lists them, and what is said of a change. No torch.

A *slot* is a place for one process: under CUDA and ROCm the device of that number. `Fleet.team` says which slots train
under which plan; the supervisor compares that with who does, and changes over at the end of a step.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from shardwise.errors import UsageError
from shardwise.launch.elastic.plan import Known, plan_for
from shardwise.launch.job import Job
from shardwise.plan.plan import Plan

_DEVICES = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""What names a process's devices: ROCm takes the first one where both are set; CUDA knows the second."""
"""Which devices a process sees as 0, 1, ...; read by CUDA and ROCm."""
APART = 100
"""Failures of a slot with so many finished steps between them are not counted together."""


def parse_span(text: str) -> tuple[int, int]:
    """`2:4`: the fewest and the most processes.

    Raises:
        UsageError: no such pair.

    >>> parse_span("2:4")
    (2, 4)
    """
    match = re.fullmatch(r"(\d{1,6}):(\d{1,6})", text.strip())
    least, most = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= least <= most:
        raise UsageError(f"--elastic {text!r}: needed MIN:MAX processes, 1 <= MIN <= MAX; write for example 2:4")
    return least, most


def parse_slots(text: str) -> frozenset[int] | None:
    """The slots that a file lists: numbers and ranges; None: nothing is said, or no such list.

    >>> sorted(parse_slots("0-2, 5")), parse_slots("")
    ([0, 1, 2, 5], None)
    """
    found: set[int] = set()
    for word in re.split(r"[\s,]+", text.strip()):
        match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", word)
        if match is None:
            return None
        found |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(found) or None


def spell_slots(slots: Iterable[int]) -> str:
    """The inverse of `parse_slots`.

    >>> spell_slots([0, 1, 2, 5])
    '0-2 5'
    """
    runs: list[tuple[int, int]] = []
    for slot in sorted(slots):
        if runs and runs[-1][1] == slot - 1:
            runs[-1] = (runs[-1][0], slot)
        else:
            runs.append((slot, slot))
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


@dataclass(frozen=True, kw_only=True)
class Transition:
    """The job went on with other processes."""

    before: int
    after: int
    plan_before: str
    plan: str
    step: int
    """The last finished step, after which the others went on; 0: none was, and the job began anew."""
    cause: str
    slots: tuple[int, ...]
    """Who trains now."""
    prepared_s: float
    """Of a planned change: how long the old processes trained on, while the new ones got ready and for their step."""
    detected_s: float
    """From the death, or the end of that step, until the old processes have ended."""
    planned_s: float
    """From then until it was known who goes on under which plan; waiting for slots is part of it."""
    resharded_s: float
    """From then until all new processes have their part of the state."""
    first_step_s: float | None
    """For the first step afterwards; None: none was finished before the next change, or the end."""
    standby: bool
    """Whether the new processes stood by."""

    @property
    def seconds(self) -> float:
        """In which nobody trained."""
        return self.detected_s + self.planned_s + self.resharded_s

    def __str__(self) -> str:
        back = f"resumed at step {self.step}" if self.step else "began again"
        return (
            f"elastic: {self.before} -> {self.after} processes: {self.plan_before} -> {self.plan}, {back}, "
            f"{self.seconds:.1f} s ({self.cause})"
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "seconds": self.seconds}


@dataclass(frozen=True)
class Team:
    """Who trains: the rank r is in slot `slots[r]`."""

    slots: tuple[int, ...]
    job: Job = field(compare=False)
    plan: Plan | None = field(compare=False, default=None)

    @property
    def size(self) -> int:
        """Ranks."""
        return len(self.slots)


@dataclass(kw_only=True)
class Change:
    """A change of processes that goes on; times in ns of the monotonic clock, 0: not yet."""

    since_ns: int
    rank: int | None
    """Whose failure it is; None: it was planned."""
    cause: str
    before: Team
    prepared_ns: int = 0
    """How long the old ones trained on, after it was planned."""
    after: Team | None = None
    count: int = 0
    """Number of the copy that was taken over."""
    step: int = 0
    standby: bool = False
    halving: Mapping[str, Any] | None = None
    ended_ns: int = 0
    """When the old ones had ended."""
    chosen_ns: int = 0
    """When it was known who goes on."""
    trains_ns: int = 0
    """When all ranks had their state."""

    @property
    def is_recovery(self) -> bool:
        """After a failure the same ones go on."""
        return self.rank is not None and self.before == self.after

    def transition(self, first_step_s: float | None) -> Transition:
        """What is said of it at the end."""
        assert self.after is not None
        cause = self.cause if self.rank is None else f"rank {self.rank}: {self.cause}"
        if not self.trains_ns:
            self.trains_ns, cause = time.monotonic_ns(), f"{cause}; the job ended before all had their state"
        return Transition(
            before=self.before.size,
            after=self.after.size,
            plan_before=str(self.before.plan),
            plan=str(self.after.plan),
            step=self.step,
            cause=cause,
            slots=self.after.slots,
            prepared_s=self.prepared_ns / 1e9,
            detected_s=(self.ended_ns - self.since_ns) / 1e9,
            planned_s=(self.chosen_ns - self.ended_ns) / 1e9,
            resharded_s=(self.trains_ns - self.chosen_ns) / 1e9,
            first_step_s=first_step_s,
            standby=self.standby,
        )


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """The policy of a job whose number of processes changes."""

    least: int
    most: int
    own: Plan
    """The plan that was given, for its own number of processes; see `plan_for`."""
    known: Known = field(default_factory=Known)
    arguments: Callable[[Plan], tuple[str, ...]]
    """The target's arguments under a plan."""
    devices: Path | None = None
    """The file that lists the slots; read whenever it changes, and need not exist."""
    failures: int = 2
    """A slot is left out after so many failures; see `APART`."""
    wait_s: float = 300.0
    """With fewer than `least` slots: how long the job waits for more."""
    tell: Callable[[Transition], None] = print
    chosen: Callable[[Plan], None] | None = None
    """Gets the plan of those who train, once they have finished a step: before, a start may still be refused."""
    note: Callable[[str], None] = print
    """Gets a line on everything else."""


class Fleet:
    """The slots of a job, and what is known of them."""

    def __init__(self, job: Job, elastic: Elastic | None = None, env: Mapping[str, str] | None = None) -> None:
        """Without `elastic` there is one team for ever: that of the job.

        Args:
            job: for the number of processes that was asked for.
            elastic: the policy.
            env: the launcher's variables, for the devices that it was given.
        """
        self.job, self.elastic = job, elastic
        on_cpu = elastic is not None and elastic.known.device == "cpu"
        given = {} if on_cpu else env or {}
        self._name = next((name for name in _DEVICES if given.get(name)), _DEVICES[-1])
        self._given = [word for word in given.get(self._name, "").split(",") if word]
        """Names of the devices that the job may use; empty: all."""
        self._listed = frozenset(range(job.nproc))
        self._stamp: tuple[int, int, int] | None = None
        self._refused = ""
        self._failures: dict[int, tuple[int, int]] = {}
        """Slot -> failures that count together, and the number of the newest copy at the last of them."""
        self.left_out: dict[int, str] = {}
        """Slots that failed too often, and how; until the file is written again."""
        self._plans: dict[int, Plan | None] = {}
        self._teams: dict[tuple[int, ...], Team] = {}

    @property
    def most(self) -> int:
        """The most processes that there can be on this host."""
        return self.elastic.most if self.elastic is not None else self.job.nproc

    @property
    def usable(self) -> list[int]:
        """Slots that are listed, have a device among those that were given, and are not left out."""
        return [slot for slot in self._there if slot not in self.left_out]

    @property
    def _there(self) -> list[int]:
        most = len(self._given) or math.inf
        return sorted(slot for slot in self._listed if slot < most)

    def team(self) -> Team | None:
        """Who should train now: as many as a legal plan can use; None: fewer than the least, or no plan for them.

        Cost: a look at the file's time; the first time for a number of processes, `plan_for`.
        """
        if self.elastic is None:
            return self._team(tuple(range(self.job.world)), None)
        self._look()
        return self._largest(self.elastic, self.usable[: self.elastic.most], self.elastic.least)

    def rest(self) -> Team | None:
        """With fewer than the least: who can save what others have trained; None: there is no plan for them.

        Where no slot can be used, one that was left out may still do for that.
        """
        assert self.elastic is not None
        return self._largest(self.elastic, (self.usable or self._there)[: self.elastic.most], 1)

    def next_team(self, active: Team) -> Team | None:
        """Who should stand by while a team trains: who should train; or who would after the next failure."""
        team, elastic = self.team(), self.elastic
        if team is None or elastic is None or team != active or elastic.failures > 1:
            return team
        return self._largest(elastic, list(team.slots[:-1]), elastic.least) or team

    def too_few(self, elastic: Elastic, cause: str, wait_s: float) -> str:
        """What is wrong when nobody can train."""
        usable = self.usable
        out = "; ".join(f"slot {slot} is left out ({why})" for slot, why in self.left_out.items()) or cause
        if len(usable) >= elastic.least:
            found = f"no legal plan of the same maths that fits {elastic.least} to {len(usable)} processes"
        else:
            found = f"{len(usable)} slots that can be used ({spell_slots(usable) or 'none'}), needed {elastic.least}"
        waited = f"waited {wait_s:g} s for {elastic.devices} to list more; " if wait_s else ""
        return (
            f"--elastic {elastic.least}:{elastic.most} with the plan `{elastic.own}`: found {found}; {out}; {waited}"
            "start again where more can be used, or with a lower minimum: the job goes on from its last checkpoint"
        )

    def _largest(self, elastic: Elastic, usable: list[int], least: int) -> Team | None:
        """As many of these slots as a legal plan can use."""
        for size in range(len(usable), least - 1, -1):
            if size not in self._plans:
                self._plans[size] = plan_for(elastic.own, size, elastic.known)
            plan = self._plans[size]
            if plan is not None:
                return self._team(tuple(usable[:size]), plan)
        return None

    def fail(self, slot: int, why: str, copies: int) -> bool:
        """Count a failure; True when the slot is left out from now on.

        Args:
            slot: whose process failed.
            why: how.
            copies: number of the newest copy of the state: it grows by one per finished step.
        """
        if self.elastic is None:
            return False
        before, at = self._failures.get(slot, (0, copies))
        number = before + 1 if copies - at < APART else 1
        self._failures[slot] = (number, copies)
        if number >= self.elastic.failures:
            self.left_out[slot] = why
            del self._failures[slot]
        return slot in self.left_out

    def _look(self) -> None:
        """Read the file when it was written since the last look."""
        assert self.elastic is not None
        path = self.elastic.devices
        try:
            found = path.stat() if path is not None else None
            stamp = (found.st_mtime_ns, found.st_ino, found.st_size) if found is not None else None
            if path is None or stamp == self._stamp:
                return
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:  # not there, or for a moment not readable: nothing new is said
            return
        slots = parse_slots(text)
        if slots is None:  # as when it is just being written; looked at again
            if text.strip() and text != self._refused:
                self._refused = text
                self.elastic.note(
                    f"elastic: {path}: found {text.strip()[:80]!r}, needed slots such as `0-3` or `0 2 3`; unchanged"
                )
            return
        self._stamp, self._listed = stamp, slots
        beyond = [slot for slot in slots if self._given and slot >= len(self._given)]
        if beyond:
            self.elastic.note(
                f"elastic: {path}: found slots {spell_slots(beyond)}, which have no device: {self._name} is "
                f"{','.join(self._given)}, for slots {spell_slots(range(len(self._given)))}; only those are used"
            )
        self.left_out.clear()
        self._failures.clear()

    def _team(self, slots: tuple[int, ...], plan: Plan | None) -> Team:
        if slots not in self._teams:
            job = self.job
            if self.elastic is not None and plan is not None:
                environment = {**job.environment, **_visible(slots, self._name, self._given)}
                job = replace(job, nproc=len(slots), args=self.elastic.arguments(plan), environment=environment)
            self._teams[slots] = Team(slots, job, plan)
        return self._teams[slots]


def _visible(slots: tuple[int, ...], name: str, given: Sequence[str]) -> dict[str, str]:
    """What shows a process the devices of these slots as 0, 1, ...; nothing where they are the first ones anyway.

    >>> _visible((0, 2), "HIP_VISIBLE_DEVICES", ["4", "5", "6"]), _visible((0, 2), "CUDA_VISIBLE_DEVICES", [])
    ({'HIP_VISIBLE_DEVICES': '4,6'}, {'CUDA_VISIBLE_DEVICES': '0,2'})
    """
    if slots == tuple(range(len(slots))):
        return {}
    return {name: ",".join(given[slot] if given else str(slot) for slot in slots)}
