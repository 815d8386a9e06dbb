"""`Passing`: buffers with `persistent=False`, which no checkpoint has, that steps change all the same."""

from __future__ import annotations

import torch

from shardwise.parallel.placed import Placed
from shardwise.train.torch_private import local_of

_SHOWN = 3


class Passing:
    """What of a rank's buffers passes with its process, though steps go on from it.

    Tables that a forward pass makes once, or makes longer, are settled after the first step, and what is filled anew
    in each step has the values of the one before it, so three steps are looked at: those that the first two wrote are
    copied, and compared after the third.

    Cost: of three steps a look at each such buffer, and a copy of those that a step wrote; of others nothing.
    """

    def __init__(self, placed: Placed) -> None:
        """Find the places, not the tensors: a forward may put another tensor there."""
        self._places = [
            (".".join(filter(None, (path, key))), module._buffers, key)
            for part in placed.parts
            for path, module in part.root.named_modules()
            for key in sorted(module._non_persistent_buffers_set)
        ]
        self._seen: list[tuple[torch.Tensor | None, int]] = []
        self._copies: dict[str, torch.Tensor] = {}
        self._steps = 0
        self.changed: tuple[str, ...] = ()
        """Names of those that steps change, as far as three steps show it."""

    def watching(self, placed: Placed) -> Placed:
        """The same, with a look after each step, where there are such buffers."""
        return placed.with_(after_step=(*placed.after_step, self._look)) if self._places else placed

    @torch.no_grad()
    def _look(self, _: bool) -> None:
        self._steps += 1
        if self._steps > 3:
            return
        now = {name: held.get(key) for name, held, key in self._places}
        if self._steps == 3:
            pairs = [(name, before, now[name]) for name, before in self._copies.items()]
            self.changed = tuple(name for name, before, live in pairs if live is not None and _differ(before, live))
            self._copies, self._seen = {}, []
            return
        seen = [(tensor, 0 if tensor is None or tensor.is_inference() else tensor._version) for tensor in now.values()]
        if self._steps == 2:
            for (name, live), before, after in zip(now.items(), self._seen, seen, strict=True):
                if live is not None and (before[0] is not after[0] or before[1] != after[1]):
                    here = local_of(live)
                    if type(here) is torch.Tensor and not here.is_meta:  # a traced step has no values
                        self._copies[name] = here.clone()
        self._seen = seen

    def forgets(self) -> str:
        """What a checkpoint lacks, and what to do; empty: nothing."""
        if not self.changed:
            return ""
        more = f" and {len(self.changed) - _SHOWN} more" if len(self.changed) > _SHOWN else ""
        return (
            f"buffers with persistent=False that steps change: {', '.join(self.changed[:_SHOWN])}{more}; no checkpoint "
            "and no copy of --recover holds them, so a run that goes on begins them anew; register what training goes "
            "on from with persistent=True"
        )


def _differ(before: torch.Tensor, live: torch.Tensor) -> bool:
    here = local_of(live)
    return (before.shape, before.dtype) == (here.shape, here.dtype) and not torch.equal(before, here)
