"""Low-rank adapters of `peft` on a decoder: trained under a plan as in one process, the rest frozen."""

from __future__ import annotations

import functools

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.errors import ModelError
from tests.parity import grid

STEPS = 2
LORA = LoraConfig(r=2, lora_alpha=4, lora_dropout=0.0, target_modules=["wq", "wv", "wo", "w2"])


def model() -> nn.Module:
    """The same bits in every process; B starts at zero, where A has no gradient, so it is given values."""
    torch.manual_seed(5)
    adapted = get_peft_model(grid.MODELS["decoder"](), LORA)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return adapted.double()


def reference() -> tuple[list[float], dict[str, torch.Tensor]]:
    module, norms, data = model(), [], grid.Rows()
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, eps=grid.EPS)
    with sw.open_mesh(sw.Plan()) as mesh:
        order = sw.loader(data, 16, mesh, seed=grid.SEED)
        for window in (next(order) for _ in range(STEPS)):
            ids, labels = data.ids[window.indices, :-1], data.labels[window.indices]
            logits = module(ids)
            total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
            (total / (labels != -100).sum()).backward()
            norms.append(nn.utils.clip_grad_norm_(trained, grid.CLIP).item())
            optimizer.step()
            optimizer.zero_grad()
    return norms, {n: p.detach().clone() for n, p in module.named_parameters()}


def run(text: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    plan = sw.Plan.parse(f"{text} / fp64")
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(model(), plan, mesh)
        optimizer = sw.adamw(placed, lr=1e-2, eps=grid.EPS)
        state = sw.TrainState(placed, optimizer, sw.loader(grid.Rows(), grid.batch(plan, 16), mesh, seed=grid.SEED))
        norms = [m.grad_norm for m in sw.steps(state, grid.loss_fn, until=STEPS, clip=grid.CLIP)]
        assert all(("lora" in name) == p.requires_grad for name, p in placed.named_parameters().items())
        return norms, {n: grid.whole(p) for n, p in placed.named_parameters().items()}


@functools.cache
def truth(world) -> tuple[list[float], dict[str, torch.Tensor]]:
    return world(1, reference)[0]


@pytest.mark.share(4)
@pytest.mark.parametrize("plan", ["dp2", "fsdp2 / mb2", "tp2", "fsdp2 tp2", "pp2 / 1f1b mb2"])
def test_adapters_train_as_in_one_process(world, plan: str) -> None:
    norms, parameters = truth(world)
    seen = set()
    for mine, held in world(sw.Plan.parse(plan).world, run, plan):
        assert mine == pytest.approx(norms, rel=1e-11)
        for name, tensor in held.items():
            assert (tensor - parameters[name]).norm() <= 1e-11 * parameters[name].norm(), name
        seen |= set(held)
    assert seen == set(parameters)


def test_sequence_shards_are_refused(world) -> None:
    for row, text in world(2, refusal):
        assert row == "module.adapter-on-row" and "second half of an adapter on a row layer" in text


def refusal() -> tuple[str, str]:
    try:
        run("tp2 / seq")
    except ModelError as error:
        return error.row, str(error)
    return "", "not refused"
