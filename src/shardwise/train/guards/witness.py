"""`Witness`: what the first steps of a run leave on disk for `shardwise verify`, one pair of files per rank.

A run that nobody verifies has none: a step then asks once, when it is made. The other side is
`shardwise.diagnose.verifying.trace`, which reads what is written here.

request.json   what the command line asks for        rank3.json   numbers, names and an index of the tensors
                                                     rank3.bin    the tensors' bytes, one after the other
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.launch.environment import witness_directory
from shardwise.launch.variables import variables
from shardwise.parallel.inputs import num_rows
from shardwise.parallel.layers.batchnorm import BatchNorm
from shardwise.parallel.placed import Placed
from shardwise.parallel.stages.stage import PassThrough
from shardwise.plan.plan import AXES
from shardwise.train.data.windows import shares
from shardwise.train.guards.fingerprints import Fingerprints, row_forms, row_names
from shardwise.train.norm import is_counted_here
from shardwise.train.state import TrainState
from shardwise.train.torch_private import shard_like
from shardwise.train.updates.optim import PREFIX

REQUEST = "request.json"
SHARE = 1e-3
"""Tensors below this share of their kind's usual size are compared with that: a gradient that is zero in exact
arithmetic (the bias of keys) is noise over noise."""
ULPS = 8
"""The least that a compared thing may differ by, in units of rounding (eps) of the type: what a longer sum may cost."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked of a run."""

    steps: int
    """Steps to record; the run ends after them."""
    micro_batches: int = 0
    """Micro-batches that a step's rows are cut into again, in place of the plan's; 0: as they come. On one rank."""
    ranks: int = 1
    """Shares of the rows, whose parts of one number form a micro-batch: the grouping of `ranks` data ranks."""
    shuffle: bool = False
    """Other rows in each micro-batch, in another order, and those in reverse: the same sums, rounded otherwise."""
    within: bool = False
    """`shuffle` keeps each micro-batch's rows together: batch norm's statistics are theirs."""
    rounding: float = 0.0
    """Share of its gradient's largest element by which each element is moved at most, once it is recorded: a sum is as
    far off as what it is a sum of, and an optimizer may make much of one that is zero in exact arithmetic. On one rank.
    """


class _File:
    """Appends tensors to a file and keeps where they are."""

    def __init__(self, path: Path) -> None:
        self.index: dict[str, dict[str, Any]] = {}
        self._file: BinaryIO = path.open("wb")

    def add(self, name: str, tensor: torch.Tensor, *, is_owner: bool) -> None:
        """Keep a tensor; of a copy of another rank's only its digest and two sums."""
        flat = tensor.detach().contiguous().cpu()
        data = flat.reshape(-1).view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        wide = flat.reshape(-1).double()
        entry: dict[str, Any] = {
            "dtype": str(flat.dtype).removeprefix("torch."),
            "shape": list(flat.shape),
            "digest": hashlib.sha256(data).hexdigest()[:16],
            "sums": [float(wide.norm()), float((wide * torch.arange(wide.numel()).double().cos()).sum())],
        }
        if is_owner:
            entry["at"] = self._file.tell()
            self._file.write(data)
        self.index[name] = entry

    def flush(self) -> None:
        self._file.flush()


class Witness:
    """Records steps; see the module."""

    def __init__(self, state: TrainState, request: Request, directory: Path) -> None:
        self._state, self._request = state, request
        self._placed: Placed = state.placed
        rank = self._placed.mesh.rank
        self._path = directory / f"rank{rank}.json"
        self._file = _File(directory / f"rank{rank}.bin")
        self._live = self._placed.named_parameters()
        self._prints = Fingerprints(self._placed)
        self._steps: list[dict[str, Any]] = []
        self._first_step = state.step
        self._generators = ""
        self._now: dict[str, Any] = {}
        self._model(0)
        self._write()

    def begin(self, micro: list[Any], zero: tuple[bool, ...]) -> tuple[list[Any], tuple[bool, ...]]:
        """A step starts; gives its micro-batches, cut again where the request says so."""
        if self._request.micro_batches:
            change = partial(regroup, request=self._request, seed=len(self._steps))
            micro = change(micro)
            if self._placed.randomness is not None:
                self._placed.randomness.renumber(change)
            zero = (False,) * len(micro)
        share = self._placed.mesh.size("cp") > 1  # each rank has a part of every row
        rows = [] if share else [row_names(m) for m, z in zip(micro, zero, strict=True) if not z]
        forms = [] if share else [form for m, z in zip(micro, zero, strict=True) if not z for form in row_forms(m)]
        self._now = {"rows": [name for names in rows for name in names], "sizes": list(map(len, rows)), "forms": forms}
        self._generators = _generators()
        self._prints.start()
        return micro, zero

    def losses(self, sums: Sequence[torch.Tensor]) -> None:
        """What a step's micro-batches gave: in which type they were added up, which may be coarser than the plan's."""
        self._now["loss_eps"] = max((torch.finfo(loss.dtype).eps for loss in sums), default=0.0)

    def gradients(self, grads: Mapping[str, torch.Tensor], factor: float) -> None:
        """The gradient of the step before clipping: `factor` makes it the mean one. Collective."""
        self._prints.stop()
        self._now["draws"] = self._generators != _generators()
        number = len(self._steps) + 1
        for name, grad in grads.items():
            live = self._live[name]
            self._file.add(f"grad/{number}/{name}", whole(grad, live) * factor, is_owner=self._is_owner(live))
        if self._request.rounding:
            round_otherwise(grads, self._request.rounding, seed=number)

    def finish(self, metrics: Any) -> None:
        """The update is made. Collective; after the last step that is asked for it ends the run.

        Raises:
            SystemExit: with code 0, on all ranks after the same step.
        """
        number = len(self._steps) + 1
        self._model(number)
        for key, tensor in self._state.optimizer.state_tensors().items():
            name = f"optim/{number}/{key.removeprefix(PREFIX)}"
            self._file.add(name, whole(tensor), is_owner=self._is_owner(tensor))
        for name, calls in self._prints.calls.items():
            self._file.add(f"out/{number}/{name}", torch.cat(calls), is_owner=True)
        numbers = {key: getattr(metrics, key) for key in ("loss", "weight", "grad_norm", "lr", "skipped")}
        self._steps.append({**self._now, **numbers, "modules": list(self._prints.calls)})
        self._write()
        if len(self._steps) == self._request.steps:
            raise SystemExit(0)

    def _is_owner(self, tensor: torch.Tensor) -> bool:
        return is_counted_here(tensor, self._placed.mesh)  # type: ignore[arg-type]  # any tensor has a layout

    def _model(self, number: int) -> None:
        """Parameters and buffers as they are now."""
        for kind, tensors in (("param", self._live), ("buffer", self._placed.named_buffers())):
            for name, tensor in tensors.items():
                self._file.add(f"{kind}/{number}/{name}", whole(tensor), is_owner=self._is_owner(tensor))

    def _write(self) -> None:
        placed, mesh = self._placed, self._placed.mesh
        named = [pair for part in placed.parts for pair in part.root.named_modules()]
        modules = {name: type(module).__name__ for name, module in named if not isinstance(module, PassThrough)}
        record = {
            "plan": str(placed.plan),
            "device": mesh.device.type,
            "backend": dist.get_backend(),
            "axes": {axis: mesh.size(axis) for axis in AXES},
            "index": {axis: mesh.index(axis) for axis in AXES},
            "first_step": self._first_step,
            "modules": modules,
            "blocks": list(placed.blocks),
            "order": list(placed.original_names),
            "ties": _ties(part.root for part in placed.parts),
            "batch_norm": any(isinstance(m, BatchNorm) for part in placed.parts for m in part.root.modules()),
            "steps": self._steps,
            "tensors": self._file.index,
        }
        self._file.flush()
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(record), encoding="utf-8")
        part.replace(self._path)


def open_witness(state: TrainState) -> Witness | None:
    """The witness of a run that is verified; None for all other runs, and for a second trainer in one script."""
    directory = witness_directory(variables())
    if directory is None or Path(directory, f"rank{state.placed.mesh.rank}.json").exists():
        return None
    request = Request(**json.loads(Path(directory, REQUEST).read_text(encoding="utf-8")))
    return Witness(state, request, Path(directory))


def write_request(request: Request, directory: Path) -> None:
    """What the command line leaves for the ranks."""
    Path(directory, REQUEST).write_text(json.dumps(asdict(request)), encoding="utf-8")


def whole(tensor: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """The full tensor, the same on every rank that holds a part of it; a local shard is laid out as `like`."""
    if isinstance(like, DTensor) and not isinstance(tensor, DTensor):
        tensor = shard_like(tensor, like)
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


@torch.no_grad()
def round_otherwise(grads: Mapping[str, torch.Tensor], share: float, *, seed: int) -> None:
    """Move each element of some gradients, in place, by a share at most of the largest of its tensor.

    A tensor of far smaller ones than usual is nothing but rounding of a sum of usual ones, and moves by as much as its
    gradient may differ by: an optimizer that divides by its size makes a step of it. What is exactly zero is a sum of
    nothing, and stays.

    >>> grads = {"a": torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)}
    >>> round_otherwise(grads, 0.25, seed=1)
    >>> float(grads["a"][0]), bool((grads["a"] - torch.tensor([0.0, 1.0, 2.0])).abs().max() <= 0.5)
    (0.0, True)
    >>> grads = {"k.bias": torch.full((100,), 1e-16).double(), "b": torch.ones(1).double(), "c": torch.ones(1).double()}
    >>> round_otherwise(grads, 1e-16, seed=1)
    >>> bool(4e-19 < (grads["k.bias"] - 1e-16).abs().max() < 8e-19)
    True
    """
    sizes = {name: float(grad.abs().max()) for name, grad in grads.items() if grad.numel()}
    usual = SHARE * sorted(sizes.values())[len(sizes) // 2] if sizes else 0.0
    draw = torch.Generator().manual_seed(seed)
    for name, size in sizes.items():
        grad = grads[name]
        moved = 2 * torch.rand(grad.shape, generator=draw, dtype=torch.float64) - 1
        grad.add_((moved * (share * (size if size >= usual else ULPS * usual))).to(grad) * (grad != 0))


def regroup(micro: Sequence[Any], request: Request, *, seed: int) -> list[Any]:
    """A step's rows in other micro-batches.

    Args:
        micro: the micro-batches of a single rank, one after the other.
        request: into how many, of which shares, in which order.
        seed: of the order.
    """
    counts = [num_rows(m) for m in micro]
    batch = micro[0] if len(micro) == 1 else _joined(micro, counts)
    rows = list(range(sum(counts)))
    draw = torch.Generator().manual_seed(seed)
    if request.shuffle and not request.within:
        rows = [rows[i] for i in torch.randperm(len(rows), generator=draw).tolist()]
    groups: list[list[int]] = [[] for _ in range(request.micro_batches)]
    for own in _cut(rows, request.ranks):
        for group, part in zip(groups, _cut(own, request.micro_batches), strict=True):
            group.extend(part)
    groups = [group for group in groups if group]
    if request.shuffle:
        groups = (
            [list(reversed(group)) for group in reversed(groups)] if not request.within else [g[::-1] for g in groups]
        )
    return [take_rows(batch, group, len(rows)) for group in groups]


def _cut(rows: list[int], parts: int) -> list[list[int]]:
    cut, start = [], 0
    for size in shares(len(rows), parts):
        cut.append(rows[start : start + size])
        start += size
    return cut


def _joined(micro: Sequence[Any], counts: Sequence[int]) -> Any:
    first = micro[0]
    if isinstance(first, torch.Tensor):
        per_row = all(m.dim() and m.shape[0] == count for m, count in zip(micro, counts, strict=True))
        return torch.cat(list(micro)) if per_row else first
    if isinstance(first, Mapping):
        return {key: _joined([m[key] for m in micro], counts) for key in first}
    if isinstance(first, tuple | list):
        return tuple(_joined([m[i] for m in micro], counts) for i in range(len(first)))
    return first


def take_rows(batch: Any, rows: list[int], total: int) -> Any:
    """Some rows of a batch of `total` rows, in this order; what has no rows stays."""
    if isinstance(batch, torch.Tensor):
        return batch[rows] if batch.dim() and batch.shape[0] == total else batch
    if isinstance(batch, Mapping):
        return {key: take_rows(value, rows, total) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        values = [take_rows(value, rows, total) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch


def _generators() -> str:
    """A digest of the states that unkeyed random numbers come from: torch's, numpy's and Python's own."""
    _, keys, *rest = np.random.get_state(legacy=True)
    parts = (torch.get_rng_state().numpy().tobytes(), np.asarray(keys).tobytes(), str(rest).encode())
    digest = hashlib.sha256(b"".join(parts) + str(random.getstate()).encode())
    return digest.hexdigest()


def _ties(roots: Iterable[nn.Module]) -> list[list[str]]:
    """Names that stand for one parameter, per parameter that has several."""
    names: dict[int, list[str]] = {}
    for root in roots:
        for name, parameter in root.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
    return [sorted(group) for group in names.values() if len(group) > 1]
