"""`Passing`: what steps change and no checkpoint has: buffers with `persistent=False`, numbers that modules keep."""

from __future__ import annotations

import torch
from torch import nn

from shardwise.findings import shown
from shardwise.parallel.placed import Placed
from shardwise.train.torch_private import local_of

_NUMBERS = (int, float, bool)


class Passing:
    """What of a rank's modules passes with its process, though steps go on from it.

    Tables that a forward pass makes once, or makes longer, are settled after the first step, and what is filled anew
    in each step has the values of the one before it, so three steps are looked at: those that the first two wrote are
    copied, and compared after the third. So are numbers that modules keep as attributes, where their classes are not
    torch's own and have no `get_extra_state`.

    Cost: of three steps a look at each such buffer, and a copy of those that a step wrote, and two looks at attributes;
    of others nothing.
    """

    def __init__(self, placed: Placed) -> None:
        """Find the places, not the tensors: a forward may put another tensor there."""
        self._places = [
            (".".join(filter(None, (path, key))), module._buffers, key)
            for part in placed.parts
            for path, module in part.root.named_modules()
            if "shardwise" not in _homes(module)  # each forward writes these anew, as the load of a router
            for key in sorted(module._non_persistent_buffers_set)
        ]
        self._modules = [
            (path, module) for part in placed.parts for path, module in part.root.named_modules() if _is_of_user(module)
        ]
        self._numbers: dict[str, float] = {}
        self._seen: list[tuple[torch.Tensor | None, int]] = []
        self._copies: dict[str, torch.Tensor] = {}
        self._steps = 0
        self.changed: tuple[str, ...] = ()
        """Names of buffers that steps change, as far as three steps show it."""
        self.counted: tuple[str, ...] = ()
        """Likewise of attributes."""

    def watching(self, placed: Placed) -> Placed:
        """The same, with a look after each step, where there are such buffers."""
        return placed.with_(after_step=(*placed.after_step, self._look)) if self._places or self._modules else placed

    @torch.no_grad()
    def _look(self, _: bool) -> None:
        self._steps += 1
        if self._steps > 3:
            return
        if self._steps == 1:
            self._numbers = self._kept()
        if self._steps == 3:
            kept = self._kept()
            self.counted = tuple(name for name, was in self._numbers.items() if [kept.get(name, was)] != [was])
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

    def _kept(self) -> dict[str, float]:
        """Numbers that modules keep as attributes."""
        return {
            f"{path}.{key}" if path else key: value
            for path, module in self._modules
            for key, value in vars(module).items()
            if type(value) in _NUMBERS
        }

    def forgets(self) -> str:
        """What a checkpoint lacks, and what to do; empty: nothing."""
        needed = "register what training goes on from with persistent=True"
        buffers = _sentence("buffers with persistent=False", self.changed, needed)
        needed = "let what training goes on from be a buffer, or part of get_extra_state"
        return "; ".join(filter(None, (buffers, _sentence("numbers in attributes of modules", self.counted, needed))))


def _sentence(what: str, names: tuple[str, ...], needed: str) -> str:
    said = (
        f"{what} that steps change: {shown(names)}; no checkpoint and no copy of --recover holds "
        f"them, so a run that goes on begins them anew; {needed}"
    )
    return said if names else ""


def _is_of_user(module: nn.Module) -> bool:
    """Whether a class may keep numbers that it tells nobody. `fully_shard` puts a class of torch before its own."""
    return _homes(module) != {"torch"} and type(module).get_extra_state is nn.Module.get_extra_state


def _homes(module: nn.Module) -> set[str]:
    """Packages of its class and of those that this is made from."""
    return {base.__module__.partition(".")[0] for base in type(module).__mro__ if base is not object}


def _differ(before: torch.Tensor, live: torch.Tensor) -> bool:
    here = local_of(live)
    return (before.shape, before.dtype) == (here.shape, here.dtype) and not torch.equal(before, here)
