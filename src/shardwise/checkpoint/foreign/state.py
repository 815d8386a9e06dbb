"""`Foreign`: what a foreign checkpoint holds, in one form; and how optimizer state finds its parameters' names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwise.checkpoint.foreign.views import Source, View, number
from shardwise.errors import CheckpointError

Named = dict[str, dict[str, Source]]
"""Parameter -> state key -> where it is."""
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked", "inv_freq", "position_ids")
_SHOWN = 3


@dataclass(kw_only=True)
class Foreign:
    """A foreign checkpoint: weights, optimizer state by parameter, step, and what is not taken over and why."""

    kind: str
    weights: dict[str, Source]
    optimizer: Named = field(default_factory=dict)
    step: int = 0
    notes: list[str] = field(default_factory=list)
    files: int = 0


def shown(names: Sequence[object]) -> str:
    """The first few of many names."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(str, names[:_SHOWN])) + more


def weights_of(value: Any, where: str) -> tuple[dict[str, Source], list[str]]:
    """The tensors of a state_dict by name, and a note of what is none.

    Raises:
        CheckpointError: it is no state_dict.
    """
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise CheckpointError(
            f"{where}: found a {type(value).__name__}, needed a state_dict: names and tensors; save model.state_dict()"
        )
    weights: dict[str, Source] = {name: item for name, item in value.items() if isinstance(item, View)}
    if not weights:
        raise CheckpointError(
            f"{where}: found no tensor among {shown(list(value)) or 'its entries'}; needed a state_dict, alone or "
            "under `model`, `state_dict`, `module` or `model_state_dict`; save model.state_dict()"
        )
    others = [name for name, item in value.items() if not isinstance(item, View)]
    return weights, [f"entries that are no tensors: {shown(others)}"] if others else []


def untied(weights: Mapping[str, Source]) -> tuple[dict[str, Source], dict[str, str]]:
    """Each tensor once, under its first name; and the other names of it.

    Two names are of one tensor when the file has the same bytes for both.
    """
    first: dict[Any, str] = {}
    kept: dict[str, Source] = {}
    ties: dict[str, str] = {}
    for name, source in weights.items():
        known = first.setdefault(source.key, name) if isinstance(source, View) and 0 not in source.shape else name
        if known == name:
            kept[name] = source
        else:
            ties[name] = known
    return kept, ties


def named_state(value: Any, weights: Mapping[str, Source], in_order: bool) -> tuple[Named, str]:
    """State of a torch optimizer's state_dict by the names of its parameters; or nothing, and the reason.

    Args:
        value: {"state": {number or name: {key: tensor or number}}, "param_groups": [{"params": [...]}, ...]}.
        weights: of the same checkpoint, in their order.
        in_order: the user says that the numbers are those of `model.parameters()`.
    """
    state = value.get("state") if isinstance(value, dict) else None
    if not isinstance(state, dict):
        return {}, "the optimizer's state: it has no `state` by parameter"
    if not state:
        return {}, ""
    groups = [group for group in value.get("param_groups") or [] if isinstance(group, dict)]
    names, reason = _names(list(state), groups, weights, in_order)
    if not names:
        return {}, f"the optimizer's state: {reason}"
    found: Named = {}
    for key, entries in state.items():
        sources, problem = _sources(entries)
        if problem:
            return {}, f"the optimizer's state: {names[key]}: {problem}"
        name = names[key]
        wrong = [k for k, s in sources.items() if _is_like(k) and s.shape and s.shape != weights[name].shape]
        if wrong:
            shape = sources[wrong[0]].shape
            return {}, f"the optimizer's state: {name}.{wrong[0]} has shape {shape}, {name} has {weights[name].shape}"
        found[name] = sources
    return found, ""


def _names(
    keys: list[Any], groups: Sequence[Mapping[str, Any]], weights: Mapping[str, Source], in_order: bool
) -> tuple[dict[Any, str], str]:
    """Key of a state -> parameter; or the reason why that is not known."""
    if all(isinstance(key, str) and key in weights for key in keys):
        return {key: key for key in keys}, ""
    numbers = {key: int(key) for key in keys if isinstance(key, int) or (isinstance(key, str) and key.isdecimal())}
    if len(numbers) != len(keys):
        odd = [key for key in keys if key not in numbers and key not in weights]
        return {}, f"it is of parameters that the weights do not have: {shown(odd)}"
    listed = [group.get("param_names") for group in groups]
    ids = [i for group in groups for i in group.get("params") or []]
    if listed and all(isinstance(part, list) for part in listed):
        by_number = dict(zip(ids, [name for part in listed for name in part or []], strict=False))
        names = {key: by_number.get(n) for key, n in numbers.items()}
        lacking = [key for key, name in names.items() if name not in weights]
        if lacking:
            return {}, f"its param_names are not those of the weights: {shown([names[key] for key in lacking])}"
        return {key: str(name) for key, name in names.items()}, ""
    if not in_order:
        return {}, (
            "its parameters are numbers, and the file does not say which names they have; if the optimizer was made "
            "from model.parameters(), in that order and in one group, --params-in-order says so"
        )
    return _in_order(numbers, ids or sorted(numbers.values()), weights)


def _in_order(
    numbers: Mapping[Any, int], ids: Sequence[int], weights: Mapping[str, Source]
) -> tuple[dict[Any, str], str]:
    names = [name for name, source in weights.items() if name.rpartition(".")[2] not in _BUFFERS]
    names = [name for name in names if "int" not in weights[name].dtype and weights[name].dtype != "bool"]
    if len(names) != len(ids) or list(ids) != sorted(ids):
        return {}, f"it has {len(ids)} parameters in its groups, the weights {len(names)} that are no buffers"
    by_number = dict(zip(ids, names, strict=True))
    return {key: by_number[n] for key, n in numbers.items()}, ""


def _sources(entries: Any) -> tuple[dict[str, Source], str]:
    if not isinstance(entries, dict):
        return {}, f"its state is a {type(entries).__name__}"
    found: dict[str, Source] = {}
    for key, value in entries.items():
        if isinstance(value, bool | int | float):
            found[str(key)] = step_count(value) if key == "step" else _constant(value)
        elif hasattr(value, "read"):
            found[str(key)] = value
        elif value is not None:
            return {}, f"{key} is no tensor and no number"
    return found, ""


def step_count(value: float) -> Source:
    """How torch's optimizers keep a number of steps: float32, without dims."""
    return number(float(value), "float32")


def _constant(value: bool | int | float) -> Source:
    return number(value, "float64" if isinstance(value, float) else "int64")


def _is_like(key: str) -> bool:
    """Whether a state key is known to have the shape of its parameter."""
    return key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "sum")
