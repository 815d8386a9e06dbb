"""Attention over a sequence that is divided over ranks: `ring`, `gather` and `ulysses`, exact in each direction.

    ring      keys and values go around; each rank merges what its queries found with every other rank's
              (Liu et al., Ring Attention, arXiv:2310.01889)
    gather    keys and values are gathered whole, their gradients scattered back
              (Dubey et al., Llama 3, arXiv:2407.21783, section 3.3.2)
    ulysses   sequence is exchanged for heads: each rank has some heads of the whole sequence
              (Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509)

Shapes: queries (batch, heads, local tokens, head_dim), keys and values (batch, kv_heads, local tokens, head_dim), in
the order of the rank's ranges in the layout. Every rank of the group makes the same calls in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from shardwise.parallel.sequence.attention import Merged, Piece, Result, attend, attend_backward, computing_type
from shardwise.plan.ranks.sequence import Layout, Range

Pieces = tuple[tuple[Piece, ...], ...]
"""The kernel calls of this rank's queries, by source of the keys: a rank (ring), or the whole sequence (gather)."""


@dataclass(frozen=True)
class Ranks:
    """The ranks that one sequence is divided over, and how."""

    group: dist.ProcessGroup
    rank: int
    layout: Layout

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.layout.ranges)

    @property
    def own(self) -> tuple[Range, ...]:
        """This rank's ranges of the sequence."""
        return self.layout.ranges[self.rank]


# ---------------------------------------------------------------- which queries see which keys


def plan_pieces(ranks: Ranks, *, gathered: bool, causal: bool, mask: torch.Tensor | None, like: torch.Tensor) -> Pieces:
    """The kernel calls of one attention; those of which the mask leaves nothing are not there.

    Args:
        ranks: who holds what.
        gathered: one source, the whole sequence in its order; else one source per rank.
        causal: each token sees itself and what is before it in the sequence.
        mask: bool (True: seen) or added to the scores, broadcasting to (batch, heads, length, length), of the whole
            sequence; not together with `causal`.
        like: the queries, for type and device of masks.

    Cost: with a mask, a copy of this rank's rows of it, and one look at their values.
    """
    sources: Sequence[tuple[Range, ...]] = (((0, ranks.layout.length),),) if gathered else ranks.layout.ranges
    if mask is not None:
        return tuple(tuple(_masked(ranks.own, keys, mask, like)) for keys in sources)
    if causal:
        return tuple(tuple(_causal(ranks.own, keys)) for keys in sources)
    everything = Piece(queries=slice(None), keys=slice(None))
    return tuple((everything,) for _ in sources)


def _local(ranges: tuple[Range, ...]) -> Iterator[tuple[Range, slice]]:
    """Each range with its place among the tokens of its holder."""
    done = 0
    for start, end in ranges:
        yield (start, end), slice(done, done + end - start)
        done += end - start


def _causal(queries: tuple[Range, ...], keys: tuple[Range, ...]) -> Iterator[Piece]:
    """Ranges of two holders are the same or do not overlap, or the keys are the whole sequence."""
    if queries == keys:  # in order, so that each token's place says what is before it
        yield Piece(queries=slice(None), keys=slice(None), causal=True)
        return
    grouped: dict[int, slice] = {}
    for (start, end), rows in _local(queries):
        before = sum(min(last, start) - first for first, last in keys if first < start)
        if before:  # neighbours that see the same keys share a call
            known = grouped.get(before)
            grouped[before] = rows if known is None else slice(known.start, rows.stop)
        for (first, last), place in _local(keys):
            if first <= start < last:
                yield Piece(
                    queries=rows, keys=slice(place.start + start - first, place.start + end - first), causal=True
                )
    for before, rows in grouped.items():
        yield Piece(queries=rows, keys=slice(0, before))


def _masked(
    queries: tuple[Range, ...], keys: tuple[Range, ...], mask: torch.Tensor, like: torch.Tensor
) -> Iterator[Piece]:
    for (start, end), rows in _local(queries):
        for (first, last), columns in _local(keys):
            block = mask[..., start:end, :] if mask.shape[-2] > 1 else mask
            block = block[..., first:last] if mask.shape[-1] > 1 else block
            if block.dtype == torch.bool:
                if not block.any():
                    continue
                if block.all():
                    yield Piece(queries=rows, keys=columns)
                    continue
                hidden = ~block
                block = torch.zeros_like(block, dtype=like.dtype).masked_fill_(hidden, -math.inf)
            elif block.isneginf().all():
                continue
            shape = (*block.shape[:-2], end - start, last - first)
            yield Piece(queries=rows, keys=columns, mask=block.to(like.dtype).expand(shape).contiguous())


# ---------------------------------------------------------------- ring and gather


@dataclass(frozen=True)
class Exchange:
    """How one attention is carried out: by a ring with one source per rank in `pieces`, gathered with one source."""

    ranks: Ranks
    pieces: Pieces
    scale: float

    @property
    def is_ring(self) -> bool:
        """Keys and values go around."""
        return len(self.pieces) == self.ranks.size


def exchanged_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: Exchange) -> torch.Tensor:
    """This rank's queries over all keys, by `ring` or `gather`.

    Cost on the wire per rank, with n ranks and M bytes of local keys and values: (n - 1) M forward. Backward: (n - 1) M
    and their gradients, n M for the ring and (n - 1) M gathered (twice that in half types: sums are fp32).
    Kept for backward: local tensors only.
    """
    out: torch.Tensor = _Exchanged.apply(q, k, v, how)  # type: ignore[no-untyped-call]  # torch has no types here
    return out


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: Exchange) -> torch.Tensor:
        merged = Merged(q, v.shape[-1])
        source = _ring if how.is_ring else gathered
        for index, keys, values in source(k.contiguous(), v.contiguous(), how.ranks):
            for piece in how.pieces[index]:
                part = (q[:, :, piece.queries], keys[:, :, piece.keys], values[:, :, piece.keys])
                merged.add(piece.queries, *attend(*part, piece, how.scale))
        out = merged.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, merged.lse)
        ctx.how = how
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        how: Exchange = ctx.how
        home = _Homeward(how.ranks) if how.is_ring else None
        dq, dk, dv = _gradients((q, k, v), how, Result(grad=grads[0], out=out, lse=lse), home)
        dk, dv = home.arrive(k, v) if home is not None else scattered(dk, dv, how.ranks)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def _gradients(
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor], how: Exchange, result: Result, home: _Homeward | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of this rank's queries, and its part of those of the last keys and values; others are handed `home`."""
    q, k, v = given
    dq = torch.zeros_like(q, dtype=computing_type(q))
    dk = dv = torch.empty(0)
    for index, keys, values in (_ring if how.is_ring else gathered)(k.contiguous(), v.contiguous(), how.ranks):
        dk = torch.zeros_like(keys, dtype=dq.dtype)
        dv = torch.zeros_like(values, dtype=dq.dtype)
        for piece in how.pieces[index]:
            rows, columns = piece.queries, piece.keys
            part = (q[:, :, rows], keys[:, :, columns], values[:, :, columns])
            _add((dq, dk, dv), (rows, columns, columns), attend_backward(*part, piece, how.scale, result.at(rows)))
        if home is not None:
            home.hand_on(dk, dv, index)
    return dq, dk, dv


def _add(totals: Sequence[torch.Tensor], places: Sequence[slice], grads: Sequence[torch.Tensor]) -> None:
    for total, place, grad in zip(totals, places, grads, strict=True):
        total[:, :, place] += grad


def _ring(k: torch.Tensor, v: torch.Tensor, ranks: Ranks) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Own keys and values, then those of the rank before, and so on; the next ones travel while these are used."""
    for step in range(ranks.size):
        index = (ranks.rank - step) % ranks.size
        if step == ranks.size - 1:
            yield index, k, v
            return
        coming = [_empty(t, ranks, (index - 1) % ranks.size) for t in (k, v)]
        works = _shift([k, v], coming, ranks)
        yield index, k, v
        _finish(works)
        k, v = coming


class _Homeward:
    """Gradients of keys and values follow them around the ring, each rank adds its part, and come home at the end."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.works: list[dist.Work] = []
        self.coming: list[torch.Tensor] = []
        self.going: list[torch.Tensor] = []

    def hand_on(self, dk: torch.Tensor, dv: torch.Tensor, index: int) -> None:
        """This rank's part of the gradients of rank `index`, which the rank before has sent with its own part."""
        self._receive()
        if self.coming:
            dk += self.coming[0]
            dv += self.coming[1]
        self.going = [dk, dv]  # kept until they have gone
        self.coming = [_empty(t, self.ranks, (index - 1) % self.ranks.size) for t in (dk, dv)]
        self.works = _shift(self.going, self.coming, self.ranks)

    def arrive(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole gradients of this rank's own keys and values."""
        self._receive()
        dk, dv = self.coming
        return dk.view_as(k), dv.view_as(v)

    def _receive(self) -> None:
        _finish(self.works)


def _empty(tensor: torch.Tensor, ranks: Ranks, holder: int) -> torch.Tensor:
    """Room for the same tensor of another rank, which may hold one token more or less per range."""
    return tensor.new_empty((*tensor.shape[:2], ranks.layout.sizes[holder], tensor.shape[3]))


def _shift(going: list[torch.Tensor], coming: list[torch.Tensor], ranks: Ranks) -> list[dist.Work]:
    after, before = (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size
    sends = [dist.P2POp(dist.isend, t, group=ranks.group, group_peer=after) for t in going]
    receives = [dist.P2POp(dist.irecv, t, group=ranks.group, group_peer=before) for t in coming]
    works: list[dist.Work] = dist.batch_isend_irecv(sends + receives)
    return works


def _finish(works: list[dist.Work]) -> None:
    """Wait for all, and let go of them: they hold the tensors that were sent."""
    while works:
        works.pop().wait()


def gathered(k: torch.Tensor, v: torch.Tensor, ranks: Ranks) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Keys and values of the whole sequence, as the ring's source gives those of one rank after the other."""
    yield 0, *_whole(k, v, ranks)


def _whole(k: torch.Tensor, v: torch.Tensor, ranks: Ranks) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in the order of the sequence, by one all-gather, padded to the longest rank's."""
    most = max(ranks.layout.sizes)
    mine = torch.cat([_padded(t, most).reshape(-1) for t in (k, v)])
    everything = [torch.empty_like(mine) for _ in range(ranks.size)]
    dist.all_gather(everything, mine, group=ranks.group)
    sizes = [math.prod(t.shape[:2]) * most * t.shape[3] for t in (k, v)]
    parts = [torch.split(each, sizes) for each in everything]
    keys, values = (
        torch.cat([parts[rank][i].view(*t.shape[:2], most, -1)[:, :, a:b] for rank, a, b in ranks.layout.order], dim=2)
        for i, t in enumerate((k, v))
    )
    return keys, values


def scattered(dk: torch.Tensor, dv: torch.Tensor, ranks: Ranks) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum over ranks of the whole gradients, each rank its own tokens, by one reduce-scatter."""
    most, own = max(ranks.layout.sizes), ranks.layout.sizes[ranks.rank]
    rows = [
        torch.cat([_padded(_of(t, ranks.layout.ranges[rank]), most).reshape(-1) for t in (dk, dv)])
        for rank in range(ranks.size)
    ]
    mine = torch.empty_like(rows[0])
    dist.reduce_scatter(mine, rows, group=ranks.group)
    parts = torch.split(mine, [math.prod(t.shape[:2]) * most * t.shape[3] for t in (dk, dv)])
    dk, dv = (part.view(*t.shape[:2], most, -1)[:, :, :own] for part, t in zip(parts, (dk, dv), strict=True))
    return dk, dv


def _padded(tensor: torch.Tensor, length: int) -> torch.Tensor:
    return F.pad(tensor, (0, 0, 0, length - tensor.shape[2]))


def _of(tensor: torch.Tensor, ranges: tuple[Range, ...]) -> torch.Tensor:
    return torch.cat([tensor[:, :, start:end] for start, end in ranges], dim=2)


# ---------------------------------------------------------------- ulysses


def ulysses_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ranks: Ranks, mask: torch.Tensor | None, **options: Any
) -> torch.Tensor:
    """This rank's queries over all keys, by exchange of sequence for heads; `options` are those of torch's function.

    The number of ranks divides the query heads. Key and value heads that it does not divide are repeated first.
    `mask` is of the whole sequence.

    Cost on the wire per rank, with n ranks: (n - 1) / n of the local queries, keys, values and outputs, forward and
    backward alike. Kept for backward: the whole sequence for 1/n of the heads.
    """
    q, k, v = to_heads(q, k, v, ranks)
    if mask is not None and mask.dim() > 2 and mask.shape[-3] > 1:
        mask = mask[..., ranks.rank * q.shape[1] : (ranks.rank + 1) * q.shape[1], :, :]
    out = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=q.shape[1] != k.shape[1], **options)
    return to_sequence(out, ranks)


def to_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ranks: Ranks
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The whole sequence for this rank's part of the heads; too few key and value heads are repeated first."""
    n, heads = ranks.size, q.shape[1]
    if k.shape[1] % n:
        repeats = n // k.shape[1] if n % k.shape[1] == 0 else heads // k.shape[1]
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    return _to_heads(q, ranks), _to_heads(k, ranks), _to_heads(v, ranks)


def to_sequence(out: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """The way back: all heads for this rank's tokens."""
    whole: torch.Tensor = _ToSequence.apply(out, ranks)  # type: ignore[no-untyped-call]  # torch has no types here
    return whole


def _to_heads(tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    out: torch.Tensor = _ToHeads.apply(tensor, ranks)  # type: ignore[no-untyped-call]  # torch has no types here
    return out


class _ToHeads(torch.autograd.Function):
    """(batch, heads, local tokens, dim) -> (batch, heads / n, length, dim), tokens in the order of the sequence."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        ctx.ranks = ranks
        return _sequence_to_heads(tensor, ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _heads_to_sequence(grads[0], ctx.ranks), None


class _ToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        ctx.ranks = ranks
        return _heads_to_sequence(tensor, ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _sequence_to_heads(grads[0], ctx.ranks), None


def _sequence_to_heads(tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    batch, heads, _, dim = tensor.shape
    shapes = [(batch, heads // ranks.size, tokens, dim) for tokens in ranks.layout.sizes]
    parts = _all_to_all(list(tensor.chunk(ranks.size, dim=1)), shapes, ranks)
    return torch.cat([parts[rank][:, :, first:end] for rank, first, end in ranks.layout.order], dim=2)


def _heads_to_sequence(tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    batch, heads, _, dim = tensor.shape
    shape = (batch, heads, ranks.layout.sizes[ranks.rank], dim)
    parts = _all_to_all([_of(tensor, ranges) for ranges in ranks.layout.ranges], [shape] * ranks.size, ranks)
    return torch.cat(parts, dim=1)


def _all_to_all(going: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]], ranks: Ranks) -> list[torch.Tensor]:
    """One tensor to each rank, one of the given shape from each."""
    sizes = [math.prod(shape) for shape in shapes]
    out = going[0].new_empty(sum(sizes))
    flat = torch.cat([t.reshape(-1) for t in going])
    dist.all_to_all_single(out, flat, sizes, [t.numel() for t in going], group=ranks.group)
    return [part.view(shape) for part, shape in zip(torch.split(out, sizes), shapes, strict=True)]
