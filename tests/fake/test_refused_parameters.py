"""Parameters that no plan can place are refused by name, where a module is read and where it is built."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ModelError
from shardwise.model.copies import meta_copy
from shardwise.model.describe import describe


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.LazyLinear(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.zeros(4, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.turn * x).real


@pytest.mark.parametrize(
    ("make", "says"),
    [(Lazy, r"parameter last\.weight( of Lazy)? has no shape yet"), (Complex, "parameter turn is complex")],
)
def test_they_are_named(make: Callable[[], nn.Module], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        describe(make(), torch.zeros(2, 4))
    with pytest.raises(ModelError, match=says):
        meta_copy(make())
    with sw.open_mesh(sw.Plan()) as mesh, pytest.raises(ModelError, match=says):
        sw.apply(make, sw.Plan(), mesh, seed=0)
