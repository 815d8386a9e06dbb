"""`shardwise train --model hf:...` from end to end: the command itself in every rank, as a launcher starts it."""

from __future__ import annotations

import contextlib
import functools
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.cli.main import main
from shardwise.models.hf import build
from shardwise.testing.world import World
from tests.parity import hf_models

LAUNCHED = {"TORCHELASTIC_RUN_ID": "x"}
"""A world of one, too, is one that a launcher has started."""
WORDS = "--seq 16 --batch 4 --steps 3 --data text.txt --eval-every 0 --checkpoint-every 0 --no-sample --device cpu"


@pytest.fixture(scope="module", autouse=True)
def warm(world: World) -> None:
    world.preload(__name__, "transformers.models.llama.modeling_llama")


def ranks_command(folder: str, words: list[str]) -> tuple[int, str]:
    said = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            main(words)
        except SystemExit as end:
            return int(end.code or 0), said.getvalue()
    return 0, said.getvalue()


def trained(world: World, folder: Path, model: str, plan: str) -> dict[str, list[float]]:
    """Losses, gradient norms and the evaluation's loss of three steps."""
    out = folder / f"{model.replace(':', '-')}-{plan.replace('/', '')}"
    words = ["train", "--model", model, "--plan", plan, "--out", str(out), *WORDS.split()]
    for code, said in world(sw.Plan.parse(plan).world, ranks_command, str(folder), words, **LAUNCHED):
        assert code == 0, said
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {key: [row[key] for row in rows if key in row] for key in ("loss", "grad_norm", "eval_loss")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text, a configuration without weights, and a directory with both."""
    folder = tmp_path_factory.mktemp("hf")
    (folder / "text.txt").write_text("".join(f"line {i}: {i * i} is the square of {i}\n" for i in range(400)))
    torch.manual_seed(3)
    module: Any = build(hf_models.config("llama", vocab_size=256))
    module.save_pretrained(folder / "weights")
    (folder / "config.json").write_text((folder / "weights" / "config.json").read_text())
    return folder


@functools.cache
def alone(world: World, folder: Path, model: str) -> dict[str, list[float]]:
    return trained(world, folder, model, "dp1")


@pytest.mark.share(2)
@pytest.mark.parametrize(("model", "plan"), [("hf:config.json", "fsdp2"), ("hf:weights", "pp2 / mb2")])
def test_a_plan_trains_as_one_process_does(world: World, folder: Path, model: str, plan: str) -> None:
    found, expected = trained(world, folder, model, plan), alone(world, folder, model)
    assert [len(numbers) for numbers in found.values()] == [3, 3, 1]
    for key, numbers in found.items():
        assert numbers == pytest.approx(expected[key], rel=1e-6), key


def test_the_weights_of_a_directory_are_used(world: World, folder: Path) -> None:
    first, other = (alone(world, folder, model)["loss"][0] for model in ("hf:weights", "hf:config.json"))
    assert abs(first - other) > 1e-4


@pytest.mark.parametrize(("model", "found"), [("vit", "a model of pictures"), ("t5", "an encoder and a decoder")])
def test_what_reads_no_text_is_refused_before_a_process_starts(capsys, model: str, found: str) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["train", "--model", f"hf:{model}", "--dry-run"])
    said = capsys.readouterr().err
    assert stop.value.code == 1 and f"found {found}" in said and "write a script for `shardwise run`" in said
