"""The models that the benchmarks train, and their data. Imports no more of torch than a plain script does."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwise.models.gpt import GPT, GPTConfig

Batch = dict[str, torch.Tensor]
CLIP, LR = 1.0, 1e-3


@dataclass(frozen=True)
class Size:
    """A model and how long its blocks of steps are."""

    name: str
    config: GPTConfig
    rows: int
    steps_per_block: int
    rounds: int


SIZES = (
    Size("tiny", GPTConfig(vocab_size=256, dim=32, num_layers=2, num_heads=2, max_seq_len=16), 2, 20, 100),
    Size("small", GPTConfig(vocab_size=256, dim=256, num_layers=4, num_heads=4, max_seq_len=128), 8, 2, 40),
)


def batch_of(size: Size, rank: int) -> Batch:
    """This rank's rows; the same at every step."""
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(size.config.vocab_size, (size.rows, size.config.max_seq_len + 1), generator=generator)
    return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def weights(size: Size) -> GPT:
    """The model that all contestants start from."""
    torch.manual_seed(0)
    return GPT(size.config)
