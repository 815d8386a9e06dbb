"""Small checkpoints written without a mesh: what tests of the format damage and read."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardwise.checkpoint.checksum import MASK, contribution, word_box, words_of
from shardwise.checkpoint.files import LOCAL
from shardwise.checkpoint.format import DTYPES, Box, Piece, whole
from shardwise.checkpoint.manifest import Manifest, TensorEntry
from shardwise.checkpoint.shardfile import Identity, Part, arrange, write_shard_file

IDENTITY = Identity(run="0123456789abcdef" * 2, save="fedcba9876543210" * 2, step=7, rank=0)
Array = NDArray[np.unsignedinteger]


def content(name: str, shape: Sequence[int], dtype: str) -> Array:
    """Random bits of a type, as unsigned integers; the same for the same name."""
    size = DTYPES[dtype].size
    draw = np.random.default_rng(zlib.crc32(name.encode()))
    return draw.integers(0, 2 ** (8 * size), tuple(shape), dtype=f"u{size}", endpoint=False)


def contributions(data: Array, box: Box) -> int:
    """What a part adds to a checksum, by the element's size alone."""
    dtype = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}[data.dtype.itemsize]
    flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    return contribution(words_of(flat, box.sizes, dtype), word_box(box, dtype))


Division = Mapping[str, Sequence[tuple[int, Box]]]
"""For each tensor, (rank, box) of its parts."""


def write_checkpoint(
    parent: Path, tensors: Mapping[str, Array], divided: Division, dtypes: Mapping[str, str], step: int = 7
) -> Path:
    """A complete checkpoint, `parent/step-00000007`."""
    path = parent / f"step-{step:08d}"
    path.mkdir()
    entries, pieces = [], {name: list[Piece]() for name in tensors}
    world = 1 + max(rank for parts in divided.values() for rank, _ in parts)
    for rank in range(world):
        parts = [
            Part(name, dtypes[name], tensors[name].shape, box)
            for name, found in divided.items()
            for owner, box in found
            if owner == rank and box.num_elements
        ]
        arranged = arrange(parts)
        data = b"".join(tensors[p.name][p.box.slices(whole(p.shape))].tobytes() for p, _ in arranged)
        identity = Identity(run=IDENTITY.run, save=IDENTITY.save, step=step, rank=rank)
        entries.append(write_shard_file(LOCAL, path, identity, arranged, memoryview(data)))
        for part, start in arranged:
            pieces[part.name].append(Piece(rank, part.box, start))
    manifest = Manifest(
        run=IDENTITY.run, save=IDENTITY.save, step=step, sequence=step, created="2026-01-01T00:00:00+00:00",
        plan="fsdp2", plan_fields={}, mesh={"dp_shard": world}, world=world, device="cpu",
        versions={"torch": "2.13.0"}, config={},
        scalars={"step": step}, metric=None, probe=None, files=tuple(entries),
        tensors={
            name: TensorEntry(
                tensors[name].shape, dtypes[name], contributions(tensors[name], whole(tensors[name].shape)) & MASK,
                tuple(found),
            )
            for name, found in pieces.items()
        },
    )  # fmt: skip
    (path / "manifest.json").write_bytes(manifest.encode())
    return path


def _splits() -> tuple[dict[str, Array], Division, dict[str, str]]:
    kinds = {
        "model.w": ((6, 5), "float32"), "model.b": ((3,), "bfloat16"), "optim.w.exp_avg": ((6, 5), "float32"),
        "optim.w.step": ((), "float32"), "model.ids": ((2, 2), "int64"),
    }  # fmt: skip
    tensors = {name: content(name, *kind) for name, kind in kinds.items()}
    halves = [(0, Box((0, 0), (4, 5))), (1, Box((4, 0), (2, 5)))]
    divided = {name: [(0, whole(a.shape))] for name, a in tensors.items()} | {"model.b": [(1, Box((0,), (3,)))]}
    return tensors, divided | {"model.w": halves, "optim.w.exp_avg": halves}, {n: k[1] for n, k in kinds.items()}


SPLITS = _splits()
"""Five small tensors over two ranks: arguments of `write_checkpoint`."""


def entries(store: Path) -> list[str]:
    """What saves and removals left in a store: who holds it is another matter."""
    return sorted(path.name for path in store.iterdir() if path.name != "lock")
