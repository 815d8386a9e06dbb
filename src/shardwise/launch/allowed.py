"""How a rank goes on from a checkpoint when settings have changed since, and what stays in quarantine."""

from __future__ import annotations

from collections.abc import Collection

from shardwise.checkpoint.agree import Peers
from shardwise.checkpoint.store import Loaded, Store
from shardwise.launch.resuming import resume
from shardwise.train.batches import Batches
from shardwise.train.changes import may_convert
from shardwise.train.rundir import RunDir
from shardwise.train.settings import TrainSettings
from shardwise.train.state import TrainState


def go_on(
    run: RunDir, settings: TrainSettings, store: Store, state: TrainState, allow: Collection[str]
) -> Loaded | None:
    """Load what `--resume` says; None in a new run. Every rank calls it.

    Seed and data may be others than those of the checkpoint where `allow` says so; then quarantine, which is of the old
    order, ends. Else it is that of the checkpoint and of all events since. Averages of another type than
    `optimizer.state_dtype` are converted where `allow` says so, now or at the start that changed the setting.

    Raises:
        CheckpointError: nothing can be loaded, or not into this state.
        ConfigError, DataError: another seed or data set without leave.
    """
    batches = state.batches
    assert isinstance(batches, Batches)
    is_all = "all" in allow
    seed = {"seed"} if is_all or "train.seed" in allow else set()
    size = {"size"} if is_all or any(key.startswith("data.") for key in allow) else set()
    batches.accept = frozenset(seed | size)
    leave = Peers.of(state.mesh).on_first(f"reading {run.events}", lambda: may_convert(run, allow))
    loaded = resume(store, state, settings.resume, convert_state=leave)
    if seed:
        state.seed = settings.seed
    if loaded is not None and not batches.accept:
        for rows in (event["rows"] for event in run.read_events("quarantine")):
            if rows is not None:
                batches.quarantine(*rows)
    return loaded
