"""One store, one run: a script's store is held from its first load or save until its mesh is closed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.checkpoint.holding import Holder
from shardwise.errors import ExitCode, LockedError
from shardwise.train.kept import lock as lock_module
from shardwise.train.kept.lock import RunLock

SCRIPT = """
import sys, time
from pathlib import Path
import torch
import shardwise as sw
from shardwise.errors import LockedError

plan, out = sw.Plan(), Path(sys.argv[1])
with sw.open_mesh(plan, device="cpu") as mesh:
    placed = sw.apply(lambda: torch.nn.Linear(4, 4), plan, mesh)
    state = sw.TrainState(placed, sw.adamw(placed, lr=0.1))
    store = sw.Store(out / "store")
    try:
        loaded = store.load_latest(state)
    except LockedError:
        print("beside it", store.load(state, out / "store").step, flush=True)
        raise
    print("from", loaded.step if loaded else None, flush=True)
    state.step += 1
    store.save(state)
    (out / "saved").touch()
    while not (out / "go").exists():
        time.sleep(0.02)
"""


def start(folder: Path) -> subprocess.Popen[str]:
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "shardwise", "run", str(folder / "script.py"), "--", str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def until(path: Path, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.02)


def holder(folder: Path) -> dict[str, Any]:
    (path,) = (folder / "store" / "lock").glob("*.json")
    return dict(json.loads(path.read_text()))


def test_a_second_start_is_refused_and_a_dead_runs_store_is_taken_over(tmp_path: Path) -> None:
    first = start(tmp_path)
    until(tmp_path / "saved", first)
    code, out, err = finish(start(tmp_path))
    assert code == ExitCode.LOCKED and out == "beside it 1\n", err
    assert f"cannot start in {tmp_path / 'store'}: it is in use by" in err and "Store.load(state, path)" in err
    assert f"pid {holder(tmp_path)['pids'][0][0]}" in err
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate(timeout=60)
    assert not holder(tmp_path)["released"]
    (tmp_path / "go").touch()
    code, out, err = finish(start(tmp_path))
    assert code == 0 and "from 1" in out and holder(tmp_path)["released"], err
    saved = sorted(path.name for path in (tmp_path / "store").glob("step-*"))
    assert saved == ["step-00000001", "step-00000002"]


def elsewhere(folder: Path) -> Path:
    """A lock whose owner is on another host."""
    RunLock.take(folder, print)
    (path,) = folder.glob("*.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"host": "elsewhere", "pids": [[1, 1.0]]}))
    return path


def test_an_owner_on_another_host_is_watched(tmp_path: Path) -> None:
    """It is refused when its file is touched, and taken over when that has not happened for long enough."""
    path = elsewhere(tmp_path / "lock")
    touch = threading.Timer(0.5, os.utime, [path])
    touch.start()
    began = time.monotonic()
    with pytest.raises(LockedError, match="on elsewhere, pid 1"):
        RunLock.await_free(tmp_path / "lock", stale_s=30)
    assert 0.4 < time.monotonic() - began < 10
    touch.join()
    RunLock.await_free(tmp_path / "lock", stale_s=1.0)
    with RunLock.take(tmp_path / "lock", print, stale_s=1.0) as lock:
        assert lock.taken_over is not None and lock.taken_over.host == "elsewhere"
    with RunLock.take(tmp_path / "here", print), pytest.raises(LockedError):  # at once
        began = time.monotonic()
        RunLock.await_free(tmp_path / "here")
    assert time.monotonic() - began < 1


def test_an_owner_whose_file_is_of_a_date_to_come_is_watched(tmp_path: Path) -> None:
    """Its host's clock was wrong: it would hold the directory until that date, though it is dead."""
    path, ahead = elsewhere(tmp_path), time.time() + 3600
    os.utime(path, (ahead, ahead))
    touch = threading.Timer(0.3, os.utime, [path, (ahead + 5, ahead + 5)])
    touch.start()
    with pytest.raises(LockedError, match="on elsewhere, pid 1"):
        RunLock.take(tmp_path, print, stale_s=1.0)
    touch.join()
    RunLock.await_free(tmp_path, stale_s=1.0)
    assert RunLock.take(tmp_path, print, stale_s=1.0).taken_over is not None


def test_processes_of_one_job_are_one_run(tmp_path: Path) -> None:
    """The next set of ranks of a run that recovers goes on where the one before may not have ended yet."""
    with RunLock.take(tmp_path, print, job="a") as first:
        RunLock.await_free(tmp_path, job="a")
        joined = RunLock.take(tmp_path, print, job="a")
        assert joined.generation == first.generation and len(joined.owner.pids) == 2
        for other in ("b", ""):
            with pytest.raises(LockedError):
                RunLock.await_free(tmp_path, job=other)
            with pytest.raises(LockedError):
                RunLock.take(tmp_path, print, job=other)


def test_a_process_knows_what_it_holds(tmp_path: Path) -> None:
    assert not RunLock.is_held_here(tmp_path / "lock")
    with RunLock.take(tmp_path / "lock", print):
        assert RunLock.is_held_here(tmp_path / "lock")
    assert not RunLock.is_held_here(tmp_path / "lock")  # released
    elsewhere(tmp_path / "there")
    assert not RunLock.is_held_here(tmp_path / "there")


def test_a_place_that_cannot_be_looked_at_is_noted(tmp_path: Path) -> None:
    """It is no reason to end: what is read there, or saved, says what is wrong."""
    holder = Holder(tmp_path / ("a" * 300))
    mesh: Any = SimpleNamespace(rank=0, at_exit=[])
    for look in (holder.look, holder.take):
        held = look(mesh)
        assert not held.refusal and ("File name too long" in held.note) is (look == holder.look)  # said once


def test_a_lock_that_is_torn_refuses_as_a_lock(tmp_path: Path) -> None:
    RunLock.take(tmp_path / "lock", print)
    (tmp_path / "lock" / "0000001.json").write_text("")
    mesh: Any = SimpleNamespace(rank=0, at_exit=[])
    for held in (Holder(tmp_path).look(mesh), Holder(tmp_path).take(mesh)):
        with pytest.raises(LockedError, match=r"0000001.json is no lock of Shardwise.*remove it when no run"):
            held.check()


def test_negative_control_without_the_lock_both_would_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunLock.take(tmp_path / "lock", print):
        monkeypatch.setattr(lock_module, "_is_dead", lambda *_: True)
        assert RunLock.take(tmp_path / "lock", print).taken_over is not None


def test_a_store_that_was_removed_is_held_again_by_the_next_save(tmp_path: Path) -> None:
    """Or it is another run's by now: then nothing is written there."""
    mesh: Any = SimpleNamespace(rank=0, at_exit=[])
    holder = Holder(tmp_path / "store")
    for removed in (False, True):
        if removed:
            shutil.rmtree(tmp_path / "store")
        assert not holder.take(mesh).check() and RunLock.is_held_here(tmp_path / "store" / "lock")
    shutil.rmtree(tmp_path / "store")
    elsewhere(tmp_path / "store" / "lock")
    with pytest.raises(LockedError, match="taken over by .* on elsewhere"):
        holder.take(mesh).check()
    for release in mesh.at_exit:
        release()


@pytest.mark.parametrize("first", ["look", "take"])
def test_a_launchers_directory_that_was_removed_stays_the_launchers(tmp_path: Path, first: str) -> None:
    """A rank that saves there anew was taken for another run by its own launcher, which ended them all."""
    folder = tmp_path / "store" / "lock"
    launcher = RunLock.take(folder, print)
    owner = json.loads((folder / "0000001.json").read_text())
    child = os.fork()
    if child == 0:  # the rank, as the launcher has started it
        code = 1
        try:
            assert RunLock.join(folder, print) is not None
            mesh: Any = SimpleNamespace(rank=0, at_exit=[])
            holder = Holder(tmp_path / "store")
            assert not getattr(holder, first)(mesh).check()
            shutil.rmtree(tmp_path / "store")
            assert not holder.take(mesh).check() and not holder.take(mesh).check()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert launcher.is_held and not launcher.keep()
    assert json.loads((folder / "0000001.json").read_text())["pids"][0] == owner["pids"][0]
    launcher.release()
    assert RunLock.take(folder, print).generation == 2
