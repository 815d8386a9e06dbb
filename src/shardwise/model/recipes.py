"""Rule sets for models whose names are known: llama-like and GPT-like. Pure, no torch.

A recipe is a table of name endings; the rules it gives hold only patterns that match the model at hand,
so that they pass the strict matching of `shardwise.model.rules`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardwise.errors import ModelError
from shardwise.findings import nearest
from shardwise.model.adapters import with_adapters, without_adapters
from shardwise.model.rules import generalise


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Styles by name ending: `inner` for modules of a repeated block, `outer` for those before and after."""

    name: str
    inner: Mapping[str, str]
    outer: Mapping[str, str]
    needs: tuple[frozenset[str], ...]
    """The recipe fits when each of these sets has an ending that the model shows."""


def _endings(style: str, *endings: str) -> dict[str, str]:
    return dict.fromkeys(endings, style)


LLAMA = Recipe(
    name="llama",
    inner={
        **_endings("column", "wq", "wk", "wv", "q_proj", "k_proj", "v_proj", "w1", "w3", "gate_proj", "up_proj"),
        **_endings("row", "wo", "o_proj", "w2", "down_proj"),
        **_endings("column-gather", "qkv_proj", "gate_up_proj"),
        **_endings(
            "sequence", "attn_norm", "attention_norm", "ffn_norm", "input_layernorm", "post_attention_layernorm"
        ),
        **_endings("sequence", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
        **_endings("experts", "experts"),
        **_endings("sequence", "moe.router", "mlp.gate", "block_sparse_moe.gate", "mlp.shared_expert_gate"),
        **_endings("heads", "self_attn.q_norm", "self_attn.k_norm", "attn.q_norm", "attn.k_norm"),
    },
    outer={
        **_endings("vocab", "embed", "embed_tokens", "tok_embeddings"),
        **_endings("sequence", "norm"),
        **_endings("head", "head", "lm_head", "output"),
    },
    needs=(frozenset({"wq", "q_proj", "qkv_proj"}), frozenset({"w2", "down_proj", "experts"})),
)

GPT = Recipe(
    name="gpt",
    inner={
        **_endings("column", "attn.q", "attn.k", "attn.v", "mlp.fc", "mlp.c_fc"),
        **_endings("column-gather", "attn.c_attn"),
        **_endings("row", "attn.proj", "attn.c_proj", "mlp.proj", "mlp.c_proj"),
        **_endings("sequence", "ln_1", "ln_2"),
    },
    outer={
        **_endings("vocab", "wte"),
        **_endings("replicate", "wpe"),
        **_endings("sequence", "ln_f"),
        **_endings("head", "lm_head"),
    },
    needs=(frozenset({"attn.q", "attn.c_attn"}), frozenset({"mlp.fc", "mlp.c_fc"})),
)

RECIPES: Mapping[str, Recipe] = {recipe.name: recipe for recipe in (LLAMA, GPT)}


def recipe_for(module_names: Iterable[str], name: str = "auto") -> dict[str, str]:
    """The rules of a known model family for these module names.

    Args:
        module_names: Names of all modules of the original model.
        name: `"llama"`, `"gpt"`, or `"auto"`: the one family whose names are present.

    Returns:
        Pattern -> style; every pattern matches at least one of the names.

    Raises:
        ModelError: The family is unknown, or none fits; the message lists the names and says how to give `rules=`.

    Example:
        >>> names = ["embed", "layers.0.attn.wq", "layers.0.attn.wo", "layers.0.ffn.w2", "head"]
        >>> recipe_for(names)["layers.*.attn.wq"]
        'column'
    """
    shown = list(dict.fromkeys(generalise(n) for n in module_names if n))
    patterns = without_adapters(shown)
    if name != "auto" and name not in RECIPES:
        raise ModelError(f"plan.tensor.recipe={name!r} is not a recipe; {nearest(name, ['auto', *RECIPES])}")
    candidates = list(RECIPES.values()) if name == "auto" else [RECIPES[name]]
    fitting = [recipe for recipe in candidates if _fits(recipe, patterns)]
    if len(fitting) != 1:
        found = "none fits" if not fitting else " and ".join(r.name for r in fitting) + " both fit"
        tried = ", ".join(recipe.name for recipe in candidates)
        raise ModelError(
            f"tensor parallelism: no sharding recipe for this model (tried {tried}: {found}); needed: a rule for each "
            'module with parameters, as apply(..., rules={"layers.*.attn.wq": "column", "layers.*.attn.wo": "row", '
            '"layers.*.norm": "sequence", ...}), see docs/tensor-parallel.md; `shardwise rules package.module:factory` '
            f"finds them from the forward, see docs/rules.md; modules: {', '.join(patterns[:60])}"
            f"{', ...' if len(patterns) > 60 else ''}"
        )
    return with_adapters(_rules(fitting[0], patterns), shown)


def _rules(recipe: Recipe, patterns: list[str]) -> dict[str, str]:
    rules: dict[str, str] = {}
    for pattern in patterns:
        table = recipe.inner if "*" in pattern.split(".") else recipe.outer
        for ending, style in table.items():
            if _ends(pattern, ending):
                rules[pattern] = style
    return rules


def _fits(recipe: Recipe, patterns: list[str]) -> bool:
    inner = [pattern for pattern in patterns if "*" in pattern.split(".")]
    return all(any(_ends(p, ending) for p in inner for ending in endings) for endings in recipe.needs)


def _ends(pattern: str, ending: str) -> bool:
    """Whether the last whole components of the pattern are the ending."""
    return pattern == ending or pattern.endswith("." + ending)
