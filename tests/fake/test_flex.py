"""FlexAttention under context parallelism: what is refused, by name, and what `flex_attention` gives besides."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import (
    BlockMask,
    create_block_mask,
    flex_attention,
)

import shardwise as sw
from shardwise.errors import ModelError
from shardwise.parallel.sequence import intercept
from shardwise.parallel.torch_private import copy_of_flex_attention, flex_as_torch_defines_it, flex_carried_by
from shardwise.testing import fake_world

ROWS, LENGTH, OWN, DIM = 2, 12, 6, 8
IDS = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
Mix = Callable[[torch.Tensor], Any]


class Block(nn.Module):
    """Attention of two heads; tests give the call."""

    def __init__(self, mix: Mix) -> None:
        super().__init__()
        self.proj, self.mix = nn.Linear(DIM, DIM), mix

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.proj(self.mix(x.unflatten(-1, (2, -1)).transpose(1, 2)).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, mix: Mix) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(16, DIM), nn.ModuleList(Block(mix) for _ in range(2))

    def forward(self, ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def run(text: str, mix: Mix, rank: int = 0) -> torch.Tensor:
    plan = sw.Plan.parse(text)
    with fake_world(plan.world, rank), sw.open_mesh(plan, device="cpu") as mesh:
        placed = sw.apply(lambda: Model(mix), plan, mesh)
        return placed.parts[0].run(**placed.share({"ids": IDS}))


def causal(b: Any, h: Any, q: Any, kv: Any) -> torch.Tensor:
    return q >= kv


def attends(score_mod: Any = None, mask_mod: Any = causal, length: int = LENGTH, **options: Any) -> Mix:
    def mix(x: torch.Tensor) -> torch.Tensor:
        mask = create_block_mask(mask_mod, ROWS, None, length, length, device="cpu")
        return flex_attention(x, x, x, score_mod, block_mask=mask, **options)

    return mix


def beside(x: torch.Tensor) -> torch.Tensor:
    return flex_attention(x, x, x) + F.scaled_dot_product_attention(x, x, x)


def of_this_rank(b: Any, h: Any, q: Any, kv: Any) -> torch.Tensor:
    return LOCAL[b, q] == LOCAL[b, kv]


LOCAL = torch.zeros(ROWS, OWN, dtype=torch.int64)


def reads(local: torch.Tensor) -> Callable[..., torch.Tensor]:
    return lambda score, b, h, q, kv: score + local[b, q % OWN]


def calls(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda score, b, h, q, kv: function(score, b, h, q, kv)


def by_blocks(x: torch.Tensor) -> torch.Tensor:
    """Two blocks of which each sees itself, and no function."""
    one = torch.ones(1, 1, 2, dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(
        one, torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32), BLOCK_SIZE=6, seq_lengths=(LENGTH, LENGTH)
    )
    return flex_attention(x, x, x, block_mask=mask)


REFUSED = [
    ("cp2", attends(), "layers.0: found flex_attention under context=ring, needed context=gather"),
    ("cp2", beside, "layers.0: found flex_attention under context=ring"),
    ("cp2 context=gather", attends(length=OWN), "a block mask of 6 x 6 tokens, made for the 6 tokens of this rank"),
    ("cp2 context=ulysses", attends(length=OWN), "needed one of the whole sequence, 12 x 12"),
    ("cp2 context=gather", attends(length=LENGTH + 4), "a block mask of 16 x 16 tokens, needed one of the whole"),
    ("cp2 context=gather", attends(reads(LOCAL)), "a score_mod that reads local (2, 6), of the 6 tokens of this rank"),
    ("cp2 context=ulysses", attends(calls(reads(LOCAL))), "a score_mod that reads local (2, 6)"),
    ("cp2 context=gather", by_blocks, "a block mask whose blocks hide what its mask_mod shows"),
    ("cp4 context=ulysses", attends(), "found 2 heads, needed a multiple of cp=4"),
    (
        "cp2 context=gather",
        lambda x: flex_attention(x, x[:, :, :4], x[:, :, :4]),
        "attention of 6 queries to 4 keys, needed self-attention",
    ),
]


@pytest.mark.parametrize(("text", "mix", "message"), REFUSED)
def test_what_is_of_a_part_of_the_sequence_is_refused_by_name(text: str, mix: Mix, message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)) as caught:
        run(text, mix)
    assert "layers.0" in str(caught.value) and "plan" in str(caught.value)


def test_partial_functions_are_looked_into() -> None:
    def score_mod(local: torch.Tensor, score: torch.Tensor, b: Any, h: Any, q: Any, kv: Any) -> torch.Tensor:
        return score + local[b, q % OWN]

    with pytest.raises(ModelError, match=r"a score_mod that reads 0 \(2, 6\)"):
        run("cp2 context=gather", attends(partial(score_mod, LOCAL)))


@pytest.mark.parametrize("rank", [0, 1])
def test_values_of_the_whole_sequence_pass(rank: int) -> None:
    whole = torch.zeros(ROWS, LENGTH, dtype=torch.float32)
    mix = attends(lambda score, b, h, q, kv: score + whole[b, q] + whole[b, kv])
    assert run("cp2 context=gather", mix, rank).shape == (ROWS, OWN, DIM)


def test_the_first_import_inside_a_forward_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intercept, "flex_is_imported", lambda: False)
    mix = attends(length=OWN)
    with torch.no_grad(), pytest.warns(UserWarning, match="without"), pytest.raises(ModelError, match="by the call"):
        run("cp2 context=gather", mix)


# ---------------------------------------------------------------- the private names of torch


class Carrier:
    """Doubles the queries, takes the first result."""

    def __init__(self) -> None:
        self.own, self.seen = copy_of_flex_attention(), []

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.seen.append((len(args), sorted(kwargs)))
        return self.own, (2 * args[0], *args[1:]), kwargs

    def end(self, out: torch.Tensor) -> torch.Tensor:
        return out[:1]


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_a_call_by_any_name_goes_through_the_carrier_and_no_longer_after_it() -> None:
    x, carrier, other_name = torch.randn(2, 1, 4, 8), Carrier(), flex_attention
    right = other_name(2 * x, x, x, scale=0.3)
    with flex_carried_by(carrier):
        found = other_name(x, x, value=x, scale=0.3)
        with pytest.raises(ValueError, match="dimensional"):
            other_name(x, x, torch.zeros(1))
    assert torch.equal(found, right[:1]) and carrier.seen[0] == (2, ["scale", "value"])
    assert torch.equal(other_name(2 * x, x, x, scale=0.3), right) and len(carrier.seen) == 2


def test_the_definition_has_gradients_on_the_cpu_where_the_function_has_none() -> None:
    q, k, v = (torch.randn(2, 2, 5, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    slopes = torch.randn(2, dtype=torch.float64, requires_grad=True)
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        flex_attention(q, k, v)
    mask = create_block_mask(causal, None, None, 5, 5, device="cpu")
    score_mod = partial(lambda slopes, score, b, h, i, j: score + slopes[h] * (i - j) ** 2, slopes)
    out, lse = flex_as_torch_defines_it(q, k, v, score_mod, mask, 0.3)
    at = torch.arange(5)
    scores = 0.3 * q @ k.mT + slopes[:, None, None] * (at[:, None] - at) ** 2
    scores = scores.masked_fill(at[:, None] < at, float("-inf"))
    torch.testing.assert_close(out, scores.softmax(-1) @ v)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    grad = torch.randn_like(out)
    for found, right in zip(
        torch.autograd.grad(out, (q, k, v, slopes), grad),
        torch.autograd.grad(scores.softmax(-1) @ v, (q, k, v, slopes), grad),
        strict=True,
    ):
        torch.testing.assert_close(found, right)
