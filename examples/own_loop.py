"""A loop of your own: your module, your batches, your schedule. `make_step` is all that is used of the trainer."""

import sys

import torch
from torch import nn

import shardwise as sw

ROWS, STEPS = 48, 40


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.last = nn.Linear(64, 1)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def global_batch(step):
    """The whole batch of a step, the same on every rank: x (rows, 8), y (rows, 1)."""
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, 8, generator=draw)
    return x, x.norm(dim=1, keepdim=True)


def loss_fn(output, batch):
    return sw.mean_over((output - batch[1]).square())


def main(plan):
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(Net, plan, mesh, seed=5)
        state = sw.TrainState(placed, sw.adamw(placed, lr=3e-3))
        step = sw.make_step(state, loss_fn, clip=1.0)
        for i in range(STEPS):
            batch = tuple(t.tensor_split(mesh.batch.size)[mesh.batch.rank] for t in global_batch(i))
            m = step(batch)
            if mesh.is_first and (i + 1) % 10 == 0:
                print(f"step {m.step}  loss {m.loss:.5f}  gradient norm {m.grad_norm:.4f}")


if __name__ == "__main__":
    main(sw.Plan.load(sys.argv[1]))
