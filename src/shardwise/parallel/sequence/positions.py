"""Positions of the tokens of a divided sequence: the argument that takes them, and how a model counts them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise.errors import ModelError
from shardwise.parallel.declared import home_of

POSITIONS = ("position_ids", "positions", "input_pos")
"""Names under which a model's forward takes the positions of its tokens, (batch, tokens) int64."""
COUNTED = "create_position_ids_from_input_ids"
"""What `transformers` calls the function by which a model counts positions from the padding token's id on (RoBERTa)."""


def positions_name(root: nn.Module) -> str:
    """The argument of a model's forward that takes the positions of its tokens.

    Raises:
        ModelError: it takes none.
    """
    names = inspect.signature(_home(root).forward).parameters
    found = next((name for name in POSITIONS if name in names), None)
    if found is None:
        raise ModelError(
            f"context parallelism: {type(root).__name__}.forward takes {', '.join(names) or 'nothing'}, needed one "
            f"of {', '.join(POSITIONS)}: each rank holds tokens from the middle of the sequence, and the model must be "
            "told which; add the argument (a model without positions takes it and leaves it unused), or use a plan "
            "with cp1",
            row="module.no-positions",
        )
    return found


def counted_by(root: nn.Module) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Of whole token ids the positions that a model gives them by itself; None: 0, 1, ...

    Found beside the embedding of its tokens, since a part for other inputs may count in another way.

    Args:
        root: the model with all of its modules; of a pipeline not those of one stage.
    """
    home, table = _home(root), None
    with suppress(NotImplementedError):  # of a model of a script's own, with another name for it than theirs
        table = getattr(home, "get_input_embeddings", lambda: None)()
    holder = next((module for module in home.modules() if table in (*module.children(),)), home)
    for module in (holder, *holder.children()):
        forward = inspect.unwrap(type(module).forward)
        if COUNTED in getattr(getattr(forward, "__code__", None), "co_names", ()):  # no source: it may be of no file
            count = getattr(module, COUNTED, None) or forward.__globals__[COUNTED]
            return partial(_counted, count, int(module.padding_idx))
    return None


def _counted(count: Callable[..., torch.Tensor], padding: int, main: torch.Tensor) -> torch.Tensor:
    if main.is_floating_point():  # embeddings that are given: none of them is of padding
        return torch.arange(padding + 1, padding + 1 + main.shape[1], device=main.device).expand(main.shape[0], -1)
    return count(main, padding)


def _home(root: nn.Module) -> Any:
    """The model itself, within what hands its keywords on to it."""
    return root.get_submodule(home_of(root).removesuffix("."))
