from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from shardwise.errors import ConfigError, ModelError, UsageError
from shardwise.model.profile import SCANNED, profile_of
from shardwise.model.spec import ModelSpec, load_spec, preset, presets, refuse_unbuilt, spec_from_dict

# number of parameters of the published checkpoints
PUBLISHED = {
    "llama-8b": 8_030_261_248,
    "llama-70b": 70_553_706_496,
    "llama-405b": 405_853_388_800,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen-0.5b": 494_032_768,
    "qwen-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "gpt2-small": 124_439_808,
    "llama-1b": 1_235_814_400,
    "llama-3b": 3_212_749_824,
    "llama-30b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama2-70b": 68_976_648_192,
    "qwen-1.5b": 1_543_714_304,
    "qwen-3b": 3_085_938_688,
    "qwen-14b": 14_770_033_664,
    "qwen-32b": 32_763_876_352,
    "qwen-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "yi-34b": 34_388_917_248,
    "smollm-1.7b": 1_711_376_384,
    "phi-4": 14_659_507_200,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "tinyllama-1.1b": 1_100_048_384,
    "codellama-34b": 33_743_970_304,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "mistral-large-123b": 122_610_069_504,
    "yi-6b": 6_061_035_520,
    "yi-9b": 8_829_407_232,
    "deepseek-7b": 6_910_365_696,
    "deepseek-67b": 67_425_001_472,
    "internlm2-7b": 7_737_708_544,
    "internlm2-20b": 19_861_149_696,
    "smollm-135m": 134_515_008,
    "smollm-360m": 361_821_120,
    "smollm3-3b": 3_075_098_624,
    "phi-3-mini": 3_821_079_552,
    "phi-3-medium": 13_960_238_080,
    "phi-4-mini": 3_836_021_760,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gemma3-1b": 999_885_952,
    "mixtral-8x22b": 140_630_071_296,
    "dbrx": 131_596_523_520,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "gpt-neox-20b": 20_554_567_680,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "phi-2": 2_779_683_840,
    "starcoder2-3b": 3_030_371_328,
    "starcoder2-7b": 7_173_923_840,
    "starcoder2-15b": 15_957_889_024,
    "bloom-560m": 559_214_592,
    "bloom-1.1b": 1_065_314_304,
    "bloom-1.7b": 1_722_408_960,
    "bloom-3b": 3_002_557_440,
    "bloom-7b": 7_069_016_064,
    "bloom-176b": 176_247_271_424,
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "vit-b-16": 86_567_656,
    "vit-l-16": 304_326_632,
    "vit-h-14": 632_045_800,
    "glm4-9b": 9_399_951_360,
    "glm-4.5": 352_797_814_784,
    "glm-4.5-air": 106_852_245_504,
    "hunyuan-a13b": 80_393_183_232,
    "dots-142b": 142_774_373_888,
    "seed-oss-36b": 36_151_104_512,
}

# rounded as their authors print them, or with small parts (head norms over all heads, two rows of positions, biases of
# experts) that sizes do not tell; without vision towers and modules that predict a second token
ABOUT = {
    "olmo2-1b": 1.4849e9,
    "olmo2-7b": 7.2986e9,
    "olmo2-13b": 13.716e9,
    "olmo2-32b": 32.234e9,
    "gemma3-4b": 3.8801e9,
    "gemma3-12b": 11.766e9,
    "gemma3-27b": 27.009e9,
    "olmoe-7b": 6.9192e9,
    "phi-3.5-moe": 41.873e9,
    "qwen3-480b-a35b": 480.15e9,
    "qwen2-57b-a14b": 57.41e9,
    "gpt-oss-20b": 20.915e9,
    "gpt-oss-120b": 116.83e9,
    "llama4-scout": 107.77e9,
    "llama4-maverick": 400.71e9,
    "deepseek-v3": 671.03e9,
    "deepseek-r1": 671.03e9,
    "moonlight-16b": 15.96e9,
    "kimi-k2": 1026.47e9,
    "nemotron-15b": 15.6e9,
    "nemotron-340b": 341e9,
    "falcon-7b": 6.92e9,
    "falcon-40b": 41.3e9,
    "falcon-180b": 178.56e9,
    "gpt-j-6b": 6.0509e9,
    "opt-125m": 125.24e6,
    "opt-1.3b": 1.3158e9,
    "opt-2.7b": 2.6516e9,
    "opt-6.7b": 6.6585e9,
    "opt-13b": 12.853e9,
    "opt-30b": 29.975e9,
    "opt-66b": 65.72e9,
    "opt-175b": 175e9,
    "vit-g-14": 1.0126e9,
    "mpt-7b": 6.6493e9,
    "mpt-30b": 29.957e9,
    "minimax-m2": 228.69e9,
    "ernie-4.5-21b-a3b": 21.825e9,
    "ernie-4.5-300b-a47b": 299.48e9,
    "grok-1": 315.7e9,
    "mt-nlg-530b": 530e9,
}
ACTIVE = {
    "mixtral-8x22b": 39e9,
    "qwen3-30b-a3b": 3.3e9,
    "qwen3-235b-a22b": 22e9,
    "qwen3-480b-a35b": 35e9,
    "llama4-scout": 17e9,
    "llama4-maverick": 17e9,
    "deepseek-v2": 21e9,
    "deepseek-v3": 37e9,
    "kimi-k2": 32e9,
    "moonlight-16b": 3e9,
    "dbrx": 36e9,
    "ernie-4.5-300b-a47b": 47e9,
    "hunyuan-a13b": 13e9,
    "dots-142b": 14e9,
}
OURS = ("bytes-3m", "tiny", "tiny-gpt", "tiny-moe")
PARTS = ("gpt3-175b", "gpt3-1.3b", "gpt3-2.7b", "gpt3-6.7b", "gpt3-13b")


@pytest.mark.parametrize("name", PUBLISHED)
def test_count_is_the_published_one(name: str) -> None:
    assert preset(name).num_params == PUBLISHED[name]


def test_counts_within_half_a_per_cent() -> None:
    for name, count in ABOUT.items():
        assert preset(name).num_params == pytest.approx(count, rel=0.005), name
    for name, count in ACTIVE.items():
        assert preset(name).active_params == pytest.approx(count, rel=0.03), name


def test_every_preset_has_its_published_count() -> None:
    assert set(presets()) == {*PUBLISHED, *ABOUT, *OURS, *PARTS}


def test_the_profile_has_as_many_parameters() -> None:
    for name in presets():
        assert profile_of(preset(name)).num_params == preset(name).num_params, name


def test_presets_that_are_planned_and_not_built_say_what_to_do() -> None:
    planned = set(presets()) - set(presets(built=True))
    assert {"bert-base", "vit-h-14", "deepseek-v3", "llama4-scout", "gemma3-27b", "falcon-7b"} <= planned
    assert {"mixtral-8x22b", "olmo2-7b", "opt-66b", "phi-3-mini"} <= set(presets(built=True))
    for name in planned:
        with pytest.raises(ModelError, match=f"cannot be built: found .*=.*needed.*`hf:{preset(name).hf}`"):
            refuse_unbuilt(preset(name))
    for name in presets(built=True):
        refuse_unbuilt(preset(name))
    with pytest.raises(ModelError) as pictures:  # `train` refuses them, however they are named
        refuse_unbuilt(preset("vit-l-16"))
    assert "to verify it on random pictures, give `hf:" in str(pictures.value) and "to train" not in str(pictures.value)
    with pytest.raises(ModelError, match="to train or verify it, give `hf:"):
        refuse_unbuilt(preset("bert-base"))


def test_layers_that_look_back_on_all_tokens() -> None:
    windows = [preset("gemma3-1b").window_of(layer) for layer in range(7)]
    assert windows == [512, 512, 512, 512, 512, 0, 512]
    assert {preset("llama-8b").window_of(layer) for layer in range(32)} == {0}


def test_counts_of_the_others() -> None:
    assert preset("gpt3-175b").num_params == pytest.approx(175e9, rel=0.005)
    assert preset("mixtral-8x7b").active_params == pytest.approx(12.9e9, rel=0.01)
    assert 2.5e6 < preset("bytes-3m").num_params < 3.5e6
    assert preset("bytes-3m").vocab_size == 256
    for size, name in ((1.3e9, "1.3b"), (2.7e9, "2.7b"), (6.7e9, "6.7b"), (13e9, "13b")):
        assert preset(f"gpt3-{name}").num_params == pytest.approx(size, rel=0.02)


def test_a_small_model_by_hand() -> None:
    spec = ModelSpec(num_layers=1, dim=4, num_heads=2, num_kv_heads=1, ffn_dim=6, vocab_size=10, max_seq_len=8)
    attention = 4 * 4 + 2 * 4 * 2 + 4 * 4
    assert spec.block_params == attention + 3 * 4 * 6 + 2 * 4
    assert spec.num_params == 10 * 4 + spec.block_params + 4 + 4 * 10


def test_every_preset_is_whole() -> None:
    for name in presets():
        spec = preset(name)
        assert spec.name == name
        assert len(spec.block_names) == spec.num_layers
        assert spec.active_params <= spec.num_params


def test_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'llama-8b'"):
        preset("lama-8b")


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"preset": "tiny", "num_layrs": 2}, "did you mean 'num_layers'"),
        ({"preset": "tini"}, "did you mean 'tiny'"),
        ({"preset": 3}, "needed the name"),
        ({"dim": 64}, "missing"),
        ({"preset": "tiny", "dim": "64"}, "needed an integer"),
        ({"preset": "tiny", "dim": 0}, "needed at least 1"),
        ({"preset": "tiny", "dim": 63}, "does not divide"),
        ({"preset": "tiny", "num_kv_heads": 3}, "a divisor of num_heads=8"),
        ({"preset": "tiny", "kind": "lama"}, "needed one of"),
        ({"preset": "tiny", "norm": "batch"}, "needed one of 'rms', 'layer'|needed one of '', 'rms', 'layer'"),
        ({"preset": "tiny-moe", "experts_per_token": 9}, "experts_per_token"),
        ({"preset": "tiny-moe", "moe_every": 0}, "moe_every: found 0, needed at least 1"),
        ({"preset": "tiny", "block_norms": 0}, "block_norms: found 0, needed at least 1"),
        ({"preset": "tiny", "vocab_size": 10**400}, "vocab_size: found 401 digits, needed at most"),
        ({"preset": "tiny", "num_layers": 10**6}, "num_layers: found 1000000, needed at most 1000"),
        ({"preset": "tiny", "name": "a\x1b[31m"}, "needed a name in one line"),
        ({"num_layers": 2, "dim": 8}, "missing num_heads, ffn_dim, vocab_size, max_seq_len; .* preset"),
    ],
)
def test_bad_sizes_are_refused(sizes: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        spec_from_dict(sizes)


def test_no_size_is_negative() -> None:
    sizes = [f.name for f in fields(ModelSpec) if f.type == "int"]
    assert {"window", "patch", "rope_dim", "full_every", "dense_ffn_dim", "other_params"} <= set(sizes)
    for key in sizes:
        with pytest.raises(ConfigError, match=f"model tiny: {key}: found -1, needed at least [01]"):
            spec_from_dict({"preset": "tiny", key: -1})


def test_sizes_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('preset = "llama-8b"\nnum_layers = 2\n')
    assert load_spec(file).num_layers == load_spec(str(file)).num_layers == 2
    file.write_text('preset = "llama-8b"\n\nnum_layer = 2\n')
    with pytest.raises(ConfigError, match=r"mine.toml, line 3.*did you mean 'num_layers'"):
        load_spec(file)


@pytest.mark.parametrize(
    ("name", "means"),
    [
        ("llama-3-8b", "llama-8b"), ("llama-3.1-70b", "llama-70b"), ("llama3-70b", "llama-70b"),
        ("meta-llama/Llama-3.1-8B", "llama-8b"), ("meta-llama/Meta-Llama-3-70B-Instruct", "llama-70b"),
        ("meta-llama/Llama-3.2-1B", "llama-1b"), ("meta-llama/Llama-2-7b-chat-hf", "llama-7b"),
        ("llama-2-70b", "llama2-70b"), ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen-7b"), ("google/gemma-2-9b-it", "gemma2-9b"), ("gpt2", "gpt2-small"),
        ("bigscience/bloom-7b1", "bloom-7b"), ("Llama-8B", "llama-8b"),
        ("Llama-3-405B", "llama-405b"), ("Qwen/Qwen2-72B", "qwen-72b"),
        ("vit-l/16", "vit-l-16"), ("ViT-H-14", "vit-h-14"), ("gptj-6b", "gpt-j-6b"), ("gpt3-xl", "gpt3-1.3b"),
        ("nvidia/Nemotron-4-340B-Instruct", "nemotron-340b"), ("allenai/OLMoE-1B-7B-0924", "olmoe-7b"),
        ("llama-4-scout", "llama4-scout"), ("mistral-nemo", "mistral-nemo-12b"),
        ("deepseek-v3.1", "deepseek-v3"), ("TinyLlama", "tinyllama-1.1b"), ("smollm2-135m", "smollm-135m"),
        ("llama-33b", "llama-30b"), ("glm-4-9b", "glm4-9b"),
    ],
)  # fmt: skip
def test_usual_names_are_presets(name: str, means: str) -> None:
    assert preset(name) == preset(means)
    assert spec_from_dict({"preset": name, "num_layers": 2}) == spec_from_dict({"preset": means, "num_layers": 2})


@pytest.mark.parametrize(
    "name", ["mistralai/Mistral-7B-v0.3", "llama-3.2-11b", "llama-3-1b", "bert-base-cased", "mistral-large-3"]
)
def test_names_of_other_sizes_are_no_presets(name: str) -> None:
    with pytest.raises(UsageError, match=re.escape(repr(name)) + ": unknown preset"):
        preset(name)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("t5-3b", r"an encoder and a decoder.*config\.json.*`hf:t5`.*package\.module:function"),
        ("google/flan-t5-xxl", "an encoder and a decoder"), ("whisper-large-v3", "`hf:whisper`"),
        ("ResNet50", "convolutions"), ("state-spaces/mamba-2.8b", "no attention in most blocks"),
        ("DiT-XL/2", r"parts of its own.*give a function"), ("CLIP ViT-L/14", "an encoder of pictures"),
    ],
)  # fmt: skip
def test_a_name_of_another_family_is_told_what_to_give(name: str, says: str) -> None:
    with pytest.raises(UsageError, match=rf"unknown preset: its family has.*{says}"):
        preset(name)


def test_an_unknown_name_of_a_repository_is_near_its_last_part() -> None:
    with pytest.raises(UsageError, match="did you mean 'mistral-7b'"):
        preset("mistralai/Mistral-7B-v0.3")


def test_a_state_space_mixer_scans_its_channels_whatever_the_length() -> None:
    hybrid = replace(preset("llama-1b"), window=512, scan_dim=4096)
    scans = [op for op in profile_of(hybrid).blocks[0].ops if op.name == "scan"]
    assert [(op.moved, op.split) for op in scans] == [(SCANNED * 4096, "heads")]  # which ranks of tp divide
    assert not any(op.name == "scan" for op in profile_of(preset("llama-1b")).blocks[0].ops)
    assert "scan_dim=4096" in hybrid.other_parts, "no reference model has one"
