"""What `bench/goodput.py` trains under `shardwise run --recover`: PLAN LOG. A line for each step, until stopped."""

import sys
import time
from pathlib import Path

import torch

import shardwise as sw
from shardwise.models.gpt import GPT, GPTConfig

CONFIG = GPTConfig(vocab_size=256, dim=128, num_layers=4, num_heads=4, max_seq_len=64)
ROWS, GLOBAL_BATCH, MOST_STEPS = 4096, 16, 10**6


class Rows:
    """Random tokens, the same for every process."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(1)
        self.ids = torch.randint(CONFIG.vocab_size, (ROWS, CONFIG.max_seq_len + 1), generator=draw)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index, :-1], "labels": self.ids[index, 1:]}


def main(plan_text: str, log: Path) -> None:
    torch.set_num_threads(1)
    plan = sw.Plan.parse(plan_text)
    with sw.open_mesh(plan, device="cpu") as mesh:
        placed = sw.apply(lambda: GPT(CONFIG), plan, mesh, seed=1)
        batches = sw.loader(Rows(), plan.batch, mesh, global_size=GLOBAL_BATCH)
        state = sw.TrainState(placed, sw.adamw(placed, lr=1e-3), batches)
        for done in sw.steps(state, loss_fn, until=MOST_STEPS):
            if mesh.is_first:
                with log.open("a", encoding="utf-8") as file:
                    file.write(f"{done.step} {time.time()!r} {done.seconds!r}\n")


def loss_fn(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> sw.Loss:
    return sw.token_cross_entropy(output, batch["labels"])


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
