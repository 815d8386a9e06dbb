"""`Supervisor`: the ranks of a job, which goes on when some die, or when their number changes.

After each step every rank copies its part of the state into memory that this process holds (`train/kept/mirror.py`).
When a rank dies the others are ended too: what they were doing cannot be finished, and groups, wrappers and kernels of
an abandoned step cannot be trusted. Their state is not lost: a new set of processes takes the newest copy that all had
made, and tries the step again with the same samples and randomness. To be fast the new set stands by: it was forked
while the old one trained, has run the script up to its first step, with process groups of its own, and waits.

Under `--elastic` the new set may have another number of processes and another plan (`elastic.py`): the copy says where
each part lies in its whole tensor, so any set can take it over.

On several hosts each has its memory and its fork server; the first one decides (`node.py`, `there.py`). A host that is
lost takes its part of the state with it, and ends the job.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from shardwise.errors import ConfigError, ExitCode, LaunchError
from shardwise.launch.elastic.slots import Change, Fleet, Team, spell_slots
from shardwise.launch.forking.forks import POLL_S
from shardwise.launch.local import SETTLE_S, Failure, Leavers, Outcome, death, first_failure, outcome_of, patience_s
from shardwise.launch.nodes.worlds import World, Worlds
from shardwise.launch.recovery import Bounds, Recovering, Recovery
from shardwise.launch.stopping import STOP_SIGNALS, Stopping
from shardwise.train.kept.outliving import Copy

_SETTLE_S = 0.3
"""After a rank ended without an exception of its own: how long another one has to be seen killed."""
_STANDBYS = 3
"""Sets in a row that failed before they were ready to stand by, or then, before it is given up."""
_SAVE_S = 60.0
"""Where nobody is to train on: how long those who trained get to save."""
_SAVED = frozenset((ExitCode.OK, ExitCode.INTERRUPTED, ExitCode.PREEMPTED, ExitCode.TERMINATED))
"""Status of ranks that have saved what they had, where there is a store."""
_CLOSE_S = 0.002
"""How often is looked for the end of a step after which another set shall train."""


class Supervisor:
    """Runs worlds through fork servers; made by `run_recovering`."""

    def __init__(self, policy: Recovering, fleet: Fleet, worlds: Worlds, stopping: Stopping) -> None:
        self.policy, self.fleet, self.worlds, self.stopping = policy, fleet, worlds, stopping
        self._bounds = Bounds(policy)
        self._standby: World | None = None
        self._standbys_failed = 0
        self._pending: Change | None = None
        self._taken = 0
        """Number of the copy that was last taken over; 0: none was."""
        self._wished_ns = 0
        """Since when another team is wanted than the one that trains; 0: none is."""
        self._boundary = 0
        """Copies that there were when the other team was ready."""
        self._recorded: Team | None = None
        """Whose plan the run's record has."""
        self._leavers = Leavers()

    def run(self) -> Outcome:
        """Until the job has ended."""
        try:
            return self._run()
        finally:  # whatever ended it: a change that no step followed has taken place
            self._finish_change(None)

    def _run(self) -> Outcome:
        team = self._await_team("the start")
        if team is None or self.stopping.count:
            return outcome_of({}, {}, self.stopping)
        active = self._start(team)
        self.worlds.order(active, None)
        while True:
            self.worlds.poll(_CLOSE_S if self._boundary else POLL_S)
            self._tell(active)
            self._leavers.look(active.codes, active.files)
            if (active.has_ended and not active.has_failed) or self._stops(active):
                return self._end(active)
            if active.has_failed:
                since_ns = time.monotonic_ns()
                failure, killed = self._cause(active)
                if failure is None or (self.stopping.first is not None and not self._loses(active)):
                    return self._end(active)
                newest = self.worlds.bury(active)
                copies = newest.count if newest else 0
                refused = self._bounds.refuse(failure, copies=copies, killed=killed, damaged=self.worlds.damaged)
                if refused is not None:
                    return Outcome(exit_code=refused.exit_code, failure=refused)
                slot = active.team.slots[failure.rank]
                if failure.halving is not None:
                    self._drop_standby()  # its micro-batches are as large as those that did not fit
                elif self.fleet.fail(slot, failure.message, copies):
                    self._note(f"slot {slot} is left out: {failure.message}")
                change = Change(since_ns=since_ns, rank=failure.rank, cause=failure.message, before=active.team)
                change.halving = failure.halving
            elif self._is_time(active):
                slots = f"slots {spell_slots(self.fleet.usable) or 'none'}"
                now = time.monotonic_ns()
                change = Change(since_ns=now, rank=None, cause=slots, before=active.team)
                change.prepared_ns = now - self._wished_ns
                if self.fleet.team() is None:  # nobody may come back
                    self._let_save(active)
                newest = self.worlds.bury(active)
            else:
                self._stand_by(active)
                continue
            change.ended_ns, change.cause = time.monotonic_ns(), change.cause + self.worlds.damaged
            if newest is not None and not (_has_saved(active) or self._is_late or self.fleet.team()):
                active, newest = self._save_by_few(active, newest)
            if not any(active.codes.values()):  # they were at the end
                return self._end(active)
            team = self._await_team(change.cause)
            if team is None:
                return self._stopped(active, newest)
            active = self._go_on(change, team, newest)

    def _is_to_stop(self, active: World) -> bool:
        """Whether it was asked to end, and can: who took over a state could not save it before a first step."""
        has_stepped = not self._taken or self.worlds.copies(active) > self._taken
        return self.stopping.first is not None and (has_stepped or self._is_late)

    def _pass_on(self, world: World) -> None:
        """Let its ranks have the signals that the job has got."""
        if self.stopping.count > world.asked:
            world.asked = self.stopping.count
            self.worlds.signal(world, self.stopping.forward)

    def _stops(self, active: World) -> bool:
        """Whether it was asked to end, and its ranks do so without a loss: see `_loses`."""
        if not self._is_to_stop(active):
            return False
        while not (active.codes or self._is_late):
            self._pass_on(active)
            self.worlds.poll()
        return not self._loses(active)

    def _loses(self, world: World) -> bool:
        """Whether ranks that are asked to end have died before any had saved, and others can do so in their place."""
        in_order = _SAVED | {-number for number in STOP_SIGNALS}  # of a signal: before its loop, or after it
        kept = max(self._taken, self.worlds.copies(world))
        return bool(world.has_failed and kept and in_order.isdisjoint(world.codes.values()) and not self._is_late)

    @property
    def _is_late(self) -> bool:
        """Whether it was asked to end, and no time is left for it."""
        stopping, grace_s = self.stopping, self.fleet.job.signal_grace_s or math.inf
        return stopping.first is not None and (stopping.count > 1 or time.monotonic() - stopping.at > grace_s)

    def _until(self, done: Callable[[], object], seconds: float) -> None:
        """Wait for something for so long, or until it is late."""
        end = time.monotonic() + seconds
        while not done() and time.monotonic() < end and not self._is_late:
            self.worlds.poll()

    def _let_save(self, world: World) -> None:
        """Have a world finish its step, save and end, as when the job is told to; one that ends already is not told."""
        if not world.codes:
            self.worlds.signal(world, signal.SIGTERM)
        self._until(lambda: world.has_ended, self.fleet.job.signal_grace_s or _SAVE_S)

    def _save_by_few(self, last: World, copy: Copy) -> tuple[World, Copy | None]:
        """Too few are left, and who could have saved has died: those left take over the copy, for a step and a save.

        Returns: them, or the last world, where there is no plan for them; and the newest copy.
        """
        few, team, elastic = last, self.fleet.rest(), self.fleet.elastic
        newest: Copy | None = copy
        if team is not None and elastic is not None:
            self._note(f"too few are left to train; {team.size} take over, only to save")
            few = self._start(team)
            self.worlds.order(few, copy)

            def is_over() -> bool:
                return bool(few.codes) or self.worlds.copies(few) > copy.count or self.fleet.team() is not None

            self._until(is_over, max(_SAVE_S, elastic.wait_s))
            if is_over() and not few.has_failed and self.fleet.team() is None:
                self._let_save(few)
            newest = self.worlds.bury(few)
        if not _has_saved(few) and self.fleet.team() is None:
            failure = first_failure(few.codes, few.files) if few is not last else None
            why = "no plan for them" if few is last else "they died, or took too long"
            why = failure.message if failure is not None else why
            self._note(
                f"what was trained after the last checkpoint is not saved ({why}): it is in memory, and lost if this "
                "job ends before enough slots can be used; a start then goes on from that checkpoint"
            )
        return few, newest

    def _stopped(self, last: World, newest: Copy | None) -> Outcome:
        """Asked to end while nobody trains."""
        if newest is None or _has_saved(last):
            return outcome_of({}, {}, self.stopping)
        return Outcome(exit_code=ExitCode.KILLED)

    def _start(self, team: Team, *, stands_by: bool = False) -> World:
        bounds = self._bounds
        return self.worlds.start(team, stands_by=stands_by, restarts=bounds.total, halvings=bounds.halvings)

    def _drop_standby(self) -> None:
        if self._standby is not None:
            self.worlds.drop(self._standby)
            self._standby = None

    def _record_plan(self, active: World) -> None:
        """Have the plan recorded of those who have finished a step: they have loaded their state and proven it."""
        team, elastic = active.team, self.fleet.elastic
        if elastic is None or elastic.chosen is None or team is self._recorded or team.plan is None:
            return
        if self.worlds.copies(active) > self._taken:
            self._recorded = team
            self._report(partial(elastic.chosen, team.plan), f"the plan {team.plan}")

    def _report(self, tell: Callable[[], None], what: str) -> None:
        """Tell of something; that it cannot be written, as on a full disk, is no reason to end the job."""
        try:
            tell()
        except (OSError, ConfigError) as error:
            self._note(f"{what} is not recorded: {error}")

    def _note(self, text: str) -> None:
        if self.fleet.elastic is not None:
            with suppress(OSError):  # nobody reads it
                self.fleet.elastic.note(f"elastic: {text}")

    def _cause(self, world: World) -> tuple[Failure | None, bool]:
        """The first failure, and whether a process was killed; None for what recovery does not help against.

        Errors that Shardwise raises on purpose, and `sys.exit` with a status, 0 too while others train, would come
        again; but for a rank that ran out of memory, and asks for smaller micro-batches, and for whoever stood by: it
        got ready while others trained, and saved. Processes that are started anew show whether it comes again.
        """
        pending, since = self._pending, time.monotonic()
        stood_by = pending is not None and pending.standby and not pending.trains_ns
        while True:
            failure = first_failure(world.codes, world.files)
            if failure is not None and (failure.halving is not None or failure.killed):
                return failure, failure.killed
            killed = next(((rank, code) for rank, code in world.codes.items() if code < 0), None)
            if killed is not None:
                text = death(killed[1])
                return Failure(rank=killed[0], message=text, exit_code=ExitCode.RANK_FAILED), True
            echo = failure if failure is not None and failure.is_echo else None
            if failure is not None and echo is None and (failure.traceback or stood_by):
                return failure, stood_by
            if time.monotonic() - since > (SETTLE_S if echo else _SETTLE_S):
                return echo and echo.traced_to(world.files.keys() - world.codes.keys()), False
            self.worlds.poll(0.02)

    def _await_team(self, cause: str) -> Team | None:
        """Who shall train now, when there are enough; None: asked to stop meanwhile.

        Raises:
            LaunchError: there were not enough in time, or no plan for so few.
        """
        team, elastic = self.fleet.team(), self.fleet.elastic
        if team is not None or elastic is None:
            return team
        wait_s = elastic.wait_s if elastic.devices is not None else 0.0
        usable, end = self.fleet.usable, time.monotonic() + wait_s
        if wait_s:
            self._note(
                f"{len(usable)} slots can be used, and at least {elastic.least} are needed: nobody trains; waiting "
                f"up to {wait_s:g} s for {elastic.devices} to list more ({cause})"
            )
        while team is None and time.monotonic() < end:
            if self.stopping.first is not None:
                return None
            self.worlds.poll()
            team = self.fleet.team()
        if team is None and self.stopping.first is None:
            raise LaunchError(self.fleet.too_few(elastic, cause, wait_s))
        return team

    def _go_on(self, change: Change, team: Team, newest: Copy | None) -> World:
        """Let a new world take over the newest copy: the one that stands by, if it is of this team."""
        change.chosen_ns = time.monotonic_ns()
        world, self._standby = self._standby, None
        if world is not None and (newest is None or world.codes or world.team.size != team.size):  # it waits for a copy
            self.worlds.drop(world)
            world = None
        change.standby = world is not None
        world = world or self._start(team)
        world.team = team  # where processes stand by, on CPUs, one slot is as good as another
        self.worlds.order(world, newest)
        if self._pending is not None and self._pending.trains_ns:
            self._finish_change(None)
        elif self._pending is not None:  # another one died before the last change was complete
            change.since_ns, change.before = self._pending.since_ns, self._pending.before
            change.halving = change.halving or self._pending.halving
        if newest is not None:
            change.count, change.step = newest.count, newest.step
        self._taken = change.count
        change.after, self._pending, self._wished_ns, self._boundary = team, change, 0, 0
        return world

    def _tell(self, active: World) -> None:
        """Report a change of processes when it is complete; of another number of them, after their first step."""
        self._record_plan(active)
        pending = self._pending
        if pending is None:
            return
        if not pending.trains_ns:
            since = self.worlds.trains_since(active)
            if since is None:
                return
            pending.trains_ns = max(since)
            if pending.rank is not None and pending.before == pending.after:
                self._pending = None
                recovery = Recovery(
                    number=self._bounds.total,
                    rank=pending.rank,
                    cause=pending.cause,
                    step=pending.step,
                    standby=pending.standby,
                    seconds=(pending.trains_ns - pending.since_ns) / 1e9,
                    halving=pending.halving,
                )
                self._report(partial(self.policy.tell, recovery), "this recovery")
        elif self.worlds.copies(active) > pending.count:
            self._finish_change((time.monotonic_ns() - pending.trains_ns) / 1e9)

    def _finish_change(self, first_step_s: float | None) -> None:
        """Tell of a change that is complete, or that the job ends with; to the same team, too, after a pause."""
        pending, self._pending, elastic = self._pending, None, self.fleet.elastic
        if pending is None or pending.after is None or elastic is None or pending.is_recovery:
            return
        self._report(partial(elastic.tell, pending.transition(first_step_s)), "this change")

    def _is_time(self, active: World) -> bool:
        """Whether another team is to train now: it is ready, and all ranks have just made a copy after a step."""
        team = self.fleet.team()
        if team == active.team or self._pending is not None:
            self._wished_ns = self._boundary = 0
            return False
        self._wished_ns = self._wished_ns or time.monotonic_ns()
        copies, standby = self.worlds.copies(active), self._standby
        waits = team is not None and self._keeps_standby
        if waits and team is not None:
            ready = standby is not None and standby.team.size == team.size and self.worlds.is_ready(standby)
            copies *= ready
        if not copies:
            self._boundary = 0
            return False
        self._boundary = self._boundary or copies
        return copies > self._boundary

    @property
    def _keeps_standby(self) -> bool:
        return self.policy.standby and self._standbys_failed < _STANDBYS

    def _stand_by(self, active: World) -> None:
        """Have a second world ready once the first one trains; a failing one is replaced, a few times."""
        team, standby = self.fleet.next_team(active.team), self._standby
        if standby is not None and (standby.codes or team is None or standby.team.size != team.size):
            self._drop_standby()
            self._standbys_failed += bool(standby.codes)
        if self._standby is not None:
            self.worlds.rest(self._standby)
            self._standbys_failed *= not self._standby.is_stopped
        if not self._keeps_standby or self._standby is not None or team is None or self._pending is not None:
            return
        if self.worlds.copies(active) > 0:
            self._standby = self._start(team, stands_by=True)

    def _end(self, active: World) -> Outcome:
        """No recovery from here on: the ranks end in order, or within the time that the job gives them."""
        self._drop_standby()
        job, stopping, told = self.fleet.job, self.stopping, frozenset[int]()
        since = time.monotonic()
        while stopping.first is None and not active.has_ended:
            if time.monotonic() - since > patience_s(job, active.codes, active.files):
                break
            self.worlds.poll()
        if stopping.first is None:
            told = frozenset(active.files) - active.codes.keys()
            self.worlds.signal(active, signal.SIGTERM)
            self.worlds.wait(active, job.grace_s)
        first_end: float | None = None
        while not active.has_ended:
            if active.codes and first_end is None:
                first_end = time.monotonic()
            over = first_end is not None and time.monotonic() - first_end > job.stop_grace_s
            if not self._is_late:  # else some would die of the signal, as before there is anything to save
                self._pass_on(active)
            if stopping.first is None or over or self._is_late:
                stopping.is_late = stopping.is_late or self._is_late
                self.worlds.signal(active, signal.SIGKILL)
            self.worlds.poll()
        return outcome_of(active.codes, active.files, stopping, told)


def _has_saved(world: World) -> bool:
    """Whether what its ranks had is saved: one that ended in order did so after all had, whatever others died of."""
    return world.has_ended and not _SAVED.isdisjoint(world.codes.values())
