"""Small models of the shapes that a pipeline meets, and the function that runs one of them on this rank's stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint

from shardwise.parallel.blocks import own_blocks, recompute_blocks
from shardwise.parallel.mesh import Mesh, open_mesh
from shardwise.parallel.pipeline import cut_pipeline
from shardwise.parallel.placed import Part, Placed
from shardwise.plan.plan import Axes, Batch, Plan, Recompute, Schedule

DIM, VOCAB, SEQ = 8, 11, 5


class Block(nn.Module):
    """Attention-like: reads a mask and positions from outside of the chain.

    Awkward: writes to its input in place, and returns a view that is not contiguous.
    """

    kind = "full"

    def __init__(self, awkward: bool = False) -> None:
        super().__init__()
        self.awkward = awkward
        self.shift = nn.Parameter(torch.randn(DIM))
        self.norm = nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, *, angle: torch.Tensor) -> torch.Tensor:
        if self.awkward:  # fully_shard does not allow it, with or without a pipeline
            x += self.shift
        else:
            x = x + self.shift
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(q + angle, k + angle, v, attn_mask=mask))
        return x.transpose(0, 1).contiguous().transpose(0, 1) if self.awkward else x


class Tower(nn.Module):
    """Embedding, blocks with extra inputs made by the root's forward, norm, head."""

    def __init__(self, depth: int = 4, awkward: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block(awkward) for _ in range(depth))
        self.register_buffer("table", torch.linspace(0, 1, 64)[:, None] * torch.ones(DIM), persistent=False)
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, input_ids: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        x = self.embed(input_ids)
        angle = self.table[torch.arange(input_ids.shape[1], device=input_ids.device)].to(x.dtype)
        for layer in self.layers:
            assert layer.kind == "full"
            x = layer(x, None if mask is None else mask[:, None, :].to(x.dtype), angle=angle)
        return self.head(self.norm(x))


class RepeatedBlock(Block):
    """Computes itself again in its backward pass."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, *, angle: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(super().forward, x, mask, angle=angle, use_reentrant=False)
        return result


class RepeatedTower(Tower):
    """Of such blocks."""

    def __init__(self) -> None:
        super().__init__(0)
        self.layers = nn.ModuleList(RepeatedBlock() for _ in range(8))


class PairBlock(Block):
    """Takes and returns a pair and a dict, one of them no tensor of this block's making."""

    def forward(self, hidden: torch.Tensor, memory: torch.Tensor) -> Any:  # type: ignore[override]
        out = super().forward(hidden * 1.0, angle=memory)
        return {"hidden": out, "extra": None, "weights": out.detach().sum()}, memory + out.mean()


class PairTower(nn.Module):
    """Tuples and dicts between blocks; the output is a dict; the first parameter is registered last."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({f"step{i}": PairBlock() for i in range(depth)})
        self.head = nn.Linear(DIM, VOCAB)
        self.embed = nn.Embedding(VOCAB, DIM)

    def forward(self, input_ids: torch.Tensor) -> Any:
        hidden = self.embed(input_ids)
        memory = torch.zeros_like(hidden)
        for layer in self.layers.values():
            out, memory = layer(hidden=hidden, memory=memory)
            hidden = out["hidden"]
        return {"logits": self.head(hidden), "memory": (memory.mean(),)}


class TwiceBlock(nn.Module):
    """One weight in two layers of two biases, one of them after the other; what it returns second has no input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(DIM)), nn.Parameter(torch.randn(DIM))
        self.weight, self.shift = nn.Parameter(torch.randn(DIM, DIM) / 4), nn.Parameter(torch.randn(DIM))

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.tanh(F.linear(x + shift, self.weight, self.first))
        return x + F.linear(y, self.weight, self.second), torch.sin(self.shift)


class TwiceTower(nn.Module):
    """Layers that use their weights twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.ModuleList(TwiceBlock() for _ in range(8))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        shift = x.new_zeros(DIM)
        for layer in self.layers:
            x, shift = layer(x, shift)
        return self.head(x)


class EncoderTower(nn.Module):
    """Torch's own encoder, whose forward looks at a module within its first layer."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(DIM, 2, 2 * DIM, dropout=0.0, batch_first=True)
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embed(input_ids)))


class AsideBlock(nn.Module):
    """Adds a number of its own to a sum, as a router adds its loss, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: torch.Tensor, aside: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.inner(x, angle=x.new_zeros(()))
        return x, aside + (x.square().mean(-1) if aside.is_floating_point() else 1)


class AsideTower(nn.Module):
    """A sum goes through all stages, and no loss has it: nobody gives it a gradient. Or a whole number does."""

    def __init__(self, whole: bool = False) -> None:
        super().__init__()
        self.whole = whole
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.ModuleList(AsideBlock() for _ in range(8))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        aside = torch.zeros(x.shape[:-1], dtype=torch.int64 if self.whole else x.dtype, device=x.device)
        for layer in self.layers:
            x, aside = layer(x, aside)
        return self.head(x * (aside[..., None] if self.whole else 1))


class Pyramid(nn.Module):
    """A stem with running statistics and blocks of changing shapes, as a Sequential of a convolutional net."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.BatchNorm1d(3)
        widths = (3, 4, 6, 5, 2)
        self.body = nn.Sequential(*(Stretch(a, b) for a, b in zip(widths, widths[1:], strict=False)))
        self.last = nn.BatchNorm1d(2)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = F.one_hot(input_ids % 3, 3).to(self.stem.weight.dtype).transpose(1, 2)
        return self.last(self.body(self.stem(x))).transpose(1, 2).repeat(1, 1, VOCAB)[..., :VOCAB]


class Stretch(nn.Conv1d):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(a, b, 3, padding=1)
        self.norm = nn.BatchNorm1d(b)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(super().forward(x)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tower": Tower,
    "tower8": lambda: Tower(8),
    "tower8-repeated": RepeatedTower,
    "tower-awkward": lambda: Tower(4, awkward=True),
    "pair": PairTower,
    "twice": TwiceTower,
    "aside": AsideTower,
    "counted": lambda: AsideTower(whole=True),
    "pyramid": Pyramid,
    "encoder": EncoderTower,
}


def build(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[name]().to(dtype)


def batches(num: int, *, mask: bool = False, rows: int = 2, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(num):
        ids = torch.randint(VOCAB, (rows, SEQ), generator=generator)
        batch = {"input_ids": ids, "labels": ids.roll(-1, 1)}
        if mask:
            batch["mask"] = torch.randn(rows, SEQ, generator=generator, dtype=torch.float64)
        made.append(batch)
    return made


def loss_fn(output: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits, more = (output["logits"], output["memory"][0]) if isinstance(output, dict) else (output, 0.0)
    loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum") / 100 + more
    return loss.expand(2)[0]  # a view, as losses may be


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run: which model under which pipeline."""

    kind: str = "1f1b"
    pp: int = 2
    stages: int | None = None
    micro_batches: int = 4
    model: str = "tower"
    dtype: torch.dtype = torch.float64
    mask: bool = False
    sample: bool = True
    boundaries: tuple[str, ...] = ()
    dp: int = 1
    reshard: bool = False
    steps: int = 1
    recompute: bool = False

    @property
    def plan(self) -> Plan:
        schedule = Schedule(kind=self.kind, stages_per_rank=self.stages, boundaries=self.boundaries)  # type: ignore[arg-type]
        return Plan(
            axes=Axes(pp=self.pp, dp_shard=self.dp),
            schedule=schedule,
            batch=Batch(micro_batches=self.micro_batches),
            precision="fp64" if self.dtype == torch.float64 else "fp32",
            recompute=Recompute(mode="blocks" if self.recompute else "none"),
        )

    @property
    def world(self) -> int:
        return self.pp * self.dp

    def batches(self, data_rank: int = 0) -> list[dict[str, torch.Tensor]]:
        return batches(self.micro_batches, mask=self.mask, seed=data_rank)


@dataclass(frozen=True)
class Numbers:
    """Losses per micro-batch, and gradients and buffers by name."""

    losses: list[float]
    grads: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    eval_losses: list[float]


def one_process(case: Case) -> Numbers:
    """The reference: the same micro-batches in a loop (all data ranks' for gradients, the first one's losses)."""
    model = build(case.model, case.dtype)
    losses = []
    for _ in range(case.steps):
        for rank in range(case.dp):
            for batch in case.batches(rank):
                loss = loss_fn(model(**{k: v for k, v in batch.items() if k != "labels"}), batch)
                loss.backward()
                losses += [loss.item()] if rank == 0 else []
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    model.eval()
    with torch.no_grad():
        evaluation = [
            loss_fn(model(**{k: v for k, v in batch.items() if k != "labels"}), batch).item()
            for batch in batches(3, mask=case.mask, rows=3)
        ]
    return Numbers(losses, grads, buffers, evaluation)


def place(case: Case, mesh: Mesh) -> Placed:
    root = build(case.model, case.dtype)
    placed = Placed(
        parts=(Part(root=root, run=root),), plan=case.plan, mesh=mesh, sample=case.batches()[0] if case.sample else None
    )
    placed = recompute_blocks(cut_pipeline(placed, case.plan, mesh), case.plan, mesh)
    if case.dp > 1:
        data_mesh = mesh.device_mesh["dp_shard"]
        for part in placed.parts:
            for _, block in [(n, b) for n, b in own_blocks(placed) if b in set(part.root.modules())]:
                fully_shard(block, mesh=data_mesh, reshard_after_forward=case.reshard)
            fully_shard(part.run, mesh=data_mesh, reshard_after_forward=False)
            for module in part.run.modules():
                if isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(1.0)
                    module.set_force_sum_reduction_for_comms(True)
    return placed


def on_stages(case: Case) -> Numbers:
    """What this rank's stages give: run by every process of a world."""
    with open_mesh(case.plan) as mesh:
        placed = place(case, mesh)
        assert placed.pipeline is not None
        losses = []
        for _ in range(case.steps):
            losses += placed.pipeline.run(case.batches(mesh.batch.rank), loss_fn, backward=True)
        grads = {}
        for name, parameter in placed.named_parameters().items():
            if parameter.grad is not None:
                grad: Any = parameter.grad
                grads[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        buffers = {name: b.clone() for name, b in placed.named_buffers().items()}
        placed.train(False)
        evaluation = placed.pipeline.run(batches(3, mask=case.mask, rows=3), loss_fn, backward=False)
        return Numbers([x.item() for x in losses], grads, buffers, [x.item() for x in evaluation])


def difference(case: Case, ranks: list[Numbers], reference: Numbers) -> float:
    """The largest difference of losses, evaluation losses, gradients (relative to the largest) and buffers."""
    worst = 0.0
    seen: set[str] = set()
    last = [r for r in ranks if r.losses]
    assert len(last) == case.dp, "exactly one pp rank returns losses"
    for numbers in last[:1]:
        for a, b in ((numbers.losses, reference.losses), (numbers.eval_losses, reference.eval_losses)):
            assert len(a) == len(b)
            worst = max([worst, *(abs(x - y) for x, y in zip(a, b, strict=True))])
    scale = max(float(g.abs().max()) for g in reference.grads.values())
    for numbers in ranks:
        for name, grad in numbers.grads.items():
            seen.add(name)
            worst = max(worst, float((grad - reference.grads[name]).abs().max()) / scale)
        for name, buffer in numbers.buffers.items():
            worst = max(worst, float((buffer - reference.buffers[name]).abs().max()))
    missing = set(reference.grads) - seen
    return float("inf") if missing else worst
