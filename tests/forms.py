"""Forms of modules whose backward pass needs more than their products do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.modules import WIDTH, Pictures


class Scan(nn.Module):
    """A state that goes through every eighth token in a loop, as state spaces without their kernels do."""

    def __init__(self) -> None:
        super().__init__()
        self.given, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.decay = nn.Parameter(torch.zeros(WIDTH, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        step, value = self.given(x).chunk(2, -1)
        kept = torch.exp(-F.softplus(step)[..., None] * self.decay.exp())
        state, states = torch.zeros_like(kept[:, 0]), []
        for i in range(0, x.shape[1], 8):
            state = kept[:, i] * state + value[:, i, :, None]
            states.append(state.sum(-1))
        return x + self.out(torch.stack(states, 1).to(x.dtype)).repeat_interleave(8, 1)


class Einsum(nn.Module):
    """Attention in `einsum`, with a bias by relative position."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Parameter(torch.zeros(4, WIDTH, 16)) for _ in range(3))
        self.out, self.bias = nn.Parameter(torch.zeros(4, 16, WIDTH)), nn.Embedding(129, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (torch.einsum("bld,hdk->bhlk", x, weight) for weight in (self.query, self.key, self.value))
        place = torch.arange(x.shape[1], device=x.device)
        bias = self.bias((place[:, None] - place[None]).clamp(-64, 64) + 64).permute(2, 0, 1)
        scores = (torch.einsum("bhik,bhjk->bhij", q, k) + bias).softmax(-1)
        return x + torch.einsum("bhik,hkd->bid", torch.einsum("bhij,bhjk->bhik", scores, v), self.out)


class Square(torch.autograd.Function):
    """A function with a backward pass of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return 2 * ctx.saved_tensors[0] * grads[0]


class Functions(nn.Module):
    """A checkpoint within, a function of its own, in-place operations and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropped = nn.Dropout(0.1)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        squared: torch.Tensor = Square.apply(F.relu_(self.up(self.norm(x))))
        return self.down(squared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add(self.dropped(checkpoint(self.inner, x, use_reentrant=False)))


class Valued(nn.Module):
    """Logits, and a value that is added to them."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Linear(WIDTH, 320)
        self.value = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits(x) + self.value(x)


class Texts(nn.Module):
    """Token ids through blocks of one form, and a head."""

    def __init__(
        self, block: Callable[[], nn.Module], head: Callable[[], nn.Module] | None = None, layers: int = 4
    ) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(320, WIDTH), head() if head else nn.Linear(WIDTH, 320)
        self.layers = nn.ModuleList(block() for _ in range(layers))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Conditioned(nn.Module):
    """A block of a diffusion transformer: six vectors per picture scale and shift it (adaLN)."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = (nn.LayerNorm(WIDTH, elementwise_affine=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU("tanh"), nn.Linear(4 * WIDTH, WIDTH))
        self.vectors = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))

    def forward(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        scale, shift, gate, *inner = self.vectors(given)[:, None].chunk(6, -1)
        y = self.before(x) * (1 + scale) + shift
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(y).chunk(3, -1))
        x = x + gate * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + inner[2] * self.inner(self.between(x) * (1 + inner[0]) + inner[1])


class Denoiser(nn.Module):
    """Latent pictures, their time and class; its positions are a buffer in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.out = nn.Conv2d(4, WIDTH, 2, 2), nn.Linear(WIDTH, 32)
        self.time = nn.Sequential(nn.Linear(32, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.kinds, self.blocks = nn.Embedding(11, WIDTH), nn.ModuleList(Conditioned() for _ in range(4))
        self.register_buffer("places", torch.zeros(1, 64, WIDTH))
        numbers = torch.zeros(2, dtype=torch.long)
        self.example_input_array = (torch.zeros(2, 4, 16, 16), numbers, numbers)

    def forward(self, x: torch.Tensor, time: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        angles = torch.exp(-torch.arange(16, device=x.device) / 16)[None] * time[:, None]
        waves = torch.cat([angles.cos(), angles.sin()], -1)
        given = self.time(waves.to(self.kinds.weight.dtype)) + self.kinds(kind)
        for block in self.blocks:
            x = block(x, given)
        return self.out(x)


class Mixing(nn.Module):
    """Products along the patches and along the channels, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.patches = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 64))
        sizes = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.channels = nn.Sequential(sizes[0], nn.GELU(), nn.Dropout(0.1), sizes[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.patches(self.before(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.between(x))


class Mixer(Pictures):
    """A mixer of patches."""

    def __init__(self) -> None:
        super().__init__(Mixing)
