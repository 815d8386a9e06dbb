"""Tied weights train as in one process, and stay tied: one group of shards, one vocabulary shard, two pipeline ends."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.errors import ModelError
from shardwise.models.decoder import Decoder, DecoderConfig
from shardwise.parallel.ties import find_ties
from tests.parity import grid

SIZES = DecoderConfig(
    vocab_size=grid.VOCAB,
    dim=32,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    ffn_dim=64,
    max_seq_len=grid.SEQ,
    tie_embeddings=True,
)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.fc(x))


class Functional(nn.Module):
    """The head is no module: forward multiplies with the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(grid.VOCAB, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return F.linear(x, self.embed.weight)


class SharedBlocks(nn.Module):
    """The third layer has the weights of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(grid.VOCAB, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.layers[2].fc.weight = self.layers[1].fc.weight
        self.head = nn.Linear(16, grid.VOCAB, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


grid.MODELS |= {
    "tied": functools.partial(Decoder, SIZES),
    "functional": Functional,
    "shared-blocks": SharedBlocks,
}
grid.SAMPLES["functional"] = {"input_ids": torch.zeros(2, grid.SEQ, dtype=torch.int64)}


def run_plan(*arguments: object) -> grid.Trace:  # of this file: a worker that imports it knows its models
    return grid.run_plan(*arguments)


def reference(*arguments: object) -> grid.Trace:
    return grid.reference(*arguments)


@functools.cache
def truth(world, model: str) -> grid.Trace:
    return world(1, reference, model, "fp64", 16)[0]


def check(world, plan: str, model: str) -> None:
    ranks = world(sw.Plan.parse(plan).world, run_plan, f"{plan} / fp64", model, 16)
    worst = grid.differences(ranks, truth(world, model))
    assert max(worst.values()) <= 1e-11, worst


@pytest.mark.share(8)
@pytest.mark.parametrize(
    "plan",
    [
        "dp2 / mb2",
        "fsdp2",
        "fsdp4 / zero1 / mb2",
        "fsdp2 / wrap=2000",
        "tp2",
        "tp2 / seq / loss-parallel",
        "fsdp2 tp2 / seq / mb2",
        "pp2 / 1f1b mb4",
        "pp4 / gpipe mb4",
        "pp2 / interleaved mb4",
        "pp2 / zero-bubble-v mb4",
        "pp2 dp2 / 1f1b mb2",
        "pp2 fsdp2 / zero2 / dualpipe-v mb4",
        "pp2 tp2 / zero-bubble mb4 / loss-parallel",
        "pp2 fsdp2 tp2 / 1f1b mb4 / seq",
        "pp2 tp2 / zero-bubble-v mb4",
    ],
)
def test_tied_decoder(world, plan: str) -> None:
    check(world, plan, "tied")


@pytest.mark.share(4)
@pytest.mark.parametrize("plan", ["fsdp2", "pp2 / 1f1b mb2", "pp2 fsdp2 / interleaved mb2"])
@pytest.mark.parametrize("model", ["functional", "shared-blocks"])
def test_other_ways_to_share(world, plan: str, model: str) -> None:
    check(world, plan, model)


def test_a_pipelines_copies_load_together(world, tmp_path) -> None:
    before = world(2, save, "pp2 / zero-bubble-v mb4", str(tmp_path))[0]
    after = world(4, load, "pp2 tp2 / 1f1b mb4", str(tmp_path))
    for name in before:
        held = [rank[name] for rank in after if name in rank]
        assert held and all(torch.equal(before[name], tensor) for tensor in held), name
    assert "embed.weight" in before and "head.weight" not in before


def save(plan: str, folder: str) -> dict[str, torch.Tensor]:
    return trained(plan, folder, steps=1)


def load(plan: str, folder: str) -> dict[str, torch.Tensor]:
    return trained(plan, folder, steps=0)


def trained(text: str, folder: str, steps: int) -> dict[str, torch.Tensor]:
    plan = sw.Plan.parse(f"{text} / fp64")
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(grid.MODELS["tied"], plan, mesh, seed=grid.SEED + (0 if steps else 1))
        data = sw.loader(grid.Rows(), grid.batch(plan, 16), mesh, seed=1)
        state = sw.TrainState(placed, sw.adamw(placed, lr=1e-2), data)
        store = sw.Store(folder)
        if steps:
            for _ in sw.steps(state, grid.loss_fn, until=steps):
                pass
            store.save(state)
        else:
            store.load_latest(state)
        roots = [part.root for part in placed.parts]
        copies = [p for root in roots for n, p in root.named_parameters() if n in ("embed.weight", "head.weight")]
        whole = [grid.whole(copy) for copy in copies]
        assert all(torch.equal(whole[0], other) for other in whole)
        return {name: grid.whole(p) for name, p in placed.named_parameters().items()}


def test_the_same_memory_is_made_one_parameter() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    model["b"].weight = nn.Parameter(model["a"].weight.detach())
    assert find_ties(model) == {"b.weight": "a.weight"}
    assert model["a"].weight is model["b"].weight


def test_other_views_of_the_same_memory_are_refused() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    model["b"].weight = nn.Parameter(model["a"].weight.detach().t())
    with pytest.raises(ModelError, match="different views of the same memory"):
        find_ties(model)


def test_neighbours_in_one_buffer_are_not_tied() -> None:
    flat = torch.zeros(8)
    model = nn.ParameterDict({"a": nn.Parameter(flat[:4]), "b": nn.Parameter(flat[4:])})
    assert find_ties(model) == {}


def test_rules_that_part_a_tie_are_refused(world) -> None:
    assert "tied to embed.weight, and their rules place it as" in world(2, parted)[0]


def parted() -> str:
    plan = sw.Plan.parse("tp2")
    rules = {"embed": "replicate", "head": "head", "norm": "sequence"}
    for pattern, style in {"wq": "column", "wk": "column", "wv": "column", "wo": "row"}.items():
        rules[f"layers.*.attn.{pattern}"] = style
    rules |= {"layers.*.ffn.w1": "column", "layers.*.ffn.w3": "column", "layers.*.ffn.w2": "row"}
    rules |= {"layers.*.attn_norm": "sequence", "layers.*.ffn_norm": "sequence"}
    with sw.open_mesh(plan) as mesh:
        try:
            sw.apply(grid.MODELS["tied"], plan, mesh, rules=rules)
        except ModelError as error:
            return str(error)
    return "not refused"
