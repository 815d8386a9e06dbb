"""How a rank goes on from a checkpoint when settings have changed since, and what stays in quarantine."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from shardwise.checkpoint.agree import Peers
from shardwise.checkpoint.store import Loaded, Store
from shardwise.launch.rank.resuming import resume
from shardwise.train.batches import Batches
from shardwise.train.kept.changes import CONTENT, changed_now, leave_of, may_convert
from shardwise.train.kept.rundir import RunDir
from shardwise.train.settings import TrainSettings
from shardwise.train.state import TrainState


def go_on(
    run: RunDir, settings: TrainSettings, store: Store, state: TrainState, allow: Collection[str]
) -> Loaded | None:
    """Load what `--resume` says; None in a new run. Every rank calls it.

    Where `allow` says so, now or at the start that changed the setting, seed and data may be others than those of the
    checkpoint, and averages of another type than `optimizer.state_dtype` are converted. In another order of samples
    quarantine, which is of the old one, ends; else it is that of the checkpoint and of all events since.

    Raises:
        CheckpointError: nothing can be loaded, or not into this state.
        ConfigError, DataError: another seed or data set without leave.
    """
    batches = state.batches
    assert isinstance(batches, Batches)
    leave, now = Peers.of(state.mesh).on_first(
        f"reading {run.events}", lambda: (leave_of(run, allow), changed_now(run) | {CONTENT} & {*allow})
    )
    batches.accept, batches.is_other_order = _of_order(leave), bool(_of_order(now))
    loaded = resume(store, state, settings.resume, convert_state=may_convert(leave))
    if "seed" in batches.accept:
        state.seed = settings.seed
    ended, batches.is_other_order = batches.is_other_order, False
    if loaded is not None and ended:
        Peers.of(state.mesh).on_first(f"writing {run.events}", lambda: _end_quarantine(run))
    elif loaded is not None:
        batches.keep_in_quarantine(quarantined(run.read_events("quarantine")))
    return loaded


def _end_quarantine(run: RunDir) -> None:
    if run.read_events("quarantine"):
        run.add_event("quarantine", rows=None, nth=0, cause="the order of samples is another one")


def quarantined(events: Iterable[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """Positions by the record: the n-th of a run stands there once more where its step was tried again.

    >>> quarantined([{"rows": [0, 4], "nth": 1}, {"rows": [8, 12], "nth": 2}, {"rows": [8, 12], "nth": 2}])
    [(0, 4), (8, 12)]
    """
    found: list[tuple[int, int]] = []
    for event in events:
        nth, rows = event.get("nth"), event.get("rows")
        if nth is None:  # of an older version, which told each once
            found += [] if rows is None or tuple(rows) in found else [(rows[0], rows[1])]
        else:  # 0: of another order of samples from here on
            found[max(nth - 1, 0) :] = [(rows[0], rows[1])] if rows else []
    return found


def _of_order(leave: Collection[str]) -> frozenset[str]:
    """What of the order of samples may be another one."""
    seed = {"seed"} if {"all", "train.seed"} & set(leave) else set()
    size = {"size"} if any(key == "all" or key.startswith("data.") for key in leave) else set()
    return frozenset(seed | size)
