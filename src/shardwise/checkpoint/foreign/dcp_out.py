"""`export_dcp`: a checkpoint of ours as a directory of torch.distributed.checkpoint, through its own writer."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from shardwise.checkpoint.foreign.export import Content, Exported, ExportOptions, finished, opened, settled
from shardwise.checkpoint.foreign.views import Source, num_bytes, slabs
from shardwise.checkpoint.foreign.writing import check_room, replacing, total_bytes
from shardwise.checkpoint.format import MODEL


class _Streamed(DefaultSavePlanner):
    """Plans with tensors that have no memory, and reads each when it is to be written."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        super().__init__()
        self._sources = sources

    def resolve_data(self, write_item: WriteItem) -> Any:
        """The tensor of an item, read now; of bytes what torch makes of them."""
        if write_item.type == WriteItemType.BYTE_IO:
            return super().resolve_data(write_item)
        return _read(self._sources[write_item.index.fqn])


def _read(source: Source) -> Tensor:
    data, at = bytearray(num_bytes(source)), 0
    for _, part in slabs(source):
        data[at : at + len(part)] = part.data
        at += len(part)
    dtype = getattr(torch, source.dtype)
    if not data:
        return torch.empty(source.shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(source.shape)


def _hollow(value: Any) -> Any:
    """A tree with tensors on meta in place of sources."""
    if isinstance(value, Mapping):
        return {key: _hollow(item) for key, item in value.items()}
    if hasattr(value, "read"):
        return torch.empty(value.shape, dtype=getattr(torch, value.dtype), device="meta")
    return value


def export_dcp(source: Path, target: Path, options: ExportOptions) -> Exported:
    """Write a directory that `torch.distributed.checkpoint.load` reads.

    It holds `{"model": ...}`, with the optimizer's state also `"optimizer": {"state": {parameter: ...}, "param_groups":
    [...]}` and `"step"`.

    Cost: as `export`, and memory of the largest tensor.

    Raises:
        CheckpointError, UsageError: as `export`.

    >>> export_dcp(Path("runs/a"), Path("dcp"), ExportOptions(to="dcp"))  # doctest: +SKIP
    """
    options = settled(target, replace(options, to="dcp"))
    with opened(source, options) as content, replacing(target, options.overwrite, source) as partial:
        check_room(target.parent, total_bytes(content.all), f"export to {target}")
        tree = content.tree(True) if options.optimizer else {"model": content.weights}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that it is one process: it is meant to be
            try:  # a file for each tensor: the writer keeps what it has written until a file is complete
                save(
                    _hollow(tree),
                    storage_writer=FileSystemWriter(partial, single_file_per_rank=False, sync_files=True),
                    planner=_Streamed(_by_path(content)),
                    no_dist=True,
                )
            except CheckpointException as error:  # wraps what went wrong; a full disk, or a damaged source
                raise _begun_by(next(iter(error.failures.values()))[0]) from error
        return finished(target, partial, content, sorted(path.name for path in partial.iterdir()))


def _begun_by(error: BaseException) -> BaseException:
    """What went wrong first: torch's writer of archives fails too (`unexpected pos`) when a full disk ends it."""
    while isinstance(error, RuntimeError) and error.__context__ is not None:
        error = error.__context__
    return error


def _by_path(content: Content) -> dict[str, Source]:
    """By the names that torch gives when it flattens the tree."""
    state = {f"optimizer.state.{n}.{k}": s for n, keys in content.optimizer.items() for k, s in keys.items()}
    return {**{MODEL + name: source for name, source in content.weights.items()}, **state}
