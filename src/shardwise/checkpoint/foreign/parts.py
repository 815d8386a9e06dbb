"""Files that hold one rank's part of a model: slices of tensors under the names of whole ones, or some of the layers.

mp_rank_01/model_optim_rng.pt         Megatron: `args` says over how many ranks
mp_rank_00_model_states.pt            DeepSpeed: `mp_world_size`, and `num_experts` where experts are in other files
consolidated.00.pth                   Llama as it was published: a file for each rank
layer_03-model_states.pt              DeepSpeed's pipelines: a file for each layer
layer_0_expert_2_mp_rank_00_model_states.pt    its experts: a file for each
model_rank1.pt, model_world_size_2_rank_1.pt   a script, or verl: a file for each rank
__0_0.distcp                       DCP: what one rank wrote of a directory
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardwise.checkpoint.foreign.opened import OpenFiles
from shardwise.checkpoint.foreign.sandbox import Instance
from shardwise.checkpoint.foreign.views import Source
from shardwise.errors import CheckpointError
from shardwise.findings import shown

_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
_DEEPSPEED = "mp_world_size"
_EXPERTS = "num_experts"
_RANKS = re.compile(r"consolidated\.(\d+)\.(pth|pt)")
_PIECES = re.compile(r"(layer_\d+|expert_\d+)[-_].*model_states\.pt")
_FOLDERS = re.compile(r"mp_rank_\d+(_\d+)*|tp_rank_\d+(_(pp|dp|ep)_rank_\d+)*")
OF_RANK = re.compile(r"(.*?(?<![a-zA-Z])rank[-_]?)(\d{1,6})(\D.*)?", re.IGNORECASE)
_WORLD = re.compile(r"world[-_]?size[-_]?0*([2-9]|\d{2,6})(?!\d)", re.IGNORECASE)
_DCP = re.compile(r"__\d+_\d+\.distcp")
NORM = re.compile(r"(^|[._])(\w*norm\d*|ln_\w+)\.weight$", re.IGNORECASE)
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
        raise CheckpointError(f"{where}: found a part of a model ({shown(said)}); {NEEDED}")


def check_alone(files: OpenFiles, path: Path) -> None:
    """Refuse a file, or a directory of files, whose names are those of ranks, layers or experts.

    Raises:
        CheckpointError: naming them.
    """
    if _DCP.fullmatch(path.name):
        raise CheckpointError(
            f"{path}: found what one rank wrote of a directory of DCP, needed all, and the .metadata that says what is "
            "where: give the directory"
        )
    names = [path.name] if path.is_file() else files.names(path)
    if pieces := [name for name in names if _PIECES.fullmatch(name)]:
        raise CheckpointError(f"{path}: found {shown(pieces)}, by the name layers or experts of a model; {NEEDED}")
    own = path.parent if path.is_file() else path
    beside: list[str] = []
    with suppress(CheckpointError):  # a directory above that may not be listed says nothing
        beside = files.names(own.parent) if _FOLDERS.fullmatch(own.name) else []
    check_folders(own.parent, beside)
    folder = path.parent if _RANKS.fullmatch(path.name) else path
    ranks = [name for name in files.names(folder) if _RANKS.fullmatch(name)] if folder.is_dir() else []
    numbers = [int(match[1]) for name in ranks if (match := _RANKS.fullmatch(name))]
    if any(numbers):
        raise CheckpointError(f"{folder}: found {shown(ranks)}, by the name parts of ranks; {NEEDED}")


def check_lone(files: OpenFiles, path: Path) -> list[str]:
    """Refuse a file that by its name is one rank's, where others' lie beside it or its name says that there are some.

    Args:
        files: they stay open.
        path: of the file.

    Returns:
        A note, where it is taken for the whole model though its name is that of a rank.

    Raises:
        CheckpointError: naming the files.
    """
    own = OF_RANK.fullmatch(path.name)
    if own is None or path.name.endswith("_states.pt"):  # DeepSpeed's say in themselves of how many they are
        return []
    names = [path.name]
    with suppress(CheckpointError):  # a directory that may not be listed says nothing
        names = files.names(path.parent)
    matches = [match for name in names if (match := OF_RANK.fullmatch(name))]
    ranks = {int(match[2]): match[0] for match in matches if (match[1], match[3]) == (own[1], own[3])}
    if (len(ranks) > 1 and sorted(ranks) == list(range(len(ranks)))) or _WORLD.search(path.name):
        raise CheckpointError(
            f"{path}: found {shown([ranks[rank] for rank in sorted(ranks)])}, by the name parts of ranks; {NEEDED} "
            "(where each rank saved the whole model, give a copy of one file without `rank` in its name)"
        )
    return [
        f"other ranks' parts, if there are any: {path.name} has the name of a rank, and is taken for the whole model"
    ]


def narrow_norms(weights: Mapping[str, Source]) -> str:
    """A note, where norms have the same fraction of a width that matrices have: FSDP cuts the first dim of each.

    A norm's weight has the width of what it norms, and that is the last dim of the matrix which reads it.
    """
    widths = {source.shape[-1] for source in weights.values() if len(source.shape) == 2}
    norms = {n: s.shape[0] for n, s in weights.items() if len(s.shape) == 1 and NORM.search(n)}
    sizes = set(norms.values())
    if len(norms) < 2 or len(sizes) != 1 or sizes & widths or not (size := sizes.pop()):
        return ""
    ranks = sorted(width // size for width in widths if width % size == 0)
    if not ranks:
        return ""
    return (
        f"perhaps other ranks' parts: {shown(list(norms))} have {size} elements, and matrices are {size * ranks[0]} "
        f"wide, as where FSDP cut a model over {ranks[0]} ranks; it is taken for the whole model"
    )


def check_folders(path: Path, names: Sequence[str]) -> None:
    """Refuse directories that are named after ranks, where there are several.

    Raises:
        CheckpointError: naming them.
    """
    ranks = [name for name in names if _FOLDERS.fullmatch(name)]
    if len(ranks) > 1:
        raise CheckpointError(f"{path}: found {shown(ranks)}, by the name parts of ranks; {NEEDED}")


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


NEEDED = "needed the whole model: merge the parts with the tools of who wrote them, and convert what these write"
