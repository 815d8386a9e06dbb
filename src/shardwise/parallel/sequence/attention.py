"""Attention of some queries to some keys, with the log of the sum of exponentials, so that parts can be put together.

For query i and keys j, with scores `s_ij = scale q_i k_j + mask_ij`:

    lse_i = log sum_j exp(s_ij)         out_i = sum_j exp(s_ij - lse_i) v_j

Two disjoint sets of keys a, b merge to `lse = log(exp(lse_a) + exp(lse_b))`, `out = exp(lse_a - lse) out_a + ...`.
Backward of a part needs the merged `out` and `lse` only: `P = exp(s - lse)`, `dV = P' dO`, `dS = P (dO V' - rowsum(dO
out))`, `dQ = scale dS K`, `dK = scale dS' Q`. Formulas: FlashAttention-2 (Dao 2023, arXiv:2307.08691, section 3.1).

Shapes: queries (batch, heads, queries, head_dim); keys and values (batch, kv_heads, keys, head_dim), kv_heads a
divisor of heads. A query that sees no key has `lse = -inf` and `out = 0`, as in torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from shardwise.parallel.torch_private import fused_attention, fused_attention_backward

ROWS = 512
"""Queries whose scores are held at once where no fused kernel serves."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One kernel call: these queries see these keys, all of them, up to their own place, or as the mask says."""

    queries: slice
    keys: slice
    causal: bool = False
    """Queries and keys are the same tokens, and each sees those up to itself."""
    mask: torch.Tensor | None = None
    """Added to the scores: (batch or 1, heads or 1, queries, keys), in the queries' type; -inf hides a key."""


def computing_type(tensor: torch.Tensor) -> torch.dtype:
    """The type of sums over keys: fp32 for half types, else the tensor's own."""
    return torch.float32 if tensor.element_size() < 4 else tensor.dtype


class Merged:
    """Output and lse of the keys met so far."""

    def __init__(self, queries: torch.Tensor, value_dim: int) -> None:
        kind = computing_type(queries)
        self.out = queries.new_zeros((*queries.shape[:-1], value_dim), dtype=kind)
        self.lse = queries.new_full(queries.shape[:-1], -math.inf, dtype=kind)

    def add(self, queries: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Add what these queries found among keys that were not met before."""
        old = self.lse[:, :, queries]
        new = torch.logaddexp(old, lse)
        base = torch.where(new.isneginf(), 0.0, new)  # -inf minus -inf is no number
        kept, added = (old - base).exp().unsqueeze(-1), (lse - base).exp().unsqueeze(-1)
        self.out[:, :, queries] = self.out[:, :, queries] * kept + out.to(self.out.dtype) * added
        self.lse[:, :, queries] = new


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, piece: Piece, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (batch, heads, queries, value_dim) and lse (batch, heads, queries) of one piece; `q`, `k`, `v` its own.

    Cost: torch's fused kernel on the CPU; the fused CUDA kernel for half types without a mask; else matrix products
    with `ROWS x keys` scores at a time.
    """
    fused = fused_attention(q, k, v, piece.mask, causal=piece.causal, scale=scale)
    if fused is not None:
        out, lse = fused
        if piece.mask is not None:  # the kernel gives 0 where nothing is seen
            lse = torch.where(_blind(piece.mask), -math.inf, lse)
        return out, lse
    outs, lses = [], []
    values = _per_head(v, q).to(computing_type(q))
    for rows in _rows(q):
        scores = _scores(q, k, piece, scale, rows)
        lse = torch.logsumexp(scores, dim=-1)
        base = torch.where(lse.isneginf(), 0.0, lse).unsqueeze(-1)
        outs.append((scores - base).exp() @ values)
        lses.append(lse)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What the backward pass knows of some queries: the whole attention's gradient, output and lse."""

    grad: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor

    def at(self, queries: slice) -> Result:
        """The same of fewer queries."""
        return Result(grad=self.grad[:, :, queries], out=self.out[:, :, queries], lse=self.lse[:, :, queries])


def attend_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, piece: Piece, scale: float, result: Result
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This piece's part of the gradients of queries, keys and values, in the type of the kernel that gives them."""
    kind = computing_type(q)
    # a query that saw nothing at all: exp(s - inf) is 0
    lse = torch.where(result.lse.isneginf(), math.inf, result.lse)
    fused = fused_attention_backward(
        (q, k, v), (result.grad, result.out, lse), piece.mask, causal=piece.causal, scale=scale
    )
    if fused is not None:
        return fused
    keys, values, grad = _per_head(k, q).to(kind), _per_head(v, q).to(kind), result.grad.to(kind)
    delta = (grad * result.out.to(kind)).sum(dim=-1, keepdim=True)
    dk, dv, dqs = torch.zeros_like(keys), torch.zeros_like(values), []
    for rows in _rows(q):
        p = (_scores(q, k, piece, scale, rows) - lse[:, :, rows].unsqueeze(-1)).exp()
        dv += p.transpose(-1, -2) @ grad[:, :, rows]
        ds = p * (grad[:, :, rows] @ values.transpose(-1, -2) - delta[:, :, rows]) * scale
        dqs.append(ds @ keys)
        dk += ds.transpose(-1, -2) @ q[:, :, rows].to(kind)
    return torch.cat(dqs, dim=2), _per_kv_head(dk, k), _per_kv_head(dv, v)


def _rows(q: torch.Tensor) -> Iterator[slice]:
    return (slice(start, start + ROWS) for start in range(0, q.shape[2], ROWS))


def _scores(q: torch.Tensor, k: torch.Tensor, piece: Piece, scale: float, rows: slice) -> torch.Tensor:
    kind = computing_type(q)
    scores = q[:, :, rows].to(kind) @ _per_head(k, q).to(kind).transpose(-1, -2) * scale
    if piece.mask is not None:
        scores = scores + piece.mask[:, :, rows].to(kind)
    if piece.causal:
        later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)[rows]
        scores = scores.masked_fill(later, -math.inf)
    return scores


def _blind(mask: torch.Tensor) -> torch.Tensor:
    return mask.isneginf().all(dim=-1)


def _per_head(tensor: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    repeats = q.shape[1] // tensor.shape[1]
    return tensor.repeat_interleave(repeats, dim=1) if repeats > 1 else tensor


def _per_kv_head(grad: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    repeats = grad.shape[1] // tensor.shape[1]
    return torch.unflatten(grad, 1, (tensor.shape[1], repeats)).sum(dim=2) if repeats > 1 else grad
