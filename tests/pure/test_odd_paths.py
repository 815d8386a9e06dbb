"""Paths that cannot be: too long, links in a ring, a NUL, no right to look; and names that people gave to copies."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwise.checkpoint.compare import find
from shardwise.checkpoint.files import LOCAL
from shardwise.checkpoint.foreign.convert import Options, convert
from shardwise.checkpoint.foreign.names import read_rules
from shardwise.checkpoint.objects import directory_of
from shardwise.checkpoint.remote import located
from shardwise.cli.options.config import read_configuration
from shardwise.errors import CheckpointError, ConfigError, DataError, UsageError
from shardwise.records import write_file
from shardwise.train.kept.rundir import RunDir, check_out, check_writable, find_checkpoint
from shardwise.train.settings import TrainSettings
from tests.checkpoints import SPLITS, write_checkpoint
from tests.pure.test_ckpt_cli import run

LONG = "a" * 300


def test_a_home_is_where_it_is_for_a_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves `~` behind `--out=`, and Python does in any text."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert located("~/runs") == tmp_path / "runs" and located("./~/a") == Path("~/a")
    settings = TrainSettings(out="~/runs/a", checkpoints="~/b", resume="auto", weights="s3://bucket/~/c")
    assert [settings.out, settings.checkpoints] == [f"{tmp_path}/runs/a", f"{tmp_path}/b"]
    assert settings.resume == "auto" and settings.weights == "s3://bucket/~/c"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "run" / "checkpoints"
    path.mkdir(parents=True)
    (path / "store.json").write_text("{}")
    for step in (6, 8):
        write_checkpoint(path, *SPLITS, step=step)
    return path


@pytest.fixture(params=["long", "loop", "in a loop"])
def odd(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    (tmp_path / "loop").symlink_to("loop")
    return tmp_path / {"long": LONG, "loop": "loop", "in a loop": "loop/x"}[request.param]


def test_a_link_in_place_of_a_file_is_named_as_one(store: Path) -> None:
    """The system says of it that there are too many levels of links."""
    manifest = store / "step-00000008" / "manifest.json"
    manifest.rename(store / "moved")
    manifest.symlink_to("../moved")
    (skipped,) = directory_of(store).listing().damaged
    assert "it is a link, and links are not followed" in skipped.reason


def refusing(of: Path) -> Callable[..., Any]:
    """A call of `os` that is not allowed for a path and what is below it: tests run as root, who may do all."""

    def wrapped(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *words: Any, **options: Any) -> Any:
            if isinstance(path, str | Path) and of in (Path(path), *Path(path).parents):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return real(path, *words, **options)

        return call

    return wrapped


@pytest.fixture
def forbidden(store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store that may not be looked at."""
    for name in ("stat", "lstat", "listdir"):
        monkeypatch.setattr(os, name, refusing(store)(getattr(os, name)))
    return store


def test_ckpt_refuses_it(odd: Path, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ("inspect", odd), ("verify", odd), ("diff", odd, store), ("diff", store, odd), ("export", odd, tmp_path / "x"),
        ("convert", odd, tmp_path / "x"),
    ):  # fmt: skip
        assert run(*words) == 4, words
        said = capsys.readouterr().err
        assert "cannot be read" in said or "found nothing there" in said, words  # the second: a source in a ring
    assert run("export", store, odd) in (2, 4)  # 2: a link is there already
    assert not (tmp_path / "x").exists()


def test_a_start_refuses_it(odd: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--out .*: cannot be read .*needed a path that this user may list"):
        check_out(RunDir(odd), resume="auto")
    with pytest.raises(UsageError, match="--checkpoints .*: cannot be read"):
        check_writable(odd, "--checkpoints")
    with pytest.raises(CheckpointError, match="--resume .*: (cannot be read|no such directory)"):
        find_checkpoint(odd)


def test_a_store_refuses_it(odd: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read .*needed a path that this user may list"):
        directory_of(odd).check_is_store()
    with pytest.raises(CheckpointError, match="cannot be read"):
        directory_of(odd).is_store()


def test_a_nul_or_no_path_at_all(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="found a NUL in it"):
        find("a\0b")
    for look in (LOCAL.kind, LOCAL.is_file, LOCAL.is_directory, LOCAL.names):
        with pytest.raises(CheckpointError, match=r"'a\\x00b': cannot be read .embedded null byte"):
            look(Path("a\0b"))
    for source, target in (("a\0b", "x"), ("x", "a\0b")):
        with pytest.raises(CheckpointError, match="null byte"):
            convert(tmp_path / source, tmp_path / target, Options())
    with pytest.raises(UsageError, match="--out.*null byte"):
        check_out(RunDir(Path("a\0b")), resume="auto")
    with pytest.raises(CheckpointError, match="--resume.*null byte"):
        find_checkpoint(Path("a\0b"))
    for value in (None, 5, b"store"):
        with pytest.raises(UsageError, match="needed a path or a URL"):
            located(value)  # type: ignore[arg-type]  # a wrong type is what it shall refuse


def test_an_empty_path_is_not_the_working_directory(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is a variable of the shell that is not set: a run would be spread out where somebody stands."""
    monkeypatch.chdir(store)
    assert run("verify", ".") == 0
    for words in (("verify", ""), ("export", "", "x"), ("convert", ".", ""), ("diff", ".", "")):
        assert run(*words) == 2
        assert "one of them empty" in capsys.readouterr().err
    with pytest.raises(UsageError, match="found an empty text, needed a path or a URL"):
        located("")
    keys = ("train.out", "train.resume", "train.weights", "train.checkpoints", "data.sources", "data.tokenizer")
    for key in (*keys, "model.preset", "model.factory"):
        with pytest.raises(ConfigError, match=f"{key} = ''"):
            read_configuration(None, sets=[f"{key}="])


def test_what_may_not_be_looked_at(forbidden: Path) -> None:
    for look in (LOCAL.kind, LOCAL.is_file, LOCAL.is_directory, LOCAL.names):
        with pytest.raises(CheckpointError, match=r"checkpoints: cannot be read .Permission denied"):
            look(forbidden)
    for path in (forbidden, forbidden.parent):
        with pytest.raises(CheckpointError, match="cannot be read .Permission denied"):
            find(path)
    with pytest.raises(CheckpointError, match="--resume .*: cannot be read .Permission denied"):
        find_checkpoint(forbidden)
    with pytest.raises(CheckpointError, match="checkpoints: cannot be read"):
        assert RunDir(forbidden.parent).has_checkpoints  # nobody knows
    with pytest.raises(UsageError, match="--out .*: cannot be read .Permission denied"):
        check_out(RunDir(forbidden / "below"), resume="auto")


def test_rules_are_read_from_a_file_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "deep").write_text("[rename]\na = " + "[" * 50_000)
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path / LONG, tmp_path / "a\0b", tmp_path / "deep"):
        with pytest.raises(DataError, match="cannot be read"):
            read_rules(path)


@pytest.mark.parametrize("size", ["", "9" * 400, "1." + "0" * 400, "\u0663GB", "0", "-1", "1 TB GB"])
def test_a_size_that_is_none(size: str, store: Path, tmp_path: Path) -> None:
    assert run("export", store, tmp_path / "x", f"--max-shard-size={size}") == 2


def test_copies_and_links_are_no_checkpoints_of_a_run(store: Path) -> None:
    """Their names begin as that of one does; they are no error, and nothing that a store would not read either."""
    job, newest = RunDir(store.parent), store / "step-00000008"
    for name in ("step-00000008-copy", "step-00000009 (copy)", "step-9", "step-x", "step-00000009.old-0123abcd"):
        shutil.copytree(newest, store / name)
    (store / "step-00000010").symlink_to(newest)
    assert job.has_checkpoints and find_checkpoint(job.path) == store
    assert find(job.path).path == newest
    for path in (newest, store / "step-00000006"):
        shutil.rmtree(path)
    assert not job.has_checkpoints
    with pytest.raises(CheckpointError, match="no complete checkpoint lies there"):
        find_checkpoint(job.path)


def test_what_is_in_the_way_of_a_checkpoint_is_moved_aside(store: Path) -> None:
    """A file, or a link whose end is gone: with it there each save of the step would fail."""
    directory = directory_of(store)
    manifest = directory.listing().complete[0][1]
    for put in (lambda path: path.write_text("x"), lambda path: path.symlink_to("nowhere")):
        shutil.rmtree(store / "step-00000008", ignore_errors=True)
        put(store / "step-00000008")
        partial = store / "step-00000008.partial-0123abcd"
        shutil.copytree(store / "step-00000006", partial)
        (partial / "manifest.json").unlink()
        assert directory.commit(partial, manifest) == store / "step-00000008"
        assert directory.listing().complete[0][0] == store / "step-00000008"


def test_a_link_stays_a_link_and_what_it_names_is_written(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "plan.toml").symlink_to(tmp_path / "shared" / "plan.toml")
    write_file(tmp_path / "plan.toml", {"axes": {"dp_shard": 2}})
    assert (tmp_path / "plan.toml").is_symlink() and "dp_shard = 2" in (tmp_path / "shared" / "plan.toml").read_text()
    assert [path.name for path in (tmp_path / "shared").iterdir()] == ["plan.toml"]
