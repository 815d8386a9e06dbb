"""What `plan`, `estimate` and `explain` are given: model, cluster, lengths and batch; and how estimates are shown."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.cli.bars import BAR, bar, colours_of, legend
from shardwise.cli.options.counts import LENGTH_HELP, length_of
from shardwise.cli.options.reading import how_read
from shardwise.cli.options.tokens import batch_of
from shardwise.errors import ConfigError, UsageError
from shardwise.extras import optional_module
from shardwise.hardware.cluster import GIB, Cluster, load_cluster
from shardwise.model.aliases import canonical
from shardwise.model.profile import Profile, profile_of
from shardwise.model.spec import ModelSpec, load_spec, presets
from shardwise.plan.band import band, likeness
from shardwise.plan.constraints import passed
from shardwise.plan.hosting import ASSUMED_HOST, assumed_of, host_lack, host_share, on_host
from shardwise.plan.memory import Memory
from shardwise.plan.plan import PRECISIONS, Plan
from shardwise.plan.ranks.activations import width_of
from shardwise.plan.repair import Read
from shardwise.plan.spelled import seconds, spelled
from shardwise.plan.stack import Stack, load_stack, stack_on
from shardwise.plan.time_terms import loading
from shardwise.plan.timing import StepTime
from shardwise.plan.workload import Workload

if TYPE_CHECKING:
    from shardwise.diagnose.read_module import Planned

MOST = 2**20
"""Devices that are planned for; a search among more would not end."""

ModelOption = Annotated[str, typer.Option(help="A preset, a .toml file of sizes, hf:NAME, or pkg.mod:factory.")]
ClusterOption = Annotated[str, typer.Option(help="device:per-nodexnodes (h100:8x16), or a .toml file.")]
SeqOption = Annotated[int | None, typer.Option(parser=length_of, help=LENGTH_HELP)]
TokensOption = Annotated[str | None, typer.Option(help="Tokens per step: 4M, 16M.")]
BatchOption = Annotated[int | None, typer.Option(min=1, help="Samples per step; default: the plan's, if any.")]
OptimizerOption = Annotated[str, typer.Option(help="adamw, sgd, lion, muon, adafactor, ...")]
TraceOnOption = Annotated[str, typer.Option(help="Where a module's forward is read: meta, or cpu (runs it for real).")]
StackOption = Annotated[
    str, typer.Option(help="Software stack that runs the plan; empty: Shardwise's own on such devices.")
]
BlocksOption = Annotated[str, typer.Option(help="Name pattern of a module's repeated blocks: layers.*")]
PriceOption = Annotated[float | None, typer.Option(min=0, max=1e6, help="Currency per device and hour.")]
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
    left_out: tuple[tuple[str, str], ...] = ()
    """What the module is planned without, and why: axes, and other words of `space.FEATURES`."""
    limits: ModelSpec | None = None
    """Sizes that axes must divide, where they are known."""
    factory: Callable[[], Any] | None = None
    """Of a module."""
    blocks: str = "auto"
    """The pattern of a module's blocks as it was read; empty: it is one block."""

    @property
    def refused(self) -> tuple[str, ...]:
        """Words of what is left out."""
        return tuple(dict(self.left_out))

    def read(self, stack: Stack) -> Read:
        """The model, for the table of constraints."""
        return Read(profile=self.profile, limits=self.limits, left_out=self.left_out, cut=stack.cut)

    def stack(self, name: str) -> Stack:
        """The software stack of that name; of none, Shardwise's own on the cluster's devices."""
        return load_stack(name) if name else stack_on(self.cluster.device.name)


def question(
    model: str, cluster: str | Cluster, *, seq: int | None, batch: int | None, tokens: str | None, **options: Any
) -> Question:
    """What the words of a verb ask.

    Args:
        model: a preset, a file of sizes, `hf:NAME`, or `pkg.mod:factory`.
        cluster: a preset or a file, or one that was read.
        seq: tokens per sample; None: 4096, or the model's positions where these are fewer, marked as assumed.
        batch: samples per step.
        tokens: tokens per step, `4M`; of `batch` and `tokens` one is given, or neither.
        **options: `optimizer`, `price`, `trace_on`, where a module's forward is read (`meta` or `cpu`), `blocks`, the
            pattern of a module's repeated blocks, and what to `allow`: precisions beside the usual one.

    Raises:
        UsageError: an unknown name; both a batch and tokens.
        ConfigError: a file that does not describe what it should.
    """
    found = read_cluster(cluster) if isinstance(cluster, str) else cluster
    if options.get("price"):
        found = found.with_(device=replace(found.device, price=float(options["price"])))
    refuse_ending("model", model)
    if os.path.isdir(model):
        raise UsageError(f"model {model!r}: is a folder; one with a config.json of transformers is hf:{model}")
    spec = None if is_module(model) else load_spec(model)
    blocks, device = options.get("blocks") or "auto", str(options.get("trace_on") or "meta")
    if device not in ("meta", "cpu"):
        raise UsageError(f"--trace-on: found {device!r}, needed meta (no memory) or cpu (runs the forward for real)")
    if spec is not None and device != "meta":
        raise UsageError(f"--trace-on {device}: {model} is a preset or sizes, and no forward is read; leave it out")
    if spec is not None and blocks != "auto":
        raise UsageError(f"--blocks {blocks}: {model} is a preset or sizes, whose blocks are known; leave it out")
    module = _module(model, blocks) if spec is None else None
    longest = module.longest if module else spec.max_seq_len if spec else None
    has_host = found.host_memory or found.device.name.startswith("cpu")
    assumed = [] if has_host else [f"host memory: {ASSUMED_HOST / GIB:.0f} GiB per device"]
    seq, said = _length(model, seq, module, longest)
    size, notes = batch_of(batch, tokens, seq, found.world)
    refused = module.refused(seq) if module else {}
    assumed += [*said, *(_left_out(module, refused) if module else ()), *(module.notes if module else ())]
    picture = 4.0 * 3 * spec.patch**2 * seq if spec and spec.patch else 0.0  # of patches of three colours, in fp32
    workload = Workload(
        seq_len=seq, global_batch=size, optimizer=options.get("optimizer") or "adamw", sample_bytes=picture
    )
    if spec:
        profile = profile_of(spec)
    elif module:
        usual = "fp32" if found.device.name.startswith("cpu") else "bf16"
        profile, more = _described(model, module, seq, device, {usual, *options.get("allow", ())})
        assumed += more
    assumed += how_read(profile)
    if longest and seq > longest:
        assumed.append(f"{spec.name if spec else model} has positions for {longest} tokens; it is planned for {seq}")
    notes += loading.said(profile, found, workload)
    return Question(
        profile=profile, spec=spec, cluster=found, workload=workload, assumed=(*assumed, *notes, *_of_devices(found)),
        left_out=tuple(refused.items()), limits=spec or (module.limits if module else None),
        factory=module.made(seq) if module else None, blocks=module.blocks if module else "auto",
    )  # fmt: skip


def read_cluster(text: str) -> Cluster:
    """A preset, in letters of any case, or a file; `detect` reads what this machine has, `probe` measures what it does.

    Raises:
        UsageError: an unknown name, a device that no preset is known to be, or more devices than `MOST`.
    """
    seams = {"detect": ("shardwise.hardware.local", "discover"), "probe": ("shardwise.cli.probe", "probed")}
    refuse_ending("cluster", text)
    if text in seams:
        module, name = seams[text]
        found: Cluster = getattr(importlib.import_module(module), name)()
    else:  # a path as it is: in small letters it might be another file
        is_file = Path(text).suffix.lower() in (".toml", ".json")
        try:
            found = load_cluster(Path(text) if is_file else text.lower().replace(" ", ""))
        except UsageError as error:
            if not is_file and canonical(text, presets()) in presets():
                raise UsageError(f"cluster {text!r}: is a model; the model is said first, then the cluster") from error
            raise
    if found.world > MOST:
        raise UsageError(f"cluster {text!r}: found {found.world:,} devices, needed at most {MOST:,}")
    return found


def refuse_ending(what: str, word: str) -> None:
    """Refuse a file of a kind that is not read, which would else be taken for a name.

    Raises:
        ConfigError: `cluster.yaml`.
    """
    ending = Path(word).suffix.lower()
    if ending in (".yaml", ".yml", ".txt", ".ini", ".cfg"):
        raise ConfigError(f"{what} {word}: found the ending '{ending}', needed .toml or .json with the same keys")


def is_module(model: str) -> bool:
    """Whether a MODEL is no sizes: something of `transformers`, or a function that makes a module.

    >>> is_module("hf:llama"), is_module("models:net"), is_module("llama-8b")
    (True, True, False)
    """
    return model.startswith("hf:") or (":" in model and not model.endswith((".toml", ".json")))


def _module(model: str, blocks: str) -> Planned:
    """A model that is no reference model; torch is imported here."""
    if model.startswith("hf:"):
        optional_module("transformers", extra="hf", need=f"model {model}")
        from shardwise.cli.options.hf import planned_hf

        return planned_hf(model, blocks)
    from shardwise.diagnose.read_module import planned_module

    return planned_module(model, blocks)


def _left_out(module: Planned, refused: Mapping[str, str]) -> list[str]:
    """Axes that the module cannot have, and why; of a module that is one block, its notes say it."""
    known = ("module.no-experts", "" if module.blocks else "module.no-blocks")
    return [f"{axis} is left out: {why}" for axis, why in refused.items() if why not in known]


def _length(model: str, seq: int | None, module: Planned | None, longest: int | None) -> tuple[int, list[str]]:
    """Tokens of a sample, and what was assumed; of a model whose samples have a fixed number, no other."""
    if module is not None and module.is_fixed and seq not in (None, longest):
        raise UsageError(f"--seq {seq}: a sample of {model} counts as {longest} tokens, always; leave --seq out")
    if seq is not None:
        return seq, []
    usual = module.usual if module else 4096
    seq = min(usual, longest or usual)
    return seq, [] if module is not None and module.is_fixed else [f"sequence length: {seq} tokens (give --seq)"]


_FROM = {"table": "those of a built-in table", "read": "as the file says", "assumed": "assumed"}


def _of_devices(cluster: Cluster) -> list[str]:
    """What a reader should know of them: units that are missing, and where the numbers come from."""
    device, notes = cluster.device, []
    if device.rates.fp16 > device.rates.bf16:
        notes.append(f"{device.name} has no bf16 unit: products in bf16 run as slowly as in fp32 (--allow fp16)")
    if device.origin != "measured":
        notes.append(f"{device.name}: rates and memory are {_FROM[device.origin]}")
        notes += [line for line in cluster.origins if ": assumed" in line]
    return notes


def _described(model: str, module: Planned, seq: int, on: str, types: set[str]) -> tuple[Profile, tuple[str, ...]]:
    """The profile of a module, from its own forward, and what is to be said of it."""
    from shardwise.diagnose.read_module import read_planned

    length = min(seq, module.longest or seq)  # sizes per token are those of a sample that its positions allow
    widths = {width_of(each) for each in types & {*PRECISIONS}}
    profile, notes = read_planned(model, module, length, on, widths=widths)
    if profile.chosen == profile.experts > 1:
        notes += (f"every token meets all {profile.experts} experts, as its forward does; MFU counts them all",)
    return profile, notes


# ---------------------------------------------------------------- what is shown


def show_memory(out: Console, memory: Memory, plan: Plan, cluster: Cluster) -> None:
    """A bar per pipeline rank (at most eight and the worst), and the three sums; what others have beyond it."""
    worst = memory.worst
    limit = memory.limit or worst.allocated
    ends = {rank.rank for rank in (*memory.stages[:4], *memory.stages[-4:])}
    shown = [rank for rank in memory.stages if len(memory.stages) <= 8 or rank.rank in ends or rank is worst]
    colours = colours_of([worst.terms, *(rank.terms for rank in shown)])
    table = Table(title=f"memory per device, of {spelled(limit, 0)}", title_justify="left", box=None)
    width = max(8, min(BAR, out.width - 34 - max(len(rank.phase) for rank in shown)))
    for column in ("pipeline rank", "peak at", "live", ""):
        table.add_column(column, justify="right" if column == "live" else "left")
    for rank in shown:
        table.add_row(str(rank.rank), rank.phase, spelled(rank.allocated), bar(rank.terms, limit, colours, width))
    out.print(table)
    out.print(legend(worst.terms, lambda value: spelled(value, 2), colours, out.width))
    for name in (name for name in colours if name not in worst.terms):
        size, at = max((each.terms.get(name, 0.0), each.rank) for each in shown)
        out.print(Text.assemble(("█ ", colours[name]), f"{name} {spelled(size, 2)} on rank {at}"))
    fits = "" if not memory.limit or memory.fits else f", {spelled(memory.device - memory.limit)} too much"
    back = f" (of it {spelled(memory.held)} held, and given back when memory runs short)" if memory.held else ""
    out.print(
        f"allocated {spelled(memory.allocated)}, reserved {spelled(memory.reserved)}, on the device "
        f"{spelled(memory.device)}{back}{fits} (memory estimates: {band('memory', cluster.device.name)})",
        markup=False,
    )
    if memory.peak is not memory.worst:
        most = spelled(memory.reserved_of(memory.peak))
        out.print(f"most is reserved outside of steps: {most} at the {memory.peak.phase}")
    if apart := on_host(memory, plan, cluster.per_node):
        share = spelled(host_share(cluster)) + " of host memory per device"
        lack = ", too much" if host_lack(memory, plan, cluster) else ""
        out.print(f"offloaded states: {spelled(apart)} of {share}{lack}")
    phases = ", ".join(f"{name} {spelled(value)}" for name, value in memory.peaks.items())
    kept = f"; a save keeps {spelled(memory.host)} of host memory per device" if memory.host else ""
    out.print(f"live tensors at most in each phase: {phases}{kept}", style="dim")


def show_time(out: Console, step: StepTime, cluster: Cluster) -> None:
    """The step by term, and what it makes of the devices."""
    out.print()
    out.print(f"step {seconds(step.total)} (time estimates: {band('time', cluster.device.name)})", markup=False)
    colours = colours_of([step.terms])
    out.print(bar(step.terms, step.total, colours, min(BAR, out.width - 1)))
    out.print(legend(step.terms, seconds, colours, out.width))
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


def show_assumed(out: Console, plan: Plan, asked: Question, stack: Stack) -> None:
    """Every number that nobody gave."""
    out.print()
    out.print(f"software stack: {stack.name} ({stack.about})")
    for note in (*asked.assumed, *assumed_of(plan, asked.cluster)):
        out.print(f"assumed: {note}", style="dim", markup=False)
    for finding in passed(plan, asked.read(stack), asked.cluster, asked.workload):
        out.print(f"{finding.severity}: {finding}", style="yellow", markup=False)


def estimate_json(memory: Memory, step: StepTime, plan: Plan, cluster: Cluster) -> dict[str, Any]:
    """Both estimates for programs: bytes and seconds."""
    price = cluster.device.price
    return {
        "memory": {
            "allocated": memory.allocated, "reserved": memory.reserved, "device": memory.device, "limit": memory.limit,
            "fits": memory.fits and not host_lack(memory, plan, cluster),
            "phase": memory.worst.phase, "terms": dict(memory.worst.terms),
            "peak": {
                "phase": memory.peak.phase, "allocated": memory.peak.allocated,
                "reserved": memory.reserved_of(memory.peak),
            },
            "phases": dict(memory.peaks), "host": memory.host,
            "offloaded": on_host(memory, plan, cluster.per_node),
            "ranks": [{"rank": rank.rank, "phase": rank.phase, "terms": dict(rank.terms)} for rank in memory.stages],
            "band": vars(band("memory", cluster.device.name)),
        },
        "time": {
            "total": step.total, "terms": dict(step.terms), "hidden": dict(step.hidden), "mfu": step.mfu,
            "tokens_per_s": step.tokens_per_s, "tokens": step.tokens, "band": vars(band("time", cluster.device.name)),
        },
        "cost_per_hour": price * step.world if price else None,
    }  # fmt: skip


def said_json(plan: Plan, asked: Question, stack: Stack) -> dict[str, Any]:
    """What stands below the numbers: how far they have been off, for which stack they hold, what nobody gave."""
    return {
        "published": likeness(plan, asked.profile),
        "stack": stack.name,
        "assumed": [*asked.assumed, *assumed_of(plan, asked.cluster)],
        "findings": [each.to_dict() for each in passed(plan, asked.read(stack), asked.cluster, asked.workload)],
    }


def check_path(path: Path | None, endings: tuple[str, ...]) -> None:
    """Refuse a file that could not be written, before any work.

    Raises:
        ConfigError: another ending, a name near the 255 bytes of file systems, a folder, or none to write to.
    """
    if path is None:
        return
    try:
        folder = path.resolve().parent
    except (OSError, RuntimeError) as error:  # the working directory is gone; links in a circle
        raise ConfigError(f"{path}: cannot be written ({error}); needed a file in a folder that exists") from None
    if path.suffix not in endings or len(os.fsencode(path.name)) > 230 or path.is_dir() or not folder.is_dir():
        ending = " or ".join(endings)
        raise ConfigError(
            f"{path}: cannot be written; needed a file in a folder that exists, its name short and ending in {ending}"
        )
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{path}: cannot be written; needed a folder that this user may write to, found {folder}")
