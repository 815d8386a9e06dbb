"""What a load tells of the run that goes on: what was passed over, what has changed, and what nobody keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.checkpoint.agree import Peers
from shardwise.checkpoint.directory import Skipped


def tell_skipped(peers: Peers, path: Path, skipped: Sequence[Skipped]) -> None:
    """Which newer checkpoints were not taken, and why."""
    if skipped:
        reasons = "; ".join(item.reason for item in skipped)
        peers.warn(f"{path}: loaded in place of {', '.join(item.path.name for item in skipped)}: {reasons}")


def tell_changes(peers: Peers, path: Path, changes: Sequence[str]) -> None:
    """What of the maths is another one than at the save."""
    if changes:
        peers.warn(f"{path}: changed since it was saved: {'; '.join(changes)}")


def tell_no_position(peers: Peers, path: Path, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """A loop of the script's own that nobody tells where it was: it would use its first samples again.

    Args:
        peers: the ranks.
        path: of the checkpoint.
        then: its scalars.
        now: those of the state that went on from it.
    """
    if then.get("step") and "data" in then and then["data"] is None and now.get("data", 0) is None:
        peers.warn(
            f"{path}: holds no position in the data, as the state has no batches: the script itself must go on with "
            f"the samples of step {then['step'] + 1}; or let the state keep it: TrainState(placed, optimizer, batches) "
            "of shardwise.loader or whatever has state_dict and load_state_dict"
        )
