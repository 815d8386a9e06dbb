"""Which linear layers are split together: columns whose slices reach rows through code that treats slices alike."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from shardwise.errors import ModelError
from shardwise.model.infer.flow import local_shape
from shardwise.model.infer.record import TOKENS, Flow, Mark, Step, Stream
from shardwise.model.infer.trace import is_linear, run
from shardwise.model.rules import generalise

_ROUNDS = 40
"""Forwards without data, at most; each takes at least one layer out of the search."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Columns that are split together and the rows that take what becomes of them."""

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    count: int
    """Units that are dealt out: features, or heads. A degree must divide it."""
    is_attention: bool


@dataclass(kw_only=True)
class Found:
    """The groups of a module and the forward that they were found in."""

    groups: list[Group]
    flow: Flow
    reasons: dict[str, str] = field(default_factory=dict)
    """Linear layer -> why its output is not split."""
    fused: set[str] = field(default_factory=set)
    """Those whose output is cut in pieces, or counted by the code."""


@dataclass(frozen=True)
class Model:
    """A module on the meta device and a sample of its forward."""

    module: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    degree: int

    def linears(self) -> dict[str, nn.Linear]:
        """The linear layers, without those that share a parameter with another module."""
        owners: dict[int, int] = {}
        for module in self.module.modules():
            for parameter in module.parameters(recurse=False):
                owners[id(parameter)] = owners.get(id(parameter), 0) + 1
        return {
            name: module
            for name, module in self.module.named_modules()
            if isinstance(module, nn.Linear) and is_linear(module)
            if all(owners[id(p)] == 1 for p in module.parameters())
        }


def find_groups(model: Model) -> Found:
    """Search: suppose every linear layer split, and take out what its consumers need whole, until nothing changes.

    Raises:
        ModelError: forward cannot run without data, or does not take the sample.

    Cost: a forward on the meta device per round; milliseconds per module.
    """
    linears = model.linears()
    sources = {name for name, linear in linears.items() if linear.out_features % model.degree == 0}
    reasons = {name: f"{model.degree} does not divide its {linears[name].out_features} outputs"
               for name in linears if name not in sources}  # fmt: skip
    fused: set[str] = set()
    for _ in range(_ROUNDS):
        flow = run(model.module, model.args, model.kwargs, frozenset(sources))
        reasons |= flow.dead
        fused |= flow.fused
        groups, lost = _groups(model, linears, flow, sources)
        reasons |= lost
        gone = (set(flow.dead) | set(lost)) & sources
        if not gone:
            gone = {name for name in _dry_run(model, flow, groups) if name in sources}
            reasons |= dict.fromkeys(gone, "the code counts its outputs, and would count a slice wrongly")
            fused |= gone
        if not gone:
            return Found(groups=groups, flow=flow, reasons=reasons, fused=fused)
        sources -= gone
    raise ModelError(
        f"rules for {type(model.module).__name__}: no set of split layers was found in {_ROUNDS} rounds; "
        "give the rules by hand: apply(..., rules={...}), see docs/tensor-parallel.md"
    )


def _groups(
    model: Model, linears: Mapping[str, nn.Linear], flow: Flow, sources: set[str]
) -> tuple[list[Group], dict[str, str]]:
    """The groups that hold, and why other sources are none."""
    alive = sources - flow.dead.keys()
    groups: list[Group] = []
    lost: dict[str, str] = {}
    taken: set[str] = set()
    for members in _components(flow, alive):
        rows = [name for name, marks in flow.calls.items() if any(_enters(m, name, linears, members) for m in marks)]
        why = _refused(model, linears, flow, members, rows)
        if not why and members & taken:
            why = "it takes what another layer has split"
        if why:
            lost |= dict.fromkeys(members, why)
            continue
        taken |= set(rows)
        columns = tuple(name for name in flow.order if name in members)
        count = _count(flow, members)
        groups.append(Group(columns=columns, rows=tuple(rows), count=count, is_attention=bool(members & flow.softmax)))
    return groups, lost


def _components(flow: Flow, alive: set[str]) -> list[set[str]]:
    """Sources that are split together, in the order of their first call."""
    groups: list[set[str]] = []
    for name in (name for name in flow.order if name in alive):
        together = {name} | (flow.joined.get(name, set()) & alive)
        for other in [g for g in groups if g & together]:
            groups.remove(other)
            together |= other
        groups.append(together)
    return groups


def _enters(mark: Mark | None, name: str, linears: Mapping[str, nn.Linear], members: set[str]) -> bool:
    """True where a linear layer's inputs are split by these columns, not its heads."""
    return mark is not None and bool(mark.sources & members) and name in linears and _by_inputs(mark, linears[name])


def _by_inputs(mark: Mark, linear: nn.Linear) -> bool:
    split = mark.split
    return split.pre == 1 and split.count * split.post == linear.in_features


def _refused(model: Model, linears: Mapping[str, nn.Linear], flow: Flow, members: set[str], rows: list[str]) -> str:
    """Why these columns cannot be split; "" where they can."""
    if not rows:
        return "no linear layer takes what becomes of its output"
    for name in rows:
        marks = flow.calls[name]
        if name in members or not all(mark is not None and mark.sources <= members for mark in marks):
            return f"{name} takes it together with what is whole"
        if linears[name].in_features % model.degree:
            return f"{model.degree} does not divide the {linears[name].in_features} inputs of {name}"
    count = _count(flow, members)
    if count % model.degree:
        return f"{model.degree} does not divide the {count} units that it consists of"
    for weight, uses in flow.uses.items():
        touched = [use for use in uses if use.sources & members]
        if touched and len(touched) < len(uses):
            return f"{weight} is used on split and on whole tensors"
    return ""


def _count(flow: Flow, members: set[str]) -> int:
    marks = [mark for step in flow.steps for mark in step.marks if mark and mark.sources & members]
    marks += [mark for calls in flow.calls.values() for mark in calls if mark and mark.sources & members]
    return math.gcd(*(mark.split.count for mark in marks))


def sequence_refused(model: Model, styles: Mapping[str, str], blocks: Sequence[str]) -> str:
    """Why the blocks cannot work on shards of the sequence under these styles; "" where they can.

    What is held by a module with column layers sees the whole sequence; everything else in the blocks must work on
    each token alone.
    """
    if not blocks:
        return "the model has no repeated blocks"
    inside = [name for name in styles if any(name.startswith(f"{block}.") for block in blocks)]
    holders = {name.rpartition(".")[0] for name in inside if styles[name] in ("column", "column-gather")}
    rows = frozenset(name for name in inside if styles[name] == "row")
    direct = holders & set(blocks)
    if direct:
        return f"{min(direct)} holds column layers itself; they would have to be in a module of their own inside it"
    nested = [name for name in holders if any(name.startswith(f"{other}.") for other in holders)]
    if nested:
        return f"{nested[0]} and a module around it both hold column layers"
    stream = Stream(first=blocks[0], last=blocks[-1], holders=frozenset(holders), rows=rows)
    return run(model.module, model.args, model.kwargs, frozenset(), stream).dead.get(TOKENS, "")


# ---------------------------------------------------------------- the code's own arithmetic


def _dry_run(model: Model, flow: Flow, groups: list[Group]) -> set[str]:
    """Columns of the groups in which the forward of one rank would not be a slice of the whole forward.

    `view(batch, seq, 8, -1)` runs on a slice too, and deals out other numbers. So a forward with the weights of one
    rank is run without data, and every shape and number in it is compared with the slice of the whole's.
    """
    if not groups or _same(model, flow, groups):
        return set()
    by_pattern: dict[tuple[str, ...], list[Group]] = {}
    for group in groups:
        by_pattern.setdefault(tuple(sorted({generalise(name) for name in group.columns})), []).append(group)
    bad = [alike for alike in by_pattern.values() if not _same(model, flow, alike)]
    return {name for alike in bad or by_pattern.values() for group in alike for name in group.columns}


def _same(model: Model, flow: Flow, groups: Iterable[Group]) -> bool:
    columns = {name for group in groups for name in group.columns}
    rows = {name for group in groups for name in group.rows}
    small = copy.deepcopy(model.module)
    for name in columns | rows:
        _shrink(small.get_submodule(name), model.degree, by_outputs=name in columns)
    try:
        local = run(small, model.args, model.kwargs, frozenset())
    except ModelError:
        return False
    if len(local.steps) != len(flow.steps) or local.output_shapes != flow.output_shapes:
        return False
    return all(_agree(one, whole, columns, model.degree) for one, whole in zip(local.steps, flow.steps, strict=True))


def _agree(local: Step, whole: Step, columns: set[str], degree: int) -> bool:
    expected = tuple(
        local_shape(shape, mark.split if mark and mark.sources <= columns else None, degree)
        for shape, mark in zip(whole.shapes, whole.marks, strict=True)
    )
    return replace(local, marks=whole.marks) == replace(whole, shapes=expected)


def _shrink(linear: nn.Module, degree: int, *, by_outputs: bool) -> None:
    """The weights of one rank, on the meta device; the sizes that the module tells of itself stay."""
    assert isinstance(linear, nn.Linear)
    outputs, inputs = linear.weight.shape
    shape = (outputs // degree, inputs) if by_outputs else (outputs, inputs // degree)
    linear.weight = nn.Parameter(torch.empty(shape, device="meta", dtype=linear.weight.dtype), requires_grad=False)
    if linear.bias is not None and by_outputs:
        linear.bias = nn.Parameter(torch.empty(shape[0], device="meta", dtype=linear.bias.dtype), requires_grad=False)
