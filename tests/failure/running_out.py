"""A script whose memory is too small for its micro-batches: `running_out.py PLAN OUT STEPS FAULT`.

FAULT is JSON: {"rank": 1, "fits": [[3, 2]], "where": "forward", "error": "python", "killed": 4}. From step 3 on no more
than 2 rows fit into the memory of rank 1: forward, or backward, raises an error of that kind. After step 4 it is
killed, once. What every step was, and the whole state at the end, are left in OUT.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import shardwise as sw

VOCAB, SEQ, ROWS = 32, 8, 97
BATCH = 9
"""Odd, as 97: neither ranks nor micro-batches nor their halves are equal."""
ERRORS = {
    "python": MemoryError("planted"),
    "device": torch.OutOfMemoryError("planted"),
    "cpu": RuntimeError("DefaultCPUAllocator: can't allocate memory"),
}


class Noisy(torch.nn.Module):
    """A small model that draws masks."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = sw.GPT(sw.GPTConfig(vocab_size=VOCAB, dim=16, num_layers=2, num_heads=2, max_seq_len=SEQ))
        self.drop = torch.nn.Dropout(0.1)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.drop(self.gpt(input_ids))


def fill_memory(state: sw.TrainState, fault: dict[str, Any], seen: list[int]) -> None:
    """Plant the fault; `seen` gets the rows of every forward."""

    def look(module: torch.nn.Module, args: Any, keywords: dict[str, torch.Tensor]) -> None:
        rows = len(keywords["input_ids"])
        seen.append(rows)
        fitting = [most for step, most in fault.get("fits", ()) if state.step + 1 >= step]
        if not state.is_joined or state.mesh.rank != fault.get("rank") or not fitting or rows <= fitting[-1]:
            return
        if fault["where"] == "forward":
            raise ERRORS[fault["error"]]
        next(module.parameters()).register_hook(fail)

    def fail(_gradient: torch.Tensor) -> None:
        raise ERRORS[fault["error"]]

    state.placed.parts[0].root.register_forward_pre_hook(look, with_kwargs=True)


def main(plan_text: str, out: str, until: int, fault: dict[str, Any]) -> None:
    plan, folder = sw.Plan.load(plan_text), Path(out)
    tokens = torch.randint(0, VOCAB, (ROWS, SEQ + 1), generator=torch.Generator().manual_seed(5))
    data = [{"input_ids": row[:-1], "labels": row[1:]} for row in tokens]
    with sw.open_mesh(plan, device="cpu", timeout_s=100) as mesh:
        placed = sw.apply(Noisy, plan, mesh, seed=1, sample={"input_ids": tokens[:2, :-1]})
        batches = sw.loader(data, plan.batch, mesh, global_size=BATCH, seed=3)
        state = sw.TrainState(placed, sw.adamw(placed, lr=1e-2), batches, schedule=sw.warmup_cosine(3, until))
        seen: list[int] = []
        fill_memory(state, fault, seen)
        options = sw.StepOptions(clip_norm=1.0, on_oom="halve")
        with (folder / f"rank-{mesh.rank}").open("a") as log:
            for m in sw.steps(state, loss_fn, until=until, options=options):
                facts = {"step": m.step, "loss": m.loss, "norm": m.grad_norm, "rows": seen[:], "events": m.events}
                log.write(json.dumps(facts) + "\n")
                log.flush()
                seen.clear()
                mark = folder / "killed"
                if m.step == fault.get("killed") and mesh.rank == fault["rank"] and not mark.exists():
                    mark.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
        here = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in sorted(state.tensors().items())}
        stages: list[Any] = [None] * mesh.world
        dist.all_gather_object(stages, here)
        if mesh.is_first:
            torch.save({name: tensor for stage in stages for name, tensor in stage.items()}, folder / "state.pt")


def loss_fn(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> sw.Loss:
    return sw.token_cross_entropy(output, batch["labels"])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4]))
