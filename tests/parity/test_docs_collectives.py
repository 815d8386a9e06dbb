"""Every Python block of the documentation runs: each in as many processes as stands above it."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from pages import ROOT, Block, all_blocks
from shardwise.testing.world import World, WorldError

EARLIER = {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}
"""What the page says that torch called them before 2.13."""
BLOCKS = [block for block in all_blocks() if block.language == "python"]


def execute(text: str, plan: str, argv: list[str], directory: str) -> None:
    os.chdir(directory)
    sys.argv = argv
    sys.path.insert(0, str(ROOT / "examples"))  # where python puts a script's own folder
    names = {"torch": torch, "dist": dist, "sw": sw, "__name__": "__main__" if argv else "block"}
    if not plan:
        exec(compile(text, "block", "exec"), names)
        return
    with sw.open_mesh(sw.Plan.parse(plan)) as mesh:
        exec(compile(text, "block", "exec"), names | {"mesh": mesh})


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_block_runs(world: World, block: Block, tmp_path: Path) -> None:
    text = block.text
    for now, earlier in EARLIER.items():
        text = text if hasattr(dist, now) else re.sub(rf"\bdist\.{now}\b", f"dist.{earlier}", text)
    if torch.__version__ < "2.12" and "dist.all_to_all(" in text:  # the page says so
        with pytest.raises(WorldError, match="gloo does not support alltoall$"):
            world(block.world, execute, text, block.plan, block.argv, str(tmp_path))
        return
    world(block.world, execute, text, block.plan, block.argv, str(tmp_path))


def test_negative_control_a_wrong_block_fails(world: World, tmp_path: Path) -> None:
    wrong = "x = torch.ones(1)\ndist.all_reduce(x, group=mesh.group('tp'))\nassert x.item() == 1.0"
    with pytest.raises(WorldError, match="AssertionError"):
        world(2, execute, wrong, "tp2", [], str(tmp_path))
