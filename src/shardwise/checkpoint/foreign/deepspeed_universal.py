"""DeepSpeed's universal checkpoints, as its `ds_to_universal` makes them of a ZeRO directory: files for each parameter.

latest_universal                                     names the tag, as global_step100_universal
global_step100_universal/*_model_states.pt           as in the ZeRO directory
.../zero/up.weight/fp32.pt, exp_avg.pt, ..., step.pt {"param": tensor}, or a tensor, flat where it was stage 3
.../zero/optimizer_state.pt                          stage 3: the step
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.checkpoint.foreign.deepspeed_files import UNIVERSAL
from shardwise.checkpoint.foreign.deepspeed_ranks import Rank
from shardwise.checkpoint.foreign.opened import OpenFiles
from shardwise.checkpoint.foreign.sandbox import Job, read_values
from shardwise.checkpoint.foreign.views import View
from shardwise.errors import CheckpointError
from shardwise.findings import shown

_WEIGHTS, _STEP, _COMMON = "fp32.pt", "step.pt", "optimizer_state.pt"


def universal_parts(
    files: OpenFiles, folder: Path, shapes: Mapping[str, tuple[int, ...]], unsafe: bool
) -> tuple[list[Path], list[Rank]]:
    """Every parameter as the one part of a rank: the directory of each, and what it holds, in the order of the shapes.

    Raises:
        CheckpointError: a parameter has no fp32 weights there, or tensors of another size.
    """
    root = folder / UNIVERSAL
    paths = {name: root / name for name in shapes}
    there = {name: files.names(path) if files.is_directory(path) else [] for name, path in paths.items()}
    lacking = [name for name, held in there.items() if _WEIGHTS not in held]
    if lacking:
        raise CheckpointError(
            f"{root}: found no {_WEIGHTS} of {shown(lacking)}, needed one in a directory of that name for each "
            "parameter of the model states; copy all files again, or convert the ZeRO directory that it was made of"
        )
    held = {name: [path / file for file in there[name] if file.endswith(".pt")] for name, path in paths.items()}
    common = root / _COMMON
    jobs = [file for kept in held.values() for file in kept] + [common] * (_COMMON in files.names(root))
    values = dict(zip(jobs, read_values(files, [Job(file) for file in jobs], unsafe=unsafe), strict=True))
    counted = _counted(values.get(common))
    ranks = []
    for name, path in paths.items():
        rows = {file.stem: _row(values[file], shapes[name], file) for file in held[name] if file.name != _STEP}
        weights, step = rows.pop(Path(_WEIGHTS).stem), values.get(path / _STEP, counted)
        ranks.append(Rank(weights=[weights], state=[rows], steps=[step], slices=None, aligned=[]))
    return [*paths.values()], ranks


def _row(value: Any, shape: tuple[int, ...], path: Path) -> View:
    """A parameter's elements as one row; stage 3 writes them so."""
    found = value.get("param") if isinstance(value, dict) else value
    numel = math.prod(shape)
    if not isinstance(found, View) or found.shape not in (shape, (numel,)) or not found.is_contiguous:
        what = found.shape if isinstance(found, View) else type(found).__name__
        raise CheckpointError(
            f"{path}: found {what}, needed a tensor of {shape}, as the model states say; copy the files of one save"
        )
    return replace(found, shape=(numel,), stride=(1,))


def _counted(common: Any) -> Any:
    """The step of stage 3, which it keeps with the state of its first flat group."""
    for key in ("optimizer_state_dict", "state", 0, "step"):
        common = common.get(key) if isinstance(common, dict) else None
    return common
