"""Mixtures of experts for parity tests: small models, and one plain-PyTorch process that trains them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.models.moe import MoEConfig, MoEDecoder, MoEOutput
from shardwise.parallel.init import init_model
from shardwise.train.losses import Losses
from tests.parity import grid

FACTORS = {"balance": 0.05, "z": 0.01}


def config(**changes: Any) -> MoEConfig:
    sizes: dict[str, Any] = {
        "vocab_size": grid.VOCAB,
        "dim": 32,
        "num_layers": 2,
        "num_heads": 8,
        "num_kv_heads": 4,
        "ffn_dim": 24,
        "max_seq_len": grid.SEQ,
        "num_experts": 4,
        "experts_per_token": 2,
        "init_std": 0.2,  # routers that have preferences
    }
    return MoEConfig(**sizes | changes)


MODELS: dict[str, Callable[[], nn.Module]] = {
    name: functools.partial(MoEDecoder, config(**changes))
    for name, changes in {
        "softmax": {},
        "bias": {"score": "sigmoid", "bias_rate": 0.05, "num_shared_experts": 1, "route_scale": 1.5},
        "bias-deep": {"score": "sigmoid", "bias_rate": 0.05, "num_layers": 4},
        "capacity": {"capacity_factor": 0.75, "bias_rate": 0.05},
        "top1": {"experts_per_token": 1, "normalise": False, "num_experts": 8},
    }.items()
}


def lonely() -> nn.Module:
    """Biases that send every token to the first two of four experts."""
    model = MoEDecoder(config(score="sigmoid", bias_rate=0.05))
    for layer in model.layers:
        layer.moe.router.bias_steps[:2] = 100
    return model


MODELS["lonely"] = lonely
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


def loss_fn(output: MoEOutput, batch: dict[str, torch.Tensor]) -> dict[str, sw.Loss]:
    return {
        "tokens": sw.token_cross_entropy(output.logits, batch["labels"]),
        "balance": sw.mean_over(output.balance),
        "z": sw.mean_over(output.router_z),
    }


def num_labels(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (batch["labels"] != -100).sum()


def num_tokens(batch: dict[str, torch.Tensor]) -> int:
    return batch["labels"].numel()


LOSSES = Losses(loss_fn, weights={"tokens": num_labels, "balance": num_tokens, "z": num_tokens}, factors=FACTORS)


def counts(module: nn.Module) -> dict[str, torch.Tensor]:
    """Biases in steps, and the load of the last step, the number of dropped choices last."""
    return {n: b.clone() for n, b in module.named_buffers() if n.endswith(("bias_steps", "load"))}


@dataclass
class Result:
    """What two steps did, beside the trace: the mean of each loss, and the counts at the end."""

    trace: grid.Trace
    parts: list[dict[str, float]]
    counts: dict[str, torch.Tensor]


def reference(model: str, precision: str, global_batch: int, dtype: torch.dtype | None = None) -> Result:
    """Plain PyTorch, one process, one forward per step; `dtype`: computed in another one than the precision's."""
    module = init_model(MODELS[model], seed=grid.SEED, dtype=dtype or DTYPES[precision])
    kind = torch.optim.AdamW if precision == "fp64" else functools.partial(torch.optim.SGD, momentum=0.9)
    optimizer = kind(module.parameters(), lr=grid.LR)
    trace, parts, data = grid.Trace(), [], grid.Rows()
    with sw.open_mesh(sw.Plan()) as mesh:
        order = sw.loader(data, global_batch, mesh, seed=grid.SEED)
        for window in (next(order) for _ in range(grid.STEPS)):
            ids, labels = data.ids[window.indices, :-1], data.labels[window.indices]
            output = module(ids)
            total = F.cross_entropy(output.logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
            means = {
                "tokens": total / (labels != -100).sum(),
                "balance": output.balance.mean(),
                "z": output.router_z.mean(),
            }
            loss = sum(FACTORS.get(name, 1.0) * mean for name, mean in means.items())
            loss.backward()
            trace.norms.append(nn.utils.clip_grad_norm_(module.parameters(), grid.CLIP).item())
            trace.losses.append(loss.item())
            parts.append({name: mean.item() for name, mean in means.items()})
            trace.grads.append({n: p.grad.clone() for n, p in module.named_parameters()})
            optimizer.step()
            optimizer.zero_grad()
            for inner in module.modules():
                if hasattr(inner, "after_step"):
                    inner.after_step()
    trace.params = {n: p.detach().clone() for n, p in module.named_parameters()}
    return Result(trace, parts, counts(module))


def run_plan(text: str, model: str, global_batch: int) -> Result:
    """The same under a plan, on this rank of the world."""
    plan = sw.Plan.parse(text)
    trace, parts = grid.Trace(), []
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(MODELS[model], plan, mesh, seed=grid.SEED)
        optimizer = sw.adamw(placed, lr=grid.LR) if plan.precision == "fp64" else sw.sgd(placed, grid.LR, momentum=0.9)
        batches = sw.loader(grid.Rows(), grid.batch(plan, global_batch), mesh, seed=grid.SEED)
        state = sw.TrainState(placed, optimizer, batches)
        grid.spy_on_gradients(state, trace)
        for metrics in sw.steps(state, LOSSES, until=grid.STEPS, clip=grid.CLIP):
            trace.losses.append(metrics.loss)
            trace.norms.append(metrics.grad_norm)
            parts.append(dict(metrics.losses))
        trace.params = {n: grid.whole(p) for n, p in placed.named_parameters().items()}
        held = {n: b for part in placed.parts for n, b in counts(part.root).items()}
    return Result(trace, parts, held)
