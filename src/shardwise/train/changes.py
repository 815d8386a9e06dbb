"""What changed in a run's settings since its directory was last used, and what of it changes the maths. No torch."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from shardwise.errors import ChangedError, UsageError
from shardwise.findings import nearest
from shardwise.plan.plan import MATHS, Plan
from shardwise.train.rundir import RunDir

_MATHS = ("model.", "data.", "optimizer.", "schedule.")
_MATHS_KEYS = [f"train.{key}" for key in ("global_batch", "clip_norm", "clip_value", "nonfinite", "spike", "seed")]
_NOT_MATHS = ("data.num_workers", "model.name")
_LAYOUT = ("plan.shorthand", "plan.file", "train.micro_batches", "train.nproc", "train.device")
_EACH_TIME = ("train.out", "train.name", "train.resume", "train.port")
"""What a start says of itself."""
_STATE_DTYPE = "optimizer.state_dtype"


@dataclass(frozen=True)
class Change:
    """One setting that is not what it was."""

    key: str
    before: Any
    now: Any
    kind: Literal["maths", "layout", "other"]
    """Maths: another result. Layout: the same result elsewhere. Other: how long, what is shown and kept."""

    def __str__(self) -> str:
        return f"{self.key}: {self.before!r} -> {self.now!r} ({self.kind})"


def find_changes(run: RunDir, config: Mapping[str, Any], plan: Plan) -> list[Change]:
    """Settings that differ from those of the run that lies in a directory, the maths first; none in a new one.

    Args:
        run: its directory.
        config: what will be written as `config.json`.
        plan: what will be written as `plan.toml`.

    >>> find_changes(RunDir(Path("/nowhere")), {}, Plan())  # doctest: +SKIP
    []
    """
    if run.identity() is None:
        return []
    there = json.loads(run.config_json.read_text(encoding="utf-8"))
    before, now = _flat(there), _flat(json.loads(json.dumps(config)))
    lengthened = before.get("train.steps") != now.get("train.steps")
    derived = str(config["origins"].get("schedule.warmup", "")).startswith("derived")
    planned = Plan.load(run.plan).diff(plan) if run.plan.is_file() else {}
    found = [Change(f"plan.{key}", *pair, "maths") for key, pair in planned.items() if key.startswith(MATHS)]
    for key in sorted(before.keys() & now.keys()):
        if before[key] != now[key] and key not in _EACH_TIME:
            follows = key == "schedule.warmup" and derived and lengthened  # nobody said it: it goes with the length
            found.append(Change(key, before[key], now[key], "other" if follows else _kind(key)))
    return sorted(found, key=lambda change: (("maths", "layout", "other").index(change.kind), change.key))


def check_allowed(run: RunDir, changes: Collection[Change], allow: Collection[str]) -> None:
    """Refuse changes of the maths that nobody allowed.

    Args:
        run: for the message.
        changes: from `find_changes`.
        allow: keys, or `all`.

    Raises:
        ChangedError: a change of the maths that is not allowed.
        UsageError: an allowed key that is no change: a slip of the pen.
    """
    keys = [change.key for change in changes]
    # averages of another type also lie in what --resume names, or here, if a start ended before it saved
    unknown = [key for key in allow if key not in keys and key not in ("all", _STATE_DTYPE)]
    if unknown:
        raise UsageError(
            f"--allow {unknown[0]}: found no such change; what changed: {', '.join(keys) or 'nothing'}; "
            f"{nearest(unknown[0], keys) if keys else 'leave it out'}"
        )
    refused = [change for change in changes if change.kind == "maths" and not {change.key, "all"} & set(allow)]
    if refused:
        flags = " ".join(f"--allow {change.key}" for change in refused)
        raise ChangedError(
            f"{run.path} holds a run whose maths these settings change: {'; '.join(map(str, refused))}; needed: the "
            f"settings as they were, or leave to change them; give the old values, choose another --out, or add {flags}"
        )


def may_convert(run: RunDir, allow: Collection[str]) -> bool:
    """Whether checkpoints whose averages have another type than `optimizer.state_dtype` may be converted.

    The start that changed the setting may have ended before it saved: leave that it had holds for those after it.

    Args:
        run: its record says what was changed, with leave.
        allow: keys, or `all`.
    """
    told = [change for event in run.read_events("changed") for change in event["changes"]]
    return bool({_STATE_DTYPE, "all"} & set(allow)) or any(change.startswith(f"{_STATE_DTYPE}: ") for change in told)


def _kind(key: str) -> Literal["maths", "layout", "other"]:
    if key not in _NOT_MATHS and (key.startswith(_MATHS) or key in _MATHS_KEYS):
        return "maths"
    return "layout" if key in _LAYOUT else "other"


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted names; the model's by its sizes, however they were said."""
    flat = {f"{section}.{key}": value for section, keys in config["settings"].items() for key, value in keys.items()}
    if config["spec"] is not None:
        flat = {key: value for key, value in flat.items() if not key.startswith("model.")}
        flat |= {f"model.{key}": value for key, value in config["spec"].items()}
    return flat
