"""Disks that are full, read-only or gone while a save goes on: said, and the last checkpoint is whole."""

from __future__ import annotations

import errno
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from shardwise.checkpoint.files import LocalFiles
from shardwise.checkpoint.format import DamagedError
from shardwise.checkpoint.holding import unwritable
from shardwise.checkpoint.store import Store
from shardwise.errors import CheckpointError
from tests.disks import disk, mount
from tests.plain import Plain

T = TypeVar("T")


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 KiB: room for two checkpoints and a half."""
    with disk(tmp_path, "64k") as path:
        yield path


def newest(path: Path) -> Plain:
    state = Plain()
    loaded = Store(path).load_latest(state)
    assert loaded is not None and not loaded.skipped and state.is_of(state.step)
    return state


def fill(state: Plain, store: Store) -> str:
    """Save until the disk is full; what the error says."""
    for _ in range(20):
        state.advance()
        try:
            store.save(state)
        except CheckpointError as error:
            return str(error)
    raise AssertionError("64 KiB held 20 checkpoints")


def test_a_disk_of_64_kib_fills_up_and_the_last_checkpoint_is_whole(tiny: Path) -> None:
    state, store = Plain(), Store(tiny / "store", keep=100)
    assert "No space left on device" in fill(state, store)
    assert state.step > 2 and newest(tiny / "store").step == state.step - 1
    assert not list((tiny / "store").glob("*.partial-*"))  # the failed one gave its room back
    saving = store.save_async(state)
    store.wait()
    [finding] = store.take_findings()
    assert "the run goes on" in str(finding) and "No space left on device" in str(finding) and saving.has_ended
    shutil.rmtree(tiny / "store" / "step-00000001")
    store.save(state)
    assert newest(tiny / "store").step == state.step


def test_a_checkpoint_that_latest_cannot_name_is_one(tmp_path: Path) -> None:
    """The save is complete; what `latest` names must stay as long as it names it."""
    state, store = Plain(), Store(tmp_path, keep=1)
    state.advance()
    store.save(state)
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    state.advance()
    with pytest.warns(UserWarning, match=r"\[checkpoint.latest\] step 2 was saved; `latest` could not .*directory"):
        assert store.save(state).step == 2
    state.advance()
    saved = store.save_async(state).wait()
    store.wait()
    [finding] = store.take_findings()
    assert finding.id == "checkpoint.latest" and saved.unnamed and "was not saved" not in finding.what
    assert newest(tmp_path).step == 3 and len(store.checkpoints()) == 3
    (tmp_path / "latest").rmdir()
    state.advance()
    store.save(state)
    assert [path.name for path in store.checkpoints()] == ["step-00000004"]
    assert (tmp_path / "latest").read_text() == "step-00000004\n"


def test_a_disk_that_became_read_only(tiny: Path) -> None:
    state, store = Plain(), Store(tiny / "store")
    state.advance()
    store.save(state)
    assert mount("-o", "remount,ro", tiny)
    state.advance()
    with pytest.raises(CheckpointError, match="Read-only file system"):
        store.save(state)
    store.save_async(state)
    store.wait()
    [finding] = store.take_findings()
    assert "Read-only file system" in str(finding) and newest(tiny / "store").step == 1
    assert mount("-o", "remount,rw", tiny)
    store.save(state)
    assert newest(tiny / "store").step == 2


def test_a_place_that_takes_no_save_is_told_before_training(
    tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """When a run looks for what to go on from, and not at its first save; nothing is left behind, reading goes on."""
    file = tmp_path_factory.mktemp("elsewhere") / "file"
    file.write_text("")
    with pytest.warns(UserWarning, match=rf"no checkpoint can be saved here .* rank 0: Not a directory \({file}\)"):
        assert Store(file / "store").load_latest(Plain()) is None
    state, store = Plain(), Store(tiny / "store", keep=100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.load_latest(state) is None and not any(tiny.iterdir())
    fill(state, store)
    (tiny / "rest").write_bytes(bytes(shutil.disk_usage(tiny).free))
    here = sorted(tiny.rglob("*"))
    with pytest.warns(UserWarning, match="no checkpoint can be saved here .* rank 0: No space left on device .*; free"):
        newest(tiny / "store")
    (tiny / "rest").write_bytes(b"")
    assert re.fullmatch(r"\d+ bytes are free in .*, and a checkpoint takes 65537; free .*", unwritable(tiny, 65537))
    assert mount("-o", "remount,ro", tiny)
    with pytest.warns(UserWarning, match="rank 0: Read-only file system .*; what is there can be read"):
        newest(tiny / "store")
    assert mount("-o", "remount,rw", tiny) and sorted(tiny.rglob("*")) == here


class Vanishing(LocalFiles):
    """Somebody removes a directory before the n-th call."""

    def __init__(self, at: int, victim: Callable[[], None]) -> None:
        self.at, self.victim, self.count = at, victim, 0

    def call(self, name: str, path: Path, act: Callable[[], T]) -> T:
        self.count += 1
        if self.count == self.at:
            self.victim()
        return act()


@pytest.mark.share(3)
@pytest.mark.parametrize("what", ["store", "partial", "newest"])
def test_a_directory_that_is_removed_while_saving(tmp_path: Path, what: str) -> None:
    """Before every call of a save, in the background or not, in turn: it says so or is complete; the next one works."""
    store_path, failed = tmp_path / "store", 0

    def remove() -> None:
        pattern = {"store": "../store", "partial": "*.partial-*", "newest": "step-00000001"}[what]
        for path in store_path.glob(pattern):
            shutil.rmtree(path)

    for at in range(1, 300):
        shutil.rmtree(store_path, ignore_errors=True)
        state, store = Plain(), Store(store_path, keep=1)
        state.advance()
        store.save(state)
        state.advance()
        store._directory.files = files = Vanishing(at, remove)
        try:
            if at % 2:
                store.save_async(state)
                store.wait()
                for finding in store.take_findings():
                    raise CheckpointError(str(finding))
            else:
                store.save(state)
        except CheckpointError as error:
            failed += 1
            assert str(store_path) in str(error)
            if what == "partial":  # the old one was not touched; a save that is complete is the new one
                assert newest(store_path).step in (1, 2), at
        else:
            if what != "store" and (store_path / "latest").exists():
                assert newest(store_path).step == 2, at
        store._directory.files = LocalFiles()
        state.advance()
        store.save(state)
        assert newest(store_path).step == 3
        assert not list(store_path.glob("*.partial-*"))
        if files.count < at:
            assert failed > (0 if what == "newest" else 5)
            return
    raise AssertionError("it never came to an end")


class Failing(LocalFiles):
    """One call fails, wherever the path ends so."""

    def __init__(self, name: str, end: str, code: int) -> None:
        self._fails, self._error = (name, end), OSError(code, os.strerror(code))

    def call(self, name: str, path: Path, act: Callable[[], T]) -> T:
        if name == self._fails[0] and str(path).endswith(self._fails[1]):
            raise self._error
        return act()


def two(path: Path) -> None:
    state, store = Plain(), Store(path)
    for _ in range(2):
        state.advance()
        store.save(state)
    state.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ESTALE, errno.ENOENT])
@pytest.mark.parametrize("call", ["listdir", "open", "read"])
def test_a_checkpoint_that_cannot_be_read_gives_way_to_the_one_before_it(tmp_path: Path, call: str, code: int) -> None:
    """A directory that could not be listed ended the load, though an older checkpoint was whole."""
    two(tmp_path)
    end = "step-00000002" + ("" if call == "listdir" else "/rank-00000.safetensors")
    state, store = Plain(), Store(tmp_path, files=Failing(call, end, code))
    with pytest.warns(UserWarning, match="step-00000001: loaded in place of step-00000002: .*" + re.escape(end)):
        loaded = store.load_latest(state)
    assert loaded is not None and state.is_of(1)
    said = "is missing" if (call, code) == ("listdir", errno.ENOENT) else os.strerror(code)
    assert said in loaded.skipped[0].reason


def test_a_disk_that_fails_in_the_middle_of_a_file_names_the_tensor(tmp_path: Path) -> None:
    class Later(Failing):
        def read_into(self, *_: object) -> int:
            raise self._error

    two(tmp_path)
    state = Plain()
    with pytest.raises(DamagedError, match=r"offset 4096 to \d+, tensor model.b, .*: cannot be read: Input/output"):
        Store(tmp_path, files=Later("", "", errno.EIO)).load(state, tmp_path / "step-00000002")
    assert state.is_of(0)


def test_a_checkpoint_that_cannot_be_looked_at_is_listed_as_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two(tmp_path)
    look, newest_one = os.lstat, tmp_path / "step-00000002"

    def failing(path: Path) -> os.stat_result:
        if path == newest_one:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return look(path)

    monkeypatch.setattr(os, "lstat", failing)
    state = Plain()
    files = Failing("open", "step-00000002/manifest.json", errno.EIO)
    with pytest.warns(UserWarning, match="loaded in place of step-00000002"):
        assert Store(tmp_path, files=files).load_latest(state) is not None and state.is_of(1)


@pytest.mark.parametrize("call", ["listdir", "open"])
def test_too_many_open_files_are_no_damage(tmp_path: Path, call: str) -> None:
    """The run went on from an older checkpoint."""
    two(tmp_path)
    end = "step-00000002" + ("" if call == "listdir" else "/rank-00000.safetensors")
    state = Plain()
    with pytest.raises(CheckpointError, match=f"{end}: Too many open files; .*ulimit -n") as caught:
        Store(tmp_path, files=Failing(call, end, errno.EMFILE)).load_latest(state)
    assert not isinstance(caught.value, DamagedError) and state.is_of(0)


def test_what_a_crashed_save_left_and_may_not_be_listed_stands_in_no_saves_way(tmp_path: Path) -> None:
    two(tmp_path)
    (tmp_path / "step-00000009.partial-aaaaaaaa").mkdir()
    state, store = Plain(), Store(tmp_path, files=Failing("listdir", ".partial-aaaaaaaa", errno.EACCES))
    store.load_latest(state)
    state.advance()
    assert store.save(state).step == 3 and newest(tmp_path).step == 3
