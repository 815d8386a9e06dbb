"""Strict matching, coverage and recipes."""

from __future__ import annotations

import pytest

from shardwise.errors import ModelError
from shardwise.model.recipes import recipe_for
from shardwise.model.rules import check_covered, generalise, match

DECODER = [
    "",
    "embed",
    "layers",
    *(
        f"layers.{i}{rest}"
        for i in range(2)
        for rest in (
            *("", ".attn_norm", ".attn", ".attn.wq", ".attn.wk", ".attn.wv", ".attn.wo"),
            *(".ffn_norm", ".ffn", ".ffn.w1", ".ffn.w2", ".ffn.w3"),
        )
    ),
    "norm",
    "head",
]


def test_match_gives_one_style_per_module() -> None:
    styles = match({"layers.*.attn.wq": "column", "layers.*.attn.wo": "row"}, DECODER)
    assert styles == {
        "layers.0.attn.wq": "column",
        "layers.0.attn.wo": "row",
        "layers.1.attn.wq": "column",
        "layers.1.attn.wo": "row",
    }


def test_star_matches_exactly_one_component() -> None:
    with pytest.raises(ModelError, match="matches no module"):
        match({"*.wq": "column"}, DECODER)


def test_last_double_star_matches_the_whole_subtree() -> None:
    assert set(match({"layers.0.**": "replicate"}, DECODER)) == {n for n in DECODER if n.startswith("layers.0.")}


def test_a_pattern_matches_the_model_itself_by_the_empty_name() -> None:
    assert match({"": "replicate"}, DECODER) == {"": "replicate"}


@pytest.mark.parametrize("pattern", ["layers.**.wq", "layers.*.w*"])
def test_other_uses_of_stars_are_refused(pattern: str) -> None:
    with pytest.raises(ModelError, match="one rule per name"):
        match({pattern: "column"}, DECODER)


def test_all_problems_are_listed_at_once() -> None:
    rules = {
        "layers.*.attn.wqq": "column",
        "layers.*.attn.wq": "colunm",
        "layers.0.ffn.w1": "column",
        "*.0.ffn.w1": "row",
    }
    with pytest.raises(ModelError) as caught:
        match(rules, DECODER)
    text = str(caught.value)
    assert "3 problem(s)" in text
    assert "'layers.*.attn.wqq' matches no module; did you mean 'layers.*.attn.wq'" in text
    assert "unknown style 'colunm'; did you mean 'column'" in text
    assert "'layers.0.ffn.w1' is matched by 2 rules" in text


def test_an_exact_name_does_not_override_a_pattern() -> None:
    with pytest.raises(ModelError, match="matched by 2 rules"):
        match({"layers.*.attn.wq": "column", "layers.0.attn.wq": "replicate"}, DECODER)


def test_long_lists_are_cut() -> None:
    with pytest.raises(ModelError, match="and 30 more"):
        match({f"nothing{i}": "column" for i in range(50)}, DECODER)


def test_covered_names_pass() -> None:
    check_covered(["a.weight", "a.bias", "b.norm.weight"], ["a.weight", "a.bias"], ["*.norm"])


def test_uncovered_parameters_raise_with_the_nearest_pattern() -> None:
    names = [f"layers.{i}.ffn.w{j}.weight" for i in range(2) for j in (1, 2)]
    with pytest.raises(ModelError) as caught:
        check_covered(names, [n for n in names if "w1" in n], patterns=["layers.*.ffn.w1"])
    text = str(caught.value)
    assert "layers.0.ffn.w2.weight, layers.1.ffn.w2.weight" in text
    assert "did you mean 'layers.*.ffn.w1'" in text
    assert '"replicate"' in text


@pytest.mark.parametrize(("placed", "replicated"), [(["a.weight", "a.weight"], []), (["a.weight"], ["a"])])
def test_parameters_placed_twice_raise(placed: list[str], replicated: list[str]) -> None:
    with pytest.raises(ModelError, match="placed 2 times"):
        check_covered(["a.weight"], placed, replicated)


def test_generalise() -> None:
    assert generalise("h.11.mlp.0.fc1") == "h.*.mlp.*.fc1"


def test_the_decoder_gets_the_llama_recipe() -> None:
    assert recipe_for(DECODER) == {
        "embed": "vocab",
        "layers.*.attn_norm": "sequence",
        "layers.*.attn.wq": "column",
        "layers.*.attn.wk": "column",
        "layers.*.attn.wv": "column",
        "layers.*.attn.wo": "row",
        "layers.*.ffn_norm": "sequence",
        "layers.*.ffn.w1": "column",
        "layers.*.ffn.w2": "row",
        "layers.*.ffn.w3": "column",
        "norm": "sequence",
        "head": "head",
    }


def test_names_of_hugging_face_llama() -> None:
    block = [
        *(f"self_attn.{n}_proj" for n in "qkvo"),
        *(f"mlp.{n}_proj" for n in ("gate", "up", "down")),
        *("input_layernorm", "post_attention_layernorm", "self_attn.q_norm"),
    ]
    names = ["model.embed_tokens", *(f"model.layers.0.{n}" for n in block), "model.norm", "model.rotary_emb", "lm_head"]
    rules = recipe_for(names)
    assert rules["model.layers.*.self_attn.q_proj"] == "column"
    assert rules["model.layers.*.mlp.down_proj"] == "row"
    assert rules["model.layers.*.self_attn.q_norm"] == "heads"
    assert rules["model.embed_tokens"] == "vocab" and rules["model.norm"] == "sequence" and rules["lm_head"] == "head"
    assert "model.rotary_emb" not in rules


def test_names_of_gpt_split_and_fused() -> None:
    split = [
        "wte",
        "wpe",
        *(f"h.0.{n}" for n in ("ln_1", "attn.q", "attn.k", "attn.v", "attn.proj", "mlp.fc", "mlp.proj")),
    ]
    rules = recipe_for([*split, "ln_f", "lm_head"])
    assert rules["h.*.attn.q"] == "column" and rules["h.*.attn.proj"] == "row" and rules["wpe"] == "replicate"
    fused = [
        "transformer.wte",
        *(f"transformer.h.0.{n}" for n in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")),
    ]
    rules = recipe_for(fused)
    assert rules["transformer.h.*.attn.c_attn"] == "column-gather" and rules["transformer.h.*.mlp.c_proj"] == "row"


@pytest.mark.parametrize("names", [DECODER, ["wte", "h.0.attn.q", "h.0.attn.proj", "h.0.mlp.fc", "h.0.mlp.proj"]])
def test_every_rule_of_a_recipe_matches(names: list[str]) -> None:
    assert match(recipe_for(names), names)


def test_an_unknown_family_lists_the_names_and_the_way_out() -> None:
    with pytest.raises(ModelError) as caught:
        recipe_for(["conv.0", "conv.1", "fc"])
    assert "conv.*, fc" in str(caught.value) and "rules=" in str(caught.value)


def test_a_named_recipe_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ModelError, match="tried gpt: none fits"):
        recipe_for(DECODER, "gpt")
    with pytest.raises(ModelError, match="did you mean 'llama'"):
        recipe_for(DECODER, "lama")
