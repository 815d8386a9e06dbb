"""From recorded operations to the operators of a `Profile`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import ceil
from typing import NamedTuple

from torch import nn

from shardwise.model.ops import Attention, Matmul, Op, Pointwise, Split
from shardwise.model.profile import Block, Profile
from shardwise.model.recording import AFTER, BEFORE, Node, Recording

NORMS = ("rsqrt", "native_layer_norm", "_fused_rms_norm", "native_group_norm")


def chain_of(recording: Recording, module: nn.Module, names: tuple[str, ...], title: str) -> Profile:
    """The profile of a recorded forward. What it does before the first block is ahead of that block's operators."""
    alike: dict[object, Block] = {}
    chain: list[Block] = []
    owners = _owners(module, names)
    buffers = _buffers(module, names)
    for index in range(len(names)):
        found = [] if index else [replace(op, split="none") for op in _operators(recording, BEFORE, ())]
        own = [name for name, owner in owners.items() if owner == index]
        facts = {"buffers": buffers[index], **recording.facts(index, own)}
        block = replace(_block(recording, index, own, tuple(found)), **facts)
        chain.append(alike.setdefault(tuple(vars(block).values()), block))
    head, tied = _head(recording, owners)
    products = head.matmuls
    outputs = ceil(recording.given_out / recording.tokens)
    vocab, dim = (products[-1].outs, products[-1].ins) if tied else (outputs, ceil(chain[-1].width))
    total = sum(map(math.prod, recording.shapes.values()))
    rest = sum(block.params for block in chain) + head.params - (vocab * dim if tied else 0)
    before = {name: math.prod(shape) for name, shape in recording.shapes.items() if owners[name] == BEFORE}
    attentions = [op for block in chain for op in block.attentions]
    experts = [op for block in chain for op in block.matmuls if op.experts]
    return Profile(
        name=title,
        blocks=tuple(chain),
        embedding=total - rest,
        vocab=vocab,
        dim=dim,
        head=replace(head, tensors=recording.tensors_of(n for n, at in owners.items() if at in (BEFORE, AFTER))),
        tied=tied,
        heads=attentions[0].heads if attentions else 0,
        kv_heads=attentions[0].kv_heads if attentions else 0,
        experts=experts[0].experts if experts else 0,
        chosen=experts[0].chosen if experts else 0,
        frozen=sum(before[name] for name in recording.frozen & before.keys()),
        unused=sum(before[name] for name in recording.unused & before.keys()),
        outputs=recording.given_out / recording.tokens,
        calls=tuple(recording.calls) if len(recording.calls) > len(names) else (),
    )


def _owners(module: nn.Module, names: tuple[str, ...]) -> dict[str, int]:
    """Parameter -> the block that holds it, the first of several; BEFORE: none does."""
    parameters = dict(module.named_parameters())
    held = {id(p): i for i in reversed(range(len(names))) for p in module.get_submodule(names[i]).parameters()}
    return {name: held.get(id(parameter), BEFORE) for name, parameter in parameters.items()}


def _buffers(module: nn.Module, names: tuple[str, ...]) -> list[int]:
    """Bytes of the buffers of each block that are in no other part of the module."""
    places = Counter(id(buffer) for _, buffer in module.named_buffers(remove_duplicate=False))
    blocks = [Counter(id(b) for _, b in module.get_submodule(n).named_buffers(remove_duplicate=False)) for n in names]
    sizes = {id(buffer): buffer.nbytes for buffer in module.buffers()}
    return [sum(sizes[key] for key, times in block.items() if times == places[key]) for block in blocks]


def _head(recording: Recording, owners: dict[str, int]) -> tuple[Block, bool]:
    """What is behind the last block, and whether it ends in a product with a parameter that is used before."""
    own = [name for name, phase in recording.used.items() if phase == AFTER and owners[name] == BEFORE]
    within = False
    for name, owner in owners.items():  # what nobody uses is where it is registered, as `apply` places it
        within |= owner != BEFORE
        own += [name] if within and owner == BEFORE and name not in recording.used else []
    for name in own:
        owners[name] = AFTER
    used = [node.weight for node in recording.nodes if node.phase == AFTER and node.weight]
    tied = bool(used) and recording.used[used[-1]] == BEFORE and owners[used[-1]] == BEFORE
    own += used[-1:] if tied else []
    return replace(_block(recording, AFTER, own, ()), name="head"), tied


def _block(recording: Recording, phase: int, own: Sequence[str], found: tuple[Op, ...]) -> Block:
    """A block from the parameters that it holds, and what runs ahead of it."""
    ops = _operators(recording, phase, own)
    products = [op for op in ops if isinstance(op, Matmul)]
    kind = "moe" if any(op.experts for op in products) else "dense"
    first = next((op.takes for op in products), 0)
    width = recording.entered[phase] / recording.tokens if phase in recording.entered else first
    sizes = {name: math.prod(recording.shapes[name]) for name in own}
    frozen, unused = (sum(sizes.get(n, 0) for n in some) for some in (recording.frozen, recording.unused))
    small = sum(sizes.values()) - sum(op.params for op in products)
    beside = recording.beside(phase) / recording.tokens
    return Block(kind, (*found, *ops), small, width, beside, len(found), frozen, unused)


class Kept(NamedTuple):
    """What autograd keeps, per token."""

    elements: float
    """In the type that is computed with; a copy in another type of one that is counted is none."""
    widened: float
    """Bytes beyond those: of copies, and of elements in fp32."""
    others: float
    """Bytes of masks and indices, which have a type of their own."""


class _Phase:
    """The nodes of one phase, on their way to operators."""

    def __init__(self, recording: Recording, phase: int) -> None:
        self.recording = recording
        self.nodes = [node for node in recording.nodes if node.phase == phase]
        self.left = dict(recording.saved.get(phase, {}))
        """Saved storages that no operator was given yet."""
        self.spare = Kept(0, 0, 0)
        self.counted = set(recording.inputs)
        """Origins of those that one was given, or a step has anyway: in 16 bits it is a copy that is kept."""
        for node in self.nodes:
            if node.attention is not None:  # it counts its own
                for key in (*node.ins, *node.outs):
                    self.left.pop(key, None)
        self.group = self._groups()
        self.split = self._splits()

    def per_token(self, elements: float) -> float:
        return elements / self.recording.tokens

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

    def take_elements(self, keys: Iterable[int]) -> float:
        """Those of `take`; its other bytes are told by `rest`."""
        kept = self.take(keys)
        self.spare = Kept(0, self.spare.widened + kept.widened, self.spare.others + kept.others)
        return kept.elements

    def rest(self) -> Kept:
        """What nobody was given."""
        kept = self.take(list(self.left))
        return Kept(kept.elements, self.spare.widened + kept.widened, self.spare.others + kept.others)

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
    return node.attention is not None or bool(node.sizes[0])


def _operators(recording: Recording, phase: int, own: Sequence[str]) -> tuple[Op, ...]:
    """The operators of a phase in order; `own`: parameters that are counted here."""
    found = _Phase(recording, phase)
    weights: dict[str, list[int]] = {}
    for i, node in enumerate(found.nodes):
        if node.is_matmul:
            weights.setdefault(node.weight, []).append(i)
    ops: list[tuple[int, Op]] = []
    for name, members in weights.items():
        ops.append((members[0], _matmul(found, name, members, name in own)))
    experts = {i for members in weights.values() for i in members if _stacked(recording, found.nodes[members[0]])}
    chosen = max((op.chosen for _, op in ops if isinstance(op, Matmul)), default=0)
    ops = [(i, _not_divided(op, ops)) for i, op in ops]
    ops += _computed(found)
    groups: dict[int, list[int]] = {}
    for i, node in enumerate(found.nodes):
        if not _is_anchor(node):
            groups.setdefault(found.group[i], []).append(i)
    kept = found.share(list(groups.values()))
    for members, sizes in zip(groups.values(), kept, strict=True):
        near = _touches(found, members, experts)
        if (op := _pointwise(found, members, sizes, chosen if near else 0)) is not None:
            ops.append((members[-1], op))
    if any(rest := found.rest()):
        kept_by_none = Pointwise("kept", 0, "none", masks=rest.others, widened=rest.widened, kernels=0)
        kept_by_none = replace(kept_by_none, saves=rest.elements, saves_apart=rest.elements)
        ops.append((len(found.nodes), kept_by_none))
    return tuple(op for _, op in sorted(_joined(ops), key=lambda pair: pair[0]))


def _stacked(recording: Recording, node: Node) -> bool:
    shape = recording.shapes[node.weight]
    return (
        len(shape) == 3 and node.sizes[0] * node.sizes[1] * shape[0] == math.prod(shape) and node.name != "convolution"
    )


def _matmul(found: _Phase, name: str, members: list[int], own: bool) -> Matmul:
    """All products of a phase with one parameter."""
    recording, nodes = found.recording, [found.nodes[i] for i in members]
    experts = recording.shapes[name][0] if _stacked(recording, nodes[0]) else 0
    ins, outs = nodes[0].sizes
    if not experts:  # of a part of it, as of the queries alone
        outs = math.prod(recording.shapes[name]) // ins
    saves = found.take_elements([key for node in nodes for key in node.ins if key not in recording.parameters])
    rows = sum(node.rows * node.sizes[0] * node.sizes[1] for node in nodes) / (ins * outs)
    chosen = max(1, round(rows / recording.tokens)) if experts else 0
    split: Split = "row" if found.split[members[0]] else "column"
    taken, given = sum(node.taken for node in nodes), sum(sum(node.outs.values()) for node in nodes)
    return Matmul(
        _short(name),
        ins,
        outs,
        split,
        saves / max(chosen, 1),
        experts,
        chosen,
        trained=name not in recording.frozen,
        rows=rows / (recording.tokens * max(chosen, 1)),
        overlap=rows * ins / taken if nodes[0].name == "convolution" else 1.0,
        covers=max(1.0, rows * outs / given),
        own=own,
        biased=nodes[0].name == "addmm",
        again=name in recording.by_group or nodes[0].again,
    )


def _not_divided(op: Op, ops: list[tuple[int, Op]]) -> Op:
    """A router is whole on every rank."""
    counts = {other.experts for _, other in ops if isinstance(other, Matmul) and other.experts}
    return replace(op, split="none") if isinstance(op, Matmul) and op.outs in counts and not op.experts else op


def _short(name: str) -> str:
    parts = [part for part in name.split(".") if part != "weight"]
    return parts[-1] if parts else name


def _computed(found: _Phase) -> list[tuple[int, Op]]:
    """Products of computed operands: attention, fused or written out around a softmax, and others."""
    ops: list[tuple[int, Op]] = []
    pairs = _around_softmax(found.nodes)
    for i, node in enumerate(found.nodes):
        if node.attention is not None:
            ops.append((i, node.attention))
        elif i in pairs:
            ops.append((pairs[i], _written_out(found, node, found.nodes[pairs[i]])))
        elif node.sizes[0] and not node.is_matmul and i not in pairs.values():
            kept, rows = found.take_elements(node.ins), found.per_token(node.rows)
            ops.append((i, Matmul(node.name, *node.sizes, "none", kept, rows=rows, own=False, again=node.again)))
    return ops


def _around_softmax(nodes: list[Node]) -> dict[int, int]:
    """Products of queries and keys -> the product that takes the softmax of what each gives."""
    made: dict[int, tuple[int, bool]] = {}  # storage -> the product that it comes from, and whether through a softmax
    pairs: dict[int, int] = {}
    for i, node in enumerate(nodes):
        before = [made[key] for key in node.ins if key in made]
        if _is_anchor(node):
            first = next((product for product, soft in before if soft), None)
            if first is not None and not node.is_matmul and node.sizes[0]:
                pairs[first] = i
            elif not node.is_matmul and node.sizes[0]:
                made.update(dict.fromkeys(node.outs, (i, False)))
        elif before:
            product, soft = max(before, key=lambda each: each[1])
            made.update(dict.fromkeys(node.outs, (product, soft or "softmax" in node.name or node.name == "exp")))
    return pairs


def _written_out(found: _Phase, scores: Node, mixed: Node) -> Attention:
    """Attention of two batched products around a softmax."""
    recording = found.recording
    samples = recording.samples if scores.batch % recording.samples == 0 else 1
    kept = found.take_elements((*scores.ins, *mixed.ins))
    return Attention(
        heads=scores.batch // samples,
        kv_heads=scores.batch // samples,
        qk_dim=scores.sizes[0],
        v_dim=mixed.sizes[1],
        causal=False,
        name="unfused",
        kept=kept,
        rows=scores.rows / scores.batch * samples / recording.tokens,
        reach=scores.sizes[1] * recording.samples / recording.tokens,
        scores=0.0 if scores.again else found.per_token(sum(scores.outs.values())),
    )


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
                for key in ("moved", "saves", "saves_apart", "widened", "masks", "spread", "kernels")
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
    times = max(chosen, 1)
    return Pointwise(
        name=_name(nodes),
        moved=moved / times,
        split=split,
        saves=min(kept.elements, own) / times,
        saves_apart=kept.elements / times,
        kernels=len(nodes),
        masks=kept.others / times,
        per_choice=chosen,
        widened=kept.widened / times,
        spread=found.per_token(sum(max(node.ins.values()) for node in nodes if "batch_norm" in node.name)),
    )


def _name(nodes: list[Node]) -> str:
    names = list(dict.fromkeys(node.name.strip("_") for node in nodes))
    if any(node.name in NORMS for node in nodes):
        return "norm"
    return "+".join(names[:4]) + ("+..." if len(names) > 4 else "")
