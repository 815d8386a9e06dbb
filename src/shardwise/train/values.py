"""Values beside the tensors of a state, as JSON for a checkpoint's scalars, and back; a small tensor is its bytes."""

from __future__ import annotations

import base64
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

_TENSOR = "shardwise.tensor"
"""The key that tells a tensor from a dict of the module's own."""
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
                  torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool)
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
    if type(value) is Tensor and value.layout is torch.strided and str(value.dtype).removeprefix("torch.") in _DTYPES:
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
_KIND = "shardwise.kind"
"""The key that tells what is neither list, dict nor tensor: its kind, and what it holds."""
_LISTS: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
_DICTS: dict[str, Any] = {"Counter": Counter, "OrderedDict": OrderedDict}


def plain(value: Any) -> Any:
    """A value that `to_json` takes, where a common one of Python's or NumPy's stands for it; `like` gives that back."""
    for name, kind in _LISTS.items():
        if isinstance(value, kind):
            items = sorted(value, key=repr) if name in ("set", "frozenset") else value  # an order that every rank has
            return {_KIND: [name, [plain(item) for item in items], getattr(value, "maxlen", None)]}
    for name, kind in _DICTS.items():
        if isinstance(value, kind):
            return {_KIND: [name, plain(dict(value)), None]}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {str(key): plain(item) for key, item in value.items()}
        return {_PAIRS: [[plain(key), plain(item)] for key, item in value.items()]}
    if isinstance(value, np.ndarray):
        return {_KIND: ["array", torch.from_numpy(value.copy()), None]} if value.dtype.kind in "biuf" else value
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float):
        return float(value)
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else value


def without_kinds(value: Any) -> Any:
    """What `to_json(plain(...))` gave, as lists and dicts alone: to compare, and as checkpoints had it before kinds."""
    if isinstance(value, dict) and value.keys() == {_KIND}:
        return without_kinds(value[_KIND][1])
    if isinstance(value, dict):
        return {key: without_kinds(item) for key, item in value.items()}
    return [without_kinds(item) for item in value] if isinstance(value, list) else value


def like(old: Any, value: Any) -> Any:
    """A value from `from_json` of the kind that is stored, else of that of the old one; tensors in those of the old."""
    if isinstance(value, dict) and value.keys() == {_KIND}:
        name, value, longest = value[_KIND]
        if name == "array":
            return value.numpy()
        kind = (_LISTS | _DICTS)[name]
        if not isinstance(old, kind):
            old = kind((), longest) if kind is deque else kind()
    if isinstance(value, dict) and value.keys() == {_PAIRS}:
        value = {_hashable(like(None, key)): item for key, item in value[_PAIRS]}
    if isinstance(value, dict):
        return _dict_like(old, value)
    if isinstance(old, Tensor) and isinstance(value, Tensor) and (old.shape, old.dtype) == (value.shape, value.dtype):
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
    if isinstance(old, tuple):
        named = len(getattr(old, "_fields", ())) == len(items) > 0
        return type(old)(*items) if named else tuple(items)
    kinds = (kind for kind in (set, frozenset) if isinstance(old, kind))
    return next((kind(map(_hashable, items)) for kind in kinds), items)


def _dict_like(old: Any, value: dict[Any, Any]) -> Any:
    known = old if isinstance(old, dict) else {}
    found = {key: like(known.get(key), item) for key, item in value.items()}
    if isinstance(old, defaultdict):  # its function is the script's own, and in no checkpoint
        return defaultdict(old.default_factory, found)
    kinds = (kind for kind in _DICTS.values() if isinstance(old, kind))
    return next(kinds, dict)(found)


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list) else value
