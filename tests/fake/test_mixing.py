"""Sequence shards: what mixes tokens in the part of a block that sees some of them is refused, by the block's name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.errors import ModelError
from shardwise.testing import fake_world

DIM, ROWS, TOKENS = 8, 3, 12
RULES = {"norm": "sequence", "layers.*.norm": "sequence", "layers.*.hidden.up": "column", "layers.*.hidden.down": "row"}


class Hidden(nn.Module):
    """Given the whole sequence, for it holds column layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1] == TOKENS
        x = x - x.mean(1, keepdim=True) + x.cumsum(1) + F.conv1d(x.mT, torch.ones(DIM, DIM, 3), padding=1).mT
        return self.down(self.up(x))


class Block(nn.Module):
    def __init__(self, mix: Callable[[Tensor], Tensor], norm: nn.Module | None = None) -> None:
        super().__init__()
        self.norm, self.hidden, self.mix = norm or nn.LayerNorm(DIM), Hidden(), mix

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x + self.hidden(self.norm(x)))


class Tower(nn.Module):
    def __init__(self, *mixes: Callable[[Tensor], Tensor], norm: nn.Module | None = None) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(Block(mix, norm) for mix in mixes), nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x).mean(1)  # after the blocks the sequence is whole


def run(text: str, *mixes: Callable[[Tensor], Tensor], norm: nn.Module | None = None) -> Tensor:

    plan = sw.Plan.parse(text)
    with fake_world(plan.world), sw.open_mesh(plan, device="cpu") as mesh:
        placed = sw.apply(lambda: Tower(*mixes, norm=norm), plan, mesh, rules=RULES)
        part = placed.parts[0].run
        part(torch.zeros(ROWS, TOKENS, DIM))
        output: Tensor = part(torch.zeros(ROWS, TOKENS, DIM))
        return output


def fine(x: Tensor) -> Tensor:
    """What works on each token alone, and along the rows."""
    return (x - x.mean(-1, keepdim=True) - x.mean(0)) * x.softmax(dim=2)[..., 1:].sum(-1, keepdim=True)


@pytest.mark.parametrize("text", ["tp2 / seq", "tp2 / seq / recompute=blocks", "dp2 tp2 / seq", "fsdp2 tp2 / seq"])
def test_what_works_on_each_token_alone_passes(text: str) -> None:
    assert run(text, fine, fine).shape == (ROWS, DIM)


@pytest.mark.parametrize(
    ("mix", "said"),
    [
        (lambda x: x - x.mean(1, keepdim=True), "mean"),
        (lambda x: x + x.roll(1, 1), "roll"),
        (lambda x: x - x[:, :1], "a part"),
        (lambda x: F.pad(x, (0, 0, 1, -1)), "pad"),
        (lambda x: torch.ones(x.shape[1], x.shape[1]) @ x, "matmul"),
        (lambda x: F.normalize(x, dim=1), "normalize"),
        (lambda x: F.conv1d(x.mT, torch.ones(DIM, DIM, 3), padding=1).mT, "conv1d with a kernel"),
        (lambda x: x - x.mean(), "mean over all tokens"),
        (lambda x: x / (1 + torch.max(x)), "max over all tokens"),
        (lambda x: x / (1 + x.norm()), "norm over all tokens"),
    ],
)
@pytest.mark.parametrize("place", [0, 1])
def test_what_mixes_tokens_is_refused_in_any_block(mix: Callable[[Tensor], Tensor], said: str, place: int) -> None:
    mixes = [fine, fine]
    mixes[place] = mix
    assert run("tp2", *mixes).shape == (ROWS, DIM)
    with pytest.raises(ModelError, match=f"sequence shards: layers.{place}: found {said}"):
        run("tp2 / seq", *mixes)


def test_modules_that_mix_tokens_are_refused_at_once() -> None:
    norm = nn.LayerNorm((TOKENS, DIM))
    with pytest.raises(ModelError, match=r"sequence shards: layers\.0\.norm: found a LayerNorm"):
        run("tp2 / seq", fine, fine, norm=norm)


class Rows(nn.Module):
    """As shared experts are called: tokens in rows, of any batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Hidden()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.flatten(0, 1)).view(x.shape)


def test_column_layers_that_get_tokens_in_rows_are_refused() -> None:
    plan = sw.Plan.parse("tp2 / seq")
    rules = {"0.inner.up": "column", "0.inner.down": "row", "1.inner.up": "column", "1.inner.down": "row"}
    with fake_world(2), sw.open_mesh(plan, device="cpu") as mesh:
        placed = sw.apply(lambda: nn.ModuleList([Rows(), Rows()]), plan.with_(blocks="*"), mesh, rules=rules)
        with pytest.raises(ModelError, match=r"0\.inner is called with tokens in rows \(2 dims\)") as caught:
            next(placed.parts[0].root.children())(torch.zeros(ROWS, TOKENS, DIM))
    assert caught.value.row == "module.tokens-in-rows"


class Normed(Hidden):
    """Its norm is given the whole sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(DIM, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.inner(x.mT).mT)


class Turned(nn.BatchNorm1d):
    """Over features that come last."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mT).mT


@pytest.mark.parametrize("affine", [True, False])
def test_a_batch_norm_of_a_part_of_the_tokens_is_refused(affine: bool) -> None:
    norm = Turned(DIM, affine=affine)
    with pytest.raises(ModelError, match=r"mixes-tokens.*layers\.0\.norm: found a Turned, whose statistics"):
        run("tp2 / seq", fine, fine, norm=norm)
    within = Tower(fine, fine)
    for layer in within.layers:
        layer.hidden = Normed()
    plan = sw.Plan.parse("tp2 / seq")
    with fake_world(2), sw.open_mesh(plan, device="cpu") as mesh:
        placed = sw.apply(within, plan, mesh, rules=RULES)
        assert placed.parts[0].run(torch.zeros(ROWS, TOKENS, DIM)).shape == (ROWS, DIM)


class Beside(Block):
    """Hands on a number for each token, with a dim of its own or without."""

    def __init__(self, keeps: bool) -> None:
        super().__init__(fine)
        self.keeps = keeps

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = super().forward(x)
        return x, x.square().mean(-1, keepdim=self.keeps)


class Pair(Tower):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, numbers = layer(x)
        return numbers


def test_numbers_of_tokens_without_a_dim_of_their_own_are_refused() -> None:
    """They left the blocks as those of this rank's tokens."""
    plan = sw.Plan.parse("tp2 / seq")
    with fake_world(2), sw.open_mesh(plan, device="cpu") as mesh:
        for keeps in (True, False):
            tower = Pair()
            tower.layers.extend(Beside(keeps) for _ in range(2))
            part = sw.apply(tower, plan, mesh, rules=RULES).parts[0].run
            if keeps:
                assert part(torch.zeros(ROWS, TOKENS, DIM)).shape == (ROWS, TOKENS, 1)
            else:
                with pytest.raises(ModelError, match=r"layers\.1 returned a tensor \(3, 6\) beside"):
                    part(torch.zeros(ROWS, TOKENS, DIM))
