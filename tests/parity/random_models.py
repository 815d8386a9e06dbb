"""A small decoder that draws in every way that is keyed, and keeps the masks that it drew."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

VOCAB, SEQ, DIM, HEADS, HIDDEN, LAYERS = 32, 8, 16, 4, 24, 4
RULES = {
    "embed": "replicate",
    "blocks.*.norm1": "sequence",
    "blocks.*.norm2": "sequence",
    "blocks.*.attn.wq": "column",
    "blocks.*.attn.wk": "column",
    "blocks.*.attn.wv": "column",
    "blocks.*.attn.wo": "row",
    "blocks.*.ffn.up": "column",
    "blocks.*.ffn.down": "row",
    "norm": "replicate",
    "head": "head",
}


class Masks(nn.Module):
    """Dropout that also keeps its masks: one bool tensor per call."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = F.dropout(torch.ones_like(x), self.p, self.training)
        if not x.is_meta:
            self.kept.append(noise.detach() != 0)
        return x * noise


class Attention(nn.Module):
    """Causal attention in its math form, with dropout of the probabilities: (batch, heads, queries, keys)."""

    def __init__(self, p: float, fused: bool) -> None:
        """`fused`: torch's attention, without dropout inside."""
        super().__init__()
        self.fused = fused
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM) for _ in range(4))
        self.head_dim = DIM // HEADS
        self.drop = Masks(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, seq, _ = x.shape
        q, k, v = (w(x).view(rows, seq, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.wo(mixed.transpose(1, 2).reshape(rows, seq, -1))
        later = torch.ones(seq, seq, device=x.device).triu(1).bool()
        probabilities = self.drop((q @ k.mT / self.head_dim**0.5).masked_fill(later, float("-inf")).softmax(-1))
        return self.wo((probabilities @ v).transpose(1, 2).reshape(rows, seq, -1))


class FeedForward(nn.Module):
    """Dropout by function on the hidden features, flattened over rows and tokens."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.up, self.down, self.p = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM), p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.dropout(F.gelu(self.up(x)).flatten(0, 1), self.p, self.training)
        return self.down(hidden.view(*x.shape[:2], -1))


class DropPath(nn.Module):
    """Stochastic depth (Huang et al., arXiv:1603.09382): a branch is left out per row."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        keep = x.new_empty((x.shape[0],) + (1,) * (x.dim() - 1)).bernoulli_(1 - self.p)
        return x * keep / (1 - self.p)


class Block(nn.Module):
    """Residual dropout in the block itself, twice in a call."""

    def __init__(self, p: float, fused: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attn, self.ffn, self.path = Attention(p, fused), FeedForward(p), DropPath(p)
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + F.dropout(self.attn(self.norm1(x)), self.p, self.training)
        x = x + self.path(F.dropout(self.ffn(self.norm2(x)), self.p, self.training))
        return x + 0.01 * torch.randn_like(x) if self.training else x


class Net(nn.Module):
    """Token ids (batch, seq) -> logits (batch, seq, vocabulary)."""

    def __init__(self, p: float = 0.2, fused: bool = False, layers: int = LAYERS) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.drop = nn.Dropout(p)
        self.blocks = nn.ModuleList(Block(p, fused) for _ in range(layers))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> Any:
        x = self.drop(self.embed(input_ids))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
