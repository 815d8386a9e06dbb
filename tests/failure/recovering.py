"""A script that is killed while it trains: `recovering.py PLAN OUT STEPS`. It leaves what every step and the end were.

It draws from every generator that a script may use, between steps and in its samples, and saves checkpoints.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.models.moe import MoEConfig, MoEDecoder, MoEOutput

VOCAB, SEQ, ROWS = 32, 8, 512
FOR_EVER = 10**6


class Rows:
    """Samples with an augmentation that is drawn from Python's generator."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(5)
        self.tokens = torch.randint(0, VOCAB, (ROWS, SEQ + 1), generator=draw)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (self.tokens[index] + random.randrange(VOCAB)) % VOCAB
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}


def model() -> torch.nn.Module:
    return sw.GPT(sw.GPTConfig(vocab_size=VOCAB, dim=16, num_layers=4, num_heads=4, max_seq_len=SEQ))


def experts() -> torch.nn.Module:
    """With a bias per expert, which steps move without a gradient."""
    return MoEDecoder(
        MoEConfig(
            vocab_size=VOCAB, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=16, max_seq_len=SEQ,
            num_experts=4, score="sigmoid", bias_rate=0.05,
        )
    )  # fmt: skip


def loss_fn(output: torch.Tensor | MoEOutput, batch: dict[str, torch.Tensor]) -> sw.Loss:
    logits = output.logits if isinstance(output, MoEOutput) else output
    return sw.token_cross_entropy(logits, batch["labels"])


def digest(state: sw.TrainState) -> str:
    """Of every bit of this rank's state."""
    found = hashlib.sha256(repr(sorted(state.scalars().items())).encode())
    for name, tensor in sorted(state.tensors().items()):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        found.update(name.encode())
        found.update(bytes(local.detach().contiguous().reshape(-1).view(torch.uint8).numpy()))
    found.update(repr((random.random(), np.random.rand(), torch.rand(1).item())).encode())
    return found.hexdigest()


def main(plan_text: str, out: str, until: int) -> None:
    plan, folder, pace_s = sw.Plan.parse(plan_text), Path(out), float(os.environ.get("PACE_S", "0"))
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    data = Rows()
    with sw.open_mesh(plan, device="cpu", timeout_s=100) as mesh:
        sample = {"input_ids": data.tokens[:2, :-1]}
        placed = sw.apply(experts if plan.axes.ep > 1 else model, plan, mesh, seed=1, sample=sample)
        batches = sw.loader(data, plan.batch, mesh, global_size=8)
        state = sw.TrainState(placed, sw.adamw(placed, lr=1e-2), batches, schedule=sw.warmup_cosine(3, 100))
        if state.loss_scale is not None:
            state.loss_scale.scale, state.loss_scale.period = 2.0**12, 2  # soon too high: steps are skipped
        store = sw.Store(folder / "checkpoints", keep=2)
        store.load_latest(state)
        try:
            for m in sw.steps(state, loss_fn, until=until, clip=1.0):
                drawn = (random.random(), float(np.random.rand()), float(torch.rand(1)))
                if mesh.is_first:
                    with (folder / "log").open("a") as log:
                        log.write(f"{m.step} {m.loss!r} {m.grad_norm!r} {drawn}\n")
                if m.step % 5 == 0:
                    store.save(state)
                time.sleep(pace_s)
        finally:  # asked to end, all ranks stop after the same step
            (folder / f"digest-{mesh.rank}").write_text(digest(state))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
