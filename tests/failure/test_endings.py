"""How a job ends, and what is said of it: codes on which ranks agree, a rank that leaves, files that cannot be written.

The scripts import no torch where they need none: a rank starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli.run import recovery
from shardwise.errors import ConfigError, ExitCode, UsageError
from shardwise.journal import read_records
from shardwise.launch import local
from shardwise.launch.elastic.slots import Change, Elastic, Fleet, Team, Transition
from shardwise.launch.job import Job
from shardwise.launch.local import Leavers, Outcome, outcome_of, wait_for
from shardwise.launch.nodes.worlds import World, Worlds
from shardwise.launch.recovery import Recovering, Recovery
from shardwise.launch.stopping import Stopping
from shardwise.launch.supervisor import Supervisor
from shardwise.plan.plan import Plan
from shardwise.records import say
from shardwise.train import metrics
from shardwise.train.kept.outliving import Copy
from shardwise.train.kept.rundir import RunDir
from shardwise.train.metrics import MetricsLog
from tests.failure import recovering
from tests.failure.test_recovery import start as start_recovering
from tests.failure.test_run_verb import finish, start

SLOW = """
import atexit, os, sys, time
if os.environ["RANK"] == "1":
    atexit.register(time.sleep, 1)
sys.exit({code})
"""
STUCK = """
import os, signal, sys, time
if os.environ["RANK"] == "1":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit({then}))
    time.sleep(60)
time.sleep(0.5)
with open({out!r}, "w") as file:
    file.write(str(time.monotonic()))
sys.exit({code})
"""
ECHO = "RuntimeError('[gloo/transport/tcp/pair.cc:1] Connection closed by peer [127.0.0.1]:1')"
LEAVES = f"""
import atexit, os, sys, time
if os.environ["RANK"] == "1":
    atexit.register(time.sleep, {{slow_s}})  # as Python, when it takes torch apart
    sys.exit(0)
time.sleep(0.1)
raise {ECHO}
"""

LEFT = (
    "shardwise: rank 1 failed: the script ended with status 0 while the others were still training; every rank must "
    "make as many steps: give each as many batches (sw.loader does), and let all leave a loop together\n"
)


@pytest.mark.share(4)
@pytest.mark.parametrize("code", [ExitCode.NON_FINITE, ExitCode.SPIKE])
@pytest.mark.parametrize("how", ["fork", "exec"])
def test_ranks_that_end_in_agreement_may_take_their_time(tmp_path: Path, code: ExitCode, how: str) -> None:
    script = ("import torch\n" if how == "fork" else "") + SLOW.format(code=code.value)
    found, _, err = finish(start(tmp_path, script, "--nproc", "3", SHARDWISE_START=how))
    assert found == code, err
    assert err.startswith(f"shardwise: all ranks ended with status {code:d}: a ") and err.count("\n") == 1
    assert code != ExitCode.NON_FINITE or "more often in a row than `skip` leaves out (max_skips)" in err


class Scripted:
    """Ranks that end at given polls; and when they are told to."""

    def __init__(self, ends: dict[int, tuple[int, int]], told: int = -signal.SIGTERM) -> None:
        self.ends, self.told, self.polls = ends, told, 0
        self.sent: list[signal.Signals] = []

    def codes(self, wait_s: float) -> dict[int, int]:
        self.polls += 1
        time.sleep(0.01)
        found = {rank: code for rank, (at, code) in self.ends.items() if at <= self.polls}
        return found | (dict.fromkeys(set(range(3)) - found.keys(), self.told) if self.sent else {})

    def send(self, number: signal.Signals) -> None:
        self.sent.append(number)


def ended(folder: Path, ranks: Scripted, **policy: float) -> Outcome:
    files = {rank: folder / f"error-{rank}" for rank in range(3)}
    return wait_for(Job(target=__file__, nproc=3, **policy), ranks, files, Stopping())


def test_who_is_told_to_end_does_not_change_the_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "SETTLE_S", 0.3)  # of which one passes in each case
    hangs = Scripted({0: (1, 5), 1: (2, 5)})
    assert ended(tmp_path, hangs, stop_grace_s=0.1) == Outcome(exit_code=ExitCode.NON_FINITE)
    assert hangs.polls > 5  # the grace was given
    for told in (-signal.SIGTERM, -signal.SIGKILL, 143, 1, 0):
        outcome = ended(tmp_path, Scripted({1: (1, 7)}, told))
        assert outcome.failure is not None, told
        assert (outcome.failure.rank, outcome.exit_code) == (1, ExitCode.RANK_FAILED)
        assert outcome.failure.message == "the script ended with status 7"
    differ = ended(tmp_path, Scripted({0: (1, 5), 1: (2, 9), 2: (3, 5)}))
    assert differ.exit_code == ExitCode.RANK_FAILED


def test_another_code_is_not_waited_for(tmp_path: Path) -> None:
    out = tmp_path / "left-at"
    code, _, err = finish(start(tmp_path, STUCK.format(code=2, then=2, out=str(out)), "--nproc", "2"))
    assert code == ExitCode.RANK_FAILED and time.monotonic() - float(out.read_text()) < 15, err  # the grace is 20 s
    assert err == "shardwise: rank 0 failed: the script ended with status 2\n"


def test_ranks_that_end_one_after_the_other_with_a_code_of_the_table_agree(tmp_path: Path) -> None:
    """`sys.exit(11)` of a script: none of them is told to end meanwhile."""
    agree = Scripted({0: (1, 11), 1: (8, 11), 2: (15, 11)})
    assert ended(tmp_path, agree) == Outcome(exit_code=ExitCode.REPLICAS_DIFFER) and not agree.sent
    assert ended(tmp_path, Scripted({0: (1, 11), 1: (8, 11), 2: (15, 7)})).exit_code == ExitCode.RANK_FAILED


@pytest.mark.share(2)
@pytest.mark.parametrize("slow_s", [0, 0.7])
def test_a_rank_that_leaves_with_status_0_is_named(tmp_path: Path, slow_s: float) -> None:
    code, _, err = finish(start(tmp_path, LEAVES.format(slow_s=slow_s), "--nproc", "3"))
    assert code == ExitCode.RANK_FAILED
    assert err == LEFT


def test_a_rank_that_was_killed_comes_before_one_that_left(tmp_path: Path) -> None:
    files = {rank: tmp_path / f"error-{rank}" for rank in range(3)}
    echo = {"rank": 0, "type": "RuntimeError", "message": "Connection closed by peer", "known": False, "exit_code": 6}
    files[0].write_text(json.dumps(echo | {"halving": None, "traceback": "...", "time_s": 1.0}))
    for codes, told, rank, text in (
        ({1: 0, 0: 6, 2: -9}, (), 2, "killed by SIGKILL"),
        ({1: 0, 0: 6, 2: 0}, (), 1, "ended with status 0 while"),
        ({0: 6, 1: -15, 2: -15}, (1, 2), 0, "Connection closed"),
        ({0: 6, 1: 130, 2: -15}, (2,), 1, "ended with status 130"),  # a KeyboardInterrupt of one rank
        ({0: 6, 1: -15, 2: -15}, (1,), 2, "killed by SIGTERM"),  # by somebody else: rank 0 says who it lost
    ):
        failure = outcome_of(codes, files, Stopping(), frozenset(told)).failure
        assert failure is not None and failure.rank == rank and text in failure.message
    asked = Stopping([(0.0, signal.SIGTERM)])
    assert outcome_of({1: 0, 0: 6, 2: 143}, files, asked) == Outcome(exit_code=ExitCode.TERMINATED)
    assert outcome_of({0: 6, 1: -15, 2: -15}, files, asked) == Outcome(exit_code=ExitCode.TERMINATED)
    for code in (-signal.SIGKILL, -signal.SIGSEGV):  # nobody could save
        assert outcome_of({2: code, 0: 6, 1: 6}, files, asked) == Outcome(exit_code=ExitCode.KILLED)
        assert outcome_of({1: 143, 0: 143, 2: code}, files, asked) == Outcome(exit_code=ExitCode.TERMINATED)
    alone = echo | {"message": "2 of 3 joined", "known": True, "exit_code": 3}
    files[0].write_text(json.dumps(alone | {"halving": None, "traceback": "", "time_s": 1.0}))
    failure = outcome_of({1: 0, 0: 3, 2: -15}, files, Stopping()).failure
    assert failure is not None and failure.exit_code == ExitCode.LAUNCH
    assert failure.message == "2 of 3 joined (rank 1 had ended with status 0 before)"


def test_whom_the_others_waited_for_is_named_and_not_who_gave_up(tmp_path: Path) -> None:
    files = {rank: tmp_path / f"rank-{rank}.json" for rank in range(3)}
    text = "[/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 6500ms for recv operation to complete"
    record = {"rank": 0, "time_s": 1.0, "type": "RuntimeError", "message": text, "exit_code": 6, "known": False}
    files[0].write_text(json.dumps(record | {"halving": None, "traceback": "deep in torch"}))
    failure = outcome_of({0: 6, 1: -9, 2: -15}, files, Stopping(), frozenset({1, 2})).failure
    assert failure is not None and (failure.rank, failure.exit_code, failure.traceback) == (1, 6, "")
    assert "rank 0 waited 6.5 s" in failure.message and "still ran then, as did 2" in failure.message
    failure = outcome_of({0: 6}, {0: files[0]}, Stopping()).failure  # nobody ran on: each waited for another
    assert failure is not None and failure.rank == 0 and failure.traceback


def test_who_still_runs_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert local.LEFT_S == 60
    monkeypatch.setattr(local, "LEFT_S", 0.05)
    assert ended(tmp_path, Scripted({1: (1, 0), 0: (30, 0), 2: (30, 0)})) == Outcome(exit_code=ExitCode.OK)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("shardwise: of the ranks 1 ended with status 0, and 0 2 still run 0.05 s later; if these")
    quiet = Leavers()
    for codes in ({}, {0: 0}, {0: 0, 1: 6}):
        quiet.look(codes, range(3))
    time.sleep(0.1)
    quiet.look({0: 0, 1: 6}, range(3))
    assert not capfd.readouterr().err


BREAKS = (
    Path(recovering.__file__)
    .read_text()
    .replace(
        "                drawn =",
        "                if m.step == 3 and mesh.rank == 1:\n                    break\n                drawn =",
    )
)


@pytest.mark.share(2)
@pytest.mark.parametrize("words", [(), ("--elastic", "1:2", "--slot-failures", "1")], ids=["recover", "elastic"])
def test_leaving_is_not_recovered_from(tmp_path: Path, words: tuple[str, ...]) -> None:
    script = tmp_path / "breaks.py"
    script.write_text(BREAKS)
    code, _, err = finish(start_recovering(tmp_path, script, "dp2", *words, "--", str(tmp_path), "9", PACE_S="0.1"))
    assert code == ExitCode.RANK_FAILED
    assert err == LEFT
    assert not (tmp_path / "events").exists()


def supervised(told: list[Transition], folder: Path) -> Supervisor:
    """One of a job of three under `--elastic 1:3`, which runs nothing."""
    elastic = Elastic(least=1, most=3, own=Plan.parse("dp3"), arguments=lambda _: (), tell=told.append)
    job = Job(target=__file__, nproc=3)
    return Supervisor(Recovering(elastic=elastic), Fleet(job, elastic), Worlds([], folder), Stopping())


@pytest.mark.parametrize("trains_ns", [0, 7_000_000_000])
def test_a_change_that_the_end_overtakes_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trains_ns: int
) -> None:
    told = list[Transition]()
    supervisor = supervised(told, tmp_path)
    job = supervisor.fleet.job
    change = Change(since_ns=5_000_000_000, rank=2, cause="killed", before=Team((0, 1, 2), job), trains_ns=trains_ns)
    change.after, change.ended_ns, change.chosen_ns = Team((0, 1), job), 6_000_000_000, 6_000_000_000

    def too_few(_: Supervisor) -> Outcome:
        supervisor._pending = change
        raise KeyError("too few")

    monkeypatch.setattr(Supervisor, "_run", too_few)
    with pytest.raises(KeyError):
        supervisor.run()
    (found,) = told
    assert (found.before, found.after, found.first_step_s) == (3, 2, None)
    never = "; the job ended before all had their state"
    assert found.cause == "rank 2: killed" + ("" if trains_ns else never)
    assert found.resharded_s == 1.0 if trains_ns else found.resharded_s > 0


def test_the_supervisor_gives_ranks_that_agree_their_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor, sent = supervised([], tmp_path), list[int]()
    team = Team((0, 1, 2), supervisor.fleet.job)
    world = World(1, team, {rank: tmp_path / f"error-{rank}" for rank in range(3)}, False, codes={0: 5})
    due = time.monotonic() + 0.5

    def poll(_: Worlds, wait_s: float = 0.0) -> None:
        time.sleep(0.02)
        if time.monotonic() > due:
            world.codes |= {1: 5, 2: 5}

    monkeypatch.setattr(Worlds, "poll", poll)
    monkeypatch.setattr(Worlds, "signal", lambda *_: sent.append(len(world.codes)))
    assert supervisor._end(world) == Outcome(exit_code=ExitCode.NON_FINITE)
    assert not [ended for ended in sent if ended < 3]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--events", "e"], "--events: found neither --recover nor"),
        (["--max-recoveries", "9"], "--max-recoveries: found neither --recover nor"),
        (["--recover", "--events", "none/e"], "--events none/e: cannot be written (No such file or directory)"),
        (["--recover", "--events", "."], "--events .: cannot be written (Is a directory)"),
    ],
)
def test_a_record_that_would_not_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = finish(start(tmp_path, "print('ran')", *words, "--nproc", "2"))
    assert (code, out) == (ExitCode.USAGE, "")
    assert text in err and not (tmp_path / "e").exists()


def full(**_: Any) -> None:
    raise OSError(28, os.strerror(28))


def test_an_event_that_cannot_be_written_ends_no_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    policy = recovery(port=0, tell=full)
    policy.tell(Recovery(number=1, rank=0, cause="killed", step=3, standby=True, seconds=0.1))
    assert "this recovery is not recorded: [Errno 28] No space left" in capfd.readouterr().err
    notes = list[str]()
    elastic = Elastic(
        least=1, most=3, own=Plan.parse("dp3"), arguments=lambda _: (), tell=lambda _: full(), note=notes.append
    )
    job = Job(target=__file__, nproc=3)
    supervisor = Supervisor(Recovering(elastic=elastic), Fleet(job, elastic), Worlds([], tmp_path), Stopping())
    change = Change(since_ns=1, rank=None, cause="slots 0", before=Team((0, 1), job), trains_ns=2)
    change.after, supervisor._pending = Team((0,), job), change
    supervisor._finish_change(None)
    assert notes == ["elastic: this change is not recorded: [Errno 28] No space left on device"]


def elastic_supervisor(folder: Path, **of_elastic: Any) -> tuple[Supervisor, Team]:
    """One of two ranks of a job of two, and who they are."""
    elastic = Elastic(least=2, most=2, own=Plan.parse("dp2"), arguments=lambda _: (), **of_elastic)
    fleet = Fleet(Job(target=__file__, nproc=2), elastic)
    team = fleet.team()
    assert team is not None
    return Supervisor(Recovering(elastic=elastic), fleet, Worlds([], folder), Stopping()), team


def test_a_plan_is_recorded_after_a_step_and_a_full_disk_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, notes, made = list[str](), list[str](), 0

    def record(plan: Plan) -> None:
        chosen.append(str(plan))
        raise ConfigError("plan.toml: cannot be written (No space left on device)")

    supervisor, team = elastic_supervisor(tmp_path, chosen=record, note=notes.append)
    monkeypatch.setattr(Worlds, "copies", lambda *_: made)
    world, supervisor._taken = World(1, team, {}, False), 7
    for made in (0, 7, 8, 9):
        supervisor._tell(world)
        assert chosen == ["dp2 / fp32"] * (made > 7)  # once
    assert notes == ["elastic: the plan dp2 / fp32 is not recorded: " + str(ConfigError("plan.toml: cannot be written "
                     "(No space left on device)"))]  # fmt: skip


def test_a_pause_is_told_of_though_the_same_go_on(tmp_path: Path) -> None:
    told = list[Transition]()
    supervisor, team = elastic_supervisor(tmp_path, tell=told.append)
    for rank in (None, 1):  # the second: a recovery, which was told of when all had their state
        supervisor._pending = Change(
            since_ns=1, rank=rank, cause="slots 0", before=team, after=team, trains_ns=2, step=9
        )
        supervisor._finish_change(0.1)
    assert [(t.before, t.after, t.step, t.cause) for t in told] == [(2, 2, 9, "slots 0")]


def test_who_is_ended_while_nobody_trains_has_the_code_of_what_was_saved(tmp_path: Path) -> None:
    supervisor, team = elastic_supervisor(tmp_path)
    supervisor.stopping.hear(signal.SIGTERM, 1)
    files, copy = {rank: tmp_path / f"error-{rank}" for rank in range(2)}, Copy(1, 2, 1)
    for codes, newest, code in (
        ({0: 143, 1: 143}, copy, ExitCode.TERMINATED),
        ({0: 143, 1: -9}, copy, ExitCode.TERMINATED),  # who ended in order did so after all had saved
        ({0: 6, 1: -9}, copy, ExitCode.KILLED),
        ({0: -9, 1: -9}, None, ExitCode.TERMINATED),  # no step was finished
    ):
        assert supervisor._stopped(World(1, team, files, False, codes=codes), newest).exit_code == code


def test_who_is_late_dies_of_no_signal_that_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that take over, and do not listen yet, would die of it, with the code of what is saved."""

    def die(_worlds: Worlds, world: World, number: signal.Signals) -> None:
        world.codes = world.codes or dict.fromkeys(world.files, -number)

    monkeypatch.setattr(Worlds, "signal", die)
    supervisor, team = elastic_supervisor(tmp_path)
    supervisor.fleet.job = replace(supervisor.fleet.job, signal_grace_s=0.1)
    supervisor.stopping.hear(signal.SIGTERM, 1)
    supervisor.stopping.came[0] = (supervisor.stopping.at - 1, signal.SIGTERM)
    world = World(1, team, {rank: tmp_path / f"error-{rank}" for rank in range(2)}, False)
    assert supervisor._end(world) == Outcome(exit_code=ExitCode.KILLED)


@pytest.mark.parametrize("how", ["nobody reads", "closed", "not there"])
def test_what_cannot_be_said_ends_nothing(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    read, write = os.pipe()
    os.close(read)
    stream = os.fdopen(write, "w")
    monkeypatch.setattr("sys.stderr", None if how == "not there" else stream)
    if how == "closed":
        stream.close()
    told = list[dict[str, Any]]()
    recovery(port=0, tell=lambda **facts: told.append(facts)).tell(
        Recovery(number=1, rank=0, cause="killed", step=3, standby=True, seconds=0.1)
    )
    say("the same")
    assert [facts["step"] for facts in told] == [3]
    with contextlib.suppress(OSError):
        stream.close()


def test_a_rewrite_that_is_cut_off_loses_no_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    text = "".join(f'{{"step": {step}}}\n' for step in (1, 4, 2, 3, 4))  # it has gone back: they are no first ones
    path.write_text(text)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "replace", killed)
        MetricsLog(path, after_step=2)
    assert path.read_text() == text
    with MetricsLog(path, after_step=2) as log:
        log.write({"step": 3, "loss": float("nan")})
    assert read_records(path) == [{"step": 1}, {"step": 2}, {"step": 3, "loss": None}]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("steps", "kept"), [((1, 2, 3, 4), [1, 2]), ((1, 3, 2, 3), [1, 3, 2, 3])])
def test_metrics_are_cut_where_there_is_no_room(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    steps: tuple[int, ...],
    kept: list[int],
) -> None:
    """The first records stay without a byte more; where others must, all do."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in steps) + '{"step"')

    def no_room(*_: object, **__: object) -> None:
        raise UsageError("no room")

    monkeypatch.setattr(metrics, "write_text", no_room)
    with MetricsLog(path, after_step=2) as log:
        log.write({"step": 5})
    assert [row["step"] for row in map(json.loads, path.read_text().splitlines())] == [*kept, 5]
    assert ("stay in the metrics: no room; training goes on" in capfd.readouterr().err) == (kept == list(steps))


def test_metrics_on_a_full_disk_end_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"

    class Full:
        """A file that takes a few bytes of two records, and no more."""

        def __init__(self, file: Any) -> None:
            self.file, self.name, self.full = file, file.name, True

        def write(self, line: bytes) -> int:
            if self.full and len(line) <= 8:
                raise OSError(28, os.strerror(28))
            return int(self.file.write(line[:8] if self.full else line))

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    with MetricsLog(path) as log:
        log.write({"step": 1})
        log._file = disk = Full(log._file)
        log.write({"step": 22})
        log.write({"step": 33})
        disk.full = False
        log.write({"step": 4})
    assert read_records(path) == [{"step": 1}, {"step": 4}]
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("shardwise: metrics are not written: No space left on device (")


def test_records_that_are_damaged_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A crash of the machine leaves half a line, which goes; what else is no record is somebody's, and stays."""
    path = tmp_path / "events.jsonl"
    run = RunDir(tmp_path)
    run.add_event("weights", asked="a")
    whole = path.read_bytes()
    for torn in (b'{"event": "wei', b'{"event": "wei\0\0', b"\0\0"):
        path.write_bytes(whole + torn)
        assert len(run.read_events("weights")) == 1
        run.add_event("weights", asked="b")  # the start after that, and the one after it, go on
        assert path.read_bytes().startswith(whole + b"{") and len(run.read_events("weights")) == 2
        assert "events.jsonl: its last line was half written" in capfd.readouterr().err
    for foreign in (b"\xff", b"[1]"):
        path.write_bytes(whole + foreign)
        run.add_event("weights", asked="b")
        assert path.read_bytes().startswith(whole + foreign + b"\n{")
        with pytest.raises(UsageError, match=r"events.jsonl:2: found no JSON record .*remove the line"):
            run.read_events("weights")
    path.write_bytes(whole.rstrip(b"\n"))  # an editor that ends no line
    run.add_event("weights", asked="b")
    assert len(run.read_events("weights")) == 2
    path.unlink()
    path.mkdir()
    with pytest.raises(UsageError, match="cannot be read"):
        run.read_events("weights")


def test_a_board_that_cannot_be_written_ends_no_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    class Board:
        def add_scalar(self, *_: object) -> None:
            full()

    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log._board = Board()
        for step in (1, 2):
            log.write({"step": step, "loss": 0.5})
    assert len(read_records(tmp_path / "metrics.jsonl")) == 2
    assert capfd.readouterr().err.count("TensorBoard gets no more records: No space left on device; training goes") == 1


def test_a_run_goes_on_without_a_record_that_cannot_be_written(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path / "gone")
    run.add_event("stopped", step=1)
    why = "No such file or directory; the run goes on, and later ones are tried"
    assert capfd.readouterr().err == f"shardwise: {run.events} lacks a record: {why}\n"
    run.path.mkdir()
    run.add_event("stopped", step=2)
    assert [row["step"] for row in run.read_events("stopped")] == [2]


def test_a_script_that_ends_by_an_error_does_not_wait_for_its_pool(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from shardwise.testing.world import World\nworld = World(2)\nraise SystemError('here')\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and done.stderr.endswith("SystemError: here\n")


def test_who_stands_by_for_a_copy_that_is_none_any_more_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has made room for a copy, in place of what its script had loaded: it cannot begin from a checkpoint."""
    supervisor, team = elastic_supervisor(tmp_path)
    fresh, ordered = World(3, team, {}, False), list[tuple[World, Copy | None]]()
    monkeypatch.setattr(Worlds, "order", lambda _, world, copy: ordered.append((world, copy)))
    monkeypatch.setattr(Worlds, "signal", lambda *_: None)
    monkeypatch.setattr(Worlds, "start", lambda *_, **__: fresh)
    for newest in (Copy(count=4, ranks=2, step=4), None):
        supervisor._standby = standby = World(2, team, {0: tmp_path}, True)
        supervisor._go_on(Change(since_ns=1, rank=1, cause="killed", before=team), team, newest)
        assert ordered.pop() == (standby if newest else fresh, newest) and standby.is_dropped == (newest is None)
