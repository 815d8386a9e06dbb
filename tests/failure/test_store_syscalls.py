"""Two savers, one of which is killed, or whose disk fails, at every system call: the old checkpoint or the new one.

`strace` does it, so the points are those of the kernel. In CI a seeded share of them, in soak all.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from shardwise.checkpoint.directory import Directory
from shardwise.checkpoint.files import LOCAL
from shardwise.checkpoint.reading import Reader
from shardwise.checkpoint.store import Store
from shardwise.errors import CheckpointError
from shardwise.testing.syscalls import Traced, counted, why_not
from shardwise.testing.world import World
from tests.checkpoints import entries
from tests.plain import Plain, meet_over, values

SOAK = bool(os.environ.get("SHARDWISE_SOAK"))
SHARE = 1.0 if SOAK else 0.1
SCENES = ("new", "overwrite", "prune")
"""The first save; a second one of the same step; a third one, after which the first goes."""
FAILED, ALONE = 4, 3
LOOKING = ("stat", "lstat", "fstat", "newfstatat", "statx", "getdents64", "fadvise64")
"""Half of the calls; they change nothing, so only soak stops there."""


def prepare(store: Path, scene: str) -> tuple[int, int]:
    """A store before the save; (seed of the newest content in it, seed of what is saved next)."""
    shutil.rmtree(store, ignore_errors=True)
    if scene == "new":
        return 0, 1
    state, target = Plain(), Store(store, keep=2)
    for _ in range(1 if scene == "overwrite" else 2):
        state.advance()
        target.save(state)
    state.close()
    return state.step, state.step + 1


def saver(store: Path, scene: str, rank: int, end: socket.socket) -> Callable[[], int]:
    """One of two ranks: it goes on from what is there, and is about to save."""
    meet_over((end,))
    state, target = Plain(rank, 2), Store(store, keep=2)
    target.load_latest(state)
    step = state.step
    state.advance()
    if scene == "overwrite":
        state.step = step

    def work() -> int:
        try:
            target.save(state)
        except CheckpointError as error:
            (store.parent / f"said{rank}").write_text(str(error))
            return FAILED
        except ConnectionError:  # as gloo would raise it: the other rank was killed
            return ALONE
        return 0

    return work


def save_with(store: Path, scene: str, victim: int, options: list[str], log: Path | None = None) -> list[int]:
    ends = socket.socketpair()

    def prepared(rank: int) -> Callable[[], int]:
        ends[1 - rank].close()  # or the other rank would never see that this one ended
        return saver(store, scene, rank, ends[rank])

    traced = Traced([partial(prepared, rank) for rank in range(2)], victim, options, log)
    for end in ends:
        end.close()
    return traced.wait()


def check(store: Path, old: int, new: int) -> str:
    """Exactly the old or the new content, all of it whole, found by a real load; then the next save works."""
    state = Plain()
    loaded = Store(store).load_latest(state)
    listing = Directory(store, LOCAL).listing()
    assert not listing.damaged, listing.damaged
    for path, manifest in listing.complete:
        with Reader(path, manifest) as reader:
            reader.verify()
    if loaded is None:
        assert old == 0 and not listing.complete
    else:
        assert not loaded.skipped and (state.is_of(old) or state.is_of(new))
    outcome = "new" if loaded is not None and state.is_of(new) else "old"
    again, next_state = Store(store, keep=1), Plain()
    again.load_latest(next_state)
    next_state.step, next_state.content = 9, values(9)
    again.save(next_state)
    next_state.close()
    assert entries(store) == ["latest", "step-00000009", "store.json"], os.listdir(store)
    return outcome


def points(folder: Path, scene: str, victim: int) -> list[tuple[str, int]]:
    """Every file call of a save that nothing disturbs."""
    store, log = folder / "store", folder / "log"
    prepare(store, "prune")  # a process that has saved before makes fewer calls
    old, new = prepare(store, scene)
    codes = save_with(store, scene, victim, ["trace=all"], log)
    assert codes == [0, 0] and check(store, old, new) == "new"
    found = [(call, when + 1) for call, count in counted(log).items() for when in range(count)]
    return found if SOAK else [point for point in found if point[0] not in LOOKING]


def killed_everywhere(folder: str, share: float) -> dict[str, int]:
    """At every chosen point of every scene and rank; how often the old and the new one were found."""
    found = {"old": 0, "new": 0, "points": 0}
    store = Path(folder) / "store"
    for scene in SCENES:
        for victim in range(2):
            every = points(Path(folder), scene, victim)
            draw = random.Random(f"{scene}{victim}")
            for call, when in sorted(draw.sample(every, max(3, round(share * len(every))))):
                old, new = prepare(store, scene)
                codes = save_with(store, scene, victim, [f"inject={call}:signal=KILL:when={when}"])
                assert codes[victim] == -9 and codes[1 - victim] == ALONE, (scene, victim, call, when, codes)
                try:
                    found[check(store, old, new)] += 1
                except BaseException as error:
                    raise AssertionError(f"{scene}, rank {victim}, {call} {when}: {error}") from error
                found["points"] += 1
    return found


@pytest.fixture(scope="module", autouse=True)
def tracing() -> None:
    if reason := why_not():
        pytest.skip(reason)


def test_a_rank_killed_at_any_system_call_leaves_the_old_or_the_new(world: World, tmp_path: Path) -> None:
    [found] = world(1, killed_everywhere, str(tmp_path), SHARE, timeout_s=1200)
    assert found["points"] >= (300 if SOAK else 20) and found["old"] and found["new"], found


CODES = ("EIO", "ENOSPC", "EDQUOT", "EROFS")


def failing_everywhere(folder: str, share: float) -> dict[str, int]:
    """Every chosen call fails once: both ranks say so, or the save is complete."""
    found = {"failed": 0, "saved": 0}
    store = Path(folder) / "store"
    for scene in SCENES:
        for victim in range(2):
            every = points(Path(folder), scene, victim)
            draw = random.Random(f"{victim}{scene}")
            for i, (call, when) in enumerate(sorted(draw.sample(every, max(3, round(share * len(every)))))):
                old, new = prepare(store, scene)
                code = CODES[i % len(CODES)]
                codes = save_with(store, scene, victim, [f"inject={call}:error={code}:when={when}"])
                where = (scene, victim, call, when, code, codes)
                if codes == [FAILED, FAILED]:
                    said = [(Path(folder) / f"said{rank}").read_text() for rank in range(2)]
                    assert said[0] == said[1] and os.strerror(getattr(errno, code)) in said[0], (where, said)
                else:
                    assert codes == [0, 0], where
                try:
                    outcome = check(store, old, new)
                except BaseException as error:
                    raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
                assert codes != [0, 0] or outcome == "new", where
                found["failed" if codes[0] else "saved"] += 1
    return found


def test_a_disk_that_fails_at_any_system_call_is_said_on_both_ranks(world: World, tmp_path: Path) -> None:
    [found] = world(1, failing_everywhere, str(tmp_path), SHARE, timeout_s=1200)
    assert found["failed"] >= (100 if SOAK else 10), found


def in_the_background(store: Path, end: socket.socket) -> Callable[[], int]:
    """Two saves beside a loop; the first one meets the fault. Tells what it found, over a socket: files may fail."""
    state, target = Plain(), Store(store)
    state.advance()

    def work() -> int:
        saving, steps = target.save_async(state), 0
        while not saving.has_ended:
            time.sleep(0.01)
            steps += 1
        end.send(json.dumps([steps, *map(str, target.take_findings())]).encode())
        end.recv(1)
        state.advance()
        target.save_async(state).wait()
        return 0

    return work


def beside(folder: str, option: str) -> tuple[int, list[str]]:
    """(steps that the loop did while the save went on, findings)."""
    store = Path(folder) / "store"
    here, there = socket.socketpair()
    here.settimeout(60)
    traced = Traced([lambda: in_the_background(store, there)], 0, [option])
    steps, *findings = json.loads(here.recv(2**16))
    traced.detach()
    here.send(b"x")
    assert traced.wait() == [0]
    here.close()
    there.close()
    state = Plain()
    assert Store(store).load_latest(state) is not None and state.is_of(2)
    return steps, findings


@pytest.mark.parametrize(
    "option",
    [
        "fsync:error=EIO",
        "write:error=EDQUOT",
        "rename:error=EROFS",
        "mkdir,mkdirat:error=ENOSPC",
        "openat:error=EDQUOT",
    ],
)
def test_in_the_background_a_failing_disk_is_a_finding_and_the_next_save_works(
    world: World, tmp_path: Path, option: str
) -> None:
    [(_, findings)] = world(1, beside, str(tmp_path), f"inject={option}")
    *before, finding = sorted(findings)  # "[checkpoint.lock]": the first call that failed may be one for the lock
    assert all("[checkpoint.lock]" in text and "keeps another run" in text for text in before) and len(before) < 2
    assert "[checkpoint.save]" in finding and "step 1 was not saved; the run goes on" in finding
    assert os.strerror(getattr(errno, option.partition("error=")[2])) in finding


def test_a_slow_disk_does_not_stop_the_loop(world: World, tmp_path: Path) -> None:
    """Every flush takes a tenth of a second; a save has five of them."""
    [(steps, findings)] = world(1, beside, str(tmp_path), "inject=fsync:delay_enter=100000")
    assert not findings and steps > 10
