"""The loops that are timed against each other: Shardwise's step, and the same training in plain torch.

All of them live in the same two processes. Same model, weights, batches, optimizer and clipping; what differs is who
wrote the loop.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import shardwise as sw
from sizes import CLIP, LR, Batch, Size, weights

Step = Callable[[Batch], float]


def plain(model: nn.Module, parameters: list[nn.Parameter]) -> Step:
    """The loop that a torch user writes."""
    optimizer = torch.optim.AdamW(parameters, lr=LR, fused=True)

    def step(batch: Batch) -> float:
        logits = model(batch["input_ids"])
        loss = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def torch_ddp(size: Size) -> Step:
    """Plain DDP."""
    model = DistributedDataParallel(weights(size), gradient_as_bucket_view=True)
    return plain(model, list(model.parameters()))


def torch_fsdp2(size: Size) -> Step:
    """Plain FSDP2: each block a group, then the rest."""
    model = weights(size)
    for block in model.h:
        fully_shard(block)
    fully_shard(model)
    return plain(model, list(model.parameters()))


def loss_fn(logits: torch.Tensor, batch: Batch) -> sw.Loss:
    """Sum over tokens, and their number."""
    return sw.token_cross_entropy(logits, batch["labels"])


def shardwise(size: Size, mesh: sw.Mesh, plan: sw.Plan) -> Step:
    """The same through `apply` and `make_step`."""
    placed = sw.apply(copy.deepcopy(weights(size)), plan, mesh)
    state = sw.TrainState(placed, sw.adamw(placed, lr=LR, weight_decay=1e-2))
    step = sw.make_step(state, loss_fn, clip=CLIP)
    return lambda batch: step(batch).loss
