"""`make gpu`: what only a GPU can show, in sections (`--only parity,speed`).

ranks: plans of several ranks that share the devices which are there, against one process. parity: precisions against
plain torch. speed: time and memory beside plain torch. predict: the planner's numbers beside those of real steps.
modules: the same of a user's modules, and beside plain torch. state: checkpoints and running out of memory. runs:
`shardwise train` killed and resumed, bit for bit.

One process: `make gpu`. Several GPUs of one machine: `torchrun --nproc-per-node N tools/gpu.py --only parity,speed`.
`--device cpu --size tiny` runs the same code without a GPU, to test the script itself; its speed means nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import shardwise as sw
from gpu_modules import check_modules
from gpu_predict import predict, probed
from gpu_ranks import check_ranks
from gpu_runs import check_runs
from gpu_state import check_state
from shardwise.launch.environment import read_environment
from shardwise.models.decoder import Decoder, DecoderConfig, flops_per_token

Batch = dict[str, torch.Tensor]
Step = Callable[[Batch], float]
TINY = DecoderConfig(vocab_size=256, dim=64, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=128, max_seq_len=32)
LARGE = DecoderConfig(
    vocab_size=32_000, dim=1024, num_layers=24, num_heads=16, num_kv_heads=8, ffn_dim=2816, max_seq_len=2048
)
SAVED = replace(LARGE, num_layers=6)
# Dense bf16 peaks in flop/s, from the vendors' data sheets (without sparsity); a name that is not here gives no MFU.
PEAK_BF16 = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12, "B200": 2250e12}
LR, CLIP = 3e-4, 1.0
SECTIONS = ("ranks", "parity", "speed", "predict", "modules", "state", "runs")


@dataclass(frozen=True)
class Setting:
    """What the checks run on."""

    device: str
    config: DecoderConfig
    rows: int
    steps: int

    @property
    def tokens(self) -> int:
        """Tokens of this rank per step."""
        return self.rows * self.config.max_seq_len


def batches(setting: Setting, rank: int, world: int) -> tuple[Batch, Batch]:
    """(this rank's rows, the rows of all ranks), the same at every step."""
    generator = torch.Generator().manual_seed(0)
    shape = (setting.rows * world, setting.config.max_seq_len + 1)
    ids = torch.randint(setting.config.vocab_size, shape, generator=generator).to(setting.device)
    whole = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    own = {name: rows.chunk(world)[rank] for name, rows in whole.items()}
    return own, whole


def shardwise_step(config: DecoderConfig, mesh: sw.Mesh, plan: sw.Plan) -> tuple[Step, sw.Placed]:
    """Shardwise's step on a model whose initial weights depend on nothing but the seed."""
    placed = sw.apply(lambda: Decoder(config), plan, mesh, seed=0)
    state = sw.TrainState(placed, sw.adamw(placed, lr=LR, weight_decay=0.0))
    step = sw.make_step(state, lambda logits, batch: sw.token_cross_entropy(logits, batch["labels"]), clip=CLIP)
    return (lambda batch: step(batch).loss), placed


def plain_step(model: nn.Module, precision: str, device: str) -> Step:
    """The loop that a torch user writes: autocast for bf16, with a scaler for fp16."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    scaler = torch.amp.GradScaler(device, enabled=precision == "fp16")

    def step(batch: Batch) -> float:
        with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
            logits = model(batch["input_ids"])
        wide = logits if logits.element_size() > 2 else logits.float()
        loss = cross_entropy(wide.flatten(0, 1), batch["labels"].flatten())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.item()

    return step


def same_weights(config: DecoderConfig, placed: sw.Placed, device: str) -> nn.Module:
    """A plain model with the placed model's weights: collective when they are sharded."""
    model = Decoder(config).to(device)
    if all(parameter.dtype == torch.float64 for parameter in placed.parameters()):
        model.double()
    with torch.no_grad():
        for name, parameter in placed.named_parameters().items():
            whole = parameter.full_tensor() if isinstance(parameter, torch.distributed.tensor.DTensor) else parameter
            model.get_parameter(name).copy_(whole)
    return model


def plan_for(precision: str, world: int) -> sw.Plan:
    """All processes as shards."""
    return sw.Plan.parse(f"fsdp{world} / {precision}" if world > 1 else precision)


def check_parity(setting: Setting, precision: str, tolerance: float, world: int) -> str:
    """Losses of five steps against plain torch on the whole batch; the finding as a line."""
    plan = plan_for(precision, world)
    with sw.open_mesh(plan, device=setting.device) as mesh:
        own, whole = batches(setting, mesh.rank, mesh.world)
        step, placed = shardwise_step(setting.config, mesh, plan)
        plain = plain_step(same_weights(setting.config, placed, setting.device), precision, setting.device)
        pairs = [(step(own), plain(whole)) for _ in range(5)]
    worst = max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)
    met = worst <= tolerance and pairs[-1][0] < pairs[0][0]
    word = "ok  " if met else "FAIL"
    return f"{word} {plan}: largest relative difference of loss {worst:.2e}, allowed {tolerance:.0e}"


def measure(step: Step, batch: Batch, setting: Setting) -> tuple[float, int]:
    """(median seconds per step, peak bytes of the device)."""
    cuda = setting.device == "cuda"
    for _ in range(3):
        step(batch)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(setting.steps):
        start = time.perf_counter()
        step(batch)  # returns the loss as a number: the device is done
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2], torch.cuda.max_memory_allocated() if cuda else 0


def speed(setting: Setting, world: int) -> Iterator[str]:
    """This rank's rows as they are and compiled, each beside plain torch in this process; float8 alone."""
    for text in ("bf16", "bf16 / compile", "bf16 / fp8=rowwise / compile") if setting.device == "cuda" else ("bf16",):
        plan = sw.Plan.parse(f"fsdp{world} / {text}" if world > 1 else text)
        with sw.open_mesh(plan, device=setting.device) as mesh:
            own, _ = batches(setting, mesh.rank, mesh.world)
            step, placed = shardwise_step(setting.config, mesh, plan)
            yield result(f"Shardwise {plan}", *measure(step, own, setting), setting)
            del step, placed
        if world == 1 and "fp8" not in text:  # several plain replicas would compare two libraries' sharding instead
            model = Decoder(setting.config).to(setting.device)
            for block in model.layers if plan.compile else ():
                block.compile()
            found = measure(plain_step(model, "bf16", setting.device), own, setting)
            yield result(f"plain torch, autocast bf16{', blocks compiled' * plan.compile}", *found, setting)
            del model


def result(name: str, seconds: float, peak_bytes: int, setting: Setting) -> str:
    """One line of `speed`."""
    peak, rate = peak_flops(setting.device), setting.tokens / seconds
    mfu = f", MFU {rate * flops_per_token(setting.config, setting.config.max_seq_len) / peak:.1%}" if peak else ""
    shown = f"{seconds * 1e3:.1f} ms/step, {rate:,.0f} tokens/s per device{mfu}"
    return f"     {name}: {shown}, peak {peak_bytes / 2**30:.2f} GiB"


def peak_flops(device: str) -> float | None:
    """The device's bf16 peak, when it is in the table."""
    name = torch.cuda.get_device_name() if device == "cuda" else ""
    return next((peak for key, peak in PEAK_BF16.items() if key in name), None)


def main() -> int:
    options = read_options()
    if options.device == "cuda" and not any(Path("/dev").glob("nvidia[0-9]*")):
        print(f"make gpu: needs a CUDA device; torch {torch.__version__} sees none here. Nothing was checked.")
        return 1
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs for a fixed order of sums
    world, few = read_environment(os.environ).world, options.size == "tiny"
    lines: list[str] = []

    def say(section: Iterable[str]) -> None:
        for line in section:
            lines.append(line)
            if int(os.environ.get("RANK", 0)) == 0:
                print(line, flush=True)

    if "ranks" in options.only and world == 1:
        say(check_ranks(options.device, few=few))
    parity = Setting(options.device, TINY, rows=4, steps=0)
    timed = Setting(options.device, TINY if few else LARGE, rows=8, steps=20)
    with sw.open_mesh(plan_for("fp32", world), device=options.device):  # the process group of all checks
        if "parity" in options.only:
            # bf16 and fp16: autocast keeps some operations in fp32 that fully_shard's policy runs in the half type.
            tolerances = {"fp64": 1e-11, "fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-2}
            if options.device == "cpu":
                del tolerances["fp16"]  # the plain loop's scaler is made for accelerators
            say(check_parity(parity, precision, tolerance, world) for precision, tolerance in tolerances.items())
        if "speed" in options.only:
            say(speed(timed, world))
        found = probed(few=few) if {"predict", "modules"} & set(options.only) and world == 1 else None
        if "predict" in options.only and found:
            say(predict(found, options.device, few=few, out=options.out))
        if "state" in options.only and world == 1:
            say(check_state(options.device, TINY if few else SAVED))
    if "modules" in options.only and found:  # whose forward is read under a process group of its own
        say(check_modules(options.device, found.cluster, few=few))
    if "runs" in options.only and world == 1:
        say(check_runs(options.device, few=few))
    return 1 if any(line.startswith("FAIL") for line in lines) else 0


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", choices=("tiny", "large"), default="large", help="of the models that are timed")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(SECTIONS), help=", ".join(SECTIONS))
    parser.add_argument("--out", type=Path, help="a JSON file for the numbers of predict")
    options = parser.parse_args()
    unknown = set(options.only) - set(SECTIONS)
    if unknown:
        parser.error(f"--only: no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
