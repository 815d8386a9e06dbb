"""What torch said of shapes is remembered only where the same call would say it again."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwise.parallel.initial.shape_cache import ShapeCache
from shardwise.parallel.randomness.sites import find_sites


def ask(cache: ShapeCache, func: Any, *args: Any, may_keep: bool = True, **kwargs: Any) -> Any:
    with torch.no_grad():
        return cache.call(func, args, kwargs, lambda: may_keep)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_a_call_is_made_once() -> None:
    cache, calls = ShapeCache(), []

    def double(x: torch.Tensor, factor: float = 2) -> torch.Tensor:
        calls.append(factor)
        return torch.mul(x, factor)

    first, again = ask(cache, double, meta(2, 3)), ask(cache, double, meta(2, 3))
    assert (again.shape, again.dtype, again.stride()) == (
        first.shape,
        first.dtype,
        first.stride(),
    ) and again is not first
    ask(cache, double, meta(3, 2))
    ask(cache, double, meta(2, 3, dtype=torch.float64))
    ask(cache, double, meta(3, 2).T)  # other strides
    ask(cache, double, meta(2, 3), factor=2.0)  # 2 == 2.0, and True == 1
    assert len(calls) == 5


def test_parts_come_back_as_they_were() -> None:
    cache = ShapeCache()
    for _ in range(2):
        parts = ask(cache, torch.Tensor.chunk, meta(4, 6), 3, dim=1)
        assert type(parts) is tuple and [tuple(part.shape) for part in parts] == [(4, 2)] * 3
        assert parts[0].stride() == (6, 1)


def test_what_depends_on_more_is_asked_again() -> None:
    cache, count = ShapeCache(), [0]

    def counted(x: Any, *rest: Any) -> Any:
        count[0] += 1
        return x if rest else x + 1

    same = meta(2)
    for _ in range(2):
        assert ask(cache, counted, same, "in place") is same  # it may have changed its shape
        ask(cache, counted, meta(2), may_keep=False)
        ask(cache, counted, torch.ones(2))  # values
        with torch.enable_grad():
            cache.call(counted, (meta(2),), {}, lambda: True)  # a graph
    assert count == [8]


class Force(nn.Module):
    """Differentiates in its forward, twice by the same calls."""

    def __init__(self) -> None:
        super().__init__()
        self.energy, self.drop = nn.ModuleList(nn.Linear(3, 3) for _ in range(2)), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for energy in self.energy:
            with torch.enable_grad():
                place = x.detach().requires_grad_()
                (x,) = torch.autograd.grad(torch.tanh(energy(place)).sum(), place)
        return self.drop(x)


def test_a_forward_that_differentiates_is_followed() -> None:
    with torch.device("meta"):
        model = Force()
    assert find_sites(model, ((torch.zeros(4, 3),), {}), 4).modules == {"drop"}
