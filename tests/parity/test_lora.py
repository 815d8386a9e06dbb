"""Low-rank adapters of `peft` on a decoder: trained under a plan as in one process, the rest frozen."""

from __future__ import annotations

import functools
import warnings
from itertools import product
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.errors import ModelError
from shardwise.models.hf import hf_factory
from shardwise.testing.fake import fake_world
from tests.parity import grid, hf_models

STEPS = 2
TARGETS = {"decoder": ["wq", "wv", "wo", "w2"], "llama": ["q_proj", "v_proj", "o_proj", "down_proj"]}
PLANS = ["dp2", "fsdp2 / mb2", "tp2", "fsdp2 tp2", "pp2 / 1f1b mb2"]


def model(kind: str) -> nn.Module:
    """The same bits in every process; B starts at zero, where A has no gradient, so it is given values.

    Of `transformers` it is a wrapper that passes on what the model declares, with names that lack the wrapper's.
    """
    torch.manual_seed(5)
    made = hf_factory(hf_models.config("llama"))() if kind == "llama" else grid.MODELS["decoder"]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft's own, of a name in transformers
        adapted = get_peft_model(made, LoraConfig(r=2, lora_alpha=4, lora_dropout=0.0, target_modules=TARGETS[kind]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return adapted.double()


def logits_of(output: Any) -> torch.Tensor:
    return getattr(output, "logits", output)


def loss_fn(output: Any, batch: dict[str, torch.Tensor]) -> sw.Loss:
    return grid.loss_fn(logits_of(output), batch)


def reference(kind: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    module, norms, data = model(kind), [], grid.Rows()
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, eps=grid.EPS)
    with hf_models.KeepFp64(), sw.open_mesh(sw.Plan()) as mesh:
        order = sw.loader(data, 16, mesh, seed=grid.SEED)
        for window in (next(order) for _ in range(STEPS)):
            ids, labels = data.ids[window.indices, :-1], data.labels[window.indices]
            logits = logits_of(module(ids))
            total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
            (total / (labels != -100).sum()).backward()
            norms.append(nn.utils.clip_grad_norm_(trained, grid.CLIP).item())
            optimizer.step()
            optimizer.zero_grad()
    return norms, {n: p.detach().clone() for n, p in module.named_parameters()}


def run(text: str, kind: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    plan = sw.Plan.parse(f"{text} / fp64")
    with hf_models.KeepFp64(), sw.open_mesh(plan) as mesh:
        placed = sw.apply(model(kind), plan, mesh)
        optimizer = sw.adamw(placed, lr=1e-2, eps=grid.EPS)
        state = sw.TrainState(placed, optimizer, sw.loader(grid.Rows(), grid.batch(plan, 16), mesh, seed=grid.SEED))
        norms = [m.grad_norm for m in sw.steps(state, loss_fn, until=STEPS, clip=grid.CLIP)]
        assert all(("lora" in name) == p.requires_grad for name, p in placed.named_parameters().items())
        return norms, {n: grid.whole(p) for n, p in placed.named_parameters().items()}


@functools.cache
def truth(world, kind: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    return world(1, reference, kind)[0]


@pytest.mark.share(4)
@pytest.mark.parametrize(("plan", "kind"), [*product(PLANS, ["decoder"]), *product([*PLANS, "cp2"], ["llama"])])
def test_adapters_train_as_in_one_process(world, plan: str, kind: str) -> None:
    norms, parameters = truth(world, kind)
    seen = set()
    for mine, held in world(sw.Plan.parse(plan).world, run, plan, kind):
        assert mine == pytest.approx(norms, rel=1e-11)
        for name, tensor in held.items():
            assert (tensor - parameters[name]).norm() <= 1e-11 * parameters[name].norm(), name
        seen |= set(held)
    assert seen == set(parameters)


def test_blocks_of_what_a_wrapper_passes_on() -> None:
    for text in ("fsdp2", "tp2", "pp2 / 1f1b mb2"):
        plan = sw.Plan.parse(text)
        with fake_world(plan.world), sw.open_mesh(plan, device="cpu") as mesh:
            placed = sw.apply(model("llama"), plan, mesh)
        assert placed.blocks == tuple(f"base_model.model.model.layers.{n}" for n in range(hf_models.NUM_LAYERS)), text


def test_sequence_shards_are_refused(world) -> None:
    for row, text in world(2, refusal):
        assert row == "module.adapter-on-row" and "second half of an adapter on a row layer" in text


def refusal() -> tuple[str, str]:
    try:
        run("tp2 / seq", "decoder")
    except ModelError as error:
        return error.row, str(error)
    return "", "not refused"
