"""Optimizers that hold another one (Lookahead, several in one): whose state no table of the outer one's shows."""

from __future__ import annotations

from torch.optim import Optimizer

from shardwise.errors import ModelError


def check_inner_state(optimizer: Optimizer) -> None:
    """Refuse state that lies in an optimizer within an optimizer, where no checkpoint would look for it.

    Raises:
        ModelError: names both, the attribute, and how they share one state.

    Cost: a look at each attribute.
    """
    for name, value in vars(optimizer).items():
        held = list(value.values()) if isinstance(value, dict) and name != "state" else [value]
        for inner in value if isinstance(value, list | tuple) else held:
            if isinstance(inner, Optimizer) and inner.state and inner.state is not optimizer.state:
                outer, kind = type(optimizer).__name__, type(inner).__name__
                raise ModelError(
                    f"{outer}: state of {len(inner.state)} parameters lies in the {kind} that it holds as {name!r}; "
                    f"what is saved is {outer}.state; needed: one state for both; say outer.state = inner.state before "
                    "TrainState, or give TrainState one optimizer per group of parameters (sw.several)"
                )
