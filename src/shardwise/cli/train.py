"""`shardwise train`: from nothing at all, a file or flags to a trained model in a run directory."""

from __future__ import annotations

import json as json_module
import math
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.options.config import (
    Configuration,
    Given,
    Origin,
    check_saves,
    read_clip,
    read_configuration,
    read_count,
)
from shardwise.cli.options.counts import LENGTH_HELP, length_of
from shardwise.cli.options.derive import Derived, Surroundings, derive
from shardwise.cli.options.devices import launched, surroundings
from shardwise.cli.options.elastic import (
    Asked,
    ElasticOption,
    FailuresOption,
    WaitOption,
    elastic_policy,
    known_of,
    plan_here,
)
from shardwise.cli.options.kept import check_places, check_weights, has_checkpoints, of_its_run
from shardwise.cli.options.nodes import ranks_per_host, supervised
from shardwise.cli.options.resolved import configuration_json, configuration_table, configuration_toml, print_plan
from shardwise.cli.output import console, plan_json, print_json
from shardwise.cli.run import recovery, start
from shardwise.errors import CheckpointError, ExitCode, UsageError
from shardwise.launch.environment import Launch
from shardwise.launch.job import Job, Nodes
from shardwise.launch.rank.runjob import RunJob
from shardwise.plan.constraints import check, refuse
from shardwise.records import say
from shardwise.train.kept.changes import Before, Change, check_allowed, find_changes, leave_of
from shardwise.train.kept.lock import RunLock, end_at_once
from shardwise.train.kept.owner import Owner
from shardwise.train.kept.rundir import RunDir, check_not_lost, write_text
from shardwise.train.progress import lasting

if TYPE_CHECKING:
    from shardwise.launch.recovery import Recovering

FLAGS = {
    "preset": "model.preset", "dim": "model.dim", "layers": "model.num_layers", "heads": "model.num_heads",
    "kv_heads": "model.num_kv_heads", "ffn": "model.ffn_dim", "vocab": "model.vocab_size",
    "max_seq_len": "model.max_seq_len", "data": "data.sources", "tokenizer": "data.tokenizer", "seq": "data.seq_len",
    "optimizer": "optimizer.name", "lr": "optimizer.lr", "weight_decay": "optimizer.weight_decay",
    "schedule": "schedule.name", "warmup": "schedule.warmup", "steps": "train.steps", "tokens": "train.tokens",
    "batch": "train.global_batch", "accumulation": "train.micro_batches", "nonfinite": "train.nonfinite",
    "seed": "train.seed", "deterministic": "train.deterministic", "eval_every": "train.eval_every",
    "checkpoint_every": "train.checkpoint_every", "checkpoints": "train.checkpoints", "resume": "train.resume",
    "weights": "train.weights",
    "out": "train.out", "sample": "train.sample", "nproc": "train.nproc", "port": "train.port",
    "device": "train.device", "name": "train.name", "tensorboard": "train.tensorboard", "grace": "train.grace_s",
    "spike": "train.spike", "oom": "train.on_oom", "check_replicas": "train.check_replicas",
}  # fmt: skip
"""Parameter of `train` -> setting; `model`, `plan` and `clip` mean different settings by their form."""

_Int = Annotated[int | None, typer.Option()]


def train(
    ctx: typer.Context,
    config: Annotated[Path | None, typer.Argument(help="A run.toml; every key has a flag or `--set`.")] = None,
    model: Annotated[str | None, typer.Option(help="A preset, `pkg.mod:factory`, or hf:NAME.")] = None,
    dim: _Int = None,
    layers: _Int = None,
    heads: _Int = None,
    kv_heads: _Int = None,
    ffn: _Int = None,
    vocab: _Int = None,
    max_seq_len: _Int = None,
    data: Annotated[list[str] | None, typer.Option(help="stdlib, or text, .jsonl, .parquet files and globs.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="bytes, or a tokenizers JSON file.")] = None,
    seq: Annotated[int | None, typer.Option(parser=length_of, help=LENGTH_HELP)] = None,
    plan: Annotated[str | None, typer.Option(help="Shorthand (`fsdp4 tp2 / bf16`) or file.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="adamw, sgd, adafactor, lion, muon, lamb.")] = None,
    lr: Annotated[float | None, typer.Option(help="Base learning rate.")] = None,
    weight_decay: Annotated[float | None, typer.Option()] = None,
    schedule: Annotated[str | None, typer.Option(help="constant, cosine, wsd, linear.")] = None,
    warmup: Annotated[int | None, typer.Option(help="Steps of linear warm-up.")] = None,
    steps: Annotated[int | None, typer.Option(help="Length of the run in steps.")] = None,
    tokens: Annotated[str | None, typer.Option(help="Length of the run in tokens: 300000, 4M, 1.5B.")] = None,
    batch: Annotated[int | None, typer.Option(help="Samples per step over all ranks.")] = None,
    accumulation: Annotated[int | None, typer.Option(help="Micro-batches per rank and step.")] = None,
    clip: Annotated[str | None, typer.Option(help="1.0 or norm:1.0, value:0.5, none.")] = None,
    nonfinite: Annotated[str | None, typer.Option(help="skip, stop or raise.")] = None,
    seed: Annotated[int | None, typer.Option()] = None,
    deterministic: Annotated[bool | None, typer.Option("--deterministic", help="Two runs end bit-equal.")] = None,
    eval_every: Annotated[int | None, typer.Option(help="Steps between evaluations; 0: at the end.")] = None,
    checkpoint_every: Annotated[str | None, typer.Option(help="Steps between saves; 10m, auto; 0: at the end.")] = None,
    checkpoints: Annotated[str | None, typer.Option(help="Another directory for them, or a URL: s3://...")] = None,
    resume: Annotated[str | None, typer.Option(help="auto, never, or a run or checkpoint to start from.")] = None,
    weights: Annotated[str | None, typer.Option(help="A run or checkpoint to begin with the weights of.")] = None,
    out: Annotated[str | None, typer.Option(help="The run's directory.")] = None,
    sample: Annotated[bool | None, typer.Option("--sample/--no-sample", help="Print text of the model.")] = None,
    nproc: Annotated[int | None, typer.Option(help="Processes on this machine.")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the rendezvous; 0: a free one.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; default: what is there.")] = None,
    name: Annotated[str | None, typer.Option(help="Part of the run directory's name.")] = None,
    tensorboard: Annotated[bool | None, typer.Option("--tensorboard", help="Also write for TensorBoard.")] = None,
    grace: Annotated[float | None, typer.Option(help="Seconds to finish and save after a signal.")] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", help="Any setting: train.seed=3.")] = None,
    spike: Annotated[str | None, typer.Option(help="Spikes of the loss: off, skip, rewind or stop.")] = None,
    oom: Annotated[str | None, typer.Option(help="Out of memory in a step: raise or halve.")] = None,
    check_replicas: Annotated[int | None, typer.Option(help="Steps between comparisons of replicas; 0: never.")] = None,
    allow: Annotated[list[str] | None, typer.Option(help="A change of the maths at resume; or all.")] = None,
    recover: Annotated[bool, typer.Option("--recover", help="Go on when a rank dies.")] = False,
    elastic: ElasticOption = None,
    slot_failures: FailuresOption = None,
    elastic_wait: WaitOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print everything, start nothing.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end, and nothing else.")] = False,
) -> None:
    """Train a model. Without arguments: a small decoder on Python's own sources, in about a minute."""
    asked = Asked.read(elastic, failures=slot_failures, wait_s=elastic_wait)
    how = How(allow=tuple(allow or ()), recover=recover, asked=asked, json=json)
    # what is printed is the answer there, and elsewhere no reason to end a run
    with nullcontext() if json or dry_run else redirect_stdout(lasting(sys.stdout)):
        configuration = of_its_run(read_configuration(config, _given(ctx.params), sets or ()), config)
        raise typer.Exit(_train(configuration, how, dry_run=dry_run))


@dataclass(frozen=True, kw_only=True)
class How:
    """What a start says that is no setting of the run."""

    allow: tuple[str, ...] = ()
    recover: bool = False
    asked: Asked | None = None
    """Of `--elastic`."""
    json: bool = False
    nodes: Nodes | None = None
    """Under `--recover`, where a launcher has started a process for each host: which one this is."""


def _supervised(launch: Launch, how: How) -> Nodes:
    if how.asked is not None:
        raise UsageError(
            f"--recover --elastic: found {launch.world} hosts, needed one: how many processes a host has is said "
            "nowhere here; use `shardwise run --recover --elastic MIN:MAX --nproc RANKS_PER_HOST`, or leave "
            "--recover out: a change of hosts goes on from the last checkpoint either way"
        )
    return supervised(launch)


def _train(configuration: Configuration, how: How, *, dry_run: bool) -> ExitCode:
    """Resolve, check, show, start, finish: in this order, so that a refusal comes before any process."""
    asked, json = configuration.settings.train, how.json
    launch = launched(nproc_given=asked.nproc is not None or dry_run, command="shardwise train")
    around = surroundings(asked.device, launch)
    if how.recover and launch is not None:
        how = replace(how, nodes=_supervised(launch, how))
        around = replace(around, launched_world=launch.world * max(1, around.num_devices))
    derived = derive(how.asked.start(configuration, around) if how.asked else configuration, around)
    if how.asked is not None and launch is not None:
        plan = plan_here(how.asked, derived.plan, known_of(derived, around.cluster), launch)
        derived = replace(derived, plan=plan)
    run = RunDir(Path(str(derived.settings.train.out)))
    is_first = launch is None or launch.rank == 0
    _check(derived, run, configuration, launch, how)
    recovering = _recovering(derived, run, around, launch, how)
    if is_first and not json:
        out = console()
        out.print(configuration_table(derived.configuration))
        print_plan(out, derived)
    if dry_run:
        if json:
            print_json({"out": str(run.path), "plan": plan_json(derived.plan), **configuration_json(derived)})
        return ExitCode.OK
    with _held(run, derived, launch, how) if is_first else nullcontext(()) as dead:
        if is_first:
            check_weights(run, derived.settings.train, configuration_json(derived), derived.plan)
            changes = _changes(derived, run, how)
            record = _write(derived, run)
            for change in changes:
                say(f"changed since the last start: {change}")
            if changes:
                record.add_event("changed", changes=[str(change) for change in changes], allowed=list(how.allow))
        for owner in dead:
            say(f"{run.path}: taken over from {owner}, which is dead")
            run.add_event("taken over", owner=str(owner))
        try:
            code = _start(derived, run, launch, recovering, how)
        finally:
            if is_first:
                run.drop_start()
        if is_first:
            _finish(run, derived, code, json=json)
    return code


def _given(params: dict[str, Any]) -> list[Given]:
    """The flags that were used, as settings."""
    given = []
    for parameter, key in FLAGS.items():
        value: Any = params.get(parameter)
        if value is not None and (value or not isinstance(value, list | tuple)):
            flag = f"--{parameter.replace('_', '-')}"
            if parameter == "tokens":
                value = read_count(value)
            if parameter == "checkpoint_every" and value.isdecimal() and len(value) < 20:  # longer: refused as text
                value = int(value)
            if parameter == "data":
                value = tuple(value)
            if parameter == "weights" and value and "://" not in value:
                value = os.path.abspath(value)  # a start elsewhere goes on with the same
            if parameter == "sample" and not value:
                flag = "--no-sample"
            given.append(Given(key=key, value=value, origin=Origin(kind="flag", detail=flag)))
    for parameter, split in (("model", _model), ("plan", _plan), ("clip", read_clip)):
        if params.get(parameter) is not None:
            origin = Origin(kind="flag", detail=f"--{parameter}")
            given += [Given(key=key, value=value, origin=origin) for key, value in split(params[parameter]).items()]
    return given


def _model(text: str) -> dict[str, Any]:
    return {"model.factory" if ":" in text else "model.preset": text}


def _plan(text: str) -> dict[str, Any]:
    return {"plan.file" if text.endswith((".toml", ".json")) else "plan.shorthand": text}


def _check(derived: Derived, run: RunDir, configuration: Configuration, launch: Launch | None, how: How) -> None:
    """Everything that can be refused before a process starts."""
    settings = derived.settings
    check_saves(settings.train)
    world = launch.world if launch and how.nodes is None else int(settings.train.nproc or 1)
    refuse(
        check(
            derived.plan,
            spec=derived.spec,
            world=world,
            device=settings.train.device,
            global_batch=settings.train.global_batch,
            seq_len=settings.data.seq_len,
        )
    )
    if launch is None and (settings.model.factory or "").startswith("hf:"):
        from shardwise.train.build import declared_config

        config = declared_config(settings)
        from shardwise.cli.options.hf import hf_findings  # needs transformers, which is there now

        refuse(hf_findings(config, derived.plan))
    alone = launch is not None and launch.world == 1 and how.asked is None  # nobody to agree with, now or later
    if launch is not None and not alone and configuration.settings.train.out is None:
        raise UsageError(
            f"{launch.launcher} started {launch.world} processes: all, those after a restart too, must agree on the "
            "run's directory; found none, needed --out; give it"
        )
    if launch is None or launch.rank == 0:
        check_places(run, settings.train)


@contextmanager
def _held(run: RunDir, derived: Derived, launch: Launch | None, how: How) -> Iterator[tuple[Owner, ...]]:
    """Hold the run's directory and that of its checkpoints; the dead owners before.

    Where a node may have been lost, after its lock has gone stale.
    """
    with ExitStack() as stack:
        dead = list[Owner]()
        for folder in run.locks(derived.settings.train.checkpoints):
            lock = _lock(folder, launch, how, stack).start()
            dead += [lock.taken_over] if lock.taken_over is not None and lock.taken_over not in dead else []
        yield tuple(dead)


def _lock(folder: Path, launch: Launch | None, how: How, stack: ExitStack) -> RunLock:
    if launch is None or how.asked is None:
        return RunLock.take(folder, end_at_once, at_exit=stack.callback)
    from shardwise.launch.elastic.nodes import take_when_free

    return take_when_free(folder, end_at_once, at_exit=stack.callback)


def _changes(derived: Derived, run: RunDir, how: How) -> list[Change]:
    """What changed since what this start goes on from was saved, all of it allowed; none where it begins."""
    settings, told = derived.settings.train, run
    if settings.resume == "never":
        return []
    before, holds = Before.of_run(run), has_checkpoints(run, settings)
    is_own = before is not None and before.place == settings.checkpoints
    if is_own and not holds and settings.resume == "auto":
        check_not_lost(run, settings.checkpoints)
    if not (is_own and holds) and (holds or settings.resume != "auto"):  # another run's: its manifest says what it was
        from shardwise.checkpoint.compare import find

        with suppress(CheckpointError):  # the load will say what is wrong with it
            found = find(str(settings.checkpoints or run.checkpoints) if holds else settings.resume)
            manifest = found.manifest()
            told, before = RunDir(found.path), Before.of_checkpoint(manifest.config, manifest.plan_fields)
    changes = find_changes(before, configuration_json(derived), derived.plan)
    if holds or settings.resume != "auto":  # what a run began with is in its checkpoints
        changes = [change for change in changes if change.key != "train.weights"]
    check_allowed(told, changes, how.allow, leave_of(run, ()))
    return changes


def _write(derived: Derived, run: RunDir) -> RunDir:
    """The record of this start: beside that of a run that has begun, until the ranks have loaded it."""
    run.drop_start()
    record = run.starting if run.has_begun else run
    write_text(record.config_toml, configuration_toml(derived.configuration))
    write_text(record.config_json, json_module.dumps(configuration_json(derived), indent=2) + "\n")
    derived.plan.save(record.plan)
    return record


def _recovering(
    derived: Derived, run: RunDir, around: Surroundings, launch: Launch | None, how: How
) -> Recovering | None:
    """What happens when ranks die; None: the run ends."""
    if not how.recover and (how.asked is None or launch is not None):
        return None
    if how.asked is not None:
        how.asked.check(derived.plan.world, derived.plan)
    port = derived.settings.train.port
    recovering = recovery(port=port, tell=partial(run.add_event, "recovery"))
    if how.asked is None:
        return recovering
    return elastic_policy(
        how.asked,
        recovering,
        derived.plan,
        lambda plan: RunJob.words(run, plan=plan, quiet=how.json, allow=how.allow),
        devices=run.devices,
        known=known_of(derived, around.cluster),
        tell=partial(run.add_event, "elastic"),
        chosen=lambda plan: plan.save(run.plan),
    )


def _start(derived: Derived, run: RunDir, launch: Launch | None, recovering: Recovering | None, how: How) -> ExitCode:
    """The ranks: started here, or this process as one of those that a launcher has started."""
    settings = derived.settings.train
    nodes = how.nodes or Nodes()
    if launch is not None and how.nodes is None:
        from shardwise.launch.elastic.nodes import run_agreed
        from shardwise.launch.rank.worker import run_session

        rank = RunJob(run=run, settings=derived.settings, plan=derived.plan, spec=derived.spec)
        (run_agreed if how.asked else run_session)(replace(rank, quiet=how.json, allow=how.allow))
        return ExitCode.OK
    job = Job(
        target="shardwise.launch.rank.worker",
        is_module=True,
        args=RunJob.words(run, quiet=how.json, allow=how.allow),
        nproc=ranks_per_host(nodes, derived.plan.world),
        nodes=nodes,
        port=settings.port,
        signal_grace_s=settings.grace_s,
        # what cuBLAS asks for; read when its first handle is made, so it must be there from the start
        environment={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if settings.deterministic else {},
    )
    return start(job, recovering, said=not str(derived.configuration.origin("train.nproc")).startswith("derived"))


def _finish(run: RunDir, derived: Derived, code: ExitCode, *, json: bool) -> None:
    """What was reached, and where it lies."""
    summary = json_module.loads(run.summary.read_text()) if code == ExitCode.OK else {}
    if json:
        print_json({"run": str(run.path), "exit_code": int(code), **summary})
        return
    if code != ExitCode.OK:
        asked = code in (ExitCode.INTERRUPTED, ExitCode.PREEMPTED, ExitCode.TERMINATED)
        # another place is not asked now: where it cannot be reached, this code is still what schedulers wait for
        if asked and not run.config_toml.exists():
            say(f"stopped; {run.path} was removed or moved while it trained, so that nothing is there to continue with")
        elif asked and (derived.settings.train.checkpoints is not None or run.has_checkpoints):
            say(f"stopped; continue with: {shlex.join(['shardwise', 'train', str(run.config_toml)])}")
        return
    if summary["sample"]:
        typer.echo(f"\na sample of the trained model:\n\n{summary['sample']}\n")
    loss, bits = (math.nan if (found := summary[key]) is None else found for key in ("eval_loss", "eval_bits_per_byte"))
    typer.echo(
        f"held-out loss {loss:.4f} nats per token ({bits:.4f} bits per byte); "
        f"unigram entropy {summary['unigram_entropy']:.4f} nats; {summary['parameters']:,} parameters, "
        f"{summary['tokens']:,} tokens, {summary['seconds']:.0f} s\nresults: {run.path}"
    )
