"""`--plan auto` of `shardwise train` and `run`: the planner's choice, for sizes and for modules that are read."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path

import pytest

from shardwise.cli.main import main
from shardwise.cli.options.auto import this_machine
from shardwise.cli.options.config import read_configuration
from shardwise.cli.options.derive import Surroundings, derive
from shardwise.errors import ConfigError, ExitCode
from shardwise.hardware.cluster import GIB
from shardwise.plan.plan import Plan

HERE = Surroundings(device="cpu", num_devices=0, device_reason="none seen", now=datetime(2026, 1, 2))


GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 64}


def test_train_plans_a_module_that_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    sizes = [f"model.factory=hf:{tmp_path}/config.json", "data.seq_len=32", "train.global_batch=4"]
    words = ["plan.shorthand=auto", *sizes]
    found = derive(read_configuration(None, sets=words), HERE)
    assert found.plan.world == 2 and found.plan.batch.global_size == 4 and found.reasons
    given = derive(read_configuration(None, sets=sizes), HERE)  # not asked for: nothing is read, and data parallel
    assert str(given.plan).startswith("dp2") and "reads the module" in str(given.configuration.origin("plan.shorthand"))
    with pytest.raises(ConfigError, match="needs devices of a known name"):
        derive(read_configuration(None, sets=words), replace(HERE, device="cuda", num_devices=2))


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "script.py").touch()
    return str(tmp_path / "script.py")


@pytest.mark.parametrize("words", [["auto"], ["--plan", "auto"]])
def test_run_plans_for_the_model_it_is_told(script: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--nproc", "2", "--model", "tiny", "--seq", "64", "--global-batch", "8", "--dry-run", "--json"]
    with pytest.raises(SystemExit) as ended:
        main(["run", script, *words, *sizes])
    out, err = capsys.readouterr()
    answer = json.loads(out)
    plan = Plan.parse(answer["plan"]["shorthand"])
    assert not ended.value.code and plan.world == 2 and plan.batch.global_size == 8
    assert str(plan) in answer["command"] and err == f"plan auto: {plan}\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["auto"], "needs the script's model, found no --model"),
        (["dp2", "--model", "tiny"], "found the plan `dp2`; only `auto` needs a model"),
    ],
)
def test_what_run_cannot_know_is_asked_for(
    script: str, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", script, *words])
    assert ended.value.code == ExitCode.USAGE and says in capsys.readouterr().err


def test_cores_have_the_memory_of_this_machine(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A share for each rank; 8 GiB were taken for each, on a machine of any size."""
    words = [
        "run",
        script,
        "auto",
        "--model",
        "tiny",
        "--seq",
        "64",
        "--global-batch",
        "8",
        "--nproc",
        "4",
        "--dry-run",
    ]
    for gib, code in ((2, ExitCode.REFUSED), (8, ExitCode.OK)):
        monkeypatch.setattr("shardwise.cli.options.auto.host_memory", partial(int, gib * GIB))
        assert this_machine(None, 4).device.memory == gib * GIB / 4
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert (ended.value.code or 0) == code
