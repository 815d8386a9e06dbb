"""`pkg.mod:factory` as the planner's MODEL: what its forward is given, and which axes it cannot have."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.cli.options.planning import question
from shardwise.diagnose.read_module import example_length, example_of, read_module, refused_axes
from shardwise.errors import ModelError
from shardwise.hardware.cluster import load_cluster
from shardwise.model.recording import Call, Recording
from shardwise.model.stacks import WHOLE
from shardwise.models.decoder import Decoder, DecoderConfig
from shardwise.parallel.inputs import Signature, model_inputs
from shardwise.plan.memory import estimate_memory
from shardwise.plan.plan import Plan
from shardwise.plan.stack import load_stack
from shardwise.plan.workload import Workload


class Manual(nn.Module):
    """Attention by hand, whose scores are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        stream = self.embed(tokens)
        for block in self.blocks:
            scores = torch.softmax(block(stream) @ stream.transpose(1, 2), -1)
            stream = stream + scores @ stream
        return self.head(stream)


class Picture(nn.Module):
    """Two inputs, neither of them token ids, and it says so."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))
        self.head = nn.Linear(3, 10)
        self.example_input_array = (torch.zeros(2, 3, 8, 8), torch.zeros(2, 10))

    def forward(self, image: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        for conv in self.convs:
            image = torch.relu(conv(image))
        return self.head(image.mean((2, 3))) * weight


def test_what_attention_keeps_grows_with_the_length_that_is_asked_for() -> None:
    per_token = [sum(op.saves for op in read_module("m", Manual, n, "meta").blocks[0].ops) for n in (512, 4096)]
    assert per_token[1] > 4 * per_token[0]


@pytest.mark.parametrize("widths", [(2.0,), (4.0,), ()])
def test_steps_are_looked_at_in_the_types_that_are_asked_about(widths: tuple[float, ...]) -> None:
    profile = read_module("m", Manual, 16, "meta", widths=widths)
    assert {seen.width for seen, _ in profile.blocks[0].courses} == {*widths} and not profile.unseen


def test_two_batches_say_as_much_as_three_where_all_grows_with_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    two = read_module("m", Manual, 16, "meta")
    monkeypatch.setattr("shardwise.model.seen.is_plain", lambda runs, rows: False)
    three = read_module("m", Manual, 16, "meta")
    assert two.blocks[0].courses == three.blocks[0].courses != ()


def test_buffers_are_counted() -> None:
    class Table(Manual):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.zeros(1 << 28, device="meta"))

    profile, device = read_module("table", Table, 16, "meta"), load_cluster("h100").device
    work = Workload(seq_len=16, global_batch=1)
    memory = [
        estimate_memory(p, Plan.parse("dp1 / fp32"), work, stack=load_stack(stack), device=device).allocated
        for p in (profile, replace(profile, buffers=0))
        for stack in ("shardwise", "shardwise-cpu")
    ]
    assert profile.buffers == 4 << 28
    assert memory[0] - memory[2] == memory[1] - memory[3] == 2 * (4 << 28)  # a step keeps what they were before it


def test_a_module_with_other_inputs_says_which() -> None:
    profile = read_module("picture", Picture, 4096, "meta")
    assert len(profile.blocks) == 3 and profile.num_params == sum(p.numel() for p in Picture().parameters())
    assert example_length(example_of(Picture)) == 3
    assert refused_axes(Picture, 8).keys() == {"cp", "pp"}
    with pytest.raises(ModelError, match=r"It was given int64 of shape \[1, 16\]; .* `example_input_array`"):
        read_module("conv", lambda: nn.Sequential(*(nn.Conv2d(3, 3, 3) for _ in range(2))), 16, "meta")


def test_axes_that_apply_would_refuse_are_known_before_a_search() -> None:
    assert refused_axes(Manual, 64) == {"cp": "module.no-positions", "pp": "module.chain"}
    assert refused_axes(lambda: Decoder(DecoderConfig()), 64) == {}
    assert refused_axes(Counted, 16) == {
        "cp": "module.no-positions",
        "recompute of compiled blocks": "module.statistics-twice",
    }


class Looked(nn.Module):
    """Rows of a table that one rank alone may look up."""

    def __init__(self, hooked: bool = False, **table: Any) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(32, 8, **table), nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        if hooked:
            self.head.weight.register_hook(lambda gradient: gradient * 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_data_ranks_that_apply_would_refuse_are_known_before_a_search() -> None:
    ranks, one = {"dp_replicate", "dp_shard"}, {"pp", "cp", "recompute", "offload-activations", "compile"}
    assert refused_axes(Looked, 16, WHOLE).keys() == one
    assert refused_axes(partial(Looked, max_norm=1.0), 16, WHOLE).keys() == one | ranks
    assert refused_axes(partial(Looked, scale_grad_by_freq=True), 16, WHOLE).keys() == one | ranks | {"accumulation"}
    assert refused_axes(partial(Looked, max_norm=1.0), 16).keys() == ranks | {"cp"}
    with pytest.raises(ModelError, match="parameter head.weight has a hook on its gradient"):
        refused_axes(partial(Looked, hooked=True), 16, WHOLE)


class Counted(nn.Module):
    """Its blocks have running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(3)))
        self.example_input_array = torch.zeros(4, 8)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.blocks(rows)


class Weighted(nn.Module):
    """A chain, fed with two tensors."""

    def __init__(self, example: Any = None) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(nn.Linear(32, 32) for _ in range(4)), nn.Linear(32, 8)
        self.example_input_array = (torch.zeros(2, 16, 32), torch.ones(2, 16, 1)) if example is None else example

    def forward(self, rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        rows = rows * scale
        for block in self.blocks:
            rows = block(rows)
        return self.head(rows)


class Labelled(nn.Module):
    """Computes its loss itself, and cannot do without labels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        ids = torch.zeros(2, 16, dtype=torch.long)
        self.example_input_array = {"ids": ids, "labels": ids}

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        assert weight is None
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def test_several_arguments_are_given_to_a_pipeline_by_their_names() -> None:
    assert "pp" not in refused_axes(Weighted, 16)
    one, other = Weighted().example_input_array
    assert "pp" not in refused_axes(lambda: Weighted({"rows": one, "scale": other}), 16)


def test_labels_that_forward_requires_are_its_inputs() -> None:
    assert len(read_module("m", Labelled, 16, "meta").blocks) == 2
    assert read_module("m", Labelled, 16, "meta", blocks=WHOLE).num_params
    assert "pp" not in refused_axes(Labelled, 16)
    ids = torch.zeros(2, 16)
    batch = {"ids": ids, "labels": ids, "weight": ids}
    assert model_inputs(batch, Signature.of(Labelled()))[1].keys() == {"ids", "labels"}
    assert model_inputs(batch, Signature(("ids", "labels"), "with defaults"))[1].keys() == {"ids"}


class Twice(nn.Module):
    """Blocks that share a weight, and a number beside the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(32, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        for block in self.blocks[1:]:
            block.weight = self.blocks[0].weight

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embed(ids)
        for block in self.blocks:
            x = torch.relu(block(x))
        return x, x.square().mean()


def test_addresses_that_a_recording_knows_are_not_given_again() -> None:
    """Memory goes by address: of one that is freed it would be another's, and a module read differently each time."""
    recording = Recording.of(nn.Linear(1, 1), (1, 1))
    constant, given, gave = torch.ones(2), torch.ones(3), torch.ones(4)
    recording.operation(Call("lift_fresh", [constant], [constant], 0))  # `torch.tensor([...])`: no operator made it
    recording.operation(Call("add", [given], [gave], 0))
    assert {id(tensor) for tensor in (constant, given, gave)} <= {id(tensor) for tensor in recording.alive}


def test_what_is_assumed_of_a_module_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "twice", lambda: Twice(), raising=False)
    asked = question(f"{__name__}:twice", "h100:2", seq=16, batch=4, tokens=None)
    assert any("blocks.0.weight is blocks.1.weight too" in said for said in asked.assumed)
    assert any("a step goes backward from the number" in said for said in asked.assumed)
