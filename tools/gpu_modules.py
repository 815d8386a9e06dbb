"""Of `make gpu`: modules as users write them: a step beside plain torch's, and beside what the planner says of it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, relu

import shardwise as sw
from gpu_predict import GIB
from shardwise.cli.estimate import as_asked
from shardwise.cli.options.planning import question
from shardwise.errors import ShardwiseError
from shardwise.hardware.cluster import Cluster
from shardwise.plan.memory import estimate_memory
from shardwise.plan.stack import Stack, stack_on
from shardwise.plan.timing import estimate_time

TIMED = 8
ALLOWED = {"fp32": 1e-4, "bf16": 2e-2}
"""Of the first two losses, before and behind an update: later ones show what Adam makes of the sign of a gradient that
is all but zero, where kernels add in no fixed order. Autocast rounds elsewhere."""


class Bottleneck(nn.Module):
    """A residual block of three convolutions, as in He et al., arXiv:1512.03385."""

    def __init__(self, wide: int, narrow: int, stride: int) -> None:
        super().__init__()
        self.one, self.norm1 = nn.Conv2d(wide, narrow, 1, bias=False), nn.BatchNorm2d(narrow)
        self.two, self.norm2 = nn.Conv2d(narrow, narrow, 3, stride, 1, bias=False), nn.BatchNorm2d(narrow)
        self.three, self.norm3 = nn.Conv2d(narrow, 4 * narrow, 1, bias=False), nn.BatchNorm2d(4 * narrow)
        self.short = nn.Sequential()
        if stride > 1 or wide != 4 * narrow:
            self.short = nn.Sequential(nn.Conv2d(wide, 4 * narrow, 1, stride, bias=False), nn.BatchNorm2d(4 * narrow))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, ...) to its output."""
        y = relu(self.norm1(self.one(x)))
        y = relu(self.norm2(self.two(y)))
        return relu(self.norm3(self.three(y)) + self.short(x))


class ResNet50(nn.Module):
    """Pictures of 224 x 224, a thousand classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        blocks, wide = [], 64
        for narrow, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
            for place in range(count):
                blocks.append(Bottleneck(wide, narrow, 2 if place == 0 and narrow > 64 else 1))
                wide = 4 * narrow
        self.layers, self.head = nn.ModuleList(blocks), nn.Linear(wide, 1000)
        self.example_input_array = torch.zeros(2, 3, 224, 224)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, ...) to its output."""
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean((2, 3)))


class Vision(nn.Module):
    """ViT (Dosovitskiy et al., arXiv:2010.11929) of torch's own layers."""

    def __init__(self, dim: int, depth: int, heads: int) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, dim, 16, 16), nn.Linear(dim, 1000)
        self.places = nn.Parameter(torch.zeros(196, dim))
        sizes: dict[str, Any] = {"batch_first": True, "norm_first": True, "dropout": 0.0, "activation": "gelu"}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(dim, heads, 4 * dim, **sizes) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.example_input_array = torch.zeros(2, 3, 224, 224)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, ...) to its output."""
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))


class Recurrent(nn.Module):
    """Three layers of an LSTM over 256 vectors, and a class for each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.LSTM(1024, 1024, 3, batch_first=True), nn.Linear(1024, 1000)
        self.example_input_array = torch.zeros(2, 256, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, ...) to its output."""
        return self.head(self.layers(x)[0])


class Translator(nn.Module):
    """`nn.Transformer` over two texts of 512 words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32_000, 768), nn.Linear(768, 32_000)
        self.core = nn.Transformer(768, 12, 8, 8, 3072, dropout=0.0, batch_first=True)
        self.example_input_array = torch.zeros(2, 512, dtype=torch.long)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, ...) to its output."""
        return self.head(self.core(self.embed(x), self.embed(x)))


class Halves(nn.Module):
    """Two convolutions with group norms and a shortcut: a level of a U-Net."""

    def __init__(self, takes: int, gives: int) -> None:
        super().__init__()
        self.norm1, self.one = nn.GroupNorm(32, takes), nn.Conv2d(takes, gives, 3, padding=1)
        self.norm2, self.two = nn.GroupNorm(32, gives), nn.Conv2d(gives, gives, 3, padding=1)
        self.short = nn.Conv2d(takes, gives, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, ...) to its output."""
        y = self.one(nn.functional.silu(self.norm1(x)))
        return self.short(x) + self.two(nn.functional.silu(self.norm2(y)))


class UNet(nn.Module):
    """A picture of 64 x 64 from another, over levels of 192 to 768 channels (Ronneberger et al., arXiv:1505.04597)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 192, 3, padding=1), nn.Conv2d(192, 3, 3, padding=1)
        self.down = nn.ModuleList([Halves(192, 192), Halves(192, 384), Halves(384, 768)])
        self.up = nn.ModuleList([Halves(768 + 768, 384), Halves(384 + 384, 192), Halves(192 + 192, 192)])
        self.example_input_array = torch.zeros(2, 3, 64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, ...) to its output."""
        kept: list[torch.Tensor] = []
        x = self.stem(x)
        for layer in self.down:
            kept.append(layer(x))
            x = nn.functional.avg_pool2d(kept[-1], 2)
        for layer in self.up:
            x = layer(torch.cat([nn.functional.interpolate(x, scale_factor=2), kept.pop()], 1))
        return self.head(x)


resnet50, lstm, transformer, unet = ResNet50, Recurrent, Translator, UNet
vit_b, vit_l, vit_small = partial(Vision, 768, 12, 12), partial(Vision, 1024, 24, 16), partial(Vision, 64, 2, 2)
"""Factories by name, as `shardwise plan gpu_modules:vit_b` takes them."""


@dataclass(frozen=True)
class Case:
    """A module that is run, beside plain torch where the plan is one that torch has a word for."""

    module: str
    rows: int
    plan: str


CASES = (
    Case("resnet50", 64, "fp32"),
    Case("resnet50", 64, "bf16"),
    Case("resnet50", 64, "bf16 / recompute=blocks"),
    Case("vit_b", 64, "bf16"),
    Case("vit_b", 64, "bf16 / compile"),
    Case("vit_b", 64, "bf16 / recompute=blocks"),
    Case("vit_l", 32, "bf16"),
    Case("lstm", 32, "bf16"),
    Case("transformer", 16, "bf16"),
    Case("unet", 32, "bf16"),
    Case("unet", 16, "fp32"),
)
FEW = (Case("vit_small", 2, "fp32"),)


def check_modules(device: str, cluster: Cluster, *, few: bool) -> Iterator[str]:
    """A line per case."""
    stack = stack_on(device)
    for case in FEW if few else CASES:
        try:
            yield _line(case, device, cluster, stack)
        except ShardwiseError as error:
            yield f"none {case}: {error}"


def _line(case: Case, device: str, cluster: Cluster, stack: Stack) -> str:
    plan, factory = sw.Plan.parse(case.plan), globals()[case.module]
    batch = _batch(factory, case.rows, device)
    with sw.open_mesh(plan, device=device) as mesh:
        placed = sw.apply(factory, plan, mesh, seed=0)
        start = {name: tensor.detach().clone() for name, tensor in placed.module.state_dict().items()}
        step = sw.make_step(sw.TrainState(placed, sw.adamw(placed, lr=1e-4, weight_decay=0.0)), _loss)
        losses, seconds, peak = _measured(lambda step=step: step(batch).loss, device)
        del step, placed
    _clear(device)
    told = f"{seconds * 1e3:.0f} ms, {peak / GIB:.2f} GiB"
    dtype = case.plan.split(" ")[0]
    word = "     "
    if "recompute" not in case.plan:
        module = factory().to(device)
        module.load_state_dict({name.replace("_orig_mod.", ""): tensor for name, tensor in start.items()})
        for block in module.layers if plan.compile else ():
            block.compile()
        theirs, plain_seconds, plain_peak = _measured(_plain(module, batch, dtype, device), device)
        apart = [abs(one - other) / abs(other) for one, other in zip(losses, theirs, strict=True)]
        word = "ok   " if max(apart[:2]) <= ALLOWED[dtype] else "FAIL "
        told += f" (plain torch {plain_seconds * 1e3:.0f} ms, {plain_peak / GIB:.2f} GiB; losses {max(apart[:2]):.0e}"
        told += f" apart, and {apart[-1]:.0e} in the end)"
        del module
        _clear(device)
    foretold, size = _told(case, plan, cluster, stack)
    return (
        f"{word}{case.module}, {case.rows} rows, {case.plan}: {told}; predicted {foretold * 1e3:.0f} ms "
        f"({foretold / seconds - 1:+.0%}), {size / GIB:.2f} GiB" + (f" ({size / peak - 1:+.0%})" if peak else "")
    )


def _told(case: Case, plan: sw.Plan, cluster: Cluster, stack: Stack) -> tuple[float, float]:
    """Seconds, and bytes that are allocated."""
    asked = question(f"gpu_modules:{case.module}", cluster, seq=None, batch=case.rows, tokens=None)
    plan = as_asked(plan.with_(batch=replace(plan.batch, global_size=case.rows)), asked)
    memory = estimate_memory(asked.profile, plan, asked.workload, stack=stack, device=cluster.device)
    seconds = estimate_time(asked.profile, cluster, plan, asked.workload, stack=stack).total
    return seconds, memory.allocated


def _batch(factory: Callable[[], nn.Module], rows: int, device: str) -> dict[str, torch.Tensor]:
    """Inputs as the example's, and targets as the output's; the same at every step."""
    with torch.device("meta"):
        module = factory()
        example = torch.zeros_like(module.example_input_array, device="meta")
        output = module(example)
    draw = torch.Generator().manual_seed(0)
    shape = (rows, *example.shape[1:])
    inputs = torch.randn(shape, generator=draw) if example.is_floating_point() else torch.randint(32_000, shape)
    picture = output.dim() == 4
    labels = torch.randn((rows, *output.shape[1:]), generator=draw) if picture else None
    if labels is None:
        labels = torch.randint(output.shape[-1], (rows, *output.shape[1:-1]), generator=draw)
    return {"x": inputs.to(device), "labels": labels.to(device)}


def _loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> sw.Loss:
    labels = batch["labels"]
    if labels.is_floating_point():
        return sw.Loss(mse_loss(output.float(), labels, reduction="sum"), labels.numel())
    return sw.token_cross_entropy(output, labels)


def _plain(module: nn.Module, batch: dict[str, torch.Tensor], dtype: str, device: str) -> Callable[[], float]:
    """The loop that a torch user writes."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, weight_decay=0.0, fused=True)

    def step() -> float:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=dtype == "bf16"):
            output = module(batch["x"])
        labels = batch["labels"]
        if labels.is_floating_point():
            loss = mse_loss(output.float(), labels)
        else:
            loss = cross_entropy(output.float().flatten(0, -2), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), torch.inf)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def _measured(step: Callable[[], float], device: str) -> tuple[list[float], float, float]:
    """(losses of the first five steps, median seconds, peak bytes)."""
    losses = [step() for _ in range(5)]
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(TIMED):
        start = perf_counter()
        step()  # the loss as a number: the device is done
        times.append(perf_counter() - start)
    return losses, median(times), float(torch.cuda.max_memory_allocated()) if device == "cuda" else 0.0


def _clear(device: str) -> None:
    torch._dynamo.reset()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
