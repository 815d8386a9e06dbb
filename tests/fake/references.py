"""The reference models in sizes of a test's own."""

from __future__ import annotations

from typing import Any

from shardwise.model.spec import ModelSpec


def references(*, experts: int = 6, **sizes: Any) -> dict[str, ModelSpec]:
    """A Llama, one with ties, biases and norms of queries and keys, a GPT, and a mixture of experts."""
    return {
        "llama": ModelSpec(**sizes, num_kv_heads=2),
        "tied": ModelSpec(**sizes, num_kv_heads=2, tie_embeddings=True, qkv_bias=True, qk_norm=True),
        "gpt": ModelSpec(**sizes, kind="gpt"),
        "moe": ModelSpec(**sizes, kind="moe", num_kv_heads=2, num_experts=experts, experts_per_token=2),
    }
