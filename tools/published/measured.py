"""What a row measured: seconds per step, peak memory and what kind of number it is, or that it ran out of memory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from published.cells import MEASURED, Cells
from published.degrees import sequences_of
from published.stacks import DEVICE
from shardwise.hardware.cluster import Cluster
from shardwise.model.profile import profile_of
from shardwise.model.spec import ModelSpec
from shardwise.plan.plan import Plan
from shardwise.plan.stack import Stack
from shardwise.plan.workload import Workload

MemoryKind = Literal["allocated", "reserved", "device"]
MemoryStage = Literal["worst", "first", "last"]

_DOUBTS = (
    r"misprint|out of line|contradict|inconsistent|low trust|\boutlier|disagrees|^warning|could not reproduce|"
    r"impossible|not certain|another value|exceeds the single|ambiguous: micro"
)
_OOM = r"^(\[[^\]]*\] )?(oom|out of memory|cuda out of memory|ran out of memory)\b"
_ALLOCATED = (
    r"(max_memory_|(peak|max)[ _-]|rank-?\d+ )allocated|max_mem(ory)?_alloc|peak active|allocated \w+ printed|"
    r"allocated is in the memory|(torch|peak) memory allocated|(peak|max)\w* memory (of|by) (py)?torch\b"
)
_UNFIT = r"\booms?\b|out[ -]of[ -]memory|(does|did) not fit|(doesn't|didn't) fit|exceeds (the )?(device |gpu )?memory"

LATER = 3000.0
CAUSAL_CORE = {"megatron-core": 2025.2, "megatron-bridge": 2025.65}
"""Year from which a stack's TFLOP/s and MFU count the half of attention that is not masked. Megatron-LM of December
2024 counted all, that of July 2025 half; NeMo all until Megatron-Bridge took its place."""
CAUSAL = ((r"maxtext", 2025.57), (r"\bverl\b", 2026.05))
"""The same of those that count by themselves: MaxText's pull request 1988, verl's 4959."""


@dataclass(frozen=True)
class Flops:
    """How a source counts operations for its TFLOP/s and MFU."""

    causal: bool
    recompute: bool
    embedding: bool


def is_oom(cells: Cells) -> bool:
    """True where a clause of the notes begins with it, or a measured cell says so; a clause about other runs does not.

    Where nothing was measured, any clause that names it is about this run.
    """
    if _speed_cells(cells):
        return False
    said = any(re.search(_OOM, clause) for clause in cells.clauses)
    said = said or any(re.search(_UNFIT, cells[name].lower()) for name in MEASURED)
    return said or (not cells.number("peak_mem_gib") and cells.noted(_UNFIT) is not None)


def doubt_of(cells: Cells) -> str:
    """The clause that says that the row contradicts itself or is an outlier; empty where none does."""
    doubts = (clause for clause in cells.clauses if re.search(_DOUBTS, clause) and "mfu column" not in clause)
    return next(doubts, "")


def _speed_cells(cells: Cells) -> bool:
    return any(cells.number(name) for name in ("tokens_per_s_per_gpu", "step_time_s", "tflops_per_gpu", "mfu"))


def memory_kind_of(cells: Cells, stack: str) -> MemoryKind:
    """allocated, reserved or device, by the words of the notes.

    Where they say nothing, what the device shows of PyTorch's loops and trainers (as reserved, those sources are 7 to
    19 % below what is printed), and what the allocator reserved of others.
    """
    if cells.noted(DEVICE):
        return "device"
    if cells.noted(_ALLOCATED):
        return "allocated"
    if cells.noted(r"reserved") or stack == "torchtitan":
        return "reserved"
    if cells.has(r"lit-?gpt|torchtune|lightning (ai|fabric)|pytorch.lightning"):
        return "allocated"
    kind: MemoryKind = "device" if stack in ("eager", "fsdp1", "deepspeed") else "reserved"
    if cells.number("peak_mem_gib"):
        cells.assume(f"peak memory is what the {'device shows' if kind == 'device' else 'allocator reserved'}")
    return kind


def memory_stage_of(cells: Cells, stack: str) -> MemoryStage:
    """Which rank of the pipeline the number is of: nanotron's tables are written by rank 0, else what the notes say.

    That nanotron's are of the first rank shows in the numbers: with more ranks in the pipeline they do not fall as the
    last rank's activations in flight would.
    """
    if stack == "nanotron":
        return "first"
    if cells.noted(r"(rank is|of|on) the last pipeline stage|(logged|printed) by the last (rank|stage)"):
        return "last"
    if cells.noted(r"max(imum)? over (pp |all )?ranks|worst rank|all ranks"):
        return "worst"
    return "first" if cells.noted(r"\brank[- ]?0\b") else "worst"


def memory_of(cells: Cells) -> float | None:
    """Printed GiB; the number before the row ran out of memory is none."""
    return None if is_oom(cells) else cells.number("peak_mem_gib")


def step_time_of(
    cells: Cells, spec: ModelSpec, cluster: Cluster, plan: Plan, work: Workload, stack: Stack
) -> float | None:
    """Seconds per step, from the step time, tokens per second, or TFLOP/s and MFU as the source counts them."""
    tokens = work.tokens / cluster.world
    stated_batch = sequences_of(cells, work.seq_len) if cells["global_batch"] else None
    step = cells.number("step_time_s")
    if step and stated_batch and cells.count("seq_len"):
        return step * work.global_batch / stated_batch
    rate = cells.number("tokens_per_s_per_gpu")
    if rate:
        whole = re.search(r"total|aggregate|all (gpus|devices)|cluster", cells["tokens_per_s_per_gpu"].lower())
        return tokens / rate * (cluster.world if whole else 1)
    if step:
        return step
    tera = cells.number("tflops_per_gpu")
    mfu = cells.number("mfu")
    if not tera and mfu:
        tera = mfu * _peak(cells, cluster, work) / 1e12
    if not tera:
        return None
    way = flops_way(cells, stack, plan)
    cells.assume(
        f"time from TFLOP/s, counting {'causal' if way.causal else 'full'} attention, "
        f"{'with' if way.recompute else 'without'} recompute"
    )
    return tokens * _per_token(spec, work.seq_len, way) / (tera * 1e12)


def flops_way(cells: Cells, stack: Stack, plan: Plan) -> Flops:
    """How the source counts: its words, else the habit of its stack."""
    since = next((year for words, year in CAUSAL if cells.has(words)), CAUSAL_CORE.get(stack.name, LATER))
    causal = stack.name == "deepspeed" or cells.year >= since
    if cells.noted(r"causal (mfu|attention)|attention \(half\)|causal \(half\)"):
        causal = True
    if cells.noted(r"non-causal|full attention|without causal|megatron formula"):
        causal = False
    recompute = cells.noted(r"hardware flops|incl\.? recompute|counts? recompute|hfu only") is not None
    tera = cells.number("tflops_per_gpu")  # an MFU never counts it (arXiv:2204.02311), Megatron's TFLOP/s of then do
    recompute = recompute or bool(tera and stack.name == "megatron-2021" and plan.recompute.mode == "blocks")
    if cells.noted(r"no recompute counted|without recompute|and no recompute"):
        recompute = False
    return Flops(causal, recompute, embedding=stack.name in ("nanotron", "megatron-flash"))


def _per_token(spec: ModelSpec, seq_len: int, way: Flops) -> float:
    """Operations per token of a step under a way of counting: three or four forward passes."""
    profile = profile_of(spec)
    forward = profile.forward_flops(seq_len)
    if not way.causal and spec.causal:
        matmuls = profile.forward_flops(0)
        forward = matmuls + 2 * (forward - matmuls)
    if way.embedding:
        forward += 2.0 * spec.vocab_size * spec.dim
    return forward * (4.0 if way.recompute else 3.0)


def _peak(cells: Cells, cluster: Cluster, work: Workload) -> float:
    """The rate that an MFU divides by; torchtitan and torchao divide by that of bf16 whatever runs."""
    dtype = work.compute or "bf16"
    if cells.has(r"torchtitan|torchao") and not cells.noted(r"fp8 peak for float8"):
        dtype = "bf16"
    rates = cluster.device.rates
    return rates.of(dtype) if getattr(rates, dtype, 0.0) else rates.bf16
