"""Which keys of a batch are arguments of a module's forward, and which are the loss's alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

LOSS_KEYS = ("labels", "weight")
"""Keys of a dict batch that belong to the loss: the model is given them where its forward requires them."""


def required_by(forward: Callable[..., Any]) -> frozenset[str]:
    """Names of the arguments that a call cannot leave out.

    >>> required_by(lambda ids, labels, weight=None: None) == {"ids", "labels"}
    True
    """
    parameters = inspect.signature(forward).parameters.values()
    return frozenset(
        p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    )


def is_loss_key(key: object, required: frozenset[str]) -> bool:
    """Whether a key of a batch is left out of the model's inputs."""
    return key in LOSS_KEYS and key not in required
