"""Where the generators are that a script may draw from: Python's, NumPy's and torch's, of this process.

What Shardwise draws needs none of them (`random.py`). A loss function, a loop's body, an evaluation may draw
from them, and go on where they were: after a recovery, and after a load.
"""

from __future__ import annotations

import hashlib
import random
import struct
from array import array
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch

_WORDS = 624
"""Of a Mersenne Twister."""
_PYTHON = struct.Struct("<I?d")
_NUMPY = struct.Struct("<I?d")
MOST_BYTES = 1 << 14
"""Of one generator's state; torch's own has 5,056."""


def states(device: torch.device) -> dict[str, bytes]:
    """Of each generator its state; `device` is that of the accelerator, where the ranks compute on one."""
    _, words, gauss = random.getstate()
    found = {"python": array("I", words).tobytes() + _PYTHON.pack(0, gauss is not None, gauss or 0.0)}
    if isinstance(numbers := cast(Any, np.random.get_state()), tuple):  # of another kind only where a script says so
        _, keys, place, has_gauss, cached = numbers
        found["numpy"] = keys.tobytes() + _NUMPY.pack(place, bool(has_gauss), cached)
    found["torch"] = torch.get_rng_state().numpy().tobytes()
    if _has_own(device):
        found["device"] = _rng(device).get_rng_state().numpy().tobytes()
    return found


def _fits(kind: str, state: bytes, device: torch.device) -> bool:
    """Whether this process has a generator with such a state."""
    sizes = {"python": 4 * (_WORDS + 1) + _PYTHON.size, "numpy": 4 * _WORDS + _NUMPY.size}
    if kind == "device":
        return _has_own(device) and len(state) == len(_rng(device).get_rng_state())
    return len(state) == (len(torch.get_rng_state()) if kind == "torch" else sizes.get(kind, -1))


def restore(found: Mapping[str, bytes], device: torch.device) -> None:
    """Have the generators go on where `states` was taken; those that it does not name, or that do not fit, stay.

    Raises:
        ValueError, RuntimeError: it is the state of no generator.
    """
    fit = {kind: state for kind, state in found.items() if _fits(kind, state, device)}
    if (python := fit.get("python")) is not None:
        words = np.frombuffer(python[: -_PYTHON.size], np.uint32).tolist()
        _, has_gauss, gauss = _PYTHON.unpack(python[-_PYTHON.size :])
        random.setstate((3, tuple(words), gauss if has_gauss else None))
    if (numpy := fit.get("numpy")) is not None:
        at, has_gauss, cached = _NUMPY.unpack(numpy[-_NUMPY.size :])
        if at > _WORDS:
            raise ValueError(f"place {at} of {_WORDS} words")
        np.random.set_state(("MT19937", np.frombuffer(numpy[: -_NUMPY.size], np.uint32), at, int(has_gauss), cached))
    if (state := fit.get("torch")) is not None:
        torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    if (state := fit.get("device")) is not None:
        _rng(device).set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


class Drawn:
    """Which generators have moved since a state was made: those of a script that never draws need not be stored."""

    def __init__(self, device: torch.device) -> None:
        """From now on; `device` is that which the rank computes on."""
        self._device = device
        self._before = _digests(states(device))

    def moved(self) -> dict[str, bytes]:
        """Of those the states."""
        now = states(self._device)
        return {kind: now[kind] for kind, digest in _digests(now).items() if digest != self._before.get(kind)}


def _digests(found: Mapping[str, bytes]) -> dict[str, bytes]:
    return {kind: hashlib.blake2b(state, digest_size=16).digest() for kind, state in found.items()}


def _has_own(device: torch.device) -> bool:
    """Whether ranks compute on an accelerator that is there: to ask one for its generator takes room on it."""
    there = torch.accelerator.current_accelerator(check_available=True)
    return there is not None and there.type == device.type


def _rng(device: torch.device) -> Any:
    return torch.get_device_module(device)
