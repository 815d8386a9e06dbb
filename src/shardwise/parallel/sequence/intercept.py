"""What a forward calls while its sequence is divided: attention goes over the ranks, what else mixes tokens is refused.

`torch.nn.functional.scaled_dot_product_attention` is seen by a function mode, so the model's code stays as it is and
nothing is patched. `flex_attention` asks no mode: its code is exchanged while one is on (`flex.py`). Whatever works on
each token alone passes through.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.errors import ModelError
from shardwise.parallel.sequence.mixing import MIXING, SOFTMAX, SUMS, mixed
from shardwise.parallel.sequence.ring import (
    Exchange,
    Pieces,
    Ranks,
    exchanged_attention,
    plan_pieces,
    ulysses_attention,
)
from shardwise.parallel.torch_private import flex_is_imported
from shardwise.plan.plan import ContextKind
from shardwise.plan.ranks.sequence import Layout


@dataclass(frozen=True, kw_only=True)
class Call:
    """The arguments of one call of `scaled_dot_product_attention`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """As torch binds them."""
        return cls(**dict(zip(cls.__dataclass_fields__, args, strict=False)), **kwargs)


class Divided:
    """The running forward: who holds which tokens, in which block it is, and how attention is carried out."""

    def __init__(self, kind: ContextKind) -> None:
        self.kind = kind
        self.ranks: Ranks | None = None
        """Set by each forward, and kept for what its backward computes again; None: the sequence is whole."""
        self.rows = 0
        self.block = "the model"
        self.calls = 0
        """Attention calls so far."""
        self.watching = False
        """A mode is on."""
        self.saw_flex = False
        """`flex_attention` was called where it sees the local tokens only."""
        self.flex_masks: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        """A block mask of the whole sequence -> (layout, that of this rank's tokens): all layers share it."""
        self._pieces: dict[tuple[Layout, bool], Pieces] = {}
        self._masked = WeakIdKeyDictionary()

    def attend(self, call: Call) -> torch.Tensor:
        """The rows of this rank's queries of one attention over the whole sequence.

        Raises:
            ModelError: not self-attention over the divided sequence, dropout, or a mask that does not fit.
        """
        ranks = self.ranks
        assert ranks is not None
        self.calls += 1
        self.check(call, ranks)
        q, k, v = self.autocast(call)
        flat = q.dim() == 3
        mask = call.attn_mask
        if flat:  # (batch, tokens, dim): one head
            q, k, v = (t.unsqueeze(1) for t in (q, k, v))
            mask = mask.unsqueeze(1) if mask is not None and mask.dim() == 3 else mask
        if mask is not None:
            mask = mask[(None,) * (4 - mask.dim())]
        scale = call.scale if call.scale is not None else q.shape[-1] ** -0.5
        if self.kind == "ulysses":
            out = ulysses_attention(q, k, v, ranks, mask, is_causal=call.is_causal, scale=scale)
        else:
            pieces = self._plan(ranks, call, mask, q)
            out = exchanged_attention(q, k, v, Exchange(ranks, pieces, scale))
        return out.squeeze(1) if flat else out

    def autocast(self, call: Call) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values in the type that torch's function would take them in."""
        tensors, device = (call.query, call.key, call.value), call.query.device.type
        if torch.is_autocast_enabled(device) and call.query.dtype != torch.float64:
            return tuple(t.to(torch.get_autocast_dtype(device)) for t in tensors)
        return tensors

    def _plan(self, ranks: Ranks, call: Call, mask: torch.Tensor | None, q: torch.Tensor) -> Pieces:
        """Kernel calls, made once per layout, and once per mask while the mask lives: all layers share it."""
        plan = partial(plan_pieces, ranks, gathered=self.kind == "gather", causal=call.is_causal, mask=mask, like=q)
        if mask is None:
            key = (ranks.layout, call.is_causal)
            if key not in self._pieces:
                self._pieces.clear()
                self._pieces[key] = plan()
            return self._pieces[key]
        version = 0 if mask.is_inference() else mask._version
        state = (version, ranks.layout, q.dtype)
        if call.attn_mask not in self._masked or self._masked[call.attn_mask][0] != state:
            self._masked[call.attn_mask] = (state, plan())
        pieces: Pieces = self._masked[call.attn_mask][1]
        return pieces

    def check(self, call: Call, ranks: Ranks) -> None:
        """Refuse attention that is not of the divided sequence to itself.

        Raises:
            ModelError: naming the block.
        """
        q, k, v, mask = call.query, call.key, call.value, call.attn_mask
        own, length = ranks.layout.sizes[ranks.rank], ranks.layout.length
        if any(isinstance(t, DTensor) for t in (q, k, v)):
            raise self.refusal("attention on DTensors", "plain tensors: let the layers give their local output")
        if q.dim() not in (3, 4) or k.dim() != q.dim() or v.dim() != q.dim():
            raise self.refusal(
                f"queries {tuple(q.shape)}, keys {tuple(k.shape)}", "(batch, heads, tokens, head_dim) for each"
            )
        if not q.shape[-2] == k.shape[-2] == v.shape[-2] == own or q.shape[0] != k.shape[0]:
            raise self.refusal(
                f"attention of {q.shape[-2]} queries to {k.shape[-2]} keys",
                f"self-attention over the divided sequence ({own} of {length} tokens here); cross attention, windows "
                "and caches cannot be split",
            )
        heads, kv_heads = (q.shape[1], k.shape[1]) if q.dim() == 4 else (1, 1)
        if heads % kv_heads or v.shape[1:-2] != k.shape[1:-2] or (heads != kv_heads > 1 and not call.enable_gqa):
            raise self.refusal(f"{heads} heads and {kv_heads} key and value heads", "equal numbers, or enable_gqa=True")
        if self.kind == "ulysses" and heads % ranks.size:
            raise self.refusal(
                f"{heads} heads", f"a multiple of cp={ranks.size} for context=ulysses; use context=ring or gather"
            )
        if call.dropout_p:
            raise self.refusal(
                f"dropout {call.dropout_p} inside attention", "0: set the model's attention dropout to 0"
            )
        if mask is not None:
            self._check_mask(call, mask, length)

    def _check_mask(self, call: Call, mask: torch.Tensor, length: int) -> None:
        if call.is_causal:
            raise self.refusal("a mask together with is_causal=True", "one of the two, as torch does")
        if mask.dim() < 2 or any(size not in (1, length) for size in mask.shape[-2:]):
            raise self.refusal(
                f"a mask of shape {tuple(mask.shape)}",
                f"one of the whole sequence, (..., {length}, {length}) or 1 where it is the same; make it from inputs "
                "that stay whole (attention_mask, document_ids, segment_ids)",
            )
        if mask.requires_grad and self.kind != "ulysses":
            raise self.refusal("a mask that requires a gradient (a learned bias)", "a constant, or context=ulysses")

    def check_calls(self, before: int) -> None:
        """Of a forward that began after `before` calls: all its attention was seen, and there was some.

        Raises:
            ModelError: naming the block.
        """
        if self.saw_flex:
            raise self.refusal("flex_attention imported by the call itself", "its import at the top of a file")
        if self.calls == before:
            raise self.refusal(
                "no call of torch's attention function",
                "torch.nn.functional.scaled_dot_product_attention in each block: attention by other means (written by "
                "hand, a kernel of its own), state spaces and convolutions would see a part of the sequence",
                row="module.attention-by-hand",
            )

    def refusal(self, found: str, needed: str, row: str = "module.attention-call") -> ModelError:
        """The error of a call that cannot be carried out on a part of the sequence; `row`: its limit's id."""
        return ModelError(
            f"context parallelism: {self.block}: found {found}, needed {needed}; change the model, or use a plan with "
            "cp1",
            row=row,
        )

    def check_function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse what mixes tokens of the sequence by other means than torch's attention function.

        Raises:
            ModelError: naming the function and the block.
        """
        ranks, tensor = self.ranks, args[0] if args else kwargs.get("input")
        if ranks is None or not isinstance(tensor, torch.Tensor):
            return
        own, name = ranks.layout.sizes[ranks.rank], getattr(func, "__name__", "a function")
        if func in SOFTMAX:
            square = tensor.dim() > 2 and tensor.shape[-1] == tensor.shape[-2] == own
            if square and (tensor.dim() > 3 or tensor.shape[0] != self.rows):
                raise self.refusal(
                    f"{name} over scores {tuple(tensor.shape)}, attention written by hand",
                    "torch.nn.functional.scaled_dot_product_attention",
                    row="module.attention-by-hand",
                )
        if func is F.multi_head_attention_forward:
            raise self.refusal("multi_head_attention_forward", _TOKENS, row="module.mixes-tokens")
        is_summand = func in SUMS and len(args) == 1 and not kwargs  # the loss adds these up
        if not is_summand and (found := mixed(func, args, kwargs, (self.rows, own))):
            raise self.refusal(found, _TOKENS, row="module.mixes-tokens")


_TOKENS = "operations on each token alone, and torch.nn.functional.scaled_dot_product_attention"


class Watch(TorchFunctionMode):
    """Carries attention over the ranks while it is on."""

    def __init__(self, divided: Divided) -> None:
        super().__init__()
        self.divided = divided
        self.flex = ExitStack()
        self.carries_flex = flex_is_imported()

    def __enter__(self) -> Watch:
        """Nothing else watches meanwhile."""
        self.divided.watching = True
        if self.carries_flex:
            self.flex.enter_context(import_module("shardwise.parallel.sequence.flex").carried(self.divided))
        super().__enter__()  # type: ignore[no-untyped-call]  # torch has no types here
        return self

    def __exit__(self, *error: object) -> None:
        """Torch's functions are called as they are again."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch has no types here
        self.flex.close()
        self.divided.watching = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every call of a torch function comes here."""
        if func is F.scaled_dot_product_attention:
            return self.divided.attend(Call.of(args, kwargs or {}))
        if func is torch.ops.higher_order.flex_attention and not self.carries_flex:
            self.divided.saw_flex = True  # compiled by torch, from where an error would not arrive
        if func in _LOOKED_AT:
            self.divided.check_function(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


_LOOKED_AT = MIXING | {F.multi_head_attention_forward}


class Shapes(TorchFunctionMode):
    """For a forward that is traced without data: attention has the shape of its queries, whatever the mask's."""

    def __init__(self) -> None:
        super().__init__()
        self.flex = ExitStack()

    def __enter__(self) -> Shapes:
        """No function of torch looks at a mask."""
        if flex_is_imported():
            self.flex.enter_context(import_module("shardwise.parallel.sequence.flex").shaped())
        super().__enter__()  # type: ignore[no-untyped-call]  # torch has no types here
        return self

    def __exit__(self, *error: object) -> None:
        """Torch's functions are called as they are again."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch has no types here
        self.flex.close()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Masks are of the whole sequence and queries of a part of it: leave the mask out."""
        if func is F.scaled_dot_product_attention:
            call = Call.of(args, kwargs or {})
            return func(call.query, call.key, call.value, enable_gqa=call.enable_gqa)
        return func(*args, **(kwargs or {}))
