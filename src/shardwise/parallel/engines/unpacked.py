"""DDP's two modes, `find-unused` and `static-graph`, put a tensor of their own around each output, and see no others.

They look into tuples, lists and dicts. The tensors of a dataclass they pass by: of a parameter that leads to one which
no loss takes they wait for the gradient for ever, and the first step of a static graph sums nothing. So DDP is given
the tensors, and the output is put together again around it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardwise.errors import ModelError
from shardwise.model.nested import Path, leaves, put


class Unpacked(nn.Module):
    """What DDP wraps: the user's module, of whose output it returns the tensors."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.root = root
        self.output: Any = None
        self.paths: list[Path] = []

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        """The user's forward.

        Raises:
            ModelError: no tensor is found in what it returns.
        """
        self.output = self.root(*args, **kwargs)
        found = [(path, leaf) for path, leaf in leaves(self.output) if isinstance(leaf, torch.Tensor)]
        if not found:
            raise ModelError(
                f"{type(self.root).__name__}.forward returned {type(self.output).__name__}, in which DDP under "
                "find-unused or static-graph finds no tensor; needed: tensors, also in tuples, lists, dicts and "
                "dataclasses; return one of these, or drop that word from the plan"
            )
        self.paths = [path for path, _ in found]
        return tuple(tensor for _, tensor in found)

    def pack(self, _: nn.Module, args: Any, tensors: tuple[torch.Tensor, ...]) -> Any:
        """A hook of DDP's forward: the output as the user made it, with DDP's tensors."""
        output, self.output = self.output, None
        return put(output, dict(zip(self.paths, tensors, strict=True)))

    def around(self, wrapped: DistributedDataParallel) -> None:
        """Put outputs together again behind DDP."""
        wrapped.register_forward_hook(self.pack)
