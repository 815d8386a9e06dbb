"""A module as the planner's MODEL: what is read of it, and what is said of one that cannot be read."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer import Typer
from typer.testing import CliRunner

from shardwise.cli.estimate import estimate
from shardwise.cli.explain import explain
from shardwise.cli.plan import plan
from shardwise.diagnose.read_module import planned_module
from shardwise.errors import ExitCode, ShardwiseError
from shardwise.plan.plan import Plan

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

class Placed(Net):
    def __init__(self):
        super().__init__()
        self.example_input_array = {"x": torch.zeros(2, 16, dtype=torch.long), "at": torch.arange(16)}
    def forward(self, x, at):
        return super().forward(x + 0 * at)

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

class Joined(Net):
    def forward(self, x):
        x = first = self.embed(x)
        for layer in self.layers:
            x = layer(x) + first
        return self.head(x)

class Alone(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(256, 64), nn.GRU(64, 64, batch_first=True), nn.Linear(64, 256)
    def forward(self, x):
        return self.head(self.rnn(self.embed(x))[0])

class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(256, 64), Block(), nn.Linear(64, 256)
    def forward(self, x):
        x = self.embed(x)
        for _ in range(3):
            x = self.cell(x)
        return self.head(x)

def llama():
    from transformers import LlamaConfig, LlamaForCausalLM
    sizes = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=4, vocab_size=256)
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes))

def frozen():
    return Net().requires_grad_(False)

def late():
    net = Net()
    for part in (net.embed, *net.layers[:2]):
        part.requires_grad_(False)
    return net

def leaves():
    raise SystemExit(0)

def nothing():
    return nn.Sequential(nn.ReLU())

def lazy():
    return nn.Sequential(nn.Embedding(8, 8), nn.LazyLinear(8))

def needs(size):
    return Net()

def fails():
    raise OSError("no disk")

def number():
    return 3

def lines():
    raise RuntimeError("the first line\\nthe second line")

def keyword(*, depth):
    return Net()

def rates():  # as timm has them
    net = Net()
    net.rates = [rate.item() for rate in torch.linspace(0, 0.1, 4)]
    return net

def drawn():
    net = Net()
    net.scale = net.head.weight.std().item()
    return net

CALLS = []

def counted():
    CALLS.append(1)
    print("counted", len(CALLS))
    return Speaks()

class Speaks(Net):
    def forward(self, x):
        print("forward")
        return super().forward(x)

def fed(example):
    net = Net()
    net.example_input_array = example
    return net

def text():
    return fed("ids")

def empty():
    return fed(())

def listed():
    return fed([torch.zeros(2, 32, dtype=torch.long)] * 2)

three = 3
print("imported")
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
    assert "trace" not in sent and summed(sent["traffic"]) == summed(answer["trace"][0]["collectives"])
    assert not any("--traffic" in note for note in sent["assumed"])


def summed(messages: list[dict[str, Any]]) -> dict[tuple[str, str], tuple[int, int]]:
    """(kind, axis) -> how many, and their bytes."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for each in messages:
        times, size = found.get((each["kind"], each["axis"]), (0, 0))
        more = each["bytes"] if "bytes" in each else each["times"] * each["num_bytes"]
        found[each["kind"], each["axis"]] = times + each["times"], size + more
    return found


def test_messages_that_are_not_predicted_are_traced_and_that_is_said(here: Path) -> None:
    code, text = of_plan(estimate, "tp2", "llama", "--traffic", "--trace")
    answer = json.loads(text)
    assert code == ExitCode.OK and summed(answer["traffic"]) == summed(answer["trace"][0]["collectives"])
    assert {(each["kind"], each["axis"]) for each in answer["traffic"]} >= {("all-reduce", "tp"), ("all-gather", "tp")}
    assert any(re.search(r"not predicted under this plan \(tp: .*lists its traced step", n) for n in answer["assumed"])


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


def test_what_has_not_the_rows_of_the_batch_is_said(here: Path) -> None:
    (said,) = planned_module("planned_net:Placed").notes
    assert said.startswith("a sample is one of the 2 rows of x; at of its example") and "once per micro-batch" in said
    assert planned_module("planned_net:Net").notes == ()


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
        ("planned_net:lazy", "1.weight has no size yet: its module is a lazy one"),
        ("planned_net:Wide", r"`linear` in .* failed on meta: .*sizes that go together"),
        ("planned_net:Ends", r"failed on meta: SystemExit: 7"),
        ("planned_net:Frames", "a sample of planned_net:Frames counts as 5000 tokens, always; leave --seq out"),
        ("planned_net:Selects", r"failed on meta.*--trace-on cpu.*shape \[1, 32\]"),
        ("planned_net:lines", "failed: RuntimeError: the first line; needed"),
        ("planned_net:keyword", r"it needs arguments \(depth\), and is called without"),
        ("planned_net:drawn", r"reads a random value: `item` at .*planned_net.py:\d+.*or pass a module instance"),
        ("planned_net:text", "its example_input_array holds no tensor, found str 'ids'; needed a tensor, a tuple"),
        ("planned_net:empty", r"its example_input_array holds no tensor, found tuple \(\)"),
        ("planned_net:listed", r"as many arguments as it is long, found 2, and forward takes \(x\).*\(\[\.\.\.\],\)"),
        ("planned_net.py:Net", "found the path of a file, .*; write planned_net:Net$"),
        ("some/planned_net.py:Net", "write some.planned_net:Net$"),
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


def test_what_the_users_code_prints_is_no_answer_and_a_factory_is_seldom_called(here: Path) -> None:
    app = Typer()
    app.command()(plan)
    sys.modules.pop("planned_net", None)
    result = CliRunner().invoke(app, ["planned_net:counted", "h100:8", "--seq", "32", "--json"])
    assert json.loads(result.stdout)["model"] == "planned_net:counted"
    assert {"imported", "forward", "counted 1", "counted 2"} == set(result.stderr.split("\n")) - {""}


def test_a_factory_may_read_values_that_apply_gives_it(here: Path) -> None:
    code, text, _ = invoke("planned_net:rates", "h100:8")
    assert code == ExitCode.OK, text


def test_a_sample_that_is_no_tokens_has_its_own_size(here: Path) -> None:
    app = Typer()
    app.command()(plan)
    words = ["planned_net:Frames", "h100:8", "--trace-on", "cpu", "--json"]
    answer = json.loads(CliRunner().invoke(app, words, env={"COLUMNS": "200"}).stdout)
    assert answer["seq_len"] == 5000 and not any("sequence length" in said for said in answer["assumed"])


def test_where_to_trace(here: Path) -> None:
    _, _, error = invoke("planned_net:Net", "h100:8", "--trace-on", "gpu")
    assert "needed meta (no memory) or cpu" in str(error)


def of_plan(verb: Callable[..., None], text: str, model: str, *more: str) -> tuple[int, str]:
    """Exit code, and what is said: of `estimate` or `explain`, on as many cores as the plan has ranks."""
    app = Typer()
    app.command()(verb)
    where = f"cpu:{Plan.parse(text).world}"
    words = [text, "--model", f"planned_net:{model}", "--cluster", where, "--seq", "32", "--global-batch", "32"]
    result = CliRunner().invoke(app, [*words, *more, "--json"], env={"COLUMNS": "200"})
    if isinstance(result.exception, ShardwiseError):
        return result.exception.exit_code, str(result.exception)
    return result.exit_code, result.stdout


CANNOT = [
    ("pp2 / 1f1b mb4", "Joined", r"\[module.left-out\] .*Joined cannot have pp; found: pp: module.chain, a forward"),
    ("cp2", "Net", r"Net cannot have cp; found: cp: module.no-positions, a forward that takes no positions"),
    ("tp2", "Net", r"Net cannot have tp; found: tp: tensor parallelism: no sharding recipe for this model"),
    ("fsdp2 ep2", "Net", r"Net cannot have ep; found: ep: module.no-experts, a model without expert modules"),
    ("fsdp2 / recompute=blocks / compile", "Alone", "Alone is one block, and so cannot have recompute, compile; found: "
     "recompute, compile: module.no-blocks.*without recompute, compile, or name its blocks with --blocks PATTERN"),
    ("pp2 / 1f1b mb4", "Alone", "blocks=1, stages = pp x stages per rank = 2 x 1.*is one block, and so cannot have pp"),
    ("pp8 / gpipe mb8", "Net", r"\[pp.layers\] .*found: blocks=4, .* 8 x 1; do: use at most 4 stages"),
    ("pp2 / interleaved mb4 vs3", "Net", r"\[pp.layers\] .*found: blocks=4, .* 2 x 3"),
    ("pp2 / 1f1b mb2", "late", r"\[pp.frozen\] pipeline rank 0 would hold .*nearest plan .*: `pp2 / interleaved mb2"),
    ("dp2", "frozen", r"frozen has no trainable parameter: found requires_grad=False on all 165,888; needed some"),
]  # fmt: skip


@pytest.mark.share(4)
@pytest.mark.parametrize("verb", [estimate, explain], ids=lambda verb: verb.__name__)
@pytest.mark.parametrize(("text", "model", "says"), CANNOT)
def test_what_a_module_cannot_have_is_refused(here: Path, verb: object, text: str, model: str, says: str) -> None:
    code, said = of_plan(verb, text, model)
    assert code == ExitCode.REFUSED and re.search(says, said, re.DOTALL), said


@pytest.mark.share(2)
@pytest.mark.parametrize("verb", [estimate, explain], ids=lambda verb: verb.__name__)
@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("pp4 / gpipe mb4", "Net"),
        ("pp2 / interleaved mb2", "late"),
        ("fsdp2 / recompute=blocks blocks=cell", "Cells"),  # the plan says what is a block
        ("tp2", "llama"),  # the planner leaves it out, and `apply` takes it
    ],
)
def test_what_a_module_can_have_is_not(here: Path, verb: object, text: str, model: str) -> None:
    code, said = of_plan(verb, text, model)
    assert code == ExitCode.OK, said
    if model == "llama" and verb is explain:
        reasons = {each["field"]: each["reason"] for each in json.loads(said)["decisions"]}
        assert "left out" not in reasons["batch.micro_batches"]


def test_no_neighbour_is_advertised_that_a_module_cannot_have(here: Path) -> None:
    _, said = of_plan(explain, "dp2", "Joined")
    _, found, _ = invoke("planned_net:Joined", "cpu:2", "--global-batch", "32")
    for text in (said, found):
        reasons = {each["field"]: each["reason"] for each in json.loads(text)["decisions"]}
        assert reasons["axes.pp"] == "pp2: left out: a forward that is not a chain of blocks (module.chain)"
        assert reasons["axes.tp"].startswith("tp2: left out: the sizes that it must divide are not known")


def test_what_does_not_train_gets_no_plan(here: Path) -> None:
    code, _, error = invoke("planned_net:frozen", "cpu:2", "--global-batch", "32")
    assert code != 0 and isinstance(error, ShardwiseError) and error.exit_code == ExitCode.REFUSED
    assert "frozen has no trainable parameter" in str(error)


def test_nobody_is_told_to_forbid_less_who_forbade_nothing(here: Path) -> None:
    _, _, error = invoke("planned_net:Joined", "cpu:3", "--global-batch", "32")
    assert "for a model without tp, ep, cp, pp; a global batch that every layout divides: 30 or 33" in str(error)
    assert "forbid" not in str(error)
