"""What `plan`, `estimate` and `explain` are given: model, cluster, lengths and batch; and how estimates are shown."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.errors import ConfigError, UsageError
from shardwise.hardware.cluster import GIB, Cluster, load_cluster
from shardwise.model.profile import Profile, profile_of
from shardwise.model.spec import ModelSpec, load_spec
from shardwise.plan.band import band
from shardwise.plan.memory import Memory
from shardwise.plan.search import ASSUMED_HOST, near_batches
from shardwise.plan.stack import Stack, load_stack, stack_on
from shardwise.plan.timing import StepTime
from shardwise.plan.workload import Workload

COLOURS = (
    "blue",
    "cyan",
    "green",
    "yellow",
    "magenta",
    "red",
    "bright_blue",
    "bright_green",
    "bright_magenta",
    "white",
)
BAR = 48
UNITS = {"k": 10, "m": 20, "b": 30, "g": 30, "t": 40}
NEAR = 0.05
"""How far the tokens of a step may be from a round number that was asked, for a batch that the devices divide."""

ModelOption = Annotated[str, typer.Option(help="A preset, a .toml file of sizes, hf:NAME, or pkg.mod:factory.")]
ClusterOption = Annotated[str, typer.Option(help="device:per-nodexnodes (h100:8x16), or a .toml file.")]
SeqOption = Annotated[int | None, typer.Option(min=1, help="Tokens per sample.")]
TokensOption = Annotated[str | None, typer.Option(help="Tokens per step: 4M, 16M.")]
BatchOption = Annotated[int | None, typer.Option(min=1, help="Samples per step; default: the plan's, if any.")]
OptimizerOption = Annotated[str, typer.Option(help="adamw, sgd, lion, muon, adafactor, ...")]
TraceOnOption = Annotated[str, typer.Option(help="Where a module's forward is read: meta, or cpu (runs it for real).")]
StackOption = Annotated[
    str, typer.Option(help="Software stack that runs the plan; empty: Shardwise's own on such devices.")
]
PriceOption = Annotated[float | None, typer.Option(min=0, help="Currency per device and hour.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@dataclass(frozen=True, kw_only=True)
class Question:
    """Model, cluster and workload, with what had to be assumed."""

    profile: Profile
    spec: ModelSpec | None
    """Of a reference model; None: a module's own forward was read."""
    cluster: Cluster
    workload: Workload
    assumed: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    """Axes that the module cannot have."""
    limits: ModelSpec | None = None
    """Sizes that axes must divide, where they are known."""
    factory: Callable[[], Any] | None = None
    """Of a module."""

    def stack(self, name: str) -> Stack:
        """The software stack of that name; of none, Shardwise's own on the cluster's devices."""
        return load_stack(name) if name else stack_on(self.cluster.device.name)


def question(
    model: str, cluster: str, *, seq: int | None, batch: int | None, tokens: str | None, **options: Any
) -> Question:
    """What the words of a verb ask.

    Args:
        model: a preset, a file of sizes, `hf:NAME`, or `pkg.mod:factory`.
        cluster: a preset or a file.
        seq: tokens per sample; None: 4096, or as many as the model has positions for where that is less, marked as
            assumed.
        batch: samples per step.
        tokens: tokens per step, `4M`; of `batch` and `tokens` one is given, or neither.
        **options: `optimizer`, `price`, and `trace_on`, where a module's forward is read (`meta` or `cpu`).

    Raises:
        UsageError: an unknown name; both a batch and tokens.
        ConfigError: a file that does not describe what it should.
    """
    found = read_cluster(cluster)
    if options.get("price"):
        found = found.with_(device=replace(found.device, price=float(options["price"])))
    spec = None if _is_module(model) else load_spec(model)
    module = _module(model) if spec is None else None
    longest = module.longest if module else spec.max_seq_len if spec else None
    has_host = found.host_memory or found.device.name.startswith("cpu")
    assumed = [] if has_host else [f"host memory: {ASSUMED_HOST / GIB:.0f} GiB per device"]
    if seq is None:
        seq = min(4096, longest or 4096)
        assumed.append(f"sequence length: {seq} tokens (give --seq)")
    size, notes = _batch(batch, tokens, seq, found.world)
    refused = module.refused(seq) if module else {}
    assumed += [f"{axis} is left out: {why}" for axis, why in refused.items() if why != "module.no-experts"]
    assumed += module.notes if module else ()
    workload = Workload(seq_len=seq, global_batch=size, optimizer=options.get("optimizer") or "adamw")
    if spec:
        profile = profile_of(spec)
    elif module:  # sizes per token are those of a sample that its positions allow
        profile = _described(model, module.factory, min(seq, longest or seq), str(options.get("trace_on") or "meta"))
        if profile.chosen == profile.experts > 1:
            assumed.append(f"every token meets all {profile.experts} experts, as its forward does; MFU counts them all")
    if profile.wide:
        assumed.append("its forward was read in fp32, for it does not run in 16 bits: copies to fp32 are not counted")
    if longest and seq > longest:
        assumed.append(f"{spec.name if spec else model} has positions for {longest} tokens; it is planned for {seq}")
    return Question(
        profile=profile, spec=spec, cluster=found, workload=workload, assumed=(*assumed, *notes, *_of_devices(found)),
        refused=tuple(refused), limits=spec or (module.limits if module else None),
        factory=module.factory if module else None,
    )  # fmt: skip


def read_cluster(text: str) -> Cluster:
    """A preset or a file; `detect` reads what this machine has, `probe` measures what it does.

    Raises:
        UsageError: an unknown name, or a device that no preset is known to be.
    """
    seams = {"detect": ("shardwise.hardware.local", "discover"), "probe": ("shardwise.cli.probe", "probed")}
    if text not in seams:
        return load_cluster(text)
    module, name = seams[text]
    made: Cluster = getattr(importlib.import_module(module), name)()
    return made


def count_of(text: str) -> float:
    """`300000`, `4M`, `1.5B`.

    Raises:
        UsageError: no number, or an unknown unit.
    """
    match = re.fullmatch(r"([\d.]+(?:e\d+)?)\s*([a-zA-Z]?)", text.strip())
    unit = match.group(2).lower() if match else ""
    try:
        if match is None or (unit and unit not in UNITS):
            raise ValueError(text)
        return float(match.group(1)) * float(1000 ** (UNITS[unit] // 10 if unit else 0))
    except ValueError:
        raise UsageError(f"tokens {text!r}: needed a count such as 300000, 4M or 1.5B (units: k, M, B, T)") from None


def _batch(batch: int | None, tokens: str | None, seq: int, world: int) -> tuple[int, list[str]]:
    """(samples per step, what was assumed)."""
    if batch is not None and tokens is not None:
        raise UsageError("--global-batch and --tokens are both given; keep one of them")
    if batch is not None:
        return batch, _remark(batch, world)
    if tokens is None:
        return world, [f"global batch: {world} samples, one per device (give --global-batch or --tokens)"]
    wanted = count_of(tokens)
    if wanted < seq:
        raise UsageError(f"--tokens {tokens}: less than one sequence of {seq} tokens; give at least {seq}")
    size = _samples(tokens.strip(), wanted, seq, world)
    said = f"tokens: {tokens.strip()} asked, {size:,} sample{'s' * (size > 1)} of {seq:,} = {size * seq:,} tokens"
    return size, [said, *_remark(size, world)]


def _samples(tokens: str, wanted: float, seq: int, world: int) -> int:
    """Samples of a step for a number of tokens.

    A number in full is kept where it is whole sequences. Any other is round: of the batches within 5 % of it, the one
    that shares the largest divisor with the devices, then what the words say exactly (M: 10^6, then 2^20), then the
    nearest.

    >>> _samples("67108864", 67108864, 4096, 24), _samples("64M", 64e6, 4096, 2048), _samples("1e9", 1e9, 4096, 2048)
    (16384, 16384, 243712)
    """
    if wanted % seq == 0 and tokens.replace(".", "").isdigit():
        return int(wanted // seq)
    unit, below = tokens[-1].lower(), int(wanted // seq)
    binary = float(tokens[:-1]) * 2 ** UNITS[unit] / seq if unit in UNITS else 0.0
    least, most = math.ceil(wanted * (1 - NEAR) / seq), int(wanted * (1 + NEAR) / seq)
    multiples = (below // world * world, (below // world + 1) * world, binary)
    near = [int(n) for n in multiples if n % world == 0 and least <= n <= most]
    near = near or list(range(least, most + 1))  # no multiple is near: these are few, at most as many as devices
    return max(
        near or (below, below + 1),
        key=lambda n: (math.gcd(n, world) if near else 0, n == wanted / seq, n == binary, -abs(n * seq - wanted)),
    )


def _remark(batch: int, world: int) -> list[str]:
    """Where the devices do not divide a batch that is larger than they are many."""
    if batch < world or batch % world == 0:
        return []
    near = " or ".join(map(str, near_batches(batch, world)))
    return [
        f"global batch: {batch} samples are no multiple of {world} devices: few layouts divide them; nearest: {near}"
    ]


def _is_module(model: str) -> bool:
    return model.startswith("hf:") or (":" in model and not model.endswith((".toml", ".json")))


@dataclass(frozen=True)
class _Module:
    """A model that is no reference model."""

    factory: Callable[[], Any]
    longest: int | None
    """Tokens that it has positions for, where it says so."""
    refused: Callable[[int], dict[str, str]]
    """Of a number of tokens: axes that it cannot have, and why."""
    limits: ModelSpec | None = None
    notes: tuple[str, ...] = ()
    """What is not counted."""


def _module(model: str) -> _Module:
    if not model.startswith("hf:"):
        from shardwise.diagnose.read_module import example_length, example_of, module_factory, refused_axes  # torch

        factory = module_factory(model)
        example = example_of(factory)
        unknown = dict.fromkeys(("tp", "ep"), "the sizes that it must divide are not known for a module")
        longest = None if example is None else example_length(example)
        return _Module(factory, longest, lambda seq: unknown | refused_axes(factory, seq))
    from shardwise.cli.hf import refused_axes as refused_of
    from shardwise.cli.hf import sizes_of
    from shardwise.models.hf import chain_config, hf_factory, longest_sequence

    config = chain_config(model)
    limits = sizes_of(config)
    unknown = {} if limits else dict.fromkeys(("tp", "ep"), "its configuration does not say what they must divide")
    others = [kind for kind in ("vision", "audio") if getattr(config, f"{kind}_config", None) is not None]
    notes = tuple(f"a sample is text alone: what the {kind} part keeps and computes is not counted" for kind in others)
    return _Module(hf_factory(config), longest_sequence(config), lambda _: refused_of(config) | unknown, limits, notes)


def _of_devices(cluster: Cluster) -> list[str]:
    """What a reader should know of them: units that are missing, and where the numbers come from."""
    device, notes = cluster.device, []
    if device.rates.fp16 > device.rates.bf16:
        notes.append(f"{device.name} has no bf16 unit: products in bf16 run as slowly as in fp32 (--allow fp16)")
    if device.origin != "measured":
        notes.append(f"{device.name}: rates and memory are {device.origin}")
        notes += [line for line in cluster.origins if ": assumed" in line]
    return notes


def _described(model: str, factory: Any, seq: int, device: str) -> Profile:
    """The profile of a module, from its own forward."""
    if device not in ("meta", "cpu"):
        raise UsageError(f"--trace-on: found {device!r}, needed meta (no memory) or cpu (runs the forward for real)")
    from shardwise.diagnose.read_module import read_module

    return read_module(model, factory, seq, device)


# ---------------------------------------------------------------- what is shown


def bar(terms: Mapping[str, float], limit: float, width: int = BAR) -> Text:
    """Terms side by side, to the scale of the limit; a bar that goes beyond it is cut with `>`."""
    text = Text()
    used = 0
    total = 0.0
    for colour, (_, value) in zip(COLOURS * 2, terms.items(), strict=False):
        total += value
        cells = min(width, round(total / limit * width)) - used
        text.append("█" * cells, style=colour)
        used += cells
    text.append("·" * (width - used), style="dim")
    return text.append(">" if total > limit else "|")


def legend(terms: Mapping[str, float], spell: Any) -> Text:
    """Names and values of the terms in their colours, the largest first."""
    text = Text()
    colours = dict(zip(terms, COLOURS * 2, strict=False))
    for name, value in sorted(terms.items(), key=lambda item: -item[1]):
        text.append("█ ", style=colours[name])
        text.append(f"{name} {spell(value)}   ")
    return text


def show_memory(out: Console, memory: Memory, cluster: Cluster) -> None:
    """A bar per pipeline rank (at most eight, the worst among them), and the three sums."""
    worst = memory.worst
    limit = memory.limit or worst.allocated
    shown = memory.stages if len(memory.stages) <= 8 else (*memory.stages[:4], *memory.stages[-4:])
    table = Table(title=f"memory per device, of {limit / GIB:.0f} GiB", title_justify="left", box=None)
    for column in ("pipeline rank", "peak at", "GiB", ""):
        table.add_column(column, justify="right" if column == "GiB" else "left")
    for rank in shown if worst in shown else (*shown, worst):
        table.add_row(str(rank.rank), rank.phase, f"{rank.allocated / GIB:.1f}", bar(rank.terms, limit))
    out.print(table)
    out.print(legend(worst.terms, lambda value: f"{value / GIB:.2f} GiB"))
    fits = "" if not memory.limit or memory.fits else f", {(memory.device - memory.limit) / GIB:.1f} GiB too much"
    out.print(
        f"allocated {memory.allocated / GIB:.1f} GiB, reserved {memory.reserved / GIB:.1f} GiB, on the device "
        f"{memory.device / GIB:.1f} GiB{fits} (memory estimates: {band('memory', cluster.device.name)})"
    )


def show_time(out: Console, step: StepTime, cluster: Cluster) -> None:
    """The step by term, and what it makes of the devices."""
    out.print()
    out.print(f"step {seconds(step.total)} (time estimates: {band('time', cluster.device.name)})")
    out.print(bar(step.terms, step.total))
    out.print(legend(step.terms, seconds))
    hidden = {name: value for name, value in step.hidden.items() if value > 0}
    if hidden:
        out.print("behind compute: " + ", ".join(f"{name} {seconds(value)}" for name, value in hidden.items()))
    out.print(f"{step.tokens_per_s:,.0f} tokens/s per device, MFU {step.mfu:.1%}, {step.tokens:,} tokens per step")
    if cluster.device.price:
        hour = cluster.device.price * step.world
        per = hour / 3600 * step.total / step.tokens * 1e9
        out.print(
            f"cost {hour:,.2f} per hour, {per:,.2f} per billion tokens (at {cluster.device.price} per device hour)"
        )


def seconds(value: float) -> str:
    """`1.23 s`, `45.6 ms`."""
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.1f} ms" if value >= 0.001 else f"{value * 1e6:.0f} us"


def show_assumed(out: Console, asked: Question, stack: Stack) -> None:
    """Every number that nobody gave."""
    out.print()
    out.print(f"software stack: {stack.name} ({stack.about})")
    for note in asked.assumed:
        out.print(f"assumed: {note}", style="dim")


def estimate_json(memory: Memory, step: StepTime, cluster: Cluster) -> dict[str, Any]:
    """Both estimates for programs: bytes and seconds."""
    price = cluster.device.price
    return {
        "memory": {
            "allocated": memory.allocated, "reserved": memory.reserved, "device": memory.device, "limit": memory.limit,
            "fits": memory.fits, "phase": memory.worst.phase, "terms": dict(memory.worst.terms),
            "ranks": [{"rank": rank.rank, "phase": rank.phase, "terms": dict(rank.terms)} for rank in memory.stages],
            "band": vars(band("memory", cluster.device.name)),
        },
        "time": {
            "total": step.total, "terms": dict(step.terms), "hidden": dict(step.hidden), "mfu": step.mfu,
            "tokens_per_s": step.tokens_per_s, "tokens": step.tokens, "band": vars(band("time", cluster.device.name)),
        },
        "cost_per_hour": price * step.world if price else None,
    }  # fmt: skip


def check_path(path: Path | None, endings: tuple[str, ...]) -> None:
    """Refuse a file that could not be written, before any work.

    Raises:
        ConfigError: another ending, or no such folder.
    """
    if path is not None and (path.suffix not in endings or not path.resolve().parent.is_dir()):
        raise ConfigError(f"{path}: cannot be written; needed a path in a folder that exists, ending in {endings[0]}")
