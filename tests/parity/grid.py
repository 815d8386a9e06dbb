"""One plan against plain PyTorch in one process: what is run, what is gathered, and how it is compared.

The reference uses nothing of Shardwise's training code: a module on one device, the whole global batch in one
forward, a loss that is a sum divided by its weight, `clip_grad_norm_` and a torch optimizer: AdamW in fp64, SGD
with momentum in fp32. (AdamW divides by the root of the squared gradient: where that is near zero it turns rounding
into whole steps, and one process in fp32 is then 1e-5 away from itself in fp64.)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import shardwise as sw
from shardwise.models.decoder import Decoder, DecoderConfig
from shardwise.models.gpt import GPT, GPTConfig
from shardwise.parallel.init import init_model

VOCAB, SEQ, ROWS, STEPS, SEED, LR, CLIP = 64, 16, 40, 2, 7, 1e-2, 0.5
EPS = 1e-7
"""Of AdamW. The bias of a key has no gradient but rounding, as softmax takes it away: 1e-17 over 1e-8 is a step."""


def decoder(num_layers: int, num_heads: int = 4, num_kv_heads: int = 2) -> Callable[[], nn.Module]:
    sizes = DecoderConfig(
        vocab_size=VOCAB,
        dim=32,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        ffn_dim=64,
        max_seq_len=SEQ,
    )
    return functools.partial(Decoder, sizes)


MODELS = {
    "decoder": decoder(4),
    "decoder-flat": decoder(2),
    "decoder-deep": decoder(8),
    "decoder-tp4": decoder(2, num_heads=8, num_kv_heads=4),
    "gpt": functools.partial(GPT, GPTConfig(vocab_size=VOCAB, dim=32, num_layers=4, num_heads=4, max_seq_len=SEQ)),
}
SAMPLES: dict[str, dict[str, torch.Tensor]] = {}
"""Models whose pipelines are cut by a traced forward."""
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class Rows:
    """Token rows with ragged masks: some rows keep two labels, others all of them."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(11)
        self.ids = torch.randint(0, VOCAB, (ROWS, SEQ + 1), generator=draw)
        keep = torch.randint(2, SEQ + 1, (ROWS, 1), generator=draw)
        self.labels = torch.where(torch.arange(SEQ) < keep, self.ids[:, 1:], -100)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index, :-1], "labels": self.labels[index]}


@dataclass
class Trace:
    """What two steps did: one loss and norm per step, every clipped gradient, every parameter at the end."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    grads: list[dict[str, torch.Tensor]] = field(default_factory=list)
    params: dict[str, torch.Tensor] = field(default_factory=dict)


def loss_fn(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> sw.Loss:
    return sw.token_cross_entropy(logits, batch["labels"])


def reference(model: str, precision: str, global_batch: int) -> Trace:
    """Plain PyTorch, one process, one forward per step."""
    module = init_model(MODELS[model], seed=SEED, dtype=DTYPES[precision])
    adamw = functools.partial(torch.optim.AdamW, eps=EPS)
    kind = adamw if precision == "fp64" else functools.partial(torch.optim.SGD, momentum=0.9)
    optimizer = kind(module.parameters(), lr=LR)
    trace, data = Trace(), Rows()
    with sw.open_mesh(sw.Plan()) as mesh:
        order = sw.loader(data, global_batch, mesh, seed=SEED)
        for window in (next(order) for _ in range(STEPS)):
            ids, labels = data.ids[window.indices, :-1], data.labels[window.indices]
            logits = module(ids)
            total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
            loss = total / (labels != -100).sum()
            loss.backward()
            trace.norms.append(nn.utils.clip_grad_norm_(module.parameters(), CLIP).item())
            trace.losses.append(loss.item())
            trace.grads.append({n: p.grad.clone() for n, p in module.named_parameters()})
            optimizer.step()
            optimizer.zero_grad()
    trace.params = {n: p.detach().clone() for n, p in module.named_parameters()}
    return trace


def run_plan(text: str, model: str, global_batch: int) -> Trace:
    """The same under a plan, on this rank of the world; what this rank holds, gathered to whole tensors."""
    plan = sw.Plan.parse(text)
    trace = Trace()
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(MODELS[model], plan, mesh, seed=SEED, sample=SAMPLES.get(model))
        is_fp64 = plan.precision == "fp64"
        optimizer = sw.adamw(placed, lr=LR, eps=EPS) if is_fp64 else sw.sgd(placed, lr=LR, momentum=0.9)
        state = sw.TrainState(placed, optimizer, sw.loader(Rows(), batch(plan, global_batch), mesh, seed=SEED))
        spy_on_gradients(state, trace)
        for metrics in sw.steps(state, loss_fn, until=STEPS, clip=CLIP):
            trace.losses.append(metrics.loss)
            trace.norms.append(metrics.grad_norm)
        trace.params = {n: whole(p) for n, p in placed.named_parameters().items()}
    return trace


def batch(plan: sw.Plan, global_batch: int) -> sw.Batch:
    return sw.Batch(global_size=global_batch, micro_batches=plan.batch.micro_batches)


def spy_on_gradients(state: sw.TrainState, trace: Trace) -> None:
    """Keep what the optimizer is given."""
    take, parameters = state.optimizer.take_grads, state.placed.named_parameters()

    def spy(grads: dict[str, torch.Tensor]) -> None:
        trace.grads.append({n: whole(g, parameters[n]) for n, g in grads.items()})
        take(grads)

    state.optimizer.take_grads = spy


def whole(tensor: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """The full tensor; a local gradient is laid out as its parameter `like`."""
    if isinstance(like, DTensor) and not isinstance(tensor, DTensor):
        tensor = DTensor.from_local(
            tensor, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def merged(ranks: list[Trace]) -> Trace:
    """One trace out of all ranks': pipeline stages hold different names; copies must be equal bit by bit."""
    first = Trace(losses=ranks[0].losses, norms=ranks[0].norms, grads=[{} for _ in ranks[0].grads])
    for trace in ranks:
        assert trace.losses == first.losses and trace.norms == first.norms, "ranks disagree about loss or norm"
        for mine, theirs in zip([*first.grads, first.params], [*trace.grads, trace.params], strict=True):
            for name, tensor in theirs.items():
                assert name not in mine or torch.equal(mine[name], tensor), f"ranks disagree about {name}"
                mine[name] = tensor
    return first


@functools.cache
def alone(world: Any, function: Callable[..., Any], *args: Any) -> Any:
    """What one process computes, once for all who compare themselves with it; not to be changed."""
    return world(1, function, *args)[0]


def differences(ranks: list[Trace], truth: Trace) -> dict[str, float]:
    """Largest relative difference of loss, norm, gradients and parameters; raises where names differ.

    A tensor's difference is the L2 norm of the error over that of the tensor. Gradients that are zero in exact
    arithmetic (the bias of keys) are noise over noise: their error is taken relative to a thousandth of the
    whole gradient's share.
    """
    trace = merged(ranks)
    worst = {
        "loss": max(abs(a - b) / abs(b) for a, b in zip(trace.losses, truth.losses, strict=True)),
        "norm": max(abs(a - b) / abs(b) for a, b in zip(trace.norms, truth.norms, strict=True)),
        "grad": 0.0,
        "param": 0.0,
    }
    for kind, mine, theirs in [
        *(("grad", a, b) for a, b in zip(trace.grads, truth.grads, strict=True)),
        ("param", trace.params, truth.params),
    ]:
        assert mine.keys() == theirs.keys(), f"names differ: {sorted(mine.keys() ^ theirs.keys())[:5]}"
        total = math.sqrt(sum(float(t.double().square().sum()) for t in theirs.values()))
        for name, tensor in theirs.items():
            error = float((mine[name].double() - tensor.double()).norm())
            scale = max(float(tensor.double().norm()), 1e-3 * total / math.sqrt(len(theirs)))
            worst[kind] = max(worst[kind], error / scale)
    return worst
