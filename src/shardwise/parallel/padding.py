"""What modules that count or average over samples are told of micro-batches that are only there to fill up a window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwise.parallel.placed import Part


@dataclass
class Padding:
    """Which micro-batches of a step are padding: their rows are copies, and count in no statistics."""

    flags: tuple[bool, ...] = ()
    now: bool = False
    """The micro-batch that runs is padding."""


def follow_pipeline(part: Part, padding: Padding) -> None:
    """Keep `padding.now` right under a pipeline, which runs micro-batches in an order of its own, and says which."""
    if part.run is part.root:
        return

    def mark(stage: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        padding.now = bool(padding.flags) and padding.flags[stage.feed.number(kwargs["index"])]

    part.run.register_forward_pre_hook(mark, with_kwargs=True)


def paddings_of(root: nn.Module) -> list[Padding]:
    """What the modules below `root` are told of padding: the `padding` of forwards that passes have put in place."""
    held = (getattr(vars(module).get("forward"), "padding", None) for module in root.modules())
    return list({id(padding): padding for padding in held if isinstance(padding, Padding)}.values())
