"""`flex_attention` while the sequence is divided: its masks and score functions are asked with places in the whole one.

    gather    keys and values of the whole sequence; query i of this rank asks as the token that it is of the sequence:
              `mask_mod(b, h, at[i], j)`, and the blocks are counted anew for these queries
    ulysses   some heads of the whole sequence: head h of this rank asks as the head that it is of all

The function that runs is torch's own, compiled if the caller compiled it. A ring would need torch's private backward of
a part, and gains nothing here: the blocks that a mask leaves decide what is computed. Masks and functions as in
Dong et al., FlexAttention, arXiv:2412.05496.

Imported only where somebody has imported `torch.nn.attention.flex_attention`: to run, it takes torch's compiler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from functools import partial
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, create_block_mask, create_mask

from shardwise.errors import ModelError
from shardwise.parallel.sequence.attention import computing_type
from shardwise.parallel.sequence.intercept import Call, Divided
from shardwise.parallel.sequence.ring import Ranks, gathered, scattered, to_heads, to_sequence
from shardwise.parallel.torch_private import (
    FlexCarrier,
    copy_of_flex_attention,
    flex_as_torch_defines_it,
    flex_carried_by,
)

Mod = Callable[..., torch.Tensor]
"""`mask_mod(b, h, q, kv)` or `score_mod(score, b, h, q, kv)` of the user."""
Started = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
Function = TypeVar("Function", bound=Callable[..., Any])
_torchs = copy_of_flex_attention()


def _untraced(function: Function) -> Function:
    """Torch's compiler leaves it as it is, and compiles what comes after it."""
    return cast(Function, torch.compiler.disable(function))  # type: ignore[no-untyped-call]  # torch has no types here


@dataclass(frozen=True, kw_only=True)
class FlexCall:
    """The arguments of one call of `flex_attention`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    score_mod: Mod | None = None
    block_mask: BlockMask | None = None
    scale: float | None = None
    enable_gqa: bool = False
    return_lse: bool = False
    kernel_options: Any = None
    return_aux: AuxRequest | None = None

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlexCall:
        """As torch binds them."""
        return cls(**dict(zip((field.name for field in fields(cls)), args, strict=False)), **kwargs)

    def started(self) -> Started:
        """Torch's function with these arguments; on the CPU, where it takes no gradient, what it is made of."""
        tensors = (self.query, self.key, self.value)
        options = {field.name: getattr(self, field.name) for field in fields(self)[3:]}
        if self.query.device.type == "cpu" and any(t.requires_grad for t in tensors):
            return _with_gradients, tensors, options
        return _torchs, tensors, options


def carried(divided: Divided) -> AbstractContextManager[None]:
    """While it is on, `flex_attention` works on the whole of the running forward's sequence."""
    return flex_carried_by(_Divided(divided))


def shaped() -> AbstractContextManager[None]:
    """While it is on, `flex_attention` has the shape of its result and looks at nothing."""
    return flex_carried_by(_Shapes())


@_untraced
def _with_gradients(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> Any:
    call = FlexCall(query=query, key=key, value=value, **options)
    everything = create_block_mask(_everything, None, None, query.shape[2], key.shape[2], device=str(query.device))
    score_mod, block_mask = call.score_mod or _score, call.block_mask or everything
    scale = call.scale if call.scale is not None else 1 / math.sqrt(query.shape[-1])
    out, lse = flex_as_torch_defines_it(query, key, value, score_mod, block_mask, scale)
    if call.return_aux is not None:
        return out, AuxOutput(lse=lse if call.return_aux.lse else None, max_scores=None)
    return (out, lse) if call.return_lse else out


def _score(score: torch.Tensor, b: Any, h: Any, q: Any, kv: Any) -> torch.Tensor:
    return score


def _everything(b: Any, h: Any, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    return q >= 0


class _Shapes(FlexCarrier):
    @_untraced
    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Started:
        return _empty_result, args, kwargs

    @_untraced
    def end(self, out: Any) -> Any:
        return out


def _empty_result(*args: Any, **kwargs: Any) -> Any:
    call = FlexCall.of(args, kwargs)
    out = call.query.new_empty((*call.query.shape[:-1], call.value.shape[-1]))
    if call.return_aux is None:
        return (out, out[..., 0]) if call.return_lse else out
    return out, AuxOutput(lse=out[..., 0] if call.return_aux.lse else None, max_scores=None)


class _Divided(FlexCarrier):
    def __init__(self, divided: Divided) -> None:
        self.divided = divided

    @_untraced
    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Started:
        """Torch's function on the whole sequence.

        Raises:
            ModelError: `context=ring`, or a mask, a function or tensors that are of a part of the sequence.
        """
        call, divided = FlexCall.of(args, kwargs), self.divided
        ranks = divided.ranks
        assert ranks is not None
        divided.calls += 1
        plain = Call(query=call.query, key=call.key, value=call.value, enable_gqa=call.enable_gqa)
        divided.check(plain, ranks)
        _check(call, divided, ranks)
        q, k, v = divided.autocast(plain)
        call = replace(call, query=q, key=k, value=v)
        return (_of_heads if divided.kind == "ulysses" else _of_rows)(call, divided, ranks).started()

    @_untraced
    def end(self, out: Any) -> Any:
        """This rank's tokens, all heads."""
        if self.divided.kind != "ulysses":
            return out
        assert self.divided.ranks is not None
        back = partial(_back, ranks=self.divided.ranks)
        if not isinstance(out, tuple):
            return back(out)
        return back(out[0]), AuxOutput(*map(back, out[1])) if isinstance(out[1], AuxOutput) else back(out[1])


def _back(tensor: torch.Tensor | None, ranks: Ranks) -> torch.Tensor | None:
    if tensor is None:
        return None
    if tensor.dim() == 3:  # lse and the largest scores: one number per query
        return to_sequence(tensor.unsqueeze(-1), ranks).squeeze(-1)
    return to_sequence(tensor, ranks)


# ---------------------------------------------------------------- gather


def _of_rows(call: FlexCall, divided: Divided, ranks: Ranks) -> FlexCall:
    """These queries among the keys of all ranks."""
    key, value = _Gathered.apply(call.key, call.value, ranks)  # type: ignore[no-untyped-call]  # torch has no types here
    at = own_places(ranks, call.query.device)
    block_mask = call.block_mask
    if block_mask is not None:
        known = divided.flex_masks.get(block_mask)
        if known is None or known[0] != ranks.layout:
            known = (ranks.layout, _mask_of_rows(block_mask, at, divided, ranks))
            divided.flex_masks[block_mask] = known
        block_mask = known[1]
    score_mod = call.score_mod and _score_at(call.score_mod, at)
    return replace(call, key=key, value=value, block_mask=block_mask, score_mod=score_mod)


def own_places(ranks: Ranks, device: torch.device) -> torch.Tensor:
    """Where in the whole sequence this rank's tokens are: int32, as torch numbers them in masks."""
    return torch.cat([torch.arange(start, end, dtype=torch.int32, device=device) for start, end in ranks.own])


def _mask_of_rows(mask: BlockMask, at: torch.Tensor, divided: Divided, ranks: Ranks) -> BlockMask:
    """The same mask for the queries at these places.

    Cost: its function for each (query, key) here, twice, as many bytes, and a look at one of them: for each new mask.
    """
    mod, (batch, heads, *_), length = mask.mask_mod, mask.shape, ranks.layout.length
    partly, wholly = _seen_blocks(mask)
    rows, columns = mask.BLOCK_SIZE

    def differs(b: Any, h: Any, q: Any, kv: Any) -> torch.Tensor:
        block = (b, h, at[q] // rows, kv // columns)
        seen = mod(b, h, at[q], kv)
        return seen != ((seen & partly[block]) | wholly[block])

    device = str(at.device)
    if create_mask(differs, batch, heads, len(at), length, device=device).any():
        raise divided.refusal(
            "a block mask whose blocks hide what its mask_mod shows, or show what it hides",
            "one of torch's create_block_mask: the blocks of this rank's tokens are made from mask_mod",
        )
    whole = {} if mask.full_kv_num_blocks is not None else {"separate_full_blocks": False}
    moved = _mask_at(mod, at)
    return create_block_mask(
        moved, batch, heads, len(at), length, device=device, BLOCK_SIZE=mask.BLOCK_SIZE, **cast(Any, whole)
    )


def _seen_blocks(mask: BlockMask) -> tuple[torch.Tensor, torch.Tensor]:
    """Which blocks `mask_mod` is asked for, and which are seen whole: bool (batch, heads, blocks, blocks) each."""
    every = mask.to_dense().bool()
    if mask.full_kv_num_blocks is None:
        return every, torch.zeros_like(every)
    assert mask.full_kv_indices is not None
    whole = BlockMask.from_kv_blocks(
        mask.full_kv_num_blocks,
        mask.full_kv_indices,
        BLOCK_SIZE=mask.BLOCK_SIZE,
        seq_lengths=mask.seq_lengths,
        compute_q_blocks=False,
    )
    wholly = whole.to_dense().bool()
    return every & ~wholly, wholly


def _mask_at(mod: Mod, at: torch.Tensor) -> Mod:
    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> torch.Tensor:
        return mod(b, h, at[q], kv)

    return mask_mod


def _score_at(mod: Mod, at: torch.Tensor) -> Mod:
    def score_mod(score: torch.Tensor, b: Any, h: Any, q: Any, kv: Any) -> torch.Tensor:
        return mod(score, b, h, at[q], kv)

    return score_mod


class _Gathered(torch.autograd.Function):
    """(batch, heads, local tokens, dim) -> (batch, heads, length, dim), of keys and values at once."""

    @staticmethod
    def forward(ctx: Any, k: torch.Tensor, v: torch.Tensor, ranks: Ranks) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.ranks = ranks
        ((_, keys, values),) = gathered(k.contiguous(), v.contiguous(), ranks)
        return keys, values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        dk, dv = (grad.to(computing_type(grad)) for grad in grads)
        dk, dv = scattered(dk, dv, ctx.ranks)
        return dk.to(grads[0].dtype), dv.to(grads[1].dtype), None


# ---------------------------------------------------------------- ulysses


def _of_heads(call: FlexCall, divided: Divided, ranks: Ranks) -> FlexCall:
    """All queries and keys of some heads."""
    q, k, v = to_heads(call.query, call.key, call.value, ranks)
    first, mask = ranks.rank * q.shape[1], call.block_mask
    if mask is not None:
        own = slice(first, first + q.shape[1]) if mask.shape[1] > 1 else slice(None)
        mod, mask = mask.mask_mod, mask[:, own]
        mask.mask_mod = _mask_from_head(mod, first)
    score_mod = call.score_mod and _score_from_head(call.score_mod, first)
    few = q.shape[1] != k.shape[1]
    return replace(call, query=q, key=k, value=v, block_mask=mask, score_mod=score_mod, enable_gqa=few)


def _mask_from_head(mod: Mod, first: int) -> Mod:
    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> torch.Tensor:
        return mod(b, h + first, q, kv)

    return mask_mod


def _score_from_head(mod: Mod, first: int) -> Mod:
    def score_mod(score: torch.Tensor, b: Any, h: Any, q: Any, kv: Any) -> torch.Tensor:
        return mod(score, b, h + first, q, kv)

    return score_mod


# ---------------------------------------------------------------- what is refused

_WHOLE = (
    "make it from inputs that stay whole (document_ids, segment_ids, attention_mask), whose length is that of the "
    "sequence, or before the model, and give it as an input"
)


def _check(call: FlexCall, divided: Divided, ranks: Ranks) -> None:
    if divided.kind == "ring":
        raise ModelError(
            f"context parallelism: {divided.block}: found flex_attention under context=ring, needed context=gather "
            "(keys and values are gathered for each layer) or context=ulysses (heads are divided): set one in the plan",
            row="module.flex-ring",
        )
    own, length = ranks.layout.sizes[ranks.rank], ranks.layout.length
    mask = call.block_mask
    if mask is not None and tuple(mask.shape[-2:]) != (length, length):
        queries, keys = mask.shape[-2:]
        local = f", made for the {own} tokens of this rank" if own in (queries, keys) else ""
        raise divided.refusal(
            f"a block mask of {queries} x {keys} tokens{local}",
            f"one of the whole sequence, {length} x {length}, whose mask_mod takes places in it; {_WHOLE}",
        )
    for name, mod in (("mask_mod", mask and mask.mask_mod), ("score_mod", call.score_mod)):
        for held, tensor in _held_by(mod):
            if tensor.dim() > 1 and tuple(tensor.shape[:2]) == (divided.rows, own):
                raise divided.refusal(
                    f"a {name} that reads {held} {tuple(tensor.shape)}, of the {own} tokens of this rank",
                    f"values of the whole sequence, {length} tokens: {name} is asked with places in it; {_WHOLE}",
                )


def _held_by(mod: Any, seen: tuple[Any, ...] = ()) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that a function reads from where it was made, by name, also through functions that it calls."""
    if isinstance(mod, partial):
        held: dict[str, Any] = {**mod.keywords, **{str(i): value for i, value in enumerate(mod.args)}, "": mod.func}
    elif isinstance(mod, FunctionType) and mod not in seen:
        cells = (cell.cell_contents for cell in mod.__closure__ or ())
        held = dict(zip(mod.__code__.co_freevars, cells, strict=True))
    else:
        return
    for name, value in held.items():
        if isinstance(value, torch.Tensor):
            yield name, value
        else:
            yield from _held_by(value, (*seen, mod))
