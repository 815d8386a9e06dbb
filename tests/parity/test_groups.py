"""Groups of parameters, moving averages, frozen and sometimes unused parameters: as one process has them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.errors import ModelError, UsageError
from shardwise.parallel.init import init_model
from tests.parity import grid

PLANS = ["dp2 / mb2", "fsdp2 tp2 / seq", "pp2 fsdp2 / 1f1b mb4", "pp2 tp2 / zero-bubble-v mb4"]
STEPS, DECAY = 3, 0.9
FROZEN = ("embed.weight", "layers.1.attn.wq.weight")


def model() -> nn.Module:
    whole = grid.MODELS["decoder"]()
    for name in FROZEN:
        whole.get_parameter(name).requires_grad_(False)
    return whole


def reference() -> dict[str, torch.Tensor]:
    module = init_model(model, seed=grid.SEED, dtype=torch.float64)
    named = {n: p for n, p in module.named_parameters() if p.requires_grad}
    norms = [p for n, p in named.items() if "norm" in n]
    wide = [p for n, p in named.items() if ".ffn." in n and "norm" not in n]
    rest = [p for n, p in named.items() if "norm" not in n and ".ffn." not in n]
    optimizers = [
        torch.optim.SGD(norms, lr=0.1, momentum=0.9),
        torch.optim.AdamW(wide, lr=1e-2, weight_decay=0.1, eps=grid.EPS),
        torch.optim.AdamW(rest, lr=1e-3, weight_decay=0.0, eps=grid.EPS),
    ]
    average = {n: p.detach().clone() for n, p in named.items()}
    data = grid.Rows()
    with sw.open_mesh(sw.Plan()) as mesh:
        order = sw.loader(data, 16, mesh, seed=grid.SEED)
        for window in (next(order) for _ in range(STEPS)):
            ids, labels = data.ids[window.indices, :-1], data.labels[window.indices]
            total = F.cross_entropy(module(ids).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
            (total / (labels != -100).sum()).backward()
            nn.utils.clip_grad_norm_(module.parameters(), grid.CLIP)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for n, p in named.items():
                average[n] = DECAY * average[n] + (1 - DECAY) * p.detach()
    frozen = {n: p.detach() for n, p in module.named_parameters() if not p.requires_grad}
    return {n: p.detach().clone() for n, p in named.items()} | {f"ema.{n}": a for n, a in average.items()} | frozen


def optimizers(placed: sw.Placed) -> Any:
    return sw.several(
        placed,
        {
            "*norm*": lambda p: torch.optim.SGD(p.parameters(), lr=0.1, momentum=0.9),
            "*.ffn.*": lambda p: sw.adamw(p, 1e-2, weight_decay=0.1, eps=grid.EPS),
            "*": lambda p: sw.adamw(p, 1e-3, weight_decay=0.0, eps=grid.EPS),
        },
    )


def trained(text: str, folder: str | None = None, first: int = STEPS) -> dict[str, torch.Tensor]:
    """Under a plan; with a folder: some steps, a checkpoint, and the rest in a state that loaded it."""
    plan = sw.Plan.parse(f"{text} / fp64")
    with sw.open_mesh(plan) as mesh:
        for until in (STEPS,) if folder is None else (first, STEPS):
            placed = sw.apply(model, plan, mesh, seed=grid.SEED)
            data = sw.loader(grid.Rows(), grid.batch(plan, 16), mesh, seed=grid.SEED)
            state = sw.TrainState(placed, optimizers(placed), data, ema=sw.Ema(placed, DECAY))
            if folder is not None:
                store = sw.Store(folder)
                store.load_latest(state)
            for _ in sw.steps(state, grid.loss_fn, until=until, clip=grid.CLIP):
                pass
            if folder is not None:
                store.save(state)
        found = {n: grid.whole(p) for n, p in placed.named_parameters().items()}
        with state.ema.applied():
            found |= {f"ema.{n}": grid.whole(p) for n, p in placed.named_parameters().items() if p.requires_grad}
        assert all(torch.equal(found[n], grid.whole(p)) for n, p in placed.named_parameters().items())
        return found


@functools.cache
def truth(world) -> dict[str, torch.Tensor]:
    return world(1, reference)[0]


def compare(ranks: list[dict[str, torch.Tensor]], truth: dict[str, torch.Tensor]) -> None:
    seen = set()
    for rank in ranks:
        for name, tensor in rank.items():
            assert (tensor - truth[name]).abs().max() <= 1e-11 * truth[name].abs().max(), name
            seen.add(name)
    assert seen == set(truth)


@pytest.mark.share(6)
@pytest.mark.parametrize("plan", PLANS)
def test_groups_average_and_frozen(world, plan: str) -> None:
    compare(world(sw.Plan.parse(plan).world, trained, plan), truth(world))


@pytest.mark.soak  # in every run: tests/parity/test_store_groups.py
def test_groups_and_average_resume(world, tmp_path) -> None:
    compare(world(4, trained, "fsdp2 tp2", str(tmp_path), 1), truth(world))


@dataclass
class Output:
    logits: torch.Tensor
    hidden: list[torch.Tensor]


class Branches(nn.Module):
    """Uses one of two heads, by a flag in the batch; returns a dataclass with tensors in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(grid.VOCAB, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh()) for _ in range(4))
        self.even = nn.Linear(8, grid.VOCAB, bias=False)
        self.odd = nn.Linear(8, grid.VOCAB, bias=False)

    def forward(self, input_ids: torch.Tensor, odd: bool = False) -> Output:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return Output(logits=(self.odd if odd else self.even)(x), hidden=[x])


def sometimes(text: str | None) -> dict[str, torch.Tensor]:
    """Three steps: even, odd, even; None: plain torch."""
    ids = torch.randint(0, grid.VOCAB, (8, 7), generator=torch.Generator().manual_seed(3))
    batches = [{"input_ids": ids[:, :-1], "labels": ids[:, 1:], "odd": step == 1} for step in range(3)]
    if text is None:
        module = init_model(Branches, seed=1, dtype=torch.float64)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        for batch in batches:
            logits = module(batch["input_ids"], batch["odd"]).logits
            F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return {n: p.detach() for n, p in module.named_parameters()}
    plan = sw.Plan.parse(f"{text} / fp64")
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(Branches, plan, mesh, seed=1)
        step = sw.make_step(sw.TrainState(placed, sw.adamw(placed, 1e-2)), output_loss)
        share = slice(mesh.batch.rank * 8 // mesh.batch.size, (mesh.batch.rank + 1) * 8 // mesh.batch.size)
        for batch in batches:
            step({k: v[share] if isinstance(v, torch.Tensor) else v for k, v in batch.items()})
        return {n: grid.whole(p) for n, p in placed.named_parameters().items()}


def output_loss(output: Output, batch: dict[str, Any]) -> sw.Loss:
    return sw.token_cross_entropy(output.logits, batch["labels"])


@pytest.mark.parametrize("plan", ["dp2 / find-unused", "fsdp2", "fsdp2 / zero1", "pp2 / 1f1b mb2"])
def test_parameters_used_in_some_steps(world, plan: str) -> None:
    compare(world(sw.Plan.parse(plan).world, sometimes, plan), world(1, sometimes, None)[0])


def said(make: Callable[[sw.Placed], Any]) -> str:
    plan = sw.Plan.parse("dp1")
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(Branches, plan, mesh)
        try:
            make(placed)
        except (ModelError, UsageError) as error:
            return str(error)
    return "not refused"


def sgd(placed: sw.Placed) -> Any:
    return sw.sgd(placed, 0.1)


REFUSALS: list[tuple[Callable[[sw.Placed], Any], str]] = [
    (lambda p: sw.several(p, {}), "found no parts"),
    (lambda p: sw.several(torch.optim.SGD(p.parameters(), 0.1), {"*": sgd}), "several: found SGD; needed placed"),
    (lambda p: sw.several(p, {"*": torch.optim.SGD(p.parameters(), 0.1)}), "found SGD as what makes an optimizer"),
    (lambda p: sw.several(p, torch.optim.SGD(p.parameters(), 0.1)), "found SGD as what makes an optimizer"),
    (lambda p: sw.several(p, {"*even*": sgd}), r"trainable parameters match none of '\*even\*'"),
    (lambda p: sw.several(p, {"*": sgd, "*odd*": sgd}), r"'\*odd\*' takes no"),
    (lambda p: sw.several(p, {"*": lambda q: list(q.parameters())}), "gave list, needed an optimizer; write"),
    (lambda p: sw.Ema(p, 1.0), "needed a number above 0 and below 1"),
]


@pytest.mark.parametrize(("make", "message"), REFUSALS)
def test_refusals(make: Callable[[sw.Placed], Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(said(make))
