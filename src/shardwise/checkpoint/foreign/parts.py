"""Files that hold one rank's part of a model: slices of tensors under the names of whole ones, or some of the layers.

mp_rank_01/model_optim_rng.pt         Megatron: `args` says over how many ranks
mp_rank_00_model_states.pt            DeepSpeed: `mp_world_size`, and `num_experts` where experts are in other files
consolidated.00.pth                   Llama as it was published: a file for each rank
"""

from __future__ import annotations

import re
from collections.abc import Mapping
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
    """Refuse a file, or a directory of files, whose names are those of ranks.

    Raises:
        CheckpointError: naming them.
    """
    folder = path.parent if _RANKS.fullmatch(path.name) else path
    ranks = [name for name in files.names(folder) if _RANKS.fullmatch(name)] if folder.is_dir() else []
    numbers = [int(match[1]) for name in ranks if (match := _RANKS.fullmatch(name))]
    if any(numbers):
        raise CheckpointError(f"{folder}: found {shown(ranks)}, by the name parts of ranks; {_NEEDED}")


_NEEDED = "needed the whole model: merge the parts with the tools of who wrote them, and convert what these write"
