"""The training process of `shardwise train`: `python -m shardwise.launch.rank.worker RUN_DIRECTORY`, once per rank.

It reads what the command line resolved (`config.json`, `plan.toml`) and does what any user's script does: open the
mesh, apply the plan, make an optimizer, a loader, a state and a store, and loop.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from importlib import import_module
from typing import Any

import torch

from shardwise.checkpoint.store import Loaded
from shardwise.errors import CheckpointError
from shardwise.launch.rank.allowed import go_on
from shardwise.launch.rank.resuming import (
    begin,
    open_cadence,
    open_store,
    read_held_out,
    read_job,
    record_resume,
    record_weights,
)
from shardwise.launch.rank.runjob import RunJob as RunJob
from shardwise.launch.rank.session import Session
from shardwise.launch.rank.session import Summary as Summary
from shardwise.parallel.compose import apply
from shardwise.parallel.mesh import Mesh, open_mesh
from shardwise.parallel.placed import Placed
from shardwise.train.batches import loader
from shardwise.train.build import (
    HF_PREFIX,
    Text,
    make_factory,
    make_loss,
    make_optimizer,
    read_text,
    vocab_size,
)
from shardwise.train.data.tokens import check_vocab
from shardwise.train.kept.changes import CONTENT, check_content
from shardwise.train.kept.lock import RunLock, end_at_once
from shardwise.train.kept.rundir import RunDir, can_lack, environment_facts, write_text
from shardwise.train.lr import make_schedule
from shardwise.train.metrics import MetricsLog
from shardwise.train.probe import Probe
from shardwise.train.progress import open_progress
from shardwise.train.rehearsal import rejoin
from shardwise.train.settings import RunSettings, TrainSettings
from shardwise.train.state import TrainState
from shardwise.train.step import StepOptions, TrainStep

PROBE_ROWS = 4
"""Samples on which each checkpoint's loss and gradient norm are kept."""


def run_session(job: RunJob) -> Summary:
    """Train as this process's rank, from the mesh to the summary."""
    settings = job.settings
    if settings.train.deterministic:
        torch.use_deterministic_algorithms(True)
    torch.manual_seed(settings.train.seed)
    with open_mesh(job.plan, device=settings.train.device) as mesh:
        text = read_text(settings, job.run, mesh)
        held = vocab_size(settings, job.spec)
        if held is not None:
            check_vocab(text.tokenizer, held)
        # who started this process may die before it does: the directory is free when both are gone
        with ExitStack() as stack:
            for folder in job.run.locks(settings.train.checkpoints) if mesh.is_first else ():
                stack.enter_context(RunLock.join(folder, end_at_once) or nullcontext())
            return _in_mesh(job, text, mesh)


def _in_mesh(job: RunJob, text: Text, mesh: Mesh) -> Summary:
    run, settings, plan, spec, train = job.run, job.settings, job.plan, job.spec, job.settings.train
    batch = plan.batch
    sample = text.train.get_batch(
        list(range(max(1, int(batch.global_size or 1) // plan.axes.data // batch.micro_batches)))
    )
    placed = apply(make_factory(settings, spec), plan, mesh, seed=train.seed, sample=sample)
    weights = _read_weights(placed, settings)
    state = TrainState(
        placed,
        make_optimizer(placed, settings.optimizer, spec),
        loader(text.train, batch, mesh, seed=train.seed, workers=settings.data.num_workers),
        schedule=make_schedule(settings.schedule, int(train.steps or 0)),
        seed=train.seed,
    )
    rows = [text.train[i] for i in range(min(PROBE_ROWS, len(text.train)))]
    store = open_store(run, settings, Probe(rows, make_loss(spec)), text.fingerprint)
    with warnings.catch_warnings():  # what was skipped is said below
        warnings.filterwarnings("ignore", ".*: loaded in place of ")
        loaded = go_on(run, train, store, state, job.allow)
        begun = begin(store, state, train.weights) if loaded is None else None
    if loaded is not None:
        now = settings.model_dump(mode="json") | {CONTENT: text.fingerprint}
        check_content(loaded.manifest.config, now, job.allow, other_rows=loaded.proof.other_rows)
    mirror = rejoin(TrainStep(state, make_loss(spec), StepOptions()))  # before anything of the run is written
    if mirror is not None and mirror.recovered_step is not None:
        loaded = begun = None
    if isinstance(begun, CheckpointError):
        raise begun
    if mesh.is_first:
        run.adopt(plan)
        with can_lack(run.environment):
            write_text(run.environment, json.dumps(_environment(mesh), indent=2) + "\n")
        if loaded is not None:
            record_resume(run, loaded)
        if begun is not None:
            record_weights(run, str(train.weights), begun)
    own = loaded if loaded is not None and loaded.path.parent == store.path else None
    with open_progress(state.step, int(train.steps or 0), quiet=job.quiet or not mesh.is_first) as progress:
        for line in _notes(train, state.step, weights, begun, loaded):
            progress.note(line)
        with _open_log(run, settings, state.step, mesh) as log:
            session = Session(
                settings=settings,
                run=run,
                state=state,
                store=store,
                text=text,
                spec=spec,
                progress=progress,
                log=log,
                num_params=spec.num_params if spec is not None else _count(placed),
                cadence=open_cadence(run, train, mesh),
                held_out=read_held_out(run, state.step, mesh, own.manifest.metric if own is not None else None),
                saved_step=state.step if own is not None else None,
            )
            return session.train()


def _notes(
    settings: TrainSettings, step: int, weights: str | None, begun: Loaded | None, loaded: Loaded | None
) -> Iterator[str]:
    """Where the state comes from."""
    if weights is not None:
        yield weights
    if begun is not None:
        yield from (f"skipped {item.path.name}: {item.reason}" for item in begun.skipped)
        yield f"beginning with the weights of {begun.path}"
        yield begun.proof.line
    if loaded is not None:
        yield from (f"skipped {item.path.name}: {item.reason}" for item in loaded.skipped)
        yield f"step {step}: continuing from {loaded.path}"
        yield loaded.proof.line
        yield from (
            f"step {step}: the learning rate's {change}" for change in loaded.changes if change.startswith("schedule: ")
        )
        if settings.weights is not None:
            yield f"weights of {settings.weights}: not read, as the run goes on from a checkpoint"


def _read_weights(placed: Placed, settings: RunSettings) -> str | None:
    """Fill the model with the weights of the directory that `--model hf:DIR` names; what was done, in words."""
    source = settings.model.factory or ""
    if not source.startswith(HF_PREFIX):
        return None
    # it imports transformers, which other models do without
    weights, directory = import_module("shardwise.checkpoint.hf_weights"), source.removeprefix(HF_PREFIX)
    if not weights.has_weights(directory):
        return f"{source}: random initial weights (no safetensors files there)"
    weights.load_hf(placed, directory)
    return f"{source}: weights read from {directory}"


def _open_log(run: RunDir, settings: RunSettings, step: int, mesh: Mesh) -> AbstractContextManager[MetricsLog | None]:
    if not mesh.is_first:
        return nullcontext()
    board = run.path / "tensorboard" if settings.train.tensorboard else None
    return MetricsLog(run.metrics, after_step=step, tensorboard=board)


def _count(placed: Placed) -> int:
    """Parameters of the whole model: each stage's, summed over the pp axis."""
    here = sum(math.prod(placement.global_shape) for placement in placed.placements.values())
    total = torch.tensor(here, dtype=torch.int64, device=placed.mesh.device)
    return int(placed.mesh.all_reduce_sum(total, "pp"))


def _environment(mesh: Mesh) -> dict[str, Any]:
    """What the results depend on, from a fixed list."""
    device = mesh.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return environment_facts() | {
        "world": mesh.world,
        "device": name,
        "num_threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def main(argv: list[str]) -> None:
    """Train as one rank.

    Args:
        argv: the run's directory, then the words of `RunJob.words`.
    """
    run_session(read_job(argv))


if __name__ == "__main__":
    main(sys.argv[1:])
