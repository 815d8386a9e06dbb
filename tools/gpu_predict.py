"""Of `make gpu`: what the planner says of a step, from a probe of this device, beside what the step takes."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

import shardwise as sw
from shardwise.errors import ShardwiseError
from shardwise.hardware.bench import Measured, measure
from shardwise.hardware.cluster import Cluster
from shardwise.model.profile import profile_of
from shardwise.model.spec import ModelSpec
from shardwise.models.presets import build
from shardwise.plan.memory import estimate_memory
from shardwise.plan.stack import Stack, stack_on
from shardwise.plan.timing import estimate_time
from shardwise.plan.workload import Workload
from shardwise.records import as_dict

GIB = 2**30


@dataclass(frozen=True)
class Case:
    """A step that is predicted and run."""

    model: str
    seq: int
    rows: int
    plan: str
    layers: int = 0
    """Of the preset's; 0: all."""

    @property
    def spec(self) -> ModelSpec:
        """Its sizes."""
        spec = sw.preset(self.model)
        return replace(spec, num_layers=self.layers) if self.layers else spec


CASES = (
    Case("gpt2-medium", 1024, 8, "bf16"),
    Case("gpt2-medium", 1024, 8, "bf16 / compile"),
    Case("gpt2-medium", 1024, 8, "fp32"),
    Case("gpt2-medium", 1024, 8, "bf16-pure"),
    Case("gpt2-medium", 1024, 8, "bf16 / recompute=ops"),
    Case("smollm-360m", 2048, 2, "bf16"),
    Case("qwen-0.5b", 4096, 4, "bf16 / compile"),
    Case("llama-1b", 2048, 4, "bf16"),
    Case("llama-1b", 2048, 4, "bf16 / recompute=blocks"),
    Case("llama-1b", 2048, 4, "bf16 / recompute=ops"),
    Case("llama-1b", 2048, 8, "bf16 / mb2"),
    Case("llama-1b", 2048, 4, "bf16 / compile"),
    Case("llama-1b", 8192, 2, "bf16 / compile / recompute=blocks"),
    Case("llama-1b", 2048, 4, "bf16 / compile / recompute=ops"),
    Case("llama-1b", 2048, 4, "bf16-pure / compile"),
    Case("llama-1b", 2048, 2, "tf32"),
    Case("llama-1b", 2048, 4, "bf16 / fp8=rowwise / compile"),
    Case("llama-3b", 4096, 1, "bf16 / compile / recompute=blocks"),
    Case("llama-8b", 2048, 2, "bf16", layers=6),
    Case("olmoe-7b", 2048, 4, "bf16", layers=3),
)
FEW = (Case("tiny", 64, 4, "fp32"),)
WARM, TIMED = 3, 8


@dataclass(frozen=True)
class Seen:
    """What a step did: seconds; bytes allocated, reserved, and used on the device."""

    seconds: float
    allocated: float
    reserved: float
    device: float


def probed(*, few: bool) -> Measured:
    """This device, as `shardwise probe` finds it."""
    return measure(lambda function, *args: [function(*args)], seconds=2.0 if few else 20.0)


def predict(found: Measured, device: str, *, few: bool, out: Path | None = None) -> Iterator[str]:
    """A line per case, then those of all; every number in a JSON file, if one is given."""
    records: list[dict[str, Any]] = []
    for case in FEW if few else CASES:
        try:
            seen = run(case, device)
        except ShardwiseError as error:
            yield f"none {case}: {error}"
            continue
        records.append({"case": asdict(case), "seen": asdict(seen), "told": asdict(told(case, found.cluster, device))})
        yield line(records[-1])
        if out:
            whole = {"launch": found.launch, "cluster": as_dict(found.cluster), "cases": records}
            out.write_text(json.dumps(whole, indent=1), encoding="utf-8")
    yield from summary(records)


def told(case: Case, cluster: Cluster, device: str, stack: Stack | None = None) -> Seen:
    """The planner's numbers."""
    plan = plan_of(case)
    workload = Workload(seq_len=case.seq, global_batch=case.rows)
    profile, stack = profile_of(case.spec), stack or stack_on(device)
    memory = estimate_memory(profile, plan, workload, stack=stack, device=cluster.device)
    total = estimate_time(profile, cluster, plan, workload, stack=stack).total
    return Seen(total, memory.allocated, memory.reserved, memory.device)


def plan_of(case: Case) -> sw.Plan:
    """Its plan, with the batch."""
    plan = sw.Plan.parse(case.plan)
    return plan.with_(batch=replace(plan.batch, global_size=case.rows))


def run(case: Case, device: str) -> Seen:
    """Some steps for warmth, which compile what is compiled, then the timed ones."""
    plan, cuda = plan_of(case), device == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    with sw.open_mesh(plan, device=device) as mesh:
        placed = sw.apply(build(case.spec), plan, mesh, seed=0)
        step = sw.make_step(sw.TrainState(placed, sw.adamw(placed, lr=1e-4)), loss_fn, clip=1.0)
        shape, draw = (case.rows, case.seq + 1), torch.Generator().manual_seed(0)
        ids = torch.randint(case.spec.vocab_size, shape, generator=draw).to(mesh.device)
        batch = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
        for _ in range(WARM):
            step(batch)
        if cuda:
            torch.cuda.empty_cache()  # what compiling took
            torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(TIMED):
            start = time.perf_counter()
            step(batch)  # returns the loss as a number: the device is done
            times.append(time.perf_counter() - start)
        if not cuda:
            return Seen(median(times), 0.0, 0.0, 0.0)
        free, total = torch.cuda.mem_get_info()
        seen = Seen(
            median(times), torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), float(total - free)
        )
    del placed, step, ids, batch
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    return seen


def loss_fn(output: Any, batch: dict[str, torch.Tensor]) -> sw.Loss:
    """Sum over tokens, and their number."""
    return sw.token_cross_entropy(getattr(output, "logits", output), batch["labels"])


def line(record: dict[str, Any]) -> str:
    """Measured, predicted and the errors of one case."""
    case, seen, told_ = Case(**record["case"]), record["seen"], record["told"]
    shown = [f"{seen['seconds'] * 1e3:.0f} ms ({told_['seconds'] / seen['seconds'] - 1:+.0%})"]
    for name in ("allocated", "reserved", "device"):
        if seen[name]:
            shown.append(f"{name} {seen[name] / GIB:.1f} GiB ({told_[name] / seen[name] - 1:+.0%})")
    layers = f" of {case.layers} layers" if case.layers else ""
    return f"     {case.model}{layers}, {case.rows} x {case.seq}, {case.plan}: {', '.join(shown)}"


def summary(records: Sequence[dict[str, Any]]) -> list[str]:
    """Median and largest error of each number."""
    lines = []
    for name in ("seconds", "allocated", "reserved", "device"):
        pairs = [(r["told"][name], r["seen"][name]) for r in records if r["seen"][name]]
        errors = [abs(ours / theirs - 1) for ours, theirs in pairs]
        if errors:
            lines.append(f"     {name}: median error {median(errors):.1%}, largest {max(errors):.1%}")
    return lines
