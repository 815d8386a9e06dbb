"""Files that hold one rank's part of a model: slices of tensors under the names of whole ones, or some of the layers.

mp_rank_01/model_optim_rng.pt         Megatron: `args` says over how many ranks
mp_rank_00_model_states.pt            DeepSpeed: `mp_world_size`, and `num_experts` where experts are in other files
consolidated.00.pth                   Llama as it was published: a file for each rank
layer_03-model_states.pt              DeepSpeed's pipelines: a file for each layer
layer_0_expert_2_mp_rank_00_model_states.pt    its experts: a file for each
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardwise.checkpoint.foreign.opened import OpenFiles
from shardwise.checkpoint.foreign.sandbox import Instance
from shardwise.errors import CheckpointError
from shardwise.findings import shown

_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
_DEEPSPEED = "mp_world_size"
_EXPERTS = "num_experts"
_RANKS = re.compile(r"consolidated\.(\d+)\.(pth|pt)")
_PIECES = re.compile(r"(layer_\d+|expert_\d+)[-_].*model_states\.pt")
_FOLDERS = re.compile(r"mp_rank_\d+(_\d+)*|tp_rank_\d+(_(pp|dp|ep)_rank_\d+)*")
_FLAT = re.compile(r"_?flat_param(_\d+)?")


def check_is_all(value: Mapping[Any, Any], where: str) -> None:
    """Refuse what says of itself that other files have more of the model.

    Args:
        value: what a file of torch.save holds.
        where: for messages.

    Raises:
        CheckpointError: naming what says so.
    """
    args = value.get("args")
    known: Any = args if isinstance(args, Instance | dict) else {}
    sizes = {f"args.{key}": known.get(key) for key in _SIZES} | {_DEEPSPEED: value.get(_DEEPSPEED)}
    said = [f"{key} {size}" for key, size in sizes.items() if type(size) is int and size > 1]
    if _DEEPSPEED in value and value.get(_EXPERTS):
        said.append(f"{_EXPERTS} {str(value[_EXPERTS])[:40]}, which are in files of their own")
    if said:
        raise CheckpointError(f"{where}: found a part of a model ({shown(said)}); {_NEEDED}")


def check_alone(files: OpenFiles, path: Path) -> None:
    """Refuse a file, or a directory of files, whose names are those of ranks, layers or experts.

    Raises:
        CheckpointError: naming them.
    """
    names = [path.name] if path.is_file() else files.names(path)
    if pieces := [name for name in names if _PIECES.fullmatch(name)]:
        raise CheckpointError(f"{path}: found {shown(pieces)}, by the name layers or experts of a model; {_NEEDED}")
    own = path.parent if path.is_file() else path
    beside: list[str] = []
    with suppress(CheckpointError):  # a directory above that may not be listed says nothing
        beside = files.names(own.parent) if _FOLDERS.fullmatch(own.name) else []
    check_folders(own.parent, beside)
    folder = path.parent if _RANKS.fullmatch(path.name) else path
    ranks = [name for name in files.names(folder) if _RANKS.fullmatch(name)] if folder.is_dir() else []
    numbers = [int(match[1]) for name in ranks if (match := _RANKS.fullmatch(name))]
    if any(numbers):
        raise CheckpointError(f"{folder}: found {shown(ranks)}, by the name parts of ranks; {_NEEDED}")


def check_folders(path: Path, names: Sequence[str]) -> None:
    """Refuse directories that are named after ranks, where there are several.

    Raises:
        CheckpointError: naming them.
    """
    ranks = [name for name in names if _FOLDERS.fullmatch(name)]
    if len(ranks) > 1:
        raise CheckpointError(f"{path}: found {shown(ranks)}, by the name parts of ranks; {_NEEDED}")


def check_unflattened(names: Iterable[str], where: str) -> None:
    """Refuse what holds parameters one after the other, without their names: FSDP1's, and fairscale's.

    Raises:
        CheckpointError: naming it.
    """
    flat = [name for name in names if _FLAT.fullmatch(name.rpartition(".")[2])]
    if flat:
        raise CheckpointError(
            f"{where}: found {shown(flat)}, in which FSDP1's LOCAL_STATE_DICT has parameters one after the other, "
            "without their names; needed each by itself: save with SHARDED_STATE_DICT or FULL_STATE_DICT"
        )


_NEEDED = "needed the whole model: merge the parts with the tools of who wrote them, and convert what these write"
