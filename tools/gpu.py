"""`make gpu`: what only a GPU can show. Parity and precisions on the device, then speed and memory beside plain torch.

One process: `make gpu`. Several GPUs of one machine: `torchrun --nproc-per-node N tools/gpu.py`.
`--device cpu --size tiny` runs the same code without a GPU, to test the script itself; its speed means nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import shardwise as sw
from shardwise.launch.environment import read_environment
from shardwise.models.decoder import Decoder, DecoderConfig, flops_per_token

Batch = dict[str, torch.Tensor]
Step = Callable[[Batch], float]
TINY = DecoderConfig(vocab_size=256, dim=64, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=128, max_seq_len=32)
LARGE = DecoderConfig(
    vocab_size=32_000, dim=1024, num_layers=24, num_heads=16, num_kv_heads=8, ffn_dim=2816, max_seq_len=2048
)
# Dense bf16 peaks in flop/s, from the vendors' data sheets (without sparsity); a name that is not here gives no MFU.
PEAK_BF16 = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12, "B200": 2250e12}
LR, CLIP = 3e-4, 1.0


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


def speed(setting: Setting, world: int) -> list[str]:
    """bf16 on this rank's rows: time, tokens/s, MFU and peak memory, one after the other in this process."""
    plan = plan_for("bf16", world)
    lines = []
    with sw.open_mesh(plan, device=setting.device) as mesh:
        own, _ = batches(setting, mesh.rank, mesh.world)
        step, placed = shardwise_step(setting.config, mesh, plan)
        counted = sum(parameter.numel() for parameter in placed.parameters())
        results = {f"Shardwise {plan}": measure(step, own, setting)}
        if world == 1:  # several plain replicas would need a wrapper and compare two libraries' sharding instead
            del step, placed
            plain = plain_step(Decoder(setting.config).to(setting.device), "bf16", setting.device)
            results["plain torch, autocast bf16"] = measure(plain, own, setting)
    peak = peak_flops(setting.device)
    for name, (seconds, peak_bytes) in results.items():
        rate = setting.tokens / seconds
        mfu = f", MFU {rate * flops_per_token(setting.config, setting.config.max_seq_len) / peak:.1%}" if peak else ""
        lines.append(
            f"{name}: {counted / 1e6:.0f} M parameters, {seconds * 1e3:.1f} ms/step, "
            f"{rate:,.0f} tokens/s per device{mfu}, peak {peak_bytes / 2**30:.2f} GiB"
        )
    return lines


def peak_flops(device: str) -> float | None:
    """The device's bf16 peak, when it is in the table."""
    name = torch.cuda.get_device_name() if device == "cuda" else ""
    return next((peak for key, peak in PEAK_BF16.items() if key in name), None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--size", choices=("tiny", "large"), default="large", help="of the model whose speed is measured"
    )
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"make gpu: needs a CUDA device; torch {torch.__version__} sees none here. Nothing was checked.")
        return 1
    world = read_environment(os.environ).world
    parity = Setting(options.device, TINY, rows=4, steps=0)
    timed = Setting(options.device, TINY if options.size == "tiny" else LARGE, rows=8, steps=20)
    with sw.open_mesh(plan_for("fp32", world), device=options.device) as mesh:  # the process group of all checks
        # bf16 and fp16: autocast keeps some operations in fp32 that fully_shard's policy runs in the half type.
        tolerances = {"fp64": 1e-11, "fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-2}
        if options.device == "cpu":
            del tolerances["fp16"]  # the plain loop's scaler is made for accelerators
        lines = [check_parity(parity, precision, tolerance, world) for precision, tolerance in tolerances.items()]
        lines += speed(timed, world)
        if mesh.is_first:
            print("\n".join(lines))
    return 1 if any(line.startswith("FAIL") for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
