"""A training script that is verified: `python verified.py PLAN [MODEL]`; FAULT in the environment plants a fault.

A fault is planted as a user would write it, or by replacing one name of Shardwise in this process.
"""

from __future__ import annotations

import os
import random
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.parallel import data
from shardwise.parallel.stages.stage import StageModule
from shardwise.train.sums import WorldSums

VOCAB, DIM, SEQ, ROWS, BATCH, LAYERS = 32, 16, 8, 32, 8, 4
FAULT = os.environ.get("FAULT", "")
RULES = {
    "embed": "vocab",
    "blocks.*.norm": "sequence",
    "blocks.*.mlp.up": "column",
    "blocks.*.mlp.down": "row",
    "head": "head",
}


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.up(x))
        return self.down(y / y.shape[-1] * 2 * DIM if FAULT == "sharded-layer" else y)


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm, self.mlp = nn.LayerNorm(DIM), Mlp()
        self.drop = nn.Dropout(0.3) if kind == "clip" else nn.Identity()
        if kind == "positions":
            self.pos = nn.Embedding(SEQ, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "positions":
            x = x + self.pos(torch.arange(x.shape[1]))
        if self.kind == "draws":
            x = x * (1 + 0.1 * random.random())
        if self.kind == "rowmean":
            x = x - x.mean(0)
        if self.kind == "rowgrad":
            x = Normed.apply(x)
        return x + self.drop(self.mlp(self.norm(x)))


class Normed(torch.autograd.Function):
    """Forward as it is; the gradient has the length one, over all rows that are there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad / grad.norm()


class Net(nn.Module):
    def __init__(self, kind: str = "", layers: int = LAYERS) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(layers))
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        if kind == "tied" and FAULT != "untied":
            self.head.weight = self.embed.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, DIM), nn.BatchNorm1d(DIM)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.norm(self.embed(input_ids).transpose(1, 2)).transpose(1, 2)))


class Rows:
    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(11)
        self.ids = torch.randint(0, VOCAB, (ROWS, SEQ + 1), generator=draw)
        keep = torch.randint(1, SEQ + 1, (ROWS, 1), generator=draw)
        self.labels = torch.where(torch.arange(SEQ) < keep, self.ids[:, 1:], -100)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index, :-1], "labels": self.labels[index]}


class PerShard(torch.optim.Optimizer):
    """A step of a fixed length per parameter, or per shard of one where FAULT says so."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                local, whole = (p.grad.to_local(), p.grad) if isinstance(p.grad, DTensor) else (p.grad, p.grad)
                norm = (local if FAULT else whole.full_tensor() if isinstance(whole, DTensor) else whole).norm()
                (p.to_local() if isinstance(p, DTensor) else p).sub_(group["lr"] * local / norm)


def plant() -> None:
    """Faults inside of Shardwise."""
    if FAULT == "unreduced":
        shard = data.fully_shard

        def wrong(module: nn.Module, **options: Any) -> Any:
            forgotten = {p for n, p in module.named_parameters() if n.endswith("norm.weight")}
            return shard(module, **options | {"ignored_params": forgotten})

        data.fully_shard = wrong
    if FAULT == "clipping-per-shard":
        finish = WorldSums.finish
        WorldSums.finish = lambda self, squares: replaced(finish(self, squares), squares)
    if FAULT == "batch-norm":
        data.synchronise_batch_norm = lambda part, group: None
    if FAULT == "stage-boundary":
        right = StageModule.forward

        def skipping(self: StageModule, *received: torch.Tensor, **rest: Any) -> Any:
            if self.cut.stage == 1:
                block = self.root.get_submodule(self.cut.blocks[self.cut.first])
                object.__setattr__(block, "forward", lambda x: x + 0 * sum(p.sum() for p in block.parameters()))
            return right(self, *received, **rest)

        StageModule.forward = skipping  # type: ignore[method-assign]


def replaced(sums: Any, squares: torch.Tensor) -> Any:
    return sums._replace(squares=float(squares))


def loss_for(plan: sw.Plan) -> Any:
    def loss_fn(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> sw.Loss:
        times = {"gradients-divided": 1 / plan.world, "gradients-multiplied": 2.0}.get(FAULT)
        if times and logits.requires_grad:
            logits.register_hook(lambda grad: grad * times)
        loss = sw.token_cross_entropy(logits, batch["labels"])
        factor = {"divided-by-accumulation": 1 / plan.batch.micro_batches, "loss-counted-twice": plan.world}.get(FAULT)
        if FAULT == "mean-of-means":
            return sw.Loss(loss.sum / loss.weight, 1)
        return sw.Loss(loss.sum * factor, loss.weight) if factor else loss

    return loss_fn


def to_the_longest(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch padded to its longest row: another one beside other rows."""
    batch = torch.utils.data.default_collate(samples)
    longest = int((batch["labels"] >= 0).sum(1).max())
    is_own = batch["labels"] >= 0
    ids = torch.where(is_own, batch["input_ids"], 0)
    return {"input_ids": ids[:, :longest], "labels": batch["labels"][:, :longest]}


def windows(plan: sw.Plan, mesh: sw.Mesh, kind: str) -> Any:
    size = BATCH * (plan.world if FAULT == "global-batch" else 1)
    seed = 3 + (mesh.rank if FAULT == "other-data" else 0)
    if FAULT == "same-data":
        mesh = replace(mesh, batch=replace(mesh.batch, rank=0))
    if FAULT == "whole-data":
        mesh = replace(mesh, batch=replace(mesh.batch, rank=0, size=1))
    options = {"collate": to_the_longest} if kind == "clip" else {}
    batch = sw.Batch(global_size=size, micro_batches=plan.batch.micro_batches)
    return sw.loader(Rows(), batch, mesh, seed=seed, **options)


def main(plan: sw.Plan, kind: str) -> None:
    random.seed(0)
    plant()
    if FAULT == "plan-ignored":
        plan = sw.Plan.parse("dp2 / mb2 / fp64")
    with sw.open_mesh(plan) as mesh:
        if FAULT == "hang" and mesh.rank == 1:
            torch.distributed.recv(torch.zeros(1), src=0)

        def factory() -> nn.Module:
            return Conv() if kind == "conv" else Net(kind, LAYERS + (FAULT == "names"))

        seed = 7 + (mesh.rank if FAULT == "initial-weights" else 0)
        rules = dict(RULES, **({"blocks.*.pos": "sequence"} if kind == "positions" else {}))
        placed = sw.apply(factory, plan, mesh, seed=seed, rules=rules if plan.axes.tp > 1 else None)
        lr = 0.1 * (mesh.world if FAULT == "learning-rate" else 1)
        optimizer = PerShard(placed.parameters(), lr) if kind == "per-shard" else sw.sgd(placed, lr=lr, momentum=0.9)
        state = sw.TrainState(placed, optimizer, windows(plan, mesh, kind))
        clip = 0.5 if FAULT == "clipping-per-shard" or kind == "clip" else None
        for m in sw.steps(state, loss_for(plan), until=10, clip=clip):
            print(f"step {m.step} loss {m.loss}")


if __name__ == "__main__":
    main(sw.Plan.load(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")
