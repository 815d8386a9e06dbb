"""Shrunken models of transformers under a plan, against a plain loop over the same model in one process."""

from __future__ import annotations

import functools
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import shardwise as sw
from shardwise.models.hf import hf_config, hf_factory
from shardwise.models.hf_sizes import shrunk_config
from shardwise.parallel.init import init_model
from tests.parity.grid import Trace, spy_on_gradients, whole

VOCAB, SEQ, ROWS, STEPS, SEED, LR, CLIP, GLOBAL_BATCH = 64, 12, 24, 2, 7, 1e-3, 0.5, 8
IGNORED = -100
NUM_LAYERS = 2


def config(family: str, **changes: Any) -> Any:
    made = shrunk_config(hf_config(family), num_layers=NUM_LAYERS)
    made._experts_implementation = "eager"  # the grouped products of torch know no fp64
    for key, value in changes.items():
        setattr(made, key, value)
    return made


class Samples:
    """Rows for one kind of model: tokens, pairs of token sequences, or pictures."""

    def __init__(self, kind: str, pads: bool = False) -> None:
        draw = torch.Generator().manual_seed(11)
        ids = torch.randint(2, VOCAB, (ROWS, SEQ + 1), generator=draw)
        keep = torch.randint(2, SEQ + 1, (ROWS, 1), generator=draw)
        labels = torch.where(torch.arange(SEQ) < keep, ids[:, 1:], IGNORED)
        self.columns = {"input_ids": ids[:, :-1], "labels": labels}
        if pads:
            self.columns["attention_mask"] = (torch.arange(SEQ) < keep).long()
        if kind == "pictures":
            pixels = torch.randn(ROWS, 3, 16, 16, generator=draw, dtype=torch.float64)
            self.columns = {"pixel_values": pixels, "labels": ids[:, 0] % 2}
        elif kind == "pairs":
            self.columns["decoder_input_ids"] = torch.randint(2, VOCAB, (ROWS, SEQ), generator=draw)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {key: column[index] for key, column in self.columns.items()}

    def rows(self, indices: Any) -> dict[str, torch.Tensor]:
        return {key: column[indices] for key, column in self.columns.items()}


def samples(made: Any) -> Samples:
    if made.is_encoder_decoder:
        return Samples("pairs")
    return Samples("pictures" if getattr(made, "image_size", None) else "tokens", pads=getattr(made, "pads", False))


def loss_fn(output: Any, batch: dict[str, torch.Tensor]) -> sw.Loss:
    return sw.token_cross_entropy(output.logits, batch["labels"])


def reference(made: Any) -> Trace:
    """transformers and torch alone, but for the initial weights and the order of the rows."""
    module = init_model(hf_factory(made), seed=SEED, dtype=torch.float64)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR)
    trace, data = Trace(), samples(made)
    with sw.open_mesh(sw.Plan()) as mesh:
        order = sw.loader(data, GLOBAL_BATCH, mesh, seed=SEED)
        for window in (next(order) for _ in range(STEPS)):
            rows = data.rows(window.indices)
            labels = rows.pop("labels")
            logits = module(**rows).logits
            total = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum")
            loss = total / (labels != IGNORED).sum()
            loss.backward()
            trace.norms.append(nn.utils.clip_grad_norm_(module.parameters(), CLIP).item())
            trace.losses.append(loss.item())
            trace.grads.append({n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None})
            optimizer.step()
            optimizer.zero_grad()
    trace.params = {n: p.detach().clone() for n, p in module.named_parameters()}
    return trace


def run_plan(made: Any, plan: sw.Plan, mesh: sw.Mesh) -> Trace:
    trace, data = Trace(), samples(made)
    batch = sw.Batch(global_size=GLOBAL_BATCH, micro_batches=plan.batch.micro_batches)
    placed = sw.apply(hf_factory(made), plan, mesh, seed=SEED)
    optimizer = sw.adamw(placed, lr=LR)
    state = sw.TrainState(placed, optimizer, sw.loader(data, batch, mesh, seed=SEED))
    spy_on_gradients(state, trace)
    for metrics in sw.steps(state, loss_fn, until=STEPS, clip=CLIP):
        trace.losses.append(metrics.loss)
        trace.norms.append(metrics.grad_norm)
    trace.params = {n: whole(p) for n, p in placed.named_parameters().items()}
    return trace


class KeepFp64(TorchFunctionMode):
    """Casts to fp32 that models have in their norms and softmaxes leave fp64 as it is, here and in the reference.

    Rounding to fp32 in the middle makes one unit of fp64 into 1e-7: nothing could be proven to 1e-11.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        first = args[0] if args else None
        if isinstance(first, torch.Tensor) and first.dtype is torch.float64:
            if func is torch.Tensor.float:
                return first
            if func in (torch.Tensor.to, torch.Tensor.type):
                args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def caught(run: Callable[[], Trace]) -> Trace | str:
    """The trace, or what went wrong: the other families of the same workers still run."""
    try:
        with warnings.catch_warnings(), KeepFp64():
            warnings.simplefilter("error")
            return run()
    except Exception:  # reported by the test, family by family
        return traceback.format_exc()


def references(made: dict[str, Any]) -> dict[str, Trace | str]:
    return {name: caught(functools.partial(reference, one)) for name, one in made.items()}


def run_families(text: str, made: dict[str, Any]) -> dict[str, Trace | str]:
    """One mesh for all: DTensor keeps meshes by value, and a second equal one would meet groups that are gone."""
    plan = sw.Plan.parse(text)
    with sw.open_mesh(plan) as mesh:
        return {name: caught(functools.partial(run_plan, one, plan, mesh)) for name, one in made.items()}
