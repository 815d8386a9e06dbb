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
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_count_is_the_published_one(name: str) -> None:
    assert preset(name).num_params == PUBLISHED[name]


def test_counts_of_the_others() -> None:
    assert preset("gpt3-175b").num_params == pytest.approx(175e9, rel=0.005)
    assert preset("mixtral-8x7b").active_params == pytest.approx(12.9e9, rel=0.01)
    assert 2.5e6 < preset("bytes-3m").num_params < 3.5e6
    assert preset("bytes-3m").vocab_size == 256


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
