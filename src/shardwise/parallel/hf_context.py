"""Attention of `transformers` models while their sequence is divided over ranks.

Their own masks are made for the tokens at hand, and positions that jump look like packed documents to them. So they are
given an attention of another name (`AttentionInterface`), for which they make no mask: causal and full attention need
none, and a sliding window gets the mask of the whole sequence, which `parallel/intercept.py` cuts.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from shardwise.errors import ModelError
from shardwise.parallel.declared import is_transposed
from shardwise.parallel.intercept import Divided

NAME = "shardwise_context"
ATTRIBUTE = "shardwise_window"
KINDS = ("full_attention", "sliding_attention")


@dataclass
class Window:
    """Where the attentions of a model learn how long the whole sequence is, and share their masks."""

    divided: Divided
    masks: dict[tuple[int, int, torch.device], torch.Tensor] = field(default_factory=dict)

    def mask(self, length: int, window: int, device: torch.device) -> torch.Tensor:
        """Which token sees which: itself and the `window - 1` before it; bool (1, 1, length, length)."""
        key = (length, window, device)
        if key not in self.masks:
            self.masks.clear()
            at = torch.arange(length, device=device)
            distance = at[:, None] - at[None, :]
            self.masks[key] = ((distance >= 0) & (distance < window))[None, None]
        return self.masks[key]


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
            f"for the tokens at hand; needed: {' or '.join(KINDS)}; use a plan with cp1"
        )
    if config._attn_implementation not in ("sdpa", NAME) or getattr(config, "attn_logit_softcapping", None):
        capped = " that caps its logits" if getattr(config, "attn_logit_softcapping", None) else ""
        raise ModelError(
            f"context parallelism: {type(root).__name__} has attention{capped} by {config._attn_implementation!r}, "
            "found one that sees its own tokens only; needed: torch's scaled_dot_product_attention (sdpa); use a plan "
            "with cp1"
        )
    window = Window(divided)
    for name, module in root.named_modules():
        if hasattr(module, "is_causal") or hasattr(module, "scaling"):
            _check_window(name, module, config)
            object.__setattr__(module, ATTRIBUTE, window)
    root.register_forward_pre_hook(_without_mask, with_kwargs=True)
    cast(Any, root).set_attn_implementation(NAME)


def _check_window(name: str, module: nn.Module, config: Any) -> None:
    source = inspect.getsource(type(module).forward)
    if hasattr(module, "is_causal") and "attention_interface" not in source and _has_linear(module):
        raise ModelError(
            f"context parallelism: {name} ({type(module).__name__}) calls its attention directly, with masks of the "
            "tokens at hand; needed: attention through the interface of transformers; use a plan with cp1"
        )
    kinds = getattr(config, "layer_types", None)
    slides = getattr(config, "sliding_window", None) and (kinds is None or "sliding_attention" in kinds)
    if slides and "sliding_window=" not in source:
        raise ModelError(
            f"context parallelism: {name} ({type(module).__name__}) has a sliding window in its mask alone, found no "
            "sliding_window= in the call of its attention; needed: the window, to make the mask of the whole sequence; "
            "set sliding_window=None in the configuration, or use a plan with cp1"
        )
    if slides and getattr(module, "is_causal", True) is False:
        raise ModelError(
            f"context parallelism: {name} ({type(module).__name__}) has a sliding window that looks ahead, needed a "
            "causal one; use a plan with cp1"
        )


def _has_linear(module: nn.Module) -> bool:
    return any(isinstance(child, nn.Linear) or is_transposed(child) for child in module.children())


def _without_mask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    if kwargs.get("attention_mask") is not None:
        raise ModelError(
            f"context parallelism: {type(module).__name__} was given an attention_mask, found one for padding or "
            "documents; needed none: pad at the end and give such tokens the label -100, which changes nothing under a "
            "causal mask; or use a plan with cp1"
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
        ranks = window.divided.ranks
        length = ranks.layout.length if ranks is not None else key.shape[2]
        if size < length:
            attention_mask = window.mask(length, size, query.device)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


AttentionInterface.register(NAME, attend)
