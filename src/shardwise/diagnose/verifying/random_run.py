"""A training script for models given by their sizes: random weights, random tokens, nothing to download.

`python -m` this module, `PLAN SIZES.toml`: what `shardwise verify llama-8b` runs on every process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.model.spec import load_spec
from shardwise.models.presets import build
from shardwise.parallel.compose import apply
from shardwise.parallel.mesh import open_mesh
from shardwise.plan.plan import Batch, Plan
from shardwise.train.batches import loader
from shardwise.train.loop import steps
from shardwise.train.loss import Loss, mean_over, token_cross_entropy
from shardwise.train.optimizers import adamw
from shardwise.train.state import TrainState

GLOBAL_BATCH, SEQ, ROWS, IGNORED = 16, 16, 64, -100
RATE, CLIP = 1e-2, 0.5


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a model reads."""

    vocab_size: int
    kind: str = "tokens"
    """`tokens`, `pairs` of token sequences, or `pictures`."""
    image_size: int = 0
    channels: int = 3


class Rows:
    """Random samples with ragged masks: a mean of means would show."""

    def __init__(self, shape: Shape) -> None:
        draw = torch.Generator().manual_seed(11)
        ids = torch.randint(2, shape.vocab_size, (ROWS, SEQ + 1), generator=draw)
        keep = torch.randint(2, SEQ + 1, (ROWS, 1), generator=draw)
        labels = torch.where(torch.arange(SEQ) < keep, ids[:, 1:], IGNORED)
        self.columns = {"input_ids": ids[:, :-1], "labels": labels}
        if shape.kind == "pictures":
            pixels = torch.randn(ROWS, shape.channels, shape.image_size, shape.image_size, generator=draw)
            self.columns = {"pixel_values": pixels, "labels": ids[:, 0] % 2}
        elif shape.kind == "pairs":
            self.columns["decoder_input_ids"] = torch.randint(2, shape.vocab_size, (ROWS, SEQ), generator=draw)

    def __len__(self) -> int:
        """Samples."""
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """One sample."""
        return {key: column[index] for key, column in self.columns.items()}


def loss_fn(output: Any, batch: Mapping[str, torch.Tensor]) -> Loss:
    """Cross-entropy of tokens, or of classes."""
    logits = getattr(output, "logits", output)
    if batch["labels"].dim() > 1:
        return token_cross_entropy(logits, batch["labels"])
    return mean_over(nn.functional.cross_entropy(logits, batch["labels"], reduction="none"))


def train(factory: Callable[[], nn.Module], shape: Shape, plan: Plan) -> None:
    """Train on random samples until the witness ends it."""
    rows = Rows(shape)
    with open_mesh(plan) as mesh:
        share = max(1, GLOBAL_BATCH // plan.axes.data // plan.batch.micro_batches)
        sample = {key: column[:share] for key, column in rows.columns.items()}
        placed = apply(factory, plan, mesh, seed=7, sample=sample)
        batch = Batch(global_size=plan.batch.global_size or GLOBAL_BATCH, micro_batches=plan.batch.micro_batches)
        state = TrainState(placed, adamw(placed, lr=RATE), loader(rows, batch, mesh, seed=3))
        for _ in steps(state, loss_fn, until=100, clip=CLIP):
            pass


def main(argv: list[str]) -> None:
    """`PLAN SIZES.toml`."""
    spec = load_spec(argv[1])
    train(build(spec), Shape(vocab_size=spec.vocab_size), Plan.load(argv[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
