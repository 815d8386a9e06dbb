"""Fills in what nobody said, each choice as `(value, reason)`. Pure in settings and surroundings; no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from shardwise.cli.options.auto import AUTO, auto_plan, of_sizes, this_machine
from shardwise.cli.options.config import Configuration
from shardwise.cli.options.made_for import FILES, MadeFor, load_made_for
from shardwise.cli.options.planning import is_module, question
from shardwise.errors import ConfigError
from shardwise.hardware.cluster import Cluster
from shardwise.model.spec import ModelSpec, refuse_unbuilt, spec_from_dict
from shardwise.plan.plan import Axes, Plan
from shardwise.plan.workload import Workload
from shardwise.train.settings import OptimizerSettings, RunSettings

Choice = tuple[Any, str]

DEFAULT_PRESET = "bytes-3m"
DIALS: Mapping[str, tuple[str, ...]] = {
    "betas": ("adamw", "lion", "muon", "lamb"),
    "momentum": ("sgd", "muon"),
}
"""Settings of `[optimizer]` that only some have."""
CPU_STEPS, GPU_STEPS = 440, 2000
CPU_BATCH, GPU_BATCH = 4, 64
CPU_SEQ, GPU_SEQ = 128, 1024
"""The plan's shorthand that asks for the planner's choice."""
LEARNING_RATES: Mapping[str, tuple[float, str]] = {
    "adamw": (4e-3, "AdamW on a small decoder"),
    "lamb": (1e-2, "LAMB scales each layer's step by its weights"),
    "adafactor": (1e-2, "Adafactor scales each step by the weights"),
    "lion": (3e-4, "Lion steps by the sign: a tenth of AdamW's rate"),
    "muon": (6e-3, "Muon with steps of AdamW's length; it bears twice the rate"),
    "sgd": (0.5, "plain gradients of a mean loss"),
}


COMPILED = 100_000_000
"""Parameters from which compiling is worth its minute at the start."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What the machine says: facts that choices follow from."""

    device: str
    num_devices: int
    device_reason: str
    now: datetime
    cluster: Cluster | None = None
    """The devices of this machine, where they could be named."""
    compiles: bool = False
    """Blocks can be compiled for its devices."""
    launched_world: int | None = None
    """Processes that torchrun, srun or mpirun have started already; None: none of them."""


@dataclass(frozen=True, kw_only=True)
class Derived:
    """A complete configuration: every setting has a value and an origin."""

    configuration: Configuration
    plan: Plan
    spec: ModelSpec | None
    """Sizes of the model; None when a factory makes it."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Why each field of a derived plan is what it is, by dotted field."""

    @property
    def settings(self) -> RunSettings:
        """The settings, complete."""
        return self.configuration.settings


def derive(configuration: Configuration, around: Surroundings) -> Derived:
    """Every value that nobody said, with its reason.

    Raises:
        ConfigError: settings that contradict each other.
        ModelError: a preset that can be planned for, and not built.
        PlanError: a plan that does not parse.

    Example:
        >>> from shardwise.cli.options.config import read_configuration
        >>> around = Surroundings(device="cpu", num_devices=0, device_reason="none seen", now=datetime(2026, 1, 2))
        >>> str(derive(read_configuration(None), around).plan)
        'dp2 / gbs4 / fp32'
    """
    _check_contradictions(configuration)
    chosen: dict[str, Choice] = {}
    settings = configuration.settings
    made = load_made_for(settings.plan.file) if settings.plan.file else MadeFor()
    if settings.model.preset is None and settings.model.factory is None:
        chosen["model.preset"] = _planned_model(settings.plan.file, made)
    _check_optimizer(configuration, made)
    spec = _spec(configuration, chosen)
    _choose_device(configuration, around, chosen)
    plan, reasons = _choose_plan(configuration, around, spec, chosen)
    model = settings.model.factory or settings.model.preset or chosen["model.preset"][0]
    planned = (made.seq, f"what {settings.plan.file} was made for") if made.seq and made.model == model else None
    _choose_lengths(configuration, spec, plan, chosen, planned)
    _choose_names(configuration, around, spec, chosen)
    _choose_optimizer(configuration, chosen)
    complete = configuration.derive({k: v for k, v in chosen.items() if configuration.value(k) is None})
    check_schedule(complete)
    batch = complete.settings.train.global_batch
    plan = plan.with_(
        batch=type(plan.batch)(global_size=batch, micro_batches=complete.settings.train.micro_batches or 1)
    )
    return Derived(configuration=complete, plan=plan, spec=spec, reasons=reasons)


def _check_contradictions(configuration: Configuration) -> None:
    for one, other in (
        ("plan.shorthand", "plan.file"),
        ("train.steps", "train.tokens"),
        ("model.preset", "model.factory"),
    ):
        if configuration.value(one) is not None and configuration.value(other) is not None:
            raise ConfigError(
                f"{one} ({configuration.origin(one)}) and {other} ({configuration.origin(other)}) are both given; "
                f"keep one of them"
            )
    model = configuration.settings.model
    sizes = [k for k, v in model.model_dump(exclude={"preset", "factory"}).items() if v is not None]
    if model.factory is not None and sizes:
        raise ConfigError(
            f"model.{sizes[0]} ({configuration.origin(f'model.{sizes[0]}')}) changes a preset, but model.factory = "
            f"{model.factory!r} makes the model; set sizes inside the factory"
        )
    if model.factory is not None and not re.fullmatch(r"[\w.]+:\w+|hf:.+", model.factory):
        raise ConfigError(
            f"model.factory = {model.factory!r} is not a place; write `package.module:function`, or `hf:` with a "
            "config.json, a local directory or an architecture of transformers"
        )


def _planned_model(file: str | None, made: MadeFor) -> Choice:
    """The model where nobody says one: what the plan's file was made for, else the small decoder.

    Raises:
        ConfigError: it was made for a module, whose name in a file is not imported, or for a file of sizes.
    """
    if not made.model:
        return DEFAULT_PRESET, "the byte-level decoder of about 3 M parameters"
    if is_module(made.model) or made.model.endswith(FILES):
        raise ConfigError(
            f"plan.file = {file!r} was made for the model {made.model}, and no model is given; a file's word is not "
            "imported, as that runs code, and sizes are settings here: give --model with this module or a preset, and "
            "other sizes as --set model.num_layers=4"
        )
    return made.model, f"what {file} was made for"


def _check_optimizer(configuration: Configuration, made: MadeFor) -> None:
    """Refuse to train with the default in place of the optimizer that was planned for.

    Raises:
        ConfigError: nobody names an optimizer, and the plan's file says another than the default.
    """
    settings = configuration.settings
    dials = ("name", "state_dtype", "momentum")
    said = any(configuration.origin(f"optimizer.{key}").kind != "default" for key in dials)
    if made.optimizer and not said and made.optimizer != workload_optimizer(settings.optimizer):
        raise ConfigError(
            f"plan.file = {settings.plan.file!r} was made for the optimizer {made.optimizer}, and optimizer.name = "
            f"{settings.optimizer.name!r} is only the default; say which: --optimizer, or in [optimizer]"
        )


def _spec(configuration: Configuration, chosen: dict[str, Choice]) -> ModelSpec | None:
    model = configuration.settings.model
    if model.factory is not None:
        return None
    preset = model.preset or chosen["model.preset"][0]
    sizes = {k: v for k, v in model.model_dump(exclude={"factory", "preset"}).items() if v is not None}
    if "num_heads" in sizes and "num_kv_heads" not in sizes:
        sizes["num_kv_heads"] = sizes["num_heads"]
        chosen["model.num_kv_heads"] = (sizes["num_heads"], "as many as heads, since heads were given")
    spec = spec_from_dict({"preset": preset, **sizes}, name=preset)
    refuse_unbuilt(spec)
    return spec


def _choose_device(configuration: Configuration, around: Surroundings, chosen: dict[str, Choice]) -> None:
    chosen["train.device"] = (around.device, around.device_reason)


def _choose_plan(
    configuration: Configuration, around: Surroundings, spec: ModelSpec | None, chosen: dict[str, Choice]
) -> tuple[Plan, dict[str, str]]:
    settings = configuration.settings
    device = settings.train.device or around.device
    given = settings.plan.file or settings.plan.shorthand
    if given is not None and given != AUTO:
        plan = Plan.load(Path(given)) if settings.plan.file else Plan.parse(given)
        chosen["train.nproc"] = (plan.world, "the plan's world size")
        return plan, {}
    nproc, why = _num_ranks(configuration, around, device)
    chosen["train.nproc"] = (nproc, why)
    is_named = device == "cpu" or around.cluster is not None
    if not is_named and given == AUTO:
        raise ConfigError(
            "plan.shorthand = 'auto' needs devices of a known name, and finds none here; give a plan, such as "
            f"dp{nproc}, or let `shardwise plan MODEL CLUSTER` find one"
        )
    if not is_named or (spec is None and given != AUTO):  # a module is read by torch: only where that is asked for
        unknown = "devices of a known name" if not is_named else "the model's sizes (`--plan auto` reads the module)"
        plan = Plan(axes=Axes(dp_replicate=nproc), precision="fp32" if device == "cpu" else "bf16")
        chosen["plan.shorthand"] = (str(plan), f"{nproc} processes: {why}; nothing is planned without {unknown}")
        return plan, {"axes.dp_replicate": "data parallel: the simplest layout"}
    seq_len, batch = _lengths(configuration, spec, device, nproc)
    optimizer, cluster = workload_optimizer(settings.optimizer), this_machine(around.cluster, nproc)
    if spec is not None:
        asked = of_sizes(spec, cluster, Workload(seq_len=seq_len, global_batch=batch, optimizer=optimizer))
    else:
        word = str(settings.model.factory)
        asked = question(word, cluster, seq=seq_len, batch=batch, tokens=None, optimizer=optimizer)
    compiles = around.compiles and asked.profile.num_params >= COMPILED
    plan, reasons = auto_plan(asked, compiles=compiles)
    chosen["plan.shorthand"] = (str(plan), f"{nproc} processes: {why}; the planner's choice")
    if given == AUTO:
        chosen["plan.shorthand"] = (AUTO, str(configuration.origin("plan.shorthand")))
    return plan, dict(reasons)


def workload_optimizer(settings: OptimizerSettings) -> str:
    """The planner's word for what an optimizer keeps: a key of `STATE_BYTES`; averages in 4 bits count as 8.

    >>> workload_optimizer(OptimizerSettings(name="lamb")), workload_optimizer(OptimizerSettings(name="sgd"))
    ('lamb', 'sgd')
    """
    kept = {"bf16": "adamw-bf16", "bf16-stochastic": "adamw-bf16", "8bit": "adamw-8bit", "4bit": "adamw-8bit"}
    if settings.name == "adamw":
        return kept.get(settings.state_dtype, "adamw")
    if settings.name == "sgd":
        return "sgd-momentum" if settings.momentum else "sgd"
    return settings.name


def _num_ranks(configuration: Configuration, around: Surroundings, device: str) -> Choice:
    nproc = configuration.settings.train.nproc
    if nproc is not None:
        return nproc, str(configuration.origin("train.nproc"))
    if around.launched_world is not None:
        return around.launched_world, "processes that the launcher has started"
    if device == "cpu":
        return 2, "two gloo processes, since there is no accelerator"
    return max(1, around.num_devices), f"all {device} devices of this machine"


def _lengths(configuration: Configuration, spec: ModelSpec | None, device: str, nproc: int) -> tuple[int, int]:
    """Tokens of a sample and samples of a step, as they are given or will be chosen."""
    settings, cpu = configuration.settings, device == "cpu"
    seq_len = settings.data.seq_len or min(CPU_SEQ if cpu else GPU_SEQ, spec.max_seq_len if spec else CPU_SEQ)
    batch = CPU_BATCH if cpu else GPU_BATCH
    ranks = nproc * (settings.train.micro_batches or 1)
    return seq_len, settings.train.global_batch or -(-batch // ranks) * ranks


def _choose_lengths(
    configuration: Configuration,
    spec: ModelSpec | None,
    plan: Plan,
    chosen: dict[str, Choice],
    planned: Choice | None,
) -> None:
    """`planned`: tokens of the samples that the plan was made for with this model."""
    settings = configuration.settings
    cpu = (settings.train.device or chosen["train.device"][0]) == "cpu"
    micro, why_micro = plan.batch.micro_batches, "the plan's"
    if settings.train.micro_batches is None:
        chosen["train.micro_batches"] = (micro, why_micro)
    per_step = plan.axes.data * (settings.train.micro_batches or micro)
    batch: Choice = (
        CPU_BATCH if cpu else GPU_BATCH,
        "a minute on 2 cores" if cpu else "fills a device with a small model",
    )
    if plan.batch.global_size is not None:
        batch = (plan.batch.global_size, "the plan's")
    elif batch[0] % per_step:
        batch = (-(-batch[0] // per_step) * per_step, f"a multiple of {per_step} micro-batches per step")
    chosen["train.global_batch"] = batch
    longest = spec.max_seq_len if spec is not None else CPU_SEQ
    short = CPU_SEQ if cpu else GPU_SEQ
    why_seq = f"the model's longest is {longest}" if longest <= short else "short samples, many steps in a minute"
    chosen["data.seq_len"] = planned or (min(short, longest), why_seq)
    global_batch = settings.train.global_batch or batch[0]
    seq_len = settings.data.seq_len or chosen["data.seq_len"][0]
    steps: Choice = (CPU_STEPS, "about a minute on 2 cores") if cpu else (GPU_STEPS, "about a minute on one device")
    if settings.train.tokens is not None:
        per = global_batch * seq_len
        steps = (-(-settings.train.tokens // per), f"{settings.train.tokens:,} tokens of {per:,} per step")
    chosen["train.steps"] = steps
    total = settings.train.steps or steps[0]
    warmup = min(2000, total // 10) if settings.schedule.name != "constant" else 0
    chosen["schedule.warmup"] = (warmup, f"a tenth of {total} steps" if warmup else "a constant rate has none")
    chosen["train.eval_every"] = (max(1, -(-total // 2)), "half-way and at the end")
    chosen["train.checkpoint_every"] = (max(1, -(-total // 2)), "half-way and at the end")
    valued = settings.train.clip_value is not None
    chosen["train.clip_norm"] = (0.0, "clip_value is given") if valued else (1.0, "customary for decoders")


def _choose_names(
    configuration: Configuration, around: Surroundings, spec: ModelSpec | None, chosen: dict[str, Choice]
) -> None:
    model = configuration.settings.model
    made = spec.name if spec is not None else (model.factory or "model").rpartition(":")[2]
    chosen["train.name"] = (re.sub(r"[^\w.-]+", "-", made), "the model's")
    name = configuration.settings.train.name or chosen["train.name"][0]
    chosen["train.out"] = (f"runs/{around.now:%Y%m%d-%H%M%S}-{name}", "the date and the name")


def _choose_optimizer(configuration: Configuration, chosen: dict[str, Choice]) -> None:
    settings = configuration.settings.optimizer
    for dial, users in DIALS.items():
        if getattr(settings, dial) is not None and settings.name not in users:
            raise ConfigError(
                f"optimizer.{dial} ({configuration.origin(f'optimizer.{dial}')}): {settings.name} has none; "
                f"those that do: {', '.join(users)}; leave it out"
            )
    rate, why = LEARNING_RATES[settings.name]
    chosen["optimizer.lr"] = (rate, why)
    plain = settings.name == "sgd"
    chosen["optimizer.weight_decay"] = (0.0, "plain SGD") if plain else (0.1, "customary for decoders")
    if settings.name == "adamw":
        chosen["optimizer.betas"] = ((0.9, 0.95), "customary for decoders")


def check_schedule(configuration: Configuration) -> None:
    """Refuse a warm-up that leaves no step for the schedule.

    Raises:
        ConfigError: `schedule.warmup` is not below `train.steps`.
    """
    settings = configuration.settings
    warmup, steps = settings.schedule.warmup or 0, settings.train.steps or 0
    if settings.schedule.name != "constant" and warmup >= steps:
        raise ConfigError(
            f"schedule.warmup = {warmup} ({configuration.origin('schedule.warmup')}) leaves nothing of train.steps = "
            f"{steps} ({configuration.origin('train.steps')}); needed: fewer warm-up steps, or a longer run"
        )
