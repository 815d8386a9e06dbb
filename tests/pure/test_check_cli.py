from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from shardwise.cli.check import check
from shardwise.errors import ExitCode, UsageError
from shardwise.plan.plan import Plan

app = typer.Typer()
app.command()(check)


def run(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})


def test_a_legal_plan() -> None:
    result = run("pp2 fsdp4 tp2 / mb8 / bf16", "--model", "llama-8b", "--world", "16", "--json")
    assert result.exit_code == ExitCode.OK
    plan = Plan.parse("pp2 fsdp4 tp2 mb8 bf16")
    assert json.loads(result.stdout) == {
        "plan": "pp2 fsdp4 tp2 / 1f1b mb8 / bf16",
        "hash": plan.hash,
        "model": "llama-8b",
        "world": 16,
        "legal": True,
        "findings": [],
    }


def test_a_refused_plan() -> None:
    result = run("fsdp4 tp8", "--model", "tiny", "--world", "16", "--json")
    assert result.exit_code == ExitCode.REFUSED
    answer = json.loads(result.stdout)
    assert not answer["legal"]
    assert {f["id"] for f in answer["findings"]} == {"world.size", "tp.kv-heads"}
    assert all(set(f) == {"id", "severity", "what", "evidence", "fix"} for f in answer["findings"])


def test_remarks_do_not_refuse() -> None:
    result = run("dp2", "--global-batch", "3", "--json")
    assert result.exit_code == ExitCode.OK
    assert [f["severity"] for f in json.loads(result.stdout)["findings"]] == ["note"]


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_shorthand_that_does_not_parse(flags: list[str]) -> None:
    result = run("fspd4", *flags)
    assert result.exit_code == ExitCode.REFUSED
    assert "plan.syntax" in result.stdout
    assert "did you mean 'fsdp'" in " ".join(result.stdout.split())


def test_usage_errors_are_raised_for_main() -> None:
    unknown = run("dp2", "--model", "lama-8b").exception
    assert isinstance(unknown, UsageError)
    assert unknown.exit_code == ExitCode.USAGE
    assert "did you mean 'llama-8b'" in str(unknown)
    missing = run("none.toml").exception
    assert isinstance(missing, UsageError)


def test_files(tmp_path: Path) -> None:
    Plan.parse("fsdp2 bf16").save(tmp_path / "plan.toml")
    (tmp_path / "model.toml").write_text('preset = "tiny"\nnum_layers = 3\n')
    result = run(str(tmp_path / "plan.toml"), "--model", str(tmp_path / "model.toml"), "--json")
    assert result.exit_code == ExitCode.OK
    assert json.loads(result.stdout)["plan"] == "fsdp2 / bf16"


def test_the_table_for_people() -> None:
    result = run("fsdp4 tp2", "--model", "tiny", "--world", "4")
    assert result.exit_code == ExitCode.REFUSED
    for text in ("328,768 parameters", "fsdp3 | tp: 6 7", "world.size", "fsdp2 tp2", "refused"):
        assert text in result.stdout
    assert run("fsdp4", "--world", "4").stdout.splitlines()[-1] == "legal"


def test_the_verb_needs_no_torch() -> None:
    code = "import sys; import shardwise.cli.check; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
