"""`--checkpoints`: which places a start may use, before any process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.checkpoint.format import Box
from shardwise.cli.options.kept import check_places, has_checkpoints
from shardwise.errors import CheckpointError, UsageError
from shardwise.train.kept.rundir import RunDir
from shardwise.train.settings import TrainSettings
from tests.checkpoints import content, write_checkpoint


def start(place: Path | str | None, resume: str = "auto") -> TrainSettings:
    return TrainSettings(checkpoints=None if place is None else str(place), resume=resume)


def fill(store: Path) -> Path:
    store.mkdir(parents=True)
    (store / "store.json").write_text("{}")
    whole = {"model.w": [(0, Box((0,), (4,)))]}
    return write_checkpoint(store, {"model.w": content("w", (4,), "float32")}, whole, {"model.w": "float32"}, 3)


def was(tmp_path: Path, place: Path | str | None) -> RunDir:
    """A run's directory, as a start with such a place left it."""
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    settings = {"train": {"checkpoints": None if place is None else str(place)}}
    run.config_json.write_text(json.dumps({"settings": settings, "identity": {}}))
    return run


def test_a_new_run_takes_an_empty_place_or_what_it_holds(tmp_path: Path) -> None:
    run, place = RunDir(tmp_path / "run"), tmp_path / "elsewhere"
    check_places(run, start(place))
    assert not has_checkpoints(run, start(place)) and not place.exists() and not run.path.exists()
    fill(place)
    check_places(run, start(place))  # a machine that is new to the run
    check_places(run, start(f"file://{place}"))
    assert has_checkpoints(run, start(place))


def test_never_does_not_overwrite(tmp_path: Path) -> None:
    fill(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match=r"elsewhere holds checkpoints, and --resume never"):
        check_places(RunDir(tmp_path / "run"), start(tmp_path / "elsewhere", "never"))


@pytest.mark.parametrize("to_run", [False, True])
def test_a_run_does_not_begin_again_because_its_checkpoints_are_looked_for_elsewhere(
    tmp_path: Path, to_run: bool
) -> None:
    old, new = (tmp_path / "old", None) if to_run else (None, tmp_path / "new")
    run = was(tmp_path, old)
    fill(old or run.checkpoints)
    check_places(run, start(old))
    with pytest.raises(UsageError, match="found none there, but the run in .* would begin again; copy them there"):
        check_places(run, start(new))
    check_places(run, start(new, str(old or run.checkpoints)))  # named
    fill(new or run.checkpoints)
    check_places(run, start(new))  # copied


def test_a_run_that_has_saved_nothing_may_move(tmp_path: Path) -> None:
    check_places(was(tmp_path, None), start(tmp_path / "new"))


def test_places_that_are_none(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    with pytest.raises(UsageError, match="the memory of one process"):
        check_places(run, start("memory://run"))
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--checkpoints .*file is a file"):
        check_places(run, start(tmp_path / "file"))
    with pytest.raises(CheckpointError, match="memory://nothing: found no checkpoint"):
        check_places(run, start(None, "memory://nothing"))
    with pytest.raises(CheckpointError, match="a password"):
        check_places(run, start("s3://me:secret@bucket/run"))
    with pytest.raises(UsageError, match="--checkpoints .*below lies below .*file, which is a file"):
        check_places(run, start(tmp_path / "file" / "below"))
