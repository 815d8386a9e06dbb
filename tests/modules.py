"""Modules that are no reference model: of `transformers`, made small, and such as a user writes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
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

    def __init__(self, block: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, WIDTH, 8, 8), nn.Linear(WIDTH, 10)
        self.layers = nn.ModuleList(block() for _ in range(4))
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


class Residual(nn.Module):
    """Convolutions around a stream, with batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 32, 3, padding=1), nn.Linear(32, 10)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()) for _ in range(4)
        )
        self.example_input_array = torch.zeros(2, 3, 16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


class UNet(nn.Module):
    """Two chains, of which the second takes what the first kept; nothing is behind the last block."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((3, 16), (16, 32), (32, 64)), ((64, 32), (64, 16), (32, 3))
        down, up = (nn.ModuleList(nn.Conv2d(*size, 3, padding=1) for size in chain) for chain in sizes)
        self.down, self.up, self.middle = down, up, nn.ConvTranspose2d(64, 64, 2, 2)
        self.example_input_array = torch.zeros(2, 3, 32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept: list[torch.Tensor] = []
        for layer in self.down:
            kept.append(nn.functional.relu(layer(x)))
            x = nn.functional.max_pool2d(kept[-1], 2)
        x = nn.functional.relu(self.middle(x))
        kept.pop()
        for layer in self.up:
            x = layer(x)
            if kept:
                x = torch.cat([nn.functional.interpolate(x, scale_factor=2), kept.pop()], 1)
        return x


class EncoderDecoder(nn.Module):
    """Two chains of unequal lengths; its head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(320, WIDTH), nn.Linear(WIDTH, 320, bias=False)
        self.head.weight = self.embed.weight
        sizes: dict[str, Any] = {"dim_feedforward": 4 * WIDTH, "dropout": 0.0, "batch_first": True}
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, **sizes), 3)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, 4, **sizes), 3)
        self.example_input_array = (torch.zeros(2, 32, dtype=torch.long), torch.zeros(2, 24, dtype=torch.long))

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.head(self.decoder(self.embed(target), self.encoder(self.embed(source))))


class Rows(nn.Module):
    """A multilayer perceptron of rows, one of whose products is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(4))
        self.example_input_array = torch.zeros(4, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.layers[-1](x)


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Tables(nn.Module):
    """Tables of unequal sizes, each of which is read with ids: their gradients are reduced at the end, one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, WIDTH) for rows in (1000, 500, 200, 2000))
        self.head = nn.Linear(4 * WIDTH, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([table(ids)[:, 0] for table in self.tables], -1))


class Tied(nn.Module):
    """Norms and activations of torch's own kernels; its head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(2048, WIDTH), nn.Linear(WIDTH, 2048, bias=False)
        self.head.weight = self.embed.weight
        self.layers = nn.ModuleList(Perceptron() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Frozen(Tied):
    """Its table, which is the head too, and its first layer are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        self.layers[0].requires_grad_(False)


def hugging_face(name: str, **changes: Any) -> Callable[[], nn.Module]:
    """A model of `transformers` with few layers and small sizes."""
    config = hf_config(name)
    for key, value in (SMALL | changes).items():
        if hasattr(config, key):
            with suppress(AttributeError):  # what it derives from others
                setattr(config, key, value)
    return hf_factory(config)


def factory(name: str) -> Callable[[], nn.Module]:
    """Of a class here, a model type of `transformers`, or `window`: one whose attention sees 16 tokens."""
    own: dict[str, Callable[[], nn.Module]] = {"pictures": Pictures, "two": TwoInputs, "residual": Residual}
    own |= {
        "unet": UNet,
        "encoder-decoder": EncoderDecoder,
        "rows": Rows,
        "tables": Tables,
        "tied": Tied,
        "frozen": Frozen,
    }
    if name == "qwen3_moe":
        return hugging_face(name, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48)
    if name == "window":
        return hugging_face("mistral", sliding_window=16)
    return own.get(name) or hugging_face(name)
