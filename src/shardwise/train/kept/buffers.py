"""`Buffers`: what forward passes change beside the parameters, given back where a step makes no update."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import torch

from shardwise.parallel.module_torch_private import copy_together
from shardwise.parallel.placed import Placed
from shardwise.train.kept.extra_state import ExtraState


class Buffers:
    """The buffers of a rank as they were before a step: running statistics and counts of what was then left out.

    So is what modules keep beside them by `get_extra_state`.

    All of them are copied, for nothing tells beforehand which ones a forward pass writes: torch's version counters do
    not see writes through `.data`.

    Cost: a copy of the buffers per step; nothing for a model that has none.
    """

    def __init__(self, placed: Placed) -> None:
        """Find the places, not the tensors: a forward may put another tensor there (`self.count = self.count + 1`)."""
        modules = [module for part in placed.parts for module in part.root.modules()]
        self._places = [(m._buffers, key) for m in modules for key, held in m._buffers.items() if held is not None]
        self._kept: list[torch.Tensor | None] = []
        self._extra, self._kept_extra = ExtraState(placed), dict[str, Any]()

    @torch.no_grad()
    def keep(self) -> None:
        """Remember them as they are; they are this rank's own, so nothing is communicated."""
        live = [held[key] for held, key in self._places]
        self._kept = [_room(buffer, before) for buffer, before in zip_longest(live, self._kept)]
        kinds: dict[torch.dtype, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for buffer, room in zip(live, self._kept, strict=True):
            if type(buffer) is torch.Tensor and room is not None:
                kinds.setdefault(buffer.dtype, []).append((room, buffer))
            elif buffer is not None and room is not None:
                room.copy_(buffer)
        for pairs in kinds.values():
            copy_together([room for room, _ in pairs], [buffer for _, buffer in pairs])
        self._kept_extra = self._extra.to_json()

    @torch.no_grad()
    def restore(self) -> None:
        """Make them what they were at the last `keep`."""
        for (held, key), before in zip(self._places, self._kept, strict=True):
            live = held[key]
            if before is not None and not _fits(live, before):  # a forward has put a longer one there, or none
                held[key] = before.clone()
            elif live is not None and before is not None:
                live.copy_(before)
        self._extra.restore(self._kept_extra)


def _room(buffer: torch.Tensor | None, before: torch.Tensor | None) -> torch.Tensor | None:
    """Memory for a copy of a buffer: that of the last one where it fits."""
    if buffer is None:
        return None
    return before if before is not None and _fits(buffer, before) else torch.empty_like(buffer)


def _fits(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    return one is not None and (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
