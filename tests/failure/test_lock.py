"""One directory, one run: who wins, who is refused, when a dead owner's lock is taken over."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from shardwise.checkpoint.holding import Holder
from shardwise.cli import train as cli_train
from shardwise.errors import ExitCode, LockedError, UsageError
from shardwise.testing.world import World
from shardwise.train.kept import lock as lock_module
from shardwise.train.kept.lock import RunLock
from shardwise.train.kept.owner import Owner
from shardwise.train.kept.rundir import RunDir
from tests.failure.as_rank import typed

fork = get_context("fork")
TINY = ["--steps", "1", "--batch", "2", "--model", "tiny", "--dim", "32", "--layers", "1", "--heads", "2",
        "--seq", "16"]  # fmt: skip


def lost(text: str) -> None:
    raise AssertionError(text)


def record(folder: Path) -> dict[str, Any]:
    [path] = folder.glob("*.json")
    return dict(json.loads(path.read_text()))


def rewrite(folder: Path, **changes: Any) -> None:
    [path] = folder.glob("*.json")
    path.write_text(json.dumps(record(folder) | changes))


def in_child(function: Callable[[], None]) -> int:
    """Run it in a forked process that ends without cleaning up; its pid, when it is gone."""
    child = fork.Process(target=lambda: (function(), os._exit(0)))
    child.start()
    child.join(10)
    assert child.exitcode == 0 and child.pid is not None
    return child.pid


def test_a_second_start_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    with RunLock.take(tmp_path / "lock", lost) as first:
        begin = time.perf_counter()
        with pytest.raises(LockedError) as refused:
            RunLock.take(tmp_path / "lock", lost)
        assert time.perf_counter() - begin < 1
        assert first.taken_over is None
    text = str(refused.value)
    assert str(tmp_path) in text and f"pid {os.getpid()}" in text and os.uname().nodename in text
    assert first.owner.started in text and "choose another --out" in text
    with RunLock.take(tmp_path / "lock", lost) as second:  # a released one is nobody's
        assert second.taken_over is None and second.generation == first.generation + 1
    assert len(list((tmp_path / "lock").iterdir())) == 1  # nothing else is left


def test_a_dead_owner_is_taken_over_and_named(tmp_path: Path) -> None:
    pid = in_child(lambda: RunLock.take(tmp_path / "lock", lost).__enter__() and None)
    with RunLock.take(tmp_path / "lock", lost) as lock:
        assert lock.taken_over is not None and lock.taken_over.pids[0][0] == pid


def test_a_pid_that_came_back_is_not_the_owner(tmp_path: Path) -> None:
    RunLock.take(tmp_path / "lock", lost)
    rewrite(tmp_path / "lock", pids=[[os.getpid(), 12.5]])
    with RunLock.take(tmp_path / "lock", lost) as lock:
        assert lock.taken_over is not None


def test_a_rank_of_a_dead_launcher_still_holds_the_directory(tmp_path: Path) -> None:
    in_child(lambda: RunLock.take(tmp_path / "lock", lost).__enter__() and None)
    with RunLock.join(tmp_path / "lock", lost) as rank:  # type: ignore[union-attr]
        with pytest.raises(LockedError):
            RunLock.take(tmp_path / "lock", lost)
        assert len(rank.owner.pids) == 2
    assert not record(tmp_path / "lock")["released"]  # the launcher does that


def test_another_host_is_dead_when_its_heart_has_stopped(tmp_path: Path) -> None:
    RunLock.take(tmp_path / "lock", lost)
    rewrite(tmp_path / "lock", host="elsewhere", pids=[[1, 1.0]])
    with pytest.raises(LockedError, match="on elsewhere, pid 1"):
        RunLock.take(tmp_path / "lock", lost)
    [path] = (tmp_path / "lock").iterdir()
    os.utime(path, (time.time() - 61, time.time() - 61))
    with RunLock.take(tmp_path / "lock", lost) as lock:
        assert lock.taken_over is not None and lock.taken_over.host == "elsewhere"


@pytest.mark.parametrize("ahead_s", [3600, -3600])
def test_a_clock_that_is_wrong_changes_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: int
) -> None:
    """Ages are by the clock of the file system, which touched the file: the same for all hosts."""
    RunLock.take(tmp_path / "lock", lost)
    rewrite(tmp_path / "lock", host="elsewhere", pids=[[1, 1.0]])
    [path] = (tmp_path / "lock").iterdir()
    now = time.time()
    for name, factor in (("time", 1), ("time_ns", 10**9)):
        monkeypatch.setattr(time, name, lambda factor=factor: (now + ahead_s) * factor)
    with pytest.raises(LockedError):
        RunLock.take(tmp_path / "lock", lost)
    os.utime(path, (now - 61, now - 61))
    with RunLock.take(tmp_path / "lock", lost) as lock:
        assert lock.taken_over is not None and lock.taken_over.host == "elsewhere"


def test_a_clock_that_is_set_leaves_an_owner_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = psutil.Process.create_time  # the boot as the clock has it, and the ticks since then
    with RunLock.take(tmp_path / "lock", lost) as lock:
        monkeypatch.setattr(psutil.Process, "create_time", lambda self: real(self) + 1)
        with pytest.raises(LockedError):
            RunLock.take(tmp_path / "lock", lost)
        with pytest.raises(LockedError):
            RunLock.await_free(tmp_path / "lock")
        assert lock.is_held and RunLock.is_held_here(tmp_path / "lock")


def test_the_same_pid_in_another_container_is_another_host(tmp_path: Path) -> None:
    RunLock.take(tmp_path / "lock", lost)
    rewrite(tmp_path / "lock", place="another boot or namespace", pids=[[1, 1.0]])
    with pytest.raises(LockedError):
        RunLock.take(tmp_path / "lock", lost)


def test_an_owner_that_was_thought_dead_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "BEAT_S", 0.02)
    told: list[str] = []
    with RunLock.take(tmp_path / "lock", told.append):
        rewrite(tmp_path / "lock", host="elsewhere")
        with RunLock.take(tmp_path / "lock", lost, stale_s=-1.0) as second:
            end = time.monotonic() + 5
            while not told and time.monotonic() < end:
                time.sleep(0.01)
            assert "was taken over by" in told[0]
    assert record(tmp_path / "lock")["pids"] == [list(second.owner.pids[0])]  # and leaves the new one's file alone


def test_the_heart_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "BEAT_S", 0.02)
    with RunLock.take(tmp_path / "lock", lost):
        [path] = (tmp_path / "lock").iterdir()
        os.utime(path, (1.0, 1.0))
        end = time.monotonic() + 5
        while path.stat().st_mtime == 1.0 and time.monotonic() < end:
            time.sleep(0.01)
        assert path.stat().st_mtime > 1.0


def contend(folder: Path, go: Any, won: Any, done: Any) -> None:
    go.wait()
    try:
        RunLock.take(folder, lost)
        won.put(os.getpid())
    except LockedError:
        won.put(None)
    done.wait()  # who won stays alive until all have tried
    won.close()
    won.join_thread()
    os._exit(0)


@pytest.mark.parametrize("before", ["nothing", "a dead owner", "released"])
def test_of_many_starts_at_once_exactly_one_wins(tmp_path: Path, before: str) -> None:
    for attempt in range(3):
        folder = tmp_path / str(attempt) / "lock"
        if before != "nothing":
            in_child(lambda folder=folder: RunLock.take(folder, lost) and None)  # type: ignore[misc]
        if before == "released":
            rewrite(folder, released=True)
        go, done, won = fork.Event(), fork.Event(), fork.Queue()
        starts = [fork.Process(target=contend, args=(folder, go, won, done)) for _ in range(4)]
        for start in starts:
            start.start()
        go.set()
        answers = [won.get(timeout=20) for _ in starts]
        done.set()
        for start in starts:
            start.join(10)
        winners = [pid for pid in answers if pid is not None]
        assert len(winners) == 1, f"{len(winners)} of 4 starts hold {folder}"
        assert record(folder)["pids"][0][0] == winners[0]


def test_negative_control_a_check_before_a_write_lets_two_win(tmp_path: Path) -> None:
    """What the lock would be without `link`: both see nobody, and both write."""
    (tmp_path / "lock").mkdir()
    seen = [lock_module._newest(tmp_path / "lock") for _ in range(2)]
    for newest in seen:
        lock_module._write(lock_module._path(tmp_path / "lock", newest + 1), Owner.here())
    assert seen == [0, 0]
    assert not lock_module._create(lock_module._path(tmp_path / "lock", 1), Owner.here())


def test_a_lock_that_is_none_of_ours(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    (tmp_path / "lock" / "0000001.json").write_text("[1, 2")
    with pytest.raises(LockedError, match="no lock of Shardwise"):
        RunLock.take(tmp_path / "lock", lost)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot lock"):
        RunLock.take(tmp_path / "file" / "lock", lost)


def test_train_refuses_a_directory_in_use(tmp_path: Path) -> None:
    """Through the command line: exit code 7, before a process is started or a file is written."""
    (tmp_path / "text.txt").write_text("some text\n" * 400)
    words = ["train", "--data", str(tmp_path / "text.txt"), "--out", str(tmp_path / "run"), *TINY]
    with RunLock.take(tmp_path / "run" / "lock", lost):
        ran = subprocess.run([sys.executable, "-m", "shardwise", *words], capture_output=True, text=True, timeout=60)
    assert ran.returncode == ExitCode.LOCKED, ran.stderr
    assert f"{tmp_path / 'run'}: it is in use by" in ran.stderr and "Traceback" not in ran.stderr
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["lock"]


def test_the_place_of_the_checkpoints_is_held_too(world: World, tmp_path: Path) -> None:
    """Another run's `--out` is free; the directory where both would save is not."""
    place = tmp_path / "kept"
    (tmp_path / "text.txt").write_text("some text\n" * 400)
    words = ["train", "--data", str(tmp_path / "text.txt"), "--out", str(tmp_path / "run"), "--checkpoints", str(place)]
    words += [*TINY, "--no-sample"]
    with RunLock.take(place / "lock", lost):
        ran = typed(world, tmp_path, words)
    assert ran.returncode == ExitCode.LOCKED, ran.stderr
    assert f"{place}: it is in use by" in ran.stderr and "another --out or --checkpoints" in ran.stderr
    ran = typed(world, tmp_path, words)
    assert ran.returncode == ExitCode.OK and (place / "step-00000001").is_dir(), ran.stderr
    (holder,) = (place / "lock").iterdir()
    assert json.loads(holder.read_text())["released"]
    first, second = RunDir(tmp_path / "first"), RunDir(tmp_path / "second")
    # one of them names the store that is the other's own
    assert first.locks(None)[1] == second.locks(str(first.checkpoints))[1] == first.checkpoints / "lock"


def test_signals_reach_python_while_the_heart_beats(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with RunLock.take(tmp_path / "lock", lost), pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_rank_that_cannot_be_named_on_a_full_disk_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, os.strerror(28))

    folder = tmp_path / "lock"
    with RunLock.take(folder, lost), monkeypatch.context() as patch:
        begun, dead = record(folder)["pids"], in_child(lambda: None)
        for has_room in (True, False):  # for a second file, which replaces the first
            if not has_room:
                patch.setattr(Path, "replace", full)
            rewrite(folder, pids=[*begun, [dead, 1.0]])
            assert RunLock.join(folder, lost) is not None
            assert [pid for pid, _ in record(folder)["pids"]] == [os.getpid()] * 2  # who has died is not waited for
        patch.setattr(lock_module, "_write", full)
        assert RunLock.join(folder, lost) is not None
    assert len(list(folder.iterdir())) == 1
    said = f"does not name process {os.getpid()}: No space left on device; the run goes on"
    assert said in capfd.readouterr().err


def test_a_copy_of_a_lock_is_no_lock(tmp_path: Path) -> None:
    """What a file manager or an editor leaves beside it is neither read nor removed."""
    folder = tmp_path / "lock"
    with RunLock.take(folder, lost) as first:
        for name in ("0000009 (copy).json", "0000009~.json", "9.json"):
            (folder / name).write_text("{}")
        assert first.is_held
    with RunLock.take(folder, lost) as second:
        assert second.generation == first.generation + 1
    assert (folder / "0000009 (copy).json").exists()


def test_a_directory_that_was_removed_is_held_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lock_module, "BEAT_S", 0.02)
    folder = tmp_path / "run" / "lock"
    with RunLock.take(folder, lost) as lock:
        shutil.rmtree(tmp_path / "run")
        time.sleep(0.1)
        assert not (tmp_path / "run").exists()  # who removed it may make it anew
        (tmp_path / "run").mkdir()
        end = time.monotonic() + 5
        while not lock.is_held and time.monotonic() < end:
            time.sleep(0.01)
        with pytest.raises(LockedError):
            RunLock.take(folder, lost)
    assert record(folder)["released"] and "was removed while this run uses it" in capsys.readouterr().err


def test_the_file_of_a_run_that_began_in_its_place_is_left_alone(tmp_path: Path) -> None:
    """Its number is the same: that of a directory that is new."""
    lock = RunLock.take(tmp_path / "lock", lost)  # its heart beats when the test says so
    assert not lock.keep()
    shutil.rmtree(tmp_path / "lock")
    pid = in_child(lambda: RunLock.take(tmp_path / "lock", lost).__enter__() and None)
    assert f"was taken over by {lock.owner.owner} on {lock.owner.host}, pid {pid}" in lock.keep() and not lock.is_held
    lock.release()
    assert not record(tmp_path / "lock")["released"]


def _of_train(folder: Path) -> Iterator[None]:
    settings = SimpleNamespace(train=SimpleNamespace(checkpoints=None))
    given: Any = SimpleNamespace(settings=settings)  # all that it asks of a configuration
    with cli_train._held(RunDir(folder), given, None, cli_train.How()):
        yield


def _of_a_store(folder: Path) -> Iterator[None]:
    mesh: Any = SimpleNamespace(rank=0, at_exit=[])
    try:
        Holder(folder).take(mesh)
        yield
    finally:  # as `open_mesh` does
        for finish in reversed(mesh.at_exit):
            finish()


@pytest.mark.parametrize("hold", [_of_train, _of_a_store])
@pytest.mark.parametrize("after", ["_create", "take", "start"])
def test_ctrl_c_while_it_is_taken_leaves_no_lock(
    after: str, hold: Callable[[Path], Iterator[None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process lives on, as a notebook does, and a lock that was left would keep it out."""
    where: Any = lock_module if after == "_create" else RunLock
    real, interrupted = getattr(where, after), [False]

    def interrupt(*args: Any, **keywords: Any) -> Any:
        done = real(*args, **keywords)
        if not interrupted[0]:
            interrupted[0] = True
            raise KeyboardInterrupt
        return done

    monkeypatch.setattr(where, after, interrupt)
    with pytest.raises(KeyboardInterrupt), contextmanager(hold)(tmp_path):
        pass
    with RunLock.take(tmp_path / "lock", lost) as lock:
        assert lock.taken_over is None and lock.generation == 2
