"""Modules whose blocks are called again, or given what others make: the closed form against the trace of their step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shardwise.cli.options.reading import how_read
from shardwise.diagnose.read_module import read_module
from shardwise.hardware.cluster import load_cluster
from shardwise.plan.plan import Plan
from shardwise.plan.ranks.activations import kept_bytes, saved_bytes, saving_of
from shardwise.plan.ranks.division import divide
from shardwise.plan.stack import stack_of
from shardwise.plan.time_terms.datatime import wire_of
from shardwise.plan.workload import Workload
from tests.brought import VOCAB, Adapted, Words
from tests.fake.test_modules_brought import near_the_trace
from tests.modules import WIDTH, Perceptron, hugging_face


class Rounds(Words):
    """Goes through its blocks again and again, from the first one to the last."""

    def __init__(self, rounds: int = 3) -> None:
        super().__init__(layers=3)
        self.rounds = nn.Embedding(rounds, WIDTH)

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for place in range(self.rounds.num_embeddings):
            x = x + self.rounds.weight[place]
            for layer in self.layers:
                x = layer(x)
        return x


class LastTwice(Words):
    """Calls its last block twice."""

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layers[-1](super().hidden(ids))


class Pairs(Words):
    """One encoder of two texts, and a loss over their pairs."""

    def __init__(self) -> None:
        super().__init__()
        ids = torch.zeros(2, 64, dtype=torch.long)
        self.example_input_array = (ids, ids)

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> Any:
        a, b = (F.normalize(self.head(self.hidden(ids)).mean(1), dim=-1) for ids in (one, other))
        scores = a @ b.T
        return {"loss": F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))}


class Looks(nn.Module):
    """Looks at a text that all blocks are given."""

    def __init__(self) -> None:
        super().__init__()
        self.ask, self.say, self.inner = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), Perceptron()

    def forward(self, latents: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        keys, values = self.say(text).chunk(2, -1)
        latents = latents + F.scaled_dot_product_attention(self.ask(latents), keys, values)
        return self.inner(latents)


class Latents(nn.Module):
    """A few latents that look at a text in each block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, 10)
        self.latents = nn.Parameter(torch.zeros(1, 8, WIDTH))
        self.layers = nn.ModuleList(Looks() for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        text, latents = self.embed(ids), self.latents.expand(len(ids), -1, -1)
        for layer in self.layers:
            latents = layer(latents, text)
        return self.head(latents.mean(1))


class Larger(nn.Sequential):
    """A picture of twice the size: windows of a transposed convolution overlap."""

    def __init__(self, ins: int, outs: int) -> None:
        super().__init__(nn.ConvTranspose2d(ins, outs, 4, 2, 1), nn.GroupNorm(4, outs), nn.ReLU())


class Generator(nn.Module):
    """A picture from a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(64, 64 * 16), nn.Conv2d(16, 3, 3, padding=1)
        self.layers = nn.ModuleList(Larger(ins, outs) for ins, outs in ((64, 32), (32, 16), (16, 16)))
        self.example_input_array = torch.zeros(2, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).unflatten(1, (64, 4, 4))
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


class Written(nn.Module):
    """Attention in products."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = ((q @ k.mT) / 4).softmax(-1) @ v
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class TwoTowers(nn.Module):
    """Blocks of a picture, and behind them those of a text, which are its head to a planner; of a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.embed = nn.Conv2d(3, WIDTH, 8, 8), nn.Embedding(VOCAB, WIDTH)
        self.pictures, self.words = (nn.ModuleList(Perceptron() for _ in range(4)) for _ in range(2))
        self.example_input_array = (torch.zeros(2, 3, 64, 64), torch.zeros(2, 32, dtype=torch.long))

    def forward(self, pixels: torch.Tensor, ids: torch.Tensor) -> Any:
        x = self.patches(pixels).flatten(2).mT
        for layer in self.pictures:
            x = layer(x)
        y = self.embed(ids)
        for layer in self.words:
            y = layer(y)
        scores = F.normalize(x.mean(1), dim=-1) @ F.normalize(y.mean(1), dim=-1).T
        return {"loss": F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))}


def frozen_table() -> nn.Module:
    """Its table is frozen, and so is much of its blocks."""
    model = Words(Adapted)
    model.embed.requires_grad_(False)
    return model


AGAIN = [
    (Rounds, "dp1 / mb2 / recompute=blocks"),
    (Rounds, "fsdp4 / bf16"),
    (LastTwice, "dp1 / mb2 / recompute=blocks"),
    (LastTwice, "fsdp2 / mb2"),
    (Pairs, "dp2 / mb2 / bf16"),
    (Pairs, "fsdp2 / recompute=ops"),
    (Pairs, "dp1 / bf16"),
]


@pytest.mark.share(6)
@pytest.mark.parametrize(("made", "plan"), AGAIN)
def test_blocks_that_are_called_again(made: Callable[[], nn.Module], plan: str) -> None:
    near_the_trace(made, plan, 64, 16, within=0.02)


def test_each_call_keeps_its_inputs_and_is_gathered() -> None:
    again, once = (read_module("", made, 64, "meta") for made in (Rounds, partial(Rounds, 1)))
    assert again.calls == (0, 1, 2) * 3 and once.calls == ()
    assert [block.calls for block in again.blocks] == [3] * 3 and not list(how_read(again))
    plan, cluster = Plan.parse("fsdp4 / recompute=blocks / bf16"), load_cluster("h100:4")
    stack, work = stack_of(plan), Workload(seq_len=64, global_batch=16)
    how = saving_of(plan, stack, 64)
    block, other = again.blocks[-1], once.blocks[-1]
    assert kept_bytes(block, 2, plan, how) == 3 * kept_bytes(other, 2, plan, how)
    assert saved_bytes(block, how) == 3 * saved_bytes(other, how)
    for text, times in (("fsdp4", 3), ("fsdp4 / zero1", 3), ("dp4", 1)):  # as traced: 19 gathers of `fsdp4`, 10 sums
        found = [divide(each, Plan.parse(text), work) for each in (again, once)]
        sent = [wire_of(each, each.ranks[0], cluster, stack).parts[0] for each in found]
        assert [each.groups for each in sent] == [3 * times, 3] and sent[0].params == times * sent[1].params


@pytest.mark.share(6)
@pytest.mark.parametrize(
    ("made", "plan", "seq"),
    [
        (Latents, "dp1", 64),  # of what all blocks are given, the last one makes the first gradient
        (Generator, "fsdp2 / recompute=ops", 64),  # a transposed convolution gives less than it adds up
        (Generator, "dp1 / mb2 / recompute=blocks", 64),  # what a block hands on is not of its input's size
        (partial(Words, Written), "fsdp2 / recompute=ops", 64),  # scores are results of products
        (frozen_table, "dp1 / mb2 / recompute=blocks", 64),  # inputs that nothing else keeps
        (TwoTowers, "fsdp4", 3),  # the last block's weights are there while a loss within goes backward
        (TwoTowers, "pp2 / 1f1b mb4", 3),  # gradients of a large head are not all there at its largest moment
    ],
)
def test_what_is_kept_between_blocks(made: Callable[[], nn.Module], plan: str, seq: int) -> None:
    near_the_trace(made, plan, seq, 16, within=0.015)


@pytest.mark.share(4)
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("gpt_neo", "dp1 / bf16 / recompute=ops"),  # scores in fp32, which forward has for a moment
        ("gpt_neo", "pp2 / 1f1b mb4 / recompute=ops"),  # and its mask is made, and kept, by each stage
        ("mixtral", "fsdp2 / mb2 / recompute=ops"),  # products by group run again
    ],
)
def test_what_is_recomputed_operator_by_operator_is_seen(name: str, plan: str) -> None:
    experts = {"num_local_experts": 8} if name == "mixtral" else {}
    near_the_trace(hugging_face(name, **experts), plan, 64, within=0.01)


@pytest.mark.share(2)
@pytest.mark.parametrize("plan", ["pp2 / gpipe mb4 / recompute=ops", "pp2 / 1f1b mb4 / recompute=blocks"])
def test_masks_are_kept_by_each_stage(plan: str) -> None:
    near_the_trace(hugging_face("gpt_neo"), plan, 64, within=0.005)
