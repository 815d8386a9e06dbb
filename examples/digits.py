"""A convolutional network with batch norm on scikit-learn's digits; batches are tuples (x, y)."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn

import shardwise as sw


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def digits():
    x, y = load_digits(return_X_y=True)
    x = torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    rows = list(zip(x, torch.tensor(y), strict=True))
    return rows[:1500], rows[1500:]


def loss_fn(logits, batch):
    return sw.mean_over(nn.functional.cross_entropy(logits, batch[1], reduction="none"))


def is_right(logits, batch):
    return sw.mean_over((logits.argmax(1) == batch[1]).float())


def main(plan):
    train, held_out = digits()
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(cnn, plan, mesh, seed=3)
        data = sw.loader(train, plan.batch, mesh, global_size=100, seed=3, epochs=3)
        state = sw.TrainState(placed, sw.sgd(placed, lr=0.1, momentum=0.9), data)
        *_, m = sw.steps(state, loss_fn, until=data.num_steps)
        right = sw.evaluate(placed, is_right, data.evaluation(held_out))
        if mesh.is_first:
            print(f"{m.step} steps  loss {m.loss:.4f}  right {right.sum:.0f} of {right.weight:.0f}")


if __name__ == "__main__":
    main(sw.Plan.load(sys.argv[1]))
