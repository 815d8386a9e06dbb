"""Which parameters `fully_shard` gathers together, and in which type: as `parallel.data.shard_data` says. No torch.

Blocks; with `wrap` modules of a size; experts where `ep` divides them; modules with a type of their own by a precision
rule; and what is in none of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from shardwise.model.rules import compile_pattern, type_of
from shardwise.model.spec import ModelSpec
from shardwise.plan.plan import Plan
from shardwise.plan.ranks.weights import Weight

Member = tuple[str, Weight]
"""A weight, and the name of the module that has it."""

_INSIDE: Mapping[str, Mapping[str, str]] = {
    "llama": {"attn": "wq wk wv wo q_norm k_norm", "ffn": "w1 w2 w3"},
    "moe": {"attn": "wq wk wv wo q_norm k_norm", "moe": "router", "moe.experts": "w1 w2 w3"},
    "gpt": {"attn": "q k v proj", "mlp": "fc down"},
}
"""Module of a block -> its weights, by kind of model."""
_GPT = {"embed": "wte", "positions": "wpe", "norm": "ln_f", "head": "lm_head", "down": "proj"}
"""What the modules of weights are called there."""
FLOAT8_MULTIPLE = 16
"""What float8 products need of both dims of a weight."""


def module_of(spec: ModelSpec, weight: Weight) -> str:
    """The module that has a weight, seen from its block; from the model for those outside of blocks.

    >>> from shardwise.model.spec import preset
    >>> module_of(preset("tiny-gpt"), Weight("down.bias", (8,))), module_of(preset("tiny"), Weight("head", (8, 8)))
    ('mlp.proj', 'head')
    """
    name = weight.name.removesuffix(".bias")
    inside = next((where for where, names in _INSIDE[spec.kind].items() if name in names.split()), "")
    if inside == "moe.experts":
        return inside
    own = _GPT.get(name, name) if spec.kind == "gpt" else name
    return f"{inside}.{own}" if inside else own


def types_of(plan: Plan, names: Iterable[str]) -> dict[str, str]:
    """Module -> the type that a precision rule gives it."""
    patterns = [(compile_pattern(pattern), kind) for pattern, kind in plan.module_types.items()]
    return {name: kind for name in names for pattern, kind in patterns if pattern.fullmatch(name)}


def type_at(plan: Plan, name: str, types: Mapping[str, str]) -> str:
    """The type in which a module computes: that of the innermost rule around it, else the plan's."""
    return type_of(name, {rule: kind for rule, kind in types.items() if kind != "fp8"}) or plan.precision


def is_float8(plan: Plan, weight: Weight, name: str, types: Mapping[str, str]) -> bool:
    """Whether the module of this name multiplies its weight in float8, as `parallel.layers.float8.choose` chooses."""
    if plan.float8.recipe == "none" or not weight.is_linear or any(size % FLOAT8_MULTIPLE for size in weight.shape):
        return False
    return type_of(name, types) in ("fp8", *(() if weight.name == "head" else (None,)))


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters that are gathered and reduced together."""

    members: tuple[Member, ...]
    name: str
    """The module; empty: what is in no other group, which stays gathered."""
    is_experts: bool
    """Sharded among the ranks that hold the same experts."""


def group_names(spec: ModelSpec, plan: Plan, members: Sequence[Member], types: Mapping[str, str]) -> frozenset[str]:
    """The modules that are gathered by themselves.

    Args:
        spec: the model.
        plan: its `wrap_min_params` and precision rules decide.
        members: all weights in the order in which they are registered.
        types: see `types_of`.
    """
    if plan.wrap_min_params:
        names = {*_by_size("", members, plan.wrap_min_params, spec.blocks.rpartition(".")[0])[0]}
        if spec.tie_embeddings:  # shared with what is outside of it: gathered with the root
            names -= {module_of(spec, Weight(name, ())) for name in ("embed", "head")}
    else:
        names = {*spec.block_names}
    own = (n for n in types if type_at(plan, n, types) != type_at(plan, n.rpartition(".")[0], types))
    return frozenset(names.union(own))


def groups_of(plan: Plan, members: Sequence[Member], names: Collection[str]) -> list[Group]:
    """The groups of a stage.

    Args:
        plan: its axes decide.
        members: the stage's weights.
        names: see `group_names`.
    """
    found: dict[tuple[str, bool], list[Member]] = {}
    for path, weight in members:
        experts = weight.cut == "experts" and plan.axes.ep > 1
        name = path if experts else max((a for a in around(path) if a in names), key=len, default="")
        found.setdefault((name, experts), []).append((path, weight))
    return [Group(tuple(inside), name, experts) for (name, experts), inside in found.items()]


def around(name: str) -> list[str]:
    """A module and those that hold it, but for the model.

    >>> around("layers.0.attn.wq")
    ['layers', 'layers.0', 'layers.0.attn', 'layers.0.attn.wq']
    """
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _by_size(name: str, members: Sequence[Member], least: int, blocks: str) -> tuple[list[str], int]:
    """Modules below one that hold so many parameters which are in no group yet, and how many stay in none.

    `blocks`: the list of blocks, which is no module that is called.
    """
    found: list[str] = []
    left = 0
    inside: dict[str, list[Member]] = {}
    for path, weight in members:
        if path == name:
            left += prod(weight.shape)
        else:
            depth = name.count(".") + 2 if name else 1
            inside.setdefault(".".join(path.split(".")[:depth]), []).append((path, weight))
    for child, below in inside.items():
        groups, rest = _by_size(child, below, least, blocks)
        found += groups
        if rest >= least and child != blocks:
            found.append(child)
        else:
            left += rest
    return found, left
