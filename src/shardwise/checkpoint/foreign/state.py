"""`Foreign`: what a foreign checkpoint holds, in one form; and how optimizer state finds its parameters' names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardwise.checkpoint.foreign.sandbox import Left
from shardwise.checkpoint.foreign.views import Source, View, number
from shardwise.checkpoint.format import DTYPES, whole
from shardwise.errors import CheckpointError
from shardwise.findings import shown

Named = dict[str, dict[str, Source]]
"""Parameter -> state key -> where it is."""
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked", "inv_freq", "position_ids")
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")
PREFIXES = ("model.", "module.", "net.")
"""What DDP puts before every name, and a LightningModule whose only child is the model."""
_NUMBERS = (
    "its parameters are numbers, and the file does not say which names they have; if the optimizer was made from "
    "model.parameters(), in that order and in one group, --params-in-order says so"
)
_UNORDERED = (
    "its parameters are numbers, and safetensors files hold the weights in the order of their names, so that not even "
    "--params-in-order can say whose they are; needed names: make the optimizer from model.named_parameters(), or save "
    "the weights with torch.save"
)
_INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
_MAX_STEP = 10**18


@dataclass(kw_only=True)
class Foreign:
    """A foreign checkpoint: weights, optimizer state by parameter, step, and what is not taken over and why."""

    kind: str
    weights: dict[str, Source]
    optimizer: Named = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    """Another name of a weight -> the one that it has here."""
    step: int = 0
    notes: list[str] = field(default_factory=list)
    files: int = 0


def kind_of(value: Any) -> str:
    """What a file holds, as its author would call it.

    >>> kind_of({}), kind_of(Left("torch.nn.Linear"))
    ('dict', 'torch.nn.Linear')
    """
    return "tensor" if isinstance(value, View) else value.name if isinstance(value, Left) else type(value).__name__


def weights_of(value: Any, where: str) -> tuple[dict[str, Source], list[str]]:
    """The tensors of a state_dict by name, and a note of what is none.

    Raises:
        CheckpointError: it is no state_dict.
    """
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise CheckpointError(
            f"{where}: found a {kind_of(value)}, needed a state_dict: names and tensors; save model.state_dict()"
        )
    for name, item in value.items():
        if isinstance(item, Left) and item.tensor:
            raise CheckpointError(
                f"{where}: {name!r}: found a tensor of {item.tensor}, needed one of {', '.join(DTYPES)}, strided; save "
                "it as such, or without it"
            )
    weights: dict[str, Source] = {name: item for name, item in value.items() if isinstance(item, View)}
    if not weights:
        inside = _models_in(value)
        what = f"no tensor among {shown(list(value)) or 'its entries'}"
        if inside:
            what = f"weights {'of several models, ' if len(inside) > 1 else 'under '}{shown(inside)}"
        raise CheckpointError(
            f"{where}: found {what}; needed one state_dict, alone or under `model`, `state_dict`, `module` or "
            "`model_state_dict`; save model.state_dict() of the one that is meant"
        )
    others = [name for name, item in value.items() if not isinstance(item, View)]
    nested = [name for name in others if _holds_tensors(value[name])]
    plain = [name for name in others if name not in nested]
    notes = {"entries that are no tensors": plain, "entries that hold tensors under names of their own": nested}
    return weights, [f"{what}: {shown(names)}" for what, names in notes.items() if names]


def _models_in(value: Any) -> list[str]:
    """Where below there are tensors by name, and no optimizer's. The reader bounds the depth."""
    found = []
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        if isinstance(item, dict) and any(isinstance(each, View) for each in item.values()):
            found.append(str(key))
        elif not (isinstance(item, dict) and "param_groups" in item):
            found += [f"{key}.{name}" for name in _models_in(item)]
    return found


def _holds_tensors(value: Any) -> bool:
    """At any depth. The reader bounds it."""
    held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return isinstance(value, View) or any(map(_holds_tensors, held))


def without_elements(weights: Mapping[str, Source]) -> list[str]:
    """Weights of shape (0,): what ZeRO 3 leaves in a module in the place of a parameter."""
    return [name for name, source in weights.items() if source.shape == (0,) and "float" in source.dtype]


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


def unwrapped(name: str) -> str:
    """A name without the parts that wrappers put into it.

    >>> unwrapped("h.0._orig_mod.weight")
    'h.0.weight'
    """
    *modules, last = name.split(".")
    return ".".join([*(part for part in modules if part not in _WRAPPERS), last])


def _owners(names: Sequence[str], weights: Mapping[str, Source]) -> dict[str, str]:
    """Name of a parameter as the optimizer has it -> as the weights have it; without those that they do not have.

    An optimizer may be made before the model is wrapped, and saved after it, or the other way round: so parts and
    prefixes of wrappers do not count, on either side. A tied parameter is its first name.
    """
    ties = untied(weights)[1]
    own = {unwrapped(name): ties.get(name, name) for name in weights}
    bare = dict(zip(_bare(list(own)), own.values(), strict=True))
    plain = [unwrapped(name) for name in names]
    as_they_are = {name: own[key] for name, key in zip(names, plain, strict=True) if key in own}
    if len(as_they_are) == len(names):
        return as_they_are
    stripped = {name: bare[key] for name, key in zip(names, _bare(plain), strict=True) if key in bare}
    return stripped if len(stripped) == len(names) else as_they_are


def _bare(names: list[str]) -> list[str]:
    """Names without the prefixes that all of them have."""
    while prefix := next((p for p in PREFIXES if names and all(name.startswith(p) for name in names)), ""):
        names = [name.removeprefix(prefix) for name in names]
    return names


def named_state(
    value: Any, weights: Mapping[str, Source], in_order: bool, *, sorted_names: bool = False
) -> tuple[Named, str]:
    """State of a torch optimizer's state_dict by the names of its parameters; or nothing, and the reason.

    Args:
        value: {"state": {number or name: {key: tensor or number}}, "param_groups": [{"params": [...]}, ...]}.
        weights: of the same checkpoint, in their order.
        in_order: the user says that the numbers are those of `model.parameters()`.
        sorted_names: the weights are in no order but that of their names, so nobody can know that of the numbers.
    """
    state = value.get("state") if isinstance(value, dict) else None
    if not isinstance(state, dict):
        return {}, "the optimizer's state: it has no `state` by parameter"
    if not state:
        return {}, ""
    groups = [group for group in value.get("param_groups") or [] if isinstance(group, dict)]
    names, reason = _names(list(state), groups, weights, in_order and not sorted_names)
    if reason == _NUMBERS and sorted_names:
        reason = _UNORDERED
    if not names:
        return {}, f"the optimizer's state: {reason}"
    if len(set(names.values())) < len(names):
        return {}, f"the optimizer's state: two entries are of one parameter: {shown(list(names))}"
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
    owners = _owners([key for key in keys if isinstance(key, str)], weights)
    if all(key in owners for key in keys):
        return owners, ""
    numbers = {key: int(key) for key in keys if isinstance(key, int) or (isinstance(key, str) and key.isdecimal())}
    if len(numbers) != len(keys):
        odd = [key for key in keys if key not in numbers and key not in owners]
        return {}, f"it is of parameters that the weights do not have: {shown(odd)}"
    listed = [group.get("param_names") for group in groups]
    if listed and all(isinstance(part, list) for part in listed):
        return _by_param_names(numbers, groups, weights)
    if len(groups) > 1:  # the numbers go through one group after the other, the model's order does not
        return {}, (
            f"its parameters are numbers, and it has {len(groups)} groups, so its order is not the model's"
            f"{', whatever --params-in-order says' * in_order}; needed names: make the optimizer from "
            "model.named_parameters() and save it again"
        )
    if not in_order:
        return {}, _NUMBERS
    ids = _ids(groups[0]) if groups else []
    return _in_order(numbers, ids or sorted(numbers.values()), weights)


def _ids(group: Mapping[str, Any]) -> list[int]:
    """The numbers of a group's parameters."""
    params = group.get("params")
    return [item for item in params if isinstance(item, int)] if isinstance(params, list) else []


def _by_param_names(
    numbers: Mapping[Any, int], groups: Sequence[Mapping[str, Any]], weights: Mapping[str, Source]
) -> tuple[dict[Any, str], str]:
    by_number: dict[int, str] = {}
    for group in groups:
        ids, named = _ids(group), group["param_names"]
        if len(ids) != len(named):
            return {}, f"a group has {len(ids)} parameters and {len(named)} param_names"
        by_number |= zip(ids, map(str, named), strict=True)
    owners = _owners(list(by_number.values()), weights)
    names = {key: by_number.get(n, str(n)) for key, n in numbers.items()}
    lacking = [name for name in names.values() if name not in owners]
    if lacking:
        return {}, f"its param_names are not those of the weights: {shown(lacking)}"
    return {key: owners[name] for key, name in names.items()}, ""


def _in_order(
    numbers: Mapping[Any, int], ids: Sequence[int], weights: Mapping[str, Source]
) -> tuple[dict[Any, str], str]:
    """By the order of the parameters, of which tied ones are one."""
    weights = untied(weights)[0]
    names = [name for name in weights if name.rpartition(".")[2] not in _BUFFERS]
    names = [name for name in names if "int" not in weights[name].dtype and weights[name].dtype != "bool"]
    if len(names) != len(ids) or list(ids) != sorted(ids):
        return {}, f"it has {len(ids)} parameters in its groups, the weights {len(names)} that are no buffers"
    by_number = dict(zip(ids, names, strict=True))
    lacking = [n for n in numbers.values() if n not in by_number]
    if lacking:
        return {}, f"it has state of parameters that are in none of its groups: {shown(lacking)}"
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


def step_of(value: Any) -> int | None:
    """The steps that a file says, as a whole number or a tensor of one without dims; None: it says none."""
    if hasattr(value, "read") and value.shape == () and value.dtype in (*_INTEGERS, "float32", "float64"):
        value = np.frombuffer(value.read(whole(())), dtype=value.dtype)[0].item()
    if type(value) is float and value.is_integer():
        value = int(value)
    return value if type(value) is int and 0 <= value < _MAX_STEP else None


def _constant(value: bool | int | float) -> Source:
    return number(value, "float64" if isinstance(value, float) else "int64")


def _is_like(key: str) -> bool:
    """Whether a state key is known to have the shape of its parameter."""
    return key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "sum")
