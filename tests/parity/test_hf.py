"""Models of transformers, unmodified, under every axis: as a plain loop over the same model in one process.

What a family cannot do under an axis is refused before anything is trained, naming the module and the reason.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest
import torch
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

import shardwise as sw
from shardwise.cli.options.hf import hf_findings
from shardwise.diagnose.verifying.random_hf import check_name
from shardwise.errors import ConfigError, DataError, ModelError
from shardwise.model.hf_plan import DECLARED
from shardwise.model.stacks import find_blocks
from shardwise.models.hf import hf_config, hf_factory
from shardwise.models.hf_sizes import shrunk_config
from shardwise.parallel.declared import declared_blocks
from shardwise.parallel.init import init_model
from shardwise.testing.world import World
from tests.parity import hf_models
from tests.parity.grid import Trace, differences
from tests.parity.hf_families import FAMILIES, PLANS, REFUSED, SOAK
from tests.parity.test_grid import cells

TOLERANCE = 1e-11
APART = 1 if os.environ.get("SHARDWISE_SOAK") else 4
"""At each change a plan trains one family of four."""
UNLIKE = ("gemma4_text", "gemma3n_text")
"""Families whose layers differ in sizes, or take keys of layers before them."""
MODULES = [family.removesuffix("_text") for family in (*FAMILIES, *UNLIKE)]


@pytest.fixture(scope="module", autouse=True)
def warm(world: World) -> None:
    world.preload(__name__, *(f"transformers.models.{name}.modeling_{name}" for name in MODULES))


@functools.cache
def truths(world: World) -> dict[str, Trace | str]:
    made = {family: hf_models.config(family) for family in FAMILIES}
    found: dict[str, Trace | str] = world(1, hf_models.references, made, timeout_s=300)[0]
    return found


def compared(world: World, plan: str, made: dict[str, Any], truth: dict[str, Trace | str]) -> dict[str, str]:
    """Family -> what differs or went wrong."""
    text = f"{plan} / fp64"
    ranks = world(sw.Plan.parse(text).world, hf_models.run_families, text, made, timeout_s=300)
    wrong = {}
    for family in made:
        failed = next((rank[family] for rank in ranks if isinstance(rank[family], str)), None)
        if failed is not None:
            wrong[family] = failed
            continue
        worst = differences([rank[family] for rank in ranks], truth[family])
        if max(worst.values()) > TOLERANCE:
            wrong[family] = str(worst)
    return wrong


def drawn(plan: str) -> list[str]:
    """The families that a plan trains at each change: begun so that, together, plans leave none out."""
    return list(PLANS[plan])[([*PLANS].index(plan) * 3 + 1) % APART :: APART]


@pytest.mark.parametrize("plan", cells(list(PLANS), SOAK))
def test_families_train_as_one_process_does(world: World, plan: str) -> None:
    families = drawn(plan)
    made = {family: hf_models.config(family) for family in families}
    assert compared(world, plan, made, truths(world)) == {}


def test_every_family_is_trained_at_every_change() -> None:
    found = {family for plan in PLANS if plan not in SOAK for family in drawn(plan)}
    assert found == set(FAMILIES)


@pytest.mark.parametrize("plan", REFUSED)
def test_what_a_family_cannot_do_is_a_finding_before_launch(plan: str) -> None:
    for family, (row, reason) in REFUSED[plan].items():
        if family in ("llama", "qwen2", "qwen3", "phi3", "olmo2"):
            continue  # as mistral
        (finding,) = hf_findings(hf_models.config(family), sw.Plan.parse(plan))
        assert (finding.id, finding.severity) == (row, "error"), family
        assert reason in finding.what, f"{family}: {finding.what}"


def test_every_style_that_transformers_registers_is_known() -> None:
    assert set(ALL_PARALLEL_STYLES.keys()) <= set(DECLARED)


def test_a_legal_plan_has_no_finding() -> None:
    assert hf_findings(hf_models.config("llama"), sw.Plan.parse("pp2 fsdp2 tp2 / mb2 / seq")) == []


def test_grouped_heads_fewer_than_tp_are_computed_on_every_rank(world: World) -> None:
    made = {"mistral": hf_models.config("mistral", num_key_value_heads=1)}
    truth = world(1, hf_models.references, made)[0]
    assert compared(world, "tp2", made, truth) == {}


@pytest.mark.parametrize("plan", ["fsdp2", "cp2"])
def test_families_of_unlike_layers(world: World, plan: str) -> None:
    made = {family: hf_models.config(family) for family in UNLIKE}
    truth = world(1, hf_models.references, made, timeout_s=300)[0]
    assert compared(world, plan, made, truth) == {}


def test_sinks_of_heads_are_met_by_all_heads(world: World) -> None:
    """It ended in a message from deep inside of torch."""
    made = {"gpt_oss": hf_models.config("gpt_oss")}
    truth = world(1, hf_models.references, made, timeout_s=300)[0]
    assert compared(world, "tp2", made, truth) == {}


@pytest.mark.parametrize("plan", ["cp2", pytest.param("pp2 cp2 / 1f1b mb2", marks=pytest.mark.soak)])
def test_positions_that_are_counted_from_the_padding_token_on(world: World, plan: str) -> None:
    """They were given as 0, 1, ...: another embedding of every token, and nothing said so."""
    made = {"roberta": hf_models.config("roberta", pad_token_id=2)}  # which the rows have too: it takes no position
    truth = world(1, hf_models.references, made, timeout_s=300)[0]
    assert compared(world, plan, made, truth) == {}


def test_what_every_layer_is_given_from_outside_is_no_chain() -> None:
    (chain,) = hf_findings(hf_models.config("gemma4_text"), sw.Plan.parse("pp2 / mb2"))
    assert chain.id == "module.chain" and "is made before the blocks from parameters" in chain.what


def test_dropout_inside_attention_draws_the_same_under_every_plan(world: World) -> None:
    made = {"gpt2": hf_models.config("gpt2", resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)}
    truth = world(1, hf_models.run_families, "dp1 / fp64", made)[0]
    assert isinstance(truth["gpt2"], Trace), truth["gpt2"]
    assert compared(world, "tp2", made, truth) == {}


@pytest.mark.share(2)
@pytest.mark.parametrize("plan", ["pp2 / 1f1b mb2", "tp2 / seq"])
def test_padded_rows(world: World, plan: str) -> None:
    made = {family: hf_models.config(family, pads=True) for family in ("llama", "mistral", "gemma3_text", "gpt2")}
    truth = world(1, hf_models.references, made, timeout_s=300)[0]
    assert compared(world, plan, made, truth) == {}


def test_a_vocabulary_that_tp_does_not_divide_stays_whole_and_is_said() -> None:
    (finding,) = hf_findings(hf_models.config("gpt2", vocab_size=63), sw.Plan.parse("tp2"))
    assert finding.severity == "warning"
    assert "transformer.wte: tp=2 does not divide its 63 rows" in finding.what and "lm_head" in finding.what


def test_weights_are_drawn_as_the_constructor_draws_them() -> None:
    made = shrunk_config(hf_config("gpt2"))
    one, two = (dict(init_model(hf_factory(made), seed=3).named_parameters()) for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert 0.015 < float(one["transformer.h.0.mlp.c_fc.weight"].detach().std()) < 0.025
    assert bool((one["transformer.h.0.ln_1.weight"] == 1.0).all())


def test_shrinking_keeps_what_a_plan_meets() -> None:
    grouped = shrunk_config(hf_config("mistral"))
    assert (grouped.num_attention_heads, grouped.num_key_value_heads) == (8, 2)
    assert shrunk_config(hf_config("gemma3_text")).layer_types[:2] == ["sliding_attention", "full_attention"]
    assert shrunk_config(hf_config("gemma2")).tie_word_embeddings


def test_experts_of_which_a_family_does_not_say_how_many_a_token_is_given_to() -> None:
    said = hf_config("deepseek_v2")
    with pytest.raises(ConfigError, match=r"num_experts_per_tok: found null, needed how many of the 64 experts"):
        hf_factory(said)()
    assert shrunk_config(said).num_experts_per_tok == 2
    assert "num_experts_per_tok null -> 2" in check_name("deepseek_v2", sw.Plan.parse("fsdp2"))


def test_a_name_that_transformers_does_not_know_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'llama'"):
        hf_config("hf:lama")
    with pytest.raises(DataError, match="no such file"):
        hf_config("hf:/nowhere/config.json")
    assert hf_config("LlamaForCausalLM").model_type == "llama"


def test_a_configuration_of_another_kind_is_refused(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="found no `model_type`"):
        hf_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LamaForCausalLM"]}')
    with pytest.raises(ConfigError, match="architectures names 'LamaForCausalLM'"):
        hf_factory(hf_config(tmp_path))()


def test_an_instance_of_the_users_own_works_too() -> None:
    torch.manual_seed(0)
    module = hf_factory(hf_models.config("llama"))()
    with sw.open_mesh(sw.Plan()) as mesh:
        placed = sw.apply(module, sw.Plan(), mesh)
        ids = torch.randint(0, hf_models.VOCAB, (2, 8))
        assert placed.module(input_ids=ids).past_key_values is None


def test_the_plans_that_a_model_declares_say_which_modules_are_its_blocks() -> None:
    made = hf_models.config("llama", num_hidden_layers=1)  # one alone looks like no repetition
    with torch.device("meta"):
        llama, gpt2 = (hf_factory(one)() for one in (made, hf_models.config("gpt2")))
    assert declared_blocks(llama) == ("model.layers.0",)
    llama._pp_plan = {}
    assert declared_blocks(llama) == ("model.layers.0",)  # by its sharding plan
    assert declared_blocks(gpt2) == () and find_blocks(gpt2) == ("transformer.h.0", "transformer.h.1")
    llama._pp_plan = {"model.layer": (["hidden_states"], ["hidden_states"])}
    with pytest.raises(ModelError, match=r"names model.layer, .* did you mean 'model.layers'") as refused:
        declared_blocks(llama)
    gpt2._fsdp_plan = {"transformer.h.*": "keep_full_wieght"}
    with pytest.raises(ModelError, match="styles that are not known") as also:
        declared_blocks(gpt2)
    assert refused.value.row == also.value.row == "module.declared-plan"
