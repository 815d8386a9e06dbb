"""From recorded operations to the operators of a `Profile`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from shardwise.model.profile import Attention, Block, Matmul, Op, Pointwise, Profile, Split
from shardwise.model.recording import Node, Recording

NORMS = ("rsqrt", "native_layer_norm", "_fused_rms_norm", "native_group_norm")


def chain_of(recording: Recording, module: nn.Module, names: tuple[str, ...], title: str) -> Profile:
    """The profile of a recorded forward."""
    alike: dict[object, Block] = {}
    chain = []
    for index, name in enumerate(names):
        own = sum(p.numel() for p in module.get_submodule(name).parameters())
        block = _block(recording, index, own)
        chain.append(alike.setdefault((block.name, block.ops, block.small, block.width), block))
    after = max((n.phase for n in recording.nodes), default=0)
    head = _head(recording, after, names)
    total = sum(p.numel() for p in module.parameters())
    products = [op for op in head.ops if isinstance(op, Matmul)]
    tied = bool(products) and _is_tied(recording, after)
    vocab, dim = (products[-1].outs, products[-1].ins) if products else (0, chain[0].width if chain else 0)
    rest = sum(block.params for block in chain) + head.params - (vocab * dim if tied else 0)
    attentions = [op for block in chain for op in block.ops if isinstance(op, Attention)]
    experts = [op for block in chain for op in block.matmuls if op.experts]
    return Profile(
        name=title,
        blocks=tuple(chain),
        embedding=total - rest,
        vocab=vocab,
        dim=dim,
        head=head,
        tied=tied,
        heads=attentions[0].heads if attentions else 0,
        kv_heads=attentions[0].kv_heads if attentions else 0,
        experts=experts[0].experts if experts else 0,
        chosen=experts[0].chosen if experts else 0,
    )


def _in_blocks(name: str, names: tuple[str, ...]) -> bool:
    return any(name.startswith(f"{block}.") for block in names)


def _is_tied(recording: Recording, after: int) -> bool:
    """The head multiplies with a parameter that was used before the blocks."""
    used = [node.weight for node in recording.nodes if node.phase == after and node.is_matmul]
    return bool(used) and recording.used[used[-1]] < 0


def _head(recording: Recording, after: int, names: tuple[str, ...]) -> Block:
    ops, width = _operators(recording, after)
    own = {name for name, phase in recording.used.items() if phase == after and not _in_blocks(name, names)}
    own |= {node.weight for node in recording.nodes if node.phase == after and node.is_matmul}
    total = sum(math.prod(recording.shapes[name]) for name in own)
    return Block("head", ops, small=total - _params(ops), width=width)


def _block(recording: Recording, index: int, num_params: int) -> Block:
    ops, width = _operators(recording, index)
    kind = "moe" if any(isinstance(op, Matmul) and op.experts for op in ops) else "dense"
    return Block(kind, ops, small=num_params - _params(ops), width=width)


def _params(ops: Iterable[Op]) -> int:
    return sum(op.params for op in ops if isinstance(op, Matmul))


class Kept(NamedTuple):
    """What autograd keeps, per token."""

    elements: int
    """In the type that is computed with; a copy in another type of one that is counted is none."""
    widened: int
    """Bytes beyond those: of copies, and of elements in fp32."""
    others: int
    """Bytes of masks and indices, which have a type of their own."""


class _Phase:
    """The nodes of one phase, on their way to operators."""

    def __init__(self, recording: Recording, phase: int) -> None:
        self.recording = recording
        self.nodes = [node for node in recording.nodes if node.phase == phase]
        self.left = dict(recording.saved.get(phase, {}))
        """Saved storages that no operator was given yet."""
        self.counted: set[int] = set()
        """Origins of those that one was given."""
        for node in self.nodes:
            if node.attention is not None:  # it counts its own
                for key in (*node.ins, *node.outs):
                    self.left.pop(key, None)
        self.group = self._groups()
        self.split = self._splits()

    def per_token(self, elements: float) -> int:
        return round(elements / self.recording.tokens)

    def take(self, keys: Iterable[int]) -> Kept:
        """What is kept of some storages; each is given once."""
        elements = widened = others = 0.0
        for key in keys:
            tensor = self.left.pop(key, None)
            if tensor is None:
                continue
            num_bytes, origin = tensor.untyped_storage().nbytes(), self.recording.origin(key)
            if not tensor.is_floating_point():
                others += num_bytes
            elif origin in self.counted:
                widened += num_bytes
            else:
                self.counted.add(origin)
                elements += num_bytes / tensor.element_size()
                widened += max(0.0, num_bytes * (1 - self.recording.width / tensor.element_size()))
        return Kept(*map(self.per_token, (elements, widened, others)))

    def share(self, groups: list[list[int]]) -> list[Kept]:
        """What each chain keeps: who reads a storage keeps it, else who made it."""
        nodes = [[self.nodes[i] for i in members] for members in groups]
        reads = [self.take(key for node in chain for key in node.ins) for chain in nodes]
        rest = [self.take(key for node in chain for key in node.outs) for chain in nodes]
        return [Kept(*map(sum, zip(*both, strict=True))) for both in zip(reads, rest, strict=True)]

    def _groups(self) -> list[int]:
        """Chains: an element-wise operation is in that of its consumers, where they are all in one; else its own."""
        users: dict[int, set[int]] = {}
        group = list(range(len(self.nodes)))
        for i in range(len(self.nodes) - 1, -1, -1):
            node = self.nodes[i]
            consumers = set().union(*(users.get(key, set()) for key in node.outs)) if node.outs else set()
            plain = all(not _is_anchor(self.nodes[j]) for j in consumers)
            homes = {group[j] for j in consumers}
            if not _is_anchor(node) and len(homes) == 1 and plain:
                group[i] = homes.pop()
            for key in node.ins:
                users.setdefault(key, set()).add(i)
        return group

    def _splits(self) -> list[bool]:
        """Whether what a node works on is divided by tp: it comes from a product that nothing has summed yet."""
        divided: dict[int, bool] = {}
        found = []
        experts = {
            self.recording.shapes[n.weight][0] for n in self.nodes if n.is_matmul and _stacked(self.recording, n)
        }
        for node in self.nodes:
            comes = any(divided.get(key, False) for key in node.ins)
            found.append(comes)
            routes = node.sizes[1] in experts  # whole on every rank, and so is what is chosen by it
            gives = not comes and not routes if node.is_matmul else comes
            for key in node.outs:
                divided[key] = gives
        return found


def _is_anchor(node: Node) -> bool:
    return node.is_matmul or node.attention is not None or bool(node.sizes[0])


def _operators(recording: Recording, phase: int) -> tuple[tuple[Op, ...], int]:
    """The operators of a phase in order, and the elements per token of its first input."""
    found = _Phase(recording, phase)
    weights: dict[str, list[int]] = {}
    for i, node in enumerate(found.nodes):
        if node.is_matmul:
            weights.setdefault(node.weight, []).append(i)
    ops: list[tuple[int, Op]] = []
    for name, members in weights.items():
        ops.append((members[0], _matmul(found, name, members)))
    experts = {i for members in weights.values() for i in members if _stacked(recording, found.nodes[members[0]])}
    chosen = max((op.chosen for _, op in ops if isinstance(op, Matmul)), default=0)
    ops = [(i, _not_divided(op, ops)) for i, op in ops]
    ops += _attentions(found)
    groups: dict[int, list[int]] = {}
    for i, node in enumerate(found.nodes):
        if not _is_anchor(node):
            groups.setdefault(found.group[i], []).append(i)
    kept = found.share(list(groups.values()))
    for members, sizes in zip(groups.values(), kept, strict=True):
        near = _touches(found, members, experts)
        if (op := _pointwise(found, members, sizes, chosen if near else 0)) is not None:
            ops.append((members[-1], op))
    ops = _joined(ops)
    ordered = tuple(op for _, op in sorted(ops, key=lambda pair: pair[0]))
    first = next((op for op in ordered if isinstance(op, Matmul)), None)
    return ordered, first.ins if first else 0


def _stacked(recording: Recording, node: Node) -> bool:
    shape = recording.shapes[node.weight]
    return (
        len(shape) == 3 and node.sizes[0] * node.sizes[1] * shape[0] == math.prod(shape) and node.name != "convolution"
    )


def _matmul(found: _Phase, name: str, members: list[int]) -> Matmul:
    recording, node = found.recording, found.nodes[members[0]]
    rows = sum(found.nodes[i].rows for i in members)
    experts = recording.shapes[name][0] if _stacked(recording, node) else 0
    ins, outs = node.sizes
    kept = [key for i in members for key in found.nodes[i].ins if key not in recording.parameters]
    saves = found.take(kept).elements
    chosen = max(1, round(rows / recording.tokens)) if experts else 0
    split: Split = "row" if found.split[members[0]] else "column"
    return Matmul(_short(name), ins, outs, split, saves // max(chosen, 1), experts, chosen)


def _not_divided(op: Op, ops: list[tuple[int, Op]]) -> Op:
    """A router is whole on every rank."""
    counts = {other.experts for _, other in ops if isinstance(other, Matmul) and other.experts}
    return replace(op, split="none") if isinstance(op, Matmul) and op.outs in counts and not op.experts else op


def _short(name: str) -> str:
    parts = [part for part in name.split(".") if part != "weight"]
    return parts[-1] if parts else name


def _attentions(found: _Phase) -> list[tuple[int, Op]]:
    """Fused ones, and those that a forward writes out as two batched products around a softmax."""
    ops: list[tuple[int, Op]] = []
    scores: Node | None = None
    for i, node in enumerate(found.nodes):
        if node.attention is not None:
            ops.append((i, node.attention))
        elif not node.is_matmul and node.sizes[0]:
            if scores is None:
                scores = node
                continue
            rows = max(1, round(found.recording.tokens / max(scores.sizes[1], 1)))
            heads = max(1, scores.rows // rows)
            kept = found.take((*scores.ins, *node.ins)).elements
            seen = Attention(heads, heads, scores.sizes[0], node.sizes[1], causal=False, name="unfused", kept=kept)
            ops.append((i, seen))
            scores = None
    return ops


def _joined(ops: list[tuple[int, Op]]) -> list[tuple[int, Op]]:
    """The same chain on the tokens of each expert in turn, as one."""
    joined: dict[tuple[str, int], tuple[int, Pointwise]] = {}
    rest: list[tuple[int, Op]] = []
    for place, op in ops:
        if not isinstance(op, Pointwise) or not op.per_choice:
            rest.append((place, op))
            continue
        first, before = joined.get((op.name, op.per_choice), (place, None))
        if before is not None:
            sums = {
                key: getattr(op, key) + getattr(before, key)
                for key in ("moved", "saves", "saves_apart", "widened", "masks", "kernels")
            }
            op = replace(op, **sums)
        joined[op.name, op.per_choice] = (first, op)
    return [*rest, *joined.values()]


def _touches(found: _Phase, members: list[int], experts: set[int]) -> bool:
    """A chain between two products of experts: it happens for each choice."""
    given = {key for i in experts for key in found.nodes[i].outs}
    taken = {key for i in experts for key in found.nodes[i].ins}
    reads = {key for i in members for key in found.nodes[i].ins}
    gives = {key for i in members for key in found.nodes[i].outs}
    return bool(reads & given) and bool(gives & taken)


def _pointwise(found: _Phase, members: list[int], kept: Kept, chosen: int) -> Pointwise | None:
    nodes = [found.nodes[i] for i in members]
    made = {key for node in nodes for key in node.outs}
    reads = {key: n for node in nodes for key, n in node.ins.items() if key not in made}
    inner = {key for node in nodes for key in node.ins} & made
    gives = {key: n for node in nodes for key, n in node.outs.items() if key not in inner}
    moved = found.per_token(
        sum(n for key, n in (*reads.items(), *gives.items()) if key not in found.recording.parameters)
    )
    if not moved and not any(kept):
        return None
    own = found.per_token(sum(n for key, n in reads.items() if key not in found.recording.parameters))
    # a chain that also reads what is not divided (a residual) is not either
    split: Split = "heads" if all(found.split[i] for i in members) else "sequence"
    per = max(chosen, 1)
    return Pointwise(
        name=_name(nodes),
        moved=moved // per,
        split=split,
        saves=min(kept.elements, own) // per,
        saves_apart=kept.elements // per,
        kernels=len(nodes),
        masks=kept.others // per,
        per_choice=chosen,
        widened=kept.widened // per,
    )


def _name(nodes: list[Node]) -> str:
    names = list(dict.fromkeys(node.name.strip("_") for node in nodes))
    if any(node.name in NORMS for node in nodes):
        return "norm"
    return "+".join(names[:4]) + ("+..." if len(names) > 4 else "")
