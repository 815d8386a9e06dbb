"""The reference decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no bias. Plain PyTorch.

Head counts are read off the shapes in `forward`, so that a rank which holds some of the heads runs the same code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from shardwise.errors import ConfigError
from shardwise.models.weights import fill_weights


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes of a `Decoder`. The defaults make the byte-level model that `shardwise train` trains (3 M parameters).

    Raises:
        ConfigError: heads that do not fit.
    """

    vocab_size: int = 256
    dim: int = 256
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 4
    ffn_dim: int = 704
    max_seq_len: int = 1024
    head_dim: int = 0
    """0: `dim / num_heads`."""
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    tie_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    init_std: float = 0.02

    def __post_init__(self) -> None:
        if not self.head_dim and self.dim % self.num_heads:
            raise ConfigError(
                f"dim={self.dim} is not a multiple of num_heads={self.num_heads}; give head_dim or change one"
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}; change one"
            )
        object.__setattr__(self, "head_dim", self.head_dim or self.dim // self.num_heads)
        if self.head_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim} is odd; rotary positions turn pairs, so it must be even")


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions: (batch, seq, dim) to (batch, seq, dim)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.rope_theta = config.rope_theta
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.wq = nn.Linear(config.dim, width, bias=config.qkv_bias)
        self.wk = nn.Linear(config.dim, kv_width, bias=config.qkv_bias)
        self.wv = nn.Linear(config.dim, kv_width, bias=config.qkv_bias)
        self.wo = nn.Linear(width, config.dim, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else nn.Identity()

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor | None = None, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attend to the same and earlier tokens, or to those that the mask (batch, 1, seq, seq) shows."""
        batch, seq = x.shape[:2]
        q = self.q_norm(self.wq(x).view(batch, seq, -1, self.head_dim))
        k = self.k_norm(self.wk(x).view(batch, seq, -1, self.head_dim))
        v = self.wv(x).view(batch, seq, -1, self.head_dim).transpose(1, 2)
        cos, sin = rotary_tables(q, self.rope_theta, position_ids)
        q, k = rotate(q, cos, sin).transpose(1, 2), rotate(k, cos, sin).transpose(1, 2)
        repeats = q.shape[1] // k.shape[1]
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        out: torch.Tensor = self.wo(y.transpose(1, 2).reshape(batch, seq, -1))
        return out


def rotary_tables(
    x: torch.Tensor, theta: float, position_ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of position times frequency, each ([batch,] seq, 1, head_dim / 2), at least in fp32.

    Positions are 0, 1, ... unless `position_ids`, (batch, seq), says otherwise.

    Made in every layer from the shape of its input (a few small operations), so that a pipeline stage that holds
    some layers only needs nothing from the others. Formula: RoFormer (Su et al. 2021), eq. 34, pairs split in halves.
    """
    make = _whole_tables if torch.compiler.is_compiling() else _tables
    tables: tuple[torch.Tensor, torch.Tensor] = make(
        x.shape[1], x.shape[-1] // 2, theta, position_ids, x.dtype == torch.float64, x.device
    )
    return tables


def _tables(
    seq: int, half: int, theta: float, position_ids: torch.Tensor | None, wide: bool, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.float64 if wide else torch.float32
    exponents = torch.arange(half, device=device, dtype=dtype) / half
    positions = torch.arange(seq, device=device, dtype=dtype) if position_ids is None else position_ids.to(dtype)
    angles = (positions[..., None] * theta**-exponents)[..., None, :]
    return angles.cos(), angles.sin()


# Opaque to a compiler: it would compute a power, a sine and a cosine anew for every element that is turned, in both
# passes, which takes ten times as long as moving the elements (an eighth of a Llama block on an H200).
_whole_tables = torch.library.custom_op("shardwise::rotary_tables", _tables, mutates_args=())
_whole_tables.register_fake(_tables)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each pair (i, i + head_dim / 2) of (batch, seq, heads, head_dim) by its angle."""
    a, b = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


def document_mask(document_ids: torch.Tensor) -> torch.Tensor:
    """(batch, seq) document numbers to a mask (batch, 1, seq, seq): True for the same and earlier tokens of a document.

    Cost: batch x seq^2 bytes.
    """
    same = document_ids[:, :, None] == document_ids[:, None, :]
    return same.tril()[:, None]


class FeedForward(nn.Module):
    """SwiGLU: `w2(silu(w1 x) * w3 x)`."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, seq, dim) to the same."""
        out: torch.Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class DecoderBlock(nn.Module):
    """One layer: attention and feed-forward, each after a norm and added to its input."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attn = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn = FeedForward(config)

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor | None = None, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """(batch, seq, dim) to the same."""
        x = x + self.attn(self.attn_norm(x), position_ids, mask)
        out: torch.Tensor = x + self.ffn(self.ffn_norm(x))
        return out


class Decoder(nn.Module):
    """A decoder-only transformer.

    >>> model = Decoder(DecoderConfig(dim=32, num_layers=1, num_heads=4, num_kv_heads=2, ffn_dim=48))
    >>> model(torch.zeros(2, 5, dtype=torch.long)).shape
    torch.Size([2, 5, 256])
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(DecoderBlock(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights, smaller by sqrt(2 layers) where a layer adds to the residual stream; ones; zero biases."""
        fill_weights(self, self.config.init_std, self.config.num_layers, (".wo.weight", ".w2.weight"))

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(batch, seq) token numbers to (batch, seq, vocab) logits.

        Args:
            input_ids: the tokens.
            position_ids: (batch, seq) int64, their positions; None: 0, 1, ...
            document_ids: (batch, seq) int64, of packed documents: tokens see those of their own document only.
        """
        mask = None if document_ids is None else document_mask(document_ids)
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, position_ids, mask)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def flops_per_token(config: DecoderConfig, seq_len: int) -> int:
    """Floating-point operations of matrix products per token, forward and backward, without recompute.

    6 per weight that multiplies (2 forward, 4 backward; the embedding look-up is none), and
    `12 seq_len heads head_dim` per layer for attention scores and values. The causal half counts in full: the
    convention of published MFU (PaLM, Chowdhery et al. 2022, appendix B).
    """
    weights = config.num_layers * _layer_matmul_params(config) + config.vocab_size * config.dim
    return 6 * weights + 12 * config.num_layers * seq_len * config.num_heads * config.head_dim


def _layer_matmul_params(config: DecoderConfig) -> int:
    attention = 2 * config.dim * (config.num_heads + config.num_kv_heads) * config.head_dim
    return attention + 3 * config.dim * config.ffn_dim
