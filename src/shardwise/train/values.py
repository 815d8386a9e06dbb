"""Values beside the tensors of a state, as JSON for a checkpoint's scalars, and back; a small tensor is its bytes."""

from __future__ import annotations

import base64
from typing import Any

import torch

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
