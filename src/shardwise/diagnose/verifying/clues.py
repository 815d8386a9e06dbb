"""`Evidence`: the facts that the known faults are told apart by. Plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """How a run under a plan differs from one process, at the first step unless it says otherwise."""

    data: int = 1
    """Ranks with different samples."""
    tp: int = 1
    pp: int = 1
    cp: int = 1
    world: int = 1
    micro_batches: int = 1
    sequence: bool = False
    initial: tuple[str, ...] = ()
    """Parameters that differ before the first step, or whose copies do."""
    rows_missing: int = 0
    """Rows of the one process that no rank saw."""
    rows_extra: int = 0
    """Rows that some rank saw and the one process did not."""
    rows_repeated: int = 0
    """Rows that two data ranks saw, and that the one process saw once."""
    rows: int = 0
    """Rows of the one process's step."""
    weight_ratio: float = 1.0
    """Weight of the step over that of one process."""
    lr_ratio: float = 1.0
    loss_ratio: float | None = None
    """Loss over that of one process; None: equal."""
    norm_ratio: float | None = None
    ranks_disagree: tuple[str, ...] = ()
    """Of `loss`, `norm`: what ranks report differently."""
    grads: tuple[str, ...] = ()
    """Gradients that differ."""
    num_grads: int = 0
    grad_factor: float | None = None
    """The one factor between all differing gradients and those of one process; None: there is no such factor."""
    copies: tuple[str, ...] = ()
    """Parameters, gradients and state whose copies on several ranks differ, by name."""
    params: tuple[str, ...] = ()
    """Parameters that differ after the update."""
    state: tuple[str, ...] = ()
    """Optimizer state that differs after the update."""
    buffers: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    """Parameters or gradients that no rank has."""
    added: tuple[str, ...] = ()
    """Parameters or gradients that one process does not have."""
    untied: tuple[str, ...] = ()
    """Names that are one parameter on one process and several under the plan."""
    first_forward: str | None = None
    """First module, in forward order, whose output differs; None: all are equal."""
    first_class: str = ""
    block_starts: tuple[str, ...] = ()
    """Blocks that begin a pipeline stage."""
    first_block: str | None = None
    """The block that holds the first module that differs."""
    draws: bool = False
    """Forward draws random numbers."""
    order_matters: bool = False
    """One process with its rows grouped otherwise gets another loss."""
    batch_norm: bool = False
    later_steps_only: bool = False
    """The first step is equal in everything."""
