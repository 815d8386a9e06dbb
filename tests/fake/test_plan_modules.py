"""A module as the planner's MODEL: what is read of it, and what is said of one that cannot be read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

from shardwise.cli.estimate import estimate
from shardwise.cli.plan import plan
from shardwise.errors import ExitCode, ShardwiseError

MODULE = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 64), nn.Linear(64, 256)
        self.layers = nn.ModuleList(Block() for _ in range(4))
    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

class Looks(Net):
    def forward(self, x):
        return super().forward(x if x.sum().item() >= 0 else -x)

class Selects(Net):
    def forward(self, x):
        kept = x[x >= 0].view_as(x)
        return super().forward(kept)

class Frames(nn.Module):
    def __init__(self):
        super().__init__()
        self.out, self.example_input_array = nn.Linear(5000, 8), torch.zeros(4, 5000)
    def forward(self, x):
        return self.out(x * 2 if x.sum() > 1e9 else x)

class Ends(Net):
    def forward(self, x):
        raise SystemExit(7)

class Wide(Net):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(65, 256)

def leaves():
    raise SystemExit(0)

def nothing():
    return nn.Sequential(nn.ReLU())

def needs(size):
    return Net()

def fails():
    raise OSError("no disk")

def number():
    return 3

three = 3
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "planned_net.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def invoke(*words: str) -> tuple[int, str, BaseException | None]:
    app = Typer()
    app.command()(plan)
    result = CliRunner().invoke(app, [*words, "--seq", "32", "--json"], env={"COLUMNS": "200"})
    return result.exit_code, result.output, result.exception


def test_the_step_of_a_module_is_traced(here: Path) -> None:
    app = Typer()
    app.command()(estimate)
    words = [
        "pp2 / 1f1b mb2",
        "--model",
        "planned_net:Net",
        "--cluster",
        "cpu:2",
        "--seq",
        "32",
        "--global-batch",
        "64",
    ]
    result = CliRunner().invoke(app, [*words, "--trace", "--json"])
    answer = json.loads(result.stdout)
    peaks = [each["peak_bytes"] for each in answer["trace"]]
    assert result.exit_code == 0 and [each["rank"] for each in answer["trace"]] == [0, 1]
    assert answer["memory"]["allocated"] == pytest.approx(max(peaks), rel=0.03)
    assert {each["kind"] for each in answer["trace"][0]["collectives"]} >= {"send", "all-reduce"}
    sent = json.loads(CliRunner().invoke(app, [*words, "--traffic", "--json"]).stdout)
    assert sent["traffic"] == answer["trace"][0]["collectives"]
    assert any("--traffic shows what its traced step sends" in note for note in sent["assumed"])


def test_a_factory_a_class_and_a_config(here: Path) -> None:
    for name in ("planned_net:Net", "planned_net:Selects"):
        more = ("--trace-on", "cpu") if name.endswith("Selects") else ()
        code, text, _ = invoke(name, "h100:8", *more)
        assert code == ExitCode.OK, text
        assert any("no step of it runs without values" in said for said in json.loads(text)["assumed"]) == bool(more)
        assert json.loads(text)["parameters"] == 256 * 64 + 64 * 256 + 256 + 4 * (2 * 64 * 256 + 64 + 256 + 128)
    (here / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64}')
    code, text, _ = invoke("hf:config.json", "h100:8", "--out", "plan.toml")
    assert code == ExitCode.OK, text
    assert json.loads(text)["model"] == "hf:config.json"
    app = Typer()
    app.command()(estimate)
    again = json.loads(CliRunner().invoke(app, ["plan.toml", "--json"]).stdout)
    for key in ("plan", "memory", "time"):  # the file says for which model it is
        assert again[key] == json.loads(text)[key]


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("planned_net:Nat", "has no 'Nat'.*needed a function.*did you mean 'Net'"),
        ("planned_nat:Net", "ModuleNotFoundError.*needed package.module:function"),
        (":", "cannot be imported"),
        ("planned_net:needs", "the factory failed: TypeError.*'size'.*needs no argument"),
        ("planned_net:fails", "the factory failed: OSError: no disk"),
        ("planned_net:number", "returned int, needed a torch.nn.Module"),
        ("planned_net:three", "found int 3, needed a function"),
        ("planned_net:Looks", r"`item` in forward \(Looks\) failed on meta.*--trace-on cpu runs it for real"),
        ("planned_net:leaves", "the factory failed: SystemExit: 0"),
        ("planned_net:nothing", "returned Sequential without parameters, needed a torch.nn.Module to train"),
        ("planned_net:Wide", r"`linear` in .* failed on meta: .*sizes that go together"),
        ("planned_net:Ends", r"failed on meta: SystemExit: 7"),
        ("planned_net:Frames", "a sample of planned_net:Frames counts as 5000 tokens, always; leave --seq out"),
        ("planned_net:Selects", r"failed on meta.*--trace-on cpu.*shape \[1, 32\]"),
        ("hf:lama", "did you mean 'llama'"),
        ("hf:vit", "a sample of hf:vit counts as 3 tokens, always; leave --seq out"),
        ("hf:clap", "ClapModel takes input_ids.*write a function that builds ClapModel"),
        ("hf:missing/config.json", "no such file"),
    ],
)
def test_modules_that_cannot_be_read(here: Path, model: str, says: str) -> None:
    code, _, error = invoke(model, "h100:8")
    assert code != 0
    assert isinstance(error, ShardwiseError)
    assert re.search(says, str(error), re.DOTALL), str(error)


def test_a_sample_that_is_no_tokens_has_its_own_size(here: Path) -> None:
    app = Typer()
    app.command()(plan)
    words = ["planned_net:Frames", "h100:8", "--trace-on", "cpu", "--json"]
    answer = json.loads(CliRunner().invoke(app, words, env={"COLUMNS": "200"}).stdout)
    assert answer["seq_len"] == 5000 and not any("sequence length" in said for said in answer["assumed"])


def test_where_to_trace(here: Path) -> None:
    _, _, error = invoke("planned_net:Net", "h100:8", "--trace-on", "gpu")
    assert "needed meta (no memory) or cpu" in str(error)
