"""The operators that a `Profile` is made of, in sizes that no layout changes.

Elements per token, where nothing else is said.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Split = Literal["none", "sequence", "column", "row", "heads"]
"""What `tp` does to an operator: nothing; shards its tokens where the plan shards sequences; shards its outputs; its
inputs (which sums over ranks); its heads or hidden sizes."""


@dataclass(frozen=True, slots=True)
class Matmul:
    """`[tokens, ins] x [ins, outs]`. With `experts`, each token meets `chosen` of so many products of these sizes."""

    name: str
    ins: int
    outs: int
    split: Split = "none"
    saves: float = 0
    """Elements that it keeps per token for the backward pass: its input, where nobody else keeps it."""
    experts: int = 0
    chosen: int = 0
    trained: bool = True
    """False: no product for the weight's gradient, and no input kept."""
    rows: float = 1.0
    """Rows per token (and choice): of what is computed once per sample less, of the places of a picture or of a weight
    that is used several times more."""
    overlap: float = 1.0
    """How often it reads an element of its input: windows of a convolution overlap."""
    covers: float = 1.0
    """How often it adds to an element of its output: windows of a transposed convolution overlap."""
    own: bool = True
    """False: its weight is counted elsewhere, or is computed."""
    biased: bool = False
    """Its kernel adds a vector to the result."""
    parts: int = 1
    """Products of the module that are counted as this one: queries, keys and values; gate and up."""
    again: bool = False
    """Per-operator recompute runs it again: torch does not list its kernel among the costly ones."""

    @property
    def params(self) -> int:
        """Elements of the weight (of all experts)."""
        return self.ins * self.outs * max(self.experts, 1) if self.own else 0

    @property
    def takes(self) -> float:
        """Elements of its input per token."""
        return self.ins * self.rows * max(self.chosen, 1) / self.overlap

    @property
    def gives(self) -> float:
        """Elements of its output per token."""
        return self.made / self.covers

    @property
    def made(self) -> float:
        """Sums of `ins` products per token, of which its output is made."""
        return self.outs * self.rows * max(self.chosen, 1)


@dataclass(frozen=True, slots=True)
class Attention:
    """Softmax attention of `heads` queries over `kv_heads` keys and values."""

    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    causal: bool = True
    window: int = 0
    dropout: bool = False
    name: str = "attention"
    split: Split = "heads"
    kept: float = 0
    """Elements per token that a forward was seen to keep; 0: none was seen."""
    rows: float = 1.0
    """Queries per token."""
    reach: float = 1.0
    """Keys per token of the sequence: of windows less, of an encoder's output other than one."""
    scores: float = 0
    """Elements per token of the scores of one that is written out in products, where per-operator recompute keeps them;
    0: no fused kernel has them."""

    @property
    def saves(self) -> float:
        """Fused: queries, keys, values and the output (the log-sum-exp is counted in bytes by `plan.memory`)."""
        return self.kept or self.heads * (self.qk_dim + self.v_dim) + self.kv_heads * (self.qk_dim + self.v_dim)


@dataclass(frozen=True, slots=True)
class Pointwise:
    """An operator bound by memory: norm, activation, rotation, residual sum, dropout, router."""

    name: str
    moved: float
    """Elements read and written in the forward pass, in one kernel."""
    split: Split
    saves: float = 0
    """Kept by a fused kernel."""
    saves_apart: float = 0
    """Kept where each primitive is a kernel of its own."""
    kernels: int = 1
    """Kernels of the primitives; a fused one is one."""
    masks: float = 0
    """Bytes of dropout masks."""
    per_choice: int = 0
    """Experts per token, for an operator on routed tokens: it happens for each choice. 0: once per token."""
    upcast: bool = False
    """The primitives work in fp32: the first `saves` of what they keep has 4 bytes."""
    widened: float = 0
    """Bytes that the primitives keep in 16 bits beyond 2 per element of `saves_apart`, read off a forward: copies in
    fp32."""
    spread: float = 0
    """Elements of which a batch norm takes statistics, over the rows of all data ranks."""


Op = Matmul | Attention | Pointwise


def attention_flops(op: Attention, seq_len: float) -> float:
    """Operations of one attention per query token: two products over the keys that it sees, on average."""
    return 2.0 * op.heads * (op.qk_dim + op.v_dim) * seen(op, seq_len)


def seen(op: Attention, seq_len: float) -> float:
    """Keys that a query sees, on average over a sequence."""
    keys = seq_len / 2 if op.causal else float(seq_len)
    if op.window and op.window < seq_len:
        early = op.window / 2 if op.causal else float(op.window)
        keys = (op.window * early + (seq_len - op.window) * op.window) / seq_len
    return keys
