"""What models of `transformers` are fed where it is not token ids alone: pictures, sound, texts for a decoder.

A sample has the sizes that the configuration names. Its first tensor says how many tokens it counts as.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from shardwise.errors import ModelError
from shardwise.models.hf import PREFIX, longest_sequence, model_class

USUAL = 4096
"""Tokens of a text where nothing bounds them."""
SECONDS, RATE = 10, 16_000
"""Of a sound, which is a row of numbers."""
PIXELS = 224
"""Height and width of pictures where a configuration names none."""
DRAWN = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "apply_spec_augment")
"""Keys of a configuration that let a forward take another course from step to step."""

Sample = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a model is fed."""

    sample: Callable[[int], Sample]
    """Of a number of tokens: one row of zeros, by names of its forward's arguments."""
    usual: int
    """Tokens of a sample where nobody says how many."""
    longest: int | None
    """The most tokens that it takes."""
    is_fixed: bool = False
    """It has as many tokens as `longest`, always."""
    is_text: bool = False
    """Its tokens are those of a text."""
    note: str
    """What a sample is."""


def inputs_of(config: PreTrainedConfig) -> Inputs | None:
    """What the model of a configuration is fed; None: token ids alone.

    Raises:
        ModelError: a kind of input that is not known.

    >>> inputs_of(hf_config("vit")).note
    'a sample is pixel_values of shape [3, 224, 224]; its channels count as its tokens'
    >>> inputs_of(hf_config("llama")) is None
    True
    """
    cls = model_class(config)
    names, main = signature(cls.forward).parameters, cls.main_input_name
    if "return_loss" in names and {"input_ids", "pixel_values"} <= set(names):
        return _text_and_patches(config) if "spatial_shapes" in names else _text_and_picture(config)
    if main == "input_ids" and "image_encoder_embeddings" in names:
        return _text_of_pictures(config)
    if main == "pixel_values":
        return _picture(config)
    if main == "input_features" and "decoder_input_ids" in names:
        return _features(config)
    if main == "input_values":
        return _sound_and_text(config) if "decoder_input_ids" in names else _sound(config)
    if main == "input_ids" and "decoder_input_ids" in names:
        return _two_texts(config)
    if main == "input_ids" and "return_loss" not in names:
        return None
    raise ModelError(
        f"model {PREFIX}{config.model_type}: {cls.__name__} takes {main}, whose shape its configuration does not say; "
        f"{advice(config)}"
    )


def advice(config: PreTrainedConfig) -> str:
    """What to do about a model that cannot be fed or read from its configuration."""
    return (
        f"write a function that builds {model_class(config).__name__} and sets its attribute `example_input_array` (a "
        "dict of tensors by the names of its forward's arguments), and give package.module:function in place of "
        f"{PREFIX}"
    )


def steady(config: PreTrainedConfig) -> tuple[PreTrainedConfig, list[str]]:
    """A copy whose forward does not turn on draws, and what is to be said of it: layers that are left out, masks.

    >>> steady(hf_config("wav2vec2"))[1]
    ['layerdrop and apply_spec_augment are taken as off: what they leave out is counted']
    """
    found = [name for name in DRAWN if getattr(config, name, None)]
    if not found:
        return config, []
    made = copy.deepcopy(config)
    for name in found:
        setattr(made, name, type(getattr(made, name))(0))
    are = "is" if len(found) == 1 else "are"
    return made, [f"{' and '.join(found)} {are} taken as off: what they leave out is counted"]


def with_example(factory: Callable[[], nn.Module], sample: Sample) -> nn.Module:
    """A model that says what it is fed."""
    module = factory()
    vars(module)["example_input_array"] = dict(sample)
    return module


def _zeros(*shape: int) -> torch.Tensor:
    """Values on the CPU, also where modules are made on meta: a sample may be computed with."""
    return torch.zeros(1, *shape, device="cpu")


def _ids(length: int) -> torch.Tensor:
    return torch.zeros(1, length, dtype=torch.long, device="cpu")


def _said(config: PreTrainedConfig, *names: str) -> Any:
    """The first of some keys that a configuration has, or that of its vision."""
    parts = [config, *(part for part in (getattr(config, "vision_config", None),) if part is not None)]
    return next((found for part in parts for name in names if (found := getattr(part, name, None)) is not None), None)


def _pixels(config: PreTrainedConfig) -> tuple[tuple[int, ...], str]:
    """The shape of a picture, or of a film; and what was assumed of it."""
    size, channels = _said(config, "image_size"), _said(config, "num_channels", "in_channels") or 3
    if isinstance(size, Mapping):
        size = [size.get("height", PIXELS), size.get("width", PIXELS)]
    height, width = (size or PIXELS, size or PIXELS) if not isinstance(size, list | tuple) else (size[0], size[-1])
    frames = getattr(config, "num_frames", None)
    shape = (int(channels), int(height), int(width))
    said = "" if size else f" ({PIXELS} pixels are assumed: its configuration names no size)"
    return (shape if frames is None else (int(frames), *shape)), said


def _picture(config: PreTrainedConfig) -> Inputs:
    shape, said = _pixels(config)
    counted = "channels" if len(shape) == 3 else "frames"
    return Inputs(
        sample=lambda _: {"pixel_values": _zeros(*shape)},
        usual=shape[0],
        longest=shape[0],
        is_fixed=True,
        note=f"a sample is pixel_values of shape {list(shape)}{said}; its {counted} count as its tokens",
    )


def _text_and_picture(config: PreTrainedConfig) -> Inputs:
    shape, said = _pixels(config)
    longest = longest_sequence(config)
    return Inputs(
        sample=lambda length: {"input_ids": _ids(length), "pixel_values": _zeros(*shape)},
        usual=longest or USUAL,
        longest=longest,
        note=f"a sample is a text and pixel_values of shape {list(shape)}{said}; its tokens are those of the text",
    )


def _text_and_patches(config: PreTrainedConfig) -> Inputs:
    """Of pictures of any shape, cut into patches before: as many as there are positions for, in a square."""
    vision = config.vision_config
    side = int(vision.num_patches**0.5)
    shape = (side * side, int(vision.num_channels) * int(vision.patch_size) ** 2)
    longest = longest_sequence(config)

    def sample(length: int) -> Sample:
        sides = torch.full((1, 2), side, dtype=torch.long, device="cpu")
        held = {"pixel_values": _zeros(*shape), "pixel_attention_mask": _ids(side * side) + 1, "spatial_shapes": sides}
        return {"input_ids": _ids(length), **held}

    return Inputs(
        sample=sample,
        usual=longest or USUAL,
        longest=longest,
        note=f"a sample is a text and pixel_values of shape {list(shape)}, patches; its tokens are the text's",
    )


def _text_of_pictures(config: PreTrainedConfig) -> Inputs:
    """Of a model that cannot be fed text alone: a text, and a picture that each of its tokens looks at."""
    shape, said = _pixels(config.vision_config)
    longest = longest_sequence(config)

    def sample(length: int) -> Sample:
        seen = torch.ones(1, length, 1, dtype=torch.long, device="cpu")
        return {"input_ids": _ids(length), "pixel_values": _zeros(1, *shape), "image_attention_mask": seen}

    return Inputs(
        sample=sample,
        usual=min(USUAL, longest or USUAL),
        longest=longest,
        note=f"a sample is a text and a picture of shape {list(shape)}{said}; its tokens are those of the text",
    )


def _two_texts(config: PreTrainedConfig) -> Inputs:
    longest = longest_sequence(config)
    return Inputs(
        sample=lambda length: {"input_ids": _ids(length), "decoder_input_ids": _ids(length)},
        usual=min(USUAL, longest or USUAL),
        longest=longest,
        is_text=True,
        note="a sample is a text for the encoder and one as long for the decoder; its tokens are those of one",
    )


def _features(config: PreTrainedConfig) -> Inputs:
    """Of speech that a decoder writes down: whole spectrograms, as long as the encoder has positions for."""
    length = int(getattr(config, "max_source_positions", None) or 1500)
    bins = getattr(config, "num_mel_bins", None)  # Whisper: bins first, two frames for a position
    shape = (int(bins), 2 * length) if bins else (length, int(getattr(config, "input_feat_per_channel", 80)))
    longest = getattr(config, "max_target_positions", None)
    return Inputs(
        sample=lambda length: {"decoder_input_ids": _ids(length), "input_features": _zeros(*shape)},
        usual=min(USUAL, longest or USUAL),
        longest=longest,
        is_text=True,
        note=f"a sample is input_features of shape {list(shape)} and a text for the decoder, whose tokens are its own",
    )


def _sound_and_text(config: PreTrainedConfig) -> Inputs:
    """Of speech that a decoder writes down: a row of numbers, and a text."""
    longest = getattr(config, "max_text_positions", None) or longest_sequence(config)
    return Inputs(
        sample=lambda length: {"decoder_input_ids": _ids(length), "input_values": _zeros(SECONDS * RATE)},
        usual=min(USUAL, longest or USUAL),
        longest=longest,
        is_text=True,
        note=f"a sample is a sound of {SECONDS} s at {RATE // 1000} kHz and a text for the decoder, whose tokens count",
    )


def _sound(config: PreTrainedConfig) -> Inputs:
    """A row of numbers, or a spectrogram of fixed sizes."""
    frames, bins = getattr(config, "max_length", None), getattr(config, "num_mel_bins", None)
    if bins and frames:
        return Inputs(
            sample=lambda _: {"input_values": _zeros(int(frames), int(bins))},
            usual=int(frames),
            longest=int(frames),
            is_fixed=True,
            note=f"a sample is input_values of shape [{frames}, {bins}]; its frames count as its tokens",
        )
    usual = SECONDS * RATE
    return Inputs(
        sample=lambda length: {"input_values": _zeros(length)},
        usual=usual,
        longest=None,
        note=f"a sample is a sound, whose numbers count as its tokens: {usual} are {SECONDS} s at {RATE // 1000} kHz",
    )
