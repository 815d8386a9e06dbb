"""Models nobody wrote rules for: their names say nothing, and their forwards are odd."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import nn

from shardwise.diagnose.rules import Trial

WIDTH, HEADS, HEAD, WORDS = 32, 4, 8, 48


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (-1, HEAD)).transpose(1, 2)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Softmax attention by hand, in the layout (batch, heads, tokens, features)."""
    scores = q @ k.transpose(-1, -2) * HEAD**-0.5
    hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    mixed = scores.masked_fill(hidden.to(q.device), float("-inf")).softmax(-1) @ v
    return mixed.transpose(1, 2).flatten(2)


class Language(nn.Module):
    """Embedding, blocks, norm, output layer."""

    def __init__(self, block: type[nn.Module], tied: bool = False, times: int = 1) -> None:
        super().__init__()
        self.dictionary, self.times = nn.Embedding(WORDS, WIDTH), times
        self.tower = nn.ModuleList(block() for _ in range(2))
        self.finish = nn.LayerNorm(WIDTH)
        self.answer = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.answer.weight = self.dictionary.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.dictionary(ids)
        for floor in self.tower:
            for _ in range(self.times):
                x = floor(x)
        return self.answer(self.finish(x))


class Look(nn.Module):
    """Attention by hand, with norms on heads and a gate on what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.gate = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.even, self.out = nn.LayerNorm(HEAD), nn.Linear(WIDTH, WIDTH)
        self.heat = nn.Parameter(torch.rand(HEAD))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = heads(self.a(x)), self.even(heads(self.b(x))), heads(self.c(x))
        return self.out(attend(q, k, v) * self.gate(x).sigmoid())


class LookWithoutHeat(Look):
    def __init__(self) -> None:
        super().__init__()
        del self.heat


class Think(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Dropout(0.0), nn.Linear(64, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.steps(x)


class PlainBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.look = nn.LayerNorm(WIDTH), LookWithoutHeat()
        self.two, self.think = nn.RMSNorm(WIDTH), Think()
        self.size = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.size * self.look(self.one(x))
        return x + self.think(self.two(x))


class ParallelBlock(nn.Module):
    """Attention and feed-forward side by side, all layers in the block itself."""

    def __init__(self) -> None:
        super().__init__()
        self.n = nn.LayerNorm(WIDTH)
        self.x1, self.x2, self.x3, self.x4 = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.wide, self.narrow = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.n(x)
        seen = F.scaled_dot_product_attention(heads(self.x1(y)), heads(self.x2(y)), heads(self.x3(y)), is_causal=True)
        return x + self.x4(seen.transpose(1, 2).flatten(2)) + self.narrow(F.relu(self.wide(y)) ** 2)


class FusedLook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.three, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.three(x).view(*x.shape[:2], 3, HEADS, HEAD).permute(2, 0, 3, 1, 4)
        return self.out(attend(q, k, v))


class FusedThink(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(WIDTH, 128, bias=False), nn.Linear(64, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.both(x).chunk(2, dim=-1)
        return self.down(F.silu(left) * right)


class FusedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p, self.q = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.r, self.s = FusedLook(), FusedThink()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.r(self.p(x))
        return x + self.s(self.q(x))


class CountingLook(nn.Module):
    """Names the number of heads: on a slice, `view` would deal out wrong heads without an error."""

    def __init__(self) -> None:
        super().__init__()
        self.l1, self.l2, self.l3, self.l4 = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (m(x).view(*x.shape[:2], HEADS, -1).transpose(1, 2) for m in (self.l1, self.l2, self.l3))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.l4(seen.transpose(1, 2).reshape(*x.shape[:2], -1))


class SlopedLook(nn.Module):
    """A bias of its own for each head: the heads meet a whole tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.l1, self.l2, self.l3, self.l4 = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("slopes", torch.arange(1.0, HEADS + 1).view(HEADS, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = heads(self.l1(x)), heads(self.l2(x)), heads(self.l3(x))
        places = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) + self.slopes * (places[None] - places[:, None])
        return self.l4(torch.einsum("bhqk,bhkd->bqhd", scores.softmax(-1), v).flatten(2))


class OddBlock(nn.Module):
    def __init__(self, look: type[nn.Module]) -> None:
        super().__init__()
        self.before, self.look = nn.RMSNorm(WIDTH), look()
        self.share, self.raw = nn.Linear(WIDTH, 3), nn.Parameter(torch.rand(3, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.look(self.before(x))
        return x + self.share(x).softmax(-1) @ self.raw


class Mixer(nn.Module):
    """Mixes over places, then over features: both are two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, WIDTH)
        self.floors = nn.ModuleList(
            nn.ModuleDict(
                {
                    "a": nn.LayerNorm(WIDTH),
                    "places": nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16)),
                    "b": nn.LayerNorm(WIDTH),
                    "features": nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)),
                }
            )
            for _ in range(2)
        )
        self.last = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for floor in self.floors:
            x = x + floor["places"](floor["a"](x).transpose(1, 2)).transpose(1, 2)
            x = x + floor["features"](floor["b"](x))
        return self.last(x.mean(1))


class Picture(nn.Module):
    """A convolution cuts patches; a learned place is added; the class comes from the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.place = nn.Parameter(torch.rand(1, 16, WIDTH))
        self.tower = nn.ModuleList(PlainBlock() for _ in range(2))
        self.finish, self.name = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.cut(x).flatten(2).transpose(1, 2) + self.place
        for floor in self.tower:
            x = floor(x)
        return self.name(self.finish(x).mean(1))


class Chain(nn.Module):
    """Five layers in a row: columns and rows take turns, and one is left over."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [12, 32, 24, 16, 8, 4]
        self.all = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.all:
            x = layer(x).tanh()
        return x


class CountingBlock(OddBlock):
    def __init__(self) -> None:
        super().__init__(CountingLook)


class SlopedBlock(OddBlock):
    def __init__(self) -> None:
        super().__init__(SlopedLook)


def tokens(block: type[nn.Module], **options: object) -> Trial:
    return Trial(factory=functools.partial(Language, block, **options), shape=(2, 16))


TRIALS = {
    "plain": tokens(PlainBlock),
    "tied": tokens(PlainBlock, tied=True),
    "shared": tokens(PlainBlock, times=2),
    "parallel": tokens(ParallelBlock),
    "fused": tokens(FusedBlock),
    "counting": tokens(CountingBlock),
    "sloped": tokens(SlopedBlock),
    "mixer": Trial(factory=Mixer, shape=(2, 16, 6), dtype="float64"),
    "picture": Trial(factory=Picture, shape=(2, 3, 16, 16), dtype="float64"),
    "chain": Trial(factory=Chain, shape=(4, 12), dtype="float64"),
}
