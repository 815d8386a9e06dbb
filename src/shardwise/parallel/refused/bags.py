"""Bags of words in one long tensor: `nn.EmbeddingBag` with `offsets`, of which no dim is the rows of a batch.

Cut into micro-batches, the words are cut where no bag ends, or the places where bags begin are those of other words.
Torch on a CPU ends some of that in words of its own, and computes the rest.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwise.errors import ModelError
from shardwise.parallel.placed import Placed


def watch_bags(placed: Placed) -> None:
    """Look at what such layers are given in the first two micro-batches.

    Cost: there, two numbers that are read.
    """
    if placed.plan.batch.micro_batches > 1:
        for part in placed.parts:
            for name, module in part.root.named_modules():
                if isinstance(module, nn.EmbeddingBag):
                    look = _Look(name, str(placed.plan))
                    look.handle = module.register_forward_pre_hook(look, with_kwargs=True)


class _Look:
    """At one layer; it takes itself away."""

    def __init__(self, name: str, plan: str) -> None:
        self.name, self.plan = name, plan
        self.handle: RemovableHandle | None = None
        self.before: tuple[int, int] | None = None
        """Where the words of the first micro-batch lie, and the places."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before its forward.

        Raises:
            ModelError: it is given a part of what belongs together.
        """
        given = dict(zip(("input", "offsets"), args, strict=False)) | kwargs
        words, starts = given.get("input"), given.get("offsets")
        is_training = module.training and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if not is_training or words is None or starts is None or starts.is_meta:
            return
        here = words.data_ptr(), starts.data_ptr()
        is_cut = not starts.numel() or bool(starts[0] != 0) or int(starts[-1]) > len(words)
        if self.before is not None:  # a part of one has come with the whole of the other
            is_cut |= (here[0] == self.before[0]) != (here[1] == self.before[1])
        if is_cut:
            raise ModelError(
                f"{self.name or 'the model'} (EmbeddingBag) takes the words of all rows in one tensor, and `offsets`, "
                f"where each begins: `{self.plan}` cuts a batch into micro-batches by its rows, and neither is cut "
                "where a bag ends; needed: (rows, words) with padding_idx and no offsets, a list of micro-batches for "
                "each step, or a plan with mb1"
            )
        if self.before not in (None, here) and self.handle is not None:  # it may run again for the backward pass
            self.handle.remove()
        self.before = here
