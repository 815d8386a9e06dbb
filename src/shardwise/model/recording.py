"""What one forward of a module did, and what autograd keeps of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.model.experts import BY_GROUP
from shardwise.model.nested import Path
from shardwise.model.ops import Attention

BEFORE, AFTER = -1, 1 << 30
"""Phases of a forward that are no block's; a block's phase is its number."""

LISTED = ("mm", "addmm", "bmm", "linear", "convolution")
"""Products whose results per-operator recompute keeps; a sum with products of a batch (`baddbmm`) is none of them."""


class Call(NamedTuple):
    """One operation: tensors in, tensors out."""

    name: str
    given: list[torch.Tensor]
    gave: list[torch.Tensor]
    phase: int
    flops: int = 0
    """Of a product, as torch counts them."""


@dataclass
class Node:
    """A recorded operation; memory goes by the address of its storage."""

    name: str
    phase: int
    ins: dict[int, float]
    """Storage -> elements read."""
    outs: dict[int, float]
    weight: str = ""
    rows: float = 0.0
    """Of a product, so many of `sizes[0]` elements against a matrix of `sizes`."""
    sizes: tuple[int, int] = (0, 0)
    batch: int = 1
    """Products of computed operands in one call."""
    taken: int = 0
    """Elements of a product's input."""
    attention: Attention | None = None
    bool_outs: dict[int, int] = field(default_factory=dict)

    @property
    def is_matmul(self) -> bool:
        """A product with a parameter."""
        return bool(self.weight)

    @property
    def again(self) -> bool:
        """Per-operator recompute runs it again."""
        return self.name not in LISTED


@dataclass
class Recording:
    """Everything that one forward did."""

    tokens: int
    samples: int
    parameters: dict[int, str]
    """Storage -> name."""
    shapes: dict[str, tuple[int, ...]]
    frozen: frozenset[str]
    """Parameters without a gradient."""
    width: int
    """Bytes of an element of what is computed with."""
    unused: frozenset[str] = frozenset()
    """Those of `frozen` that nobody froze: forward does not use them."""
    by_group: frozenset[str] = frozenset()
    """Stacks whose products are grouped ones in a real step, which per-operator recompute runs again."""
    nodes: list[Node] = field(default_factory=list)
    saved: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)
    """Phase -> storage -> a tensor in it that autograd keeps."""
    used: dict[str, int] = field(default_factory=dict)
    """Parameter -> the phase that used it first."""
    sources: dict[int, Node] = field(default_factory=dict)
    """Storage -> the product that it is made from, through element-wise operations alone."""
    casts: dict[int, int] = field(default_factory=dict)
    """Storage -> the one that it is a copy of in another type: in fp32 throughout the two are one."""
    alive: list[torch.Tensor] = field(default_factory=list)
    held: set[int] = field(default_factory=set)
    """Storages that some phase was given: a later one that keeps them too keeps the same bytes."""
    inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    """Storage -> what forward was given; a step holds it anyway."""
    entered: dict[int, int] = field(default_factory=dict)
    """Block -> elements of its input."""
    streams: dict[int, dict[Path, torch.Tensor]] = field(default_factory=dict)
    """Block -> its floating inputs but for the first, in its first call."""
    calls: list[int] = field(default_factory=list)
    """Blocks in the order in which they are called."""
    fed_apart: set[int] = field(default_factory=set)
    """Blocks that are trained and whose inputs have no gradient."""
    given_out: int = 0
    """Elements of what forward returns, and a loss takes."""

    @classmethod
    def of(cls, module: nn.Module, shape: tuple[int, int]) -> Recording:
        """For one forward of a module on so many samples, of so many tokens together."""
        named = dict(module.named_parameters())
        experts = [(path, inner) for path, inner in module.named_modules() if hasattr(inner, BY_GROUP)]
        floats = [p.element_size() for p in named.values() if p.is_floating_point()]
        return cls(
            samples=shape[0],
            tokens=shape[1],
            parameters={key_of(p): name for name, p in named.items()},
            shapes={name: tuple(p.shape) for name, p in named.items()},
            frozen=frozenset(name for name, p in named.items() if not p.requires_grad),
            width=max(floats, default=4),
            by_group=frozenset(f"{path}.{name}" for path, inner in experts for name, _ in inner.named_parameters()),
        )

    def keep(self, tensor: torch.Tensor, phase: int) -> None:
        """Autograd keeps a tensor."""
        key = key_of(tensor)
        if key in self.inputs and not tensor.is_floating_point():
            return
        if self.origin(key) not in self.parameters and key not in self.held:
            self.held.add(key)
            self.saved.setdefault(phase, {})[key] = tensor

    def beside(self, phase: int) -> float:
        """Elements of a block's further inputs that the block before it was not given: of the first, as the next one's.

        A condition, or positions, that all blocks are given are kept once.
        """
        own, last = self.streams.get(phase, {}), max(self.streams, default=0)
        pair = (0, 1) if phase == 0 < last else (phase - 1, phase)
        before, there = (self.streams.get(index, {}) for index in pair)
        keys = {key_of(tensor) for tensor in before.values()}
        new = [path for path, tensor in there.items() if key_of(tensor) not in keys]
        return float(sum(own[path].numel() for path in new if path in own)) if phase or last else 0.0

    def facts(self, index: int, own: Sequence[str]) -> dict[str, Any]:
        """What a `Block` with these parameters says of itself beside its operators."""
        calls = max(1, self.calls.count(index))
        return {"apart": index in self.fed_apart, "calls": calls, "tensors": self.tensors_of(own)}

    def tensors_of(self, names: Iterable[str]) -> tuple[int, ...]:
        """Elements of those of these parameters that nobody froze."""
        return tuple(math.prod(self.shapes[name]) for name in names if name not in self.frozen - self.unused)

    def operation(self, call: Call) -> None:
        """An operation was run."""
        ins = {key_of(t): float(t.numel()) for t in call.given}
        for name in filter(None, map(self.name_of, call.given)):
            self.used.setdefault(name, call.phase)
        new = [t for t in call.gave if key_of(t) not in ins]
        written = [t for t in call.gave if key_of(t) in ins] if call.name.endswith("_") else []
        if not new and not written:
            self.alive.extend(call.gave)
            return  # a view
        self.alive.extend((*call.given, *new))  # the address of one that is freed would be another's
        if call.name == "_to_copy" and all(t.is_floating_point() for t in (*call.given, *new)):
            self.casts.update((key_of(t), self.origin(key_of(call.given[0]))) for t in new)
        outs = {key_of(t): float(t.numel()) for t in (*new, *written)}
        node = Node(call.name, call.phase, ins, outs)
        node.bool_outs = {key_of(t): t.numel() for t in new if t.dtype is torch.bool}
        weight = next((t for t in call.given[::-1] if self.name_of(t) and t.dim() > 1), None)
        if call.flops:
            _product(node, call, weight)
            node.weight = self.name_of(weight) if weight is not None else ""
        source = node if node.is_matmul else next((self.sources[k] for k in ins if k in self.sources), None)
        if source is not None:
            self.sources.update(dict.fromkeys(outs, source))
        self.nodes.append(node)

    def origin(self, key: int) -> int:
        """The storage that one is a copy of, or itself."""
        return self.casts.get(key, key)

    def name_of(self, tensor: torch.Tensor) -> str:
        """The parameter that a tensor is, or is a copy of; empty: none."""
        return self.parameters.get(self.origin(key_of(tensor)), "")

    def attention(self, op: Attention, given: Sequence[torch.Tensor], out: torch.Tensor, phase: int) -> None:
        """Fused attention was called: it keeps what it is given, and its output."""
        self.alive.append(out)
        for name in filter(None, map(self.name_of, given)):
            self.used.setdefault(name, phase)
        kept = {key_of(t): t.untyped_storage().nbytes() // t.element_size() for t in (*given, out)}
        shape, length = given[0].shape, self.tokens / self.samples
        rows = math.prod(shape[:-3]) * shape[-2] / self.tokens
        op = replace(op, kept=sum(kept.values()) / self.tokens, rows=rows, reach=given[1].shape[-2] / length)
        ins = {key_of(t): float(t.numel()) for t in given}
        self.nodes.append(Node("attention", phase, ins, {key_of(out): float(out.numel())}, attention=op))

    def kv_heads(self, query: torch.Tensor, key: torch.Tensor) -> int:
        """Heads of the keys before they were repeated: from the width of the product that made them."""
        heads, size = query.shape[-3], query.shape[-1]
        source = self.sources.get(key_of(key))
        if key.shape[-3] != heads or source is None:
            return int(key.shape[-3])
        if self.sources.get(key_of(query)) is not source:
            own = source.sizes[1] // size
        else:
            own = (source.sizes[1] // size - heads) // 2  # one product of queries, keys and values
        return own if 0 < own <= heads and heads % own == 0 else heads


def _product(node: Node, call: Call, weight: torch.Tensor | None) -> None:
    """Sizes of a product with a parameter, or of computed operands, from its operations."""
    others = [t for t in call.given if t is not weight and t.dim() > 1]
    if weight is None:
        node.sizes = (others[-2].shape[-1], others[-1].shape[-1])
        node.batch = math.prod(call.gave[0].shape[:-2])
    elif call.name == "convolution":
        node.sizes = (weight.numel() // weight.shape[0], weight.shape[0])
    else:
        node.sizes = (weight.shape[-2], weight.shape[-1])
    node.rows = call.flops / (2 * node.sizes[0] * node.sizes[1])
    node.taken = max((t.numel() for t in others), default=0)
    if call.name == "convolution" and call.gave[0].numel() != node.rows * node.sizes[1]:
        node.sizes = node.sizes[::-1]  # transposed: its weight has the channels that go in first


def key_of(tensor: torch.Tensor) -> int:
    """Address of a tensor's storage, on meta too."""
    return int(tensor.untyped_storage()._cdata)
