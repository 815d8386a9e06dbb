"""A script whose number of processes changes: `resizing.py PLAN OUT STEPS`. Its samples say which they are.

Each rank notes which samples its steps saw; the first one notes losses, and leaves the whole state at the end. Steps
take PACE_S more until there is a file `hurry`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.train.data.windows import WindowSpec, divide, shares

VOCAB, SEQ, ROWS, BATCH = 32, 8, 97, 10
"""97 is prime, and 10 is divided by neither 3 nor 4: no window is even, and no epoch ends with one."""


class Rows:
    """Samples with their number."""

    def __init__(self) -> None:
        self.tokens = torch.randint(0, VOCAB, (ROWS, SEQ + 1), generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.tokens[index]
        return {"input_ids": row[:-1], "labels": row[1:], "number": torch.tensor(index)}


class Noisy(torch.nn.Module):
    """A small model whose randomness is keyed by step and place: the same under every plan."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = sw.GPT(sw.GPTConfig(vocab_size=VOCAB, dim=16, num_layers=2, num_heads=2, max_seq_len=SEQ))
        self.drop = torch.nn.Dropout(0.1)
        self.norm = torch.nn.BatchNorm1d(SEQ) if "BATCH_NORM" in os.environ else torch.nn.Identity()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.norm(self.drop(self.gpt(input_ids)))


def real_rows(plan: sw.Plan, mesh: sw.Mesh, seen: list[int]) -> list[int]:
    """Those of the step, of all that the loss has seen: without what was rehearsed before, and what only fills up."""
    piped = mesh.size("pp") > 1
    spec = WindowSpec(
        global_size=BATCH,
        micro_batches=plan.batch.micro_batches,
        rank=mesh.batch.rank,
        ranks=mesh.batch.size,
        equal_rows=piped,
    )
    (layout,) = divide(shares(BATCH, mesh.batch.size), spec)
    padding = sum(chunk.rows for chunk in layout.chunks if chunk.zero) if piped or mesh.batch.size > 1 else 0
    stop = len(seen) - padding
    return seen[max(stop - layout.rows, 0) : max(stop, 0)]  # none but on the last stage of a pipeline


def main(plan_text: str, out: str, until: int) -> None:
    plan, folder, pace_s = sw.Plan.load(plan_text), Path(out), float(os.environ.get("PACE_S", "0"))
    torch.manual_seed(0)
    data = Rows()
    seen: list[int] = []

    def loss_fn(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> sw.Loss:
        seen.extend(batch["number"].tolist())
        return sw.token_cross_entropy(output, batch["labels"])

    with sw.open_mesh(plan, device="cpu", timeout_s=100) as mesh:
        placed = sw.apply(Noisy, plan, mesh, seed=1, sample={"input_ids": data.tokens[:2, :-1]})
        state = sw.TrainState(
            placed,
            sw.adamw(
                placed, lr=1e-2, eps=1e-6
            ),  # of a bias of keys, whose gradient is rounding alone, 1e-8 makes steps
            sw.loader(data, plan.batch, mesh, global_size=BATCH, seed=3),
            schedule=sw.warmup_cosine(3, until),
        )
        store = sw.Store(folder / "checkpoints", keep=2)
        store.load_latest(state)
        with (folder / f"rank-{mesh.rank}").open("a") as log:
            for m in sw.steps(state, loss_fn, until=until, clip=1.0, store=store):
                facts: dict[str, Any] = {"step": m.step, "world": mesh.world, "share": mesh.batch.rank}
                facts["seen"] = real_rows(plan, mesh, seen)
                seen.clear()
                if mesh.is_first:
                    facts |= {"loss": m.loss, "norm": m.grad_norm, "lr": m.lr}
                log.write(json.dumps(facts) + "\n")
                log.flush()
                if not (folder / "hurry").exists():
                    time.sleep(pace_s)
        here = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in sorted(state.tensors().items())}
        stages: list[Any] = [None] * mesh.world
        dist.all_gather_object(stages, here)
        if mesh.is_first:
            torch.save({name: tensor for stage in stages for name, tensor in stage.items()}, folder / "state.pt")
            (folder / "scalars").write_text(json.dumps(state.scalars()["data"]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
