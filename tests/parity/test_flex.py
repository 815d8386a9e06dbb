"""FlexAttention over a divided sequence against one process, in which the same attention is written by hand."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, create_mask, flex_attention

import shardwise as sw
from shardwise.models.decoder import Attention as DecoderAttention
from shardwise.models.decoder import Decoder, DecoderConfig, rotary_tables, rotate
from shardwise.parallel.init import init_model
from shardwise.parallel.sequence import flex
from shardwise.parallel.sequence.intercept import Divided, Watch
from shardwise.parallel.sequence.ring import Ranks
from shardwise.plan.plan import Plan
from shardwise.plan.ranks.sequence import Layout, divide
from tests.parity import grid

VOCAB, ROWS, DIM, HEADS, KV_HEADS = 64, 4, 32, 4, 2


# ---------------------------------------------------------------- masks and functions of users


def documents_of(batch: int, length: int) -> torch.Tensor:
    return torch.sort(torch.randint(0, 4, (batch, length), generator=torch.Generator().manual_seed(2)))[0]


def causal(b: Any, h: Any, q: Any, kv: Any) -> torch.Tensor:
    return q >= kv


def sliding(b: Any, h: Any, q: Any, kv: Any) -> torch.Tensor:
    return (q >= kv) & (q - kv < 5)


def per_head(b: Any, h: Any, q: Any, kv: Any) -> torch.Tensor:
    return (q >= kv) & (q - kv < 3 + 2 * h)


def of_documents(documents: torch.Tensor) -> Callable[..., torch.Tensor]:
    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> torch.Tensor:
        return (q >= kv) & (documents[b, q] == documents[b, kv])

    return mask_mod


def prefix(documents: torch.Tensor) -> Callable[..., torch.Tensor]:
    """The first document is seen from everywhere; query 7 of some rows sees nothing at all."""

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> torch.Tensor:
        return ((q >= kv) | (documents[b, kv] == 0)) & ((documents[b, 10] < 2) | (q != 7))

    return mask_mod


MASKS: dict[str, tuple[Callable[[torch.Tensor], Callable[..., torch.Tensor]], bool, bool]] = {
    "causal": (lambda documents: causal, False, False),
    "sliding": (lambda documents: sliding, False, False),
    "per head": (lambda documents: per_head, False, True),
    "documents": (of_documents, True, False),
    "prefix": (prefix, True, False),
}
"""Name -> (function of the documents, whether rows differ, whether heads differ)."""


def soft_capped(score: torch.Tensor, b: Any, h: Any, q: Any, kv: Any) -> torch.Tensor:
    return 2.0 * torch.tanh(score / 2.0)


def alibi(score: torch.Tensor, b: Any, h: Any, q: Any, kv: Any) -> torch.Tensor:
    return score + 0.1 * (h + 1) * (kv - q)


def near(score: torch.Tensor, b: Any, h: Any, q: Any, kv: Any) -> torch.Tensor:
    return score - 0.01 * (kv - q) ** 2


class Attention(nn.Module):
    def __init__(self, mask: str, score: str, by_hand: bool) -> None:
        super().__init__()
        self.mask, self.score, self.by_hand = mask, score, by_hand
        self.norm = nn.LayerNorm(DIM)
        self.q, self.kv, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        if score == "learned":
            self.slopes = nn.Parameter(torch.zeros(HEADS))

    def score_mod(self) -> Callable[..., torch.Tensor] | None:
        if self.score == "learned":
            slopes = self.slopes
            return lambda score, b, h, q, kv: score + (0.1 + slopes[h]) * (kv - q)
        return {"soft": soft_capped, "alibi": alibi, "near": near, "none": None}[self.score]

    def forward(self, x: torch.Tensor, mask: Any) -> torch.Tensor:
        h = self.norm(x)
        q, (k, v) = self.q(h).unflatten(-1, (-1, 8)), self.kv(h).unflatten(-1, (-1, 8)).chunk(2, dim=2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        attend = by_hand if self.by_hand else flex_attention
        y = attend(q, k, v, self.score_mod(), block_mask=mask, scale=0.3, enable_gqa=True)
        return x + self.out(torch.nn.functional.gelu(y.transpose(1, 2).flatten(2)))


def by_hand(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score_mod: Any, block_mask: Any, scale: float, enable_gqa: bool
) -> torch.Tensor:
    """Softmax over all scores: nothing of torch's FlexAttention but what its arguments mean."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.mT * scale
    b, h, i, j = torch.meshgrid(*(torch.arange(n) for n in scores.shape), indexing="ij")
    if score_mod is not None:
        scores = score_mod(scores, b, h, i, j)
    if block_mask is not None:
        blind = ~block_mask.any(-1, keepdim=True)
        scores = scores.masked_fill(~block_mask, -math.inf).masked_fill(blind, 0.0)
        return torch.softmax(scores, -1).masked_fill(blind, 0.0) @ v
    return torch.softmax(scores, -1) @ v


class Model(nn.Module):
    """A decoder whose mask is made from the documents of the whole batch, by the model itself."""

    def __init__(self, mask: str = "documents", score: str = "none", by_hand: bool = False) -> None:
        super().__init__()
        self.mask, self.by_hand = mask, by_hand
        self.embed, self.places = nn.Embedding(VOCAB, DIM), nn.Embedding(64, DIM)
        self.layers = nn.ModuleList(Attention(mask, score, by_hand) for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def whole_mask(self, documents: torch.Tensor) -> Any:
        if self.mask == "none":
            return None
        (make, rows, heads), length = MASKS[self.mask], documents.shape[1]
        function = create_mask if self.by_hand else create_block_mask
        sizes = (documents.shape[0] if rows else 1, HEADS if heads else 1, length, length)
        return function(make(documents), *sizes, device="cpu")

    def forward(
        self, input_ids: torch.Tensor, document_ids: torch.Tensor, position_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])
        x, mask = self.embed(input_ids) + self.places(position_ids), self.whole_mask(document_ids)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


SIZES = DecoderConfig(
    vocab_size=VOCAB, dim=DIM, num_layers=2, num_heads=HEADS, num_kv_heads=KV_HEADS, ffn_dim=48, max_seq_len=32
)


class PackedAttention(DecoderAttention):
    """That of the reference decoder, by FlexAttention."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor | None = None, mask: Any = None) -> torch.Tensor:
        q, k, v = (self.heads(layer(x)) for layer in (self.wq, self.wk, self.wv))
        tables = rotary_tables(q, self.rope_theta, position_ids)
        q, k, v = rotate(q, *tables).transpose(1, 2), rotate(k, *tables).transpose(1, 2), v.transpose(1, 2)
        y = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
        return self.wo(y.transpose(1, 2).flatten(2))

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


class PackedDecoder(Decoder):
    def __init__(self) -> None:
        super().__init__(SIZES)
        for layer in self.layers:
            layer.attn = PackedAttention(SIZES)
        self.reset_parameters()

    def forward(
        self, input_ids: torch.Tensor, document_ids: torch.Tensor, position_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        rows, length = document_ids.shape
        mask = create_block_mask(of_documents(document_ids), rows, None, length, length, device="cpu")
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, position_ids, mask)
        return self.head(self.norm(x))


class GivenDecoder(PackedDecoder):
    """Takes the mask that its caller made; a pipeline cannot trace its making."""

    def forward(
        self, input_ids: torch.Tensor, block_mask: Any, position_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, position_ids, block_mask)
        return self.head(self.norm(x))


def factory(mask: str, score: str, by_hand: bool) -> Callable[[], nn.Module]:
    if mask in ("decoder", "given"):  # in one process torch's other function, with a mask of numbers
        return partial(Decoder, SIZES) if by_hand else PackedDecoder if mask == "decoder" else GivenDecoder
    return partial(Model, mask, score, by_hand)


def batch(mask: str) -> dict[str, torch.Tensor]:
    length = 24 if mask in ("decoder", "given") else 21  # `seq` divides each rank's tokens
    ids = torch.randint(0, VOCAB, (ROWS, length + 1), generator=torch.Generator().manual_seed(5))
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:].contiguous(), "document_ids": documents_of(ROWS, length)}


def with_mask(rows: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The same batch with the mask in place of the documents."""
    documents, size = rows.pop("document_ids"), rows["input_ids"].shape
    mask = create_block_mask(of_documents(documents), size[0], None, size[1], size[1], device="cpu")
    return {**rows, "block_mask": mask}


def micro_batches(mask: str, plan: Plan, mesh: sw.Mesh) -> Any:
    """This rank's rows; masks are not divided by rows, so their micro-batches are made here."""
    rows, size = batch(mask), ROWS // mesh.batch.size
    own = {key: value[mesh.batch.rank * size :][:size] for key, value in rows.items()}
    if mask != "given":
        return own
    part = size // plan.batch.micro_batches
    return [with_mask({key: value[at : at + part] for key, value in own.items()}) for at in range(0, size, part)]


def loss_fn(logits: torch.Tensor, rows: Any) -> sw.Loss:
    return sw.token_cross_entropy(logits, rows["labels"])


# ---------------------------------------------------------------- training


def truth(mask: str, score: str) -> grid.Trace:
    """Two steps of plain PyTorch, attention by hand."""
    module = init_model(factory(mask, score, by_hand=True), seed=grid.SEED, dtype=torch.float64)
    optimizer, trace, rows = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), grid.Trace(), batch(mask)
    for _ in range(2):
        loss = loss_fn(module(rows["input_ids"], document_ids=rows["document_ids"]), rows)
        (loss.sum / loss.weight).backward()
        trace.losses.append((loss.sum / loss.weight).item())
        trace.grads.append({n: p.grad.clone() for n, p in module.named_parameters()})
        trace.norms.append(nn.utils.get_total_norm([p.grad for p in module.parameters()]).item())
        optimizer.step()
        optimizer.zero_grad()
    trace.params = {n: p.detach().clone() for n, p in module.named_parameters()}
    return trace


def trained(text: str, mask: str, score: str, plant: Callable[[], None] | None = None) -> grid.Trace:
    if plant is not None:
        plant()
    warnings.filterwarnings("ignore", "flex_attention called without")
    plan, trace = Plan.parse(f"{text} / fp64"), grid.Trace()
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(factory(mask, score, by_hand=False), plan, mesh, seed=grid.SEED)
        state = sw.TrainState(placed, sw.sgd(placed, lr=0.1, momentum=0.9))
        grid.spy_on_gradients(state, trace)
        step, rows = sw.make_step(state, loss_fn), micro_batches(mask, plan, mesh)
        for _ in range(2):
            metrics = step(rows)
            trace.losses.append(metrics.loss)
            trace.norms.append(metrics.grad_norm)
        trace.params = {n: grid.whole(p) for n, p in placed.named_parameters().items()}
    return trace


def difference(world: Any, text: str, mask: str, score: str, plant: Callable[[], None] | None = None) -> float:
    ranks = world(Plan.parse(text).world, trained, text, mask, score, plant)
    return max(grid.differences(ranks, grid.alone(world, truth, mask, score)).values())


CASES = [
    ("cp2 / context=gather", "causal", "near"),
    ("cp2 / context=gather", "documents", "learned"),
    ("cp4 / context=gather", "prefix", "soft"),
    ("cp2 / context=gather / balance=contiguous", "per head", "none"),
    ("cp2 / context=gather / recompute=blocks", "sliding", "learned"),
    ("fsdp2 cp2 / context=gather", "sliding", "soft"),
    ("cp2 / context=ulysses", "documents", "soft"),
    ("cp4 / context=ulysses", "per head", "learned"),
    ("fsdp2 cp2 / context=ulysses / balance=contiguous", "prefix", "none"),
    ("cp2 / context=gather", "none", "learned"),
    ("tp2 cp2 / seq / context=gather", "decoder", "none"),
    ("tp2 cp2 / context=ulysses", "decoder", "none"),
    ("cp2 / mb2 / context=ulysses", "given", "none"),
    ("pp2 cp2 / 1f1b mb2 / context=gather", "given", "none"),
]


@pytest.mark.share(4)
@pytest.mark.parametrize(
    ("text", "mask", "score"), [*CASES[::2], *(pytest.param(*c, marks=pytest.mark.soak) for c in CASES[1::2])]
)
def test_training_is_that_of_one_process(world, text: str, mask: str, score: str) -> None:
    assert difference(world, text, mask, score) <= 1e-11


# ---------------------------------------------------------------- negative controls


def places_within_this_rank() -> None:
    """A mask evaluated with local positions."""
    flex.own_places = lambda ranks, device: torch.arange(ranks.layout.sizes[ranks.rank], dtype=torch.int32)


def places_of_another_rank() -> None:
    right = flex.own_places
    flex.own_places = lambda ranks, device: right(replace(ranks, rank=1 - ranks.rank), device)


def heads_from_zero() -> None:
    flex._mask_from_head = lambda mod, first: mod
    flex._score_from_head = lambda mod, first: mod


def gradients_of_this_rank_alone() -> None:
    """Of keys and values: what other ranks' queries found is left out."""

    def wrong(dk: torch.Tensor, dv: torch.Tensor, ranks: Any) -> tuple[torch.Tensor, ...]:
        return tuple(torch.cat([t[:, :, a:b] for a, b in ranks.own], dim=2) for t in (dk, dv))

    flex.scattered = wrong


FAULTS = [
    (places_within_this_rank, "cp2 / context=gather", "documents", "none"),
    (places_within_this_rank, "cp2 / context=gather", "none", "near"),
    (places_of_another_rank, "cp2 / context=gather", "decoder", "none"),
    (heads_from_zero, "cp2 / context=ulysses", "per head", "none"),
    (heads_from_zero, "cp2 / context=ulysses", "causal", "alibi"),
    (gradients_of_this_rank_alone, "cp2 / context=gather", "causal", "none"),
]


@pytest.mark.parametrize(("fault", "text", "mask", "score"), FAULTS)
def test_a_planted_fault_is_seen(world, fault: Callable[[], None], text: str, mask: str, score: str) -> None:
    assert difference(world, text, mask, score, fault) > 1e-6


# ---------------------------------------------------------------- torch's own function, where it serves


@dataclass(frozen=True)
class Whole:
    """One call over the whole sequence."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    documents: torch.Tensor

    @classmethod
    def drawn(cls) -> Whole:
        draw = partial(torch.randn, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
        return cls(draw(2, HEADS, 21, 8), draw(2, KV_HEADS, 21, 8), draw(2, KV_HEADS, 21, 5), documents_of(2, 21))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, function: Any, **options: Any) -> Any:
        mask = create_block_mask(of_documents(self.documents), 2, None, 21, 21, device="cpu")
        return function(q, k, v, alibi, block_mask=mask, scale=0.4, enable_gqa=True, **options)


def of_rank(tensor: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    return torch.cat([tensor[:, :, start:end] for start, end in layout.ranges[rank]], dim=2)


def parts(kinds: list[str], grads: list[bool]) -> dict[str, float]:
    """This rank's largest error of output and log-sum-exp."""
    warnings.filterwarnings("ignore", "flex_attention called without")
    whole, lse, layout, found = Whole.drawn(), AuxRequest(lse=True), divide(21, 2, "zigzag"), {}
    right, right_aux = whole.attend(whole.q, whole.k, whole.v, flex_attention, return_aux=lse)
    with sw.open_mesh(Plan.parse("cp2")) as mesh:
        mine = partial(of_rank, layout=layout, rank=mesh.index("cp"))
        for kind, grad in product(kinds, grads):
            qkv = (mine(t).requires_grad_(grad) for t in (whole.q, whole.k, whole.v))
            with Watch(divided(kind, mesh, layout)):
                out, aux = whole.attend(*qkv, flex_attention, return_aux=lse)
            assert aux.max_scores is None and out.requires_grad is grad
            found[f"{kind} {grad}"] = (out - mine(right)).abs().max().item()
            found[f"{kind} {grad} lse"] = (aux.lse.unsqueeze(-1) - mine(right_aux.lse.unsqueeze(-1))).abs().max().item()
    return found


def divided(kind: str, mesh: sw.Mesh, layout: Layout) -> Divided:
    running = Divided(kind)
    running.ranks, running.rows = Ranks(mesh.group("cp"), mesh.index("cp"), layout), 2
    return running


def compiled_part(backend: str, kind: torch.dtype) -> float:
    """The same of a function that the caller compiled; torch's own backend takes no fp64 on the CPU."""
    warnings.filterwarnings("ignore", "`torch.jit.script", DeprecationWarning)  # of torch's compiler itself
    whole, layout, compiled = Whole.drawn(), divide(21, 2, "zigzag"), torch.compile(flex_attention, backend=backend)
    mask = create_mask(of_documents(whole.documents), 2, 1, 21, 21, device="cpu")
    right = by_hand(whole.q, whole.k, whole.v, alibi, mask, 0.4, True)
    with sw.open_mesh(Plan.parse("cp2")) as mesh, Watch(divided("gather", mesh, layout)):
        mine = partial(of_rank, layout=layout, rank=mesh.index("cp"))
        out = whole.attend(*(mine(t).to(kind) for t in (whole.q, whole.k, whole.v)), compiled)
    return (out - mine(right)).abs().max().item()


def test_output_and_log_sum_are_those_of_torchs_function(world) -> None:
    for rank in world(2, parts, ["gather", "ulysses"], [False, True]):
        assert len(rank) == 8 and max(rank.values()) <= 1e-13, rank


@pytest.mark.parametrize(
    ("backend", "kind", "tolerance"),
    [
        ("eager", torch.float64, 1e-13),
        pytest.param("inductor", torch.float32, 2e-6, marks=pytest.mark.soak),
    ],
)
def test_a_function_that_the_caller_compiled_is_compiled(world, backend: str, kind: Any, tolerance: float) -> None:
    """Not compiled it would warn, and a warning is an error here."""
    assert max(world(2, compiled_part, backend, kind)) <= tolerance
