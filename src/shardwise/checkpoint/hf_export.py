"""`export_hf`: a placed model of `transformers` as a directory that `from_pretrained` loads.

Tensors are gathered one at a time and written by rank 0, in files of a bounded size; the directory appears when it is
complete.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from shardwise.checkpoint.hf_weights import INDEX, SINGLE
from shardwise.errors import DataError, ModelError, UsageError
from shardwise.models.hf import build
from shardwise.parallel.declared import declares
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.placed import Placed
from shardwise.plan.plan import AXES

MAX_BYTES = 5 * 10**9


def export_hf(placed: Placed, path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES) -> Path:
    """Write config.json and the weights of a placed model; a collective, every rank calls it.

    Args:
        placed: a model of `transformers`, under any plan.
        path: a directory that does not exist yet, or is empty.
        max_bytes: largest size of one file, unless a single tensor is larger.

    Returns:
        The directory.

    Raises:
        UsageError: the directory holds something.
        ModelError: the model is none of `transformers`.
        DataError: the directory cannot be written; on every rank.

    Cost: every parameter is gathered once; rank 0 holds one file's tensors, the others one tensor.

    >>> export_hf(placed, "runs/llama/hf")  # doctest: +SKIP
    """
    root, mesh, target = placed.parts[0].root, placed.mesh, Path(path)
    if not declares(root):
        raise ModelError(
            f"export_hf: found {type(root).__name__}, which is no model of transformers; needed a module of "
            "hf_factory(config); save other modules with a Store"
        )
    if any(_gathered(mesh, mesh.is_first and _is_occupied(target))):
        raise UsageError(
            f"export_hf: {target} exists and is not empty; needed a new directory, so that no file of another export "
            "stays among these; choose another path, or remove it"
        )
    with torch.device("meta"):
        model = cast(PreTrainedModel, build(cast(Any, root.config)))
    writer = _Writer(target, max_bytes, model) if mesh.is_first else None
    _send_all(placed, writer, set(model.state_dict()))
    problem = writer.finish() if writer is not None else ""
    problems = [said for said in _gathered(mesh, problem) if said]
    if problems:
        raise DataError(f"export_hf: {target} cannot be written ({problems[0]}); make room or choose another path")
    return target


def _is_occupied(target: Path) -> bool:
    """Nothing is raised here: the other ranks wait."""
    try:
        return bool(os.listdir(target))
    except (FileNotFoundError, ValueError):
        return False
    except OSError as error:  # a name that is too long fails where the directory is made, and with its reason
        return error.errno != errno.ENAMETOOLONG


def _gathered(mesh: Mesh, value: Any) -> list[Any]:
    if mesh.world == 1:
        return [value]
    values: list[Any] = [None] * mesh.world
    dist.all_gather_object(values, value)
    return values


def _send_all(placed: Placed, writer: _Writer | None, known: set[str]) -> None:
    """Each stage gathers its tensors, in the order of the stages; the first rank of a stage sends them to rank 0."""
    mesh = placed.mesh
    leads = all(mesh.index(axis) == 0 for axis in AXES if axis not in ("pp", "ep"))
    own: dict[str, torch.Tensor] = {}
    for part in placed.parts:
        tensors = {**dict(part.root.named_parameters()), **dict(part.root.named_buffers())}
        own |= {name: t for name, t in tensors.items() if name in known and name not in own}
    listed = {name: (tuple(t.shape), t.dtype) for name, t in own.items()}
    offers = _gathered(mesh, (mesh.index("pp"), mesh.rank, leads, listed))
    written: set[str] = set()
    for stage, sender, lead, table in sorted(offers, key=lambda offer: offer[:2]):
        if not lead:
            continue
        for name, (shape, dtype) in table.items():
            first = placed.ties.get(name, name)
            if first in written:
                continue
            written.add(first)
            whole = _whole(own[name]) if mesh.index("pp") == stage else None
            if sender != 0:
                if mesh.rank == sender:
                    assert whole is not None
                    dist.send(whole.contiguous(), 0)
                elif mesh.rank == 0:
                    whole = torch.empty(shape, dtype=dtype, device=mesh.device)
                    dist.recv(whole, sender)
            if writer is not None:
                assert whole is not None
                writer.add(first, whole)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


@dataclass
class _Writer:
    """Rank 0's side: fills files, and keeps the first thing that goes wrong until every rank has sent its tensors."""

    target: Path
    max_bytes: int
    model: PreTrainedModel
    pending: dict[str, torch.Tensor] = field(default_factory=dict)
    files: list[tuple[str, list[str]]] = field(default_factory=list)
    problem: str = ""
    num_bytes: int = 0
    total: int = 0

    def __post_init__(self) -> None:
        self.partial = self.target.with_name(f"{self.target.name}.partial-{uuid.uuid4().hex[:8]}")
        try:
            self.partial.mkdir(parents=True)
        except (OSError, ValueError) as error:  # a NUL in the path
            self.problem = str(error)

    def add(self, name: str, whole: torch.Tensor) -> None:
        """One parameter; stored as `transformers` stores it, which may be several tensors."""
        if self.problem:
            return
        stored = revert_weight_conversion(self.model, {name: whole.to("cpu", copy=True)})
        for key, tensor in stored.items():
            size = tensor.numel() * tensor.element_size()
            if self.pending and self.num_bytes + size > self.max_bytes:
                self._flush()
            self.pending[key] = tensor.contiguous().clone()
            self.num_bytes += size
            self.total += size

    def _flush(self) -> None:
        file = f"part-{len(self.files):05d}"
        try:
            save_file(self.pending, self.partial / file, metadata={"format": "pt"})
        except OSError as error:
            self.problem = str(error)
        self.files.append((file, list(self.pending)))
        self.pending, self.num_bytes = {}, 0

    def finish(self) -> str:
        """Name the files, write index and configuration, put the directory in its place; the problem, or nothing."""
        if not self.problem and self.pending:
            self._flush()
        if not self.problem:
            try:
                self._commit()
            except OSError as error:
                self.problem = str(error)
        if self.problem:
            shutil.rmtree(self.partial, ignore_errors=True)
        return self.problem

    def _commit(self) -> None:
        count = len(self.files)
        weight_map: dict[str, str] = {}
        for number, (file, keys) in enumerate(self.files, start=1):
            name = SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            os.rename(self.partial / file, self.partial / name)
            weight_map |= dict.fromkeys(keys, name)
        if count > 1:
            index = {"metadata": {"total_size": self.total}, "weight_map": weight_map}
            (self.partial / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        self.model.config.architectures = [type(self.model).__name__]
        self.model.config.save_pretrained(self.partial)
        if self.target.exists():
            self.target.rmdir()  # it was empty
        os.rename(self.partial, self.target)
