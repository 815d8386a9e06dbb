"""What tells a sample from another one: ranks compare it, where they must read the same."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch

from shardwise.checkpoint.layout import numpy_bytes
from shardwise.model.nested import leaves
from shardwise.train.exchange import digest


def told(sample: Any) -> int:
    """56 bits of a sample: equal where its numbers and texts are."""
    return digest(_word(leaf) for _, leaf in leaves(sample))


def _word(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
        return str(leaf.dtype), tuple(leaf.shape), hashlib.blake2b(numpy_bytes(leaf)).hexdigest()
    if isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in "biuf":
        return str(leaf.dtype), leaf.shape, hashlib.blake2b(leaf.tobytes()).hexdigest()
    return leaf if isinstance(leaf, str | bytes | int | float) else type(leaf).__name__
