"""Values beside the tensors of a state, as JSON for a checkpoint's scalars, and back; a small tensor is its bytes."""

from __future__ import annotations

import base64
from collections import Counter, deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

_TENSOR = "shardwise.tensor"
"""The key that tells a tensor from a dict of the module's own."""
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
                  torch.int8, torch.uint8, torch.bool)
}  # fmt: skip


def to_json(value: Any) -> Any:
    """The same as JSON, so that `from_json` gives it back exactly.

    Raises:
        TypeError: it is no number, text, list, dict of texts, or tensor.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [to_json(item) for item in value]
    if type(value) is dict and all(type(key) is str for key in value):
        return {key: to_json(item) for key, item in value.items()}
    if type(value) is torch.Tensor and str(value.dtype).removeprefix("torch.") in _DTYPES:
        plain = value.detach().cpu().contiguous().reshape(-1)
        data = plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
        name = str(value.dtype).removeprefix("torch.")
        return {_TENSOR: [name, list(value.shape), base64.b64encode(data).decode()]}
    raise TypeError(f"found {'a dict whose keys are no strings' if type(value) is dict else type(value).__name__}")


def from_json(value: Any) -> Any:
    """What `to_json` was given."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() != {_TENSOR}:
        return {key: from_json(item) for key, item in value.items()}
    dtype, shape, data = value[_TENSOR]
    if not data:
        return torch.empty(shape, dtype=_DTYPES[dtype])
    return torch.frombuffer(bytearray(base64.b64decode(data)), dtype=torch.uint8).view(_DTYPES[dtype]).reshape(shape)


_PAIRS = "shardwise.pairs"
"""The key that tells a dict whose keys are no texts, as pairs."""
_LISTS = (list, tuple, deque, set, frozenset)


def plain(value: Any) -> Any:
    """A value that `to_json` takes, where a common one of Python's or NumPy's stands for it; `like` gives that back."""
    if isinstance(value, set | frozenset):
        return [plain(item) for item in sorted(value, key=repr)]  # in an order that every rank has
    if isinstance(value, _LISTS):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {str(key): plain(item) for key, item in value.items()}
        return {_PAIRS: [[plain(key), plain(item)] for key, item in value.items()]}
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy()) if value.dtype.kind in "biuf" else value
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float):
        return float(value)
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else value


def like(old: Any, value: Any) -> Any:
    """A value from `from_json` as the old one is: in the same tensor, the same kind of list, dict or number."""
    if isinstance(value, dict) and value.keys() == {_PAIRS}:
        value = {_hashable(key): item for key, item in value[_PAIRS]}
    if isinstance(value, dict):
        known = old if isinstance(old, dict) else {}
        found = {key: like(known.get(key), item) for key, item in value.items()}
        return Counter(found) if isinstance(old, Counter) else found
    if isinstance(old, Tensor) and isinstance(value, Tensor) and old.shape == value.shape:
        return old.copy_(value)
    if isinstance(old, np.ndarray) and isinstance(value, Tensor):
        return value.numpy().astype(old.dtype)
    if isinstance(old, np.generic) and isinstance(value, bool | int | float):
        return old.dtype.type(value)
    if not isinstance(value, list):
        return value
    known_items = list(old) if isinstance(old, list | tuple | deque) and len(old) == len(value) else [None] * len(value)
    items = [like(before, item) for before, item in zip(known_items, value, strict=True)]
    if isinstance(old, deque):
        return deque(items, old.maxlen)
    for kind in (tuple, set, frozenset):
        if isinstance(old, kind):
            return kind(map(_hashable, items) if kind is not tuple else items)
    return items


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list) else value
