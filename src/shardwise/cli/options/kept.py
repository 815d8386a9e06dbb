"""Where a run is, and `--checkpoints`, another place than its directory: looked at before a process starts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.cli.options.config import Configuration
from shardwise.errors import ChangedError, CheckpointError, UsageError
from shardwise.train.kept.changes import Before, find_changes
from shardwise.train.kept.rundir import RunDir, check_out, check_writable, find_checkpoint

if TYPE_CHECKING:
    from shardwise.plan.plan import Plan
    from shardwise.train.settings import TrainSettings


def of_its_run(configuration: Configuration, file: Path | None) -> Configuration:
    """A run's own record means the run that it lies in, wherever that was moved to, or this start is made from.

    Args:
        configuration: of a file, whose `out` somebody may have changed, and flags.
        file: it, if there is one.
    """
    if file is None or configuration.origin("train.out").kind != "file":
        return configuration
    run, out = RunDir(file.parent), str(configuration.settings.train.out)
    is_record = file.name == run.config_toml.name and _before(run, "out") == out
    if not is_record or os.path.realpath(out) == os.path.realpath(run.path):
        return configuration
    return configuration.derive({"train.out": (str(run.path), f"its run lies there, and not at {out!r}, as it says")})


def check_places(run: RunDir, settings: TrainSettings) -> None:
    """Whether a run may use its directory and its checkpoints' place, and whether there is what it shall go on from.

    Args:
        run: the directory, which need not exist.
        settings: of this start.

    Raises:
        UsageError: a place that holds something else, or that would make the run begin again unasked.
        CheckpointError: a place that cannot be reached or read; nothing lies where `--resume` points.
    """
    settings = _resolved(settings)
    check_out(run, resume=settings.resume)
    if settings.resume not in ("auto", "never"):
        _check_there(settings.resume, "--resume")
    place = settings.checkpoints
    if place is not None and place.startswith("memory:"):
        raise UsageError(
            f"--checkpoints {place}: found the memory of one process, needed a place that outlives it; give a "
            "directory, or a URL such as s3://bucket/run"
        )
    holds = has_checkpoints(run, settings)
    if settings.weights is not None and not holds and settings.resume in ("auto", "never"):
        _check_there(settings.weights, "--weights")
    if settings.resume == "never" and place is not None and holds:
        raise UsageError(
            f"--checkpoints {place} holds checkpoints, and --resume never would overwrite them; choose another place, "
            "or leave --resume out to continue"
        )
    before = _before(run, "checkpoints")
    has_begun = before is not None or run.has_checkpoints
    if settings.resume == "auto" and has_begun and before != place and not holds:
        raise UsageError(
            f"--checkpoints {place or run.checkpoints}: found none there, but the run in {run.path} kept them at "
            f"{before or run.checkpoints}, and would begin again; copy them there, give --checkpoints as it was, or "
            "choose another --out"
        )


def check_weights(run: RunDir, settings: TrainSettings, config: Mapping[str, Any], plan: Plan) -> None:
    """Whether `--weights` are those of this model, and, where the run has begun, those that it began with.

    Args:
        run: the directory.
        settings: of this start.
        config: what will be written as `config.json`.
        plan: this start's.

    Raises:
        ChangedError: a model that computes something else with the same tensors; others than the run began with.
    """
    wanted, holds = settings.weights, settings.resume != "never" and has_checkpoints(run, settings)
    if wanted is None:
        return
    if holds:
        began = [event["asked"] for event in run.read_events("weights")]
        if began[-1:] != [wanted]:
            raise ChangedError(
                f"--weights {wanted}: the run in {run.path} has begun with {(began or ['weights of its own'])[-1]}, "
                "and goes on from its checkpoints; leave --weights out, or begin another run with --out"
            )
    elif settings.resume in ("auto", "never"):
        _check_model(wanted, config, plan)


def _check_model(wanted: str, config: Mapping[str, Any], plan: Plan) -> None:
    """Sizes that no tensor shows: heads, experts per token, windows. Only presets say them."""
    from shardwise.checkpoint.compare import find, place_of

    with suppress(CheckpointError):  # the load will say what is wrong with it
        manifest = find(place_of(wanted)).manifest()
        changes = find_changes(Before.of_checkpoint(manifest.config, manifest.plan_fields), config, plan)
        sizes = [c for c in changes if c.key.startswith("model.") and c.kind == "maths" and c.key not in _OTHER]
        if sizes:
            raise ChangedError(
                f"--weights {wanted}: found weights of another model: {'; '.join(map(str, sizes))}; needed: the sizes "
                "that they were trained with; give those"
            )


_OTHER = ("model.preset", "model.factory", "model.max_seq_len")
"""How a model was named, and a length beyond which no tensor reaches."""


def _resolved(settings: TrainSettings) -> TrainSettings:
    """With stores in place of the runs that `--resume` and `--weights` name, where these keep them elsewhere."""
    from shardwise.checkpoint.compare import kept_elsewhere

    named = {"resume": None if settings.resume in ("auto", "never") else settings.resume, "weights": settings.weights}
    places = {key: kept_elsewhere(path) for key, path in named.items() if path is not None}
    return settings.model_copy(update={key: str(place) for key, place in places.items() if place is not None})


def has_checkpoints(run: RunDir, settings: TrainSettings) -> bool:
    """Whether a complete checkpoint lies where a run keeps them.

    Raises:
        UsageError: a directory that takes no files.
        CheckpointError: the place cannot be reached.
    """
    if settings.checkpoints is None:
        return run.has_checkpoints
    from shardwise.checkpoint.objects import directory_of
    from shardwise.checkpoint.remote import RemotePath, files_for, located

    place = located(settings.checkpoints)
    if not isinstance(place, RemotePath):
        check_writable(place, "--checkpoints")
    directory = directory_of(place, files_for(place))
    directory.check_is_store()
    return bool(directory.listing().complete)


def _check_there(wanted: str, flag: str) -> None:
    from shardwise.checkpoint.compare import find
    from shardwise.checkpoint.remote import RemotePath, located

    place = located(wanted)
    if isinstance(place, RemotePath):
        find(place)
    else:
        find_checkpoint(place, flag)


def _before(run: RunDir, key: str) -> str | None:
    """What a setting of `train` was at the last start in this directory, as text."""
    if run.identity() is None:
        return None
    found = json.loads(Path(run.config_json).read_text(encoding="utf-8"))["settings"]["train"].get(key)
    return str(found) if found is not None else None
