"""Attention over a divided sequence against torch's own over the whole: outputs and the gradient of every input."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import shardwise as sw
from shardwise.parallel.sequence.attention import Piece
from shardwise.parallel.sequence.intercept import Call, Divided
from shardwise.parallel.sequence.ring import Ranks, plan_pieces
from shardwise.plan.ranks.sequence import Layout, divide

BATCH, HEADS, DIM = 2, 4, 8


@dataclass(frozen=True)
class Case:
    mask: str = "none"
    length: int = 16
    kv_heads: int = HEADS
    value_dim: int = DIM
    dtype: torch.dtype = torch.float64
    balance: str = "zigzag"
    scale: float | None = None
    flat: bool = False


CASES = [
    Case(),
    Case("causal"),
    Case("causal", balance="contiguous"),
    Case("causal", length=13),
    Case("causal", length=8, kv_heads=2),
    Case("causal", length=19, kv_heads=1, balance="contiguous", scale=0.7),
    Case("causal", length=21, value_dim=5),
    Case("causal", length=17, flat=True),
    Case(length=11, value_dim=12, scale=0.3),
    Case("bool", length=13),
    Case("bool per head", length=18, balance="contiguous"),
    Case("bool per head", length=18, kv_heads=2, value_dim=4),
    Case("documents", length=22),
    Case("padding", length=15),
    Case("added", length=14, kv_heads=2),
    Case("added, whole pieces hidden", length=16),
    Case("square", length=12),
    Case("causal", dtype=torch.float32, length=13),
]


def mask_of(case: Case, draw: torch.Generator) -> torch.Tensor | None:
    n = case.length
    tokens = torch.arange(n)
    if case.mask in ("none", "causal"):
        return None
    if case.mask.startswith("bool"):
        heads = HEADS if "head" in case.mask else 1
        mask = torch.rand(BATCH, heads, n, n, generator=draw) < 0.5
        mask[0, :, 3] = False  # a query that sees nothing
        return mask
    if case.mask == "documents":
        documents = torch.sort(torch.randint(0, 3, (BATCH, n), generator=draw))[0]
        return (documents[:, :, None] == documents[:, None, :]).tril()[:, None]
    if case.mask == "padding":
        return (tokens < n - 4).expand(BATCH, 1, 1, n)
    if case.mask == "square":
        return torch.rand(n, n, generator=draw) < 0.6
    added = torch.randn(1, HEADS, n, n, generator=draw, dtype=torch.float64).to(case.dtype)
    hidden = tokens[None] >= n // 2 if "whole" in case.mask else torch.rand(n, n, generator=draw) < 0.3
    return added.masked_fill(hidden, -math.inf)


def inputs(case: Case) -> tuple[list[torch.Tensor], torch.Tensor | None, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    lead = (BATCH,) if case.flat else None
    shapes = [(HEADS, DIM), (case.kv_heads, DIM), (case.kv_heads, case.value_dim), (HEADS, case.value_dim)]
    made = [
        torch.randn(*(lead or (BATCH, heads)), case.length, dim, generator=draw, dtype=torch.float64)
        for heads, dim in shapes
    ]
    *qkv, grad = (t.to(case.dtype) for t in made)
    return qkv, mask_of(case, draw), grad


def truth(case: Case, kind: torch.dtype | None = None) -> list[torch.Tensor]:
    (q, k, v), mask, grad = inputs(case)
    q, k, v = (t.to(kind or t.dtype).requires_grad_() for t in (q, k, v))
    wide = case.kv_heads != HEADS and not case.flat
    keys, values = (t.repeat_interleave(HEADS // case.kv_heads, 1) if wide else t for t in (k, v))
    out = F.scaled_dot_product_attention(q, keys, values, mask, is_causal=case.mask == "causal", scale=case.scale)
    out.backward(grad.to(out.dtype))
    return [out.detach(), q.grad, k.grad, v.grad]


def mine(tensor: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    return torch.cat([tensor[..., start:end, :] for start, end in layout.ranges[rank]], dim=-2)


def run(cp: int, kinds: list[str], cases: list[Case]) -> dict[str, float]:
    """This rank's largest error of output, dq, dk and dv, relative to the whole tensor, by kind and case."""
    with sw.open_mesh(sw.Plan.parse(f"cp{cp}")) as mesh:
        return {f"{kind}: {case}": worst(kind, case, mesh) for kind in kinds for case in cases}


def worst(kind: str, case: Case, mesh: sw.Mesh) -> float:
    rank, layout = mesh.index("cp"), divide(case.length, mesh.size("cp"), case.balance)
    found = local(kind, case, mesh, layout)
    return max(
        float((mine(whole.double(), layout, rank) - part.double()).norm() / whole.double().norm())
        for whole, part in zip(truth(case), found, strict=True)
    )


def local(kind: str, case: Case, mesh: sw.Mesh, layout: Layout) -> list[torch.Tensor]:
    qkv, mask, grad = inputs(case)
    rank = mesh.index("cp")
    q, k, v = (mine(t, layout, rank).requires_grad_() for t in qkv)
    divided = Divided(kind)
    divided.ranks = Ranks(mesh.group("cp"), rank, layout)
    gqa = case.kv_heads != HEADS and not case.flat
    call = Call(
        query=q, key=k, value=v, attn_mask=mask, is_causal=case.mask == "causal", scale=case.scale, enable_gqa=gqa
    )
    out = divided.attend(call)
    out.backward(mine(grad, layout, rank))
    return [out.detach(), q.grad, k.grad, v.grad]


@pytest.mark.parametrize("cp", [2, 4])
def test_outputs_and_gradients_are_those_of_one_process(world, cp: int) -> None:
    cases = CASES if cp == 2 else CASES[1::2]
    for rank in world(cp, run, cp, ["ring", "gather"], cases):
        wrong = {name: e for name, e in rank.items() if e > (2e-6 if "float32" in name else 1e-13)}
        assert not wrong


def test_heads_exchanged_for_the_sequence_give_the_same(world) -> None:
    cases = [case for case in CASES if not case.flat]
    for rank in world(2, run, 2, ["ulysses"], cases) + world(4, run, 4, ["ulysses"], cases[::3]):
        wrong = {name: e for name, e in rank.items() if e > (2e-6 if "float32" in name else 1e-13)}
        assert not wrong


def test_three_ranks(world) -> None:
    for rank in world(3, run, 3, ["ring", "gather"], [Case("causal", length=20), Case("documents", length=25)]):
        assert max(rank.values()) <= 1e-13


def run_half(kinds: list[str], mask: str) -> dict[str, tuple[float, float]]:
    """Errors against fp64 of: this rank's parts, and torch's own attention in bf16."""
    case = Case(mask, length=64, kv_heads=2, dtype=torch.bfloat16)
    with sw.open_mesh(sw.Plan.parse("cp2")) as mesh:
        rank, layout = mesh.index("cp"), divide(case.length, 2, case.balance)
        exact, plain = truth(case, torch.float64), truth(case)
        found = {}
        for kind in kinds:
            for name, part, whole, other in zip(
                ("out", "dq", "dk", "dv"), local(kind, case, mesh, layout), exact, plain, strict=True
            ):
                right, theirs = mine(whole, layout, rank), mine(other, layout, rank)
                scale = float(right.norm())
                found[f"{kind} {name}"] = (
                    float((part.double() - right).norm()) / scale,
                    float((theirs.double() - right).norm()) / scale,
                )
        return found


@pytest.mark.parametrize("mask", ["causal", "documents"])
def test_bf16_is_as_near_to_fp64_as_torch_is(world, mask: str) -> None:
    for rank in world(2, run_half, ["ring", "gather", "ulysses"], mask):
        for name, (error, torchs) in rank.items():
            assert error <= 1.5 * torchs + 1e-3, (name, error, torchs)


def sent(cp: int, kind: str, case: Case) -> tuple[int, int]:
    """Bytes that this rank sends to others, forward and backward."""
    counts = [0]
    send, gather, scatter, exchange = (
        dist.batch_isend_irecv,
        dist.all_gather,
        dist.reduce_scatter,
        dist.all_to_all_single,
    )

    def count(tensors: list[torch.Tensor]) -> None:
        counts[-1] += sum(t.numel() * t.element_size() for t in tensors)

    def sends(ops: list[dist.P2POp]) -> list[dist.Work]:
        count([op.tensor for op in ops if op.op is dist.isend])
        return send(ops)

    def gathers(out: list[torch.Tensor], mine: torch.Tensor, **options: dist.ProcessGroup) -> None:
        count([mine] * (cp - 1))
        gather(out, mine, **options)

    def scatters(mine: torch.Tensor, rows: list[torch.Tensor], **options: dist.ProcessGroup) -> None:
        count(rows[1:])
        scatter(mine, rows, **options)

    def exchanges(out: torch.Tensor, flat: torch.Tensor, *sizes: list[int], **options: dist.ProcessGroup) -> None:
        count([flat[sizes[1][0] :]])
        exchange(out, flat, *sizes, **options)

    dist.batch_isend_irecv, dist.all_gather = sends, gathers
    dist.reduce_scatter, dist.all_to_all_single = scatters, exchanges
    with sw.open_mesh(sw.Plan.parse(f"cp{cp}")) as mesh:
        counts[:] = [0]
        backward = torch.Tensor.backward

        def back(tensor: torch.Tensor, grad: torch.Tensor) -> None:
            counts.append(0)
            backward(tensor, grad)

        torch.Tensor.backward = back
        truth_backward = local(kind, case, mesh, divide(case.length, cp, case.balance))
        assert len(truth_backward) == 4
    return counts[0], counts[1]


@pytest.mark.parametrize(("dtype", "ratio"), [(torch.float64, 1), (torch.bfloat16, 2)])
def test_the_bytes_on_the_wire_are_those_of_the_page(world, dtype: torch.dtype, ratio: int) -> None:
    n, case = 4, Case("causal", length=16, kv_heads=4, dtype=dtype)
    q = BATCH * HEADS * (case.length // n) * DIM * dtype.itemsize
    m = 2 * q
    assert set(world(n, sent, n, "ring", case)) == {((n - 1) * m, (n - 1) * m + n * m * ratio)}
    assert set(world(n, sent, n, "gather", case)) == {((n - 1) * m, (n - 1) * m * (1 + ratio))}
    whole = (n - 1) * (2 * q + m) // n
    assert set(world(n, sent, n, "ulysses", case)) == {(whole, whole)}


def test_pieces_that_causality_hides_are_not_computed() -> None:
    counts = {}
    for balance in ("zigzag", "contiguous"):
        layout = divide(64, 4, balance)
        scores = []
        for rank in range(4):
            pieces = plan_pieces(Ranks(None, rank, layout), gathered=False, causal=True, mask=None, like=torch.zeros(0))
            scores.append(sum(area(piece, 16) for source in pieces for piece in source))
        counts[balance] = scores
    assert counts["zigzag"] == [64 * 64 // 2 // 4] * 4  # half of all scores, the same on every rank
    assert counts["contiguous"] == [128, 384, 640, 896]


def area(piece: Piece, tokens: int) -> int:
    rows, columns = (len(range(tokens)[part]) for part in (piece.queries, piece.keys))
    return rows * columns // (2 if piece.causal else 1)


def test_a_mask_that_hides_whole_pieces_saves_their_work() -> None:
    layout = divide(32, 4, "zigzag")
    mask = torch.ones(32, 32, dtype=torch.bool).tril()[None, None]
    for rank in range(4):
        pieces = plan_pieces(Ranks(None, rank, layout), gathered=False, causal=False, mask=mask, like=torch.zeros(0))
        calls = [piece for source in pieces for piece in source]
        assert len(calls) == 9 and sum(piece.mask is not None for piece in calls) == 2
