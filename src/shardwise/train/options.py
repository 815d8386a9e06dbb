"""`StepOptions`: what a step does beside the update; `StepMetrics`: what it did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_type_hints

from shardwise.errors import UsageError
from shardwise.train.protect import Protect


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """What a step does with its gradient.

    Raises:
        UsageError: a value that cannot be.
    """

    clip_norm: float | None = None
    """Largest L2 norm of the whole gradient, above 0; larger ones are scaled down."""
    clip_value: float | None = None
    """Largest absolute value of an element, above 0."""
    on_nonfinite: Literal["skip", "stop", "raise"] = "skip"
    """A loss or gradient that is not finite, on any rank: skip the update, end the loop in order, or raise."""
    max_skips: int = 20
    """Updates in a row that are skipped for that; one more ends the loop in order."""
    protect: Protect | None = None
    """What to do about spikes, and in place of `on_nonfinite` about what is not finite."""
    on_oom: Literal["raise", "halve"] = "raise"
    """A rank out of memory in forward or backward: raise there, or all ranks do the step again with half the rows.

    Where layers communicate (all plans but one rank and replicas with zero 0) "halve" needs `--recover`.
    """
    check_replicas: int = 0
    """Steps between comparisons of the parameters that ranks must hold alike; 0: never."""

    def __post_init__(self) -> None:
        numbers = {"clip_norm": self.clip_norm, "clip_value": self.clip_value}
        counts = {"max_skips": (self.max_skips, "updates in a row"), "check_replicas": (self.check_replicas, "steps")}
        for name, number in numbers.items():
            if number is not None and not (isinstance(number, int | float) and number > 0):
                raise UsageError(f"StepOptions: found {name}={number!r}, needed a number above 0; None clips nothing")
        for name, (count, of) in counts.items():
            if not isinstance(count, int) or count < 0:
                raise UsageError(f"StepOptions: found {name}={count!r}, needed 0 or more {of}")
        hints = get_type_hints(type(self))
        for name, word in {"on_nonfinite": self.on_nonfinite, "on_oom": self.on_oom}.items():
            if word not in (known := get_args(hints[name])):
                raise UsageError(f"StepOptions: found {name}={word!r}, needed one of {', '.join(known)}")
        if self.protect is not None and self.on_nonfinite != "skip":
            raise UsageError(
                f"StepOptions: on_nonfinite={self.on_nonfinite!r} beside {self.protect}; needed: one policy; "
                "leave on_nonfinite out"
            )

    def of_the_maths(self) -> dict[str, Any]:
        """What decides about an update, as JSON: checkpoints hold it, and a later start is compared with it."""
        policy = self.protect.policy if self.protect is not None else None
        kept = {"clip_norm": self.clip_norm, "clip_value": self.clip_value}
        return kept | {"on_nonfinite": self.on_nonfinite, "protect": policy}


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """What one step did. Losses and norms are those of the global batch, equal on all ranks."""

    step: int
    """Updates tried so far, this one included."""
    loss: float
    """Mean loss over the window's weight."""
    weight: float
    """The window's weight: tokens, for a token loss."""
    grad_norm: float
    """L2 norm of the mean gradient before clipping."""
    lr: float
    seconds: float
    losses: Mapping[str, float] = field(default_factory=dict)
    """Under several losses (`Losses`): the mean of each, without its factor."""
    skipped: bool = False
    stopping: str | None = None
    """Why the loop ends after this step; None while it goes on."""
    events: tuple[Mapping[str, Any], ...] = ()
    """What happened besides, as JSON: windows in quarantine, micro-batches halved, replicas healed."""


def options_with(clip: float | None, options: StepOptions | None) -> StepOptions:
    """The options of a step, of which `clip` is the short form.

    Raises:
        UsageError: both are given.
    """
    if clip is not None and options is not None:
        raise UsageError(
            f"clip={clip} and options={options} are both given; write StepOptions(clip_norm={clip}, ...) alone"
        )
    return options or StepOptions(clip_norm=clip)
