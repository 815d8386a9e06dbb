"""The same script with Shardwise up to its first step: what `make bench` starts under `shardwise run`."""

import sys
import time

import torch

import shardwise as sw
from sizes import CLIP, LR, SIZES, batch_of, weights

torch.set_num_threads(1)
plan = sw.Plan.parse(sys.argv[1])
with sw.open_mesh(plan) as mesh:
    size = SIZES[0]
    placed = sw.apply(weights(size), plan, mesh)
    state = sw.TrainState(placed, sw.adamw(placed, lr=LR))
    step = sw.make_step(state, lambda logits, batch: sw.token_cross_entropy(logits, batch["labels"]), clip=CLIP)
    step(batch_of(size, mesh.rank))
    if mesh.is_first:
        print("first step done at", time.time(), flush=True)
