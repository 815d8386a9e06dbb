"""What lies beside what in a directory of a trainer: weights, the optimizer's state in a place of its own, the rest.

pytorch_model_fsdp_0/, optimizer_0/           Accelerate with FSDP, sharded: two directories of DCP
pytorch_model_fsdp.bin, optimizer.bin         the same, full; plain Accelerate has pytorch_model.bin
model.safetensors, optimizer.pt               a Trainer of transformers, with trainer_state.json
"""

from __future__ import annotations

import re
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from shardwise.checkpoint.foreign.opened import OpenFiles
from shardwise.checkpoint.foreign.state import Foreign, step_of
from shardwise.checkpoint.format import parse_json
from shardwise.errors import CheckpointError
from shardwise.findings import shown

METADATA = ".metadata"
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".th")
ASIDE = (
    "optimizer", "scheduler", "rng_state", "scaler", "training_args", "random_states", "sampler", "dl_state_dict",
    "custom_checkpoint", "recipe_state",
)  # fmt: skip
"""How files begin that trainers put beside the weights."""
_STATE = re.compile(r"optim(izer)?(_state)?(_\d+)?")
_MODEL = re.compile(r"(pytorch_model_fsdp|model)(_\d+)?")
META = "meta.pt"
"""What Lightning's strategies keep beside `.metadata`: the `.ckpt` without weights and optimizers."""
COMMON = "common.pt"
"""What Megatron's `torch_dist` keeps beside `.metadata`: the step, and all that is no tensor."""
LIGHTNING = "pytorch-lightning_version"
_PROGRESS = "trainer_state.json"
_MAX_PROGRESS = 256 * 1024 * 1024
_ADAPTER = "adapter_config.json"
_OF_ADAPTERS = (".lora_", ".ia3_", "prompt_embeddings", ".hada_", ".lokr_", ".oft_")
"""In the names that PEFT gives to what it trains."""


def is_state_file(name: str) -> bool:
    """Whether a file of torch.save holds an optimizer's state, by its name.

    >>> is_state_file("optimizer_1.bin"), is_state_file("optimizer_0"), is_state_file("pytorch_model.bin")
    (True, False, False)
    """
    stem, dot, suffix = name.rpartition(".")
    return dot + suffix in SUFFIXES and _STATE.fullmatch(stem) is not None


def is_weights_file(name: str) -> bool:
    """Whether a file of torch.save may hold weights, by its name."""
    return name.endswith(SUFFIXES) and not name.startswith(ASIDE) and not is_state_file(name)


def is_dcp(files: OpenFiles, path: Path) -> bool:
    """Whether it is a directory of torch.distributed.checkpoint."""
    return METADATA in files.names(path)


def states_in(files: OpenFiles, path: Path) -> list[Path]:
    """Files and directories of DCP that by their names hold an optimizer's state."""
    return [
        path / name
        for name in files.names(path)
        if is_state_file(name) or (_STATE.fullmatch(name) and _is_part(files, path / name))
    ]


def models_in(files: OpenFiles, path: Path) -> list[Path]:
    """Directories of DCP that by their names hold a model's weights."""
    return [path / n for n in files.names(path) if _MODEL.fullmatch(n) and _is_part(files, path / n)]


def checkpoints_in(files: OpenFiles, path: Path) -> list[str]:
    """Directories that hold files of weights, as those of a pipeline's several models."""
    inside = [name for name in files.names(path) if files.is_directory(path / name)]
    kinds = (".safetensors", *SUFFIXES, METADATA)
    return [name for name in inside if any(each.endswith(kinds) for each in files.names(path / name))]


def _is_part(files: OpenFiles, path: Path) -> bool:
    return files.is_directory(path) and is_dcp(files, path)


def model_in(files: OpenFiles, path: Path) -> Path:
    """The one directory of DCP that holds weights: this one, or one in it.

    Raises:
        CheckpointError: there are several.
    """
    found = [path] if is_dcp(files, path) else models_in(files, path)
    if len(found) > 1:
        raise CheckpointError(
            f"{path}: found {len(found)} models, {shown([part.name for part in found])}; needed one, for whose the "
            "optimizers are is not said: give the directory of the model that is meant, its weights are taken alone"
        )
    return found[0] if found else path


def aside(files: OpenFiles, path: Path) -> list[str]:
    """A note of what trainers put beside the weights; the optimizer's state has one of its own."""
    states = {state.name for state in states_in(files, path)}
    names = [name for name in files.names(path) if name.startswith(ASIDE) and name not in states]
    return [f"what a trainer kept in files of its own: {shown(names)}"] if names else []


def add_progress(files: OpenFiles, path: Path, found: Foreign) -> None:
    """Add the step that a Trainer of transformers wrote down, where the weights say none; or a note that it is none."""
    file = path / _PROGRESS
    if found.step or _PROGRESS not in files.names(path):
        return
    size = files.size(file)
    said = parse_json(files.read(file, 0, size), str(file)).get("global_step") if size <= _MAX_PROGRESS else None
    found.step = step_of(said) or 0
    if step_of(said) is None:
        what = f"has {size} bytes, at most {_MAX_PROGRESS} are read" if size > _MAX_PROGRESS else f"says {said!r:.80}"
        found.notes.append(f"the step, which is 0 here: {_PROGRESS} {what}, needed global_step, a whole number")


def of_adapters(files: OpenFiles, folder: Path, names: Collection[str]) -> list[str]:
    """A note, where weights are what PEFT trains beside a model, which is elsewhere.

    Args:
        files: they stay open.
        folder: that the weights' file lies in.
        names: of the weights.
    """
    if not names or not all(any(part in name for part in _OF_ADAPTERS) for name in names):
        return []
    base = f"no {_ADAPTER} beside them says which"
    with suppress(CheckpointError):  # a directory that may not be listed, or a file that is none: it was not asked for
        if _ADAPTER in files.names(folder) and (size := files.size(file := folder / _ADAPTER)) <= _MAX_PROGRESS:
            said = parse_json(files.read(file, 0, size), str(file)).get("base_model_name_or_path")
            base = f"{_ADAPTER} says {said!r:.200}" if said else base
    return [
        f"the base model, which these adapters of PEFT are trained beside: {base}; merge them there for a whole model"
    ]
