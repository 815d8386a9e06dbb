"""`shrink`: a model small enough to run on a few CPU cores, on which a plan does the same things. Pure, no torch."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from shardwise.model.spec import ModelSpec
from shardwise.plan.plan import Plan

HEAD_DIMS = ((16, 8), (32, 4), (1 << 30, 2))
"""Width of a head, by the number of heads: even, for rotary positions."""
LARGE = 5_000_000
"""Parameters from which `verify` shrinks a model without being asked."""
MIN_LAYERS, MIN_VOCAB, MAX_SEQ = 4, 64, 64


def shrink(spec: ModelSpec, plan: Plan, *, vocab_size: int | None = None) -> ModelSpec:
    """The same kind of model with few layers, narrow ones and a short vocabulary.

    What a plan meets stays: ties, the ratio of query to key heads, that of the feed-forward to the width, the
    number of experts a token is sent to, and whether a degree divides a size.

    Args:
        spec: the model.
        plan: its degrees: each stage keeps a block, each rank of `tp` a head, each of `ep` an expert.
        vocab_size: to keep, where a tokenizer gives it.

    >>> from shardwise.model.spec import preset
    >>> small = shrink(preset("llama-8b"), Plan.parse("tp2"))
    >>> small.num_heads, small.num_kv_heads, small.num_layers, small.num_params
    (8, 2, 4, 221760)
    """
    axes = plan.axes
    ranks = axes.tp * axes.cp
    kv_heads = _least(spec.num_kv_heads, ranks, at_least=2)
    heads = kv_heads * (spec.num_heads // spec.num_kv_heads)
    head_dim = min(spec.head_dim, next(width for most, width in HEAD_DIMS if heads <= most))
    plain = spec.head_dim * spec.num_heads == spec.dim
    dim = heads * head_dim if plain else _near(heads * head_dim * spec.dim / (spec.head_dim * spec.num_heads), 8)
    small = replace(
        spec,
        name=f"{spec.name}, shrunk",
        num_layers=min(spec.num_layers, max(MIN_LAYERS, axes.pp * plan.schedule.stages)),
        dim=dim,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_dim=_near(dim * spec.ffn_dim / spec.dim, 8 * ranks),
        vocab_size=vocab_size or min(spec.vocab_size, _near(MIN_VOCAB, ranks)),
        max_seq_len=min(spec.max_seq_len, MAX_SEQ),
    )
    if not spec.num_experts:
        return small
    return replace(small, num_experts=_least(spec.num_experts, axes.ep, at_least=2 * spec.experts_per_token))


def describe_shrink(before: ModelSpec, after: ModelSpec) -> str:
    """What was made smaller, for reports.

    >>> from shardwise.model.spec import preset
    >>> spec = preset("llama-8b")
    >>> describe_shrink(spec, replace(spec, num_layers=1))
    'num_layers 32 -> 1'
    """
    names = ("num_layers", "dim", "num_heads", "num_kv_heads", "head_dim", "ffn_dim", "vocab_size", "max_seq_len")
    pairs = [(name, getattr(before, name), getattr(after, name)) for name in (*names, "num_experts")]
    return ", ".join(f"{name} {old:,} -> {new:,}" for name, old, new in pairs if old != new)


def _least(size: int, degree: int, *, at_least: int) -> int:
    """The smallest divisor of a size that a degree divides as it divides the size itself."""
    step = gcd(size, degree)
    return next(d for d in range(min(size, max(step, at_least)), size + 1) if size % d == 0 and d % step == 0)


def _near(size: float, step: int) -> int:
    return max(1, round(size / step)) * step
