"""How `shardwise train` goes on from a checkpoint, when it makes the next one, and which of them it keeps."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from shardwise.checkpoint.cadence import Cadence, Every
from shardwise.checkpoint.compare import place_of
from shardwise.checkpoint.remote import located
from shardwise.checkpoint.retention import Retention
from shardwise.checkpoint.saveable import Prober
from shardwise.checkpoint.store import Loaded, Store
from shardwise.errors import CheckpointError
from shardwise.journal import add_record
from shardwise.launch.environment import recovery_place
from shardwise.launch.rank.runjob import RunJob
from shardwise.launch.variables import variables
from shardwise.parallel.mesh import Mesh
from shardwise.train.kept.changes import CONTENT
from shardwise.train.kept.outliving import Place
from shardwise.train.kept.rundir import RunDir
from shardwise.train.settings import RunSettings, TrainSettings
from shardwise.train.state import TrainState


def read_job(argv: list[str]) -> RunJob:
    """The job of a rank: by the record of a start that is not loaded yet, else by that of the run."""
    run = RunDir(Path(argv[0]))
    if run.starting.config_json.is_file():
        with suppress(FileNotFoundError):  # another rank has made it the run's meanwhile
            return replace(RunJob.read([str(run.starting.path), *argv[1:]]), run=run)
    return RunJob.read(argv)


def resume(store: Store, state: TrainState, wanted: str, *, convert_state: bool = False) -> Loaded | None:
    """Load what `--resume` says: the newest checkpoint of this run, none, or one of another run.

    `convert_state` is that of `Store.load`.
    """
    own = store.load_latest(state, convert_state=convert_state) if wanted != "never" else None
    if own is not None or wanted in ("auto", "never"):
        return own
    return store.load(state, place_of(wanted), convert_state=convert_state)


def begin(store: Store, state: TrainState, weights: str | None) -> Loaded | CheckpointError | None:
    """Load the weights that `--weights` names: the optimizer is as new, step 0, data from its first sample.

    They become what the plan's precision keeps: of another type they are converted, as the proof says.

    Where this process takes the place of another one under `--recover`, what went wrong is returned: the run's own
    memory may hold what it has reached, and then nobody needs them.

    Raises:
        CheckpointError: they cannot be read, or are not this model's.
    """
    text = recovery_place(variables())
    try:
        return store.load(state, place_of(weights), weights_only=True, convert_state=True) if weights else None
    except CheckpointError as error:
        if text is None or Place.parse(text).world == 1:
            raise
        return error


def record_weights(run: RunDir, asked: str, begun: Loaded) -> None:
    """What a run began with, for its record."""
    skipped = [f"{item.path.name}: {item.reason}" for item in begun.skipped]
    facts = {"checkpoint": str(begun.path), "step": begun.step, "skipped": skipped, "proof": begun.proof.to_dict()}
    run.add_event("weights", asked=asked, **facts)


def kept_at(run: RunDir, settings: TrainSettings) -> Path:
    """Where a run keeps its checkpoints.

    Raises:
        CheckpointError: a URL that names no place.
    """
    return located(settings.checkpoints) if settings.checkpoints is not None else run.checkpoints


def open_store(run: RunDir, settings: RunSettings, probe: Prober, fingerprint: str) -> Store:
    """The store of a run, with what is to stay in it; its checkpoints hold the settings, and the data's fingerprint.

    Raises:
        CheckpointError: see `Store`.
    """
    train = settings.train
    keep = Retention(last=train.keep, every=train.keep_every, best=train.keep_best)
    return Store(
        kept_at(run, train), keep=keep, probe=probe, config=settings.model_dump(mode="json") | {CONTENT: fingerprint}
    )


@dataclass
class HeldOut:
    """Losses of the held-out split, by which `train.keep_best` chooses among checkpoints."""

    seen: dict[int, float]
    """By step."""

    def before(self, step: int) -> float | None:
        """That of the evaluation at a step, or of the last one before it; None: there was none, or it is not finite."""
        loss = self.seen.get(max((at for at in self.seen if at <= step), default=-1), math.inf)
        return loss if math.isfinite(loss) else None


def read_held_out(run: RunDir, step: int, mesh: Mesh, stored: float | None = None) -> HeldOut:
    """What the run's record knows, which ends at the step that it goes on from: its last evaluation. A collective.

    `stored`: what its checkpoint says; on a machine that is new to the run there is no record.
    """
    rows = run.read_metrics() if mesh.is_first else []
    found = [row["eval_loss"] for row in rows if "eval_loss" in row]
    loss = _shared(found[-1] if found and found[-1] is not None else math.inf, mesh)
    return HeldOut({step: stored if stored is not None and not math.isfinite(loss) else loss})


def _shared(value: float, mesh: Mesh) -> float:
    """Rank 0's number, which is not negative, on all ranks: the maximum, with every other rank at 0."""
    told = torch.tensor(value if mesh.is_first else 0.0, dtype=torch.float64, device=mesh.device)
    return float(mesh.all_reduce_max(told))


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
    rows = run.read_metrics() if mesh.is_first else []
    resumes = run.resumes.read_bytes().count(b"\n") if run.resumes.exists() else 0
    hours = sum(max(0.0, float(row.get("step_s") or 0.0)) for row in rows) / 3600
    return Cadence(
        Every.parse(settings.checkpoint_every),
        world=mesh.world,
        share=partial(_shared, mesh=mesh),
        failures=resumes,
        hours=hours,
    )
