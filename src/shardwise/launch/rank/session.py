"""`Session`: what one rank of `shardwise train` does from the first step to the summary."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from shardwise.checkpoint.cadence import Cadence
from shardwise.checkpoint.saving import Save, Saving
from shardwise.checkpoint.store import Store
from shardwise.errors import CheckpointError, ExitCode
from shardwise.journal import read_metrics
from shardwise.launch.rank.resuming import HeldOut
from shardwise.model.spec import ModelSpec
from shardwise.models.presets import training_flops_per_token
from shardwise.train.batches import Window, eval_batches
from shardwise.train.build import Text, make_loss, token_loss
from shardwise.train.kept.rundir import COMPLETE, RunDir, can_lack, write_text
from shardwise.train.loop import evaluate, steps
from shardwise.train.metrics import MetricsLog, finite, memory_bytes, peak_flops
from shardwise.train.picture import Curves, draw_loss
from shardwise.train.progress import Progress, Sight
from shardwise.train.protect import Protect
from shardwise.train.sampling import sample_text
from shardwise.train.settings import RunSettings
from shardwise.train.signals import EXIT_CODES, listening, stop_name
from shardwise.train.state import TrainState
from shardwise.train.step import StepMetrics, StepOptions

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
    saved_step: int | None = None
    """Of the last save that is known to be complete."""
    saving: Saving | None = None
    """A save beside training whose end nobody has seen yet."""
    stop_requested: int = 0
    """As that of a `TrainStep`, and also while no step is made."""
    stopping: str | None = None
    """The signal that came to some rank; the same on all of them."""
    begun: float = field(default_factory=time.perf_counter)

    @property
    def total(self) -> int:
        """Steps of the run."""
        return int(self.settings.train.steps or 0)

    def train(self) -> Summary:
        """Loop, save, evaluate, sample and draw; after a signal only what is needed to go on later.

        Raises:
            SystemExit: after a signal, or under a policy that stops, when the state is saved.
        """
        with listening(self):
            try:
                self._loop()
                if not self.settings.train.keep_best:
                    self._save()  # first: an evaluation may be long
                found = self._evaluate()
                self._save()
                if self._is_asked() or found is None:
                    raise SystemExit(int(EXIT_CODES[str(self.stopping)]))
            except SystemExit as stop:
                if self.saved_step == self.state.step and isinstance(stop.code, int):  # else it comes from elsewhere
                    self._say_stopped(stop.code)
                raise
            return self._sum_up(*found)

    def _loop(self) -> None:
        settings = self.settings.train
        options = StepOptions(
            clip_norm=settings.clip_norm or None,
            clip_value=settings.clip_value,
            on_nonfinite=settings.nonfinite,
            protect=Protect(policy=settings.spike) if settings.spike != "off" else None,
            on_oom=settings.on_oom,
            check_replicas=settings.check_replicas,
        )
        for m in steps(self.state, make_loss(self.spec), until=self.total, options=options, store=self):
            self._after(m)

    def _sum_up(self, eval_loss: float, eval_bits: float) -> Summary:
        rows: list[dict[str, Any]] = []
        if self.log is not None:
            with can_lack(self.run.metrics):
                rows = read_metrics(self.run.metrics)
        summary = Summary(
            step=self.state.step,
            tokens=int(self.state.weight),
            seconds=time.perf_counter() - self.begun,
            train_loss=next((row["loss"] for row in reversed(rows) if "loss" in row), None),  # of a process before, too
            eval_loss=eval_loss,
            eval_bits_per_byte=eval_bits,
            unigram_entropy=self.text.entropy,
            parameters=self.num_params,
            sample=self._sample(),
        )
        if self.log is not None:
            write_text(self.run.summary, json.dumps(finite(asdict(summary)), indent=2) + "\n")
            if rows:
                with can_lack(self.run.picture):
                    self._draw(rows)
        return summary

    def _after(self, m: StepMetrics) -> None:
        """What follows a step: its record, and what is due."""
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

    def _is_asked(self) -> bool:
        """Whether a signal came to any rank; every rank calls it, and has the same answer."""
        mesh = self.state.mesh
        if self.stopping is None:
            asked = torch.tensor(self.stop_requested, dtype=torch.float64, device=mesh.device)
            self.stopping = stop_name(float(mesh.all_reduce_sum(asked)))
        return self.stopping is not None

    def _until_asked(self, windows: Iterable[Window]) -> Iterator[Window]:
        for window in windows:
            if self._is_asked():
                return
            yield window

    def _evaluate(self) -> tuple[float, float] | None:
        """Nats per token and bits per byte of the whole held-out split; None: a signal cut it short."""
        batches = eval_batches(self.text.held_out, self.state.placed.plan.batch, self.state.mesh)
        total = evaluate(self.state.placed, token_loss, self._until_asked(batches))
        if self.stopping is not None:
            return None
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
        try:
            saved = self.store.save(state, metric=self.held_out.before(state.step))
        except CheckpointError as error:
            raise type(error)(
                f"{error}; when that is mended, `shardwise train {self.run.config_toml}` goes on from the newest "
                "checkpoint that is whole, or begins again where there is none"
            ) from error
        self.saved_step = state.step
        self._say_findings()  # of the save before, which has ended
        self._record_save(saved.step, saved.seconds)
        return saved

    def _save(self) -> None:
        if self.saved_step != self.state.step:
            saved = self.save(self.state)
            self.progress.note(f"step {saved.step}: saved {saved.path} ({saved.size_bytes / 1e6:.1f} MB)")

    def _record_save(self, step: int, seconds: float) -> None:
        """By this a run knows later that it has lost something when no checkpoint is there."""
        if self.log is not None:
            self.log.write({"step": step, COMPLETE: seconds})

    def _say_findings(self) -> None:
        """What became of saves beside training; where one failed, the run goes on."""
        if self.saving is not None and self.saving.has_ended:
            ended, self.saving = self.saving, None
            if ended.seconds:
                self._record_save(ended.job.step, ended.seconds)
        for finding in self.store.take_findings():
            self.progress.note(f"step {self.state.step}: {finding}")
            if self.log is not None:
                self.log.write({"step": self.state.step, "finding": finding.to_dict()})

    def _save_beside(self) -> None:
        """Save while training goes on; what it took goes into the metrics."""
        saving = self.store.save_async(self.state, metric=self.held_out.before(self.state.step))
        self._say_findings()  # of the save before, which has ended
        self.saving = saving
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
            with can_lack(self.run.sample):
                write_text(self.run.sample, text + "\n")
        return text

    def _draw(self, rows: list[dict[str, Any]]) -> None:
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
        why = _WHY.get(code, "asked to stop")
        if self.log is not None:
            self.run.add_event("stopped", step=self.state.step, code=code)
        self.progress.note(
            f"step {self.state.step}: {why}; saved to {self.store.path}; go on with "
            f"`shardwise train {self.run.config_toml}`"
        )


_CURVES = ("loss", "eval_loss")
_WHY: dict[int, str] = {
    ExitCode.NON_FINITE: "loss or gradient is not finite",
    ExitCode.SPIKE: "the loss or the gradient norm has a spike",
}


def _due(step: int, every: int | None) -> bool:
    return bool(every) and step % int(every or 1) == 0
