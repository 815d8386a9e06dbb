"""Modules that are no reference model: of `transformers`, made small, and such as a user writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwise.models.hf import hf_config, hf_factory

WIDTH = 64
SMALL = {
    "num_hidden_layers": 4,
    "hidden_size": WIDTH,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 160,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "n_layer": 4,
    "n_embd": WIDTH,
    "n_head": 4,
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(nn.functional.gelu(self.up(self.between(x))))


class Pictures(nn.Module):
    """Patches of pictures, classified: its input is said by `example_input_array`."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, WIDTH, 8, 8), nn.Linear(WIDTH, 10)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.example_input_array = torch.zeros(2, 3, 64, 64)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = self.patches(pixels).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


class TwoInputs(nn.Module):
    """Two positional arguments, of as many tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(4)), nn.Linear(WIDTH, 10)
        self.example_input_array = (torch.zeros(2, 64, WIDTH), torch.zeros(2, 64, WIDTH))

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        x = one + other
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def hugging_face(name: str, **changes: Any) -> Callable[[], nn.Module]:
    """A model of `transformers` with few layers and small sizes."""
    config = hf_config(name)
    for key, value in (SMALL | changes).items():
        if hasattr(config, key):
            setattr(config, key, value)
    return hf_factory(config)


def factory(name: str) -> Callable[[], nn.Module]:
    """Of a class here, a model type of `transformers`, or `window`: one whose attention sees 16 tokens."""
    own: dict[str, Callable[[], nn.Module]] = {"pictures": Pictures, "two": TwoInputs}
    if name == "window":
        return hugging_face("mistral", sliding_window=16)
    return own.get(name) or hugging_face(name)
