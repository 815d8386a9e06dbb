"""Models of `transformers`: tensor-parallel rules from declared plans, names and kinds of modules; their configs."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.cli.estimate import estimates
from shardwise.cli.main import main
from shardwise.cli.options.planning import question
from shardwise.errors import ConfigError, DataError, ExitCode, ModelError, PlanError
from shardwise.model.hf_plan import DECLARED, Fact, hf_rules
from shardwise.model.rules import STYLES, match
from shardwise.models.hf import hf_config
from shardwise.plan.plan import Axes, Plan
from shardwise.plan.stack import load_stack


def linear(name: str, inputs: int = 16, outputs: int = 16, in_block: bool = True) -> Fact:
    return Fact(name=name, kind="linear", inputs=inputs, outputs=outputs, in_block=in_block)


def attention(*, kv: int = 16) -> list[Fact]:
    return [
        linear("layers.0.attn.q_proj"),
        linear("layers.0.attn.k_proj", outputs=kv),
        linear("layers.0.attn.v_proj", outputs=kv),
        linear("layers.0.attn.o_proj"),
    ]


QKV = {f"layers.*.attn.{n}_proj": "colwise" for n in "qkv"} | {"layers.*.attn.o_proj": "rowwise"}
EMBED = Fact(name="embed_tokens", kind="embedding", inputs=64, outputs=16)
HEAD = Fact(name="lm_head", kind="linear", inputs=16, outputs=64, is_head=True)


def test_declared_styles_become_ours() -> None:
    assert dict(hf_rules(attention(), QKV, {}, 2).rules) == {
        "layers.*.attn.q_proj": "column",
        "layers.*.attn.k_proj": "column",
        "layers.*.attn.v_proj": "column",
        "layers.*.attn.o_proj": "row",
    }


@pytest.mark.parametrize("inside", ["attn", "mlp.dwconv"])
def test_what_works_on_all_heads_or_features_is_given_all(inside: str) -> None:
    """A sink of each head, a convolution of each channel between two layers: they met a rank's share of them."""
    layers = [*attention(), linear("layers.0.mlp.fc1"), linear("layers.0.mlp.fc2")]
    rules = hf_rules([*layers, Fact(name=f"layers.0.{inside}", kind="other", in_block=True)], QKV, {}, 2)
    first, other = ("attn.q_proj", "mlp.fc1") if inside == "attn" else ("mlp.fc1", "attn.q_proj")
    assert rules.rules[f"layers.*.{first}"] == "column-gather" and rules.rules[f"layers.*.{other}"] == "column"
    assert rules.rules[f"layers.*.{inside}"] == "replicate"


def test_every_style_of_ours_that_a_declared_one_becomes_is_known() -> None:
    assert {style for style in DECLARED.values() if style} <= set(STYLES)


def test_an_unknown_declared_style_is_refused_with_the_nearest() -> None:
    with pytest.raises(ModelError, match="'colwize': did you mean 'colwise'"):
        hf_rules(attention(), {"layers.*.attn.q_proj": "colwize"}, {}, 2)


def test_what_is_not_declared_is_found_by_name_and_kind() -> None:
    facts = [
        EMBED,
        Fact(name="embed_positions", kind="embedding", inputs=66, outputs=16),
        *attention(),
        linear("layers.0.fc1", outputs=32),
        linear("layers.0.fc2", inputs=32),
        linear("layers.0.other.odd", outputs=32),
        Fact(name="layers.0.norm", kind="norm", in_block=True),
        Fact(name="layers.0.mlp.experts", kind="experts", in_block=True),
        Fact(name="layers.0.mlp.gate", kind="other", in_block=True),
        HEAD,
    ]
    found = hf_rules(facts, {}, {}, 2)
    assert dict(found.rules) == {
        "embed_tokens": "vocab",
        "embed_positions": "replicate",
        "layers.*.attn.q_proj": "column",
        "layers.*.attn.k_proj": "column",
        "layers.*.attn.v_proj": "column",
        "layers.*.attn.o_proj": "row",
        "layers.*.fc1": "column",
        "layers.*.fc2": "row",
        "layers.*.other.odd": "column-gather",
        "layers.*.norm": "sequence",
        "layers.*.mlp.experts": "experts",
        "layers.*.mlp.gate": "sequence",
        "lm_head": "head",
    }
    assert not found.notes and match(found.rules, [fact.name for fact in facts])


@pytest.mark.parametrize(
    ("heads", "tp"),
    [({"num_heads": 4, "num_key_value_heads": 2}, 4), ({"num_heads": 3}, 2), ({"head_dim": 8}, 4)],
)
def test_heads_that_tp_does_not_divide_are_gathered(heads: dict[str, int], tp: int) -> None:
    found = hf_rules(attention(), QKV, {"layers.0.attn": heads}, tp)
    assert {found.rules[f"layers.*.attn.{n}_proj"] for n in "qkv"} == {"column-gather"}
    assert found.rules["layers.*.attn.o_proj"] == "row" and found.whole_heads == ("layers.0.attn",)


def test_a_norm_over_all_heads_needs_whole_ones() -> None:
    norm = Fact(name="layers.0.attn.q_norm", kind="norm", in_block=True)
    whole = hf_rules([*attention(), norm], QKV, {}, 2).rules
    assert whole["layers.*.attn.q_proj"] == "column-gather" and whole["layers.*.attn.q_norm"] == "sequence"
    split = hf_rules([*attention(), norm], {**QKV, "layers.*.attn.q_norm": "replicated_with_grad_allreduce"}, {}, 2)
    assert split.rules["layers.*.attn.q_proj"] == "column" and split.rules["layers.*.attn.q_norm"] == "heads"


def test_what_cannot_be_split_stays_whole_and_is_said() -> None:
    found = hf_rules([replace(EMBED, inputs=65), replace(HEAD, outputs=65)], {}, {}, 2)
    assert dict(found.rules) == {"embed_tokens": "replicate", "lm_head": "replicate"}
    assert found.notes == (
        "embed_tokens: tp=2 does not divide its 65 rows: whole on every rank",
        "lm_head: tp=2 does not divide its 65 outputs: whole on every rank",
    )


def test_tied_layers_get_one_place() -> None:
    tied = [replace(EMBED, shared_by=("lm_head",)), replace(HEAD, shared_by=("embed_tokens",))]
    assert dict(hf_rules(tied, {}, {}, 2).rules) == {"embed_tokens": "vocab", "lm_head": "head"}
    odd = [
        replace(tied[0], name="position_embed", shared_by=("lm_head",)),
        replace(tied[1], shared_by=("position_embed",)),
    ]
    found = hf_rules(odd, {}, {}, 2)
    assert set(found.rules.values()) == {"replicate"} and "lm_head: tied to position_embed" in found.notes[0]


def test_a_module_whose_parameters_others_use_has_no_rule() -> None:
    bias = Fact(name="predictions", kind="other", shared_by=("lm_head",), only_shared=True)
    assert "predictions" not in hf_rules([bias, replace(HEAD, shared_by=("predictions",))], {}, {}, 2).rules


def test_layers_that_differ_are_named_one_by_one() -> None:
    facts = [linear("layers.0.mlp.fc1", outputs=32), linear("layers.1.mlp.fc1", outputs=33)]
    found = hf_rules(facts, {}, {}, 2)
    assert dict(found.rules) == {"layers.0.mlp.fc1": "column", "layers.1.mlp.fc1": "replicate"}


# ---------------------------------------------------------------- configs as the planner's MODEL


BERT = {"model_type": "bert", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 64}


def written(folder: Path, **keys: object) -> str:
    (folder / "config.json").write_text(json.dumps(keys))
    return f"hf:{folder / 'config.json'}"


@pytest.mark.soak
def test_experts_whose_tokens_are_grouped_before_are_read_as_they_are(tmp_path: Path) -> None:
    llama4 = written(
        tmp_path, model_type="llama4_text", hidden_size=32, intermediate_size=16, intermediate_size_mlp=24,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_hidden_layers=2, vocab_size=64,
        num_local_experts=4, num_experts_per_tok=1, interleave_moe_layer_step=1,
    )  # fmt: skip
    asked = question(llama4, "h100:8", seq=64, batch=8, tokens=None)
    assert (asked.profile.experts, asked.profile.chosen) == (4, 4)  # each expert multiplies every token, chosen or not
    stacked = [(op.name, op.ins, op.outs) for op in asked.profile.blocks[0].matmuls if op.experts]
    assert stacked == [("gate_up_proj", 32, 32), ("down_proj", 16, 32)]
    assert any("meets all 4 experts" in note for note in asked.assumed)


def test_experts_that_are_called_in_an_unknown_way_are_refused_by_name() -> None:
    import torch

    from shardwise.model.standin import stand_in_experts

    class Odd(torch.nn.Module):
        __module__ = "transformers.models.odd"

        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Parameter(torch.zeros(2, 4, 4))

    model = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"experts": Odd()})})
    stand_in_experts(model)
    tokens = torch.zeros(3, 4)
    with pytest.raises(
        ModelError, match=r"mlp.experts \(Odd\): .*called with \(Tensor, chosen=Tensor\).*--trace-on cpu"
    ):
        model["mlp"]["experts"](tokens, chosen=tokens)


def test_sizes_that_do_not_go_together_are_refused_with_file_and_reason(tmp_path: Path) -> None:
    odd = written(tmp_path, model_type="llama", hidden_size=4096, num_attention_heads=33)
    with pytest.raises(ConfigError, match=r"config\.json: .*\(4096\) is not a multiple .* heads \(33\)") as refused:
        question(odd, "h100:8", seq=64, batch=8, tokens=None)
    assert refused.value.exit_code == ExitCode.USAGE
    with pytest.raises(ConfigError, match=r"json: BertForMaskedLM cannot be made .*heads \(5\)"):  # by its constructor
        question(written(tmp_path, **BERT | {"num_attention_heads": 5}), "h100:8", seq=64, batch=8, tokens=None)


@pytest.mark.parametrize(
    ("said", "refusal"),
    [
        ({"hidden_size": -512}, "hidden_size: found -512, needed at least 1"),
        ({"hidden_size": 10**15}, "hidden_size: found 1,000,000,000,000,000, needed at most"),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers: found 10,000,000, needed at most 2,000"),
        ({"intermediate_size": -5}, "intermediate_size: found -5, needed at least 0"),
        ({"max_position_embeddings": -1}, "max_position_embeddings: found -1, needed at least 1"),
        ({"num_key_value_heads": 7}, "num_key_value_heads: found 7, needed a divisor of num_attention_heads = 32"),
        (
            {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 4},
            "num_experts_per_tok: found 4, .* = 2",
        ),
        ({"model_type": "mixtral", "num_experts_per_tok": 0}, "num_experts_per_tok: found 0, needed at least 1 .* = 8"),
        ({"attention_dropout": 2.0}, "attention_dropout: found 2.0, needed a share between 0 and 1"),
        ({"architectures": ["LLamaForCausalLM"]}, "architectures names 'LLamaForCausalLM'.* did you mean 'LlamaForC"),
        ({"hidden_act": "geluu"}, "LlamaForCausalLM cannot be made .* mend hidden_act"),
        ({"hidden_size": 4096.5}, "transformers refuses the configuration .*hidden_size"),
        ({"architectures": "LlamaForCausalLM"}, "architectures: found 'LlamaForCausalLM', needed a list"),
        ({"model_type": ["llama"]}, r"found model_type \['llama'\], needed one that transformers"),
    ],
)
def test_sizes_that_cannot_be_are_refused(tmp_path: Path, said: dict[str, object], refusal: str) -> None:
    with pytest.raises(ConfigError, match=rf"config\.json: {refusal}"):
        question(written(tmp_path, **{"model_type": "llama"} | said), "h100:8", seq=64, batch=8, tokens=None)


def test_a_class_that_is_made_for_another_type_is_said(tmp_path: Path) -> None:
    """Files contradict themselves: what was read is said, and where it cannot be, what to mend."""
    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    small |= {"intermediate_size": 96, "vocab_size": 320}
    works = written(tmp_path, model_type="llama", architectures=["GemmaForCausalLM"], **small)
    said = "architectures names {}, a class of {}, and model_type is {}"
    notes = question(works, "h100:8", seq=64, batch=8, tokens=None).assumed
    assert f"its {said.format('GemmaForCausalLM', 'gemma', 'llama')}: that class is read with its sizes" in notes
    for name, kind, other, error in (
        ("MistralForCausalLM", "mistral", "llama", ModelError),  # by its forward
        ("LlamaForCausalLM", "llama", "mistral", ConfigError),  # by its constructor
    ):
        fails = written(tmp_path, model_type=other, architectures=[name], **small)
        with pytest.raises(error, match=said.format(name, kind, other) + ": mend one"):
            question(fails, "h100:8", seq=64, batch=8, tokens=None)


@pytest.mark.parametrize("words", ["plan hf:llama h100:8", "check dp2 --model hf:llama", "rules hf:llama"])
def test_without_transformers_its_extra_is_named(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == ExitCode.USAGE and "pip install 'shardwise[hf]'" in capsys.readouterr().err


def test_how_a_model_is_given_is_said(tmp_path: Path) -> None:
    """Of a config.json sizes were missing, and a repository's name was a file that is not there."""
    model = written(tmp_path, **BERT)
    with pytest.raises(ConfigError, match=r"found a config.json of transformers .*give it as hf:/.*config.json"):
        question(model.removeprefix("hf:"), "h100:8", seq=64, batch=8, tokens=None)
    with pytest.raises(DataError, match="nothing is downloaded; the preset llama-8b has these sizes: leave out hf:"):
        question("hf:meta-llama/Llama-3.1-8B", "h100:8", seq=64, batch=8, tokens=None)
    with pytest.raises(DataError, match="nothing is downloaded$"):
        question("hf:meta-llama/Llama-9-8B", "h100:8", seq=64, batch=8, tokens=None)


def test_a_list_is_no_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[1, 2]")
    with pytest.raises(DataError, match=r"found a JSON list, needed an object"):
        question(f"hf:{tmp_path}", "h100:8", seq=64, batch=8, tokens=None)


def test_sizes_that_a_file_does_not_say_are_marked_as_assumed(tmp_path: Path) -> None:
    model = written(tmp_path, model_type="gpt2", n_layer=2, hidden_size=64, n_head=4)
    said = question(model, "h100:8", seq=64, batch=8, tokens=None).assumed
    assert "its config.json does not say vocab_size 50,257: the defaults of gpt2" in said
    whole = written(tmp_path, model_type="gpt2", n_layer=2, n_embd=64, n_head=4, vocab_size=320)
    assert not any("does not say" in note for note in question(whole, "h100:8", seq=64, batch=8, tokens=None).assumed)


@pytest.mark.soak
def test_sizes_that_a_part_of_a_file_does_not_say_are_marked_as_assumed(tmp_path: Path) -> None:
    inner = written(tmp_path, model_type="gemma3", text_config={"num_hidden_layers": 2, "vocab_size": 320})
    (note,) = (n for n in question(inner, "h100:8", seq=64, batch=8, tokens=None).assumed if "does not say" in n)
    assert "hidden_size 2,304" in note and "num_hidden_layers" not in note


@pytest.mark.share(4)
@pytest.mark.parametrize(
    ("keys", "longest"),
    [
        ({**BERT, "max_position_embeddings": 96}, 96),
        ({**BERT, "model_type": "roberta", "max_position_embeddings": 98}, 96),  # counted from the padding's id on
        ({"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 96, "vocab_size": 64}, 96),
        ({"model_type": "bloom", "hidden_size": 32, "n_head": 4, "n_layer": 2, "vocab_size": 64}, None),
    ],
)
def test_the_positions_of_a_config_bound_the_assumed_length(
    tmp_path: Path, keys: dict[str, object], longest: int | None
) -> None:
    model = written(tmp_path, **keys)
    asked = question(model, "h100:8", seq=None, batch=8, tokens=None)
    assert asked.workload.seq_len == (longest or 4096)
    assert any(f"sequence length: {longest or 4096} tokens" in note for note in asked.assumed)
    more = question(model, "h100:8", seq=200, batch=8, tokens=None)
    said = any("has positions for 96 tokens; it is planned for 200" in note for note in more.assumed)
    assert (more.workload.seq_len, said) == (200, longest is not None)


def test_tp_and_ep_where_apply_accepts_them(tmp_path: Path) -> None:
    """Sizes are the configuration's, the profile is the model's own: under tp it is that of the preset."""
    text = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 16}
    text |= {"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 128256}
    text |= {"tie_word_embeddings": True, "max_position_embeddings": 8192}
    (tmp_path / "config.json").write_text(json.dumps(text))
    names = (f"hf:{tmp_path / 'config.json'}", "llama-1b")
    asked = [question(name, "h100:8", seq=4096, batch=8, tokens=None) for name in names]
    assert asked[0].refused == ("ep",) and asked[0].limits is not None and asked[0].limits.num_kv_heads == 8
    plan = Plan.parse("dp2 tp4 / gbs8 / bf16 / seq loss-parallel compile")  # whose element-wise chains are as fused
    (memory, step), (known, known_step) = (estimates(plan, each, load_stack("shardwise")) for each in asked)
    assert memory.allocated == pytest.approx(known.allocated, rel=0.03)
    assert step.total == pytest.approx(known_step.total, rel=0.05)
    with pytest.raises(PlanError, match=r"tp\.kv-heads|tp\.heads"):
        estimates(plan.with_(axes=Axes(tp=3)), asked[0], load_stack("shardwise"))


def test_tp_is_left_out_where_layers_would_stay_whole(tmp_path: Path) -> None:
    gpt2 = written(tmp_path, model_type="gpt2", n_layer=2, n_embd=64, n_head=4, vocab_size=321)
    asked = question(gpt2, "h100:8", seq=64, batch=8, tokens=None)
    assert "tp" in asked.refused and "tp is left out: hf.whole" in asked.assumed
    mixtral = written(
        tmp_path, model_type="mixtral", hidden_size=64, intermediate_size=96, num_attention_heads=8,
        num_key_value_heads=8, num_hidden_layers=2, num_local_experts=8, vocab_size=320,
    )  # fmt: skip
    assert question(mixtral, "h100:8", seq=64, batch=8, tokens=None).refused == ()


@pytest.mark.soak
def test_that_a_sample_is_text_alone_is_said(tmp_path: Path) -> None:
    config = hf_config("gemma3")
    small = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    for part in (config.text_config, config.vision_config):
        for key, value in small.items():
            setattr(part, key, value)
    config.text_config.num_key_value_heads, config.text_config.head_dim, config.text_config.vocab_size = 2, 16, 320
    config.text_config.layer_types = config.text_config.layer_types[:2]
    config.save_pretrained(tmp_path)
    asked = question(f"hf:{tmp_path}", "h100:8", seq=32, batch=8, tokens=None)
    assert [note for note in asked.assumed if "vision part keeps and computes is not counted" in note]
    llama = written(tmp_path, model_type="llama", **small, vocab_size=320)
    assert not any("is text alone" in note for note in question(llama, "h100:1", seq=8, batch=1, tokens=None).assumed)
