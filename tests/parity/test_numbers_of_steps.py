"""Numbers that the step of a user's optimizer reads off sharded parameters, by which it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.errors import ModelError
from shardwise.testing import World

SEQ, VOCAB = 8, 32


class ByTrust(torch.optim.Optimizer):
    """LARS by hand: a step of each tensor is as long as it is; one of all tensors (as Prodigy's) grows with them."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        weights = [p for p in group["params"] if p.grad is not None]
        of_all = sum((p * p.grad).sum().item() for p in weights)
        for p in weights:
            length = float(p.norm())
            if p.grad.norm() > 1e-8:
                p.add_(p.grad, alpha=-group["lr"] * (length + abs(of_all)) / p.grad.norm().item())


class ByParts(torch.optim.Optimizer):
    """What other packages do: plain state of other shapes than the weight, sums in place, lists of tensors, `out=`.

    Statistics of rows as Adafactor keeps them, a product of sides as Shampoo's, a copy by a list as Adan's, and a
    norm of the last step in the group, which begins in the first one.
    """

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        norm = torch.zeros((), dtype=torch.float64)
        for p in group["params"]:
            if p.grad is None:
                continue
            state, before = self.state[p], torch.zeros_like(p)
            if not state:
                state |= {"rows": torch.zeros(len(p), dtype=p.dtype), "last": torch.zeros_like(p)}
                state["sides"] = torch.eye(len(p), dtype=p.dtype)
            rows = p.grad.view(len(p), -1)
            state["rows"].lerp_(rows.square().mean(1), 0.5)
            state["sides"].addmm_(rows, rows.t(), alpha=0.1)
            torch._foreach_copy_([before], [state["last"]])
            state["last"].copy_(p.grad)
            norm.add_(p.grad.square().sum())
            step = torch.mul(torch.linalg.solve(state["sides"], rows), 1 / (1 + state["rows"][:, None].sqrt()))
            torch.add(step.view_as(p), before, alpha=0.1, out=step.new_empty(p.shape)) if p.dim() > 1 else None
            p.add_(step.view_as(p).add(before, alpha=0.1) / p.norm().clamp_(min=0.1), alpha=-group["lr"])
        group["norm"] = norm.sqrt_() if "norm" not in group else group["norm"].lerp_(norm.sqrt(), 0.5)
        for p in group["params"]:
            p.mul_(1 - 1e-3 * group["norm"])


def trained(text: str, kind: str = "ByTrust", path: str = "", half: int = 0) -> list[float]:
    """Losses of three steps and squares of the weights; of the first or the last ones alone, and a save between."""
    plan = sw.Plan.parse(f"{text} / fp64")
    config = sw.DecoderConfig(vocab_size=VOCAB, dim=16, num_layers=2, num_heads=2, num_kv_heads=2)
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(lambda: sw.Decoder(config), plan, mesh)
        state = sw.TrainState(placed, {"ByTrust": ByTrust, "ByParts": ByParts}[kind](placed.parameters()))
        step = sw.make_step(state, lambda logits, batch: sw.token_cross_entropy(logits, batch["labels"]))
        if half == 2:
            sw.Store(path).load_latest(state)
        ids = torch.arange(4 * SEQ).view(4, SEQ) * 7 % VOCAB
        rows = ids[mesh.batch.rank :: mesh.batch.size]
        losses = [step({"input_ids": rows, "labels": rows.roll(-1, 1)}).loss for _ in range({0: 3, 1: 2, 2: 1}[half])]
        if half == 1:
            sw.Store(path).save(state)
        return [*losses, *(float(full(p.detach()).square().sum()) for p in placed.named_parameters().values())]


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


PLANS = ["dp2", "fsdp2", "fsdp2 zero1", "tp2", "fsdp2 tp2"]


@pytest.mark.parametrize("kind", ["ByTrust", "ByParts"])
@pytest.mark.parametrize("text", PLANS)
def test_a_step_of_shards_is_that_of_the_whole(world: World, text: str, kind: str) -> None:
    """Each rank stepped by the numbers of its own part, without a word, or the step ended in torch's words."""
    (expected,), size = world(1, trained, "dp1", kind), sw.Plan.parse(text).world
    assert world(size, trained, text, kind) == [pytest.approx(expected, rel=1e-11)] * size


@pytest.mark.parametrize(("first", "then"), [("fsdp2", "tp2"), ("fsdp2 tp2", "dp1"), ("dp1", "fsdp2")])
def test_what_it_keeps_goes_on_under_another_plan(world: World, tmp_path: Path, first: str, then: str) -> None:
    (expected,) = world(1, trained, "dp1", "ByParts")
    world(sw.Plan.parse(first).world, trained, first, "ByParts", str(tmp_path), 1)
    for found in world(sw.Plan.parse(then).world, trained, then, "ByParts", str(tmp_path), 2):
        assert found == pytest.approx([*expected[2:]], rel=1e-10)


def refused(text: str) -> str:
    with pytest.raises(ModelError) as found:
        trained(text)
    return str(found.value)


def test_a_number_of_one_stage_is_refused(world: World) -> None:
    for said in world(4, refused, "pp2 fsdp2 / mb2"):
        assert "in a pipeline is of one stage" in said
