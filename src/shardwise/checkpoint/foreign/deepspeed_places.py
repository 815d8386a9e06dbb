"""Where each parameter's elements are in the ranks' flat parts: by slices or one after the other, or cut by rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from shardwise.checkpoint.foreign.deepspeed_ranks import Place, Rank, Shapes, check_order
from shardwise.errors import CheckpointError
from shardwise.findings import shown


def flattened(
    shapes: Shapes, ranks: Sequence[Rank], folder: Path, paths: Sequence[Path], round_robin: bool
) -> dict[str, Place]:
    """Stages 1 and 2: each flat group cut into equal parts, one a rank.

    Args:
        shapes: in the order in which they are flattened, round-robin order included.
        ranks: what each stores.
        folder: for messages.
        paths: of the ranks.
        round_robin: what the configuration says of `round_robin_gradients`.

    Raises:
        CheckpointError: groups, names or sizes that do not fit; parts in the order of other ranks.
    """
    places: dict[str, Place] = {}
    if any(len(rank.weights) != len(shapes) for rank in ranks):
        counts = sorted({len(rank.weights) for rank in ranks})
        raise CheckpointError(f"{folder}: found {counts} flat groups, needed {len(shapes)}: copy the files again")
    slices = [rank.slices for rank in ranks if rank.slices is not None and len(rank.slices) == len(shapes)]
    slices = slices if len(slices) == len(ranks) else []
    for group, named in enumerate(shapes):
        strange = [name for name in dict.fromkeys(name for held in slices for name in held[group]) if name not in named]
        if strange:
            raise CheckpointError(
                f"{folder}: found a part of {shown(strange)}, of which the model states say no shape; needed files of "
                "one save: copy all of them again"
            )
    sizes = [[view.shape[0] for view in rank.weights] for rank in ranks]
    by_slices = [
        bool(slices)
        and (
            any(ranks[0].aligned[group : group + 1])
            or not _in_another_order(named, [held[group] for held in slices], round_robin)
        )
        for group, named in enumerate(shapes)
    ]
    trusted = [[part if kept else {} for part, kept in zip(held, by_slices, strict=True)] for held in slices]
    check_order(paths, shapes, sizes, trusted)
    for group, named in enumerate(shapes):
        start, bounds = 0, _bounds(held[group] for held in sizes)
        for name, shape in named.items():
            count, place = math.prod(shape), Place(group)
            for number in range(len(ranks)):
                if by_slices[group]:
                    at, held = slices[number][group].get(name, (0, 0))
                else:
                    first, last = max(start, bounds[number]), min(start + count, bounds[number + 1])
                    at, held = first - bounds[number], max(0, last - first)
                place.runs += [(number, at, held)] if held else []
            start += count
            places[name] = place
        if not by_slices[group] and not 0 <= bounds[-1] - start < 4 * len(ranks):
            raise CheckpointError(
                f"{folder}: flat group {group} has {bounds[-1]} elements, needed the {start} of its parameters and "
                "little more; the files are not of one save, or DeepSpeed laid them out in another way"
            )
    return places


def _in_another_order(
    named: Mapping[str, tuple[int, ...]], ranks: Sequence[Mapping[str, tuple[int, int]]], round_robin: bool
) -> bool:
    """Whether slices have the parameters in another order than the shapes, and so are wrong.

    With `round_robin_gradients` DeepSpeed flattens in an order of its own and counts the slices in the model's, unless
    it aligns parameters. A rank before its place looks alike from outside: its own slices are in order.
    """
    number = {name: i for i, name in enumerate(named)}
    starts = ([(start, number[name]) for name, (start, count) in held.items() if count] for held in ranks)
    orders = [[at for _, at in sorted(held)] for held in starts]
    if any(order != sorted(order) for order in orders):
        return True
    filled = [order for order in orders if order]
    return round_robin and any(after[0] < before[-1] for before, after in zip(filled, filled[1:], strict=False))


def _bounds(sizes: Iterable[int]) -> list[int]:
    bounds = [0]
    for size in sizes:
        bounds.append(bounds[-1] + size)
    return bounds


def sharded(shapes: Shapes, ranks: Sequence[Rank], folder: Path) -> dict[str, Place]:
    """Stage 3: each parameter in as many parts as there are ranks, in flat groups that may be cut anywhere.

    Raises:
        CheckpointError: the parts do not add up to the parameters.
    """
    places: dict[str, Place] = {}
    by_group = len(shapes) == len(ranks[0].weights)
    at = 0
    for group, named in enumerate(shapes):
        at = 0 if by_group else at
        for name, shape in named.items():
            count = math.prod(shape)
            part = -(-count // len(ranks))
            spans = [(rank, at, min(part, count - rank * part)) for rank in range(len(ranks))]
            places[name] = Place(group, [span for span in spans if span[2] > 0])
            at += part
        held = ranks[0].weights[group].shape[0] if by_group else sum(view.shape[0] for view in ranks[0].weights)
        if (by_group or group == len(shapes) - 1) and held != at:
            raise CheckpointError(
                f"{folder}: flat group {group} has {held} elements a rank, needed {at}: the parameters over "
                f"{len(ranks)} ranks; copy the files of one save"
            )
    if not by_group and len(ranks[0].weights) != 1:
        raise CheckpointError(
            f"{folder}: found {len(ranks[0].weights)} flat groups for {len(shapes)} groups of parameters; needed one "
            "each: save again with a newer DeepSpeed"
        )
    return places
