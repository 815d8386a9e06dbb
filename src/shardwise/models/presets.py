"""From a `ModelSpec` (sizes as data) to a factory of the reference model with those sizes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from shardwise.errors import ModelError
from shardwise.model.spec import ModelSpec
from shardwise.models.decoder import Decoder, DecoderConfig, flops_per_token
from shardwise.models.gpt import GPT, GPTConfig, gpt_flops_per_token


def build(spec: ModelSpec) -> Callable[[], nn.Module]:
    """A factory of the model that a spec describes.

    Raises:
        ModelError: a kind that the reference models do not have.

    >>> build(preset("tiny-llama"))  # doctest: +SKIP
    functools.partial(<class 'shardwise.models.decoder.Decoder'>, DecoderConfig(...))
    """
    if spec.kind == "gpt":
        return partial(GPT, gpt_config(spec))
    return partial(Decoder, decoder_config(spec))


def training_flops_per_token(spec: ModelSpec, seq_len: int) -> int:
    """Matrix-product operations per token of the reference model of a spec: see `decoder.flops_per_token`."""
    if spec.kind == "gpt":
        return gpt_flops_per_token(gpt_config(spec), seq_len)
    return flops_per_token(decoder_config(spec), seq_len)


def decoder_config(spec: ModelSpec) -> DecoderConfig:
    """The decoder's sizes.

    Raises:
        ModelError: a mixture of experts.
    """
    if spec.kind != "llama":
        raise ModelError(
            f"model {spec.name}: its kind is {spec.kind!r} ({spec.num_experts} experts); the reference decoder "
            f"has dense feed-forward layers only; plan with this preset, and train your own module through "
            f"`--model pkg.mod:factory`"
        )
    return DecoderConfig(
        vocab_size=spec.vocab_size,
        dim=spec.dim,
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        ffn_dim=spec.ffn_dim,
        max_seq_len=spec.max_seq_len,
        head_dim=spec.head_dim,
        tie_embeddings=spec.tie_embeddings,
        qkv_bias=spec.qkv_bias,
        qk_norm=spec.qk_norm,
    )


def gpt_config(spec: ModelSpec) -> GPTConfig:
    """The GPT's sizes.

    Raises:
        ModelError: head sizes, shared key heads or head norms that this model does not have.
    """
    plain = spec.num_kv_heads == spec.num_heads and spec.head_dim * spec.num_heads == spec.dim
    if spec.kind != "gpt" or not plain or spec.qk_norm:
        raise ModelError(
            f"model {spec.name}: found kind={spec.kind!r}, num_kv_heads={spec.num_kv_heads}, head_dim={spec.head_dim}, "
            f"qk_norm={spec.qk_norm}; the GPT has as many key heads as heads, dim / num_heads each, no head norm; "
            f"use kind='llama', or your own module through `--model pkg.mod:factory`"
        )
    return GPTConfig(
        vocab_size=spec.vocab_size,
        dim=spec.dim,
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        max_seq_len=spec.max_seq_len,
        ffn_dim=spec.ffn_dim,
        tie_embeddings=spec.tie_embeddings,
    )
