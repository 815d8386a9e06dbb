"""Attention of `transformers` models while their sequence is divided over ranks.

Their own masks are made for the tokens at hand, and positions that jump look like packed documents to them. So they are
given an attention of another name (`AttentionInterface`), for which they make no mask: causal and full attention need
none, and a sliding window gets the mask of the whole sequence, which `intercept.py` cuts. FlexAttention gets a
block mask of the whole sequence, in each case but full attention, for `flex.py`.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import AttentionInterface
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from shardwise.errors import ModelError
from shardwise.model.hf_plan import value_of
from shardwise.parallel.declared import is_transposed
from shardwise.parallel.sequence.intercept import Divided

NAME = "shardwise_context"
FLEX_NAME = "shardwise_context_flex"
ATTRIBUTE = "shardwise_window"
KINDS = ("full_attention", "sliding_attention")


@dataclass
class Window:
    """Where the attentions of a model learn how long the whole sequence is, and share their masks."""

    divided: Divided
    masks: dict[tuple[int, int, torch.device], torch.Tensor] = field(default_factory=dict)
    block_masks: dict[tuple[int, int, int | None, torch.device], BlockMask] = field(default_factory=dict)

    def mask(self, length: int, window: int, device: torch.device) -> torch.Tensor:
        """Which token sees which: itself and the `window - 1` before it; bool (1, 1, length, length)."""
        key = (length, window, device)
        if key not in self.masks:
            self.masks.clear()
            at = torch.arange(length, device=device)
            distance = at[:, None] - at[None, :]
            self.masks[key] = ((distance >= 0) & (distance < window))[None, None]
        return self.masks[key]

    def length(self, tokens: int) -> int:
        """Of the whole sequence, of which so many are here."""
        return self.divided.ranks.layout.length if self.divided.ranks is not None else tokens

    def block_mask(self, queries: int, keys: int, window: int | None, device: torch.device) -> BlockMask:
        """Each token sees itself and what is before it, or the `window - 1` before it; the last query is the last key.

        Cost: queries x keys bytes while it is made, once per length and window.
        """
        known = (queries, keys, window, device)
        if known not in self.block_masks:
            if len(self.block_masks) > 1:  # full attention and one window
                self.block_masks.clear()
            behind, reach = keys - queries, keys if window is None else window

            def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> torch.Tensor:
                distance = q + behind - kv
                seen: torch.Tensor = (distance >= 0) & (distance < reach)
                return seen

            self.block_masks[known] = create_block_mask(mask_mod, None, None, queries, keys, device=str(device))
        return self.block_masks[known]


def divide_attention(root: nn.Module, divided: Divided) -> None:
    """Let a model's attentions work on parts of a sequence.

    Raises:
        ModelError: a kind of mask that is made neither here nor by torch.
    """
    config = cast(Any, root).config
    others = sorted(set(getattr(config, "layer_types", None) or ()) - set(KINDS))
    if others:
        raise ModelError(
            f"context parallelism: {type(root).__name__} has layers of kind {', '.join(others)}, whose masks are made "
            f"for the tokens at hand; needed: {' or '.join(KINDS)}; use a plan with cp1",
            row="module.attention-kind",
        )
    attention = _name_for(root, divided, config)
    window = Window(divided)
    for name, module in root.named_modules():
        if hasattr(module, "is_causal") or hasattr(module, "scaling"):
            _check_window(name, module, config)
            object.__setattr__(module, ATTRIBUTE, window)
    root.register_forward_pre_hook(_without_mask, with_kwargs=True)
    cast(Any, root).set_attn_implementation(attention)


def _name_for(root: nn.Module, divided: Divided, config: Any) -> str:
    """The attention that takes the place of the model's own."""
    asked, caps = config._attn_implementation, value_of(config, "attn_logit_softcapping")
    if asked in ("flex_attention", FLEX_NAME):
        if divided.kind == "ring":
            raise ModelError(
                f"context parallelism: {type(root).__name__} has attention by 'flex_attention' under context=ring, "
                "needed context=gather or context=ulysses: set one in the plan",
                row="module.flex-ring",
            )
        return FLEX_NAME
    if asked not in ("sdpa", NAME) or caps:
        raise ModelError(
            f"context parallelism: {type(root).__name__} has attention{' that caps its logits' if caps else ''} by "
            f"{asked!r}, found one that sees its own tokens only; needed: torch's scaled_dot_product_attention (sdpa), "
            "or 'flex_attention' in the configuration with context=gather or context=ulysses; or use a plan with cp1",
            row="module.attention-by-hand",
        )
    return NAME


def _check_window(name: str, module: nn.Module, config: Any) -> None:
    source = inspect.getsource(type(module).forward)
    if hasattr(module, "is_causal") and "attention_interface" not in source and _has_linear(module):
        raise ModelError(
            f"context parallelism: {name} ({type(module).__name__}) calls its attention directly, with masks of the "
            "tokens at hand; needed: attention through the interface of transformers; use a plan with cp1",
            row="module.attention-direct",
        )
    kinds = getattr(config, "layer_types", None)
    window = value_of(config, "sliding_window")
    slides = (any(window) if isinstance(window, list) else window) and (kinds is None or "sliding_attention" in kinds)
    if slides and "sliding_window=" not in source:
        raise ModelError(
            f"context parallelism: {name} ({type(module).__name__}) has a sliding window in its mask alone, found no "
            "sliding_window= in the call of its attention; needed: the window, to make the mask of the whole sequence; "
            "set sliding_window=None in the configuration, or use a plan with cp1",
            row="module.window-in-mask",
        )
    if slides and getattr(module, "is_causal", True) is False:
        raise ModelError(
            f"context parallelism: {name} ({type(module).__name__}) has a sliding window that looks ahead, needed a "
            "causal one; use a plan with cp1",
            row="module.window-ahead",
        )


def _has_linear(module: nn.Module) -> bool:
    return any(isinstance(child, nn.Linear) or is_transposed(child) for child in module.children())


def _without_mask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    if kwargs.get("attention_mask") is not None:
        raise ModelError(
            f"context parallelism: {type(module).__name__} was given an attention_mask, found one for padding or "
            "documents; needed none: pad at the end and give such tokens the label -100, which changes nothing under a "
            "causal mask; or use a plan with cp1",
            row="module.attention-call",
        )


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> Any:
    """What `transformers` calls: torch's fused attention, with the mask of a sliding window."""
    window: Window = vars(module)[ATTRIBUTE]
    size = options.get("sliding_window")
    if attention_mask is None and size is not None:
        length = window.length(key.shape[2])
        if size < length:
            attention_mask = window.mask(length, size, query.device)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


def attend_by_flex(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **options: Any,
) -> Any:
    """What `transformers` calls: its own FlexAttention, with the block mask of the whole sequence."""
    window: Window = vars(module)[ATTRIBUTE]
    causal = options.pop("is_causal", None)
    if attention_mask is None and (getattr(module, "is_causal", True) if causal is None else causal):
        queries, keys = window.length(query.shape[2]), window.length(key.shape[2])
        attention_mask = window.block_mask(queries, keys, options.get("sliding_window"), query.device)
    return flex_attention_forward(module, query, key, value, attention_mask, **options)


AttentionInterface.register(NAME, attend)
AttentionInterface.register(FLEX_NAME, attend_by_flex)
