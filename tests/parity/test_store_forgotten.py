"""Buffers with `persistent=False`: no checkpoint has them, and a save says so where training goes on from them."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.testing import World


class Block(nn.Module):
    """A table that is made once and grows, room that each forward fills, and counts that a step begins at zero.

    And numbers in attributes: a length that is found once, and what an evaluation would change.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.count = nn.Linear(4, 4), nn.ReLU()
        for name in ("table", "room", "per_step"):
            self.register_buffer(name, torch.zeros(2), persistent=False)
        self.register_buffer("kept", torch.zeros(2))
        self.length = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.table) < 4:
            self.table = torch.arange(4.0)
        self.length = max(self.length, len(x))
        self.room.fill_(3)
        self.per_step.zero_().add_(1)
        self.kept.add_(1)
        return self.linear(x) + self.table + self.room.sum()


class Counting(Block):
    """One more, which goes on from step to step: in place, or as a new tensor."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.in_place:
            self.seen.add_(1)
        else:
            self.seen = self.seen + 1
        return super().forward(x) / self.seen


class Telling(Block):
    """Counts too, and tells a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state


class Chain(nn.Module):
    """Only its last block has buffers that steps change."""

    def __init__(self, last: list[Block]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block(), *last])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def loss_fn(output: torch.Tensor, batch: list[torch.Tensor]) -> sw.Loss:
    return sw.mean_over(output.square())


def said(text: str, path: str, counts: bool) -> list[list[str]]:
    """Of each of four saves the warnings."""
    plan, found = sw.Plan.parse(text), []
    with sw.open_mesh(plan) as mesh:
        others = Block if plan.axes.pp > 1 else Telling  # which stages of a pipeline may not
        placed = sw.apply(
            lambda: Chain([Counting(True), Counting(False)] if counts else [others(), others()]),
            plan,
            mesh,
            sample=torch.ones(2, 4),
        )
        state = sw.TrainState(placed, sw.adamw(placed, lr=1e-3))
        step, store = sw.make_step(state, loss_fn), sw.Store(path)
        for _ in range(4):
            step([[torch.ones(2, 4)] for _ in range(plan.batch.micro_batches)])
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                store.save(state)
            found.append([str(each.message) for each in caught])
    return found


@pytest.mark.parametrize("plan", ["dp1 / recompute=blocks", "fsdp2", "pp2 / mb2"])
def test_a_buffer_that_no_checkpoint_has_and_steps_change_is_said_once(world: World, tmp_path: Path, plan: str) -> None:
    number = sw.Plan.parse(plan).world
    first, second, [text], after = world(number, said, plan, str(tmp_path / "a"), True)[0]
    assert "buffers with persistent=False that steps change: layers.2.seen, layers.3.seen; no checkpoint" in text
    assert "numbers in attributes of modules that steps change: layers.2.calls, layers.3.calls; no checkpoint" in text
    assert first == second == after == []
    assert world(number, said, plan, str(tmp_path / "b"), False)[0] == [[]] * 4


def test_what_experts_of_the_house_count_anew_is_not_said(tmp_path: Path) -> None:
    plan = sw.Plan()
    sizes = {"vocab_size": 16, "dim": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "ffn_dim": 16}
    with sw.open_mesh(plan) as mesh, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        placed = sw.apply(lambda: sw.MoEDecoder(sw.MoEConfig(**sizes, max_seq_len=8, num_experts=4)), plan, mesh)
        state = sw.TrainState(placed, sw.adamw(placed, lr=1e-1))
        step = sw.make_step(state, lambda output, _: sw.mean_over(output.logits.square()))
        for i in range(4):
            step([torch.arange(16).view(2, 8) * i % 16])
        sw.Store(tmp_path / "s").save(state)
    assert [str(each.message) for each in caught] == []
