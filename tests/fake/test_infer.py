from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch
import typer
from torch import nn
from typer.testing import CliRunner

from shardwise.cli.rules import rules
from shardwise.errors import ConfigError, ExitCode, ModelError, UsageError
from shardwise.model.infer import Inferred, infer_rules
from shardwise.model.infer.flow import EndsSplitError, Split, reshaped
from shardwise.model.infer.torch_private import TorchDispatchMode
from shardwise.model.recipes import recipe_for
from shardwise.model.rules_file import load_rules
from shardwise.models.decoder import Decoder, DecoderConfig
from shardwise.models.gpt import GPT, GPTConfig
from shardwise.parallel.compose import apply
from shardwise.parallel.mesh import open_mesh
from shardwise.plan.plan import Plan
from tests.parity.inferred_models import TRIALS

DECODER = functools.partial(Decoder, DecoderConfig(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=48))
GPT_ = functools.partial(GPT, GPTConfig(dim=32, num_layers=2, num_heads=4))
NORMED = functools.partial(Decoder, DecoderConfig(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, qk_norm=True))
app = typer.Typer()
app.command()(rules)


@functools.cache
def inferred(name: str) -> Inferred:
    trial = TRIALS[name]
    return infer_rules(trial.factory, [torch.empty(trial.shape, dtype=getattr(torch, trial.dtype))])


def styles(name: str) -> dict[str, str]:
    return inferred(name).rules


@pytest.mark.parametrize("factory", [DECODER, GPT_, NORMED])
def test_the_reference_models_get_the_rules_of_their_recipes(factory: functools.partial[nn.Module]) -> None:
    module = factory()
    found = infer_rules(factory)
    by_hand = recipe_for([name for name, _ in module.named_modules()])
    assert found.rules == {p: by_hand[p] for p in found.rules}
    assert set(by_hand) - set(found.rules) <= {"layers.*.attn.q_norm", "layers.*.attn.k_norm"}  # identities
    assert found.no_sequence == ""


def test_the_number_that_a_degree_must_divide() -> None:
    assert infer_rules(DECODER).tp_divides == 2  # key and value heads
    assert infer_rules(GPT_).tp_divides == 4
    four = functools.partial(Decoder, DecoderConfig(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=48))
    found = infer_rules(four, degree=4)
    assert found.tp_divides % 4 == 0
    assert found.rules["layers.*.attn.wq"] != "column"
    assert found.rules["layers.*.ffn.w1"] == "column"


def test_attention_by_hand_with_a_gate_and_norms_on_heads() -> None:
    found = styles("plain")
    assert {found[f"tower.*.look.{name}"] for name in ("a", "b", "c", "gate")} == {"column"}
    assert found["tower.*.look.out"] == "row"
    assert found["tower.*.look.even"] == "heads"
    assert (found["tower.*.think.steps.0"], found["tower.*.think.steps.3"]) == ("column", "row")
    assert (found["dictionary"], found["answer"], found["tower.*"]) == ("vocab", "head", "sequence")


def test_fused_projections_are_gathered() -> None:
    found = styles("fused")
    assert {found["tower.*.r.three"], found["tower.*.s.both"]} == {"column-gather"}
    assert {found["tower.*.r.out"], found["tower.*.s.down"]} == {"row"}


def test_code_that_counts_its_heads_is_seen() -> None:
    assert {styles("counting")[f"tower.*.look.l{i}"] for i in (1, 2, 3)} == {"column-gather"}


def test_heads_that_meet_a_whole_tensor_stay_whole() -> None:
    assert {styles("sloped")[f"tower.*.look.l{i}"] for i in (1, 2, 3, 4)} == {"replicate"}


class Weighed(nn.Module):
    """Features times a number of their own row: a rank with a part of them has a part of that number's gradient."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.inside = kind, nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("table", torch.ones(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inside(x)
        number = {"norm": x.norm(dim=-1, keepdim=True), "sum": x.sum(-1, keepdim=True), "buffer": self.table}[self.kind]
        return x + self.down(self.up(x) * number)


@pytest.mark.parametrize(("kind", "split"), [("norm", False), ("sum", False), ("buffer", True)])
def test_what_meets_a_whole_tensor_with_a_gradient_stays_whole(kind: str, split: bool) -> None:
    found = infer_rules(lambda: Weighed(kind), [torch.empty(2, 8, 8)])
    assert (found.rules["up"] == "column") == split
    assert split or any("whose gradient would be a part" in row.reason for row in found.rows)


def test_layers_that_mix_places_are_split_too() -> None:
    found = styles("mixer")
    assert (found["floors.*.places.0"], found["floors.*.places.2"]) == ("column", "row")


def test_a_convolution_and_places_stay_whole() -> None:
    found = styles("picture")
    assert (found["cut"], found[""], found["name"]) == ("replicate", "replicate", "replicate")


def test_every_row_has_a_reason() -> None:
    assert all(row.reason for name in TRIALS for row in inferred(name).rows)


class Pooled(nn.Module):
    """A gate from the mean over all tokens: right on whole sequences only."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x * self.gate(x.mean(1, keepdim=True)).sigmoid())


class Tower(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_a_mean_over_tokens_refuses_sequence_shards() -> None:
    found = infer_rules(functools.partial(Tower, Pooled), [torch.empty(2, 4, 8)])
    assert "`mean` runs over the dim that would be split, in blocks.0" in found.no_sequence
    assert found.rules["blocks.*.gate"] == "replicate"
    assert found.rules["blocks.*.mlp.0"] == "column"


class Borrows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.words(ids) @ self.words.weight.T


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) if x.sum() > 0 else self.b(x)


@pytest.mark.parametrize(
    ("factory", "args", "message"),
    [
        (Borrows, None, r"Borrows: the forward of the model uses words.weight itself.*belongs to words"),
        (Reads, None, r"Reads: its forward failed without data in the model itself.*does not depend on the values"),
        (DECODER, [torch.empty(2, 4)], r"Decoder: its forward failed without data in embed.*--sample 2x16"),
        (nn.ReLU, None, r"ReLU: found no embedding, linear or convolution.*--sample"),
    ],
)
def test_what_cannot_be_inferred_says_why(factory: object, args: list[torch.Tensor] | None, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        infer_rules(factory, args)  # type: ignore[arg-type]


def test_a_module_is_not_changed() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).train()
    before = {name: p.clone() for name, p in module.named_parameters()}
    assert infer_rules(module, [torch.empty(2, 4)]).rules == {"0": "column", "2": "row"}
    assert module.training and not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())


@pytest.mark.parametrize(
    ("split", "old", "new", "result"),
    [
        (Split(2, 1, 32, 1), (2, 6, 32), (2, 6, 8, 4), Split(2, 1, 8, 4 // 4)),
        (Split(2, 1, 8, 1), (2, 6, 8, 4), (2, 6, 32), Split(2, 1, 8, 4)),
        (Split(1, 1, 8, 1), (2, 8, 6, 4), (16, 6, 4), Split(0, 2, 8, 1)),
        (Split(0, 2, 8, 1), (16, 6, 4), (2, 8, 6, 4), Split(1, 1, 8, 1)),
        (Split(1, 1, 2, 1), (3, 2, 1, 5), (3, 2, 5), Split(1, 1, 2, 1)),
        (Split(2, 1, 12, 1), (2, 6, 12), (2, 6, 3, 4), Split(2, 1, 3, 1)),
    ],
)
def test_reshapes_keep_a_split_in_its_place(
    split: Split, old: tuple[int, ...], new: tuple[int, ...], result: Split
) -> None:
    assert reshaped(split, old, new) == result


def test_a_reshape_across_a_split_ends_it() -> None:
    with pytest.raises(EndsSplitError, match="cuts across"):
        reshaped(Split(1, 1, 4, 1), (2, 4, 3), (3, 8))


def test_the_private_name_of_torch_still_sees_operations() -> None:
    seen = []

    class Mode(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Mode():
        torch.ones(2) * 2
    assert seen == ["ones", "mul"]


# ---------------------------------------------------------------- the verb


def test_the_verb_prints_a_table() -> None:
    result = CliRunner().invoke(app, ["tiny"], env={"COLUMNS": "160"})
    assert result.exit_code == ExitCode.OK
    assert "layers.*.attn.wq" in result.stdout and "its heads stay split until wo" in result.stdout
    assert "not compared with one process" in result.stdout


@pytest.mark.parametrize("model", ["mistralai/Mistral-7B-Instruct-v0.1", "sizes.toml"])
def test_the_verb_takes_what_plan_takes(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sizes.toml").write_text('preset = "tiny"\nnum_layers = 2\n', encoding="utf-8")
    result = CliRunner().invoke(app, [model, "--json"])
    assert {"pattern": "embed", "style": "vocab"}.items() <= json.loads(result.stdout)["rules"][0].items()


def test_the_verb_for_programs() -> None:
    result = CliRunner().invoke(app, ["tests.parity.inferred_models:Chain", "--sample", "4x12:float32", "--json"])
    answer = json.loads(result.stdout)
    assert answer["rules"][1] == {"pattern": "all.1", "style": "row", "reason": "takes the features that 0 split"}
    assert answer["verified"] is None and answer["tp_divides"] == 16


def test_a_file_of_unverified_rules_has_to_be_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    refused = CliRunner().invoke(app, ["tiny", "--out", str(path)]).exception
    assert isinstance(refused, UsageError) and "--verify tp2, or --unverified" in str(refused)
    assert CliRunner().invoke(app, ["tiny", "--out", str(path), "--unverified"]).exit_code == ExitCode.OK
    assert load_rules(path, unverified=True)["embed"] == "vocab"
    with pytest.raises(ConfigError, match="not verified"):
        load_rules(path)
    with open_mesh(Plan()) as mesh, pytest.raises(ConfigError, match="not verified"):
        apply(DECODER, Plan(), mesh, rules=path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lama-8b"], "pkg.module:factory.*unknown preset; did you mean 'llama-8b'"),
        (["no.such.module:f"], "no.such.module:f.*cannot be imported.*needed package.module:function"),
        (["tests.parity.inferred_models:Chian"], "did you mean 'Chain'"),
        (["tests.parity.inferred_models:Language"], r"needs arguments \(block\)"),
        (["tiny", "--sample", "2,16"], "found no shape; needed sizes joined by x"),
        (["tiny", "--verify", "dp2"], "rules speak of the tp axis"),
    ],
)
def test_usage_errors(words: list[str], message: str) -> None:
    error = CliRunner().invoke(app, words).exception
    assert isinstance(error, UsageError)
    with pytest.raises(UsageError, match=message):
        raise error


class Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.scale = self.up.weight.detach().norm().item()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x)) / self.scale


def test_a_constructor_that_reads_values_is_told_to_give_a_module() -> None:
    """It was an error of torch's, from deep inside."""
    with pytest.raises(
        ModelError, match=r"the constructor reads the values of tensors .*infer_rules\(Net\(\), sample\)"
    ):
        infer_rules(Reading, [torch.empty(2, 4)])
    assert infer_rules(Reading(), [torch.empty(2, 4)]).rules["up"] == "column"
