"""What `shardwise verify hf:...` makes of a family: tiny sizes that go together and are fed, or a refusal."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedConfig

from shardwise.diagnose.verifying import random_hf
from shardwise.diagnose.verifying.random_hf import check_name, shape_of, small_config
from shardwise.errors import ConfigError, ModelError
from shardwise.models.hf import build, hf_config, hf_factory
from shardwise.models.hf_sizes import shrunk_config, text_of
from shardwise.plan.plan import Plan

FSDP2 = Plan.parse("fsdp2")


@pytest.mark.share(4)
@pytest.mark.parametrize(
    "name",
    [
        "llama4",  # a second inner size
        "nemotron",  # no number of key heads
        "qwen2_vl",  # parts of a head for time, height and width; a tower of pictures
        "qwen2_5_vl",
        "mistral3",
        "qwen3_next",  # heads of linear attention
        "mamba2",  # heads that hold all of the expanded width
        "granitemoehybrid",
        "bamba",
        "falcon_h1",
        "resnet",  # stages
        "convnext",
        "swin",
        "segformer",
        "mpnet",  # its buckets of distances are 32, whatever it is told
    ],
)
def test_a_family_is_made_tiny_and_fed(name: str) -> None:
    """`check_name` runs it, and refuses more than 5 million parameters."""
    assert check_name(name, FSDP2).startswith("shrunk: ")
    module = hf_factory(small_config(name, FSDP2))()
    assert sum(p.numel() for p in module.parameters()) < 300_000


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("wav2vec2", r"verify hf:wav2vec2: Wav2Vec2Model cannot be fed: it takes input_values .*write a script"),
        (
            "clip",
            r"CLIPModel cannot be fed: it takes input_ids and pixel_values .*rows of a batch .*needed a model of tok",
        ),
        ("siglip2", r"cannot be fed: it takes input_ids and pixel_values and .*patches.* .docs/loss.md"),
        ("whisper", r"cannot be fed: it takes decoder_input_ids and input_features \(a sample is input_features of"),
        ("speecht5", r"cannot be fed: it takes decoder_input_ids and input_values \(a sample is a sound"),
        ("idefics", r"cannot be fed: it takes input_ids and pixel_values and image_attention_mask"),
        ("dinov3_vit", r"gives no logits, needed logits of shape \[2, 'classes'\]; name a class"),
        ("wav2vec2-bert", r"has a vocabulary of 0, needed at least 3"),
        ("decision_transformer", r"has a vocabulary of 1, needed at least 3 to be fed token ids; write a script"),
        ("BertModel", r"given input_ids of shape \[2, 16\], gives no logits, needed logits of shape \[2, 16, "),
    ],
)
def test_what_is_not_trained_on_what_is_fed_is_refused(name: str, said: str) -> None:
    """It was a traceback of each process."""
    with pytest.raises(ModelError, match=said):
        check_name(name, FSDP2)


def test_what_stays_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def wide(config: PreTrainedConfig, **_: Any) -> PreTrainedConfig:
        config.vocab_size = 2_000_000
        return config

    monkeypatch.setattr(random_hf, "shrunk_config", wide)
    with pytest.raises(ModelError, match=r"parameters in tiny sizes too .*wte.weight of shape \[2000000, 768\]"):
        check_name("gpt2", FSDP2)


def test_a_picture_that_is_no_square_and_two_texts_are_shrunk() -> None:
    """Both were tracebacks, the second of every verb."""
    assert shape_of(small_config("yolos", FSDP2)).image_size == 16
    assert text_of(hf_config("musicgen")).model_type == "musicgen_decoder"
    assert small_config("musicgen", FSDP2).decoder.num_hidden_layers == 4


def test_sizes_of_another_kind() -> None:
    """Florence's widths are a list, one of each stage; it was a traceback, as that of a size nobody knew of was."""
    config = hf_config("florence_vision")
    assert shrunk_config(config).embed_dim == [8, 16, 32, 64]
    towers = shrunk_config(hf_config("siglip"))  # both end in one width
    assert towers.text_config.projection_size == towers.vision_config.hidden_size
    vars(config)["layer_types"] = 3
    with pytest.raises(
        ConfigError, match=r"model hf:florence_vision: its tiny sizes are not known here: .*config.json"
    ):
        shrunk_config(config)


def test_a_default_that_is_null_is_named() -> None:
    with pytest.raises(ConfigError, match="cannot be made .* mend what is null: num_key_value_heads"):
        build(hf_config("nemotron"))


def test_a_name_that_is_near_none_gets_popular_ones() -> None:
    """It was asked whether `dots3_note` was meant."""
    with pytest.raises(ConfigError, match=r"such as llama, qwen3, .*vit$"):
        hf_config("doesnotexist")
    with pytest.raises(ConfigError, match=r"did you mean 'llama' or"):
        hf_config("lama")
