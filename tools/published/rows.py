"""`read`: the rows of a file that can be predicted, and how many cannot, by reason."""

from __future__ import annotations

import codecs
import csv
import io
import os
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from published.cells import COLUMNS, Cells, Skip
from published.degrees import MICRO, is_sharded
from published.hardware import cluster_of
from published.layout import PLAIN, WHOLE_GRADIENTS, plan_of, seq_len_of, split_experts, turns_of
from published.measured import (
    MemoryKind,
    MemoryStage,
    doubt_of,
    is_oom,
    memory_kind_of,
    memory_of,
    memory_stage_of,
    step_time_of,
)
from published.models import model_of
from published.recompute import EVERY_SECOND, NO_RECOMPUTE, PER_OPERATOR, TWO_OF_THREE
from published.stacks import TORCH, TPU, library, stack_of
from shardwise.errors import ConfigError, PlanError
from shardwise.hardware.cluster import Cluster
from shardwise.model.profile import profile_of
from shardwise.model.spec import ModelSpec
from shardwise.plan.band import kind_of
from shardwise.plan.memory import estimate_memory
from shardwise.plan.plan import Plan, Recompute, Schedule
from shardwise.plan.stack import Stack, load_stack
from shardwise.plan.timing import estimate_time
from shardwise.plan.workload import Workload


@dataclass(frozen=True)
class Row:
    """One published measurement, in the planner's terms."""

    id: str
    group: str
    """The id up to its last '-': the source."""
    source: str
    """Where it was published, as the file says it."""
    kind: str
    """Kind of layout: the axes in use and how data ranks share."""
    spec: ModelSpec
    cluster: Cluster
    plan: Plan
    workload: Workload
    stack: Stack
    step_time: float | None
    """Seconds."""
    memory_gib: float | None
    memory_kind: MemoryKind
    memory_stage: MemoryStage
    oom: bool
    doubtful: str
    """The clause of the notes by which the row contradicts itself or is an outlier; empty: none."""
    assumed: tuple[str, ...]
    """What the row does not say."""

    @property
    def infers_recompute(self) -> bool:
        """Whether our own estimate says what was recomputed: see `recomputed`."""
        return any(sentence.startswith(_INFERRED) for sentence in self.assumed)


def read(path: str | os.PathLike[str]) -> tuple[list[Row], dict[str, int]]:
    """Rows that can be predicted, and reason -> number of those that cannot.

    Raises:
        ConfigError: a file that is missing, is no table, or lacks columns.
    """
    rows, skipped = [], Counter[str]()
    for raw in raws_of(path):
        try:
            rows.append(row_of(raw))
        except Skip as reason:
            skipped[str(reason)] += 1
        except (ConfigError, PlanError):
            skipped["layout: not one that can be"] += 1
        except (
            ArithmeticError,
            ValueError,
            LookupError,
        ):  # a slip of the keyboard in one row ends no reading of others
            skipped["row: numbers that cannot be"] += 1
    return rows, dict(skipped)


def raws_of(path: str | os.PathLike[str]) -> list[dict[str, str]]:
    """The cells of each row by column, as spreadsheets write them too: with a byte order mark, semicolons or tabs.

    Raises:
        ConfigError: see `read`.
    """
    what = f"measurements {os.fspath(path)}"
    needs = f"needed a .csv with the columns {', '.join(COLUMNS[:3])}, ...; give it as `make accuracy ROWS=file.csv`"
    try:
        data = Path(path).read_bytes()
        lines = csv.reader(io.StringIO(text := _decoded(data), newline=""), delimiter=_delimiter(text))
        head, *rest = [line for line in lines if any(cell.strip() for cell in line)] or [[]]
    except OSError as error:
        raise ConfigError(f"{what}: cannot be read ({error.strerror}); {needs}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{what}: is no table of text ({error}); {needs}") from None
    names = [name.strip().lower() for name in head]
    missing = [name for name in COLUMNS if name not in names]
    if missing:
        raise ConfigError(
            f"{what}: columns: found no {', '.join(missing)}; needed all of {len(COLUMNS)} columns, empty where "
            "unknown; add them"
        )
    return [dict(zip(names, line, strict=False)) for line in rest]


def _decoded(data: bytes) -> str:
    """UTF-8 or UTF-16 with or without a mark, else what older spreadsheets write."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return data.decode("utf-16")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("cp1252")


def _delimiter(text: str) -> str:
    """What separates the names of the first line that is not empty."""
    return max(",;\t", key=text.lstrip().partition("\n")[0].count)


def row_of(raw: Mapping[str, str]) -> Row:
    """One row.

    Raises:
        Skip: model, hardware, layout, batch or measurement cannot be had; ConfigError, PlanError: they cannot be.
    """
    cells = Cells(raw)
    spec = model_of(cells, cells.count("seq_len"))
    cluster = cluster_of(cells)
    stack = stack_of(cells, spec, sharded=is_sharded(cells), nodes=cluster.nodes)
    split = split_experts(cells, spec)
    if split is not spec:
        stack, spec = replace(stack, expert_parts=split.num_experts // spec.num_experts), split
    seq_len = seq_len_of(cells, spec, stack.name)
    plan, workload = plan_of(cells, spec, cluster, stack, seq_len)
    if WHOLE_GRADIENTS in cells.assumed:  # in the type of what is computed
        stack = replace(stack, keeps_shards=True, grad_bytes=2.0)
    plan, workload = halved(cells, spec, cluster, stack, (plan, workload))
    stack = plain_tensor(autocast(cells, stack, plan), plan)
    plan = recomputed(cells, spec, cluster, stack, (plan, workload))
    plan = tuned(cells, spec, cluster, stack, (plan, workload))
    step_time = step_time_of(cells, spec, cluster, plan, workload, stack)
    memory = memory_of(cells)
    if step_time is None and memory is None and not is_oom(cells):
        raise Skip("measurement: none")
    return Row(
        id=cells["id"],
        group=cells["id"].rsplit("-", 1)[0],
        source=cells["source"],
        kind=kind_of(plan, experts=spec.kind == "moe"),
        spec=spec,
        cluster=cluster,
        plan=plan,
        workload=workload,
        stack=stack,
        step_time=step_time,
        memory_gib=None if any(re.fullmatch(_GUESSED, line) for line in cells.assumed) else memory,
        memory_kind=memory_kind_of(cells, stack.name),
        memory_stage=memory_stage_of(cells, stack.name),
        oom=is_oom(cells),
        doubtful=doubt_of(cells),
        assumed=tuple(cells.assumed),
    )


_FASTEST = ", the fastest that fits"
_GUESSED = rf"{MICRO} \d+({_FASTEST})?"
"""Of a row that prints no micro-batch, and so nothing that its memory could be compared with."""
_INFERRED = "recompute="
_UNSAID = (
    r"(recomput\w*|check ?pointing)( mode)?((( and| or|,) [\w -]{2,40})|( by| in| of) [\w -]{2,40},)?( is| was| are)? "
    r"not (stated|printed|mentioned|given|said|named|known|shown|listed|read|counted|in the \w+)"
)
DOUBT = 1.1
"""An estimate that is so much larger than the device still leaves it open whether a job fits."""


WHOLE = ("jax", "deepspeed", "fsdp1", "eager")
"""Stacks that recompute whole blocks where nothing else is said."""
HOSTED = 2024.5
"""Year from which XLA on TPUs moves what blocks are given to the host (MaxText's `decoder_layer_input: offload`)."""
PARTS = tuple(Recompute(mode="ratio", ratio=share) for share in (0.25, 0.5, 0.75))
"""Blocks of which no more are recomputed than need be."""


def recomputed(cells: Cells, spec: ModelSpec, cluster: Cluster, stack: Stack, job: tuple[Plan, Workload]) -> Plan:
    """The plan; where the row does not say what is recomputed, and would not fit, with the least that lets it fit."""
    plan, work = job
    if is_oom(cells):  # nothing says that it fitted
        return plan
    is_default = NO_RECOMPUTE in cells.assumed or PER_OPERATOR in cells.assumed
    said = cells.noted(r"recomput|checkpointing") and not cells.noted(_UNSAID)
    is_open = is_default and not cells["activation_checkpoint"] and not said
    if not is_open and not {EVERY_SECOND, TWO_OF_THREE} & set(cells.assumed):
        return plan
    profile = profile_of(spec)
    some = (Recompute(mode="ops"), *PARTS) if is_open and stack.name not in WHOLE else ()
    tried = (plan.recompute, *some, Recompute(mode="blocks"))
    on_tpu = stack.name == "jax" and re.search(TPU, cells["gpu"].lower()) is not None
    for recompute in tried:
        one = replace(plan, recompute=recompute)
        memory = estimate_memory(profile, one, work, stack=stack, device=cluster.device)
        if memory.device - memory.held <= (1.0 if on_tpu or recompute in PARTS else DOUBT) * memory.limit:
            if recompute != plan.recompute:
                cells.assume(f"{_INFERRED}{recompute.mode}, without which it would not fit")
            return one
    if is_open and on_tpu and cells.year >= HOSTED:
        cells.assume("recompute=blocks whose inputs wait on the host, as MaxText's configurations of TPUs have it")
        return replace(plan, recompute=Recompute(mode="blocks"), offload=replace(plan.offload, activations=True))
    if is_open and stack.name in WHOLE and plan.axes.pp == 1:
        cells.assume(f"{_INFERRED}blocks, with which it comes nearest to fitting")
        return replace(plan, recompute=Recompute(mode="blocks"))
    return plan


def halved(
    cells: Cells, spec: ModelSpec, cluster: Cluster, stack: Stack, job: tuple[Plan, Workload]
) -> tuple[Plan, Workload]:
    """The job; where a trainer's row names a 16-bit type and would not fit else, with weights and states in it.

    Trainers load weights in the type of the checkpoint, and train them so unless told otherwise.
    """
    plan, work = job
    if (
        not (stack.name in ("eager", "fsdp1") or (stack.name == "torchtitan" and library(cells)))
        or plan.precision not in ("bf16", "fp16")
        or work.compute
        or is_oom(cells)
        or "mix" in cells["precision"].lower()
    ):
        return job
    held = replace(plan, recompute=Recompute(mode="blocks"))
    memory = estimate_memory(profile_of(spec), held, work, stack=stack, device=cluster.device)
    if memory.device - memory.held <= DOUBT * memory.limit:
        return job
    cells.assume("weights and states in 16 bits, without which it would not fit")
    states = "adamw-bf16" if work.optimizer == "adamw" else work.optimizer
    kind = "fp16" if plan.precision == "fp16" else ""  # the type of its products
    return replace(plan, precision="bf16-pure"), replace(work, optimizer=states, compute=kind)


_SHARDS = r"fsdp|fully[ _]shard"
_WIDE = r"gathers?( and reductions)? in fp32|gathered in fp32"
"""Words for sharded weights that no mixed-precision policy casts before they are gathered."""
_APEX = r"(apex|amp|opt[ _-]?level)\W{0,3}o2\b"
"""Cast the weights once, and so all that is computed: words for sharded ones, and for Apex's second level."""
_LISTED = r"paddle"
"""Whose recipes put norms, softmax and GELU on the list of what runs in 16 bits (`custom_white_list`)."""


def autocast(cells: Cells, stack: Stack, plan: Plan) -> Stack:
    """The stack; of weights in fp32 under autocast, whole or gathered so, with norms, softmax and the residual in fp32.

    Apex's second level has fp32 copies for the update alone, and drops all gradients behind it.
    """
    mixed = stack.name in TORCH and plan.precision in ("bf16", "fp16")
    if mixed and cells.noted(_WIDE) and cells.noted("autocast"):
        cells.assume("autocast: weights gathered in fp32; the residual stream, norms and softmax in fp32")
        return replace(stack, residual_bytes=4.0, gathers_wide=plan.zero == 3, cast_copies=_cast(stack))
    mixed = mixed and not plan.zero
    if not mixed or cells.has(rf"{_SHARDS}|{_APEX}|{_LISTED}"):
        apex = mixed and cells.has(_APEX)
        return replace(stack, master=True, widens_grads=True, zeroes_grads=False) if apex else stack
    cells.assume("autocast: the residual stream, norms and softmax in fp32")
    return replace(stack, residual_bytes=4.0, cast_copies=_cast(stack))


CAST = 12.0
"""Bytes per weight and micro-batch that autocast moves: 4 read and 2 written, and as much of its gradient."""


def _cast(stack: Stack) -> float:
    """Of blocks that run operator by operator; compiled ones do not show it."""
    return 0.0 if stack.fused else CAST


def plain_tensor(stack: Stack, plan: Plan) -> Stack:
    """The stack; without sequence parallelism nothing of `tp` is split beside products: user buffers need it.

    Source: Megatron-Bridge's `comm_overlap.py`, which turns `tp_comm_overlap` off then.
    """
    if stack.name != "megatron-bridge" or plan.axes.tp == 1 or plan.tensor.sequence:
        return stack
    return replace(stack, overlap_tensor=load_stack("megatron-core").overlap_tensor)


def tuned(cells: Cells, spec: ModelSpec, cluster: Cluster, stack: Stack, job: tuple[Plan, Workload]) -> Plan:
    """The plan; where a row prints no micro-batch, with the one that fits and is predicted fastest.

    Whoever prints none has looked for it. So for recompute, where the row says nothing of that either, and for the
    stages per rank of a pipeline.
    """
    plan, work = job
    guess = f"{MICRO} 1"
    micros = (1, 2, 4, 8, 16) if guess in cells.assumed else (1,)
    said = next((line for line in cells.assumed if line == NO_RECOMPUTE or line.startswith(_INFERRED)), "")
    free = said and guess in cells.assumed
    policies = dict.fromkeys((plan.recompute, *((Recompute(mode="ops"), Recompute(mode="blocks")) if free else ())))
    turns = turns_of(spec, plan.axes.pp) if PLAIN in cells.assumed else ()
    schedules = (plan.schedule, *(Schedule(kind="interleaved", stages_per_rank=number) for number in turns))
    tried = list(product(micros, policies, schedules))
    profile, times = profile_of(spec), dict[tuple[int, str, int], tuple[float, Plan]]()
    for micro, recompute, schedule in tried if len(tried) > 1 else ():
        count, rest = divmod(plan.batch.micro_batches, micro)
        if rest or not count or (schedule.kind == "interleaved" and count % plan.axes.pp):
            continue
        with suppress(ConfigError, PlanError):  # a number that the schedule cannot have
            batch = replace(plan.batch, micro_batches=count)
            one = replace(plan, recompute=recompute, batch=batch, schedule=schedule)
            alone = one == replace(plan, schedule=schedule)  # what a row runs fits, whatever is estimated
            if alone or estimate_memory(profile, one, work, stack=stack, device=cluster.device).fits:
                key = micro, recompute.mode, schedule.stages
                times[key] = estimate_time(profile, cluster, one, work, stack=stack).total, one
    if not times:
        return plan
    best = min(times, key=lambda key: times[key][0])
    if guess in cells.assumed:
        cells.assumed[cells.assumed.index(guess)] = f"{MICRO} {best[0]}{_FASTEST}"
    if best[1] != plan.recompute.mode:
        cells.assumed[cells.assumed.index(said)] = f"{_INFERRED}{best[1]}, with which a larger micro-batch is faster"
    if turns and best[2] > 1:
        cells.assumed[cells.assumed.index(PLAIN)] = f"{best[2]} stages per rank, the fastest that fit"
    return times[best][1]
