"""What one forward of a module did: its operations, and what autograd keeps of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import nn

from shardwise.model.profile import Attention

MATMUL = frozenset(("mm", "addmm", "bmm", "baddbmm", "convolution"))


class Call(NamedTuple):
    """One operation: tensors in, tensors out."""

    name: str
    given: list[torch.Tensor]
    gave: list[torch.Tensor]
    phase: int


@dataclass
class Node:
    """A recorded operation; memory goes by the address of its storage."""

    name: str
    phase: int
    ins: dict[int, float]
    """Storage -> elements read."""
    outs: dict[int, float]
    weight: str = ""
    rows: int = 0
    sizes: tuple[int, int] = (0, 0)
    attention: Attention | None = None
    bool_outs: dict[int, int] = field(default_factory=dict)

    @property
    def is_matmul(self) -> bool:
        """A product with a parameter."""
        return bool(self.weight)


@dataclass
class Recording:
    """Everything that one forward did."""

    tokens: int
    parameters: dict[int, str]
    """Storage -> name."""
    shapes: dict[str, tuple[int, ...]]
    width: int
    """Bytes of an element of what is computed with."""
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

    @classmethod
    def of(cls, module: nn.Module, tokens: int) -> Recording:
        """For one forward of a module."""
        named = dict(module.named_parameters())
        floats = [p.element_size() for p in named.values() if p.is_floating_point()]
        return cls(
            tokens=tokens,
            parameters={key_of(p): name for name, p in named.items()},
            shapes={name: tuple(p.shape) for name, p in named.items()},
            width=max(floats, default=4),
        )

    def keep(self, tensor: torch.Tensor, phase: int) -> None:
        """Autograd keeps a tensor."""
        if self.origin(key_of(tensor)) not in self.parameters:
            self.saved.setdefault(phase, {}).setdefault(key_of(tensor), tensor)

    def operation(self, call: Call) -> None:
        """An operation was run."""
        ins = {key_of(t): float(t.numel()) for t in call.given}
        for name in filter(None, map(self.name_of, call.given)):
            self.used.setdefault(name, call.phase)
        new = [t for t in call.gave if key_of(t) not in ins]
        written = [t for t in call.gave if key_of(t) in ins] if call.name.endswith("_") else []
        if not new and not written:
            return  # a view
        self.alive.extend(new)  # the address of one that is freed would be another's
        if call.name == "_to_copy" and all(t.is_floating_point() for t in (*call.given, *new)):
            self.casts.update((key_of(t), self.origin(key_of(call.given[0]))) for t in new)
        outs = {key_of(t): float(t.numel()) for t in (*new, *written)}
        node = Node(call.name, call.phase, ins, outs)
        node.bool_outs = {key_of(t): t.numel() for t in new if t.dtype is torch.bool}
        weight = next((t for t in call.given[::-1] if self.name_of(t) and t.dim() > 1), None)
        if call.name in MATMUL and weight is not None:
            self._product(node, call, weight)
        elif call.name in ("bmm", "baddbmm"):
            node.rows, node.sizes = call.gave[0].shape[0], (call.given[-2].shape[-1], call.given[-1].shape[-1])
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

    def _product(self, node: Node, call: Call, weight: torch.Tensor) -> None:
        node.weight = self.name_of(weight)
        if call.name == "convolution":
            node.sizes = (weight.numel() // weight.shape[0], weight.shape[0])
            node.rows = call.gave[0].numel() // weight.shape[0]
        else:
            node.sizes = (weight.shape[-2], weight.shape[-1])
            node.rows = call.gave[0].numel() // weight.shape[-1]

    def attention(self, op: Attention, given: Sequence[torch.Tensor], out: torch.Tensor, phase: int) -> None:
        """Fused attention was called: it keeps what it is given, and its output."""
        self.alive.append(out)
        kept = {key_of(t): t.untyped_storage().nbytes() // t.element_size() for t in (*given, out)}
        op = replace(op, kept=round(sum(kept.values()) / self.tokens))
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


def key_of(tensor: torch.Tensor) -> int:
    """Address of a tensor's storage, on meta too."""
    return int(tensor.untyped_storage()._cdata)
