"""How `shardwise train` goes on from a checkpoint, and when it makes the next one."""

from __future__ import annotations

from pathlib import Path

import torch

from shardwise.checkpoint.cadence import Cadence, Every
from shardwise.checkpoint.compare import place_of
from shardwise.checkpoint.remote import located
from shardwise.checkpoint.store import Loaded, Store
from shardwise.parallel.mesh import Mesh
from shardwise.records import add_record
from shardwise.train.metrics import read_metrics
from shardwise.train.rundir import RunDir
from shardwise.train.settings import TrainSettings
from shardwise.train.state import TrainState


def resume(store: Store, state: TrainState, wanted: str, *, convert_state: bool = False) -> Loaded | None:
    """Load what `--resume` says: the newest checkpoint of this run, none, or one of another run.

    `convert_state` is that of `Store.load`.
    """
    own = store.load_latest(state, convert_state=convert_state) if wanted != "never" else None
    if own is not None or wanted in ("auto", "never"):
        return own
    return store.load(state, place_of(wanted), convert_state=convert_state)


def kept_at(run: RunDir, settings: TrainSettings) -> Path:
    """Where a run keeps its checkpoints.

    Raises:
        CheckpointError: a URL that names no place.
    """
    return located(settings.checkpoints) if settings.checkpoints is not None else run.checkpoints


def record_resume(run: RunDir, loaded: Loaded) -> None:
    """What was loaded, and the proof, for the run's record."""
    record = {
        "step": loaded.step,
        "checkpoint": str(loaded.path),
        "plan_then": loaded.manifest.plan,
        "seconds": loaded.seconds,
        "skipped": [f"{item.path.name}: {item.reason}" for item in loaded.skipped],
        "proof": loaded.proof.to_dict(),
    }
    add_record(run.resumes, record)


def open_cadence(run: RunDir, settings: TrainSettings, mesh: Mesh) -> Cadence:
    """When a run saves; every start that went on from a checkpoint counts as a failure, for `auto`."""

    def share(value: float) -> float:
        # the maximum, with every other rank at 0, is rank 0's number
        told = torch.tensor(value if mesh.is_first else 0.0, dtype=torch.float64, device=mesh.device)
        return float(mesh.all_reduce_max(told))

    rows = read_metrics(run.metrics) if mesh.is_first and run.metrics.exists() else []
    resumes = run.resumes.read_text(encoding="utf-8").count("\n") if run.resumes.exists() else 0
    hours = sum(float(row.get("step_s") or 0.0) for row in rows) / 3600
    return Cadence(
        Every.parse(settings.checkpoint_every or 0),
        world=mesh.world,
        share=share,
        failures=resumes,
        hours=hours,
    )
