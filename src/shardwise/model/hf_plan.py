"""Tensor-parallel rules for models of Hugging Face `transformers`: the declared plan, checked and completed. Pure.

A declared plan names some layers (`{"model.layers.*.mlp.up_proj": "colwise"}`); the others are found by the kind of
their module. What a layout cannot split is replicated and said, never left out: `Rules.notes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any, Literal

from shardwise.errors import ModelError
from shardwise.findings import nearest
from shardwise.model.rules import generalise

Kind = Literal["linear", "transposed", "embedding", "norm", "experts", "other"]

DECLARED: Mapping[str, str] = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_gather_output": "column-gather",
    "colwise_rep": "column-gather",
    "rowwise_split_input": "row",
    "rowwise_rep": "row",
    "packed_colwise": "column-gather",
    "packed_rowwise": "row",
    "embedding_rowwise": "vocab",
    "embedding_colwise": "vocab",
    "replicated_with_grad_allreduce": "heads",
    "sequence_parallel": "sequence",
    "mla_kv_a_proj": "column-gather",
    "moe_tp_experts": "experts",
    "ep_dispatch_experts": "experts",
    "grouped_gemm": "experts",
    "local_params": "replicate",
    "all_reduce": "",
    "moe_identity_expert": "",
    "replicate": "replicate",
}
"""Styles of `transformers` -> ours; empty: what that style does is part of another of ours."""
ROWS = (
    *("o_proj", "out_proj", "c_proj", "dense_4h_to_h", "down_proj", "fc2", "lin2", "out_lin", "fc_out", "w2"),
    *("attention.dense", "self_attention.dense", "attn.dense", "output.dense", "SelfAttention.o", "EncDecAttention.o"),
    *("attention.o", "DenseReluDense.wo", "DenseGatedActDense.wo", "mlp.wo", "attn.proj", "attn.Wo", "mlp.Wo"),
)
"""Endings of the layers that lead out of an attention or a feed-forward."""
COLUMNS = (
    *("fc1", "lin1", "c_fc", "fc_in", "up_proj", "gate_proj", "w1", "w3", "dense_h_to_4h", "intermediate.dense"),
    *("DenseReluDense.wi", "DenseGatedActDense.wi_0", "DenseGatedActDense.wi_1"),
)
"""Endings of the layers that lead into a feed-forward, one feature after the other."""
SPLIT_HEADS = (
    *("q_proj", "k_proj", "v_proj"),
    *("self.query", "self.key", "self.value", "attention.query", "attention.key", "attention.value"),
    *("attention.q_lin", "attention.k_lin", "attention.v_lin"),
)
"""Endings of separate projections into heads, one head after the other."""


@dataclass(frozen=True, kw_only=True)
class Fact:
    """What is known of one module that owns parameters."""

    name: str
    kind: Kind
    inputs: int = 0
    """Features in, or rows of an embedding."""
    outputs: int = 0
    in_block: bool = False
    is_head: bool = False
    """The layer whose outputs are the logits."""
    shared_by: tuple[str, ...] = ()
    """Names of the modules that hold one of its parameters too."""
    only_shared: bool = False
    """All of its own parameters belong to other modules, which use them."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Pattern -> style for every module with parameters, and what could not be split."""

    rules: Mapping[str, str]
    notes: tuple[str, ...] = ()
    """Layers that stay whole on every rank, each with the reason."""
    whole_heads: tuple[str, ...] = ()
    """Attentions whose projections are gathered, since their heads cannot be divided: they compute all heads."""


def hf_rules(
    facts: Iterable[Fact],
    declared: Mapping[str, str],
    heads: Mapping[str, Mapping[str, int]],
    tp: int,
) -> Rules:
    """The rules for a model.

    Args:
        facts: every module with parameters of its own.
        declared: pattern of module or parameter -> style of `transformers`; a pattern that names nothing is let pass,
            as one plan serves dense and sparse layers.
        heads: module -> the head counts that it keeps as attributes (`num_heads`), and its `head_dim`.
        tp: size of the axis.

    Raises:
        ModelError: a declared style that is not known, all listed.

    >>> facts = [Fact(name="h.0.up", kind="linear", inputs=4, outputs=8, in_block=True)]
    >>> dict(hf_rules(facts, {"h.*.up": "colwise"}, {}, 2).rules)
    {'h.*.up': 'column'}
    """
    unknown = sorted({style for style in declared.values() if style not in DECLARED})
    if unknown:
        shown = "; ".join(f"{style!r}: {nearest(style, list(DECLARED))}" for style in unknown)
        raise ModelError(
            f"the tensor-parallel plan that the model declares has styles that are not known here ({shown}); needed "
            'one of the known ones; give rules of your own: apply(..., rules={"layers.*.attn.wq": "column", ...})',
            row="module.declared-plan",
        )
    known = {fact.name: fact for fact in facts}
    notes: list[str] = []
    styles = {name: _style(fact, declared) for name, fact in known.items()}
    whole = _whole_attentions(known, styles, heads, tp)
    for parent in whole:
        for name in _children(parent, known):
            if styles[name] == "column":
                styles[name] = "column-gather"
            elif styles[name] == "heads":
                styles[name] = "sequence"
    for name, fact in known.items():
        problem = _indivisible(fact, styles[name], tp)
        if problem:
            notes.append(f"{name}: {problem}")
            styles[name] = "sequence" if fact.kind == "norm" else "replicate"
    _same_for_siblings(known, styles)
    _same_for_ties(known, styles, notes)
    used = {name: style for name, style in styles.items() if not known[name].only_shared}
    return Rules(rules=_patterns(used), notes=tuple(dict.fromkeys(map(generalise, notes))), whole_heads=tuple(whole))


def _style(fact: Fact, declared: Mapping[str, str]) -> str:
    """As declared, where the module bears it; else by its kind and its name."""
    if fact.kind == "experts":
        return "experts"
    said = DECLARED.get(declared.get(generalise(fact.name)) or declared.get(fact.name) or "", "")
    if fact.is_head and fact.kind == "linear":
        return "head"
    if fact.kind == "embedding" and said != "replicate":
        return "replicate" if fact.in_block or not _is_tokens(fact) else "vocab"
    if fact.kind == "norm":
        return "heads" if said == "heads" else "sequence"
    if fact.kind in ("other", "embedding"):
        return "sequence" if fact.in_block and _is_router(fact) else "replicate"
    if said in ("column", "row", "column-gather", "replicate"):
        return said
    if not fact.in_block:
        return "column-gather"
    if _is_router(fact):
        return "sequence"
    if _ends(fact.name, ROWS):
        return "row"
    return "column" if _ends(fact.name, COLUMNS) or _ends(fact.name, SPLIT_HEADS) else "column-gather"


def _is_tokens(fact: Fact) -> bool:
    last = fact.name.rpartition(".")[2]
    return not any(word in last for word in ("position", "type", "wpe", "segment", "_pos"))


def _is_router(fact: Fact) -> bool:
    return fact.name.rpartition(".")[2] in ("gate", "router", "shared_expert_gate", "classifier")


def _ends(name: str, endings: Iterable[str]) -> bool:
    return any(name == ending or name.endswith("." + ending) for ending in endings)


def _children(parent: str, known: Mapping[str, Fact]) -> list[str]:
    return [name for name in known if name.rpartition(".")[0] == parent]


def _whole_attentions(
    known: Mapping[str, Fact], styles: Mapping[str, str], heads: Mapping[str, Mapping[str, int]], tp: int
) -> list[str]:
    """Modules whose column layers must be gathered: heads that tp does not divide, or outputs that mix."""
    found = []
    for parent in dict.fromkeys(name.rpartition(".")[0] for name, style in styles.items() if style == "column"):
        own = [known[name] for name in _children(parent, known)]
        column = [fact for fact in own if styles[fact.name] == "column"]
        counts = dict(heads.get(parent, {}))
        size = counts.pop("head_dim", 0)
        divides = all(count % tp == 0 for count in counts.values()) and all(f.outputs % tp == 0 for f in column)
        if size and _ends(column[0].name, SPLIT_HEADS):
            divides = divides and all(f.outputs // size % tp == 0 for f in column if f.outputs % size == 0)
        gathers = any(styles[f.name] == "column-gather" for f in own)
        # a table of biases per head, or a norm over all heads
        across = [
            f for f in own if f.kind in ("embedding", "other") or (f.kind == "norm" and styles[f.name] != "heads")
        ]
        is_split = any(_ends(f.name, SPLIT_HEADS) for f in column)
        if is_split and parent in known:  # of its own, as a sink of each head
            across.append(known[parent])
        if not divides or gathers or (across if is_split else _between(parent, known)):
            found.append(parent)
    return found


def _between(parent: str, known: Mapping[str, Fact]) -> list[str]:
    """What works between the layers of a feed-forward on all of its features, as a convolution of each channel."""
    depth = parent.count(".") + 2
    parts: dict[str, list[Fact]] = {}
    for name, fact in known.items():
        if name.startswith(f"{parent}."):
            parts.setdefault(".".join(name.split(".")[:depth]), []).append(fact)
    held = [facts for facts in parts.values() if all(fact.kind == "other" for fact in facts)]
    return [fact.name for facts in held for fact in facts if not _is_router(fact)]


def _indivisible(fact: Fact, style: str, tp: int) -> str:
    if style in ("column", "column-gather", "head") and fact.outputs % tp:
        return f"tp={tp} does not divide its {fact.outputs} outputs: whole on every rank"
    if style in ("row", "vocab") and fact.inputs % tp:
        what = "rows" if style == "vocab" else "inputs"
        return f"tp={tp} does not divide its {fact.inputs} {what}: whole on every rank"
    return ""


def _same_for_siblings(known: Mapping[str, Fact], styles: dict[str, str]) -> None:
    """Where one of several layers into heads or features is whole, so are its siblings, and the layer behind them."""
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in known if known[name].in_block):
        linear = [n for n in _children(parent, known) if known[n].kind in ("linear", "transposed")]
        if any(styles[n] == "replicate" for n in linear) and any(styles[n] == "column" for n in linear):
            for name in linear:
                if styles[name] == "column":
                    styles[name] = "column-gather"


def _same_for_ties(known: Mapping[str, Fact], styles: dict[str, str], notes: list[str]) -> None:
    """One parameter has one place: an embedding and a head that share it are split both, or not at all."""
    for name, fact in known.items():
        tied = [other for other in fact.shared_by if other in known and not known[other].only_shared]
        if fact.only_shared or not tied:
            continue
        group = {name, *tied}
        split = {styles[n] for n in group} <= {"vocab", "head"}
        if not split:
            for other in group - {n for n in group if styles[n] == "replicate"}:
                notes.append(f"{other}: tied to {', '.join(sorted(group - {other}))}, which stays whole: whole too")
                styles[other] = "replicate"


def _patterns(styles: Mapping[str, str]) -> dict[str, str]:
    """One pattern where all layers agree, names where they do not."""
    groups: dict[str, set[str]] = {}
    for name, style in styles.items():
        groups.setdefault(generalise(name), set()).add(style)
    rules: dict[str, str] = {}
    for name, style in styles.items():
        pattern = generalise(name)
        rules[pattern if len(groups[pattern]) == 1 else name] = style
    return rules


def caches_keys(module: Any) -> bool:
    """Whether a model of `transformers` keeps keys unless told: its configuration says so, or that of its text."""
    config = getattr(module, "config", None)
    text = getattr(config, "get_text_config", lambda: config)()
    if hasattr(config, "use_cache") or not hasattr(text, "use_cache"):
        return hasattr(config, "use_cache")
    return any(p.name == "use_cache" or p.kind is p.VAR_KEYWORD for p in signature(module.forward).parameters.values())


def value_of(config: Any, key: str) -> Any:
    """What a configuration says under a key: a list where its layers differ in it, None where it says nothing."""
    try:
        return getattr(config, key, None)
    except RuntimeError:  # transformers refuses one answer for layers that differ
        return [getattr(layer, key, None) for layer in config.per_layer_config]
