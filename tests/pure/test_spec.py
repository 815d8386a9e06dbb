from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.errors import ConfigError, UsageError
from shardwise.model.spec import ModelSpec, load_spec, preset, presets, spec_from_dict

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
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_count_is_the_published_one(name: str) -> None:
    assert preset(name).num_params == PUBLISHED[name]


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
        ({"preset": "tiny-moe", "experts_per_token": 9}, "experts_per_token"),
    ],
)
def test_bad_sizes_are_refused(sizes: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        spec_from_dict(sizes)


def test_sizes_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('preset = "llama-8b"\nnum_layers = 2\n')
    assert load_spec(file).num_layers == load_spec(str(file)).num_layers == 2
    file.write_text('preset = "llama-8b"\n\nnum_layer = 2\n')
    with pytest.raises(ConfigError, match=r"mine.toml, line 3.*did you mean 'num_layers'"):
        load_spec(file)
