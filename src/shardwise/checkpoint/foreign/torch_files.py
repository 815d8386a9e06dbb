"""Files of torch.save: a state_dict alone or beside an optimizer's, shards with an index, and Lightning's `.ckpt`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwise.checkpoint.foreign.beside import COMMON, LIGHTNING, META, SUFFIXES, is_weights_file
from shardwise.checkpoint.foreign.deepspeed_single import add_state
from shardwise.checkpoint.foreign.opened import OpenFiles
from shardwise.checkpoint.foreign.parts import check_alone, check_is_all, check_unflattened
from shardwise.checkpoint.foreign.safetensors import check_index, shards_of
from shardwise.checkpoint.foreign.sandbox import Job, read_values
from shardwise.checkpoint.foreign.state import Foreign, kind_of, step_of, weights_of
from shardwise.checkpoint.foreign.views import Source, View
from shardwise.errors import CheckpointError

MODEL_KEYS = ("model", "state_dict", "module", "model_state_dict", "model_state", "weights", "net")
OPTIMIZER_KEYS = (
    "optimizer", "optimizer_state_dict", "optim", "optimizer_state", "optim_state_dict", "optimizer_states", "opt",
)  # fmt: skip
STEP_KEYS = ("global_step", "step", "global_steps", "iteration", "iter_num", "steps")

_TRAINED, _AVERAGE = "current_model_state", "state_dict"
"""Where Lightning keeps the weights when it averages them: the optimizer's state is of the trained ones."""


def read_torch(files: OpenFiles, path: Path, in_order: bool, unsafe: bool = False, optimizer: bool = True) -> Foreign:
    """A file of torch.save; or a directory with one, or with an index and what it lists.

    Raises:
        CheckpointError: refused by the reader, or without a state_dict.
    """
    check_alone(files, path)
    if path.is_file():
        return of_value(_values(files, [path], unsafe)[0], str(path), in_order, optimizer)
    names = [name for name in files.names(path) if is_weights_file(name)]
    suffix = next((s for s in SUFFIXES if any(name.endswith(s) for name in names)), ".bin")
    shards, listed = shards_of(files, path, suffix)
    if listed is None:
        return of_value(_values(files, shards, unsafe)[0], str(shards[0]), in_order, optimizer)
    weights: dict[str, Source] = {}
    notes: list[str] = []
    for shard, value in zip(shards, _values(files, shards, unsafe), strict=True):
        found, said = _weights(value, str(shard))
        twice = [name for name in found if name in weights]
        if twice:
            raise CheckpointError(
                f"{shard}: {twice[0]} is there again, found first in another shard; needed once: copy the files again"
            )
        weights |= found
        notes += said
    check_index(path, listed, list(weights))
    return Foreign(kind="torch", weights=weights, notes=notes, files=len(shards))


def _values(files: OpenFiles, paths: list[Path], unsafe: bool) -> list[Any]:
    return read_values(files, [Job(path) for path in paths], unsafe=unsafe)


def _weights(value: Any, where: str) -> tuple[dict[str, Source], list[str]]:
    """As `weights_of`, of parameters that have names of their own."""
    weights, notes = weights_of(value, where)
    check_unflattened(weights, where)
    return weights, notes


def of_value(value: Any, where: str, in_order: bool, optimizer: bool = True) -> Foreign:
    """What a file of torch.save holds, whatever of the usual shapes it has.

    Raises:
        CheckpointError: there is no state_dict in it; it is a part of a model; or it is one file of DeepSpeed's ZeRO,
            whose fp32 weights and optimizer's state lie in others, and the state is wanted, or the weights are not
            there either.
    """
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{where}: found a {kind_of(value)}, needed a state_dict, or a dict that holds one; save model.state_dict()"
        )
    check_is_all(value, where)
    alone = _zero_alone(value, where, optimizer)
    lightning = LIGHTNING in value
    averaged = lightning and has_tensors(value.get(_TRAINED)) and has_tensors(value.get(_AVERAGE))
    inside = _TRAINED if averaged else next((key for key in MODEL_KEYS if has_tensors(value.get(key))), None)
    if inside is None:
        weights, notes = _weights(value, where)
        return Foreign(kind="torch", weights=weights, notes=notes, files=1)
    weights, notes = _weights(value[inside], f"{where}: {inside}")
    found = Foreign(kind="lightning" if lightning else "torch", weights=weights, notes=notes + alone, files=1)
    counted = _add_step(found, value, where)
    kept = next((key for key in (*OPTIMIZER_KEYS, *filter(_is_optimizer(value), value)) if value.get(key)), None)
    state = value.get(kept)
    if isinstance(state, list) and len(state) == 1:
        state = state[0]
    if isinstance(state, list):
        found.notes.append(f"the optimizer's state: there are {len(state)} optimizers, one can be taken over")
    elif state is not None:
        add_state(found, state, in_order, where, value.get("buffer_names"))
    empty = [key for key in OPTIMIZER_KEYS if not value.get(key)]
    average = [_AVERAGE] if averaged else []
    if averaged:
        found.notes.append(f"the weights' average, in {_AVERAGE}: those that were trained, in {_TRAINED}, are taken")
    others = [str(key) for key in value if key not in (inside, counted, kept, *average, *empty)]
    if others:
        found.notes.append(_elsewhere(others))
    return found


def _zero_alone(value: dict[Any, Any], where: str, optimizer: bool) -> list[str]:
    """A note, where this is a file of model states of DeepSpeed's ZeRO, which goes with files of optimizer states.

    Raises:
        CheckpointError: as `of_value`.
    """
    groups = value.get("param_shapes")  # None of stage 0
    groups = groups if isinstance(groups, list) else [groups]
    shapes = {name: shape for group in groups if isinstance(group, dict) for name, shape in group.items()}
    if not shapes:
        return []
    module = value.get("module")
    held = {n: list(v.shape) for n, v in (module if isinstance(module, dict) else {}).items() if isinstance(v, View)}
    lacking = [name for name, shape in shapes.items() if held.get(name) != shape]
    if lacking:
        name = lacking[0]
        raise CheckpointError(
            f"{where}: found {name} of shape {held.get(name)}, and {shapes[name]} in 'param_shapes': a file of "
            "DeepSpeed's ZeRO 3, whose weights are in files of optimizer states; needed *_model_states.pt and "
            "*_optim_states.pt of every rank: copy all of them, and give the directory that holds them"
        )
    if optimizer:
        raise CheckpointError(
            f"{where}: found a file of DeepSpeed's ZeRO, whose fp32 weights and optimizer's state are in files of "
            "optimizer states; needed *_optim_states.pt of every rank too: copy all, and give the directory that holds "
            "them; or give --no-optimizer, which takes the module's weights, in its type, alone"
        )
    return ["the fp32 weights and the optimizer's state: they are in files of ZeRO that are not here (--no-optimizer)"]


def add_meta(files: OpenFiles, path: Path, found: Foreign, unsafe: bool) -> None:
    """What is kept beside the parts of a directory of DCP: the step, and that it is Lightning's, or Megatron's."""
    for name in (META, COMMON):
        if name not in files.names(path):
            continue
        try:
            value = _values(files, [path / name], unsafe)[0]
        except CheckpointError as error:
            also = ", and whether this is Lightning's" if name == META else f", which is {found.step} here"
            found.notes.append(f"what {name} says, as the step{also}: {error}")
            continue
        if isinstance(value, dict) and (name == COMMON or LIGHTNING in value):
            _add_kept(found, value, name)


def _add_kept(found: Foreign, value: dict[Any, Any], name: str) -> None:
    counted = _add_step(found, value, name)
    if name == COMMON and counted is None:
        found.notes.append(f"the step, which is {found.step} here: {name} says none")
    if name == META:
        found.kind = "lightning"
    if name == META and found.optimizer and value.get(_TRAINED):
        found.optimizer = {}
        found.notes.append(f"the optimizer's state: it is of the weights in {META}, and those taken are their average")
    others = [str(key) for key in value if key != counted]
    found.notes += [_elsewhere(others)] if others else []


def _add_step(found: Foreign, value: dict[Any, Any], where: str) -> str | None:
    """Add the step that a dict says, or a note that it is none; its key, where it is one."""
    keys = [key for key in STEP_KEYS if value.get(key) is not None]
    counted = next((key for key in keys if step_of(value[key]) is not None), None)
    if counted is not None:
        found.step = step_of(value[counted]) or found.step
    elif keys:
        said = value[keys[0]]
        said = repr(said)[:80] if isinstance(said, int | float | str) else f"a {kind_of(said)}"
        found.notes.append(
            f"the step, which is {found.step} here: {where} says {keys[0]} {said}, needed a whole number"
        )
    return counted


def _is_optimizer(value: dict[Any, Any]) -> Callable[[Any], bool]:
    """Whether a key has what `optimizer.state_dict()` gives, whatever its name."""
    return lambda key: isinstance(value[key], dict) and {"state", "param_groups"} <= value[key].keys()


def _elsewhere(names: list[str]) -> str:
    return f"what a Shardwise run keeps elsewhere or has no use for: {', '.join(names[:12])}"


def has_tensors(value: Any) -> bool:
    """Whether it is a state_dict."""
    return isinstance(value, dict) and any(isinstance(item, View) for item in value.values())
