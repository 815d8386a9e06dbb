"""Numbers that a script reads off weights: of the whole, or refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import UsageError
from shardwise.testing import World


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.gate = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.gate


def read(text: str) -> tuple[list[float], list[str]]:
    """Numbers of the whole, and what was said of those of parts."""
    plan = sw.Plan.parse(text)
    with sw.open_mesh(plan) as mesh:
        module = sw.apply(Net, plan, mesh).module
        weight, said = module.linear.weight.detach(), []
        whole = [w.full_tensor() if hasattr(w := f(weight), "full_tensor") else w for f in (torch.norm, torch.max)]
        for part in (weight.norm(), weight.max(), weight.mean()):
            try:
                float(part), bool(part)
            except UsageError as error:
                said.append(str(error))
        return [*map(float, whole), float(module.gate.detach())], said


@pytest.mark.parametrize(("text", "ranks"), [("fsdp2", 2), ("dp2", 2), ("fsdp1", 1)])
def test_a_number_of_a_shard_is_refused(world: World, text: str, ranks: int) -> None:
    """Each rank got that of its own part, without a word."""
    alone, nothing = world(1, read, "dp1")[0]
    assert not nothing
    for numbers, said in world(ranks, read, text):
        assert numbers == pytest.approx(alone, rel=1e-6)
        assert len(said) == (3 if text == "fsdp2" else 0)
        assert not said or "found (Partial(avg),) over (2,) ranks" in said[2] and ".full_tensor().item()" in said[2]
