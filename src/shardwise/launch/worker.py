"""The training process of `shardwise train`: `python -m shardwise.launch.worker RUN_DIRECTORY`, once per rank.

It reads what the command line resolved (`config.json`, `plan.toml`) and does what any user's script does: open the
mesh, apply the plan, make an optimizer, a loader, a state and a store, and loop.
"""

from __future__ import annotations

import json
import math
import sys
import time
import warnings
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import Any

import torch

from shardwise.checkpoint.cadence import Cadence
from shardwise.checkpoint.saving import Save
from shardwise.checkpoint.store import Store
from shardwise.errors import ExitCode
from shardwise.launch.allowed import go_on
from shardwise.launch.resuming import HeldOut, open_cadence, open_store, read_held_out, read_job, record_resume
from shardwise.launch.runjob import RunJob as RunJob
from shardwise.model.spec import ModelSpec
from shardwise.models.presets import training_flops_per_token
from shardwise.parallel.compose import apply
from shardwise.parallel.mesh import Mesh, open_mesh
from shardwise.parallel.placed import Placed
from shardwise.train.batches import eval_batches, loader
from shardwise.train.build import (
    HF_PREFIX,
    Text,
    make_factory,
    make_loss,
    make_optimizer,
    make_schedule,
    read_text,
    token_loss,
    vocab_size,
)
from shardwise.train.changes import check_content
from shardwise.train.lock import RunLock, end_at_once
from shardwise.train.loop import evaluate, steps
from shardwise.train.metrics import MetricsLog, memory_bytes, peak_flops, read_metrics
from shardwise.train.picture import Curves, draw_loss
from shardwise.train.probe import Probe
from shardwise.train.progress import Progress, Sight, open_progress
from shardwise.train.protect import Protect
from shardwise.train.rehearsal import rejoin
from shardwise.train.rundir import RunDir, environment_facts, write_text
from shardwise.train.sampling import sample_text
from shardwise.train.settings import RunSettings
from shardwise.train.state import TrainState
from shardwise.train.step import StepMetrics, StepOptions, TrainStep
from shardwise.train.tokens import check_vocab

PROBE_ROWS = 4
"""Samples on which each checkpoint's loss and gradient norm are kept."""
PROMPT = "def "
"""What a sample starts with after training on Python sources; other text starts with its own held-out beginning."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """How a run ended; `summary.json`."""

    step: int
    tokens: int
    seconds: float
    train_loss: float | None
    eval_loss: float
    """Nats per token over the whole held-out split."""
    eval_bits_per_byte: float
    unigram_entropy: float
    """Nats per token of the held-out split under its own frequencies."""
    parameters: int
    sample: str | None


@dataclass
class Session:
    """One rank's run."""

    settings: RunSettings
    run: RunDir
    state: TrainState
    store: Store
    text: Text
    spec: ModelSpec | None
    progress: Progress
    log: MetricsLog | None
    """On rank zero."""
    num_params: int
    cadence: Cadence
    held_out: HeldOut
    last: StepMetrics | None = None
    saved_step: int | None = None
    begun: float = field(default_factory=time.perf_counter)

    @property
    def total(self) -> int:
        """Steps of the run."""
        return int(self.settings.train.steps or 0)

    def train(self) -> Summary:
        """Loop, evaluate, save, sample and draw."""
        settings = self.settings.train
        options = StepOptions(
            clip_norm=settings.clip_norm or None,
            clip_value=settings.clip_value,
            on_nonfinite=settings.nonfinite,
            protect=Protect(policy=settings.spike) if settings.spike != "off" else None,
            on_oom=settings.on_oom,
            check_replicas=settings.check_replicas,
        )
        try:
            for m in steps(self.state, make_loss(self.spec), until=self.total, options=options, store=self):
                self._after(m)
        except SystemExit as stop:
            self._say_stopped(int(stop.code or 0))
            raise
        if not settings.keep_best:
            self._save()  # first: an evaluation may be long
        loss, bits = self._evaluate()
        self._save()
        summary = Summary(
            step=self.state.step,
            tokens=int(self.state.weight),
            seconds=time.perf_counter() - self.begun,
            train_loss=self.last.loss if self.last else None,
            eval_loss=loss,
            eval_bits_per_byte=bits,
            unigram_entropy=self.text.entropy,
            parameters=self.num_params,
            sample=self._sample(),
        )
        if self.log is not None:
            write_text(self.run.summary, json.dumps(asdict(summary), indent=2) + "\n")
            self._draw()
        return summary

    def _after(self, m: StepMetrics) -> None:
        """What follows a step: its record, and what is due."""
        self.last = m
        tokens_per_s = m.weight / m.seconds if m.seconds else 0.0
        device, plan = self.state.mesh.device, self.state.placed.plan
        peak, mfu = peak_flops(device, plan.precision), None
        if peak is not None and self.spec is not None:
            flops = training_flops_per_token(self.spec, int(self.settings.data.seq_len or 0))
            mfu = tokens_per_s * flops / (peak * self.state.mesh.world)
        sight = Sight(step=m.step, loss=m.loss, tokens_per_s=tokens_per_s, memory_bytes=memory_bytes(device), mfu=mfu)
        if self.log is not None:
            record = {"step": m.step, "loss": m.loss, "grad_norm": m.grad_norm, "lr": m.lr, "weight": m.weight}
            self.log.write(
                record
                | {"tokens": int(self.state.weight), "tokens_per_s": tokens_per_s, "step_s": m.seconds, "mfu": mfu}
                | {"memory_bytes": sight.memory_bytes, "skipped": m.skipped}
                | {f"loss_{name}": mean for name, mean in m.losses.items()}
            )
        self.progress.show(sight)
        for facts in m.events:
            self.progress.note(", ".join(f"{key} {value}" for key, value in facts.items()))
            if self.log is not None:
                self.run.add_event(**facts)
        if m.step != self.state.step:  # gone back: this step is yet to come
            return
        if m.skipped and not m.events:
            self.progress.note(f"step {m.step}: loss or gradient is not finite; the update was skipped on all ranks")
        if m.stopping is not None or m.step == self.total:
            return
        if _due(m.step, self.settings.train.eval_every):
            self._evaluate()
        self._say_findings()
        is_due = self.cadence.is_due(m.step)
        if self.cadence.news:
            self.progress.note(f"step {m.step}: {self.cadence.news}")
        if is_due:
            self._save_beside()

    def _evaluate(self) -> tuple[float, float]:
        """Nats per token and bits per byte of the whole held-out split."""
        batches = eval_batches(self.text.held_out, self.state.placed.plan.batch, self.state.mesh)
        total = evaluate(self.state.placed, token_loss, batches)
        nats = float(total.sum)
        loss, bits = nats / float(total.weight), nats / math.log(2) / self.text.held_out_bytes
        self.held_out.seen[self.state.step] = loss
        record = {"step": self.state.step, "eval_loss": loss, "eval_bits_per_byte": bits}
        if self.log is not None:
            self.log.write(record | {"eval_tokens": int(total.weight), "unigram_entropy": self.text.entropy})
        self.progress.note(
            f"step {self.state.step}: held out {loss:.4f} nats per token, {bits:.4f} bits per byte "
            f"(unigram entropy {self.text.entropy:.4f} nats)"
        )
        return loss, bits

    def save(self, state: TrainState) -> Save:
        """What the loop calls when it is told to stop: a save with the loss by which `train.keep_best` chooses."""
        return self.store.save(state, metric=self.held_out.before(state.step))

    def _save(self) -> None:
        if self.saved_step != self.state.step:
            saved = self.save(self.state)
            self.saved_step = self.state.step
            self.progress.note(f"step {saved.step}: saved {saved.path} ({saved.size_bytes / 1e6:.1f} MB)")
            self._say_findings()

    def _say_findings(self) -> None:
        """What went wrong in saves beside training: the run goes on."""
        for finding in self.store.take_findings():
            self.progress.note(f"step {self.state.step}: {finding}")
            if self.log is not None:
                self.log.write({"step": self.state.step, "finding": finding.to_dict()})

    def _save_beside(self) -> None:
        """Save while training goes on; what it took goes into the metrics."""
        saving = self.store.save_async(self.state, metric=self.held_out.before(self.state.step))
        self.saved_step = self.state.step
        before = self.cadence.reason
        stalled = saving.stalled_s - saving.waited_s + saving.previous_held_up_s
        self.cadence.saved(self.state.step, stalled_s=stalled, busy_s=saving.previous_s)
        record = {"save_stall_s": saving.stalled_s, "save_wait_s": saving.waited_s}
        record["previous_save_held_up_s"] = saving.previous_held_up_s
        if self.log is not None:
            self.log.write({"step": self.state.step} | record)
        why = f"; {before}" if before else ""
        self.progress.note(f"step {self.state.step}: saving, {1000 * saving.stalled_s:.1f} ms{why}")

    def _sample(self) -> str | None:
        if not self.settings.train.sample:
            return None
        tokenizer = self.text.tokenizer
        first = [int(token) for token in self.text.held_out.tokens[:16]]
        prompt = PROMPT if self.settings.data.sources == ("stdlib",) else tokenizer.decode(first)
        seq_len = int(self.settings.data.seq_len or 0)
        text = sample_text(self.state.placed, tokenizer, prompt, seq_len=seq_len, seed=self.settings.train.seed)
        if self.log is not None:
            write_text(self.run.sample, text + "\n")
        return text

    def _draw(self) -> None:
        rows = read_metrics(self.run.metrics)
        points = {key: [(row["step"], row[key]) for row in rows if row.get(key) is not None] for key in _CURVES}
        sources = ", ".join(self.settings.data.sources)
        curves = Curves(
            title=f"{self.settings.train.name} on {sources}, {self.state.placed.plan}",
            train=points["loss"],
            evaluation=points["eval_loss"],
            level=self.text.entropy,
        )
        draw_loss(curves, self.run.picture)

    def _say_stopped(self, code: int) -> None:
        why = "loss or gradient is not finite" if code == ExitCode.NON_FINITE else "asked to stop"
        if self.log is not None:
            self.run.add_event("stopped", step=self.state.step, code=code)
        self.progress.note(
            f"step {self.state.step}: {why}; saved to {self.store.path}; go on with "
            f"`shardwise train {self.run.config_toml}`"
        )


_CURVES = ("loss", "eval_loss")


def _due(step: int, every: int | None) -> bool:
    return bool(every) and step % int(every or 1) == 0


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
    store = open_store(run, settings, Probe(rows, make_loss(spec)))
    with warnings.catch_warnings():  # what was skipped is said below
        warnings.filterwarnings("ignore", ".*: loaded in place of ")
        loaded = go_on(run, train, store, state, job.allow)
    if loaded is not None and loaded.proof.other_rows:
        check_content(loaded.manifest.config, settings.model_dump(mode="json"), job.allow)
    mirror = rejoin(TrainStep(state, make_loss(spec), StepOptions()))  # before anything of the run is written
    if mirror is not None and mirror.recovered_step is not None:
        loaded = None
    if mesh.is_first:
        run.adopt(plan)
        write_text(run.environment, json.dumps(_environment(mesh), indent=2) + "\n")
        if loaded is not None:
            record_resume(run, loaded)
    with open_progress(state.step, int(train.steps or 0), quiet=job.quiet or not mesh.is_first) as progress:
        if weights is not None:
            progress.note(weights)
        if loaded is not None:
            for item in loaded.skipped:
                progress.note(f"skipped {item.path.name}: {item.reason}")
            progress.note(f"step {state.step}: continuing from {loaded.path}")
            progress.note(loaded.proof.line)
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
                held_out=read_held_out(run, state.step, mesh),
                saved_step=state.step if loaded is not None and loaded.path.parent == store.path else None,
            )
            return session.train()


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
