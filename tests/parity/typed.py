"""Plain PyTorch and torchao in one process for plans with float8 layers or precision rules: the same rounding.

bf16 and float8 round, so the reference rounds at the same places: it keeps fp32 weights, computes with a copy of them
in the plan's types, and runs as many parts of the batch one after another as the plan has data ranks x micro-batches.
Gradients of the parts are added in fp32, and divided by the weight of all of them at the end.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

import shardwise as sw
from shardwise.models.decoder import Decoder, DecoderConfig
from shardwise.models.gpt import GPT, GPTConfig
from shardwise.models.moe import MoEConfig, MoEDecoder
from shardwise.parallel.init import init_model
from shardwise.parallel.layers.float8 import type_of, types_of_modules
from tests.parity import grid

RECIPES = {"tensorwise": "tensorwise", "rowwise": "rowwise", "rowwise-hp": "rowwise_with_gw_hp"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BATCH = 16
SIZES: dict[str, Any] = dict(vocab_size=grid.VOCAB, dim=64, num_heads=4, max_seq_len=grid.SEQ)
MODELS: dict[str, Callable[[], nn.Module]] = {
    "decoder": functools.partial(Decoder, DecoderConfig(num_layers=4, num_kv_heads=2, ffn_dim=64, **SIZES)),
    "decoder-deep": functools.partial(Decoder, DecoderConfig(num_layers=8, num_kv_heads=2, ffn_dim=64, **SIZES)),
    "gpt": functools.partial(GPT, GPTConfig(num_layers=4, **SIZES)),
    "moe": functools.partial(MoEDecoder, MoEConfig(num_layers=4, num_kv_heads=2, ffn_dim=64, num_experts=4, **SIZES)),
}


def model_of(plan: sw.Plan, name: str = "decoder") -> str:
    return "decoder-deep" if name == "decoder" and plan.axes.pp * plan.schedule.stages > 4 else name


def logits_of(output: Any) -> torch.Tensor:
    return getattr(output, "logits", output)


def loss_fn(output: Any, batch: dict[str, torch.Tensor]) -> sw.Loss:
    return sw.token_cross_entropy(logits_of(output), batch["labels"])


def converted(module: nn.Module, plan: sw.Plan, types: dict[str, str]) -> nn.Module:
    """torchao's own conversion of the blocks' linear layers; other types by hooks around the modules."""
    base = DTYPES[plan.precision]

    def wanted(linear: nn.Module, name: str) -> bool:
        kind = type_of(name, types)
        return kind == "fp8" or (kind is None and name.startswith(("layers.", "h.")))

    if plan.float8.recipe != "none":
        config = Float8LinearConfig.from_recipe_name(RECIPES[plan.float8.recipe])
        config = replace(config, emulate=True, round_scales_to_power_of_2=True)
        module = convert_to_float8_training(module, module_filter_fn=wanted, config=config)
    for name, parameter in module.named_parameters():
        kind = type_of(name.rpartition(".")[0], {rule: t for rule, t in types.items() if t != "fp8"})
        parameter.data = parameter.data.to(DTYPES[kind] if kind else base)
    for name in sorted((n for n, kind in types.items() if kind != "fp8"), key=lambda n: n.count(".")):
        own, inner = DTYPES[types[name]], module.get_submodule(name)
        outer = DTYPES.get(type_of(name.rpartition(".")[0], types) or "", base)
        inner.register_forward_pre_hook(lambda _, args, own=own: tuple(cast(a, own) for a in args))
        inner.register_forward_hook(lambda _, __, output, outer=outer: cast(output, outer))
    return module


def cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def reference(text: str, model: str, parts: int) -> grid.Trace:
    """One process, no training code of Shardwise."""
    plan, trace, data = sw.Plan.parse(text), grid.Trace(), grid.Rows()
    module = init_model(MODELS[model], seed=grid.SEED, dtype=torch.float32)
    types = types_of_modules([name for name, _ in module.named_modules()], plan)
    optimizer = torch.optim.SGD(module.parameters(), lr=grid.LR, momentum=0.9)
    with sw.open_mesh(sw.Plan()) as mesh:
        order = sw.loader(data, plan.batch.global_size or BATCH, mesh, seed=grid.SEED)
        for window in (next(order) for _ in range(grid.STEPS)):
            weight = int((data.labels[window.indices] != -100).sum())
            sums = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
            total = 0.0
            computing = converted(copy.deepcopy(module), plan, types)
            for rows in torch.tensor(window.indices).reshape(parts, -1):
                loss = loss_fn(computing(data.ids[rows, :-1]), {"labels": data.labels[rows]})
                loss.sum.backward()
                total += float(loss.sum.detach())
                for name, parameter in computing.named_parameters():
                    sums[name] += parameter.grad
                    parameter.grad = None
            for name, parameter in module.named_parameters():
                parameter.grad = sums[name] / weight
            trace.losses.append(total / weight)
            trace.norms.append(nn.utils.clip_grad_norm_(module.parameters(), grid.CLIP).item())
            trace.grads.append({n: p.grad.clone() for n, p in module.named_parameters()})
            optimizer.step()
            optimizer.zero_grad()
    trace.params = {n: p.detach().clone() for n, p in module.named_parameters()}
    return trace


def run(text: str, model: str) -> grid.Trace:
    """The same under a plan, on this rank."""
    plan, trace = sw.Plan.parse(text), grid.Trace()
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(MODELS[model], plan, mesh, seed=grid.SEED)
        data = sw.loader(grid.Rows(), grid.batch(plan, plan.batch.global_size or BATCH), mesh, seed=grid.SEED)
        state = sw.TrainState(placed, sw.sgd(placed, lr=grid.LR, momentum=0.9), data)
        grid.spy_on_gradients(state, trace)
        for metrics in sw.steps(state, loss_fn, until=grid.STEPS, clip=grid.CLIP):
            trace.losses.append(metrics.loss)
            trace.norms.append(metrics.grad_norm)
        trace.params = {n: grid.whole(p) for n, p in placed.named_parameters().items()}
    return trace
