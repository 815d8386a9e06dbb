"""A GPT-2-like decoder: LayerNorm, learned positions, multi-head attention, GELU, biases. Plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from shardwise.errors import ConfigError
from shardwise.models.weights import fill_weights


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Sizes of a `GPT`.

    Raises:
        ConfigError: heads that do not fit.
    """

    vocab_size: int = 256
    dim: int = 128
    num_layers: int = 4
    num_heads: int = 4
    max_seq_len: int = 256
    ffn_dim: int = 0
    """0: `4 * dim`."""
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    init_std: float = 0.02

    def __post_init__(self) -> None:
        if self.dim % self.num_heads:
            raise ConfigError(f"dim={self.dim} is not a multiple of num_heads={self.num_heads}; change one of them")
        object.__setattr__(self, "ffn_dim", self.ffn_dim or 4 * self.dim)


class GPTAttention(nn.Module):
    """Causal multi-head attention: (batch, seq, dim) to the same."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.num_heads
        self.q = nn.Linear(config.dim, config.dim)
        self.k = nn.Linear(config.dim, config.dim)
        self.v = nn.Linear(config.dim, config.dim)
        self.proj = nn.Linear(config.dim, config.dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend to the same and earlier positions."""
        batch, seq = x.shape[:2]
        q, k, v = (layer(x).view(batch, seq, -1, self.head_dim).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.proj(y.transpose(1, 2).reshape(batch, seq, -1))
        return out


class MLP(nn.Module):
    """`proj(gelu(fc x))`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(config.dim, config.ffn_dim)
        self.proj = nn.Linear(config.ffn_dim, config.dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, seq, dim) to the same."""
        out: torch.Tensor = self.proj(F.gelu(self.fc(x), approximate="tanh"))
        return out


class GPTBlock(nn.Module):
    """One layer: attention and feed-forward, each after a norm and added to its input."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.attn = GPTAttention(config)
        self.ln_2 = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, seq, dim) to the same."""
        x = x + self.attn(self.ln_1(x))
        out: torch.Tensor = x + self.mlp(self.ln_2(x))
        return out


class GPT(nn.Module):
    """A GPT-2-like decoder.

    >>> GPT(GPTConfig(dim=32, num_layers=1))(torch.zeros(2, 5, dtype=torch.long)).shape
    torch.Size([2, 5, 256])
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.dim)
        self.wpe = nn.Embedding(config.max_seq_len, config.dim)
        self.h = nn.ModuleList(GPTBlock(config) for _ in range(config.num_layers))
        self.ln_f = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.wte.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights, smaller by sqrt(2 layers) where a layer adds to the residual stream; ones; zero biases."""
        fill_weights(self, self.config.init_std, self.config.num_layers, (".proj.weight",))

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        """(batch, seq) token numbers to (batch, seq, vocab) logits.

        `position_ids`, (batch, seq) int64 below `max_seq_len`, are 0, 1, ... unless they are given.
        """
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.wte(input_ids) + self.wpe(position_ids)
        for block in self.h:
            x = block(x)
        logits: torch.Tensor = self.lm_head(self.ln_f(x))
        return logits


def gpt_flops_per_token(config: GPTConfig, seq_len: int) -> int:
    """Floating-point operations of matrix products per token, forward and backward: see `decoder.flops_per_token`."""
    layer = 4 * config.dim**2 + 2 * config.dim * config.ffn_dim
    weights = config.num_layers * layer + config.vocab_size * config.dim
    return 6 * weights + 12 * config.num_layers * seq_len * config.dim
