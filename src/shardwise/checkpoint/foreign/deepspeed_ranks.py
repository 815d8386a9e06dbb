"""Whether each file of a DeepSpeed checkpoint is that of the rank in its name; no file says it, but much tells.

Slices and sizes of the parts, the module's own weights (stages 1 and 2), and the devices that tensors were on.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.checkpoint.foreign.dtypes import FLOATS, cast_bytes
from shardwise.checkpoint.foreign.views import View
from shardwise.checkpoint.format import Box
from shardwise.errors import CheckpointError

Shapes = list[dict[str, tuple[int, ...]]]
"""Of the parameters of each group, in the order in which they are flattened."""
Slices = list[dict[str, tuple[int, int]]]
"""Group -> parameter -> (start in a rank's part, elements)."""
_DEVICE = re.compile(r"[a-z]+:(\d+)")
_WITNESSES, _SAMPLE, _DISTINCT = 4, 256, 3
"""Parameters of a rank that are compared with the module's; elements of each; values among them: zeros say nothing."""

_LAST_BIT = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-22, "float64": 2.0**-51}
_SMALLEST = 2.0**-24
"""Of the numbers that float16 has."""


@dataclass
class Place:
    """Where a parameter's elements are: (rank, start in its flat part, elements), in their order."""

    group: int
    runs: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass(kw_only=True)
class Rank:
    """What one rank stores: its flat parts of the fp32 weights and of each key of the state, by group."""

    weights: list[View]
    state: list[dict[str, View]]
    steps: list[Any]
    slices: Slices | None
    aligned: list[bool]
    """Of each group: gaps align its parameters, and only slices know where; none: of no group."""


def _exchanged(path: Path, found: str, other: Path, fix: str = "copy the files of all ranks again") -> CheckpointError:
    return CheckpointError(
        f"{path}: found {found} in {other.name}: two files have each other's name, or are of two saves; needed each "
        f"under that of its rank; {fix}"
    )


def check_devices(paths: Sequence[Path], tensors: Sequence[Sequence[View]]) -> None:
    """Compare the devices that the ranks' tensors were on: on every machine its ranks take them in their order.

    So among the first so many ranks no device has more than the one before it, however machines and ranks are dealt.

    Raises:
        CheckpointError: a rank's file was written on a device that another one's must come before.
    """
    told = [{int(m[1]) for view in views if (m := _DEVICE.fullmatch(view.device))} for views in tensors]
    if any(len(numbers) != 1 for numbers in told):
        return  # on the CPU, or as every rank sees one device only
    devices = [next(iter(numbers)) for numbers in told]
    order = sorted(set(devices))
    counts = [0] * len(order)
    for rank, device in enumerate(devices):
        at = order.index(device)
        counts[at] += 1
        if at and counts[at] > counts[at - 1]:
            first = next((r for r in range(rank, len(devices)) if devices[r] == order[at - 1]), rank)
            raise _exchanged(
                paths[rank], f"tensors of device {device}, and those of device {order[at - 1]}", paths[first],
                "copy the files of all ranks again; or, where ranks were given devices in another order, convert with "
                "DeepSpeed's zero_to_fp32.py and --from torch",
            )  # fmt: skip


def check_order(paths: Sequence[Path], shapes: Shapes, sizes: Sequence[Sequence[int]], ranks: Sequence[Slices]) -> None:
    """Compare what parts say of themselves with the places of their ranks (stages 1 and 2).

    Only the last parts of a group are shorter, as padding is cut off; and parameters are flattened in one order.

    Args:
        paths: of the ranks.
        shapes: see there.
        sizes: elements of each rank's part of each group.
        ranks: slices of each rank, empty where they are wrong; none: files without.

    Raises:
        CheckpointError: a part belongs before that of the rank before it.
    """
    for group, named in enumerate(shapes):
        number = {name: i for i, name in enumerate(named)}
        last = -1
        for rank, path in enumerate(paths):
            if rank and sizes[rank][group] > sizes[rank - 1][group]:
                raise _exchanged(path, f"{sizes[rank][group]} elements, and fewer", paths[rank - 1])
            slices = ranks[rank][group].items() if ranks else ()
            placed = sorted((start, number[name]) for name, (start, count) in slices if count and name in number)
            held = [at for _, at in placed]
            if held != sorted(held):
                break  # aligned, in another order than that of the shapes
            if held and held[0] < last:
                names = list(named)
                raise _exchanged(path, f"{names[held[0]]}, and {names[last]}, which comes after it,", paths[rank - 1])
            last = held[-1] if held else last


def check_module(
    paths: Sequence[Path], places: Mapping[str, Place], parts: Sequence[Sequence[View]], module: object
) -> None:
    """Compare a few elements of every rank with the module's weights, which stages 1 and 2 store beside them.

    Args:
        paths: of the ranks.
        places: of every parameter.
        parts: fp32 weights of each rank, by group.
        module: the state_dict of the model states.

    Cost: reads at most 4 times 256 elements a rank.

    Raises:
        CheckpointError: what the module has where a rank's part belongs is in the file of another rank, or nowhere.
    """
    found: list[list[tuple[int, str, int, int]]] = [[] for _ in paths]
    for name, place in places.items():
        start = 0
        for rank, at, count in place.runs:
            found[rank].append((count, name, start, at))
            start += count
    for rank, runs in enumerate(found):
        for count, name, start, at in sorted(runs, reverse=True)[:_WITNESSES]:
            weight = module.get(name) if isinstance(module, dict) else None
            if not isinstance(weight, View) or weight.dtype not in FLOATS or not weight.is_contiguous:
                continue
            count, group = min(count, _SAMPLE), places[name].group
            expected = _elements(weight, start, count, weight.dtype)
            if len(set(expected.tolist())) < _DISTINCT:
                continue
            if _alike(_elements(parts[rank][group], at, count, weight.dtype), expected, weight.dtype):
                continue
            for other, path in enumerate(paths):
                if other != rank and _alike(
                    _elements(parts[other][group], at, count, weight.dtype), expected, weight.dtype
                ):
                    raise _exchanged(paths[rank], f"no weights of {name} as the module has them, and those", path)
            raise CheckpointError(
                f"{paths[rank]}: found fp32 weights of {name} that are not the module's, rounded; needed the same: "
                "DeepSpeed laid them out in a way that is not known here, or the files are of two saves, or the module "
                "was changed after its last step (averaged, quantized); convert with DeepSpeed's zero_to_fp32.py and "
                "--from torch, or copy all files again"
            )


def _alike(found: NDArray[np.float64], expected: NDArray[np.float64], dtype: str) -> bool:
    """Whether most are the same within the last bit: of weights in another place a few are by chance."""
    last = _LAST_BIT[dtype]
    near = len(found) == len(expected) and np.isclose(found, expected, rtol=last, atol=_SMALLEST, equal_nan=True)
    return bool(2 * np.count_nonzero(near) > len(expected))


def _elements(view: View, start: int, count: int, dtype: str) -> NDArray[np.float64]:
    """Elements of a flattened tensor, rounded to a type, or fewer where it ends.

    Its checksum is that of who reads all of it.
    """
    numel = math.prod(view.shape)
    count = min(count, numel - start)
    if count <= 0:
        return np.zeros(0)
    place, num_bytes, _ = view.storage
    row = replace(view, storage=(place, num_bytes, None), shape=(numel,), stride=(1,))
    data = cast_bytes(row.read(Box((start,), (count,))), view.dtype, dtype, "fp32 weights")
    return cast_bytes(data, dtype, "float64", "fp32 weights").view(np.float64)
