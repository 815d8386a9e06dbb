"""`add_beside`: the optimizer's state that lies in a file or a directory of its own, beside the weights."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.checkpoint.foreign.beside import (
    ASIDE,
    add_progress,
    aside,
    is_dcp,
    is_weights_file,
    of_adapters,
    states_in,
)
from shardwise.checkpoint.foreign.dcp import read_dcp_state
from shardwise.checkpoint.foreign.deepspeed_files import is_deepspeed
from shardwise.checkpoint.foreign.opened import OpenFiles
from shardwise.checkpoint.foreign.safetensors import SUFFIX
from shardwise.checkpoint.foreign.sandbox import Job, read_values
from shardwise.checkpoint.foreign.state import Foreign, Named, named_state, without_elements
from shardwise.checkpoint.foreign.torch_files import OPTIMIZER_KEYS
from shardwise.checkpoint.foreign.views import View
from shardwise.errors import CheckpointError
from shardwise.findings import shown


@dataclass(frozen=True, kw_only=True)
class Beside:
    """How state beside the weights is read: as the options of `convert` say."""

    optimizer: bool
    in_order: bool
    unsafe: bool


def add_beside(files: OpenFiles, path: Path, found: Foreign, how: Beside) -> None:
    """Add what lies beside the weights: the optimizer's state, or a note why not; the step, where a trainer wrote it.

    Args:
        files: they stay open.
        path: what the user gave: a directory of a trainer, or one file or directory of DCP in it.
        found: the weights that were read from it.
        how: see there.

    Raises:
        CheckpointError: the state is refused by its reader, or torn.
    """
    found.notes += of_adapters(files, path.parent if path.is_file() else path, found.weights)
    alone = path.is_file() or is_dcp(files, path)
    if alone:
        with suppress(CheckpointError):  # it was not asked for: a directory that may not be listed is no error
            _tell(found, [state for state in states_in(files, path.parent) if state != path], path.parent)
        return
    found.notes += aside(files, path) + _others(files, path, found)
    _check_elements(files, path, found)
    add_progress(files, path, found)
    states = states_in(files, path)
    names = shown([state.name for state in states])
    if not states:
        with suppress(CheckpointError):
            if is_deepspeed(files, path):
                found.notes.append("the optimizer's state: it is DeepSpeed's; --from deepspeed takes it, with weights")
    elif not how.optimizer:
        found.notes.append(f"the optimizer's state in {names}: as --no-optimizer says")
    elif found.optimizer:
        found.notes.append(f"the optimizer's state in {names}: that in the file of the weights is taken")
    elif len(states) > 1:
        found.notes.append(f"the optimizer's state: there are {len(states)} ({names}), one can be taken over")
    else:
        found.optimizer, reason = _state(files, states[0], found, how)
        found.notes += [f"{reason} (in {names})"] if reason else []


def _check_elements(files: OpenFiles, path: Path, found: Foreign) -> None:
    """Weights without elements are what ZeRO 3 leaves in a module: the real ones are in DeepSpeed's files beside them.

    Raises:
        CheckpointError: so it is.
    """
    empty = without_elements(found.weights)
    there = False
    with suppress(CheckpointError):
        there = bool(empty) and is_deepspeed(files, path)
    if there:
        raise CheckpointError(
            f"{path}: found {shown(empty)} without elements, as ZeRO 3 leaves weights in a module; needed those that "
            "DeepSpeed keeps in files of its own beside them: give --from deepspeed"
        )


def _others(files: OpenFiles, path: Path, found: Foreign) -> list[str]:
    """A note of files that by their names hold weights, and were not read: other forms of them, or of another model."""
    if found.kind not in ("safetensors", "torch"):
        return []
    read = {source.path.name for source in found.weights.values() if isinstance(source, View)}
    of_weights = (n for n in files.names(path) if is_weights_file(n) or n.endswith(SUFFIX))
    names = [name for name in of_weights if name not in read and not name.startswith(ASIDE)]
    return [f"other files of weights: {shown(names)}"] if names else []


def _tell(found: Foreign, states: list[Path], directory: Path) -> None:
    """Weights that were given alone, and not their state, which is there: say so."""
    if states and not found.optimizer:
        names = shown([state.name for state in states])
        found.notes.append(f"the optimizer's state: it is in {names}; give {directory}, which holds both")


def _state(files: OpenFiles, path: Path, found: Foreign, how: Beside) -> tuple[Named, str]:
    """State by the weights' names; or nothing, and the reason."""
    by_name = found.kind == "safetensors"
    try:
        if is_dcp(files, path):
            return read_dcp_state(files, path, found.weights, how.in_order and not by_name)
        value = read_values(files, [Job(path)], unsafe=how.unsafe)[0]
    except CheckpointError as error:
        raise CheckpointError(f"{error}; or give --no-optimizer, which takes the weights alone") from error
    return named_state(_inner(value), found.weights, how.in_order, sorted_names=by_name)


def _inner(value: Any) -> Any:
    """A state_dict of an optimizer, which some put into a dict or a list of one."""
    if isinstance(value, dict) and "state" not in value:
        value = next((value[key] for key in OPTIMIZER_KEYS if value.get(key)), value)
    return value[0] if isinstance(value, list) and len(value) == 1 else value
