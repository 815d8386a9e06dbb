"""Modules as engineers bring them: what each does beside a chain of blocks has made estimates wrong before."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.modules import WIDTH, Perceptron

VOCAB = 320


class Words(nn.Module):
    """Token ids through blocks of one class, and a head."""

    def __init__(self, block: type[nn.Module] = Perceptron, layers: int = 4) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(block() for _ in range(layers))

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, ids: torch.Tensor) -> Any:
        return self.head(self.hidden(ids))


class Masked(Words):
    """A table that is no parameter, and large."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(256, 256).tril())

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        x = super().hidden(ids)
        return x + self.mask[-1, : x.shape[1], None].to(x.dtype)


class Given(Words):
    """A table of numbers that were computed without torch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.tensor([[float(i - j) for j in range(WIDTH)] for i in range(256)]))

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.places[: ids.shape[1]].to(self.head.weight.dtype)
        for layer in self.layers:
            x = layer(x)
        return x


class Recurrent(nn.Module):
    """A residual LSTM: one kernel of a CPU, and on meta several for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.lstm(x)[0]


class Routed(nn.Module):
    """Experts with places: each token of the micro-batch meets each place, of which there are as many as tokens."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.gate, self.norm = nn.Linear(WIDTH, experts, bias=False), nn.LayerNorm(WIDTH)
        self.up = nn.Parameter(torch.zeros(experts, WIDTH, 2 * WIDTH))
        self.down = nn.Parameter(torch.zeros(experts, 2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.norm(x).flatten(0, 1)
        count = len(self.up)
        places = len(rows) * 5 // 4 // count
        weight, chosen = self.gate(rows).softmax(-1).max(-1)
        among = F.one_hot(chosen, count)
        place = ((among.cumsum(0) - 1) * among).sum(-1).clamp(max=places)
        sent = among[..., None] * F.one_hot(place, places + 1)[:, None, :]
        sent = sent[..., :places].to(rows.dtype)
        hidden = F.gelu(torch.bmm(torch.einsum("nec,nd->ecd", sent, rows), self.up))
        done = torch.einsum("nec,ecd->nd", sent, torch.bmm(hidden, self.down))
        return x + (done * weight[:, None]).view_as(x)


class Checkpointed(Perceptron):
    """Computes itself again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Staged(nn.Module):
    """Lists of lists of blocks, as of Swin: the outer ones are never called."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, WIDTH, 4, 4), nn.Linear(WIDTH, 10)
        self.stages = nn.ModuleList(nn.ModuleList(Perceptron() for _ in range(n)) for n in (2, 3))
        self.example_input_array = torch.zeros(2, 3, 64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).mT
        for stage in self.stages:
            for block in stage:
                x = block(torch.roll(x, 1, 1))
        return self.head(x.mean(1))


class WeightNormed(nn.Module):
    """A convolution whose weight is computed: its class is its own, or it holds what cannot be copied."""

    def __init__(self, old: bool = False) -> None:
        super().__init__()
        normed = nn.utils.weight_norm if old else nn.utils.parametrizations.weight_norm
        self.layers = nn.ModuleList(normed(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)) for _ in range(4))
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids).mT
        for layer in self.layers:
            x = x + F.relu(layer(x))
        return self.head(x.mT)


class Unused(Words):
    """Some parameters that forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(4 * WIDTH, 8 * WIDTH)
        self.layers[1].spare = nn.Linear(WIDTH, 4 * WIDTH)


class Told(Words):
    """Hidden states before the logits, in a dict."""

    def forward(self, ids: torch.Tensor) -> Any:
        hidden = self.hidden(ids)
        return {"hidden": hidden, "logits": self.head(hidden)}


class OwnLoss(Words):
    """Logits and their loss."""

    def __init__(self) -> None:
        super().__init__()
        ids = torch.zeros(2, 64, dtype=torch.long)
        self.example_input_array = (ids, ids)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> Any:
        logits = self.head(self.hidden(ids))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Volumes(nn.Module):
    """Instance norms, which are batch norms to torch, and to no other rank."""

    def __init__(self) -> None:
        super().__init__()
        inner = [(nn.Conv3d(16, 16, 3, padding=1), nn.InstanceNorm3d(16, affine=True), nn.ReLU()) for _ in range(3)]
        self.layers, self.stem = nn.ModuleList(nn.Sequential(*each) for each in inner), nn.Conv3d(1, 16, 3, padding=1)
        self.head, self.example_input_array = nn.Conv3d(16, 3, 1), torch.zeros(2, 1, 12, 12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Asks(Words):
    """Asks for values of its input."""

    def forward(self, ids: torch.Tensor) -> Any:
        hidden = self.hidden(ids)
        if hidden.sum() > 0:
            hidden = hidden * 2
        return self.head(hidden)


class Sparse(Words):
    """A table with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH, sparse=True)


class HalfFrozen(Words):
    """Its table and the first half of its blocks are not trained."""

    def __init__(self) -> None:
        super().__init__(layers=6)
        for part in (self.embed, *self.layers[:3]):
            part.requires_grad_(False)


class Adapted(nn.Module):
    """A frozen layer with a trained one of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Perceptron().requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.up(self.down(x))


class Skips(nn.Module):
    """Hands on two streams, as WaveNet does."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        left, right = self.both(x).chunk(2, -1)
        more, aside = self.out(torch.tanh(left) * torch.sigmoid(right)).chunk(2, -1)
        return x + more, skip + aside


class TwoStreams(Words):
    """Its head takes the second of two streams."""

    def __init__(self) -> None:
        super().__init__(Skips)

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        skip = torch.zeros_like(x)
        for layer in self.layers:
            x, skip = layer(x, skip)
        return skip


class Balanced(Words):
    """Returns logits, and what a router's loss would be."""

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.hidden(ids)
        return {"aux_loss": x.square().mean(), "logits": self.head(x)}


class Halves(nn.Module):
    """Two convolutions beside a third: a picture half as wide and high, with more channels."""

    def __init__(self, ins: int, outs: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(ins, outs, 3, stride, 1), nn.Conv2d(outs, outs, 3, 1, 1)
        self.norms = nn.ModuleList(nn.GroupNorm(8, outs) for _ in range(2))
        self.beside = nn.Conv2d(ins, outs, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.second(torch.relu(self.norms[0](self.first(x))))
        return torch.relu(self.norms[1](inner) + self.beside(x))


class Narrowing(nn.Module):
    """Unlike blocks, each of which is given less than the one before, and has more parameters."""

    def __init__(self) -> None:
        super().__init__()
        widths = [32, 32, 64, 64, 128, 128, 256, 256]
        self.stem = nn.Conv2d(3, 32, 7, 2, 3)
        self.blocks = nn.ModuleList(Halves(a, b, 1 + (a != b)) for a, b in pairwise([32, *widths]))
        self.head = nn.Linear(256, 10)
        self.example_input_array = torch.zeros(2, 3, 64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Tabled(Perceptron):
    """A block with a table that is no parameter, larger than all its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(512, 512))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.table[0, : x.shape[1], None].to(x.dtype))


class ChunkedLoss(Words):
    """Its loss is computed in chunks of tokens, whose logits are never there together."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 16 * VOCAB)
        ids = torch.zeros(2, 64, dtype=torch.long)
        self.example_input_array = (ids, ids)

    def part(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(hidden).float(), targets, reduction="sum")

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> Any:
        hidden, rest = self.hidden(ids).flatten(0, 1).chunk(4), targets.flatten().chunk(4)
        parts = [checkpoint(self.part, *each, use_reentrant=False) for each in zip(hidden, rest, strict=True)]
        return {"loss": sum(parts) / targets.numel()}


class AllExperts(nn.Module):
    """Stacked experts, all of which every sample meets: their weights are torn into slots of it (Soft MoE)."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = nn.Parameter(torch.zeros(WIDTH, 16))
        self.up = nn.Parameter(torch.zeros(4, WIDTH, 2 * WIDTH))
        self.down = nn.Parameter(torch.zeros(4, 2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = x @ self.slots
        given = torch.einsum("bls,bld->bsd", scores.softmax(1), x).unflatten(1, (4, 4))
        hidden = F.gelu(torch.einsum("besd,edf->besf", given, self.up))
        done = torch.einsum("besf,efd->besd", hidden, self.down).flatten(1, 2)
        return x + torch.einsum("bls,bsd->bld", scores.softmax(2), done)


class Pooled(Words):
    """Few tokens and no logits for each, as pictures are classified: parameters need most of a step."""

    def __init__(self, words: int = VOCAB) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(words, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, ids: torch.Tensor) -> Any:
        return self.head(self.hidden(ids).mean(1))


class Tables(nn.Module):
    """Tables beside each other, as of a recommendation: repeated, and nothing that they are fed has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(500, 16, mode="sum") for _ in range(4))
        self.head = nn.Linear(4 * 16 + 8, 1)
        self.example_input_array = {"numbers": torch.zeros(4, 8), "words": torch.zeros(4, 4, 3, dtype=torch.long)}

    def forward(self, numbers: torch.Tensor, words: torch.Tensor) -> Any:
        """A number for each row."""
        found = [table(words[:, place]) for place, table in enumerate(self.tables)]
        return self.head(torch.cat([numbers, *found], 1))
