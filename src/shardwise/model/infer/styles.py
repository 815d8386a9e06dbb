"""From groups of layers to a style and a reason for every module that owns parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import nn

from shardwise.errors import ModelError
from shardwise.model.infer.groups import Found, Group, Model, sequence_refused
from shardwise.model.infer.record import Use
from shardwise.model.infer.trace import is_linear
from shardwise.model.rules import check_covered, compile_pattern, generalise, match


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One row of the table: a pattern, its style and why."""

    pattern: str
    style: str
    reason: str


@dataclass(kw_only=True)
class _Choice:
    """Styles and reasons so far."""

    model: Model
    found: Found
    blocks: tuple[str, ...]
    styles: dict[str, tuple[str, str]] = field(default_factory=dict)
    limits: list[int] = field(default_factory=list)

    def in_block(self, name: str) -> bool:
        """True of a repeated block and what it holds."""
        return any(name == block or name.startswith(block + ".") for block in self.blocks)

    def put(self, name: str, style: str, reason: str) -> None:
        """Set the style of a module, or replace it."""
        self.styles[name] = (style, reason)


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The table, the number that a degree must divide, and why sequence shards are refused ("" where they are not)."""

    rules: list[Rule]
    limit: int
    no_sequence: str


def choose(model: Model, found: Found, blocks: tuple[str, ...]) -> Chosen:
    """A row for every module that owns parameters.

    Raises:
        ModelError: a module's forward uses the parameters of another module.
    """
    choice = _Choice(model=model, found=found, blocks=blocks)
    _check_owners(choice)
    for group in found.groups:
        _put_group(choice, group)
    _put_fused(choice)
    _put_ends(choice)
    for name, module in model.module.named_modules():
        if name not in choice.styles and next(module.parameters(recurse=False), None) is not None:
            choice.put(name, *_whole(choice, name, module))
    _mend_siblings(choice)
    why = sequence_refused(model, {name: style for name, (style, _) in choice.styles.items()}, blocks)
    if why:
        _refuse_sequence(choice)
    rules = _rows(model.module, choice.styles)
    _check(model.module, rules)
    return Chosen(rules=rules, limit=math.gcd(*choice.limits) if choice.limits else 1, no_sequence=why)


def _refuse_sequence(choice: _Choice) -> None:
    """`apply` refuses sequence shards where something in a block is 'replicate'."""
    for name, (style, reason) in list(choice.styles.items()):
        if style == "sequence" and choice.in_block(name):
            choice.put(name, "replicate", f"{reason}; `seq` is refused")


def _check_owners(choice: _Choice) -> None:
    for weight, uses in choice.found.flow.uses.items():
        owner = weight.rpartition(".")[0]
        ties = _tied_owners(choice.model.module, weight)
        foreign = [use for use in uses if use.frame != owner and use.frame not in ties]
        if foreign:
            at, what = foreign[0].frame or "the model", owner or "the model"
            raise ModelError(
                f"rules for {type(choice.model.module).__name__}: the forward of {at} uses {weight} itself "
                f"(`{foreign[0].operation}`), which belongs to {what}; a rule places a parameter for its own module's "
                f"forward; needed: call {owner or 'that module'}, or register the parameter where it is used (in place "
                "of nn.MultiheadAttention: attention with linear layers)"
            )


def _tied_owners(module: nn.Module, weight: str) -> set[str]:
    tensor = module.get_parameter(weight)
    named = module.named_parameters(remove_duplicate=False)
    return {name.rpartition(".")[0] for name, other in named if other is tensor}


def _put_group(choice: _Choice, group: Group) -> None:
    what = "heads" if group.is_attention else "features"
    rows = " and ".join(_short(name) for name in group.rows)
    together = [_short(name) for name in group.columns]
    for name in group.columns:
        others = [other for other in together if other != _short(name)]
        also = f", with {', '.join(others)}" if others else ""
        choice.put(name, "column", f"its {what} stay split until {rows}{also}")
    for name in group.rows:
        choice.put(name, "row", f"takes the {what} that {', '.join(together)} split")
    choice.limits.append(group.count)


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def _put_fused(choice: _Choice) -> None:
    """Projections that are cut in pieces: split weights, whole output; the layer that ends their module is a row."""
    flow, degree = choice.found.flow, choice.model.degree
    linears = choice.model.linears()
    for name in (name for name in flow.order if name in choice.found.fused and name not in choice.styles):
        parent = name.rpartition(".")[0]
        end = flow.results.get(parent, "")
        fits = end in linears and end != name and end.rpartition(".")[0] == parent
        if not fits or linears[end].in_features % degree or linears[name].out_features % degree:
            continue
        if choice.styles.get(end, ("row", ""))[0] != "row":
            continue
        choice.put(name, "column-gather", f"fused: {choice.found.reasons[name]}")
        if end not in choice.styles:
            choice.put(end, "row", f"ends {parent or 'the model'}, after {_short(name)}; takes the whole input too")
        choice.limits += [linears[name].out_features, linears[end].in_features]


def _put_ends(choice: _Choice) -> None:
    """The embedding of tokens and the layer onto the vocabulary; tied ones only together."""
    module, flow, degree = choice.model.module, choice.found.flow, choice.model.degree
    embeddings = {
        name: child
        for name, child in module.named_modules()
        if isinstance(child, nn.Embedding) and name in flow.from_ids and not choice.in_block(name)
    }
    plain = {
        name: e
        for name, e in embeddings.items()
        if e.num_embeddings % degree == 0 and e.padding_idx is e.max_norm is None and not e.sparse
        if not e.scale_grad_by_freq and type(e) is nn.Embedding
    }
    sizes = {e.num_embeddings for e in embeddings.values()}
    heads = {
        name: child
        for name, child in module.named_modules(remove_duplicate=False)
        if isinstance(child, nn.Linear) and is_linear(child) and name in flow.outputs and not choice.in_block(name)
        if child.out_features in sizes and child.out_features % degree == 0 and name not in choice.styles
    }
    for name, embedding in plain.items():
        if all(owner in {*plain, *heads} for owner in _tied_owners(module, f"{name}.weight")):
            choice.put(name, "vocab", "looks up the token numbers that the model is given")
            choice.limits.append(embedding.num_embeddings)
    for name, head in heads.items():
        owners = _tied_owners(module, f"{name}.weight")
        if all(owner in {*plain, *heads} and (owner in choice.styles or owner in heads) for owner in owners):
            tied = ", tied to the embedding" if len(owners) > 1 else ""
            choice.put(name, "head", f"its output, over the vocabulary, is the model's{tied}")
            choice.limits.append(head.out_features)


def _whole(choice: _Choice, name: str, module: nn.Module) -> tuple[str, str]:
    """The style of a module whose parameters stay whole."""
    flow = choice.found.flow
    uses = [use for key in dict(module.named_parameters(recurse=False)) for use in flow.uses.get(_join(name, key), ())]
    split = {source for group in choice.found.groups for source in group.columns}
    if isinstance(module, nn.Linear) and name in flow.calls:
        return _whole_linear(choice, name, split)
    if any(use.sources & split for use in uses):
        at = _short(min(source for use in uses for source in use.sources))
        return "heads", f"works on each head, or slice, of {at} alone"
    if not uses:
        return ("sequence" if choice.in_block(name) else "replicate"), "forward does not use it"
    what = ", ".join(sorted({use.operation for use in uses}))
    if isinstance(module, nn.Embedding) or not all(_on_tokens(use) for use in uses):
        return "replicate", f"stays whole: `{what}` is not known to work on slices"
    return "sequence", f"works on each token alone (`{what}`)"


def _on_tokens(use: Use) -> bool:
    return use.per_token


def _whole_linear(choice: _Choice, name: str, split: set[str]) -> tuple[str, str]:
    marks = [mark for mark in choice.found.flow.calls[name] if mark]
    if any(mark.sources & split for mark in marks):
        at = _short(min(source for mark in marks for source in mark.sources))
        return "heads", f"works on each head of {at} alone"
    why = choice.found.reasons.get(name, "it shares a parameter with another module")
    return ("sequence" if choice.in_block(name) else "replicate"), f"stays whole: {why}"


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _mend_siblings(choice: _Choice) -> None:
    """A module with split and whole linear layers gathers the split ones: `apply` refuses a mixture."""
    linears = choice.model.linears()
    for parent in {name.rpartition(".")[0] for name in choice.styles} - {""}:
        own = [n for n in choice.styles if n.rpartition(".")[0] == parent and n in linears]
        kinds = {choice.styles[n][0] for n in own}
        if "column" not in kinds or not kinds & {"column-gather", "replicate", "sequence"}:
            continue
        whole = ", ".join(_short(n) for n in own if choice.styles[n][0] in ("column-gather", "replicate", "sequence"))
        for name in own:
            if choice.styles[name][0] == "column":
                choice.put(name, "column-gather", f"could stay split, were {whole} beside it not whole")
                choice.limits.append(linears[name].out_features)
        for name, (style, _) in list(choice.styles.items()):
            if style == "heads" and name.startswith(parent + "."):
                choice.put(name, "replicate", "the projections before it are gathered")


# ---------------------------------------------------------------- patterns


def _rows(module: nn.Module, styles: Mapping[str, tuple[str, str]]) -> list[Rule]:
    """The fewest patterns that give each name its style, and no other name one."""
    names = [name for name, _ in module.named_modules()]
    rules: list[Rule] = []
    left = dict(styles)
    for name in names:
        if name not in left:
            continue
        for pattern in _patterns(name):
            regex = compile_pattern(pattern) if pattern else None
            hits = [n for n in names if (regex.fullmatch(n) if regex else n == "")]
            if all(n in left and left[n][0] == left[name][0] for n in hits):
                rules.append(Rule(pattern=pattern, style=left[name][0], reason=left[name][1]))
                for hit in hits:
                    del left[hit]
                break
    return rules


def _patterns(name: str) -> Iterable[str]:
    """From the most general to the name itself: all numbers are `*`, then fewer from the right, then from the left."""
    parts = name.split(".")
    places = [i for i, part in enumerate(parts) if part.isdecimal()]
    yield generalise(name)
    for kept in [*range(1, len(places))]:
        yield ".".join("*" if i in places[: len(places) - kept] else part for i, part in enumerate(parts))
    for kept in [*range(1, len(places))]:
        yield ".".join("*" if i in places[kept:] else part for i, part in enumerate(parts))
    yield name


def _check(module: nn.Module, rules: list[Rule]) -> None:
    """What `apply` will check, before anybody keeps the table."""
    table = {rule.pattern: rule.style for rule in rules}
    styles = match(table, [name for name, _ in module.named_modules()])
    placed = [
        _join(name, key)
        for name in styles
        for key, _ in module.get_submodule(name).named_parameters(recurse=False, remove_duplicate=False)
    ]
    check_covered([name for name, _ in module.named_parameters()], placed, patterns=list(table))
