"""Of `make gpu`: plans of several ranks on the devices that are there, which they share: against one process.

In fp64 by `shardwise verify`, and in bf16, where the device's own attention kernels run, by the losses of five steps.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import nn

import shardwise as sw
from gpu_modules import Bottleneck
from gpu_predict import loss_fn
from shardwise.cli.options.subjects import subject_for
from shardwise.diagnose.verify import Options, Verifier
from shardwise.launch.environment import BACKEND, HOST
from shardwise.launch.forked import World
from shardwise.models.decoder import Decoder, DecoderConfig
from shardwise.models.moe import MoEConfig, MoEDecoder

EXACT = {
    "llama-8b": (
        "dp2", "fsdp2 / zero1", "fsdp2 / zero2 / mb2", "dp2 fsdp2", "tp2 / seq / loss-parallel", "cp2",
        "cp2 / context=ulysses", "pp2 / 1f1b mb4", "pp2 / zero-bubble-v mb4", "pp2 / dualpipe-v mb4",
        "fsdp2 / recompute=blocks", "fsdp2 / offload=state", "fsdp2 / offload=activations", "fsdp2 cp2",
        "dp2 / compile", "pp2 fsdp2 tp2 / seq / 1f1b mb4",
    ),
    "mixtral-8x7b": ("fsdp2 ep2", "tp2 ep2 / seq", "pp2 fsdp2 ep2 / 1f1b mb2"),
    "hf:qwen2": ("fsdp2 tp2 / seq", "cp2", "pp2 / 1f1b mb2"),
}  # fmt: skip
LOW = ("dp2", "fsdp2", "tp2 / seq", "cp2", "cp2 / context=ulysses", "pp2 / 1f1b mb2", "fsdp2 / recompute=ops")
LOW_EXPERTS = ("fsdp2 ep2", "tp2 ep2 / seq")
NORMS = {"dp2 / fp64": 1e-11, "fsdp2 / fp64": 1e-11, "dp2 / bf16": 5e-3, "fsdp2 / bf16": 5e-3}
"""Plans over batch norms, whose statistics are those of all rows, and what is allowed of a loss."""
SIZES = {
    **{"vocab_size": 512, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2},
    **{"dim": 256, "ffn_dim": 512, "max_seq_len": 256},
}
TINY = SIZES | {"dim": 64, "ffn_dim": 128, "max_seq_len": 32}
"""A processor without bf16 multiplies it forty times slower than fp32."""
ALLOWED = 5e-3
"""Of a loss in bf16: other orders of sums round to other numbers of eight bits."""


def check_ranks(device: str, *, few: bool) -> Iterator[str]:
    """A line per plan. To be called before this process has touched the device: it forks the ranks."""
    world = World(2 if few else 8)
    try:
        for subject, texts in {}.items() if few else EXACT.items():
            yield from _exact(subject, texts, device, world)
        sizes = TINY if few else SIZES
        yield from _low("decoder", LOW[:1] if few else LOW, device, world, sizes)
        yield from _low("experts", () if few else LOW_EXPERTS, device, world, sizes)
        yield from () if few else _norms(device, world)
    finally:
        world.close()


def _exact(name: str, texts: tuple[str, ...], device: str, world: World) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="shardwise-gpu-") as folder:
        kept = sw.Plan.parse("pp2 tp2 ep2" if "mixtral" in name else "pp2 fsdp2 tp2")  # what a shrunk model divides
        subject = subject_for(name, kept, (), small=True, device=device)
        verifier = Verifier(subject, world, Path(folder), Options(device=device, timeout_s=120))
        for text in texts:
            report = verifier.verify(sw.Plan.parse(text))
            word = {"proven": "ok  ", "refused": "none"}.get(report.verdict, "FAIL")
            worst = max(report.rows, key=lambda row: row.largest / row.tolerance, default=None)
            said = f"{worst.kind} {worst.largest:.1e}, allowed {worst.tolerance:.1e}" if worst else ""
            said = said or "; ".join(finding.what for finding in report.findings)
            yield f"{word} {name} under {report.plan}: {said}"


def _low(kind: str, texts: tuple[str, ...], device: str, world: World, sizes: dict[str, int]) -> Iterator[str]:
    truth = world(1, losses, kind, "dp1 / bf16", device, sizes)[0]
    for text in texts:
        plan = sw.Plan.parse(f"{text} / bf16")
        shared = {BACKEND: HOST} if device != "cpu" else {}
        found = world(plan.world, losses, kind, str(plan), device, sizes, timeout_s=120, **shared)[0]
        worst = max(abs(ours - theirs) / theirs for ours, theirs in zip(found, truth, strict=True))
        word = "ok  " if worst <= ALLOWED and found[-1] < found[0] else "FAIL"
        yield f"{word} {kind} under {plan}: loss {worst:.1e} from one process, allowed {ALLOWED:.0e}"


def _norms(device: str, world: World) -> Iterator[str]:
    for text, allowed in NORMS.items():
        shared = {BACKEND: HOST} if device != "cpu" else {}
        plain = world(1, of_pictures, text.split(" / ")[1], device)[0]
        found = world(2, of_pictures, text, device, timeout_s=120, **shared)[0]
        worst = max(abs(ours - theirs) / theirs for ours, theirs in zip(found, plain, strict=True))
        word = "ok  " if worst <= allowed and found[-1] < found[0] else "FAIL"
        yield f"{word} batch norms under {text}: loss {worst:.1e} from one process, allowed {allowed:.0e}"


def of_pictures(text: str, device: str) -> list[float]:
    """In a rank: losses of five steps of a small residual network on the same 32 pictures."""
    torch.use_deterministic_algorithms(True)
    plan = sw.Plan.parse(text)
    with sw.open_mesh(plan, device=device) as mesh:
        placed = sw.apply(small_resnet, plan, mesh, seed=0)
        step = sw.make_step(sw.TrainState(placed, sw.adamw(placed, lr=1e-3)), loss_fn, clip=1.0)
        draw = torch.Generator().manual_seed(0)
        pictures, labels = torch.randn(32, 3, 64, 64, generator=draw), torch.randint(10, (32,), generator=draw)
        own = [rows.to(mesh.device).chunk(mesh.batch.size)[mesh.batch.rank] for rows in (pictures, labels)]
        return [step({"input": own[0], "labels": own[1]}).loss for _ in range(5)]


def small_resnet() -> nn.Module:
    """Four residual blocks with batch norms."""
    blocks = (Bottleneck(64, 16, 1), Bottleneck(64, 16, 1), Bottleneck(64, 32, 2), Bottleneck(128, 32, 1))
    return nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def losses(kind: str, text: str, device: str, sizes: dict[str, int]) -> list[float]:
    """In a rank: those of five steps on the same eight rows."""
    plan = sw.Plan.parse(text)
    dense = partial(Decoder, DecoderConfig(**sizes))
    experts = partial(MoEDecoder, MoEConfig(num_experts=4, experts_per_token=2, **sizes))
    with sw.open_mesh(plan, device=device) as mesh:
        placed = sw.apply(experts if kind == "experts" else dense, plan, mesh, seed=0)
        step = sw.make_step(sw.TrainState(placed, sw.adamw(placed, lr=1e-3)), loss_fn, clip=1.0)
        shape = (8, sizes["max_seq_len"] + 1)
        ids = torch.randint(512, shape, generator=torch.Generator().manual_seed(0)).to(mesh.device)
        own = ids.chunk(mesh.batch.size)[mesh.batch.rank]
        batch = {"input_ids": own[:, :-1].contiguous(), "labels": own[:, 1:].contiguous()}
        return [step(batch).loss for _ in range(5)]
