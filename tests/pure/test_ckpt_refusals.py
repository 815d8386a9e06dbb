"""What `shardwise ckpt` refuses or says beside its answer: damage, impossible targets, its own checkpoints, signals."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.checkpoint.files import LocalFiles
from tests.checkpoints import SPLITS, write_checkpoint
from tests.pure.test_ckpt_cli import run
from tests.pure.test_convert_hostile import entry, header


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A run's directory with two checkpoints, the newer one damaged."""
    store = tmp_path / "run" / "checkpoints"
    store.mkdir(parents=True)
    (store / "store.json").write_text("{}")
    tensors, divided, dtypes = SPLITS
    for step in (6, 8):
        write_checkpoint(store, tensors, divided, dtypes, step=step)
    os.truncate(store / "step-00000008" / "manifest.json", 100)
    return tmp_path / "run"


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "x.safetensors"
    path.write_bytes(header({"w": entry(0, 16)}, np.arange(4, dtype="f4").tobytes()))
    return path


def test_a_damaged_newest_checkpoint_is_said(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    older = job / "checkpoints" / "step-00000006"
    assert run("diff", job, older) == 4
    said = capsys.readouterr()
    assert "step-00000008/manifest.json: no readable JSON" in said.err and "step-00000006 are compared" in said.err
    assert said.out == f"all tensors of {older} and {older} are equal, bit by bit\n"
    assert run("diff", older, job / "checkpoints", "--json") == 4
    found = json.loads(capsys.readouterr().out)
    assert found["equal"] and found["first"] == found["second"] == str(older)
    assert [item["path"][-8:] for item in found["skipped"]] == ["00000008"] and "JSON" in found["skipped"][0]["reason"]
    assert run("diff", older, older, "--json") == 0  # named: it is what was asked for
    said = capsys.readouterr()
    assert not said.err and json.loads(said.out)["skipped"] == []
    assert run("diff", older, job / "checkpoints" / "step-00000008") == 4
    capsys.readouterr()
    assert run("inspect", job) == 0
    said = capsys.readouterr()
    assert "step-00000008/manifest.json: no readable JSON" in said.err and "step-00000006 is shown" in said.err
    assert run("inspect", job, "--json") == 0
    assert json.loads(capsys.readouterr().out)["skipped"][0]["path"].endswith("step-00000008")


def test_own_checkpoints_are_exported_not_converted(job: Path, tmp_path: Path, capsys: Any) -> None:
    store = job / "checkpoints"
    copy = shutil.copytree(store / "step-00000006", tmp_path / "copy")
    (copy / "manifest.json").unlink()
    (copy / "rank-00001.safetensors").unlink()
    for source in (job, store, store / "step-00000006", copy, store / "step-00000006" / "rank-00000.safetensors"):
        assert run("convert", source, tmp_path / "out") == 4
        assert "ckpt export" in capsys.readouterr().err
    assert run("convert", copy, tmp_path / "out", "--from", "safetensors") == 4
    assert not (tmp_path / "out").exists()


def test_what_is_too_short_is_said_as_it_is(tmp_path: Path, capsys: Any) -> None:
    for name, data, found in (
        ("a.pt", b"", "found an empty file; needed"), ("a.safetensors", b"", "found 0 bytes; needed a whole"),
        ("b.safetensors", b"1234567", "found 7 bytes; needed a whole"),
        ("c.safetensors", bytes(8), "found a header of 0 bytes in a file of 8"),
    ):  # fmt: skip
        (tmp_path / name).write_bytes(data)
        assert run("convert", tmp_path / name, tmp_path / "out") == 4
        assert found in capsys.readouterr().err


def test_targets_that_cannot_be(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("convert", weights, tmp_path / "store") == 0
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for target in (".", "..", "/"):
        assert run("export", tmp_path / "store", target) == 2
        assert "found no name of its own" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    for words in (("convert", weights), ("export", tmp_path / "store")):
        assert run(*words, tmp_path / "file" / "below" / "it") == 4
        assert "cannot be written (Not a directory" in capsys.readouterr().err

    def refuse(self: Any, *words: Any, **options: Any) -> None:
        raise OSError(30, "Read-only file system", str(self))

    with monkeypatch.context() as patch:  # where also a removal of what is not there is refused
        patch.setattr(Path, "mkdir", refuse)
        patch.setattr(Path, "unlink", refuse)
        for words in (("convert", weights), ("export", tmp_path / "store")):
            assert run(*words, tmp_path / "new") == 4
            assert "Read-only file system" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing(
    number: signal.Signals, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    real: Callable[..., Any] = LocalFiles.call
    before = signal.getsignal(number)

    def call(self: LocalFiles, name: str, path: Path, act: Callable[[], Any]) -> Any:
        found = real(self, name, path, act)
        if name == at:
            os.kill(os.getpid(), number)
        return found

    for at in ("mkdir", "write", "rename"):
        out = tmp_path / at
        assert run("convert", weights, out / "a") == 0
        saved = sorted(out.rglob("*"))
        with monkeypatch.context() as patch:
            patch.setattr(LocalFiles, "call", call)
            assert run("convert", weights, out / "a", "--overwrite") == 143
            assert run("export", tmp_path / "mkdir" / "a", out / "b") == (0 if at == "write" else 143)
        assert signal.Signals(number).name in capsys.readouterr().err
        assert sorted(p for p in out.rglob("*") if p.parts[len(out.parts)] == "a") == saved
        assert {p.name for p in out.iterdir()} <= {"a", "b"} and run("verify", out / "a") == 0
    assert signal.getsignal(number) is before


def test_a_signal_that_is_ignored_stays_so(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    real: Callable[..., Any] = LocalFiles.call

    def call(self: LocalFiles, name: str, path: Path, act: Callable[[], Any]) -> Any:
        os.kill(os.getpid(), signal.SIGHUP)
        return real(self, name, path, act)

    monkeypatch.setattr(LocalFiles, "call", call)
    try:
        assert run("convert", weights, tmp_path / "a") == 0
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.fixture
def heard() -> Iterator[None]:
    """Ctrl-C as at a terminal: a job in the background ignores it, and so would the command."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)])
def test_a_signal_says_that_nothing_is_half_written(
    number: signal.Signals, code: int, weights: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def interrupted(*_: object) -> None:
        os.kill(os.getpid(), number)

    monkeypatch.setattr("shardwise.checkpoint.foreign.convert._write", interrupted)
    before = sorted(weights.parent.iterdir())
    assert run("convert", weights, weights.parent / "out") == code
    assert f"{number.name}: stopped" in capsys.readouterr().err and sorted(weights.parent.iterdir()) == before
    assert run("convert", weights, weights.parent / "out", "--json") == code
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["exit_code"] == code and error["message"].startswith(f"{number.name}: stopped")


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize(("first", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("then", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_waits_for_what_is_cleared_up(
    first: signal.Signals, code: int, then: signal.Signals, weights: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    out = weights.parent / "out"
    assert run("convert", weights, out) == 0
    before, real = sorted(weights.parent.rglob("*")), os.rename

    def renamed(source: Path, target: Path) -> None:
        real(source, target)
        if ".old-" in str(target):  # the moment when nothing has the target's name
            os.kill(os.getpid(), first)

    def exists(path: Path) -> bool:
        if ".old-" in str(path):
            os.kill(os.getpid(), then)
        return os.path.exists(path)

    monkeypatch.setattr(os, "rename", renamed)
    monkeypatch.setattr(Path, "exists", exists)
    assert run("convert", weights, out, "--overwrite") == code
    assert f"{first.name}: stopped" in capsys.readouterr().err
    assert sorted(weights.parent.rglob("*")) == before
