"""How a rank goes on from a checkpoint when settings have changed since, and what stays in quarantine."""

from __future__ import annotations

from collections.abc import Collection

from shardwise.checkpoint.agree import Peers
from shardwise.checkpoint.store import Loaded, Store
from shardwise.launch.resuming import resume
from shardwise.train.batches import Batches
from shardwise.train.changes import CONTENT, changed_now, leave_of, may_convert
from shardwise.train.rundir import RunDir
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
    if loaded is not None and not ended:
        for rows in (event["rows"] for event in run.read_events("quarantine")):
            if rows is not None:
                batches.quarantine(*rows)
    return loaded


def _of_order(leave: Collection[str]) -> frozenset[str]:
    """What of the order of samples may be another one."""
    seed = {"seed"} if {"all", "train.seed"} & set(leave) else set()
    size = {"size"} if any(key == "all" or key.startswith("data.") for key in leave) else set()
    return frozenset(seed | size)
