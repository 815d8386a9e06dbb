"""What modules keep beside parameters and buffers (`nn.Module.get_extra_state`), as JSON for a checkpoint's scalars."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import nn

from shardwise.errors import CheckpointError, ModelError
from shardwise.parallel.placed import Placed
from shardwise.train.values import from_json, to_json

MOST_BYTES = 1 << 16
"""Of one module, as JSON: more belongs into buffers, which are stored in parts and compared."""


class ExtraState:
    """The modules of a model that keep more than parameters and buffers.

    Raises:
        ModelError: what they keep is neither JSON nor tensors, or too large; or the model is a pipeline's.
    """

    def __init__(self, placed: Placed) -> None:
        """Refuse at the start what no checkpoint would hold."""
        self._modules = {
            name or "the model": module
            for part in placed.parts
            for name, module in part.root.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }
        found = self.to_json()
        if found and placed.mesh.size("pp") > 1:
            raise ModelError(
                f"get_extra_state of {next(iter(found))}: a checkpoint holds it once for all ranks, and in a pipeline "
                "each stage has its own; needed: buffers (register_buffer) in its place, or a plan without pp"
            )

    def to_json(self) -> dict[str, Any]:
        """By module, what its `get_extra_state` gives; None is left out.

        Raises:
            ModelError: see the class.
        """
        found = {}
        for name, module in self._modules.items():
            value = module.get_extra_state()
            if value is None:
                continue
            try:
                found[name] = to_json(value)
                size = len(json.dumps(found[name], allow_nan=False))
            except (TypeError, ValueError) as error:
                raise ModelError(
                    f"get_extra_state of {name}: a checkpoint cannot hold it: {error}; needed: finite numbers, "
                    "strings, lists and dicts of them, or tensors; keep the rest elsewhere"
                ) from None
            if size > MOST_BYTES:
                raise ModelError(
                    f"get_extra_state of {name}: {size} bytes as JSON, needed at most {MOST_BYTES}; keep tensors as "
                    "buffers (register_buffer)"
                )
        return found

    def load(self, stored: Mapping[str, Any]) -> None:
        """Give the modules what `to_json` gave.

        Raises:
            CheckpointError: it is of other modules than these.
        """
        own = {name for name, module in self._modules.items() if name in stored or module.get_extra_state() is not None}
        if own != stored.keys():
            name = min(own ^ stored.keys())
            where = "this model has it, and the checkpoint does not" if name in own else "the checkpoint alone has it"
            raise CheckpointError(f"get_extra_state of {name}: {where}; needed: the modules that were saved")
        for name in stored:
            self._modules[name].set_extra_state(from_json(stored[name]))

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Make them what they were when `to_json` gave `kept`; modules that kept nothing then are left alone."""
        now = self.to_json()
        for name, value in kept.items():
            if now.get(name) != value:
                self._modules[name].set_extra_state(from_json(value))
