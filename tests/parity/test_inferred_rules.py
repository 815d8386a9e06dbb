from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwise.diagnose.rules import Trial, check_rules
from shardwise.errors import ModelError
from shardwise.model.infer import Inferred, infer_rules
from shardwise.model.rules_file import Rules, load_rules
from shardwise.parallel.compose import apply
from shardwise.parallel.mesh import open_mesh
from shardwise.plan.plan import Plan
from shardwise.testing.world import World
from tests.parity.grid import MODELS, SEQ
from tests.parity.inferred_models import TRIALS

ROOT = Path(__file__).parents[2]
ALL = TRIALS | {name: Trial(factory=MODELS[name], shape=(2, SEQ)) for name in ("decoder", "gpt")}
SHARDED = ("plain", "tied", "fused", "counting", "picture", "decoder", "gpt")
"""Models whose blocks work on shards of the sequence."""


@functools.cache
def inferred(name: str) -> Inferred:
    trial = ALL[name]
    return infer_rules(trial.factory, [torch.empty(trial.shape, dtype=getattr(torch, trial.dtype))])


@pytest.mark.share(4)
@pytest.mark.parametrize("name", ALL)
def test_inferred_rules_equal_one_process(world: World, name: str) -> None:
    worst = check_rules(ALL[name], inferred(name).rules, Plan.parse("tp2 / fp64"), world)
    assert worst.equal, worst


@pytest.mark.share(4)
@pytest.mark.parametrize("name", SHARDED)
def test_inferred_rules_equal_one_process_with_sequence_shards(world: World, name: str) -> None:
    assert inferred(name).no_sequence == ""
    worst = check_rules(ALL[name], inferred(name).rules, Plan.parse("tp2 seq / fp64"), world)
    assert worst.equal, worst


@pytest.mark.parametrize("name", sorted(ALL.keys() - set(SHARDED)))
def test_where_sequence_shards_would_be_wrong_they_are_refused(world: World, name: str) -> None:
    assert inferred(name).no_sequence
    with pytest.raises(ModelError, match="sequence shards"):
        check_rules(ALL[name], inferred(name).rules, Plan.parse("tp2 seq / fp64"), world)


def test_negative_control_a_wrong_rule_is_seen(world: World) -> None:
    rules = inferred("counting").rules
    wrong = rules | {"tower.*.before": "heads"}  # every rank has the same gradient, which is summed
    worst = check_rules(ALL["counting"], wrong, Plan.parse("tp2 / fp64"), world)
    assert worst.move > 1e-3, worst


def verb(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("shardwise")), "rules", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "160"}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, timeout=120)


def apply_file(path: str) -> str:
    plan = Plan.parse("tp2 / fp64")
    with open_mesh(plan) as mesh:
        placed = apply(ALL["chain"].factory, plan, mesh, rules=path)
        return placed.placements["all.0.weight"].text


def test_the_verb_marks_a_file_that_apply_takes(world: World, tmp_path: Path) -> None:
    words = ("tests.parity.inferred_models:Chain", "--sample", "4x12:float32", "--verify", "tp2")
    ran = verb(tmp_path, *words, "--out", "rules.toml")
    assert ran.returncode == 0, ran.stderr
    assert "equal to one process: loss" in ran.stdout and "written: rules.toml" in ran.stdout
    assert load_rules(tmp_path / "rules.toml").verified == "tp2"
    assert world(2, apply_file, str(tmp_path / "rules.toml")) == ["column-gather: Shard(0) over tp"] * 2


@pytest.mark.soak  # in every run: the wrong rule is seen, without the verb
def test_the_verb_does_not_mark_rules_that_are_wrong(tmp_path: Path) -> None:
    wrong = inferred("counting").rules | dict.fromkeys((f"tower.*.look.l{i}" for i in (1, 2, 3)), "column")
    Rules(styles=wrong).save(tmp_path / "rules.toml")
    before = (tmp_path / "rules.toml").read_text()
    ran = verb(tmp_path, "tests.parity.test_inferred_rules:counting", "--rules", "rules.toml", "--verify", "tp2")
    assert ran.returncode == 1, ran.stderr
    assert "DIFFERENT from one process" in ran.stdout
    assert (tmp_path / "rules.toml").read_text() == before


def counting() -> nn.Module:
    return ALL["counting"].factory()
