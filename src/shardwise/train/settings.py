"""`RunSettings`: every setting of a training run as frozen, checked data. The tables of `run.toml`; no torch.

None means "not said": the command line derives it (`shardwise.cli.options.derive`) and says why.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

OptimizerName = Literal["adamw", "sgd", "adafactor", "lion", "muon", "lamb"]
ScheduleName = Literal["constant", "cosine", "wsd", "linear"]
Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


def _tuple(value: Any) -> Any:
    """TOML and JSON have lists only; one word stands for a list of one."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def _home(value: Any) -> Any:
    """`~/runs`: a shell leaves it so behind `--out=`, and a file always does."""
    return os.path.expanduser(value) if isinstance(value, str) else value


Word = Annotated[str, Field(min_length=1)]
"""An empty one is a variable of the shell that is not set, and as a path the working directory."""
Place = Annotated[Word, BeforeValidator(_home)]


class Section(BaseModel):
    """Frozen; unknown keys and wrong types are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ModelSettings(Section):
    """`[model]`: a preset, with sizes of its own, or a factory."""

    preset: Word | None = None
    factory: Word | None = None
    """`pkg.mod:function` without arguments, giving a module."""
    vocab_size: Positive | None = None
    dim: Positive | None = None
    num_layers: Positive | None = None
    num_heads: Positive | None = None
    num_kv_heads: Positive | None = None
    ffn_dim: Positive | None = None
    max_seq_len: Positive | None = None
    tie_embeddings: bool | None = None


class DataSettings(Section):
    """`[data]`: where text comes from and how it is cut."""

    sources: Annotated[tuple[Word, ...], BeforeValidator(_tuple)] = ("stdlib",)
    """`stdlib`, or files and globs of text, jsonl and parquet."""
    tokenizer: Word = "bytes"
    """`bytes`, or the path of a `tokenizers` JSON file."""
    seq_len: Positive | None = None
    holdout: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.005
    """Fraction of the text kept for evaluation, as whole documents."""
    text_field: str = "text"
    """Field of a jsonl object, or column of a parquet file."""
    num_workers: Annotated[int, Field(ge=0)] = 0


class PlanSettings(Section):
    """`[plan]`: the layout, as shorthand or as a file."""

    shorthand: str | None = None
    file: str | None = None


class OptimizerSettings(Section):
    """`[optimizer]`."""

    name: OptimizerName = "adamw"
    lr: Annotated[float, Field(gt=0.0)] | None = None
    betas: Annotated[tuple[float, float], BeforeValidator(_tuple)] | None = None
    momentum: Fraction | None = None
    weight_decay: Annotated[float, Field(ge=0.0)] | None = None
    state_dtype: Literal["fp32", "bf16", "bf16-stochastic", "8bit", "4bit"] = "fp32"
    """How `adamw` keeps its averages between steps."""


class ScheduleSettings(Section):
    """`[schedule]`: the learning rate over the run."""

    name: ScheduleName = "cosine"
    warmup: Annotated[int, Field(ge=0)] | None = None
    """Steps of linear warm-up."""
    final: Fraction = 0.1
    """Rate at the end, as a fraction of `lr`."""
    decay: Fraction = 0.2
    """Part of the run that `wsd` spends going down."""


class TrainSettings(Section):
    """`[train]`: how long, how much at a time, what is kept."""

    steps: Positive | None = None
    tokens: Positive | None = None
    """Length of the run in tokens, in place of steps."""
    global_batch: Positive | None = None
    """Sequences per step over all ranks."""
    micro_batches: Positive | None = None
    """Micro-batches per rank and step (`--accumulation`)."""
    clip_norm: Annotated[float, Field(ge=0.0)] | None = None
    """Largest L2 norm of the gradient; 0: no clipping. Not said: 1, or 0 beside `clip_value`."""
    clip_value: Annotated[float, Field(gt=0.0)] | None = None
    """Largest absolute value of a gradient's element."""
    nonfinite: Literal["skip", "stop", "raise"] = "skip"
    spike: Literal["off", "skip", "rewind", "stop"] = "off"
    """What happens on a spike of loss or gradient norm; and then in place of `nonfinite` on what is not finite."""
    on_oom: Literal["raise", "halve"] = "raise"
    check_replicas: Annotated[int, Field(ge=0)] = 0
    """Steps between comparisons of what ranks must hold alike; 0: never."""
    seed: Annotated[int, Field(ge=0)] = 0
    deterministic: bool = False
    eval_every: Annotated[int, Field(ge=0)] | None = None
    """Steps between evaluations; 0: at the end only."""
    checkpoint_every: Annotated[int, Field(ge=0)] | str | None = None
    """Steps between checkpoints, 0: at the end only; or a time (`10m`), or `auto`."""
    keep: Positive = 2
    """Checkpoints kept: the newest."""
    keep_every: Annotated[int, Field(ge=0)] = 0
    """Beside them, those of steps that are multiples of this; 0: none."""
    keep_best: Annotated[int, Field(ge=0)] = 0
    """Beside them, so many with the smallest held-out loss, of the evaluation at their step or the last before it."""
    checkpoints: Place | None = None
    """Where they are kept: a directory, or a URL (`s3://bucket/run`); not said: in the run's directory."""
    grace_s: Annotated[float, Field(gt=0.0)] | None = None
    """Seconds for the step and the save after a first signal, then all ranks are killed; not said: no limit."""
    resume: Place = "auto"
    """`auto`, `never`, or the directory or URL of a run, its checkpoints or one of them."""
    weights: Place | None = None
    """The directory or URL of a run, its checkpoints or one of them, whose weights a new run begins with."""
    out: Place | None = None
    """The run's directory."""
    name: str | None = None
    nproc: Positive | None = None
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    device: str | None = None
    """`cpu`, `cuda`, ...; not said: the accelerator, else the CPU."""
    sample: bool = True
    """Print text of the trained model at the end."""
    tensorboard: bool = False


class RunSettings(Section):
    """A whole `run.toml`.

    Example:
        >>> RunSettings().optimizer.name
        'adamw'
    """

    model: ModelSettings = Field(default_factory=ModelSettings)
    data: DataSettings = Field(default_factory=DataSettings)
    plan: PlanSettings = Field(default_factory=PlanSettings)
    optimizer: OptimizerSettings = Field(default_factory=OptimizerSettings)
    schedule: ScheduleSettings = Field(default_factory=ScheduleSettings)
    train: TrainSettings = Field(default_factory=TrainSettings)


SECTIONS: dict[str, type[Section]] = {
    "model": ModelSettings,
    "data": DataSettings,
    "plan": PlanSettings,
    "optimizer": OptimizerSettings,
    "schedule": ScheduleSettings,
    "train": TrainSettings,
}
KEYS: tuple[str, ...] = tuple(f"{section}.{key}" for section, kind in SECTIONS.items() for key in kind.model_fields)
"""Every setting by its dotted name."""


def get(settings: RunSettings, key: str) -> Any:
    """The value of a dotted name.

    >>> get(RunSettings(), "train.seed")
    0
    """
    section, name = key.split(".")
    return getattr(getattr(settings, section), name)
