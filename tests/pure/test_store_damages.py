"""Random damages of the newest checkpoint: each refused, file and tensor named, and the one before it found whole."""

from __future__ import annotations

import os
import random
import re
import resource
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from shardwise.checkpoint.directory import Directory
from shardwise.checkpoint.files import LOCAL
from shardwise.checkpoint.format import Box, DamagedError, whole
from shardwise.checkpoint.reading import MAX_OPEN, Reader
from tests.checkpoints import content, write_checkpoint
from tests.damages import FILES, KINDS, Case, damage, restore

COUNT = 10_000 if os.environ.get("SHARDWISE_SOAK") else 2_000
SEED = int(os.environ.get("SHARDWISE_SEED") or 2)


def write(parent: Path, step: int) -> Path:
    """Two blocks on rank 0, one on rank 1; other bits in every step."""
    kinds = {
        "model.big": ((800, 100), "float32"), "model.b": ((300,), "bfloat16"), "model.split": ((40, 11), "float32"),
        "optim.b.step": ((), "float32"), "model.ids": ((2, 2), "int64"), "model.none": ((0, 3), "float32"),
    }  # fmt: skip
    tensors = {name: content(f"{name}{step}", *kind) for name, kind in kinds.items()}
    divided = {name: [(0, whole(a.shape))] for name, a in tensors.items()}
    divided |= {"model.b": [(1, whole((300,)))], "optim.b.step": [(1, whole(()))], "model.none": []}
    divided["model.split"] = [(0, Box((0, 0), (30, 11))), (1, Box((30, 0), (10, 11)))]
    return write_checkpoint(parent, tensors, divided, {name: kind[1] for name, kind in kinds.items()}, step)


def newest_whole(store: Path) -> tuple[int, list[str]]:
    """The step that a load ends at, and why newer ones were passed over; as `Store.load_latest` goes."""
    listing = Directory(store, LOCAL).listing()
    said = [item.reason for item in listing.damaged]
    for path, manifest in listing.complete:
        try:
            with Reader(path, manifest) as reader:
                reader.verify()
        except DamagedError as error:
            said.append(str(error))
            continue
        return manifest.step, said
    return -1, said


def test_every_random_damage_is_named_and_the_checkpoint_before_it_is_used(tmp_path: Path) -> None:
    (tmp_path / "store.json").write_text("{}")
    write(tmp_path, 7)
    newest = write(tmp_path, 8)
    kept = {name: (newest / name).read_bytes() for name in FILES}
    (elsewhere := tmp_path / "elsewhere").mkdir()
    other = write(elsewhere, 9)
    seen: Counter[str] = Counter()
    located = 0
    for i in range(COUNT):
        done = damage(Case(newest, other, random.Random(1_000_000 * SEED + i)), kept)
        case = f"seed {SEED}, damage {i}: {done}"
        step, said = newest_whole(tmp_path)
        assert step == 7, case
        assert len(said) == 1 and "step-00000008" in said[0], (case, said)
        if done.kind == "of_another_save" and "holds step 9" in said[0]:
            assert "it was renamed" in said[0], case  # a whole manifest of step 9 in a directory of step 8
        else:
            assert any(f"/{name}" in said[0] for name in done.files), (case, said)
        if done.tensor:
            located += 1
            place = re.search(r"offset (\d+) to (\d+), tensor (.*): its bytes changed", said[0])
            assert place and int(place[1]) <= done.offset < int(place[2]), (case, said)
            assert done.tensor in place[3].split(", "), (case, said)
            assert f"written by rank {int(done.files[0][5:10])}" in said[0], (case, said)
        seen[done.kind] += 1
        restore(newest, kept)
    assert newest_whole(tmp_path) == (8, [])
    assert seen.keys() == {kind.__name__ for kind in KINDS} and located > COUNT // 12


def test_a_renamed_checkpoint_is_named_and_not_taken_for_another_step(tmp_path: Path) -> None:
    (tmp_path / "store.json").write_text("{}")
    write(tmp_path, 7)
    write(tmp_path, 8).rename(tmp_path / "step-00000009")
    step, [said] = newest_whole(tmp_path)
    assert step == 7 and "step-00000009: holds step 8" in said and "give it the name step-00000008" in said
    (tmp_path / "step-00000009").rename(tmp_path / "step-00000008")
    (tmp_path / "step-٠٠٠٠٠٠٠٩").mkdir()  # digits of another script are none
    assert newest_whole(tmp_path) == (8, [])


def test_a_checkpoint_of_more_ranks_than_a_process_may_open_files(tmp_path: Path) -> None:
    ranks = 3 * MAX_OPEN
    tensor = content("w", (ranks, 4), "float32")
    pieces = [(rank, Box((rank, 0), (1, 4))) for rank in range(ranks)]
    path = write_checkpoint(tmp_path, {"w": tensor, "v": tensor}, {"w": pieces, "v": pieces[::-1]},
                            {"w": "float32", "v": "float32"})  # fmt: skip
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + MAX_OPEN + 8, limits[1]))
    try:
        with Reader(path) as reader:
            for name in ("w", "v"):
                target = np.zeros(tensor.shape, dtype=tensor.dtype)
                reader.read(name, whole(tensor.shape), target)
                assert (target == tensor).all()
            reader.verify()
        (path / pieces_file(ranks - 1)).write_bytes(b"")
        with Reader(path) as reader, pytest.raises(DamagedError, match=pieces_file(ranks - 1)):
            reader.verify()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def pieces_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"
