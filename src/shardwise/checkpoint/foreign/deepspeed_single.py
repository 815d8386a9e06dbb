"""What DeepSpeed's stage 0 in half precision keeps as its optimizer: torch's state, and fp32 weights beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.checkpoint.foreign.deepspeed_ranks import Place, check_module
from shardwise.checkpoint.foreign.state import Foreign, named_state, untied
from shardwise.checkpoint.foreign.views import Source, View
from shardwise.errors import CheckpointError

_INNER, _GROUPS, _FLAT = "optimizer_state_dict", "fp32_groups", "fp32_groups_flat"


def add_state(found: Foreign, state: Any, in_order: bool, where: str, buffers: Any = None) -> None:
    """The state of a torch optimizer by name, or a note why not; where it is wrapped, fp32 weights by the same names.

    Args:
        found: with the module's weights.
        state: `optimizer.state_dict()`, alone or as DeepSpeed's stage 0 in half precision wraps it.
        in_order: as `named_state`.
        where: for messages.
        buffers: their names, where the file lists them: they have no place in the order of parameters.

    Raises:
        CheckpointError: fp32 weights are not the module's, rounded.
    """
    wrapped = isinstance(state, dict) and "state" not in state and isinstance(state.get(_INNER), dict)
    inner = state[_INNER] if wrapped else state
    key = next((key for key in (_GROUPS, _FLAT) if wrapped and state.get(key)), None)
    numbered = _numbered(inner, state[_GROUPS]) if key == _GROUPS else {}
    if numbered:  # named as the optimizer's state is, and together with it
        entries = inner["state"] if isinstance(inner.get("state"), dict) else {}
        merged = {n: {**entries.get(n, {}), _GROUPS: view} for n, view in numbered.items()}
        inner = inner | {"state": entries | merged}
    listed = set(map(str, buffers)) if isinstance(buffers, list) else set()
    named, reason = named_state(inner, {n: w for n, w in found.weights.items() if n not in listed}, in_order)
    if numbered and named:
        _take_weights(found, {name: states.pop(_GROUPS) for name, states in named.items() if _GROUPS in states}, where)
    elif key:
        found.notes.append(
            f"the fp32 weights in {key}: whose they are is not known, as of the optimizer's state; the weights are the "
            "module's, in its own type"
        )
    found.optimizer = {name: states for name, states in named.items() if states}
    found.notes += [reason] if reason else []


def _numbered(inner: Mapping[str, Any], groups: Any) -> dict[Any, View]:
    """The fp32 weights by the numbers of their parameters; none: they are not as many."""
    listed = [group.get("params") for group in inner.get("param_groups") or [] if isinstance(group, dict)]
    numbers = [number for group in listed if isinstance(group, list) for number in group]
    views = [view for group in groups if isinstance(group, list) for view in group if isinstance(view, View)]
    return dict(zip(numbers, views, strict=True)) if len(numbers) == len(views) else {}


def _take_weights(found: Foreign, masters: dict[str, Source], where: str) -> None:
    """Put fp32 weights in the place of the module's, of which they must be what was rounded."""
    module = found.weights
    for name, view in masters.items():
        if view.shape != module[name].shape:
            raise CheckpointError(
                f"{where}: found fp32 weights of {name} of shape {view.shape}, needed {module[name].shape}, as the "
                "module has it; leave --params-in-order out if it was given, or copy the file again"
            )
        if not isinstance(view, View) or not view.is_contiguous:
            continue
        row = replace(view, shape=(math.prod(view.shape),), stride=(1,))
        try:
            check_module([Path(where)], {name: Place(0, [(0, 0, row.shape[0])])}, [[row]], module)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; leave --params-in-order out if it was given") from error
    kept, ties = untied(module)  # their other names have the module's tensor, and would be weights of their own
    found.weights, found.ties = kept | masters, found.ties | ties
