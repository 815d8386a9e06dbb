"""From a `ModelSpec` (sizes as data) to a factory of the reference model with those sizes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from shardwise.errors import ModelError
from shardwise.model.spec import ModelSpec, refuse_unbuilt
from shardwise.models.decoder import Decoder, DecoderConfig, flops_per_token
from shardwise.models.gpt import GPT, GPTConfig, gpt_flops_per_token
from shardwise.models.moe import MoEConfig, MoEDecoder
from shardwise.models.moe import flops_per_token as moe_flops_per_token


def build(spec: ModelSpec) -> Callable[[], nn.Module]:
    """A factory of the model that a spec describes.

    Raises:
        ModelError: a part that the reference models do not have (`ModelSpec.other_parts`), or head sizes.

    >>> build(preset("tiny-llama"))  # doctest: +SKIP
    functools.partial(<class 'shardwise.models.decoder.Decoder'>, DecoderConfig(...))
    """
    refuse_unbuilt(spec)
    if spec.kind == "gpt":
        return partial(GPT, gpt_config(spec))
    if spec.kind == "moe":
        return partial(MoEDecoder, moe_config(spec))
    return partial(Decoder, decoder_config(spec))


def training_flops_per_token(spec: ModelSpec, seq_len: int) -> int:
    """Matrix-product operations per token of the reference model of a spec: see `decoder.flops_per_token`."""
    if spec.kind == "gpt":
        return gpt_flops_per_token(gpt_config(spec), seq_len)
    if spec.kind == "moe":
        return moe_flops_per_token(moe_config(spec), seq_len)
    return flops_per_token(decoder_config(spec), seq_len)


def decoder_config(spec: ModelSpec) -> DecoderConfig:
    """The decoder's sizes.

    Raises:
        ModelError: another kind than `llama`.
    """
    if spec.kind != "llama":
        raise ModelError(
            f"model {spec.name}: its kind is {spec.kind!r}; the dense decoder is of kind 'llama'; use build(spec), "
            "which knows all kinds"
        )
    return DecoderConfig(**_sizes(spec))


def moe_config(spec: ModelSpec) -> MoEConfig:
    """The sizes of the decoder with experts. Scores are softmax over all experts, weights sum to one: as in Mixtral.

    Raises:
        ModelError: another kind than `moe`.
    """
    if spec.kind != "moe":
        raise ModelError(
            f"model {spec.name}: its kind is {spec.kind!r}, which has no experts; use build(spec), which knows all "
            "kinds"
        )
    return MoEConfig(num_experts=spec.num_experts, experts_per_token=spec.experts_per_token, **_sizes(spec))


def _sizes(spec: ModelSpec) -> dict[str, Any]:
    names = ("vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim", "max_seq_len", "head_dim")
    return {name: getattr(spec, name) for name in (*names, "tie_embeddings", "qkv_bias", "qk_norm")}


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
