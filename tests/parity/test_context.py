"""Context parallelism against one process: ways and compositions, lengths that do not divide, documents, masks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.errors import ModelError
from shardwise.models.decoder import Decoder, DecoderConfig
from shardwise.models.gpt import GPT, GPTConfig
from shardwise.models.sample import generate
from shardwise.parallel.context import ContextSplit
from shardwise.parallel.init import init_model
from shardwise.parallel.sequence.attention import Merged
from shardwise.parallel.sequence.intercept import Divided
from shardwise.plan.plan import Plan
from shardwise.train.sampling import WholeModel
from tests.parity import grid
from tests.parity.test_grid import cells, check

PLANS = [
    "cp4",
    "cp4 / context=ulysses",
    "dp2 cp2 / mb3",
    "fsdp2 cp2 / mb2",
    "fsdp2 cp2 / zero1 / context=ulysses",
    "fsdp2 cp2 / zero2 / mb2 / context=gather",
    "dp2 fsdp2 cp2",
    "fsdp2 tp2 cp2 / seq / loss-parallel / mb2 / context=ulysses",
    "pp2 cp2 / interleaved mb4",
    "pp2 cp2 / zero-bubble mb4 / recompute=blocks",
    "pp2 fsdp2 cp2 / 1f1b mb4 / context=ulysses",
    "cp2 / recompute=ops / context=gather",
    "fsdp2 cp2 / recompute=50% / offload=state+activations",
]


@pytest.mark.share(4)
@pytest.mark.parametrize("plan", cells(PLANS, {PLANS[7], PLANS[10], PLANS[6]}))  # larger worlds of the same pairs
def test_every_plan_trains_as_one_process_does(world, plan: str) -> None:
    check(world, plan, "decoder", "fp64")


@pytest.mark.share(2)
@pytest.mark.parametrize("plan", ["cp4", "fsdp2 cp2 / context=gather"])
def test_fp32(world, plan: str) -> None:
    check(world, plan, "decoder", "fp32")


# ---------------------------------------------------------------- other models and batches

VOCAB, ROWS = 64, 4
SIZES = DecoderConfig(vocab_size=VOCAB, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=48, max_seq_len=32)
GPT_SIZES = GPTConfig(vocab_size=VOCAB, dim=32, num_layers=2, num_heads=4, max_seq_len=32)


class SeesBothWays(nn.Module):
    """Encoder layer with grouped heads, a padding mask and no causality."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.q, self.kv, self.out = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        split = functools.partial(torch.unflatten, dim=-1, sizes=(-1, 8))
        h = self.norm(x)
        q, (k, v) = split(self.q(h)), split(self.kv(h)).chunk(2, dim=2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True, scale=0.3)
        return x + self.out(F.gelu(y.transpose(1, 2).flatten(2)))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCAB, 32), nn.Embedding(32, 32)
        self.layers = nn.ModuleList(SeesBothWays() for _ in range(2))
        self.head = nn.Linear(32, VOCAB)

    def forward(
        self, tokens: torch.Tensor, attention_mask: torch.Tensor, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
        x, mask = self.embed(tokens) + self.places(positions), attention_mask[:, None, None].bool()
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


def tokens(length: int, seed: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, VOCAB, (ROWS, length + 1), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def plain(length: int) -> dict[str, torch.Tensor]:
    ids, labels = tokens(length)
    return {"input_ids": ids, "labels": labels}


def packed(length: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(2)
    documents = torch.sort(torch.randint(0, 4, (ROWS, length), generator=draw))[0]
    return {**plain(length), "document_ids": documents}


def restarted(length: int) -> dict[str, torch.Tensor]:
    """Packed documents, each with positions of its own."""
    batch = packed(length)
    same = batch["document_ids"][:, :, None] == batch["document_ids"][:, None]
    return {**batch, "position_ids": same.tril().sum(-1) - 1}


def padded(length: int) -> dict[str, torch.Tensor]:
    ids, labels = tokens(length)
    keep = torch.arange(length) < torch.tensor([[length], [length - 5], [length - 2], [3]])
    return {"tokens": ids, "labels": labels, "attention_mask": keep.long(), "weight": keep.double() * 0.7}


def pair(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return tokens(length)


def loss_fn(logits: torch.Tensor, batch: Any) -> sw.Loss:
    labels = batch["labels"] if isinstance(batch, dict) else batch[1]
    if "weight" not in batch:
        return sw.token_cross_entropy(logits, labels)
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    return sw.mean_over(each, batch["weight"])


def call(model: nn.Module, batch: Any) -> torch.Tensor:
    if isinstance(batch, dict):
        return model(**{k: v for k, v in batch.items() if k not in ("labels", "weight")})
    return model(batch[0])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "decoder": functools.partial(Decoder, SIZES),
    "gpt": functools.partial(GPT, GPT_SIZES),
    "encoder": Encoder,
}


def truth(model: str, batches: list[Any]) -> grid.Trace:
    """Two steps of plain PyTorch on the micro-batches."""
    module = init_model(MODELS[model], seed=grid.SEED, dtype=torch.float64)
    optimizer, trace = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), grid.Trace()
    for _ in range(2):
        losses = [loss_fn(call(module, batch), batch) for batch in batches]
        loss = sum(x.sum for x in losses) / sum(x.weight for x in losses)
        loss.backward()
        trace.losses.append(loss.item())
        trace.grads.append({n: p.grad.clone() for n, p in module.named_parameters()})
        trace.norms.append(nn.utils.get_total_norm([p.grad for p in module.parameters()]).item())
        optimizer.step()
        optimizer.zero_grad()
    trace.params = {n: p.detach().clone() for n, p in module.named_parameters()}
    return trace


def trained(text: str, model: str, batches: list[Any], plant: Callable[[], None] | None = None) -> grid.Trace:
    """The same under a plan, on this rank."""
    if plant is not None:
        plant()
    plan, trace = Plan.parse(f"{text} / fp64"), grid.Trace()
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(MODELS[model], plan, mesh, seed=grid.SEED)
        state = sw.TrainState(placed, sw.sgd(placed, lr=0.1, momentum=0.9))
        grid.spy_on_gradients(state, trace)
        step = sw.make_step(state, loss_fn)
        for _ in range(2):
            metrics = step(batches if len(batches) > 1 else batches[0])
            trace.losses.append(metrics.loss)
            trace.norms.append(metrics.grad_norm)
        trace.params = {n: grid.whole(p) for n, p in placed.named_parameters().items()}
    return trace


def difference(world: Any, text: str, model: str, batches: list[Any], plant: Callable[[], None] | None = None) -> float:
    ranks = world(Plan.parse(text).world, trained, text, model, batches, plant)
    return max(grid.differences(ranks, world(1, truth, model, batches)[0]).values())


CASES = [
    ("cp2 / context=gather", "decoder", [plain(13)]),
    ("cp4 / context=ulysses / balance=contiguous", "decoder", [plain(13)]),
    ("cp2", "gpt", [plain(9)]),
    ("cp2", "decoder", [packed(21)]),
    ("cp4 / context=ulysses", "decoder", [packed(18)]),
    ("pp2 cp2 / 1f1b mb2", "decoder", [restarted(18)]),
    ("tp2 cp2 / seq", "decoder", [restarted(24)]),
    ("cp4", "encoder", [padded(19)]),
    ("cp2 / context=ulysses", "encoder", [padded(12)]),
    ("pp2 cp2 / gpipe mb2 / context=gather", "encoder", [padded(17)]),
    ("cp2 / balance=contiguous", "decoder", [pair(10)]),
    ("pp2 cp2 / 1f1b mb2", "gpt", [pair(10)]),
    ("cp2 / recompute=blocks", "decoder", [plain(13), plain(16), packed(9)]),
]


@pytest.mark.share(6)
@pytest.mark.parametrize(("text", "model", "batches"), CASES)
def test_uneven_lengths_documents_masks_and_batches(world, text: str, model: str, batches: list[Any]) -> None:
    assert difference(world, text, model, batches) <= 1e-11


# ---------------------------------------------------------------- evaluation and sampling


def measured(text: str, rows: list[dict[str, torch.Tensor]]) -> tuple[list[float], list[int]]:
    """Held-out loss and weight, and tokens drawn, after one step of training."""
    plan = Plan.parse(f"{text} / fp64")
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(MODELS["decoder"], plan, mesh, seed=grid.SEED)
        state = sw.TrainState(placed, sw.sgd(placed, lr=0.1))
        step, size = sw.make_step(state, loss_fn), ROWS // mesh.batch.size
        own = slice(mesh.batch.rank * size, (mesh.batch.rank + 1) * size)
        step({key: value[own] for key, value in plain(16).items()})
        batch = sw.Batch(global_size=4, micro_batches=plan.batch.micro_batches)
        total = sw.evaluate(placed, loss_fn, sw.eval_batches(rows, batch, mesh))
        placed.train(False)
        drawn = generate(WholeModel(placed, 16), torch.tensor([[3, 1, 4]]), 6, temperature=0)
        placed.train(True)
        again = step({key: value[own] for key, value in plain(16).items()})
    return [float(total.sum), float(total.weight), again.loss], drawn.flatten().tolist()


@pytest.mark.share(2)
@pytest.mark.parametrize("text", ["dp2 cp2", "pp2 cp2 / 1f1b mb2"])
def test_held_out_loss_is_exact_and_text_is_drawn_from_whole_sequences(world, text: str) -> None:
    ids, labels = tokens(15, seed=8)
    rows = [{"input_ids": ids[i % 4], "labels": labels[i % 4]} for i in range(8 if "pp" in text else 7)]
    (numbers, drawn), *_ = world(1, measured, "dp1", rows)
    for found, text_ in world(4, measured, text, rows):
        assert found == pytest.approx(numbers, rel=1e-12)
        assert text_ == drawn


def half_losses(text: str) -> list[tuple[float, float]]:
    """(loss, gradient norm) of three steps."""
    plan = Plan.parse(text)
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(MODELS["decoder"], plan, mesh, seed=grid.SEED)
        step = sw.make_step(sw.TrainState(placed, sw.sgd(placed, lr=0.1)), loss_fn)
        return [(m.loss, m.grad_norm) for m in (step(packed(21)) for _ in range(3))]


@pytest.mark.share(2)
@pytest.mark.parametrize("text", ["cp2 / bf16", "cp2 / fp16 / context=ulysses"])
def test_half_types_stay_near_full_precision(world, text: str) -> None:
    truth_ = torch.tensor(world(1, half_losses, "dp1 / fp32")[0])
    first, second = (torch.tensor(rank) for rank in world(2, half_losses, text))
    assert torch.equal(first, second)
    assert ((first - truth_) / truth_).abs().max() < 5e-3


def saved(text: str, path: str, first: int, last: int) -> list[float]:
    """Losses of steps `first` to `last`, from the checkpoint of the step before, and one checkpoint more."""
    plan = Plan.parse(f"{text} / fp64")
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(MODELS["decoder"], plan, mesh, seed=grid.SEED)
        state = sw.TrainState(placed, sw.adamw(placed, lr=1e-2))
        store, size = sw.Store(path), ROWS // mesh.batch.size
        own = slice(mesh.batch.rank * size, (mesh.batch.rank + 1) * size)
        store.load_latest(state)
        step = sw.make_step(state, loss_fn)
        losses = [step({key: value[own] for key, value in plain(13).items()}).loss for _ in range(first, last)]
        store.save(state)
    return losses


def test_a_checkpoint_of_divided_sequences_goes_on_under_another_plan(world, tmp_path: Path) -> None:
    (whole,) = world(1, saved, "dp1", str(tmp_path / "one"), 0, 4)
    path = str(tmp_path / "many")
    parts = [
        world(4, saved, plan, path, i, i + 2)[0] for i, plan in ((0, "fsdp2 cp2"), (2, "dp2 cp2 / context=ulysses"))
    ]
    assert parts[0] + parts[1] == pytest.approx(whole, rel=1e-11)


# ---------------------------------------------------------------- negative controls


def positions_not_shifted() -> None:
    """Every rank counts its tokens from zero."""
    right = ContextSplit._numbers
    ContextSplit._numbers = lambda self, layout, main: torch.arange(right(self, layout, main).shape[1]).expand(
        main.shape[0], -1
    )


def contiguous_positions_under_zigzag() -> None:
    right = ContextSplit._numbers

    def wrong(self: ContextSplit, layout: Any, main: torch.Tensor) -> torch.Tensor:
        size = right(self, layout, main).shape[1]
        return torch.arange(self.rank * size, (self.rank + 1) * size).expand(main.shape[0], -1)

    ContextSplit._numbers = wrong


def attention_within_a_rank() -> None:

    def wrong(self: Divided, call: Any) -> torch.Tensor:
        self.calls += 1
        return F.scaled_dot_product_attention(call.query, call.key, call.value, is_causal=call.is_causal)

    Divided.attend = wrong


def parts_merged_without_their_weights() -> None:
    right = Merged.add
    Merged.add = lambda self, queries, out, lse: right(self, queries, out, torch.zeros_like(lse))


def labels_of_another_rank() -> None:
    right = ContextSplit._part

    def wrong(self: ContextSplit, key: str, value: Any, layout: Any) -> Any:
        other = (layout.ranges[1], layout.ranges[0])
        return right(self, key, value, type(layout)(layout.length, other) if key == "labels" else layout)

    ContextSplit._part = wrong


@pytest.mark.parametrize(
    "fault",
    [
        positions_not_shifted,
        contiguous_positions_under_zigzag,
        attention_within_a_rank,
        parts_merged_without_their_weights,
        labels_of_another_rank,
    ],
)
def test_a_planted_fault_is_seen(world, fault: Callable[[], None]) -> None:
    assert difference(world, "cp2", "gpt", [plain(16)], fault) > 1e-6


class Counting(nn.Module):
    """Counts positions from its padding token on, as RoBERTa does; its table of tokens is none that its base finds."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places, self.last = nn.Embedding(16, 8), nn.Embedding(16, 8), nn.Linear(8, 16)
        self.padding_idx = 2

    def get_input_embeddings(self) -> nn.Module:
        raise NotImplementedError  # as that of transformers' base class does

    def create_position_ids_from_input_ids(self, input_ids: torch.Tensor, padding_idx: int) -> torch.Tensor:
        counts = input_ids.ne(padding_idx).long()
        return torch.cumsum(counts, dim=1) * counts + padding_idx

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        if position_ids is None:
            position_ids = self.create_position_ids_from_input_ids(input_ids, self.padding_idx)
        x = (self.tokens(input_ids) + self.places(position_ids)).unsqueeze(1)
        return self.last(F.scaled_dot_product_attention(x, x, x, is_causal=True).squeeze(1))


SMALL = sw.GPTConfig(vocab_size=16, dim=8, num_layers=2, num_heads=2, max_seq_len=8)
KINDS: dict[str, Callable[[], nn.Module]] = {"gpt": lambda: sw.GPT(SMALL), "counting": Counting}


def distilled(text: str, is_copy: bool, kinds: tuple[str, str] = ("gpt", "gpt")) -> str | list[float]:
    """Losses of a model that follows a second one; or what was refused."""
    plan = sw.Plan.parse(f"{text} / fp64")
    with sw.open_mesh(plan) as mesh:
        placed, teacher = (sw.apply(KINDS[kind], plan, mesh, seed=i) for i, kind in enumerate(kinds, start=1))
        teacher.module.eval().requires_grad_(False)

        def to_teacher(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> sw.Loss:
            with torch.no_grad():
                taught = teacher.module(batch["input_ids"].clone() if is_copy else batch["input_ids"])
            return sw.mean_over((logits - taught).square().mean(-1))

        step = sw.make_step(sw.TrainState(placed, sw.sgd(placed, lr=0.1)), to_teacher)
        ids = torch.randint(16, (4, 8), generator=torch.Generator().manual_seed(1))
        try:
            return [step({"input_ids": ids}).loss for _ in range(3)]
        except ModelError as error:
            return str(error)


def test_a_teacher_sees_the_whole_sequence(world) -> None:
    """It took a rank's tokens for a sequence of their own, from position 0 on, without a word."""
    (alone,) = world(1, distilled, "dp1", False)
    for text in ("cp2", "cp2 / context=gather"):
        assert world(2, distilled, text, False) == [pytest.approx(alone, rel=1e-11)] * 2
    for said in world(2, distilled, "cp2", True):
        assert "did not come through placed.share (or was copied after it)" in said


@pytest.mark.parametrize("kinds", [("gpt", "counting"), ("counting", "gpt")])
def test_a_teacher_counts_positions_in_its_own_way(world, kinds: tuple[str, str]) -> None:
    """It was given those of its student: another loss without a word, or an index outside of its table."""
    (alone,) = world(1, distilled, "dp1", False, kinds)
    assert world(2, distilled, "cp2", False, kinds) == [pytest.approx(alone, rel=1e-11)] * 2
