"""The parameters of the reference models as shapes: which are gathered together, and how `tp` and `ep` cut them.

Numbers of parameters are enough for memory; what is sent depends on shapes too, as each parameter is cut along one dim
(`sharded_dim`), and a first dim is filled up to a multiple of the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal

from shardwise.errors import ModelError
from shardwise.model.spec import ModelSpec
from shardwise.plan.plan import Plan
from shardwise.plan.ranks.division import sharded_dim

Cut = Literal["none", "out", "in", "tokens", "heads", "experts"]
"""What `tp` does to a parameter: nothing; its first dim is cut; its second; it is whole and, where sequences are
sharded, each rank has a summand of its gradient; it is whole and each rank has a summand always; `ep` cuts it."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter."""

    name: str
    shape: tuple[int, ...]
    cut: Cut = "none"

    def local(self, plan: Plan) -> tuple[int, ...]:
        """Its shape on a rank, before data axes shard it."""
        if self.cut not in ("out", "in", "experts"):
            return self.shape  # of a number too, which has no dims
        tp, ep = plan.axes.tp, plan.axes.ep
        first, *rest = self.shape
        if self.cut == "in":
            return (first, rest[0] // tp, *rest[1:])
        return (first // (ep if self.cut == "experts" else tp), *rest)

    @property
    def is_linear(self) -> bool:
        """Whether a linear layer multiplies by it."""
        return len(self.shape) == 2 and (self.name == "head" or (self.cut in ("out", "in") and self.name != "embed"))

    def is_summand(self, plan: Plan) -> bool:
        """Whether the ranks of `tp` must add up its gradient."""
        if plan.axes.tp == 1:
            return False
        if self.cut == "experts":
            return plan.axes.ep == 1  # whole on every rank, which works on a share of the tokens
        return self.cut == "heads" or (self.cut == "tokens" and plan.tensor.sequence)

    def padded(self, plan: Plan, ranks: int) -> int:
        """Elements on a rank before `ranks` shard it, filled up so that they divide the dim that is cut."""
        shape = self.local(plan)
        if sharded_dim(shape, ranks):
            return prod(shape)
        first, *rest = shape
        return -(-first // ranks) * ranks * prod(rest)


@dataclass(frozen=True, slots=True)
class Weights:
    """All parameters of a model, each part in the order in which it is registered."""

    before: tuple[Weight, ...]
    block: tuple[Weight, ...]
    after: tuple[Weight, ...]
    tied: bool
    """The head is the first weight of `before`; then `after` does not list it."""


@lru_cache(maxsize=256)
def weights_of(spec: ModelSpec) -> Weights:
    """The parameters of the reference model of a spec.

    Raises:
        ModelError: the spec has a part that no reference model has.

    >>> from shardwise.model.spec import preset
    >>> len(weights_of(preset("llama-8b")).block)
    9
    """
    _refuse_other_parts(spec)
    dim = spec.dim
    table = Weight("embed", (spec.vocab_size, dim), "out")
    head = () if spec.tie_embeddings else (Weight("head", (spec.vocab_size, dim), "out"),)
    if spec.kind == "gpt":
        positions = Weight("positions", (spec.max_seq_len, dim))
        last = (Weight("norm", (dim,)), Weight("norm.bias", (dim,)), *head)
        return Weights((table, positions), tuple(_gpt_block(spec)), last, spec.tie_embeddings)
    block = (*_attention(spec), Weight("ffn_norm", (dim,), "tokens"), *_feed_forward(spec))
    return Weights((table,), block, (Weight("norm", (dim,)), *head), spec.tie_embeddings)


def _refuse_other_parts(spec: ModelSpec) -> None:
    if spec.other_parts:
        raise ModelError(
            f"traffic: model {spec.name}: found {', '.join(spec.other_parts)}, which no reference model of kind "
            f"{spec.kind!r} has; needed one of the reference models, whose messages are known exactly: trace your "
            "module with `shardwise.diagnose.tracing.step.trace_step`"
        )


def _linear(name: str, shape: tuple[int, int], cut: Cut, bias: bool) -> list[Weight]:
    """With its bias, which a row layer has whole."""
    found = [Weight(name, shape, cut)]
    if bias:
        found.append(Weight(f"{name}.bias", shape[:1], "out" if cut == "out" else "none"))
    return found


def _attention(spec: ModelSpec) -> list[Weight]:
    dim, size, bias = spec.dim, spec.head_dim, spec.qkv_bias
    width, kv_width = spec.num_heads * size, spec.num_kv_heads * size
    found = [Weight("attn_norm", (dim,), "tokens")]
    for name, outs in (("wq", width), ("wk", kv_width), ("wv", kv_width)):
        found += _linear(name, (outs, dim), "out", bias)
    found += _linear("wo", (dim, width), "in", False)
    if spec.qk_norm:
        found += [Weight("q_norm", (size,), "heads"), Weight("k_norm", (size,), "heads")]
    return found


def _feed_forward(spec: ModelSpec) -> list[Weight]:
    dim, width, count = spec.dim, spec.ffn_dim, spec.num_experts
    if spec.kind == "moe":
        wide = (count, width, dim)
        experts = (Weight("w1", wide, "experts"), Weight("w2", (count, dim, width), "experts"))
        return [Weight("router", (count, dim), "tokens"), *experts, Weight("w3", wide, "experts")]
    return [Weight("w1", (width, dim), "out"), Weight("w2", (dim, width), "in"), Weight("w3", (width, dim), "out")]


def _gpt_block(spec: ModelSpec) -> list[Weight]:
    dim, width = spec.dim, spec.ffn_dim
    found = [Weight("ln_1", (dim,), "tokens"), Weight("ln_1.bias", (dim,), "tokens")]
    for name in ("q", "k", "v"):
        found += _linear(name, (dim, dim), "out", True)
    found += _linear("proj", (dim, dim), "in", True)
    found += [Weight("ln_2", (dim,), "tokens"), Weight("ln_2.bias", (dim,), "tokens")]
    return [*found, *_linear("fc", (width, dim), "out", True), *_linear("down", (dim, width), "in", True)]
