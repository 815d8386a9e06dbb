"""`Plan`: the layout of a training job as data.

It is the seam: left of it nothing needs torch or a GPU, right of it nothing searches or guesses.

A plan says nothing of the model's maths. Two plans of the same job give the same samples, the same initial
weights and the same update; they differ in memory and in speed.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, get_args

from shardwise.errors import ConfigError, PlanError
from shardwise.findings import nearest
from shardwise.plan import shorthand
from shardwise.records import RecordError, as_dict, from_dict, located, read_kind, write_file

FORMAT = 1
"""Version of the plan's TOML and JSON form."""
MADE_FOR = "made_for"
"""A table of a plan's file that is no part of the plan: what it was made for, see `cli.made_for`."""

AXES: tuple[str, ...] = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The axes of the mesh, outermost first; the world size is their product."""

ScheduleKind = Literal["gpipe", "1f1b", "interleaved", "looped-bfs", "zero-bubble", "zero-bubble-v", "dualpipe-v"]
SCHEDULES: tuple[ScheduleKind, ...] = get_args(ScheduleKind)
LOOPED: tuple[str, ...] = ("interleaved", "looped-bfs", "zero-bubble", "zero-bubble-v", "dualpipe-v")
"""Schedules that put several stages on a rank."""
V_SHAPED: tuple[str, ...] = ("zero-bubble-v", "dualpipe-v")
"""Schedules that put exactly two stages on a rank, the second in reverse order."""
ZERO_BUBBLE: tuple[str, ...] = ("zero-bubble", "zero-bubble-v", "dualpipe-v")
"""Schedules that split a backward into input and weight parts."""

PrecisionKind = Literal["fp64", "fp32", "bf16", "fp16", "bf16-pure"]
PRECISIONS: tuple[str, ...] = get_args(PrecisionKind)
Zero = Literal[0, 1, 2, 3]
RecomputeMode = Literal["none", "blocks", "every", "ratio", "ops"]
ReduceKind = Literal["fp32", "bf16", "fp16"]
ContextKind = Literal["ring", "gather", "ulysses"]
BalanceKind = Literal["zigzag", "contiguous"]
Float8Kind = Literal["none", "tensorwise", "rowwise", "rowwise-hp"]
RULE_TYPES: tuple[str, ...] = ("fp32", "bf16", "fp8")
"""What a precision rule may give a module."""
MATHS = ("precision", "tf32", "float8", "precision_rules", "communication.reduce_dtype")
"""How the names in a `Plan.diff` begin that change results, by types and rounding; all others are layout."""


def _at_least(least: int, **values: object) -> None:
    """Refuse what is not an integer of at least `least`."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise PlanError(f"{name}: found {value!r}, needed an integer of at least {least}")


def _one_of(name: str, value: object, known: tuple[Any, ...]) -> None:
    if value not in known or isinstance(value, bool):
        hint = nearest(str(value), [str(k) for k in known])
        raise PlanError(f"{name}: found {value!r}, needed one of {', '.join(map(repr, known))}; {hint}")


def _name(field_name: str, value: object) -> None:
    """Names stand in the shorthand, so they hold no separator of it."""
    if not isinstance(value, str) or not re.fullmatch(r"[^\s/,=]+", value):
        raise PlanError(f"{field_name}: found {value!r}, needed a name without spaces, '/', ',' or '='")


def _check_rules(rules: tuple[str, ...]) -> None:
    """Each `pattern:type`, without a separator of the shorthand, and each pattern once."""
    for rule in rules:
        if not re.fullmatch(r"[^\s/,=:]+:[^:]*", str(rule)):
            raise PlanError(f"precision_rules: found {rule!r}, needed PATTERN:TYPE, as 'layers.*.attn_norm:fp32'")
        _one_of(f"precision_rules: {rule}", str(rule).split(":")[1], RULE_TYPES)
    if len({rule.split(":")[0] for rule in rules}) < len(rules):
        raise PlanError(f"precision_rules: found a pattern twice in {', '.join(rules)}; keep one rule for it")


@dataclass(frozen=True, kw_only=True)
class Axes:
    """Degrees of the mesh axes. `ep` re-uses the ranks of `dp_shard x cp x tp`; it adds none."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        _at_least(1, **{f"axes.{f.name}": getattr(self, f.name) for f in fields(self)})

    @property
    def world(self) -> int:
        """Number of ranks: the product of all axes but `ep`."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def data(self) -> int:
        """Number of ranks that see different samples: `dp_replicate x dp_shard`."""
        return self.dp_replicate * self.dp_shard


@dataclass(frozen=True, kw_only=True)
class Batch:
    """How a step's global batch is divided. The global batch of a step is the same under every plan."""

    global_size: int | None = None
    """Samples per step over all ranks; None: the script or the configuration says."""
    micro_batches: int = 1
    """Micro-batches per rank and step: gradient accumulation, or a pipeline's micro-batches."""

    def __post_init__(self) -> None:
        _at_least(1, **{"batch.micro_batches": self.micro_batches})
        if self.global_size is not None:
            _at_least(1, **{"batch.global_size": self.global_size})


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How micro-batches flow through the pipeline stages. Ignored when `pp` is 1."""

    kind: ScheduleKind = "1f1b"
    stages_per_rank: int | None = None
    """Stages on each rank for looped schedules; None: 2 for looped ones, 1 for the others."""
    boundaries: tuple[str, ...] = ()
    """Names of the first block of stage 1, 2, ...; empty: balanced by operations."""

    def __post_init__(self) -> None:
        _one_of("schedule.kind", self.kind, SCHEDULES)
        if self.stages_per_rank is not None:
            _at_least(1, **{"schedule.stages_per_rank": self.stages_per_rank})
        object.__setattr__(self, "boundaries", tuple(self.boundaries))
        for name in self.boundaries:
            _name("schedule.boundaries", name)

    @property
    def stages(self) -> int:
        """Stages on each rank."""
        return self.stages_per_rank or (2 if self.kind in LOOPED else 1)


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """Which activations are recomputed in the backward pass in place of being kept."""

    mode: RecomputeMode = "none"
    """none; all blocks; every n-th; a ratio of them; ops: in all blocks, all but matmuls and attention."""
    every: int = 1
    """Mode `every`: blocks 0, every, 2 x every, ..."""
    ratio: float = 1.0
    """Mode `ratio`: the share of the blocks, above 0 and at most 1, spread evenly."""

    def __post_init__(self) -> None:
        _one_of("recompute.mode", self.mode, get_args(RecomputeMode))
        _at_least(0, **{"recompute.every": self.every})
        object.__setattr__(self, "ratio", float(self.ratio))
        if not math.isfinite(self.ratio):
            raise PlanError(f"recompute.ratio: found {self.ratio}, needed a number above 0 and at most 1")
        if (self.every != 1 and self.mode != "every") or (self.ratio != 1.0 and self.mode != "ratio"):
            raise PlanError(
                f"recompute: found mode={self.mode!r} with every={self.every}, ratio={self.ratio}; "
                "`every` belongs to mode 'every' and `ratio` to mode 'ratio'; change the mode or leave the number out"
            )


@dataclass(frozen=True, kw_only=True)
class Offload:
    """What lives in host memory between uses."""

    state: bool = False
    """Parameters, gradients and optimizer state of sharded parameters (needs zero >= 1)."""
    activations: bool = False
    """Tensors saved by the blocks for the backward pass."""


@dataclass(frozen=True, kw_only=True)
class Communication:
    """Dials of the data-parallel collectives. Defaults are torch's own."""

    bucket_mb: float = 25.0
    static_graph: bool = False
    find_unused: bool = False
    bucket_view: bool = True
    reshard_after_forward: bool | int | None = None
    """None: what `zero` says (3: True, 1 and 2: False); an int reshards to a smaller group (zero 3 only)."""
    prefetch: int = 1
    """Blocks whose parameters are gathered ahead of use, forward and backward."""
    reduce_dtype: ReduceKind | None = None
    """Type of gradients on the wire; None: fp32 for mixed precision, the parameters' own otherwise."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "bucket_mb", float(self.bucket_mb))
        if not (math.isfinite(self.bucket_mb) and self.bucket_mb > 0):
            raise PlanError(f"communication.bucket_mb: found {self.bucket_mb}, needed a size in MiB above 0")
        _at_least(1, **{"communication.prefetch": self.prefetch})
        if not isinstance(self.reshard_after_forward, bool | None):
            _at_least(2, **{"communication.reshard_after_forward": self.reshard_after_forward})
        if self.reduce_dtype is not None:
            _one_of("communication.reduce_dtype", self.reduce_dtype, get_args(ReduceKind))


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """How the `tp` axis is used."""

    sequence: bool = False
    """Shard norms and residual activations along the sequence (needs tp > 1)."""
    loss: bool = False
    """Keep the logits sharded along the vocabulary and compute the loss from shards (needs tp > 1)."""
    recipe: str = "auto"
    """Name of the rule set for the model's parameter names: auto, llama, gpt."""

    def __post_init__(self) -> None:
        _name("tensor.recipe", self.recipe)


@dataclass(frozen=True, kw_only=True)
class Context:
    """How the `cp` axis is used."""

    kind: ContextKind = "ring"
    """How attention sees the whole sequence: keys and values in a ring, or gathered; or exchanged for heads."""
    balance: BalanceKind = "zigzag"
    """Which part of the sequence a rank holds: an early and a late piece (equal work under a causal mask), or one."""

    def __post_init__(self) -> None:
        _one_of("context.kind", self.kind, get_args(ContextKind))
        _one_of("context.balance", self.balance, get_args(BalanceKind))


@dataclass(frozen=True, kw_only=True)
class Float8:
    """Which linear layers multiply in float8, and how their operands are scaled."""

    recipe: Float8Kind = "none"
    """none; one scale per tensor; one per row of an operand; the same, and weights' gradients not in float8."""
    all_gather: bool = False
    """Cast weights to float8 before they are gathered (tensorwise only)."""
    emulate: bool = False
    """Cast to float8 and multiply in fp32, on any device: slow, to prove a plan."""

    def __post_init__(self) -> None:
        _one_of("float8.recipe", self.recipe, get_args(Float8Kind))
        if self.recipe == "none" and (self.all_gather or self.emulate):
            raise PlanError(
                "float8: found all_gather or emulate with recipe 'none'; choose a recipe, or leave them out"
            )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The layout of a training job. Frozen, hashable; `Plan.parse`, `Plan.load`, `save`, `diff`, `str()`.

    >>> str(Plan.parse("tp2 pp2 / mb8"))
    'pp2 tp2 / 1f1b mb8 / fp32'
    """

    axes: Axes = field(default_factory=Axes)
    zero: Zero = 0
    """What the `dp_shard` axis shards: 0 nothing, 1 optimizer state, 2 + gradients, 3 + parameters."""
    batch: Batch = field(default_factory=Batch)
    schedule: Schedule = field(default_factory=Schedule)
    precision: PrecisionKind = "fp32"
    tf32: bool = False
    float8: Float8 = field(default_factory=Float8)
    precision_rules: tuple[str, ...] = ()
    """Modules that compute in another type, each `pattern:type` (`layers.*.attn_norm:fp32`); innermost wins."""
    recompute: Recompute = field(default_factory=Recompute)
    offload: Offload = field(default_factory=Offload)
    communication: Communication = field(default_factory=Communication)
    tensor: Tensor = field(default_factory=Tensor)
    context: Context = field(default_factory=Context)
    compile: bool = False
    blocks: str = "auto"
    """Name pattern of the repeated blocks (`layers.*`); auto: the longest list of like modules."""
    wrap_min_params: int = 0
    """Group parameters for sharding by size in place of by block: modules with at least so many; 0: by block."""

    def __post_init__(self) -> None:
        _one_of("zero", self.zero, (0, 1, 2, 3))
        _one_of("precision", self.precision, PRECISIONS)
        _name("blocks", self.blocks)
        _at_least(0, wrap_min_params=self.wrap_min_params)
        object.__setattr__(self, "precision_rules", tuple(self.precision_rules))
        _check_rules(self.precision_rules)

    def __str__(self) -> str:
        """The canonical shorthand; `Plan.parse(str(plan)) == plan` for every plan."""
        return shorthand.spell(as_dict(self, drop_none=False))

    @property
    def world(self) -> int:
        """Number of ranks that the plan needs."""
        return self.axes.world

    @property
    def module_types(self) -> dict[str, str]:
        """Pattern of module names -> the type that a precision rule gives them."""
        return dict(rule.split(":") for rule in self.precision_rules)

    @property
    def mixed(self) -> bool:
        """True where parameters are kept in one type and computed with in another: see `plan.ranks.engines`."""
        return self.precision in ("bf16", "fp16") or any(t != "fp8" for t in self.module_types.values())

    @property
    def reshards(self) -> bool:
        """True where parameters are freed after a block's forward and gathered again for its backward."""
        dial = self.communication.reshard_after_forward
        return self.zero > 0 and (self.zero == 3 if dial is None else dial is not False)

    @property
    def hash(self) -> str:
        """First 16 hex digits of the SHA-256 of the canonical shorthand: equal plans, equal hash, everywhere.

        A field that a later version adds changes no hash while it has its default, which the shorthand leaves out.
        """
        return hashlib.sha256(str(self).encode()).hexdigest()[:16]

    @classmethod
    def parse(cls, text: str) -> Plan:
        """The plan that a shorthand spells; docs/plans.md lists the tokens.

        Raises:
            PlanError: an unknown or repeated token, or an impossible value, with its position.

        >>> Plan.parse("fsdp4 tp2 bf16").zero
        3
        """
        return from_dict(cls, shorthand.parse(text))

    @classmethod
    def load(cls, source: str | os.PathLike[str]) -> Plan:
        """The plan in a file (an `os.PathLike`, or a string that ends in .toml or .json), else of a shorthand.

        Raises:
            ConfigError: a file that is missing, malformed or has an unknown key, with the line where it is known.
            PlanError: a shorthand that does not parse.
        """
        if isinstance(source, str) and not source.endswith((".toml", ".json")):
            return from_dict(cls, shorthand.given(source))
        data, text = read_kind(source, "plan")
        try:
            return cls.from_dict(data)
        except (ConfigError, PlanError) as error:
            raise located(error, source, text) from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write every field to a .toml or .json file, atomically.

        Raises:
            ConfigError: another ending, or a place that cannot be written.
        """
        write_file(path, self.to_dict(), comment=str(self))

    def to_dict(self) -> dict[str, Any]:
        """Nested plain data, with `format`; fields that are None are left out."""
        return {"format": FORMAT, **as_dict(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """The inverse of `to_dict`; missing keys take their defaults, and `made_for` is left to who asks for it.

        Raises:
            ConfigError: an unknown key with the nearest one, a wrong type, or an unknown `format`.
            PlanError: a value that is out of range.
        """
        if not isinstance(data, Mapping):
            raise ConfigError(f"plan: found {type(data).__name__}, needed a table of keys")
        rest = {key: value for key, value in data.items() if key != MADE_FOR}
        found = rest.pop("format", FORMAT)
        if found != FORMAT or isinstance(found, bool):
            raise RecordError(("format",), f"found {found!r}, this version reads format {FORMAT}; plan again")
        return from_dict(cls, rest)

    def diff(self, other: Plan) -> dict[str, tuple[Any, Any]]:
        """Fields that differ: dotted name -> (value here, value in `other`).

        >>> Plan.parse("dp2").diff(Plan.parse("dp4"))
        {'axes.dp_replicate': (2, 4)}
        """
        return _diff(self, other, "")

    def with_(self, **changes: Any) -> Plan:
        """A copy with some fields replaced."""
        return replace(self, **changes)


def _diff(here: Any, there: Any, prefix: str) -> dict[str, tuple[Any, Any]]:
    found: dict[str, tuple[Any, Any]] = {}
    for name, a, b in ((f.name, getattr(here, f.name), getattr(there, f.name)) for f in fields(here)):
        if a != b:
            found |= _diff(a, b, f"{prefix}{name}.") if is_dataclass(a) else {prefix + name: (a, b)}
    return found
