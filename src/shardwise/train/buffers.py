"""`Buffers`: what forward passes change beside the parameters, given back where a step makes no update."""

from __future__ import annotations

import torch

from shardwise.parallel.placed import Placed


class Buffers:
    """The buffers of a rank as they were before a step: running statistics and counts of what was then left out.

    All of them are copied, for nothing tells beforehand which ones a forward pass writes: torch's version counters do
    not see writes through `.data`.

    Cost: a copy of the buffers per step; nothing for a model that has none.
    """

    def __init__(self, placed: Placed) -> None:
        """Find the places, not the tensors: a forward may put another tensor there (`self.count = self.count + 1`)."""
        modules = [module for part in placed.parts for module in part.root.modules()]
        self._places = [(m._buffers, key) for m in modules for key, held in m._buffers.items() if held is not None]
        self._kept: list[torch.Tensor | None] = []

    @torch.no_grad()
    def keep(self) -> None:
        """Remember them as they are; they are this rank's own, so nothing is communicated."""
        live = [held[key] for held, key in self._places]
        self._kept = [None if buffer is None else buffer.detach().clone() for buffer in live]

    @torch.no_grad()
    def restore(self) -> None:
        """Make them what they were at the last `keep`."""
        for (held, key), before in zip(self._places, self._kept, strict=True):
            live = held[key]
            if live is not None and before is not None:
                live.copy_(before)
